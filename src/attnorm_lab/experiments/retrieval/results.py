"""The numbers behind figures and findings: a line per training, test and size, compared with softmax; and tables.

Comparisons are paired by seed: every seed has the same data and initial weights under all normalizers. Paired t-tests,
as in the paper; since many normalizers are compared, p is also given after Holm's correction over all rows of a size
(https://www.jstor.org/stable/4615733). What a normalizer changes in training is separated from how it reads the logits
by tests in which both sides are read with hard attention (`read_hard`).

Margins: the best of n uniform priorities and the next are 1/(n + 1) apart on average. A model whose logit rises by
`slope` per unit of priority delivers a margin of slope / (n + 1), which falls with n. Two things can go wrong:

- the margin is smaller than the normalizer needs to give the winner half of the weight: the output is dispersed;
- it is smaller than what the class adds to the logit: then the largest logit is not the right item's, and no normalizer
  can repair it.

Tables are Arrow (one row per training, test and size; the scale of the logits) and Markdown.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from attnorm.arithmetic import SIGNIFICANT, difference_over_seeds, holm
from attnorm.normalizers.contract import Normalizer
from attnorm.text import markdown_table
from attnorm_lab.experiments.retrieval.plan import (
    BASELINE,
    PAPERS_RECIPE,
    PRINTED_ADAPTIVE,
    PRINTED_SOFTMAX,
    SECTIONS,
    Section,
    Training,
    TrainingRecords,
)
from attnorm_lab.training.retrieval.data import CLASSES
from attnorm_lab.training.retrieval.evaluate import OWN, Mean, Record, RetrievalRow, mean_of, summarize
from attnorm_lab.training.retrieval.model import normalizer_for

HALF = 0.5  # of the weight
LARGEST_MARGIN = 1e3
DRAWS = 40_000

MARKS = (
    "% right, mean over {seeds} seeds ± 95 % confidence. ▲ ▼: differs from the first of our rows in a paired t-test, "
    "p < 0.05 after Holm's correction over the rows at that size."
)

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
    """The margin that the logits of a training deliver at a size, mean over seeds, and the margin that is needed."""

    training: Training
    size: int
    slope: float  # over priorities from 0.9 to 1, whatever the size
    leak: float
    delivered: float  # margin between the two best, in logits
    needed: float | None  # for half of the weight; None where no margin alone decides
    class_noise: float | None  # standard deviation of the logit over the classes, among the best
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
        learned = _mean_learned(own)
        for size in sorted({record["size"] for record in own}):
            at_size = [record for record in own if record["size"] == size]
            tops = [_slope_and_leak_at_top(record) for record in at_size]
            known = _leak_holds_at_top(at_size)
            scales.append(
                Scale(
                    training=entry.training,
                    size=size,
                    slope=slope.value,
                    leak=leak.value,
                    delivered=fmean(delivered_margin(rise, size) for rise, _ in tops),
                    needed=needed_margin(entry.training.normalizer, size, learned),
                    class_noise=fmean(rise * moved for rise, moved in tops) if known else None,
                    logits_right=fmean(record["logits_right"] for record in at_size),
                    predicted_right=fmean(predicted_right(moved, size) for _, moved in tops) if known else None,
                )
            )
    return scales


def _slope_and_leak_at_top(record: Record) -> tuple[float, float]:
    """Return slope and leak among the best items; over [0.9, 1] if the record has no others."""
    slope, leak = record.get("slope_at_top"), record.get("leak_at_top")
    return (slope, leak) if slope is not None and leak is not None else (record["slope"], record["leak"])


def _leak_holds_at_top(records: Sequence[Record]) -> bool:
    """Return whether the leak is known among the best items: training on squeezed sets makes it smaller near 1."""
    return all(record.get("leak_at_top") is not None or not record.get("squeezed", 0) for record in records)


def _mean_learned(records: Sequence[Record]) -> dict[str, float]:
    names = records[0].get("learned", {})
    return {name: fmean(record["learned"][name] for record in records) for name in names}


def compare_with(
    baseline: Sequence[Record], others: Mapping[Key, Sequence[Record]], sizes: Sequence[int]
) -> dict[tuple[Key, int], PairedDifference]:
    """Compare by row and size; rows or sizes with fewer than two common seeds are omitted."""
    by_row_and_size: dict[tuple[Key, int], PairedDifference] = {}
    for size in sizes:
        base = _by_seed(baseline, size)
        tests = {
            key: test
            for key, records in others.items()
            if (test := difference_over_seeds(_by_seed(records, size), base)) is not None
        }
        corrected = holm([test.p for test in tests.values()])
        for (key, test), p_holm in zip(tests.items(), corrected, strict=True):
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


def delivered_margin(slope: float, size: int) -> float:
    """Return the margin between the two largest logits, at the mean gap of the two best priorities."""
    return slope / (size + 1)


def needed_margin(normalizer: str, size: int, learned: Mapping[str, float] | None = None) -> float | None:
    """Return the margin m for which the first of the row 0, -m, -2m, ... gets half of the weight.

    For softmax it is log 2 = 0.69 at any size. None if the normalizer is not shift invariant or its weights do not sum
    to 1, since then no margin alone decides, or if no margin is enough. 0 if any margin is enough.

    Args:
        learned: Values of the normalizer's parameters by name (default: the initial values).
    """
    return _needed_margin(normalizer, size, tuple(sorted((learned or {}).items())))


@cache
def _needed_margin(normalizer: str, size: int, learned: tuple[tuple[str, float], ...]) -> float | None:
    module = normalizer_for(normalizer, 1)
    if not module.properties.shift_invariant or module.properties.row_sum != "one":
        return None
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.fill_(dict(learned).get(name, parameter.item()))
    row = -torch.arange(size, dtype=torch.float64)
    low, high = math.log(1 / LARGEST_MARGIN), math.log(LARGEST_MARGIN)
    if _first_weight(module, row * LARGEST_MARGIN) < HALF:
        return None
    if _first_weight(module, row / LARGEST_MARGIN) >= HALF:
        return 0.0
    for _ in range(20):  # to a relative 1e-5
        middle = (low + high) / 2
        if _first_weight(module, row * math.exp(middle)) < HALF:
            low = middle
        else:
            high = middle
    return math.exp(high)


@torch.no_grad()
def _first_weight(normalizer: Normalizer, row: torch.Tensor) -> float:
    weights: torch.Tensor = normalizer(row[None, None, None])
    return float(weights[..., 0])


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
    shown = [line for line in lines if is_in_tables(line.training, line.row.tested_with)]
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
    if difference is not None and difference.p_holm < SIGNIFICANT:
        mark = " ▲" if difference.mean.value > 0 else " ▼"
    return percent(line.row.accuracy) + mark


def percent(mean: Mean) -> str:
    return f"{100 * mean.value:.1f}" + ("" if mean.half_width is None else f" ± {100 * mean.half_width:.1f}")


def _sizes(lines: Sequence[RetrievalLine]) -> list[int]:
    return sorted({line.row.size for line in lines})


def _heading(text: str) -> str:
    return f"### {text[0].upper()}{text[1:]}"


def _by_size(names: list[str], rows: Sequence[tuple[list[str], dict[int, str]]], sizes: Sequence[int]) -> str:
    lines = [[*first, *(cells.get(size, "-") for size in sizes)] for first, cells in rows]
    return markdown_table([*names, *(f"{size:,}" for size in sizes)], lines, left=len(names))
