"""Distances, separability with its null, and bounds of the N heaviest keys of each row, for several N at once.

The formulas are those of theory/distance.py and theory/geometry.py, which explain them for one N. The sets of several N
contain each other. So everything that does not depend on N is computed once, and one operation serves all N: on a GPU,
short rows take as long as the launches of their operations. The null needs many random draws; the row itself is
computed as one more of them.

theory/ counts the keys that are distinguishable. Such a count jumps where two keys are equally close, or two weights
equal; the inputs of two devices differ by 1e-6, so some count differs on any model. Here near ties of two
count in part, so that the result does not jump there (it may where three weights are nearly equal):

- a selected key that is farther than the nearest one outside counts 1 - (nearest - q_i) / t_i, at least 0. t_i is
  NEAR_TIE times the size of the terms that cancel in q_i, a_i M (2 ||s|| + a_i M), with M the length of the longest
  vector that the row sees;
- where the last selected weight and the next one differ by a share g < NEAR_WEIGHT, the set with these two exchanged
  counts with the share (1 - g / NEAR_WEIGHT) / 2.

Shape letters: g sets of vectors, r rows that share one, w keys, E width, N sizes, m the most selected keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from attnorm.engines.execution import runs_asynchronously, sent_to
from attnorm.metrics.call import BLOCK_ELEMENTS, CUDA_BLOCK_ELEMENTS, LogitWorkspace
from attnorm.theory.distance import largest_gaps
from attnorm.theory.geometry import cantelli_bounds, without_each
from attnorm.theory.selection import (
    SelectedRows,
    near_one,
    relative_weights,
    safe_sqrt,
    scaled_distances,
    top_n_indices,
)

PROPER = 1e-4  # tolerance for rows of weights that sum to 1
NEAR_TIE = 5e-4  # relative difference of closeness below which a key counts in part
NEAR_WEIGHT = 1e-2  # relative difference of weights below which two sets are mixed


@dataclass(frozen=True)
class NestedSets:
    """Rows with their heaviest keys. Hidden keys have weight 0; rows with n <= N give NaN."""

    weights: Tensor  # (g, r, w)
    vectors: Tensor  # (g, w, E)
    visible: Tensor  # (g, r, w)
    order: Tensor  # (g, r, m): the heaviest keys, heaviest first
    sizes: tuple[int, ...]  # in ascending order
    log_weights: Tensor | None = None  # up to a constant per row; -inf at hidden keys

    @classmethod
    def of(
        cls, weights: Tensor, vectors: Tensor, visible: Tensor, sizes: Sequence[int], log_weights: Tensor | None
    ) -> "NestedSets":
        order = top_n_indices(weights if log_weights is None else log_weights, max(sizes), visible)
        return cls(weights, vectors, visible, order, tuple(sizes), log_weights)

    def select_rows(self, rows: Tensor | slice) -> "NestedSets":
        """Return the sets of some of the rows."""
        logs = self.log_weights
        return replace(
            self,
            weights=self.weights[:, rows],
            visible=self.visible[:, rows],
            order=self.order[:, rows],
            log_weights=None if logs is None else logs[:, rows],
        )

    def select_vectors(self, sets: slice) -> "NestedSets":
        """Return the rows of some of the g sets of vectors."""
        logs = self.log_weights
        return replace(
            self,
            weights=self.weights[sets],
            vectors=self.vectors[sets],
            visible=self.visible[sets],
            order=self.order[sets],
            log_weights=None if logs is None else logs[sets],
        )

    def ranked_keys(self) -> Tensor:
        """Return all keys of each row, heaviest first, (g, r, w)."""
        numbers = self.weights if self.log_weights is None else self.log_weights
        return top_n_indices(numbers, numbers.shape[-1], self.visible)

    def selected(self) -> SelectedRows:
        """The largest set, as the functions of theory take it."""
        return SelectedRows(self.weights, self.vectors, self.visible, self.order, False, self.log_weights)

    @cached_property
    def top_n(self) -> Tensor:
        """The sizes in the dtype of the weights, (N,)."""
        return _on_device(self.sizes, self.weights.device).to(self.weights.dtype)

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
    centre = context / mass
    spread = a.abs() * apart(torch.ones_like(along), centre, along / mass)
    shift = (mass - a).abs() * safe_sqrt(centre.square().sum(-1, keepdim=True))
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


def draw_permutations(
    visible: Tensor, draws: int, generator: torch.Generator | None, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Return random permutations of the visible keys (h, r, w): the new index of every key, (draws, h, r, w).

    Hidden keys keep their index. Numbers are drawn row by row, so that the result does not depend on the block size.
    """
    heads, rows, keys = visible.shape
    device = visible.device if generator is None else generator.device
    # NumPy stays in this thread; several layers are drawn at the same time.
    unchanged = np.tile(np.arange(keys, dtype=np.int32 if dtype == torch.int32 else np.int64), (draws, heads, rows, 1))
    targets = torch.from_numpy(unchanged).to(visible.device)
    for row in range(rows):
        for head in range(heads):
            visible_keys = visible[head, row].nonzero().squeeze(-1)
            count = len(visible_keys)
            if count and device == visible_keys.device and int(visible_keys[-1]) < count:  # the first ones
                for target in targets[:, head, row, :count]:
                    torch.randperm(count, generator=generator, dtype=dtype, out=target)
                continue
            orders = [torch.randperm(count, generator=generator, device=device) for _ in range(draws)]
            targets[:, head, row, visible_keys] = visible_keys[torch.stack(orders).to(visible_keys.device)].to(dtype)
    return targets


def visible_places(rows: NestedSets, ranked: Tensor) -> Tensor:
    """Return for each key of rank k the k-th visible key, (g, r, w). ranked: all keys of a row, heaviest first.

    A permutation that is indexed by rank gives the same null whichever of two nearly equal weights is larger.
    """
    in_order = rows.visible.to(torch.uint8).sort(dim=-1, descending=True, stable=True).indices
    return torch.empty_like(ranked).scatter_(-1, ranked, in_order)


def separability_and_null(
    rows: NestedSets, ranked: Tensor, permutations: Tensor, *, draws_at_once: int | None = None, sphere: bool = True
) -> Tensor:
    """Return separability of the rows and of d permutations of their weights: (g, 1 + d, r, 1 or 2, N).

    NaN where n <= N and where a weight or a visible vector is not finite. The row itself is the mean of two sets where
    the last selected weight and the next one are nearly equal. Does not synchronize with a GPU.

    ranked (g, r, w): all keys of each row, heaviest first. permutations (g, d, r, w): the new index of every key.
    draws_at_once limits the memory; all at once by default. sphere: also of the vectors on the sphere.
    """
    share, exchanged = _exchange_near_ties(rows, ranked)
    itself = torch.arange(ranked.shape[-1], device=ranked.device).expand(ranked.shape)
    targets = torch.cat([itself.unsqueeze(1), exchanged, permutations], 1)
    selected = rows.selected()
    shares = [
        separabilities(selected, some, rows.sizes, sphere=sphere)
        for some in targets.split(draws_at_once or targets.shape[1], 1)
    ]
    row, others, null = torch.cat(shares, 1).split([1, len(rows.sizes), permutations.shape[1]], 1)
    other = others.diagonal(dim1=1, dim2=-1).unsqueeze(1)
    found = torch.cat([torch.lerp(row, other, share[:, None, :, None]), null], 1)
    defined = (rows.n > rows.top_n) & rows.weights.sum(-1, keepdim=True).isfinite()
    return torch.where(defined[:, None, :, None], found, torch.nan)


def _exchange_near_ties(rows: NestedSets, order: Tensor) -> tuple[Tensor, Tensor]:
    """Exchange the last key of each set of N with the next one where their weights are nearly equal.

    Return the share of the exchanged set, (g, r, N): 1/2 for equal weights, 0 if they differ by NEAR_WEIGHT; and the
    new index of every key in the row with that exchange alone, (g, N, r, w).
    """
    next_rank = rows.top_n.long()
    numbers = rows.weights if rows.log_weights is None else rows.log_weights
    last, following = (numbers.gather(-1, order.index_select(-1, rank)) for rank in (next_rank - 1, next_rank))
    gap = 1 - following / last if rows.log_weights is None else -torch.expm1(following - last)
    share = ((1 - gap.abs() / NEAR_WEIGHT) / 2).clamp(min=0).nan_to_num(0.0)
    ranks, sizes = torch.arange(order.shape[-1], device=order.device), next_rank.unsqueeze(-1)
    partner = torch.where(ranks == sizes, sizes - 1, torch.where(ranks == sizes - 1, sizes, ranks))  # (N, w)
    of_sizes = order.unsqueeze(1).expand(-1, len(rows.sizes), -1, -1)
    exchanged = of_sizes.gather(-1, partner.unsqueeze(1).expand_as(of_sizes))
    return share, torch.empty_like(exchanged).scatter_(-1, of_sizes, exchanged)


def separabilities(rows: SelectedRows, targets: Tensor, top_n: Sequence[int], *, sphere: bool = True) -> Tensor:
    """Return the separability N_s / N of the vectors, unchanged and on the sphere: (..., d, r, 2, len(top_n)).

    rows: r rows for each set of vectors (..., w, E), with at least as many selected keys as the largest N. targets
    (..., d, r, w): the new index of every key in each of d draws. The result is meaningless for rows with n <= N. Keys
    are compared by their closeness to the context vector (theory.selection): first those in no set, then the others.
    Near ties count in part (see the top of this file). Without the sphere, 1 instead of 2.
    """
    x, heaviest = near_one(rows.vectors), rows.indices
    selected = targets.gather(-1, heaviest.unsqueeze(-3).expand(*targets.shape[:-1], -1))
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1)
    # On the sphere y_i = a_i x_i / ||x_i||: the same vectors with other weights.
    kinds = torch.ones_like(norms).unsqueeze(-2)  # (..., 2, w)
    if sphere:
        kinds = torch.cat([kinds, torch.where(norms > 0, 1 / norms, 0.0).unsqueeze(-2)], -2)
    relative, relative_to_outside = (
        relative_weights(rows.weights, keys, rows.log_weights) for keys in (rows.visible, rows.outside)
    )
    shares, beyond = (_permute_weights(t, targets).unsqueeze(-2) for t in (relative, relative_to_outside))
    if sphere:
        shares, beyond = (t * kinds[..., None, None, :, :] for t in (shares, beyond))  # (..., d, r, 2, w)

    sizes = _on_device(top_n, x.device)
    inside = torch.arange(selected.shape[-1], device=x.device) < sizes.unsqueeze(-1)  # (N, m)
    points, of_points = (_gather_keys(t, selected) for t in (x, torch.cat([norms.unsqueeze(-2), kinds], -2).mT))
    lengths, of_kind = of_points[..., 0], of_points[..., 1:].mT.unsqueeze(-2)  # (..., d, r, m), (..., d, r, 2, 1, m)
    selected_of_kinds = selected.unsqueeze(-2).expand(*shares.shape[:-1], -1)
    of_chosen = shares.gather(-1, selected_of_kinds).unsqueeze(-2)  # (..., d, r, 2, 1, m)
    context = _sums_of_points((of_chosen * inside).flatten(-3, -2), points)  # (..., d, r, 2 N, E)

    squared_terms = -(beyond * shares * norms.square()[..., None, None, None, :])
    squared_terms.masked_fill_(~rows.visible[..., None, :, None, :], -torch.inf).scatter_(
        -1, selected_of_kinds, -torch.inf
    )
    by_kind = (kinds.shape[-2], -1)
    nearest = _nearest(context.unflatten(-2, by_kind), x, 2 * beyond, squared_terms)  # (..., d, r, 2, N)

    factors, units = _in_units_of_each(rows, inside)
    twice_along = _along_points(2 * context, points).unflatten(-2, by_kind)  # (..., d, r, 2, N, m)
    squares = lengths.square()[..., None, None, :]
    q = twice_along.sub_(of_chosen * squares).mul_(of_kind).mul_(factors[..., None, :, None, :, :])
    not_outside = inside | ~rows.visible.gather(-1, heaviest)[..., None, :, None, None, :]
    among_chosen = q.masked_fill(not_outside, -torch.inf).amax(-1)
    # -inf where no key lies beyond the selected ones
    nearest = torch.where(nearest.isfinite(), nearest * units[..., None, :, None, :], nearest)
    nearest = torch.maximum(nearest, among_chosen).unsqueeze(-1)
    length: Tensor = torch.linalg.vector_norm(context, dim=-1, keepdim=True)
    chosen_shares = relative.gather(-1, heaviest)
    tolerance = _tolerance(rows.visible, chosen_shares, factors, norms, kinds, length.unflatten(-2, by_kind))
    short = q.sub_(nearest).div_(tolerance).clamp_(-1, 0).masked_fill_(~inside, 0)  # 0 at keys that count, -1 at others
    distinguishable: Tensor = (sizes + short.sum(-1)) / sizes
    return distinguishable


def _tolerance(
    visible: Tensor, shares: Tensor, factors: Tensor, norms: Tensor, kinds: Tensor, length: Tensor
) -> Tensor:
    """Return NEAR_TIE times the size of the terms that cancel in q_i of each selected key, (..., d, r, 2, N, m).

    NaN where the row sees a vector that is not finite.

    visible (..., r, w), shares (..., r, m) of the selected keys, factors (..., r, N, m) as q has them, norms (..., w),
    kinds (..., 2, w), length of s (..., d, r, 2, N, 1).
    """
    lengths = (kinds * norms.unsqueeze(-2)).unsqueeze(-3).masked_fill(~visible.unsqueeze(-2), 0.0)
    longest = lengths.amax(-1)[..., None, :, :, None, None]  # (..., 1, r, 2, 1, 1)
    longest = longest.masked_fill(longest == torch.inf, torch.nan)
    weight = NEAR_TIE * factors.abs()[..., None, :, None, :, :] * longest
    own = weight * longest * shares.abs()[..., None, :, None, None, :]
    return torch.addcmul(own, weight, length, value=2).clamp_(min=torch.finfo(norms.dtype).tiny)


def _on_device(sizes: Sequence[int], device: torch.device) -> Tensor:
    if len(sizes) == 1:  # nothing to send
        return torch.full((1,), sizes[0], device=device)
    return sent_to(device, torch.tensor(sizes))


def _sums_of_points(coefficients: Tensor, points: Tensor) -> Tensor:
    """Sums of points (..., m, E) with coefficients (..., k, m): (..., k, E)."""
    if coefficients.shape[-2] == 1:  # many small products, for which matmul takes ten times as long on a CPU
        return (coefficients.mT * points).sum(-2, keepdim=True)
    return coefficients @ points


def _along_points(vectors: Tensor, points: Tensor) -> Tensor:
    """Inner products of vectors (..., k, E) and points (..., m, E): (..., k, m)."""
    if vectors.shape[-2] == 1:
        return (vectors * points).sum(-1).unsqueeze(-2)
    return (points @ vectors.mT.contiguous()).mT  # without a copy, torch on ARM takes ten times as long


def _gather_keys(numbers: Tensor, selected: Tensor) -> Tensor:
    """Return the numbers (..., w, c) at the selected keys (..., d, r, m): (..., d, r, m, c)."""
    sets = selected.shape[:-3]
    flat = numbers.reshape(-1, numbers.shape[-1])
    first = torch.arange(0, len(flat), numbers.shape[-2], device=flat.device).reshape(*sets, 1, 1, 1)
    gathered: Tensor = flat.index_select(0, (selected + first).flatten()).unflatten(0, selected.shape)
    return gathered


def _permute_weights(weights: Tensor, targets: Tensor) -> Tensor:
    return torch.empty(targets.shape, dtype=weights.dtype, device=weights.device).scatter_(
        -1, targets, weights.unsqueeze(-3).expand(targets.shape)
    )


def _in_units_of_each(rows: SelectedRows, inside: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights relative to the heaviest key that each set of N leaves out.

    These are the m selected weights, (..., r, N, m), and the unit of all keys beyond them, (..., r, N).
    """
    order = rows.weights.abs() if rows.log_weights is None else rows.log_weights
    beyond = order.masked_fill(~rows.outside, -torch.inf).argmax(-1, keepdim=True)  # the heaviest of no set
    keys = torch.cat([rows.indices, beyond], -1)  # what is left out of a set is lighter than one of these
    weights = rows.weights.gather(-1, keys).unsqueeze(-2)
    logs = None if rows.log_weights is None else rows.log_weights.gather(-1, keys).unsqueeze(-2)
    left_out = torch.cat([~inside, torch.ones_like(inside[:, :1])], -1)
    visible = torch.cat([rows.visible.gather(-1, rows.indices), rows.outside.any(-1, keepdim=True)], -1)
    relative = relative_weights(weights, left_out & visible.unsqueeze(-2), logs)
    return relative[..., :-1], relative[..., -1].abs()


def _nearest(context: Tensor, x: Tensor, twice: Tensor, added: Tensor) -> Tensor:
    """Return the largest twice_i x_i.s + added_i over keys, for each context s (..., d, r, 2, N, E)."""
    kinds, sizes, width = context.shape[-3:]
    keys = x.shape[-2]
    x = x.reshape(-1, keys, width)
    transposed = x.mT if runs_asynchronously(x) else x.mT.contiguous()  # or torch on ARM takes twice as long
    most = CUDA_BLOCK_ELEMENTS if runs_asynchronously(x) else BLOCK_ELEMENTS
    at_once = max(1, most // (len(x) * kinds * sizes * keys))
    workspace = LogitWorkspace(x)
    parts = (
        t.reshape(len(x), -1, *t.shape[-tail:]).split(at_once, 1) for t, tail in ((context, 3), (twice, 2), (added, 2))
    )
    largest = []
    for s, c, squares in zip(*parts, strict=True):
        along = workspace.array(*s.shape[:-1], keys)
        torch.bmm(s.reshape(len(x), -1, width), transposed, out=along.view(len(x), -1, keys))
        largest.append(torch.addcmul(squares.unsqueeze(-2), c.unsqueeze(-2), along, out=along).amax(-1))
    return torch.cat(largest, 1).reshape(context.shape[:-1])
