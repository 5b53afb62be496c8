"""Distances and bounds of the N heaviest keys of each row, for several N at once.

The formulas are those of theory/distance.py and theory/geometry.py, which explain them for one N. The sets of several N
contain each other. So everything that does not depend on N is computed once, and one operation serves all N: on a GPU,
short rows take as long as the launches of their operations. Separability is in separability.py.

Shape letters: g sets of vectors, r rows that share one, w keys, E width, N sizes, m the most selected keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attnorm.engines.execution import runs_asynchronously, sent_to
from attnorm.theory.distance import largest_gaps
from attnorm.theory.geometry import cantelli_bounds, without_each
from attnorm.theory.selection import SelectedRows, safe_sqrt, scaled_distances, top_n_indices

PROPER = 1e-4  # tolerance for rows of weights that sum to 1


@dataclass(frozen=True)
class NestedSets:
    """Rows with their heaviest keys. Hidden keys have weight 0; rows with n <= N give NaN."""

    weights: Tensor  # (g, r, w)
    vectors: Tensor  # (g, w, E)
    visible: Tensor  # (g, r, w)
    order: Tensor  # (g, r, m): the heaviest keys, heaviest first
    sizes: tuple[int, ...]  # in ascending order
    log_weights: Tensor | None = None  # up to a constant per row; -inf at hidden keys
    ranking: Tensor | None = None  # (g, r, w): all keys, heaviest first, where they have been sorted

    @classmethod
    def of(
        cls, weights: Tensor, vectors: Tensor, visible: Tensor, sizes: Sequence[int], log_weights: Tensor | None
    ) -> "NestedSets":
        numbers = weights if log_weights is None else log_weights
        if not runs_asynchronously(weights):
            return cls(
                weights, vectors, visible, top_n_indices(numbers, max(sizes), visible), tuple(sizes), log_weights
            )
        ranking = top_n_indices(numbers, numbers.shape[-1], visible)  # a GPU sorts all keys for fewer ones too
        return cls(weights, vectors, visible, ranking[..., : max(sizes)], tuple(sizes), log_weights, ranking)

    def select_rows(self, rows: Tensor | slice) -> "NestedSets":
        """Return the sets of some of the rows."""
        return self._select((slice(None), rows))

    def select_vectors(self, sets: slice) -> "NestedSets":
        """Return the rows of some of the g sets of vectors."""
        return replace(self._select(sets), vectors=self.vectors[sets])

    def _select(self, index: slice | tuple[slice, Tensor | slice]) -> "NestedSets":
        parts: dict[str, Any] = {}
        for name in ("weights", "visible", "order", "log_weights", "ranking"):
            numbers = getattr(self, name)
            parts[name] = None if numbers is None else numbers[index]
        return replace(self, **parts)

    def ranked_keys(self) -> Tensor:
        """Return all keys of each row, heaviest first, (g, r, w)."""
        if self.ranking is not None:
            return self.ranking
        numbers = self.weights if self.log_weights is None else self.log_weights
        return top_n_indices(numbers, numbers.shape[-1], self.visible)

    def selected(self) -> SelectedRows:
        """The largest set, as the functions of theory take it."""
        return SelectedRows(self.weights, self.vectors, self.visible, self.order, False, self.log_weights)

    @cached_property
    def top_n(self) -> Tensor:
        """The sizes in the dtype of the weights, (N,)."""
        return sizes_on_device(self.sizes, self.weights.device).to(self.weights.dtype)

    @cached_property
    def n(self) -> Tensor:
        """Number of visible keys, (g, r, 1)."""
        return self.visible.sum(-1, keepdim=True, dtype=self.weights.dtype)

    @cached_property
    def inside(self) -> Tensor:
        """Which of the m heaviest keys belong to each set, (N, m)."""
        return torch.arange(self.order.shape[-1], device=self.order.device) < self.top_n.unsqueeze(-1)

    @cached_property
    def chosen_weights(self) -> Tensor:
        """Weights of the m heaviest keys, (g, r, m)."""
        return self.weights.gather(-1, self.order)

    @cached_property
    def rank(self) -> Tensor:
        """Rank of every key among the m heaviest, m for the others, -1 for hidden keys: (g, r, w).

        A key is outside a set of N if its rank is at least N.
        """
        most = self.order.shape[-1]
        ranks = torch.arange(most, dtype=torch.int32, device=self.order.device).expand(self.order.shape)
        rank = ranks.new_full(self.weights.shape, most).scatter_(-1, self.order, ranks)
        return rank.masked_fill_(~self.visible, -1)

    def applicable(self, values: Tensor) -> Tensor:
        """Return the values (..., g, r, N) with NaN for rows with n <= N."""
        return torch.where(self.n > self.top_n, values, torch.nan)


def distances(rows: NestedSets) -> dict[str, Tensor]:
    """Return d_tilde, relative distance and bounds of Theorem 1, (g, r, N); "nearest": distance of outside keys to s.

    In float64 on a GPU: see theory.selection.scaled_distances.
    """
    if runs_asynchronously(rows.weights):
        precise = replace(rows, weights=rows.weights.double(), vectors=rows.vectors.double())
        parts = [_distances(precise, _of_all_sizes(precise))]
    else:  # one N at a time stays in the cache
        shared = _of_all_sizes(rows)
        parts = [_distances(_with_size(rows, N), shared) for N in rows.sizes]
    numbers = {name: torch.cat([part[name] for part in parts], -1) for name in parts[0]}
    gaps = _gaps(rows)
    numbers["fixed_printed"] = (
        torch.full_like(numbers["d_tilde"], torch.nan) if gaps is None else _printed_bound(rows, gaps)
    )
    return {name: rows.applicable(value) for name, value in numbers.items()}


def theorem2(rows: NestedSets, nearest: Tensor) -> tuple[Tensor, Tensor]:
    """Return the bounds of E[N_s]/N for independent uniform directions, (g, r, N), by Theorem 2.

    The radius is the distance of the nearest key outside; the length of the vectors is their root mean square.
    """
    dtype = nearest.dtype
    squares = rows.vectors.to(dtype).square().sum(-1, keepdim=True)
    M2 = (rows.visible.to(dtype) @ squares / rows.n.clamp(min=1)).unsqueeze(-1)  # (g, r, 1, 1)
    inside = rows.inside
    others, pairs = without_each(rows.chosen_weights.to(dtype).square().unsqueeze(-2) * inside)
    mean, variance = M2 * others, 4 * M2**2 * pairs / rows.vectors.shape[-1]
    bounds = cantelli_bounds(mean, variance, nearest.unsqueeze(-1))
    lower, upper = (torch.where(inside, bound, 0.0).sum(-1) / rows.top_n for bound in bounds)
    return rows.applicable(lower), rows.applicable(upper)


@dataclass(frozen=True)
class _OfAllSizes:
    """Intermediate results that do not depend on N."""

    squares: Tensor  # ||x_i||^2, (g, w)
    output: Tensor  # x_bar, (g, r, E)
    along_output: Tensor  # x_i . x_bar, (g, r, w)
    apart: Tensor  # the variance of the other keys about their mean, times their number, (g, r, w)
    visible: Tensor  # 1 or 0, (g, r, 1, w)
    points: Tensor  # the vectors of the heaviest keys, (g, r, m, E)


def _of_all_sizes(rows: NestedSets) -> _OfAllSizes:
    a, x, n = rows.weights, rows.vectors, rows.n
    squares = x.square().sum(-1)
    output = a @ x
    along = output @ x.mT
    size = n.clamp(min=1)
    apart = scaled_distances(a, x, output / size, squares, along / size).square()
    visible = rows.visible.to(a.dtype)
    total = torch.linalg.vecdot(apart, visible).unsqueeze(-1)
    apart = (total - n / (n - 1).clamp(min=1) * apart).clamp(min=0)
    return _OfAllSizes(squares, output, along, apart, visible.unsqueeze(-2), rows.selected().chosen_vectors)


def _with_size(rows: NestedSets, N: int) -> NestedSets:
    single = replace(rows, sizes=(N,))
    single.__dict__.update(n=rows.n, rank=rows.rank, chosen_weights=rows.chosen_weights)  # the same for all sizes
    return single


def _distances(rows: NestedSets, shared: _OfAllSizes) -> dict[str, Tensor]:
    """Compute `distances` from intermediate results that do not depend on N."""
    a, n, N = rows.weights.unsqueeze(-2), rows.n, rows.top_n
    outside = rows.rank.unsqueeze(-2) >= N.unsqueeze(-1)  # (g, r, N, w)
    left_out = outside.to(a.dtype)

    def apart(coefficients: Tensor, points: Tensor, along: Tensor) -> Tensor:
        """||c_i x_i - p||, (g, r, N, w)."""
        c, p, along_p = (t.flatten(1, 2) for t in (coefficients, points, along))
        distance: Tensor = scaled_distances(c, rows.vectors, p, shared.squares, along_p).unflatten(1, along.shape[1:3])
        return distance

    def mean_over_sets(values: Tensor) -> Tensor:
        """(n-N)/n sum_i: each key is outside a random set with chance (n-N)/n."""
        size = n.clamp(min=1)
        total: Tensor = torch.linalg.vecdot(values, shared.visible)
        return (size - N) / size * total

    inside = rows.chosen_weights.unsqueeze(-2) * rows.inside  # (g, r, N, m)
    context = inside @ shared.points
    along = (context.flatten(1, 2) @ rows.vectors.mT).unflatten(1, context.shape[1:3])
    from_context = apart(a.expand_as(along), context, along)
    d_tilde = torch.linalg.vecdot(from_context, left_out)
    length = safe_sqrt(context.square().sum(-1))
    relative = d_tilde / ((n - N).clamp(min=1) * torch.where(length > 0, length, 1.0))

    mass = inside.sum(-1, keepdim=True)
    usable = mass != 0
    mass = torch.where(usable, mass, 1.0)
    center = context / mass
    spread = a.abs() * apart(torch.ones_like(along), center, along / mass)
    shift = (mass - a).abs() * safe_sqrt(center.square().sum(-1, keepdim=True))
    tight = torch.linalg.vecdot(spread + shift, left_out)

    share = (N / (n - 1).clamp(min=1)).unsqueeze(-1)  # the chance that a given other key is selected
    output, along = shared.output.unsqueeze(-2), shared.along_output.unsqueeze(-2)
    per_key = (*share.shape[:3], -1)
    printed = apart(a + share, output.expand(per_key), along.expand(per_key))
    mean = apart((1 + share) * a, share * output, share * along)
    variance = share * ((n - 1 - N).clamp(min=0) / (n - 2).clamp(min=1)).unsqueeze(-1) * shared.apart.unsqueeze(-2)
    return {
        "d_tilde": d_tilde,
        "relative_distance": torch.where(length > 0, relative, torch.nan),
        "fixed_tight": torch.where(usable.squeeze(-1), tight, torch.nan),
        "random_printed": mean_over_sets(printed),
        "random_lower": mean_over_sets(mean),
        "random_upper": mean_over_sets(safe_sqrt(mean.square() + variance)),
        "nearest": torch.where(outside, from_context, torch.inf).amin(-1),
    }


def _proper(weights: Tensor) -> Tensor:
    """Return which rows of weights are not negative and sum to 1, (g, r)."""
    return (weights.amin(-1) >= 0) & ((weights.sum(-1) - 1).abs() < PROPER)


def _gaps(rows: NestedSets) -> Tensor | None:
    """Return d1 of the printed bound, (g, r, N); None if it holds for no row (not checked on a GPU)."""
    if not runs_asynchronously(rows.weights) and not bool(_proper(rows.weights).any()):
        return None
    return largest_gaps(rows.selected(), rows.sizes)


def _printed_bound(rows: NestedSets, gaps: Tensor) -> Tensor:
    """(1-A) d1 + max_I ||x_j|| (A(n-N) - (1-A)) for rows of weights that are not negative and sum to 1."""
    inside, squares = rows.inside, rows.vectors.square().sum(-1).unsqueeze(-2)
    of_chosen = squares.expand(rows.weights.shape).gather(-1, rows.order).unsqueeze(-2) * inside
    A = (rows.chosen_weights.unsqueeze(-2) * inside).sum(-1)
    second = safe_sqrt(of_chosen.amax(-1)) * (A * (rows.n - rows.top_n) - (1 - A))
    return torch.where(_proper(rows.weights).unsqueeze(-1), (1 - A) * gaps + second, torch.nan)


def sizes_on_device(sizes: Sequence[int], device: torch.device) -> Tensor:
    if len(sizes) == 1:  # nothing to send
        return torch.full((1,), sizes[0], device=device)
    return sent_to(device, torch.tensor(sizes))
