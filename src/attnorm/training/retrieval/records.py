"""Results of the tests: one JSONL record per normalizer, seed, size and test normalizer, and their means over seeds."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

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
