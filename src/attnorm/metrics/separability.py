"""Separability of the N heaviest keys of each row and its null, for several N at once.

The formula is that of theory/geometry.py, which explains it for one N; nested_sets.py has the sets. The null needs many
random draws; the row itself is computed as two more of them.

theory/ counts the keys that are distinguishable. Such a count jumps where two keys are equally close, or two weights
equal; the inputs of two devices differ by 1e-6, so some count differs on any model. Here near ties of two
count in part, so that the result does not jump there (it may where three weights are nearly equal):

- a selected key that is farther than the nearest one outside counts 1 - (nearest - q_i) / t_i, at least 0. t_i is
  NEAR_TIE times the size of the terms that cancel in q_i, a_i M (2 ||s|| + a_i M), with M the length of the longest
  vector that the row sees;
- where the last selected weight and the next one differ by a share g < NEAR_WEIGHT, the set with these two exchanged
  counts with the share (1 - g / NEAR_WEIGHT) / 2.

The keys of rank 0 to M - 1 of each row are taken aside, one more than the most selected ones. They hold the two keys of
every exchange, so the other keys and their weights are the same with and without it. In a draw the weights are those of
the row by rank, and the draw says which key has which rank.

Shape letters: g sets of vectors, r rows that share one, w keys, E width, k 1 or 2 kinds of vectors (unchanged, on the
sphere), N sizes, M keys taken aside, D draws: 0 the row itself, 1 the row with exchanged keys, the others of the null.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from attnorm.engines.execution import runs_asynchronously
from attnorm.metrics.call import BLOCK_ELEMENTS, LogitWorkspace
from attnorm.metrics.nested_sets import NestedSets
from attnorm.theory.selection import near_one, relative_weights

NEAR_TIE = 5e-4  # relative difference of closeness below which a key counts in part
NEAR_WEIGHT = 1e-2  # relative difference of weights below which two sets are mixed
ALONG_ELEMENTS = 2**27  # inner products to compute at once on a GPU


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


def keys_by_rank(targets: Tensor, visible: Tensor) -> Tensor:
    """Return the key to which each permutation (draws, h, r, w) moves the k-th visible key; hidden keys come last.

    A permutation that is indexed by rank gives the same null whichever of two nearly equal weights is larger.
    """
    in_order = visible.to(torch.uint8).sort(dim=-1, descending=True, stable=True).indices
    return targets.gather(-1, in_order.expand(targets.shape))


def separability_and_null(
    rows: NestedSets,
    ranked: Tensor,
    key_by_rank: Tensor,
    *,
    at_once: tuple[int, int] | None = None,
    sphere: bool = True,
) -> Tensor:
    """Return separability of the rows and of d permutations of their weights: (g, 1 + d, r, 1 or 2, N).

    NaN where n <= N and where a weight or a visible vector is not finite. The row itself is the mean of two sets where
    the last selected weight and the next one are nearly equal. Does not synchronize with a GPU.

    ranked (g, r, w): all keys of each row, heaviest first. key_by_rank (g, d, p or 1, l, w) with r = p l: the key that
    gets the weight of each rank, for each of the p heads or for all of them. at_once limits the memory: how many sets
    of vectors and draws are compared with all keys at a time. sphere: also of the vectors on the sphere.

    Keys are compared by their closeness to the context vector (theory.selection): first those that are not taken aside.
    """
    sizes = rows.top_n.long().unsqueeze(-1)
    ranks = torch.arange(rows.sizes[-1] + 1, device=ranked.device)
    aside = ranked[..., : len(ranks)]
    keys = _Keys.of(rows, rows.visible.scatter(-1, aside, False), sphere=sphere)
    key_by_rank = key_by_rank.expand(len(ranked), -1, -1, -1, -1)
    of_key_by_rank = (
        key_by_rank[..., : len(ranks)].expand(-1, -1, ranked.shape[1] // key_by_rank.shape[-2], -1, -1).flatten(2, 3)
    )
    draws = 2 + key_by_rank.shape[1]

    # The rank whose weight each key taken aside has, and whether it is selected.
    exchanged = torch.where(ranks == sizes, sizes - 1, torch.where(ranks == sizes - 1, sizes, ranks))
    rank_of_weight = torch.stack([ranks.expand_as(exchanged), exchanged]).unsqueeze(1)  # (2, 1, N, M)
    inside = _for_draws(rank_of_weight < sizes, draws, 0).unsqueeze(2)  # (D, 1, 1, N, M)
    rank_of_weight = rank_of_weight.expand(len(aside), -1, aside.shape[1], -1, -1)  # (g, 2, r, N, M)
    numbers = (rows.weights if rows.log_weights is None else rows.log_weights).gather(-1, aside)
    visible = rows.visible.gather(-1, aside)
    factors, units = _in_units_of_each(rows, keys.outside, numbers, ~(ranks < sizes) & visible.unsqueeze(-2))
    shares, factors = (
        _for_draws(t.unsqueeze(1).expand(rank_of_weight.shape).gather(-1, rank_of_weight), draws, 1).unsqueeze(3)
        for t in (keys.relative.gather(-1, aside).unsqueeze(-2), factors)
    )  # (g, D, r, 1, N, M)

    taken = torch.cat([aside.unsqueeze(1).expand(-1, 2, -1, -1), of_key_by_rank.to(aside.dtype)], 1)  # (g, D, r, M)
    points, of_points = (
        _gather_keys(t, taken) for t in (keys.x, torch.cat([keys.norms.unsqueeze(-2), keys.kinds], -2).mT)
    )
    squares, of_kind = of_points[..., 0].square()[..., None, None, :], of_points[..., 1:].mT.unsqueeze(-2)
    coefficients = shares * of_kind  # (g, D, r, k, N, M)
    twice_context = 2 * _sums_of_points((coefficients * inside).flatten(-3, -2), points)  # (g, D, r, k N, E)
    by_kind = (keys.kinds.shape[-2], -1)
    nearest = _nearest(
        rows, keys, twice_context.unflatten(-2, by_kind), ranked, key_by_rank, at_once or (len(key_by_rank), draws)
    )
    # -inf where all keys are taken aside
    nearest = torch.where(nearest.isfinite(), nearest * units[:, None, :, None], nearest)

    twice_along = _along_points(twice_context, points).unflatten(-2, by_kind)
    q = twice_along.sub_(coefficients * squares).mul_(of_kind).mul_(factors)
    visible_by_rank = (ranks < rows.n).unsqueeze(1).expand(of_key_by_rank.shape)
    visible = torch.cat([visible.unsqueeze(1).expand(-1, 2, -1, -1), visible_by_rank], 1)[..., None, None, :]
    among_aside = q.masked_fill(inside | ~visible, -torch.inf).amax(-1)
    nearest = torch.maximum(nearest, among_aside).unsqueeze(-1)
    twice_length: Tensor = torch.linalg.vector_norm(twice_context, dim=-1, keepdim=True)
    tolerance = _tolerance(rows, keys, shares, factors, twice_length.unflatten(-2, by_kind))
    short = q.sub_(nearest).div_(tolerance).clamp_(-1, 0).masked_fill_(~inside, 0)  # 0 at keys that count, -1 at others
    found = 1 + short.sum(-1) / rows.top_n
    share = _share_of_exchanged(numbers, sizes.squeeze(-1), logarithms=rows.log_weights is not None)
    itself = torch.lerp(found[:, :1], found[:, 1:2], share[:, None, :, None])
    defined = (rows.n > rows.top_n) & rows.weights.sum(-1, keepdim=True).isfinite()
    return torch.where(defined[:, None, :, None], torch.cat([itself, found[:, 2:]], 1), torch.nan)


@dataclass(frozen=True)
class _Keys:
    """Vectors of all keys, and their weights in each row."""

    x: Tensor  # (g, w, E), multiplied by a power of two
    norms: Tensor  # (g, w): ||x_i||
    kinds: Tensor  # (g, k, w): 1, and 1 / ||x_i||. On the sphere y_i = a_i x_i / ||x_i||: x_i with another weight.
    lengths: Tensor  # (g, k, w): of the vectors of each kind
    outside: Tensor  # (g, r, w): visible keys that are not taken aside
    relative: Tensor  # (g, r, w): weights over the largest one
    beyond: Tensor  # (g, r, w): weights over the largest one outside

    @classmethod
    def of(cls, rows: NestedSets, outside: Tensor, *, sphere: bool) -> "_Keys":
        x = near_one(rows.vectors)
        norms: Tensor = torch.linalg.vector_norm(x, dim=-1)
        kinds, lengths = torch.ones_like(norms).unsqueeze(-2), norms.unsqueeze(-2)
        if sphere:
            kinds = torch.cat([kinds, torch.where(norms > 0, 1 / norms, 0.0).unsqueeze(-2)], -2)
            lengths = kinds * lengths
        relative, beyond = (relative_weights(rows.weights, keys, rows.log_weights) for keys in (rows.visible, outside))
        return cls(x, norms, kinds, lengths, outside, relative, beyond)


def _for_draws(values: Tensor, draws: int, dim: int) -> Tensor:
    """Repeat the first of two values, that of the row itself, for the draws of the null."""
    repeated = values.narrow(dim, 0, 1).expand(*(draws - 2 if i == dim else -1 for i in range(values.dim())))
    return torch.cat([values, repeated], dim)


def _share_of_exchanged(numbers: Tensor, sizes: Tensor, *, logarithms: bool) -> Tensor:
    """Return the share of the set with exchanged keys, (g, r, N): 1/2 for equal weights, 0 from NEAR_WEIGHT on.

    numbers (g, r, M): weights of the keys taken aside, or their logarithms. sizes (N,).
    """
    last, following = (numbers.index_select(-1, rank) for rank in (sizes - 1, sizes))
    gap = torch.expm1(following - last) if logarithms else 1 - following / last
    return ((1 - gap.abs() / NEAR_WEIGHT) / 2).clamp(min=0).nan_to_num(0.0)


def _tolerance(rows: NestedSets, keys: _Keys, shares: Tensor, factors: Tensor, twice_length: Tensor) -> Tensor:
    """Return NEAR_TIE times the size of the terms that cancel in q_i of each key taken aside, (g, D, r, k, N, M).

    NaN where the row sees a vector that is not finite.

    shares of these keys, and factors as q has them (g, D, r, 1, N, M), twice_length: 2 ||s||, (g, D, r, k, N, 1).
    """
    lengths = keys.lengths.unsqueeze(-3).masked_fill(~rows.visible.unsqueeze(-2), 0.0)
    longest = lengths.amax(-1)[:, None, :, :, None, None]  # (g, 1, r, k, 1, 1)
    longest = longest.masked_fill(longest == torch.inf, torch.nan)
    weight = NEAR_TIE * factors.abs() * longest
    own = weight * longest * shares.abs()
    return torch.addcmul(own, weight, twice_length).clamp_(min=torch.finfo(keys.norms.dtype).tiny)


def _sums_of_points(coefficients: Tensor, points: Tensor) -> Tensor:
    """Sums of points (..., M, E) with coefficients (..., c, M): (..., c, E)."""
    if coefficients.shape[-2] == 1:  # many small products, for which matmul takes ten times as long on a CPU
        return (coefficients.mT * points).sum(-2, keepdim=True)
    return coefficients @ points


def _along_points(vectors: Tensor, points: Tensor) -> Tensor:
    """Inner products of vectors (..., c, E) and points (..., M, E): (..., c, M)."""
    if vectors.shape[-2] == 1:
        return (vectors * points).sum(-1).unsqueeze(-2)
    return (points @ vectors.mT.contiguous()).mT  # without a copy, torch on ARM takes ten times as long


def _gather_keys(numbers: Tensor, selected: Tensor) -> Tensor:
    """Return the numbers (g, w, c) at the selected keys (g, D, r, M): (g, D, r, M, c)."""
    flat = numbers.flatten(0, 1)
    first = torch.arange(0, len(flat), numbers.shape[-2], device=flat.device)[:, None, None, None]
    gathered: Tensor = flat.index_select(0, (selected + first).flatten()).unflatten(0, selected.shape)
    return gathered


def _in_units_of_each(rows: NestedSets, outside: Tensor, numbers: Tensor, left_out: Tensor) -> tuple[Tensor, Tensor]:
    """Return weights relative to the heaviest key that each set of N leaves out.

    These are the weights of the keys taken aside (g, r, N, M), and the unit of all keys outside, (g, r, N).

    numbers (g, r, M): weights of the keys taken aside, or their logarithms. left_out (g, r, N, M): which of them.
    """
    logs = rows.log_weights
    others, nothing = (rows.weights.abs(), 0.0) if logs is None else (logs, -torch.inf)
    heaviest = others.masked_fill(~outside, nothing).amax(-1, keepdim=True)
    numbers = torch.cat([numbers, heaviest], -1).unsqueeze(-2)
    relative = relative_weights(numbers, pad(left_out, (0, 1), value=True), None if logs is None else numbers)
    return relative[..., :-1], relative[..., -1].abs()


def _nearest(
    rows: NestedSets, keys: _Keys, twice_context: Tensor, ranked: Tensor, key_by_rank: Tensor, at_once: tuple[int, int]
) -> Tensor:
    """Return the largest closeness of the keys outside, (g, D, r, k, N), in the unit of `keys.beyond`.

    twice_context: 2 s, (g, D, r, k, N, E). ranked, key_by_rank: as in `separability_and_null`.
    """
    # q_i = b_i (2 x_i.s) - (b_i a_i) ||x_i||^2. For keys to leave out, b_i a_i is infinite; no square may be 0.
    products = keys.beyond * keys.relative
    minus_squares = keys.lengths.square().clamp_(min=torch.finfo(products.dtype).tiny).neg_()  # (g, k, w)
    ranks = torch.arange(ranked.shape[-1], device=ranked.device)
    outside = (ranks > rows.sizes[-1]) & (ranks < rows.n)
    by_rank = [keys.beyond.gather(-1, ranked), products.gather(-1, ranked).masked_fill_(~outside, torch.inf)]
    products.masked_fill_(~keys.outside, torch.inf)
    heads = ranked.shape[1] // key_by_rank.shape[-2]
    found = []
    for first in range(0, len(key_by_rank), at_once[0]):
        sets = slice(first, first + at_once[0])
        vectors = keys.x[sets].unsqueeze(1)
        if keys.kinds.shape[1] > 1:
            vectors = vectors * keys.kinds[sets].unsqueeze(-1)  # (g, k, w, E)
        vectors = vectors.mT if runs_asynchronously(vectors) else vectors.mT.contiguous()  # faster on ARM
        factors, product = (t[sets].unsqueeze(1).expand(-1, 2, -1, -1) for t in (keys.beyond, products))
        parts = [_largest(twice_context[sets, :2], vectors, factors, product, minus_squares[sets])]
        for draw in range(0, key_by_rank.shape[1], at_once[1]):
            draws = slice(draw, draw + at_once[1])
            of_draws = key_by_rank[sets, draws].long()
            rank = torch.empty_like(of_draws).scatter_(-1, of_draws, ranks.expand(of_draws.shape))
            rank = rank.expand(-1, -1, heads, -1, -1)  # (g, d, p, l, w)
            factors, product = (
                t[sets].reshape(len(rank), 1, *rank.shape[2:]).expand(rank.shape).gather(-1, rank).flatten(2, 3)
                for t in by_rank
            )
            parts.append(_largest(twice_context[sets, 2:][:, draws], vectors, factors, product, minus_squares[sets]))
        found.append(torch.cat(parts, 1))
    return found[0] if len(found) == 1 else torch.cat(found)


def _largest(
    twice_context: Tensor, vectors: Tensor, factors: Tensor, products: Tensor, minus_squares: Tensor
) -> Tensor:
    """Return the largest b_i (2 x_i.s) - c_i ||x_i||^2 over keys, for each 2 s (g, d, r, k, N, E): (g, d, r, k, N).

    vectors (g, k, E, w) and minus their squares (g, k, w); factors b and products c (g, d, r, w).
    """
    groups, draws, rows, kinds, sizes, width = twice_context.shape
    keys = vectors.shape[-1]
    contexts = twice_context.movedim(3, 1).reshape(groups, kinds, draws * rows, sizes, width)
    factors, products = (t.reshape(groups, 1, draws * rows, keys) for t in (factors, products))
    added = products * minus_squares.unsqueeze(-2)  # (g, k, d r, w)
    most = ALONG_ELEMENTS if runs_asynchronously(vectors) else BLOCK_ELEMENTS
    at_once = max(1, most // (groups * kinds * sizes * keys))
    workspace, batches = LogitWorkspace(vectors), (groups * kinds, -1)
    largest = []
    for s, b, squared in zip(*(t.split(at_once, 2) for t in (contexts, factors, added)), strict=True):
        along = workspace.array(*s.shape[:-1], keys)
        torch.bmm(s.reshape(*batches, width), vectors.flatten(0, 1), out=along.view(*batches, keys))
        largest.append(torch.addcmul(squared.unsqueeze(-2), b.unsqueeze(-2), along, out=along).amax(-1))
    together: Tensor = (largest[0] if len(largest) == 1 else torch.cat(largest, 2)).unflatten(2, (draws, rows))
    return together.movedim(1, 3)
