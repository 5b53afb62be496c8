"""The numbers behind figures and findings: a line per training, test and size, compared with softmax; and tables.

Comparisons are paired by seed: every seed has the same data and initial weights under all normalizers. Paired t-tests,
as in the paper; since many normalizers are compared, p is also given after Holm's correction over all rows of a size
(https://www.jstor.org/stable/4615733). What a normalizer changes in training is separated from how it reads the logits
by tests in which both sides are read with hard attention (`read_hard`).

The best of n uniform priorities and the next are 1/(n + 1) apart on average. If the class of an item moves its logit by
more than that, its leak, the largest logit is not the right item's, and no normalizer can repair it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow as pa

from attnorm_lab.experiments.experiment import compare_over_seeds
from attnorm_lab.experiments.retrieval.plan import (
    BASELINE,
    PAPERS_RECIPE,
    Section,
    Training,
    TrainingRecords,
)
from attnorm_lab.training.retrieval.data import CLASSES
from attnorm_lab.training.retrieval.evaluate import OWN, Mean, Record, RetrievalRow, mean_of, summarize

DRAWS = 40_000


Key = tuple[str, str]  # normalizer as labeled, tested with


@dataclass(frozen=True)
class PairedDifference:
    """Accuracy minus that of softmax, mean over seeds with 95 % confidence, and the paired t-test of no difference."""

    mean: Mean
    p: float
    p_holm: float


@dataclass(frozen=True)
class RetrievalLine:
    training: Training
    row: RetrievalRow
    difference: PairedDifference | None  # to softmax as trained, or to the paper's recipe; None for these themselves

    @property
    def section(self) -> Section:
        return self.training.section

    @property
    def label(self) -> str:
        return self.training.label

    @property
    def accuracy(self) -> float:
        return self.row.accuracy.value


@dataclass(frozen=True)
class Scale:
    """The scale of the logits of a training, and how often the largest is the right item's; means over seeds."""

    training: Training
    size: int
    slope: float  # over priorities from 0.9 to 1, whatever the size
    leak: float
    logits_right: float
    predicted_right: float | None  # by the leak alone


def lines_of(entries: Sequence[TrainingRecords]) -> list[RetrievalLine]:
    """Return the lines in the order of the trainings; differences are within a section, which shares task and data."""
    lines = []
    for section in dict.fromkeys(entry.training.section for entry in entries):
        members = [entry for entry in entries if entry.training.section == section]
        first = next((entry for entry in members if entry.training.label in (BASELINE, PAPERS_RECIPE)), None)
        others: dict[Key, Sequence[Record]] = {
            (entry.training.label, name): entry.tested_with(name)
            for entry in members
            for name in entry.training.trials.names
            if is_in_tables(entry.training, name) and (entry is not first or name != OWN)
        }
        sizes = sorted({record["size"] for entry in members for record in entry.records})
        differences = compare_with(first.tested_with(OWN), others, sizes) if first else {}
        for entry in members:
            for row in summarize(entry.records):
                key = (entry.training.label, row.tested_with)
                lines.append(RetrievalLine(entry.training, row, differences.get((key, row.size))))
    return lines


def is_in_tables(training: Training, tested_with: str) -> bool:
    """Return whether a row is shown in a table: each normalizer as trained, and softmax in all tests."""
    if training.section == "parts":
        return tested_with in (OWN, "hard")
    return tested_with == OWN or training.label == BASELINE or training.section == "steps"


def scales_of(entries: Iterable[TrainingRecords]) -> list[Scale]:
    """Return the scales of trainings whose logits rise with the priority in every seed."""
    scales = []
    for entry in entries:
        own = entry.tested_with(OWN)
        slope, leak = mean_of(own, "slope"), mean_of(own, "leak")
        if slope is None or leak is None:
            continue
        for size in sorted({record["size"] for record in own}):
            at_size = [record for record in own if record["size"] == size]
            known = _leak_holds_at_top(at_size)
            scales.append(
                Scale(
                    training=entry.training,
                    size=size,
                    slope=slope.value,
                    leak=leak.value,
                    logits_right=fmean(record["logits_right"] for record in at_size),
                    predicted_right=fmean(predicted_right(_leak_at_top(record), size) for record in at_size)
                    if known
                    else None,
                )
            )
    return scales


def _leak_at_top(record: Record) -> float:
    """Return the leak among the best items; over [0.9, 1] if the record has no other."""
    known = record.get("slope_at_top") is not None and record.get("leak_at_top") is not None
    return float(record["leak_at_top" if known else "leak"])


def _leak_holds_at_top(records: Sequence[Record]) -> bool:
    """Return whether the leak is known among the best items: training on squeezed sets makes it smaller near 1."""
    return all(record.get("leak_at_top") is not None or not record.get("squeezed", 0) for record in records)


def compare_with(
    baseline: Sequence[Record], others: Mapping[Key, Sequence[Record]], sizes: Sequence[int]
) -> dict[tuple[Key, int], PairedDifference]:
    """Compare by row and size; rows or sizes with fewer than two common seeds are omitted."""
    by_row_and_size: dict[tuple[Key, int], PairedDifference] = {}
    for size in sizes:
        base = _by_seed(baseline, size)
        tests = compare_over_seeds({key: (_by_seed(records, size), base) for key, records in others.items()})
        for key, (test, p_holm) in tests.items():
            by_row_and_size[key, size] = PairedDifference(Mean(test.value, (test.high - test.low) / 2), test.p, p_holm)
    return by_row_and_size


def read_hard(entries: Sequence[TrainingRecords]) -> pa.Table:
    """Return what each training changes in the logits: hard attention on both sides, so only their order counts."""
    rows: list[dict[str, Any]] = []
    for section in dict.fromkeys(entry.training.section for entry in entries):
        hard = {
            entry.training.label: records
            for entry in entries
            if entry.training.section == section and (records := entry.tested_with("hard"))
        }
        baseline = hard.pop(BASELINE, None)
        if baseline is None:
            continue
        sizes = sorted({record["size"] for record in baseline})
        others: dict[Key, Sequence[Record]] = {(label, "hard"): records for label, records in hard.items()}
        for ((label, _), size), difference in compare_with(baseline, others, sizes).items():
            accuracy, of_softmax = (fmean(_by_seed(records, size).values()) for records in (hard[label], baseline))
            rows.append(
                {
                    "section": section, "label": label, "size": size, "accuracy": accuracy, "softmax": of_softmax,
                    "difference": difference.mean.value, "difference_half_width_95": difference.mean.half_width,
                    "p_paired_t": difference.p, "p_holm": difference.p_holm,
                }
            )  # fmt: skip
    return pa.Table.from_pylist(rows)


def _by_seed(records: Sequence[Record], size: int) -> dict[int, float]:
    return {record["seed"]: record["accuracy"] for record in records if record["size"] == size}


def predicted_right(leak: float, size: int) -> float:
    """Return the share of sets whose largest logit is the right item's, if only a constant per class disturbs them.

    Only the best item of each class can win, and these lie independently Exp(1) * 10 / (n + 1) below 1. So the share
    depends on leak * (n + 1) only. Estimated from 40,000 draws, to within half a percent.
    """
    x = leak * (size + 1)
    below, offset = _draws()
    return float((below.argmin(-1) == (below - x * offset).argmin(-1)).mean())


@cache
def _draws() -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.float64]], ...]:
    generator = np.random.default_rng(0)
    return (generator.exponential(CLASSES, (DRAWS, CLASSES)), generator.standard_normal((DRAWS, CLASSES)))


def accuracy_table(lines: Sequence[RetrievalLine]) -> pa.Table:
    return pa.Table.from_pylist([_accuracy_row(line) for line in lines])


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
                "logits_right": scale.logits_right,
                "logits_right_predicted": scale.predicted_right,
            }
            for scale in scales
        ]
    )


def _accuracy_row(line: RetrievalLine) -> dict[str, Any]:
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
