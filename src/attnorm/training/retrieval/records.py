"""Results of the tests: one JSONL record per normalizer, seed, size and test normalizer, and their means over seeds."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table

from attnorm.training.retrieval.data import find_task

RECORDS = "records.jsonl"

Record = dict[str, Any]


CONFIDENCE = 0.95


@dataclass(frozen=True)
class Mean:
    """Mean over independent seeds with its 95 % confidence interval, `value` +- `half_width` (Student's t)."""

    value: float
    half_width: float | None  # None for a single seed


@dataclass(frozen=True)
class RetrievalRow:
    """One normalizer, test and size; errors and leak are None if the task does not define them."""

    normalizer: str
    tested_with: str
    size: int
    seeds: int
    sets: int
    accuracy: Mean
    logits_wrong: Mean | None
    dispersed: Mean | None
    winner_weight: Mean | None
    leak: Mean | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarise(records: Sequence[Record]) -> list[RetrievalRow]:
    """Return one row per normalizer, test and size, in the order of their first records."""
    groups: dict[tuple[str, str, int], list[Record]] = {}
    for record in records:
        groups.setdefault((record["normalizer"], record["tested_with"], record["size"]), []).append(record)
    rows = []
    for (normalizer, tested_with, size), group in groups.items():
        accuracy = mean_of(group, "accuracy")
        assert accuracy is not None
        others = (mean_of(group, name) for name in ("logits_wrong", "dispersed", "winner_weight", "leak"))
        rows.append(RetrievalRow(normalizer, tested_with, size, len(group), group[0]["sets"], accuracy, *others))
    return rows


def mean_of(records: Sequence[Record], name: str) -> Mean | None:
    """Return the mean; None if a record lacks the number, since a mean over some seeds would be biased."""
    values = [record.get(name) for record in records]
    if not values or any(value is None for value in values):
        return None
    numbers = np.asarray(values, dtype=np.float64)
    if len(numbers) < 2:
        return Mean(float(numbers[0]), None)
    from scipy.stats import t

    error = float(numbers.std(ddof=1)) / math.sqrt(len(numbers))
    return Mean(float(numbers.mean()), float(t.ppf((1 + CONFIDENCE) / 2, len(numbers) - 1)) * error)


def tables(task: str, rows: Sequence[RetrievalRow]) -> RenderableType:
    """Return the tables for rows of one task and recipe."""
    seeds = max(row.seeds for row in rows)
    among = f"mean over {seeds} seeds ± 95 % confidence" if seeds > 1 else "one seed"
    leak = find_task(task).has_priority
    parts: list[RenderableType] = [
        _by_size(f"{task}: right answers in %, {among}", rows, lambda row: percent(row.accuracy), leak=leak)
    ]
    if any(row.logits_wrong is not None for row in rows):
        title = "Errors in %: logits wrong (the largest is not the right item's) + dispersed (it is)"
        parts.append(_by_size(title, rows, _errors, leak=False))
    return Group(*parts)


def _by_size(title: str, rows: Sequence[RetrievalRow], cell: Callable[[RetrievalRow], str], *, leak: bool) -> Table:
    sizes = sorted({row.size for row in rows})
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("normalizer", no_wrap=True)
    table.add_column("tested with", no_wrap=True)
    for size in sizes:
        table.add_column(f"{size:,}", justify="right", no_wrap=True)
    if leak:
        table.add_column("class leak", justify="right", no_wrap=True)
        table.caption = "class leak: sets whose two best priorities are closer than this are a guess"
        table.caption_justify = "left"
    groups: dict[tuple[str, str], dict[int, RetrievalRow]] = {}
    for row in rows:
        groups.setdefault((row.normalizer, row.tested_with), {})[row.size] = row
    for (normalizer, tested_with), found in groups.items():
        cells = [cell(found[size]) if size in found else "-" for size in sizes]
        first = next(iter(found.values()))
        leaks = ["-" if first.leak is None else f"{first.leak.value:.2g}"] if leak else []
        table.add_row(normalizer, tested_with, *cells, *leaks)
    return table


def percent(mean: Mean) -> str:
    spread = "" if mean.half_width is None else f" ±{100 * mean.half_width:.1f}"
    return f"{100 * mean.value:.1f}{spread}"


def _errors(row: RetrievalRow) -> str:
    if row.logits_wrong is None or row.dispersed is None:
        return "-"
    return f"{100 * row.logits_wrong.value:.1f} + {100 * row.dispersed.value:.1f}"
