"""Measure Figure 2: the distance of every head at every N, the expectation for random selection, and the critical N.

The formulas are those of attnorm.theory, applied to the last row of every head. Each head gives two numbers: the
measured distance and its expectation. The critical N is the smallest N at which a two-sample Kolmogorov-Smirnov test
over the heads of a model cannot tell the two samples apart, as in Mudarisov et al. 2025, section 3.1,
https://arxiv.org/abs/2508.17821. Arrays are (heads, len(grid)): a column for each N of a grid.

The order of this file: the distances, the test, then what the test says of the distances.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from torch import Tensor

from attnorm.engines.execution import one_thread
from attnorm.theory.dispersion import least_squares_line
from attnorm.theory.distance import (
    PowerLaw,
    corollary2_printed,
    d_tilde,
    fit_power_law,
    random_set_monte_carlo,
    relative_distance,
    theorem1_fixed_printed,
    theorem1_fixed_tight,
    theorem1_random_bounds,
    theorem1_random_printed,
)
from attnorm.theory.selection import SelectedRows
from attnorm_lab.experiments.experiment import Floats, median
from attnorm_lab.experiments.model_runs import LastRows

LEVEL = 0.01
PAPER_HEADS = 144  # of GPT-2 124M
PANEL_N = 5  # of panel (a)
DENSE_N = 16  # up to which every N is measured


@dataclass(frozen=True)
class Distances:
    """Every head of a model at one length, for every N of the grid."""

    length: int
    grid: tuple[int, ...]
    measured: Floats  # d_tilde of the true top-N set
    printed: Floats  # the expectation as printed
    lower: Floats  # the corrected expectation lies between lower and upper
    upper: Floats
    mass: Floats  # A, the weight of the top N
    context: Floats  # ||s||, what the top N add up to
    output: Floats  # ||x_bar||, what all keys add up to

    @property
    def heads(self) -> int:
        return len(self.measured)

    def column(self, top_n: int) -> int:
        return self.grid.index(top_n)


@dataclass(frozen=True)
class Point:
    """Every head at one length and N, with the quantities that are too slow for every N."""

    length: int
    top_n: int
    measured: Floats
    relative: Floats  # d_tilde / ((L - N) ||s||)
    fixed_printed: Floats  # the upper bound for the true set
    fixed_tight: Floats
    printed: Floats
    expected: Floats  # the expectation itself, by drawing random sets
    expected_error: Floats  # its standard error
    lower: Floats
    upper: Floats
    corollary: Floats  # sum_i ||a_i x_i||, which Corollary 2 prints for N << L

    def table(self) -> pa.Table:
        """One row per head."""
        numbers = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        heads = len(self.measured)
        return pa.table(
            {"length": [self.length] * heads, "top_n": [self.top_n] * heads, "head": list(range(heads)), **numbers}
        )


def layers_with_all_keys(layers: Sequence[LastRows], length: int) -> list[LastRows]:
    """Return the layers whose last row sees all keys, which a sliding window does not."""
    kept = [layer for layer in layers if layer.keys == length and bool(layer.weights.isfinite().all())]
    if not kept:
        raise ValueError(
            f"expected a model in which a layer attends to all {length} tokens with finite weights, as Figure 2 "
            "needs, got none. Use another model."
        )
    return kept


def n_grid(length: int, ratio: float) -> tuple[int, ...]:
    """Return every N up to DENSE_N, then steps by the factor `ratio`, up to length - 1."""
    grid = list(range(1, min(DENSE_N, length - 1) + 1))
    while grid[-1] < length - 1:
        grid.append(min(max(grid[-1] + 1, round(grid[-1] * ratio)), length - 1))
    return tuple(grid)


@one_thread()
def over_grid(layers: Sequence[LastRows], grid: tuple[int, ...], progress: Callable[[int], None]) -> Distances:
    """Measure every N of the grid. progress: called with the number of finished N."""
    length = layers[0].keys
    selections = [layer.selected(max(grid)) for layer in layers]
    for rows in selections:
        _ = rows.norms, rows.output, rows.squares  # the same for all N
    columns: dict[str, list[Floats]] = {name: [] for name in _NUMBERS}
    for index, N in enumerate(grid):
        top_rows = [rows.with_indices(rows.indices[..., :N]) for rows in selections]
        for name, number in _NUMBERS.items():
            columns[name].append(_concatenate_heads(top_rows, number))
        progress(index + 1)
    return Distances(length, grid, **{name: np.stack(values, 1) for name, values in columns.items()})


@one_thread()
def at_point(
    layers: Sequence[LastRows], top_n: int, draws: int, generator: torch.Generator, heaviest: int = 4
) -> Point:
    """Measure one N. draws: random sets. heaviest: keys that the corrected bounds treat separately; more is tighter."""
    selections = [layer.selected(top_n) for layer in layers]
    drawn = [random_set_monte_carlo(rows, draws, generator) for rows in selections]
    bounds = [theorem1_random_bounds(rows, heaviest) for rows in selections]
    return Point(
        length=layers[0].keys,
        top_n=top_n,
        measured=_concatenate_heads(selections, d_tilde),
        relative=_concatenate_heads(selections, relative_distance),
        fixed_printed=_concatenate_heads(selections, theorem1_fixed_printed),
        fixed_tight=_concatenate_heads(selections, theorem1_fixed_tight),
        printed=_concatenate_heads(selections, theorem1_random_printed),
        expected=_flat([estimate.mean for estimate in drawn]),
        expected_error=_flat([estimate.standard_error for estimate in drawn]),
        lower=_flat([bound[0] for bound in bounds]),
        upper=_flat([bound[1] for bound in bounds]),
        corollary=_concatenate_heads(selections, corollary2_printed),
    )


def _norm(vectors: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(vectors, dim=-1)
    return norms


_NUMBERS: dict[str, Callable[[SelectedRows], Tensor]] = {
    "measured": d_tilde,
    "printed": theorem1_random_printed,
    "lower": lambda rows: theorem1_random_bounds(rows)[0],
    "upper": lambda rows: theorem1_random_bounds(rows)[1],
    "mass": lambda rows: rows.mass,
    "context": lambda rows: _norm(rows.context),
    "output": lambda rows: _norm(rows.output),
}


def _concatenate_heads(layers: Sequence[SelectedRows], number: Callable[[SelectedRows], Tensor]) -> Floats:
    return _flat([number(rows) for rows in layers])


def _flat(values: Sequence[Tensor]) -> Floats:
    return np.asarray(torch.cat([value.flatten() for value in values]).numpy(), dtype=np.float64)


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
def ks_threshold(heads: int) -> float:
    """Return the smallest statistic of two samples of this many heads whose exact p-value is below LEVEL."""
    for steps in range(1, heads + 1):
        if ks_p_value(steps, heads) < LEVEL:
            return steps / heads
    return math.inf


def ks_p_value(steps: int, heads: int) -> float:
    """Return P(statistic >= steps / heads) for two samples from one law: Gnedenko and Korolyuk's alternating sum."""
    shifts = np.arange(1, heads + 1)
    ratios = np.cumprod((heads + 1 - shifts) / (heads + shifts))  # C(2 heads, heads - shift) / C(2 heads, heads)
    terms = ratios[steps - 1 :: steps]
    return min(1.0, 2 * float(terms[::2].sum() - terms[1::2].sum()))


def is_accepted(first: Floats, second: Floats) -> npt.NDArray[np.bool_]:
    """Return for each N whether the test does not distinguish the two."""
    return ks_statistic(first, second) < ks_threshold(len(first))


def critical_n(first: Floats, second: Floats, grid: tuple[int, ...]) -> float:
    """Return the smallest N of the grid at which the test accepts; NaN if it never does."""
    accepting = np.flatnonzero(is_accepted(first, second))
    return float(grid[accepting[0]]) if len(accepting) else math.nan


def resampled_critical_n(
    first: Floats, second: Floats, grid: tuple[int, ...], resamples: npt.NDArray[np.int64]
) -> Floats:
    """Return the critical N for each row of head indices: a bootstrap, or subsamples of fewer heads."""
    return np.array([critical_n(first[heads], second[heads], grid) for heads in resamples])


def rejection_rates(first: Floats, second: Floats, resamples: npt.NDArray[np.int64]) -> Floats:
    """Return the power of the test at each N: the share of resamples in which it rejects."""
    return np.asarray(1 - np.mean([is_accepted(first[heads], second[heads]) for heads in resamples], axis=0))


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


def power_law_over_heads(lengths: tuple[int, ...], critical: Floats, resampled: Floats) -> PowerLaw | None:
    """Fit c L^g to the critical N of each length; the interval of g comes from resampled heads (draws, lengths).

    None if fewer than three lengths have a critical N.
    """
    usable = torch.from_numpy(np.isfinite(critical))
    if usable.sum() < 3:
        return None
    x = torch.tensor(lengths, dtype=torch.float64)
    fit = fit_power_law(x[usable], torch.from_numpy(critical)[usable])
    drawn = torch.from_numpy(resampled).log()
    lines = least_squares_line(x.log().expand(drawn.shape), drawn.nan_to_num(), drawn.isfinite() & usable)
    return replace(fit, exponent_interval=interval(lines.slope.numpy()))


# The pairs of numbers per head that the test compares, named by what the measured distance is compared with.
PRINTED, UPPER, LOWER = "printed", "corrected, upper end", "corrected, lower end"
NORMS = "||s|| against ||x_bar||"
PAIRS: dict[str, Callable[[Distances], tuple[Floats, Floats]]] = {
    PRINTED: lambda d: (d.measured, d.printed),
    UPPER: lambda d: (d.measured, d.upper),
    LOWER: lambda d: (d.measured, d.lower),
    NORMS: lambda d: (d.context, d.output),
}


@dataclass(frozen=True)
class Critical:
    """At one length: the smallest N at which the test accepts, and the largest."""

    length: int
    top_n: float  # NaN where it never accepts
    interval: tuple[float, float]  # of resampled heads
    last_accepted: int

    @property
    def share(self) -> float:
        return self.top_n / self.length


@dataclass(frozen=True)
class ExpectationComparison:
    """One pair of numbers per head that the test compares, at every length."""

    name: str
    critical: tuple[Critical, ...]
    law: PowerLaw | None

    def at(self, length: int) -> Critical:
        return next(point for point in self.critical if point.length == length)

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "compared": self.name, "length": point.length, "critical_n": point.top_n, "share": point.share,
                "low": point.interval[0], "high": point.interval[1], "last_accepted": point.last_accepted,
                "exponent": self.law.exponent if self.law else math.nan,
                "exponent_low": self.law.exponent_interval[0] if self.law else math.nan,
                "exponent_high": self.law.exponent_interval[1] if self.law else math.nan,
            }
            for point in self.critical
        ]  # fmt: skip


def critical_of_pair(distances: Distances, pair: str) -> float:
    """Return the critical N of one of PAIRS."""
    first, second = PAIRS[pair](distances)
    return critical_n(first, second, distances.grid)


def compare(pair: str, distances: Sequence[Distances], draws: int, seed: int) -> ExpectationComparison:
    """Compute the critical N at every length, with intervals from resampled heads, and the power law through it."""
    heads = min(measured.heads for measured in distances)
    resamples = bootstrap_heads(heads, heads, draws, seed)
    points, resampled = [], []
    for measured in distances:
        first, second = PAIRS[pair](measured)
        drawn = resampled_critical_n(first, second, measured.grid, resamples)
        resampled.append(drawn)
        accepts = [N for N, yes in zip(measured.grid, is_accepted(first, second), strict=True) if yes]
        critical = critical_n(first, second, measured.grid)
        points.append(Critical(measured.length, critical, interval(drawn), max(accepts, default=0)))
    lengths = tuple(measured.length for measured in distances)
    law = power_law_over_heads(lengths, np.array([point.top_n for point in points]), np.stack(resampled, 1))
    return ExpectationComparison(pair, tuple(points), law)


def fewer_heads(distances: Distances, draws: int, seed: int) -> list[dict[str, float | int | str]]:
    """Repeat the test with fewer heads: critical N, and the power at N = 5."""
    rows: list[dict[str, float | int | str]] = []
    for pair in (PRINTED, UPPER):
        first, second = PAIRS[pair](distances)
        for size in sorted({size for size in (18, 36, 72, PAPER_HEADS, distances.heads) if size <= distances.heads}):
            subsamples = subsampled_heads(distances.heads, size, draws if size < distances.heads else 1, seed)
            drawn = resampled_critical_n(first, second, distances.grid, subsamples)
            low, high = interval(drawn)
            power = rejection_rates(first, second, bootstrap_heads(distances.heads, size, draws, seed + 1))
            rows.append(
                {
                    "compared": pair, "heads": size, "critical_n": median(drawn), "low": low, "high": high,
                    "power_at_5": float(power[distances.column(PANEL_N)]), "resolution": ks_threshold(size),
                }
            )  # fmt: skip
    return rows


@dataclass(frozen=True)
class Result:
    """All measurements of Figure 2."""

    distances: tuple[Distances, ...]  # by length
    at_panel: Distances  # at the length of panel (b)
    by_length: tuple[Point, ...]  # panel (a)
    by_n: tuple[Point, ...]  # panel (b)
    comparisons: Mapping[str, ExpectationComparison]
    permuted_critical: Mapping[str, float]  # at the same length, with permuted weights
    fewer_heads: Sequence[Mapping[str, Any]]
    choices: Sequence[Mapping[str, Any]]

    @property
    def length(self) -> int:
        return self.at_panel.length

    def critical(self, name: str) -> Critical:
        """Return the critical N of a comparison at the length of panel (b)."""
        return self.comparisons[name].at(self.length)
