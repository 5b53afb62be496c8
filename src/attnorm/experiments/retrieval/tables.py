"""Results as Arrow tables (one row per training, test and size; the scale of the logits) and as Markdown."""

from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from attnorm.experiments.retrieval.lines import RetrievalLine, Scale, compared
from attnorm.experiments.retrieval.plan import PRINTED_ADAPTIVE, PRINTED_SOFTMAX, SECTIONS, Section
from attnorm.training.retrieval.evaluate import OWN, Mean

ALPHA = 0.05
MARKS = (
    "% right, mean over {seeds} seeds ± 95 % confidence. ▲ ▼: differs from the first of our rows in a paired t-test, "
    "p < 0.05 after Holm's correction over the rows at that size."
)


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
                "margin_delivered": scale.delivered,
                "margin_needed": scale.needed,
                "class_noise": scale.class_noise,
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


def fragments(lines: Sequence[RetrievalLine], scales: Sequence[Scale]) -> dict[str, str]:
    """Return the Markdown tables by file stem."""
    texts: dict[str, str] = {}
    for section in dict.fromkeys(line.section for line in lines):
        section_lines = [line for line in lines if line.section == section]
        texts[section] = _section(section, section_lines)
        own_lines = [line for line in section_lines if line.row.tested_with == OWN and line.row.dispersed is not None]
        if own_lines:
            texts[f"{section}-errors"] = _errors_section(section, own_lines)
        ranked = [scale for scale in scales if scale.training.section == section]
        if ranked:
            texts[f"{section}-scale"] = _scales_section(section, ranked)
    return texts


def _section(section: Section, lines: Sequence[RetrievalLine]) -> str:
    rows = _printed_rows() if section == "paper" else []
    shown = [line for line in lines if compared(line.training, line.row.tested_with)]
    for label, tested_with in dict.fromkeys((line.label, line.row.tested_with) for line in shown):
        cells = {
            line.row.size: _cell(line) for line in lines if (line.label, line.row.tested_with) == (label, tested_with)
        }
        rows.append(([label, "" if tested_with == OWN else tested_with], cells))
    seeds = max(line.row.seeds for line in lines)
    table = _by_size(["trained with" if section != "parts" else "recipe", "tested with"], rows, _sizes(lines))
    return f"{_heading(SECTIONS[section])}\n\n{table}\n\n{MARKS.format(seeds=seeds)}\n"


def _printed_rows() -> list[tuple[list[str], dict[int, str]]]:
    names = (("softmax", ""), ("softmax", "adaptive_temperature"))
    return [
        ([f"*{trained}, as printed*", tested], {size: f"*{value}*" for size, value in numbers.items()})
        for (trained, tested), numbers in zip(names, (PRINTED_SOFTMAX, PRINTED_ADAPTIVE), strict=True)
    ]


def _errors_section(section: Section, lines: Sequence[RetrievalLine]) -> str:
    def cell(line: RetrievalLine) -> str:
        assert line.row.logits_wrong is not None
        assert line.row.dispersed is not None
        return f"{100 * line.row.logits_wrong.value:.1f} + {100 * line.row.dispersed.value:.1f}"

    rows = [
        ([label], {line.row.size: cell(line) for line in lines if line.label == label})
        for label in dict.fromkeys(line.label for line in lines)
    ]
    heading = _heading(f"What the errors are: {SECTIONS[section]}")
    table = _by_size(["trained with"], rows, _sizes(lines))
    caption = "Errors in %: logits wrong (the largest is not the right item's) + dispersed (it is, the answer is not)."
    return f"{heading}\n\n{table}\n\n{caption}\n"


def _scales_section(section: Section, scales: Sequence[Scale]) -> str:
    def rows(cell: Callable[[Scale], str]) -> dict[str, dict[int, str]]:
        by_label: dict[str, dict[int, str]] = {}
        for scale in scales:
            by_label.setdefault(scale.training.label, {})[scale.size] = cell(scale)
        return by_label

    margins = rows(
        lambda s: f"{_format_number(s.delivered)} / {_format_number(s.needed)} / {_format_number(s.class_noise)}"
    )
    rights = rows(lambda s: f"{100 * s.logits_right:.0f} / {_format_percent(s.predicted_right)}")
    first = {scale.training.label: scale for scale in scales}
    sizes = sorted({scale.size for scale in scales})
    about = {label: [label, f"{s.slope:,.0f}", f"{s.leak:.1e}"] for label, s in first.items()}
    head = ["trained with", "slope", "class leak"]
    tables = (
        _by_size(head, [(about[label], cells) for label, cells in margins.items()], sizes),
        _by_size(["trained with"], [([label], cells) for label, cells in rights.items()], sizes),
    )
    margin_caption = (
        "Slope of the logit in the priority and class leak in units of priority, from 0.9 to 1. By size, in logits: "
        "margin between the two best that is delivered / needed for half of the weight (-: no margin alone decides) / "
        "moved by the class (one standard deviation; a margin below it is a guess; -: not measured among the best)."
    )
    right_caption = (
        "Sets whose largest logit is the right item's, in %: measured / predicted from the class leak alone."
    )
    parts = "\n\n".join(
        f"{table}\n\n{line}" for table, line in zip(tables, (margin_caption, right_caption), strict=True)
    )
    return f"{_heading('The scale of the logits: ' + SECTIONS[section])}\n\n{parts}\n"


def _format_percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}"


def _format_number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _cell(line: RetrievalLine) -> str:
    difference = line.difference
    mark = ""
    if difference is not None and difference.p_holm < ALPHA:
        mark = " ▲" if difference.mean.value > 0 else " ▼"
    return percent(line.row.accuracy) + mark


def percent(mean: Mean) -> str:
    return f"{100 * mean.value:.1f}" + ("" if mean.half_width is None else f" ± {100 * mean.half_width:.1f}")


def _sizes(lines: Sequence[RetrievalLine]) -> list[int]:
    return sorted({line.row.size for line in lines})


def _heading(text: str) -> str:
    return f"### {text[0].upper()}{text[1:]}"


def _by_size(names: list[str], rows: Sequence[tuple[list[str], dict[int, str]]], sizes: Sequence[int]) -> str:
    head = f"| {' | '.join([*names, *(f'{size:,}' for size in sizes)])} |"
    rule = f"|{'---|' * len(names)}{'---:|' * len(sizes)}"
    body = [f"| {' | '.join([*first, *(cells.get(size, '-') for size in sizes)])} |" for first, cells in rows]
    return "\n".join([head, rule, *body])
