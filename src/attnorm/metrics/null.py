"""Separability of the heaviest keys, and its null: the same weights, permuted among the keys.

What theory.geometry computes for one N at a time (`separability`), here for all N in one product: the null takes many
draws, and the row itself is one more of them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from attnorm.metrics.logits import BLOCK_ELEMENTS, CUDA_BLOCK_ELEMENTS, LogitWorkspace
from attnorm.theory.closeness import near_one, relative_weights
from attnorm.theory.selection import SelectedRows


def draw_permutations(visible: Tensor, draws: int, generator: torch.Generator | None) -> Tensor:
    """The new key of every key of visible (h, r, w) in each draw: (draws, h, r, w).

    Visible keys are permuted among themselves, the others stay. Row by row, so that the block size does not matter.
    """
    heads, rows, keys = visible.shape
    device = None if generator is None else generator.device
    targets = torch.arange(keys, device=visible.device).repeat(draws, heads, rows, 1)
    for row in range(rows):
        for head in range(heads):
            own = visible[head, row].nonzero().squeeze(-1)
            for target in targets[:, head, row]:
                order = torch.randperm(len(own), generator=generator, device=device)
                target[own] = own[order.to(own.device)]
    return targets


def separabilities(rows: SelectedRows, targets: Tensor, top_n: Sequence[int]) -> Tensor:
    """N_s / N of the vectors as they are and on the sphere: (d, r, 2, len(top_n)).

    rows: r of them with one set of vectors, with at least as many selected keys as the largest N. targets (d, r, w):
    the new key of every key, for d draws. Meaningless where n <= N. Keys are compared by their closeness to the
    context vector (theory.closeness): first those that are in no selected set, then the selected ones.
    """
    x, heaviest = near_one(rows.vectors), rows.indices
    chosen = targets.gather(-1, heaviest.expand(len(targets), -1, -1))
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1)
    # On the sphere y_i = a_i x_i / ||x_i||: the same vectors with other weights.
    kinds = torch.stack([torch.ones_like(norms), torch.where(norms > 0, 1 / norms, 0.0)])
    shares, beyond = (
        _permuted(relative_weights(rows.weights, keys, rows.log_weights), targets).unsqueeze(-2) * kinds  # (d, r, 2, w)
        for keys in (rows.visible, rows.outside)
    )

    sizes = torch.tensor(top_n, device=x.device)
    inside = torch.arange(chosen.shape[-1], device=x.device) < sizes.unsqueeze(-1)  # (N, m)
    points = x.index_select(0, chosen.flatten()).unflatten(0, chosen.shape)  # (d, r, m, E)
    of_chosen = shares.gather(-1, _for_both(chosen)).unsqueeze(-2)  # (d, r, 2, 1, m)
    context = (of_chosen * inside).flatten(2, 3) @ points  # (d, r, 2 N, E)

    own = -(beyond * shares * norms.square())
    own.masked_fill_(~rows.visible.unsqueeze(-2), -torch.inf).scatter_(-1, _for_both(chosen), -torch.inf)
    nearest = _nearest(context.unflatten(2, (2, -1)), x, 2 * beyond, own)  # (d, r, 2, N)

    factors, units = _in_units_of_each(rows, inside)
    of_kind = kinds[:, chosen].movedim(0, 2).unsqueeze(-2)  # (d, r, 2, 1, m)
    along = (context @ points.mT).unflatten(2, (2, -1))
    q = factors.unsqueeze(1) * of_kind * (2 * along - of_chosen * norms[chosen].square()[:, :, None, None])
    not_outside = inside | ~rows.visible.gather(-1, heaviest)[:, None, None]
    among_chosen = q.masked_fill(not_outside, -torch.inf).amax(-1)
    # -inf where no key lies beyond the selected ones
    nearest = torch.where(nearest.isfinite(), nearest * units.unsqueeze(1), nearest)
    nearest = torch.maximum(nearest, among_chosen).unsqueeze(-1)
    distinguishable: Tensor = ((q >= nearest) & inside).sum(-1, dtype=x.dtype) / sizes
    return distinguishable


def _permuted(weights: Tensor, targets: Tensor) -> Tensor:
    return torch.empty(targets.shape, dtype=weights.dtype, device=weights.device).scatter_(
        -1, targets, weights.expand(targets.shape)
    )


def _in_units_of_each(rows: SelectedRows, inside: Tensor) -> tuple[Tensor, Tensor]:
    """For each N, relative to the heaviest key left out: the m selected weights, (r, N, m), and the weight that all
    keys beyond them are relative to, (r, N)."""
    order = rows.weights.abs() if rows.log_weights is None else rows.log_weights
    unit = order.masked_fill(~rows.outside, -torch.inf).argmax(-1, keepdim=True)
    factors, units = [], []
    for in_set in inside:
        selected = torch.zeros_like(rows.visible).scatter(-1, rows.indices, in_set.expand(rows.indices.shape))
        relative = relative_weights(rows.weights, rows.visible & ~selected, rows.log_weights)
        factors.append(relative.gather(-1, rows.indices))
        units.append(relative.gather(-1, unit).abs())
    return torch.stack(factors, 1), torch.cat(units, -1)


def _for_both(keys: Tensor) -> Tensor:
    return keys.unsqueeze(-2).expand(*keys.shape[:-1], 2, keys.shape[-1])


def _nearest(context: Tensor, x: Tensor, twice: Tensor, own: Tensor) -> Tensor:
    """The largest twice_i x_i.s + own_i of each context (d, r, 2, N, E); twice and own (d, r, 2, w)."""
    kinds, sizes, width = context.shape[-3:]
    at_once = max(1, (CUDA_BLOCK_ELEMENTS if x.is_cuda else BLOCK_ELEMENTS) // (kinds * sizes * len(x)))
    workspace = LogitWorkspace(x)
    found = []
    for s, c, squares in zip(*(t.flatten(0, 1).split(at_once) for t in (context, twice, own)), strict=True):
        along = workspace.array(*s.shape[:-1], len(x))
        torch.mm(s.reshape(-1, width), x.T, out=along.view(-1, len(x)))
        found.append(torch.addcmul(squares.unsqueeze(-2), c.unsqueeze(-2), along, out=along).amax(-1))
    return torch.cat(found).reshape(context.shape[:-1])
