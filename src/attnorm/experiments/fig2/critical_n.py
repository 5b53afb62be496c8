"""Critical N: the smallest N at which a test no longer distinguishes two numbers per head, and its uncertainty.

The test is the two-sample Kolmogorov-Smirnov test over the heads of a model, as in Mudarisov et al. 2025, section 3.1,
https://arxiv.org/abs/2508.17821. Arrays are (heads, len(grid)): a column for each N of a grid.
"""

import math
from dataclasses import replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from attnorm.experiments.experiment import Floats
from attnorm.theory.dispersion import least_squares_line
from attnorm.theory.distance import PowerLaw, fit_power_law

LEVEL = 0.01


def n_grid(length: int, ratio: float, dense_up_to: int = 16) -> tuple[int, ...]:
    """Return every N up to `dense_up_to`, then steps by the factor `ratio`, up to length - 1."""
    grid = list(range(1, min(dense_up_to, length - 1) + 1))
    while grid[-1] < length - 1:
        grid.append(min(max(grid[-1] + 1, round(grid[-1] * ratio)), length - 1))
    return tuple(grid)


def ks_statistic(first: Floats, second: Floats) -> Floats:
    """Return the largest gap between the two empirical distributions, column by column."""
    count = len(first)
    values = np.concatenate([first, second])
    steps = np.concatenate([np.full(first.shape, 1.0), np.full(second.shape, -1.0)])
    order = np.argsort(values, axis=0, kind="stable")
    gaps = np.abs(np.cumsum(np.take_along_axis(steps, order, 0), axis=0))
    values = np.take_along_axis(values, order, 0)
    # Between equal values there is no gap.
    last_of_equals = np.concatenate([values[1:] != values[:-1], np.full((1, values.shape[1]), True)])
    return np.asarray(np.where(last_of_equals, gaps, 0.0).max(0) / count, dtype=np.float64)


@lru_cache(maxsize=64)
def ks_threshold(heads: int, level: float = LEVEL) -> float:
    """Return the smallest statistic of two samples of this many heads whose exact p-value is below the level."""
    for steps in range(1, heads + 1):
        if ks_p_value(steps, heads) < level:
            return steps / heads
    return math.inf


def ks_p_value(steps: int, heads: int) -> float:
    """Return P(statistic >= steps / heads) for two samples from one law: Gnedenko and Korolyuk's alternating sum."""
    total, sign = 0.0, 1.0
    for shift in range(steps, heads + 1, steps):
        total += sign * math.exp(_log_choose(2 * heads, heads - shift) - _log_choose(2 * heads, heads))
        sign = -sign
    return min(1.0, 2 * total)


def accepted(first: Floats, second: Floats, level: float = LEVEL) -> npt.NDArray[np.bool_]:
    """Return for each N whether the test does not distinguish the two."""
    return ks_statistic(first, second) < ks_threshold(len(first), level)


def critical_n(first: Floats, second: Floats, grid: tuple[int, ...], level: float = LEVEL) -> float:
    """Return the smallest N of the grid at which the test accepts; NaN if it never does."""
    found = np.flatnonzero(accepted(first, second, level))
    return float(grid[found[0]]) if len(found) else math.nan


def resampled_critical_n(
    first: Floats, second: Floats, grid: tuple[int, ...], which: npt.NDArray[np.int64], level: float = LEVEL
) -> Floats:
    """Return the critical N for each row of head indices: a bootstrap, or subsamples of fewer heads."""
    return np.array([critical_n(first[heads], second[heads], grid, level) for heads in which])


def rejection_rates(first: Floats, second: Floats, which: npt.NDArray[np.int64], level: float = LEVEL) -> Floats:
    """Return the power of the test at each N: the share of resamples in which it rejects."""
    return np.asarray(1 - np.mean([accepted(first[heads], second[heads], level) for heads in which], axis=0))


def bootstrap_heads(heads: int, size: int, draws: int, seed: int) -> npt.NDArray[np.int64]:
    """Return head indices (draws, size), drawn with replacement."""
    return np.random.default_rng(seed).integers(0, heads, (draws, size))


def subsampled_heads(heads: int, size: int, draws: int, seed: int) -> npt.NDArray[np.int64]:
    """Return head indices (draws, size), drawn without replacement."""
    generator = np.random.default_rng(seed)
    return np.stack([generator.permutation(heads)[:size] for _ in range(draws)])


def interval(values: Floats, confidence: float = 0.95) -> tuple[float, float]:
    """Return the central interval of the values, without NaN."""
    tail = (1 - confidence) / 2
    kept = values[np.isfinite(values)]
    if not len(kept):
        return math.nan, math.nan
    low, high = np.quantile(kept, [tail, 1 - tail])
    return float(low), float(high)


def middle(values: Floats) -> float:
    """Return the median without NaN; NaN if there are no other values."""
    kept = values[np.isfinite(values)]
    return float(np.median(kept)) if len(kept) else math.nan


def power_law_over_heads(lengths: tuple[int, ...], critical: Floats, resampled: Floats) -> PowerLaw | None:
    """Fit c L^g to the critical N of each length; the interval of g comes from resampled heads (draws, lengths).

    None if fewer than three lengths have a critical N.
    """
    usable = torch.from_numpy(np.isfinite(critical))
    if usable.sum() < 3:
        return None
    at = torch.tensor(lengths, dtype=torch.float64)
    fit = fit_power_law(at[usable], torch.from_numpy(critical)[usable])
    drawn = torch.from_numpy(resampled).log()
    lines = least_squares_line(at.log().expand(drawn.shape), drawn.nan_to_num(), drawn.isfinite() & usable)
    return replace(fit, exponent_interval=interval(lines.slope.numpy()))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
