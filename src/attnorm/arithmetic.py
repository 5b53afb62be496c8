"""Small calculations that packages share: whole numbers, 95 % confidence intervals, tests over random seeds.

Two kinds of model are compared by one rule, which docs/results/index.md states: `difference_over_seeds` where each
model has one number, `difference_over_seeds_and_questions` where every model answers the same questions, and `holm`
over the comparisons that a page names together.

Numpy and scipy are imported where they are used: scipy.stats takes nearly a second to load.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

Interval = tuple[float, float]
SIGNIFICANT = 0.05
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


@dataclass(frozen=True)
class Difference:
    """Mean difference between two kinds of model, its 95 % interval, and p of no difference."""

    value: float
    low: float
    high: float
    p: float


def difference_over_seeds(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Difference | None:
    """Test by Student's t whether two kinds of model differ; None with fewer than two random seeds on a side.

    Models of one seed have the same data, so the test is paired over the common seeds. With fewer than two of these it
    is Welch's.

    Args:
        ours: The number of each model, by its random seed.
        theirs: The same for the other kind.
    """
    import numpy as np
    from scipy import stats

    common = sorted(ours.keys() & theirs.keys())
    if len(common) >= 2:
        differences = np.array([ours[seed] - theirs[seed] for seed in common])
        mean = float(differences.mean())
        if np.ptp(differences) < 1e-12:  # equal in every seed: the t-test would divide by 0, a sign test does not
            return Difference(mean, mean, mean, 2.0 ** (1 - len(common)) if mean else 1.0)
        return Difference(mean, *student_interval(differences), float(stats.ttest_1samp(differences, 0.0).pvalue))
    if min(len(ours), len(theirs)) < 2:
        return None
    ours_there, theirs_there = list(ours.values()), list(theirs.values())
    test = stats.ttest_ind(ours_there, theirs_there, equal_var=False)
    interval = test.confidence_interval(0.95)
    mean = float(np.mean(ours_there) - np.mean(theirs_there))
    return Difference(mean, float(interval.low), float(interval.high), float(np.nan_to_num(test.pvalue, nan=1.0)))


def difference_over_seeds_and_questions(differences: Any) -> Difference:
    """Test a mean difference, (seeds, questions), that would have to hold for other seeds and other questions too.

    Both are random effects of a mixed model. The squared standard errors over seeds and over questions add up, and the
    degrees of freedom are Satterthwaite's. This is min F' of Clark 1973 (https://doi.org/10.1016/S0022-5371(73)80014-3),
    which is conservative: both errors contain the rest of the variance.
    """
    import numpy as np
    from scipy import stats

    values = np.asarray(differences, dtype=np.float64)
    if not values.size:
        return Difference(0.0, 0.0, 0.0, 1.0)
    mean = float(values.mean())
    by_one = [means for means in (values.mean(1), values.mean(0)) if len(means) > 1]  # a single one has no spread
    squares = [float(means.var(ddof=1)) / len(means) for means in by_one]
    error = math.sqrt(sum(squares))
    if error < 1e-12:  # equal for every seed and question
        return Difference(mean, mean, mean, 2.0 ** (1 - len(values)) if mean else 1.0)
    freedom = sum(squares) ** 2 / sum(
        square**2 / (len(means) - 1) for square, means in zip(squares, by_one, strict=True)
    )
    half_width = float(stats.t.ppf(0.975, freedom)) * error
    p = 2 * float(stats.t.sf(abs(mean) / error, freedom))
    return Difference(mean, mean - half_width, mean + half_width, p)


def holm(values: Sequence[float]) -> list[float]:
    """Return Holm's correction: the smallest of m p-values times m, the next times m - 1, ...; monotone, at most 1."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    corrected = [1.0] * len(values)
    highest = 0.0
    for rank, index in enumerate(order):
        highest = max(highest, min(1.0, (len(values) - rank) * values[index]))
        corrected[index] = highest
    return corrected
