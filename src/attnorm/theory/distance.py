"""Distance between the weighted sum of the selected keys and the keys that are not selected.

Theorem 1 and Corollary 2 of Mudarisov et al. 2025, https://arxiv.org/abs/2508.17821, section 2.1, as printed and
corrected, the distance they bound, and the paper's informal statements about it. The selected set is fixed, or I is
uniform among all sets of N of the n visible keys and E is the mean of d_tilde (eq. 8), by Monte Carlo or by going
through all sets. All functions take `SelectedRows` (see selection.py for the notation); rows with n <= N give NaN.
Proofs and counterexamples: docs/theory/distance.md.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnorm.engines.execution import runs_asynchronously
from attnorm.theory.dispersion import Bounds, least_squares_line
from attnorm.theory.selection import SelectedRows, safe_sqrt, select, sum_where

PAIRS_AT_ONCE = 2**25  # of a selected key and another one, on a GPU


def d_tilde(rows: SelectedRows) -> Tensor:
    """Return the distance of eq. 7: the sum of ||y_i - s|| over the visible keys outside the selected set I."""
    return rows.per_row(sum_where(rows.distances, rows.outside))


def relative_distance(rows: SelectedRows) -> Tensor:
    """Return the distance relative to the context vector: d_tilde / ((n - N) ||s||); NaN if s = 0.

    It is 1 if the keys that are not selected are negligible compared with s.
    """
    size = _norm(rows.context)
    left_out = (rows.n - rows.top_n).clamp(min=1)
    distance = sum_where(rows.distances, rows.outside)
    return rows.per_row(distance / (left_out * torch.where(size > 0, size, 1.0)), size > 0)


def relative_distance_bounds(rows: SelectedRows) -> Bounds:
    """Return bounds of the relative distance by the triangle inequality: 1 - e and 1 + e.

    e is the mean of ||y_i|| outside I over ||s||.

    So d_tilde is (n - N) ||s|| up to the factor 1 +- e, and grows with n for that reason alone.
    """
    size = _norm(rows.context)
    left_out = (rows.n - rows.top_n).clamp(min=1)
    e = sum_where(rows.norms, rows.outside) / (left_out * torch.where(size > 0, size, 1.0))
    return Bounds(rows.per_row((1 - e).clamp(min=0), size > 0), rows.per_row(1 + e, size > 0))


def theorem1_fixed_printed(rows: SelectedRows) -> Tensor:
    """Return Theorem 1's bound of d_tilde for a fixed set, as printed.

    d_tilde <= (1-A) d1 + max_I ||x_j|| (A(n-N) - (1-A)), d1 the largest ||x_i - x_j|| between outside and I.

    Needs weights that are not negative and sum to 1 (NaN otherwise) and I the true top-N set. Cost O(L N d).
    """
    A = rows.mass
    total = rows.weights.sum(-1)
    proper = (rows.weights.amin(-1) >= 0) & ((total - 1).abs() < 1e-4)
    if not bool(proper.any()):
        raise ValueError(
            "the printed Theorem 1 needs weights of at least 0 that sum to 1, got a row with a smallest weight of "
            f"{float(rows.weights.amin(-1).flatten()[0]):.3g} and the sum {float(total.flatten()[0]):.6g}. "
            "Use theorem1_fixed_tight, which needs neither."
        )
    d1 = largest_gaps(rows, (rows.top_n,))[..., 0]
    squares = rows.squares.unsqueeze(-2).expand(rows.weights.shape).gather(-1, rows.indices)
    second = safe_sqrt(squares.amax(-1)) * (A * (rows.n - rows.top_n) - (1 - A))
    return rows.per_row((1 - A) * d1 + second, proper)


def largest_gaps(rows: SelectedRows, sizes: Sequence[int]) -> Tensor:
    """d1 for the first N of the selected keys, for each N: (..., Q, len(sizes)).

    The keys outside all these sets are compared once; what is outside a smaller set only is a selected key itself.
    """
    seen_keys = rows.visible.any(-2).to(rows.vectors.dtype).unsqueeze(-1)
    center = (seen_keys * rows.vectors).sum(-2, keepdim=True) / seen_keys.sum(-2, keepdim=True).clamp(min=1)
    rows = replace(rows, vectors=rows.vectors - center)  # nearer to 0 the inner products lose fewer digits
    farthest = _farthest_outside(rows)
    if any(rows.top_n > N for N in sizes):
        points = rows.chosen_vectors
        squares = points.square().sum(-1)
        along = points @ points.mT.contiguous()  # without the copy, torch on ARM takes ten times as long
        among = squares.unsqueeze(-1) + squares.unsqueeze(-2) - 2 * along
        among = among * rows.visible.gather(-1, rows.indices).unsqueeze(-2)
    gaps = []
    for N in sizes:
        gap = farthest[..., :N].amax(-1)
        if rows.top_n > N:
            gap = torch.maximum(gap, among[..., :N, N:].amax((-2, -1)))
        gaps.append(safe_sqrt(gap))
    return torch.stack(gaps, -1)


def _farthest_outside(rows: SelectedRows) -> Tensor:
    """For every selected key the largest ||x_i - x_j||^2 of a key outside I: (..., Q, N)."""
    *sets, keys, width = rows.weights.shape[:-2] + rows.vectors.shape[-2:]
    vectors = rows.vectors.expand(*sets, keys, width).reshape(-1, keys, width)
    squares = vectors.square().sum(-1)
    others = torch.where(rows.outside.reshape(len(vectors), -1, keys), squares.unsqueeze(-2), -torch.inf)
    indices = rows.indices.reshape(len(vectors), -1, rows.top_n)
    if runs_asynchronously(vectors):
        return _farthest_on_device(vectors, squares, others, indices).reshape(rows.indices.shape)
    largest = []
    for x, set_squares, of_rows, outside in zip(vectors, squares, indices, others, strict=True):
        for row_indices, other in zip(of_rows, outside, strict=True):  # one row at a time stays in the cache
            # ||x_i - x_j||^2 - ||x_j||^2 = ||x_i||^2 - 2 x_i.x_j
            pairs = torch.addmm(other.unsqueeze(0), x[row_indices], x.T, alpha=-2)
            largest.append((pairs.amax(-1) + set_squares[row_indices]).clamp(min=0))
    return torch.stack(largest).reshape(rows.indices.shape)


def _farthest_on_device(x: Tensor, squares: Tensor, others: Tensor, indices: Tensor) -> Tensor:
    """The same for as many rows at once as memory allows; indices (sets, rows, N), others (sets, rows, keys)."""
    rows_at_once = max(1, PAIRS_AT_ONCE // (len(x) * x.shape[1] * indices.shape[-1]))
    largest = []
    for part_indices, other in zip(indices.split(rows_at_once, 1), others.split(rows_at_once, 1), strict=True):
        flat = part_indices.flatten(1)
        points = x.gather(1, flat.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        along = (points @ x.mT).unflatten(1, part_indices.shape[1:])  # (sets, rows, N, keys)
        pairs = torch.sub(other.unsqueeze(-2), along, alpha=2)
        selected_squares = squares.gather(1, flat).unflatten(1, part_indices.shape[1:])
        largest.append((pairs.amax(-1) + selected_squares).clamp(min=0))
    return torch.cat(largest, 1)


def theorem1_fixed_tight(rows: SelectedRows) -> Tensor:
    """Return a tighter bound of d_tilde for a fixed set: d_tilde <= this <= the printed bound.

    sum over i outside I of |a_i| ||x_i - s/A|| + |A - a_i| ||s||/|A|.

    Holds for any weights (unnormalised, signed) and any set I with A != 0 (NaN otherwise). Cost O(L d).
    """
    A = rows.mass
    usable = A != 0
    safe = torch.where(usable, A, 1.0).unsqueeze(-1)
    center = rows.context / safe
    along = rows.along_context / safe
    spread = rows.weights.abs() * rows.distances_to(center, torch.ones_like(rows.weights), along)
    shift = (safe - rows.weights).abs() * _norm(center).unsqueeze(-1)
    return rows.per_row(sum_where(spread + shift, rows.outside), usable)


@dataclass(frozen=True)
class PowerLaw:
    """values = coefficient * lengths^exponent, with intervals at the given confidence (log-log least squares)."""

    coefficient: float
    exponent: float
    exponent_interval: tuple[float, float]
    confidence: float


def fit_power_law(lengths: Tensor, values: Tensor, confidence: float = 0.95) -> PowerLaw:
    """Fit c L^g to positive values at three or more lengths; the exponent g shows whether it "grows sub-linearly"."""
    if lengths.dim() != 1 or lengths.shape != values.shape or len(lengths) < 3:
        raise ValueError(
            f"expected three or more lengths with one value each, got {tuple(lengths.shape)} and {tuple(values.shape)}"
        )
    if bool((lengths <= 0).any()) or bool((values <= 0).any()):
        raise ValueError(f"a power law needs positive lengths and values, got {lengths.tolist()}, {values.tolist()}")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie strictly between 0 and 1, got {confidence}")
    from scipy.stats import t  # nearly a second to load, and a measurement needs no confidence interval

    line = least_squares_line(lengths.double().log(), values.double().log())
    exponent = float(line.slope)
    margin = float(line.slope_standard_error) * float(t.ppf((1 + confidence) / 2, len(lengths) - 2))
    return PowerLaw(math.exp(float(line.intercept)), exponent, (exponent - margin, exponent + margin), confidence)


def ks_resolution(heads: int, level: float = 0.01) -> float:
    """Return the smallest gap that a two-sample Kolmogorov-Smirnov test of that many heads can detect.

    sqrt(-log(level/2) / heads): 0.19 for 144 heads, so "indistinguishable" depends on how many heads a model has.
    """
    if heads < 1 or not 0 < level < 1:
        raise ValueError(f"expected at least one head and 0 < level < 1, got heads = {heads}, level = {level}")
    return math.sqrt(-math.log(level / 2) / heads)


def no_collapse_example(length: int) -> SelectedRows:
    """Return a counterexample: equal vectors and weights, N = L/2, whose d_tilde = L/4 - 1/2 grows, not vanishes."""
    weights = torch.full((length,), 1 / length, dtype=torch.float64)
    return select(weights, torch.ones(length, 1, dtype=torch.float64), length // 2)


def _norm(vectors: Tensor) -> Tensor:
    return safe_sqrt(vectors.square().sum(-1))


def theorem1_random_printed(rows: SelectedRows) -> Tensor:
    """Return the printed main term of the mean distance E for a random set, a misprint (see docs/theory).

    (n-N)/n sum_i ||(a_i + N/(n-1)) x_i - x_bar||
    """
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
    """Return the corrected bounds of Theorem 1 for a random set.

    (n-N)/n sum_i ||mu_i|| <= E <= (n-N)/n sum_i sqrt(||mu_i||^2 + V_i)

    mu_i = (1 + N/(n-1)) y_i - N/(n-1) x_bar is the mean of y_i - s when I avoids i, and V_i the exact variance of s
    then (sampling N of the n-1 others without replacement). Cost O(L d).

    `heaviest` = m distinguishes the 2^m cases which of the m longest y_j are in I, and bounds each: never looser, and
    much tighter for peaked rows, where s depends mostly on whether it contains the winner. Cost O(2^m L d).
    """
    if not 0 <= heaviest <= 12:
        raise ValueError(f"heaviest must lie between 0 and 12, because it costs 2^heaviest passes, got {heaviest}")
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
        included_flags = torch.tensor(included, dtype=torch.bool, device=heavy.device).expand(heavy_keys.shape)
        certain = torch.zeros_like(heavy).scatter(-1, heavy_keys, included_flags)
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
    """Return sum_i ||a_i x_i||, the printed limit of E for N << L; it can be wrong by the factor N + 1."""
    return rows.per_row(sum_where(rows.norms, rows.visible))


def corollary2_bounds(rows: SelectedRows) -> Bounds:
    """Return the corrected bounds of Corollary 2.

    c (1 - N/n) Y <= E <= (N+1)(1 - N/n) Y with Y = sum_i ||y_i|| and c = (N-1)(n-1+N) / ((N-1)(n-1) + Nn).

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
    """Average `draw` over that many calls; mean and variance by Welford's update, so that no draw is stored."""
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
    """Estimate E of eq. 8 from sets of N visible keys drawn uniformly."""

    def draw() -> Tensor:
        scores = torch.rand(rows.weights.shape, generator=generator, dtype=torch.float64, device=rows.weights.device)
        order = torch.where(rows.visible, scores, -1.0).topk(rows.top_n, dim=-1).indices
        return d_tilde(rows.with_indices(order))

    with torch.no_grad():
        return monte_carlo(draw, draws)


def random_set_exact(rows: SelectedRows, most_sets: int = 200_000) -> Tensor:
    """Return E of eq. 8 exactly, over all sets of N visible keys; for rows of few keys."""
    shape = rows.weights.shape[:-1]
    sets = max(math.comb(int(n), rows.top_n) for n in rows.n.flatten())
    if sets > most_sets:
        raise ValueError(
            f"expected at most {most_sets} sets of {rows.top_n} keys, got {sets}. Use random_set_monte_carlo."
        )
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
