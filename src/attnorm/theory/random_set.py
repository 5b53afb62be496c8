"""The expected distance E when the selected set is drawn at random: Theorem 1 (random set) and Corollary 2.

Mudarisov et al. 2025, https://arxiv.org/abs/2508.17821, section 2.1: I is uniform among all sets of N of the n visible
keys, E = mean of d_tilde (eq. 8). Printed and corrected bounds, and E itself by Monte Carlo or by going through all
sets. Rows with n <= N give NaN. Proofs and counterexamples: docs/theory/distance.md.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from attnorm.theory.dispersion import Bounds
from attnorm.theory.distance import d_tilde
from attnorm.theory.selection import SelectedRows, safe_sqrt, select, sum_where


def theorem1_random_printed(rows: SelectedRows) -> Tensor:
    """(n-N)/n sum_i ||(a_i + N/(n-1)) x_i - x_bar||: the printed main term of E, a misprint (see the doc)."""
    share = _others_share(rows)
    return _mean_over_sets(rows, rows.distances_to(rows.output, rows.weights + share, rows.along_output))


def theorem1_random_epsilon(rows: SelectedRows) -> Tensor:
    """The printed bound on eps. It is a true bound on E minus the *corrected* main term; infinite where mu_i = 0."""
    share = _others_share(rows)
    mean = rows.distances_to(share * rows.output, (1 + share) * rows.weights)
    squares = rows.norms.square()
    others = squares.sum(-1, keepdim=True) - squares
    return _mean_over_sets(rows, 0.5 * share * torch.where((others > 0) & rows.visible, others / mean, 0.0))


def theorem1_random_bounds(rows: SelectedRows, heaviest: int = 0) -> Bounds:
    """(n-N)/n sum_i ||mu_i|| <= E <= (n-N)/n sum_i sqrt(||mu_i||^2 + V_i): Theorem 1 (random set), corrected.

    mu_i = (1 + N/(n-1)) y_i - N/(n-1) x_bar is the mean of y_i - s when I avoids i, and V_i the exact variance of s
    then (sampling N of the n-1 others without replacement). Cost O(L d).

    `heaviest` = m distinguishes the 2^m cases which of the m longest y_j are in I, and bounds each: never looser, and
    much tighter for peaked rows, where s depends mostly on whether it contains the winner. Cost O(2^m L d).
    """
    if not 0 <= heaviest <= 12:
        raise ValueError(f"heaviest must lie between 0 and 12 (it costs 2^heaviest passes), got {heaviest}")
    if heaviest == 0:
        return _bounds_of_one_case(rows)
    heavy_keys = torch.where(rows.visible, rows.norms, -1.0).topk(min(heaviest, rows.weights.shape[-1]), -1).indices
    heavy = torch.zeros_like(rows.visible).scatter(-1, heavy_keys, True) & rows.visible
    light = rows.visible & ~heavy
    size = light.sum(-1, keepdim=True).to(rows.weights.dtype)
    light_sum = torch.where(light, rows.weights, 0.0) @ rows.vectors
    apart = rows.distances_to(light_sum / size.clamp(min=1), rows.weights).square()
    total_apart = sum_where(apart, light).unsqueeze(-1)
    # The sum of squares about the mean, with key i left out where it is itself one of the light keys.
    apart = torch.where(heavy, total_apart, total_apart - size / (size - 1).clamp(min=1) * apart).clamp(min=0)

    lower, upper = torch.zeros_like(rows.weights), torch.zeros_like(rows.weights)
    for included in itertools.product((False, True), repeat=heavy_keys.shape[-1]):
        drawn = rows.top_n - sum(included)
        if drawn < 0:
            continue
        which = torch.tensor(included, dtype=torch.bool, device=heavy.device).expand(heavy_keys.shape)
        certain = torch.zeros_like(heavy).scatter(-1, heavy_keys, which)
        chance = _chance(rows, heavy, certain, size, drawn)
        certain_sum = torch.where(certain, rows.weights, 0.0) @ rows.vectors
        # Key i, if light, is not among those the drawn keys come from.
        pool = torch.where(heavy, size, size - 1).clamp(min=1)
        light_share, heavy_share = (drawn / p.clamp(min=1) for p in (size - 1, size))
        mean = rows.distances_to(certain_sum + light_share * light_sum, (1 + light_share) * rows.weights)
        for_heavy = rows.distances_to(certain_sum + heavy_share * light_sum, rows.weights)
        mean = torch.where(heavy, for_heavy, mean)
        variance = drawn * (pool - drawn).clamp(min=0) / (pool * (pool - 1).clamp(min=1)) * apart
        lower = lower + chance * mean
        upper = upper + chance * safe_sqrt(mean.square() + variance)
    return Bounds(_mean_over_sets(rows, lower), _mean_over_sets(rows, upper))


def _bounds_of_one_case(rows: SelectedRows) -> Bounds:
    N, n, share = rows.top_n, rows.n.unsqueeze(-1), _others_share(rows)
    mean = rows.distances_to(share * rows.output, (1 + share) * rows.weights, share * rows.along_output)
    size = n.clamp(min=1)
    apart = rows.distances_to(rows.output / size, rows.weights, rows.along_output / size).square()
    others_apart = sum_where(apart, rows.visible).unsqueeze(-1) - n / (n - 1).clamp(min=1) * apart
    variance = share * (n - 1 - N).clamp(min=0) / (n - 2).clamp(min=1) * others_apart.clamp(min=0)
    return Bounds(_mean_over_sets(rows, mean), _mean_over_sets(rows, safe_sqrt(mean.square() + variance)))


def _chance(rows: SelectedRows, heavy: Tensor, certain: Tensor, size: Tensor, drawn: int) -> Tensor:
    """For each key i: the chance that a random set which avoids i has exactly the `certain` ones of the heavy keys."""
    all_sets = _log_choose((rows.n - 1).unsqueeze(-1), rows.top_n)
    of_light, of_heavy = (
        torch.where(pool >= drawn, (_log_choose(pool, drawn) - all_sets).exp().to(size.dtype), 0.0)
        for pool in (size - 1, size)
    )
    possible = (~certain | heavy).all(-1, keepdim=True) & ~certain
    return torch.where(possible, torch.where(heavy, of_heavy, of_light), 0.0)


def _log_choose(n: Tensor, k: int) -> Tensor:
    """log of n over k, in float64: its parts are large numbers that cancel."""
    n = n.double().clamp(min=k)
    return torch.lgamma(n + 1) - torch.lgamma(n - k + 1) - math.lgamma(k + 1)


def corollary2_printed(rows: SelectedRows) -> Tensor:
    """sum_i ||a_i x_i||, printed as what E tends to for N << L; it can be off by the factor N + 1."""
    return rows.per_row(sum_where(rows.norms, rows.visible))


def corollary2_bounds(rows: SelectedRows) -> Bounds:
    """c (1 - N/n) Y <= E <= (N+1)(1 - N/n) Y with Y = sum_i ||y_i|| and c = (N-1)(n-1+N) / ((N-1)(n-1) + Nn).

    A one-hot row attains the upper end for every N. At N = n - 1 that is still Y: E vanishes at N = n, not before.
    """
    N, n = rows.top_n, rows.n.unsqueeze(-1)
    c = (N - 1) * (n - 1 + N) / ((N - 1) * (n - 1) + N * n).clamp(min=1)
    return Bounds(_mean_over_sets(rows, c * rows.norms), _mean_over_sets(rows, (N + 1) * rows.norms))


def _others_share(rows: SelectedRows) -> Tensor:
    """N/(n-1), the chance that a given other key is selected when key i is not."""
    return (rows.top_n / (rows.n - 1).clamp(min=1)).unsqueeze(-1)


def _mean_over_sets(rows: SelectedRows, given_outside: Tensor) -> Tensor:
    """(n-N)/n sum_i: each key is outside a random set with chance (n-N)/n."""
    n = rows.n.clamp(min=1)
    return rows.per_row((n - rows.top_n) / n * sum_where(given_outside, rows.visible))


@dataclass(frozen=True)
class MonteCarlo:
    """The mean of independent draws and its standard error."""

    mean: Tensor
    standard_error: Tensor
    draws: int


def monte_carlo(draw: Callable[[], Tensor], draws: int) -> MonteCarlo:
    """Runs `draw` that often; mean and variance by Welford's update, so that no draw is kept."""
    if draws < 2:
        raise ValueError(f"a standard error needs at least 2 draws, got {draws}")
    mean = draw()
    squares = torch.zeros_like(mean)
    for count in range(2, draws + 1):
        value = draw()
        step = value - mean
        mean = mean + step / count
        squares = squares + step * (value - mean)
    return MonteCarlo(mean, (squares / (draws - 1) / draws).sqrt(), draws)


def random_set_monte_carlo(
    rows: SelectedRows, draws: int = 1000, generator: torch.Generator | None = None
) -> MonteCarlo:
    """E of eq. 8 by drawing sets of N visible keys uniformly."""

    def draw() -> Tensor:
        scores = torch.rand(rows.weights.shape, generator=generator, dtype=torch.float64, device=rows.weights.device)
        order = torch.where(rows.visible, scores, -1.0).topk(rows.top_n, dim=-1).indices
        return d_tilde(rows.with_indices(order))

    with torch.no_grad():
        return monte_carlo(draw, draws)


def random_set_exact(rows: SelectedRows, most_sets: int = 200_000) -> Tensor:
    """E of eq. 8 by going through every set of N visible keys; for rows of few keys."""
    shape = rows.weights.shape[:-1]
    sets = max(math.comb(int(n), rows.top_n) for n in rows.n.flatten())
    if sets > most_sets:
        raise ValueError(f"{sets} sets of {rows.top_n} keys are more than {most_sets}; use random_set_monte_carlo")
    vectors = rows.vectors.expand(*shape[:-1], *rows.vectors.shape[-2:])
    result = torch.full(shape, torch.nan, dtype=rows.weights.dtype, device=rows.weights.device)
    for row in itertools.product(*map(range, shape)):
        keys = rows.visible[row].nonzero().squeeze(-1)
        if len(keys) <= rows.top_n:
            continue
        subsets = torch.tensor(list(itertools.combinations(range(len(keys)), rows.top_n)), device=keys.device)
        weights = rows.weights[row][keys].expand(len(subsets), -1)
        alone = select(weights, vectors[row[:-1]][keys], rows.top_n).with_indices(subsets)
        result[row] = d_tilde(alone).mean()
    return rows.per_row(result)
