"""95 % confidence intervals of means and shares, and p-values corrected for several comparisons.

Functions import scipy.stats: it takes nearly a second to load.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

Interval = tuple[float, float]


def student_half_width(error: float, count: int) -> float:
    """Return half the width of Student's interval of the mean of `count` values. error: standard error of the mean."""
    from scipy.stats import t

    return float(t.ppf(0.975, count - 1)) * error


def student_interval(values: Any) -> Interval:
    """Return Student's interval of the mean of two or more values."""
    mean, count = float(np.mean(values)), len(values)
    half_width = student_half_width(float(np.std(values, ddof=1)) / count**0.5, count)
    return mean - half_width, mean + half_width


def wilson_interval(share: float, count: int) -> Interval:
    """Return Wilson's interval of a share of `count` answers that are right or wrong."""
    from scipy.stats import binomtest

    interval = binomtest(round(share * count), count).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def holm(values: Sequence[float]) -> list[float]:
    """Return Holm's correction: the smallest of m p-values times m, the next times m - 1, ...; monotone, at most 1."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    corrected = [1.0] * len(values)
    highest = 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(values) - rank) * values[index]))
        corrected[index] = highest
    return corrected
