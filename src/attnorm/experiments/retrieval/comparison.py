"""Against softmax, seed by seed: every seed has the same data and starting weights under all normalizers.

Paired t-tests, as in the paper; since many normalizers are asked the same question, p is also given after Holm's
correction over all rows compared at a size (https://www.jstor.org/stable/4615733).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from attnorm.training.retrieval.records import Record
from attnorm.training.retrieval.summary import Mean

Key = tuple[str, str]  # normalizer as labelled, tested with


@dataclass(frozen=True)
class Difference:
    """Accuracy minus that of softmax, mean over seeds with 95 % confidence, and the paired t-test of no difference."""

    mean: Mean
    p: float
    p_holm: float


def against(
    baseline: Sequence[Record], others: Mapping[Key, Sequence[Record]], sizes: Sequence[int]
) -> dict[tuple[Key, int], Difference]:
    """By row and size; rows or sizes without at least two common seeds are left out."""
    found: dict[tuple[Key, int], Difference] = {}
    for size in sizes:
        base = _by_seed(baseline, size)
        pairs: dict[Key, np.ndarray[tuple[int], np.dtype[np.float64]]] = {}
        for key, records in others.items():
            own = _by_seed(records, size)
            common = sorted(base.keys() & own.keys())
            if len(common) >= 2:
                pairs[key] = np.array([own[seed] - base[seed] for seed in common])
        raw = {key: _p(differences) for key, differences in pairs.items()}
        corrected = dict(zip(raw, holm(list(raw.values())), strict=True))
        for key, differences in pairs.items():
            found[key, size] = Difference(_mean(differences), raw[key], corrected[key])
    return found


def holm(values: Sequence[float]) -> list[float]:
    """The smallest of m p-values times m, the next times m - 1, ...; none below one before it, none above 1."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    corrected = [1.0] * len(values)
    highest = 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(values) - rank) * values[index]))
        corrected[index] = highest
    return corrected


def _by_seed(records: Sequence[Record], size: int) -> dict[int, float]:
    return {record["seed"]: record["accuracy"] for record in records if record["size"] == size}


def _p(differences: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    if not differences.any():
        return 1.0
    from scipy.stats import ttest_rel

    if np.ptp(differences) < 1e-12:  # the same in every seed: the test would divide by 0
        return 0.0
    return float(ttest_rel(differences, np.zeros_like(differences)).pvalue)


def _mean(differences: np.ndarray[tuple[int], np.dtype[np.float64]]) -> Mean:
    from scipy.stats import t

    count = len(differences)
    error = float(differences.std(ddof=1)) / count**0.5
    return Mean(float(differences.mean()), float(t.ppf(0.975, count - 1)) * error)
