"""The scores of one task, document by document: what is saved, and what intervals and paired tests need."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from scipy.stats import binomtest, ttest_1samp
from scipy.stats import t as student

from attnorm.experiments.language_models.results import wilson_interval

Interval = tuple[float, float]
SIGNIFICANT = 0.05


@dataclass(frozen=True)
class Scores:
    """One number per document, and a hash that names the document."""

    metric: str
    better: Literal["higher", "lower"]
    values: list[float]
    documents: list[str]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Paired:
    """The mean change over the documents that two sides share."""

    documents: int
    mean: float
    interval: Interval | None
    p: float | None  # two-sided; None for fewer than two documents


@dataclass(frozen=True)
class EvaluationRow:
    """One line of the table."""

    task: str
    length: int | None
    side: str
    metric: str
    better: str
    documents: int
    mean: float
    interval: Interval | None
    change: Paired | None  # from the first side; None for that side, and where no document is shared
    p_holm: float | None  # the p-value of the change, corrected for all changes of the table

    @property
    def verdict(self) -> str:
        if self.change is None or self.p_holm is None:
            return ""
        if self.p_holm >= SIGNIFICANT:
            return "no difference shown"
        return "better" if (self.change.mean > 0) == (self.better == "higher") else "worse"

    @property
    def perplexity(self) -> float | None:
        return math.exp(min(self.mean, 700.0)) if self.metric == "nats per token" else None

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict, "perplexity": self.perplexity}


def mean_interval(values: Sequence[float]) -> Interval | None:
    """95 % interval of the mean: Wilson for right or wrong, else Student's t; None for a single document."""
    if _right_or_wrong(values):
        return wilson_interval(float(np.mean(values)), len(values))
    return _student(values)


def paired(before: Scores, after: Scores) -> Paired | None:
    """The change from `before` to `after` on shared documents; None where they share none."""
    first = dict(zip(before.documents, before.values, strict=True))
    pairs = [(first[name], value) for name, value in zip(after.documents, after.values, strict=True) if name in first]
    if not pairs:
        return None
    old, new = np.array(pairs).T
    change = new - old
    binary = _right_or_wrong(old) and _right_or_wrong(new)
    interval = _newcombe(old, new) if binary else _student(change)
    return Paired(len(pairs), float(change.mean()), interval, _p_value(change, binary=binary))


def _right_or_wrong(values: Any) -> bool:
    return set(np.unique(values)) <= {0.0, 1.0}


def _student(values: Any) -> Interval | None:
    if len(values) < 2:
        return None
    reach = float(student.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values)))
    return float(np.mean(values)) - reach, float(np.mean(values)) + reach


def _newcombe(old: Any, new: Any) -> Interval:
    """Difference of paired shares from Wilson's intervals and their correlation (Newcombe 1998, method 10)."""
    n, p1, p2 = len(old), float(old.mean()), float(new.mean())
    (low1, high1), (low2, high2) = (wilson_interval(p, n) for p in (p1, p2))
    spread = float(np.sqrt(p1 * (1 - p1) * p2 * (1 - p2)))
    phi = (float((old * new).mean()) - p1 * p2) / spread if spread > 0 else 0.0
    below, above = (
        np.sqrt(max(0.0, a * a - 2 * phi * a * b + b * b))
        for a, b in ((p2 - low2, high1 - p1), (high2 - p2, p1 - low1))
    )
    return p2 - p1 - float(below), p2 - p1 + float(above)


def _p_value(change: Any, *, binary: bool) -> float | None:
    """McNemar's exact test for right or wrong, else Student's t-test of the changes."""
    if len(change) < 2:
        return None
    if not change.any():
        return 1.0
    if binary or np.ptp(change) == 0:  # a constant change has no spread to compare it with: only its sign counts
        return float(binomtest(int((change > 0).sum()), int((change != 0).sum())).pvalue)
    return float(ttest_1samp(change, 0.0).pvalue)
