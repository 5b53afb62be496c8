"""Separability of the N heaviest keys of each row and its null, for several N at once.

The formula is that of theory/geometry.py, which explains it for one N; nested_sets.py has the sets. The null needs many
random draws; the row itself is computed as one more of them.

theory/ counts the keys that are distinguishable. Such a count jumps where two keys are equally close, or two weights
equal; the inputs of two devices differ by 1e-6, so some count differs on any model. Here near ties of two
count in part, so that the result does not jump there (it may where three weights are nearly equal):

- a selected key that is farther than the nearest one outside counts 1 - (nearest - q_i) / t_i, at least 0. t_i is
  NEAR_TIE times the size of the terms that cancel in q_i, a_i M (2 ||s|| + a_i M), with M the length of the longest
  vector that the row sees;
- where the last selected weight and the next one differ by a share g < NEAR_WEIGHT, the set with these two exchanged
  counts with the share (1 - g / NEAR_WEIGHT) / 2.

Shape letters: g sets of vectors, r rows that share one, w keys, E width, N sizes, m the most selected keys, d draws.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from attnorm.engines.execution import runs_asynchronously
from attnorm.metrics.call import BLOCK_ELEMENTS, CUDA_BLOCK_ELEMENTS, LogitWorkspace
from attnorm.metrics.nested_sets import NestedSets, sizes_on_device
from attnorm.theory.selection import SelectedRows, near_one, relative_weights

NEAR_TIE = 5e-4  # relative difference of closeness below which a key counts in part
NEAR_WEIGHT = 1e-2  # relative difference of weights below which two sets are mixed


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

    sizes = sizes_on_device(top_n, x.device)
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
