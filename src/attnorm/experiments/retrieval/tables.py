"""Results as tables for programs: one row per training, test and size, and one on the scale of the logits."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from attnorm.experiments.retrieval.lines import Line, Scale
from attnorm.training.retrieval.summary import Mean


def accuracy_table(lines: Sequence[Line]) -> pa.Table:
    return pa.Table.from_pylist([_accuracy(line) for line in lines])


def scale_table(scales: Sequence[Scale]) -> pa.Table:
    return pa.Table.from_pylist(
        [
            {
                "section": scale.training.section,
                "label": scale.training.label,
                "normalizer": scale.training.normalizer,
                "size": scale.size,
                "slope": scale.slope,
                "class_leak": scale.leak,
                "margin_delivered": scale.delivered,
                "margin_needed": scale.needed,
                "class_noise": scale.class_noise,
                "logits_right": scale.logits_right,
                "logits_right_predicted": scale.predicted_right,
            }
            for scale in scales
        ]
    )


def _accuracy(line: Line) -> dict[str, Any]:
    row, difference = line.row, line.difference
    return {
        "section": line.section,
        "label": line.label,
        "task": line.training.task,
        "normalizer": row.normalizer,
        "tested_with": row.tested_with,
        "size": row.size,
        "seeds": row.seeds,
        "sets": row.sets,
        "accuracy": row.accuracy.value,
        "half_width_95": row.accuracy.half_width,
        "logits_wrong": _value(row.logits_wrong),
        "dispersed": _value(row.dispersed),
        "winner_weight": _value(row.winner_weight),
        "class_leak": _value(row.leak),
        "difference": difference and difference.mean.value,
        "difference_half_width_95": difference and difference.mean.half_width,
        "p_paired_t": difference and difference.p,
        "p_holm": difference and difference.p_holm,
    }


def _value(mean: Mean | None) -> float | None:
    return None if mean is None else mean.value
