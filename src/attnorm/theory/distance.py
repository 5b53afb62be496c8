"""Distance: how far the keys left out lie from what the selected keys add up to.

Theorem 1 and Corollary 2 of Mudarisov et al. 2025, https://arxiv.org/abs/2508.17821, section 2.1, as printed and as
corrected, and the quantities they bound. All functions take a `SelectedRows` (see selection.py for the notation); rows
with n <= N give NaN. Proofs and counterexamples: docs/theory/distance.md.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from scipy import stats
from torch import Tensor

from attnorm.theory.dispersion import Bounds, least_squares_line
from attnorm.theory.selection import SelectedRows, safe_sqrt, scaled_distances, select


def d_tilde(rows: SelectedRows) -> Tensor:
    """The distance of eq. 7: the sum of ||y_i - s|| over the visible keys outside I."""
    return rows.per_row(_sum(rows.distances, rows.outside))


def relative_distance(rows: SelectedRows) -> Tensor:
    """d_tilde / ((n - N) ||s||): 1 where the keys left out are negligible next to s. NaN where s = 0."""
    size = _norm(rows.context)
    left_out = (rows.n - rows.top_n).clamp(min=1)
    distance = _sum(rows.distances, rows.outside)
    return rows.per_row(distance / (left_out * torch.where(size > 0, size, 1.0)), size > 0)


def relative_distance_bounds(rows: SelectedRows) -> Bounds:
    """1 - e <= relative distance <= 1 + e with e the mean of ||y_i|| outside I over ||s||, by the triangle inequality.

    So d_tilde is (n - N) ||s|| up to the factor 1 +- e, and grows with n for that reason alone.
    """
    size = _norm(rows.context)
    left_out = (rows.n - rows.top_n).clamp(min=1)
    e = _sum(rows.norms, rows.outside) / (left_out * torch.where(size > 0, size, 1.0))
    return Bounds(rows.per_row((1 - e).clamp(min=0), size > 0), rows.per_row(1 + e, size > 0))


def theorem1_fixed_printed(rows: SelectedRows) -> Tensor:
    """(1-A) d1 + max_I ||x_j|| (A(n-N) - (1-A)), d1 the largest ||x_i - x_j|| between outside and I: d_tilde <= this.

    Needs weights that are not negative and sum to 1 (NaN otherwise) and I the true top-N set. Cost O(L N d).
    """
    A = rows.mass
    total = rows.weights.sum(-1)
    proper = (rows.weights >= 0).all(-1) & ((total - 1).abs() < 1e-4)
    if not bool(proper.any()):
        raise ValueError(
            f"the printed Theorem 1 needs weights >= 0 that sum to 1; here a row sums to {float(total.flatten()[0])}. "
            "theorem1_fixed_tight needs neither"
        )
    largest_chosen = _largest(safe_sqrt(rows.vectors.square().sum(-1)).unsqueeze(-2), rows.chosen)
    second = largest_chosen * (A * (rows.n - rows.top_n) - (1 - A))
    return rows.per_row((1 - A) * _largest_gap(rows) + second, proper)


def _largest_gap(rows: SelectedRows) -> Tensor:
    """d1, one selected key after the other, so that memory stays at one number per row and key."""
    ones = torch.ones_like(rows.weights)
    largest = torch.zeros_like(rows.mass)
    vectors = rows.vectors.expand(*rows.weights.shape[:-2], *rows.vectors.shape[-2:])
    for rank in range(rows.top_n):
        key = rows.indices[..., rank, None].expand(*rows.mass.shape, vectors.shape[-1])
        distances = scaled_distances(ones, vectors, vectors.gather(-2, key))
        largest = torch.maximum(largest, _largest(distances, rows.outside))
    return largest


def theorem1_fixed_tight(rows: SelectedRows) -> Tensor:
    """sum over i outside I of |a_i| ||x_i - s/A|| + |A - a_i| ||s||/|A|: d_tilde <= this <= the printed bound.

    Holds for any weights (unnormalised, signed) and any set I with A != 0 (NaN otherwise). Cost O(L d).
    """
    A = rows.mass
    usable = A != 0
    safe = torch.where(usable, A, 1.0).unsqueeze(-1)
    centre = rows.context / safe
    spread = rows.weights.abs() * scaled_distances(torch.ones_like(rows.weights), rows.vectors, centre)
    shift = (safe - rows.weights).abs() * _norm(centre).unsqueeze(-1)
    return rows.per_row(_sum(spread + shift, rows.outside), usable)


def theorem1_random_printed(rows: SelectedRows) -> Tensor:
    """(n-N)/n sum_i ||(a_i + N/(n-1)) x_i - x_bar||: the printed main term of E, a misprint (see the doc)."""
    share = _others_share(rows)
    return _mean_over_sets(rows, scaled_distances(rows.weights + share, rows.vectors, rows.output))


def theorem1_random_epsilon(rows: SelectedRows) -> Tensor:
    """The printed bound on eps. It is a true bound on E minus the *corrected* main term; infinite where mu_i = 0."""
    squares = rows.norms.square()
    others = squares.sum(-1, keepdim=True) - squares
    ratio = torch.where(others > 0, others / _mean_difference(rows), 0.0)
    return _mean_over_sets(rows, 0.5 * _others_share(rows) * ratio)


def theorem1_random_bounds(rows: SelectedRows) -> Bounds:
    """(n-N)/n sum_i ||mu_i|| <= E <= (n-N)/n sum_i sqrt(||mu_i||^2 + V_i): Theorem 1 (random set), corrected.

    mu_i = (1 + N/(n-1)) y_i - N/(n-1) x_bar is the mean of y_i - s when I avoids i, and V_i the exact variance of s
    then (sampling N of the n-1 others without replacement). Cost O(L d).
    """
    N, n = rows.top_n, rows.n.unsqueeze(-1)
    mean = _mean_difference(rows)
    centred = scaled_distances(rows.weights, rows.vectors, rows.output / n.clamp(min=1)).square()
    centred = torch.where(rows.visible, centred, 0.0)
    rest = (n - 1).clamp(min=1)
    around_own_mean = (centred.sum(-1, keepdim=True) - n / rest * centred).clamp(min=0)
    variance = N * (rest - N).clamp(min=0) / (rest * (rest - 1).clamp(min=1)) * around_own_mean
    return Bounds(_mean_over_sets(rows, mean), _mean_over_sets(rows, safe_sqrt(mean.square() + variance)))


def corollary2_printed(rows: SelectedRows) -> Tensor:
    """sum_i ||a_i x_i||, printed as what E tends to for N << L; it can be off by the factor N + 1."""
    return rows.per_row(_sum(rows.norms, rows.visible))


def corollary2_bounds(rows: SelectedRows) -> Bounds:
    """c (1 - N/n) Y <= E <= (N+1)(1 - N/n) Y, Y = sum_i ||y_i||, c = (N-1)(n-1+N) / ((N-1)(n-1) + Nn), at most 1/2.

    The upper end is attained by a one-hot row; at N = n - 1 it is still Y (1 + o(1)), so E vanishes at N = n only.
    """
    N, n = rows.top_n, rows.n.unsqueeze(-1)
    c = (N - 1) * (n - 1 + N) / ((N - 1) * (n - 1) + N * n).clamp(min=1)
    return Bounds(_mean_over_sets(rows, c * rows.norms), _mean_over_sets(rows, (N + 1) * rows.norms))


def _others_share(rows: SelectedRows) -> Tensor:
    """N/(n-1), the chance that a given other key is selected when key i is not."""
    return (rows.top_n / (rows.n - 1).clamp(min=1)).unsqueeze(-1)


def _mean_difference(rows: SelectedRows) -> Tensor:
    """||mu_i|| for every key."""
    share = _others_share(rows)
    return scaled_distances((1 + share) * rows.weights, rows.vectors, share * rows.output)


def _mean_over_sets(rows: SelectedRows, given_outside: Tensor) -> Tensor:
    """(n-N)/n sum_i: each key is outside a random set with chance (n-N)/n."""
    n = rows.n.clamp(min=1)
    return rows.per_row((n - rows.top_n) / n * _sum(given_outside, rows.visible))


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


@dataclass(frozen=True)
class PowerLaw:
    """values = coefficient * lengths^exponent, with intervals at the given confidence (log-log least squares)."""

    coefficient: float
    exponent: float
    exponent_interval: tuple[float, float]
    confidence: float

    @property
    def sub_linear(self) -> bool:
        """Whether the data rule out linear growth: the whole interval lies below 1."""
        return self.exponent_interval[1] < 1


def fit_power_law(lengths: Tensor, values: Tensor, confidence: float = 0.95) -> PowerLaw:
    """c L^g for positive values at three or more lengths: what "grows sub-linearly" has to be judged by."""
    if lengths.dim() != 1 or lengths.shape != values.shape or len(lengths) < 3:
        raise ValueError(
            f"expected three or more lengths with one value each, got {tuple(lengths.shape)} and {tuple(values.shape)}"
        )
    if bool((lengths <= 0).any()) or bool((values <= 0).any()):
        raise ValueError(f"a power law needs positive lengths and values, got {lengths.tolist()}, {values.tolist()}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie strictly between 0 and 1, got {confidence}")
    line = least_squares_line(lengths.double().log(), values.double().log())
    exponent = float(line.slope)
    margin = float(line.slope_standard_error) * float(stats.t.ppf((1 + confidence) / 2, len(lengths) - 2))
    return PowerLaw(math.exp(float(line.intercept)), exponent, (exponent - margin, exponent + margin), confidence)


def no_collapse_example(length: int) -> SelectedRows:
    """Equal vectors, equal weights, N = L/2: d_tilde = L/4 - 1/2, growing where the paper says it must vanish."""
    weights = torch.full((length,), 1 / length, dtype=torch.float64)
    return select(weights, torch.ones(length, 1, dtype=torch.float64), length // 2)


def _sum(values: Tensor, where: Tensor) -> Tensor:
    return torch.where(where, values, 0.0).sum(-1)


def _largest(values: Tensor, where: Tensor) -> Tensor:
    return torch.where(where, values, 0.0).amax(-1)


def _norm(vectors: Tensor) -> Tensor:
    return safe_sqrt(vectors.square().sum(-1))
