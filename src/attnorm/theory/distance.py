"""Distance: how far the keys left out lie from what the selected keys add up to.

Theorem 1 (fixed set) of Mudarisov et al. 2025, https://arxiv.org/abs/2508.17821, section 2.1, as printed and tighter,
the distance it bounds, and the paper's informal statements about it. Theorem 1 for a random set: random_set.py. All
functions take `SelectedRows` (see selection.py for the notation); rows with n <= N give NaN. Proofs and
counterexamples: docs/theory/distance.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnorm.engines.device_sync import runs_asynchronously
from attnorm.theory.dispersion import Bounds, least_squares_line
from attnorm.theory.selection import SelectedRows, safe_sqrt, select, sum_where

PAIRS_AT_ONCE = 2**25  # of a selected key and another one, on a GPU


def d_tilde(rows: SelectedRows) -> Tensor:
    """The distance of eq. 7: the sum of ||y_i - s|| over the visible keys outside I."""
    return rows.per_row(sum_where(rows.distances, rows.outside))


def relative_distance(rows: SelectedRows) -> Tensor:
    """d_tilde / ((n - N) ||s||): 1 where the keys left out are negligible next to s. NaN where s = 0."""
    size = _norm(rows.context)
    left_out = (rows.n - rows.top_n).clamp(min=1)
    distance = sum_where(rows.distances, rows.outside)
    return rows.per_row(distance / (left_out * torch.where(size > 0, size, 1.0)), size > 0)


def relative_distance_bounds(rows: SelectedRows) -> Bounds:
    """1 - e <= relative distance <= 1 + e with e the mean of ||y_i|| outside I over ||s||, by the triangle inequality.

    So d_tilde is (n - N) ||s|| up to the factor 1 +- e, and grows with n for that reason alone.
    """
    size = _norm(rows.context)
    left_out = (rows.n - rows.top_n).clamp(min=1)
    e = sum_where(rows.norms, rows.outside) / (left_out * torch.where(size > 0, size, 1.0))
    return Bounds(rows.per_row((1 - e).clamp(min=0), size > 0), rows.per_row(1 + e, size > 0))


def theorem1_fixed_printed(rows: SelectedRows, gap: Tensor | None = None) -> Tensor:
    """(1-A) d1 + max_I ||x_j|| (A(n-N) - (1-A)), d1 the largest ||x_i - x_j|| between outside and I: d_tilde <= this.

    Needs weights that are not negative and sum to 1 (NaN otherwise) and I the true top-N set. Cost O(L N d).
    gap: d1 of each row, where `largest_gaps` has found it for several N at once.
    """
    A = rows.mass
    total = rows.weights.sum(-1)
    proper = (rows.weights.amin(-1) >= 0) & ((total - 1).abs() < 1e-4)
    if not bool(proper.any()):
        raise ValueError(
            f"the printed Theorem 1 needs weights >= 0 that sum to 1; here a row sums to {float(total.flatten()[0])}. "
            "theorem1_fixed_tight needs neither"
        )
    d1 = largest_gaps(rows, (rows.top_n,))[..., 0] if gap is None else gap
    squares = rows.squares.unsqueeze(-2).expand(rows.weights.shape).gather(-1, rows.indices)
    second = safe_sqrt(squares.amax(-1)) * (A * (rows.n - rows.top_n) - (1 - A))
    return rows.per_row((1 - A) * d1 + second, proper)


def largest_gaps(rows: SelectedRows, sizes: Sequence[int]) -> Tensor:
    """d1 for the first N of the selected keys, for each N: (..., Q, len(sizes)).

    The keys outside all these sets are compared once; what is outside a smaller set only is a selected key itself.
    """
    seen = rows.visible.any(-2).to(rows.vectors.dtype).unsqueeze(-1)
    centre = (seen * rows.vectors).sum(-2, keepdim=True) / seen.sum(-2, keepdim=True).clamp(min=1)
    rows = replace(rows, vectors=rows.vectors - centre)  # nearer to 0 the inner products lose fewer digits
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
    found = []
    for x, own, of_rows, outside in zip(vectors, squares, indices, others, strict=True):
        for chosen, other in zip(of_rows, outside, strict=True):  # one row at a time stays in the cache
            # ||x_i - x_j||^2 - ||x_j||^2 = ||x_i||^2 - 2 x_i.x_j
            pairs = torch.addmm(other.unsqueeze(0), x[chosen], x.T, alpha=-2)
            found.append((pairs.amax(-1) + own[chosen]).clamp(min=0))
    return torch.stack(found).reshape(rows.indices.shape)


def _farthest_on_device(x: Tensor, squares: Tensor, others: Tensor, indices: Tensor) -> Tensor:
    """The same for as many rows at once as memory allows; indices (sets, rows, N), others (sets, rows, keys)."""
    rows_at_once = max(1, PAIRS_AT_ONCE // (len(x) * x.shape[1] * indices.shape[-1]))
    found = []
    for chosen, other in zip(indices.split(rows_at_once, 1), others.split(rows_at_once, 1), strict=True):
        flat = chosen.flatten(1)
        points = x.gather(1, flat.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        along = (points @ x.mT).unflatten(1, chosen.shape[1:])  # (sets, rows, N, keys)
        pairs = torch.sub(other.unsqueeze(-2), along, alpha=2)
        own = squares.gather(1, flat).unflatten(1, chosen.shape[1:])
        found.append((pairs.amax(-1) + own).clamp(min=0))
    return torch.cat(found, 1)


def theorem1_fixed_tight(rows: SelectedRows) -> Tensor:
    """sum over i outside I of |a_i| ||x_i - s/A|| + |A - a_i| ||s||/|A|: d_tilde <= this <= the printed bound.

    Holds for any weights (unnormalised, signed) and any set I with A != 0 (NaN otherwise). Cost O(L d).
    """
    A = rows.mass
    usable = A != 0
    safe = torch.where(usable, A, 1.0).unsqueeze(-1)
    centre = rows.context / safe
    along = rows.along_context / safe
    spread = rows.weights.abs() * rows.distances_to(centre, torch.ones_like(rows.weights), along)
    shift = (safe - rows.weights).abs() * _norm(centre).unsqueeze(-1)
    return rows.per_row(sum_where(spread + shift, rows.outside), usable)


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
    """c L^g for positive values at three or more lengths: the exponent g decides whether it "grows sub-linearly"."""
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
    """The gap between two distributions of that many heads that a two-sample Kolmogorov-Smirnov test first sees.

    sqrt(-log(level/2) / heads): 0.19 for 144 heads, so "indistinguishable" depends on how many heads a model has.
    """
    if heads < 1 or not 0 < level < 1:
        raise ValueError(f"expected at least one head and 0 < level < 1, got heads = {heads}, level = {level}")
    return math.sqrt(-math.log(level / 2) / heads)


def no_collapse_example(length: int) -> SelectedRows:
    """Equal vectors, equal weights, N = L/2: d_tilde = L/4 - 1/2, growing where the paper says it must vanish."""
    weights = torch.full((length,), 1 / length, dtype=torch.float64)
    return select(weights, torch.ones(length, 1, dtype=torch.float64), length // 2)


def _norm(vectors: Tensor) -> Tensor:
    return safe_sqrt(vectors.square().sum(-1))
