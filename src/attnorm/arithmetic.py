"""Small calculations that packages share: whole numbers, 95 % confidence intervals, and corrected p-values.

Numpy and scipy are imported where they are used: scipy.stats takes nearly a second to load.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

Interval = tuple[float, float]
Z = NormalDist().inv_cdf(0.975)


def ceil_div(number: int, size: int) -> int:
    """Return how many pieces of this size hold a number of things; the last piece may be smaller.

    Sizes may be symbols of torch.compile, so this and `round_up` use no floats.

    >>> ceil_div(7, 3), ceil_div(6, 3), ceil_div(0, 3)
    (3, 2, 0)
    """
    return -(-number // size)


def round_up(number: int, step: int) -> int:
    """Return the smallest multiple of `step` that is at least `number`.

    >>> round_up(7, 8), round_up(16, 8)
    (8, 16)
    """
    return ceil_div(number, step) * step


def student_half_width(error: float, count: int) -> float:
    """Return half the width of Student's interval of the mean of `count` values. error: standard error of the mean."""
    from scipy.stats import t

    return float(t.ppf(0.975, count - 1)) * error


def student_interval(values: Any) -> Interval:
    """Return Student's interval of the mean of two or more values."""
    import numpy as np

    mean, count = float(np.mean(values)), len(values)
    half_width = student_half_width(float(np.std(values, ddof=1)) / count**0.5, count)
    return mean - half_width, mean + half_width


def wilson_interval(share: float, count: float) -> Interval:
    """Return Wilson's interval of a share of `count` answers that are right or wrong; an effective count may be 3.5."""
    center = share + Z**2 / (2 * count)
    half_width = Z * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2))
    scale = 1 + Z**2 / count
    return max(0.0, (center - half_width) / scale), min(1.0, (center + half_width) / scale)


def holm(values: Sequence[float]) -> list[float]:
    """Return Holm's correction: the smallest of m p-values times m, the next times m - 1, ...; monotone, at most 1."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    corrected = [1.0] * len(values)
    highest = 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(values) - rank) * values[index]))
        corrected[index] = highest
    return corrected
