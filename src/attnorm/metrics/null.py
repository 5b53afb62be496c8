"""Separability of the heaviest keys, also when the weights know nothing of the vectors: dealt out to the keys anew.

What theory.geometry computes for one N at a time (`separability`), here for all N in one product: the null takes many
draws, and the row itself is one more of them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from attnorm.metrics.logits import BLOCK_ELEMENTS, CUDA_BLOCK_ELEMENTS, Workspace
from attnorm.theory.selection import SelectedRows, scaled_distances


def deal(visible: Tensor, draws: int, generator: torch.Generator | None) -> Tensor:
    """The new key of every key of visible (h, r, w) in each draw: (draws, h, r, w).

    Visible keys change places among themselves, the others stay. Row after row, so that the size of a block does not
    matter.
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


def separabilities(rows: SelectedRows, targets: Tensor, top_n: Sequence[int]) -> tuple[Tensor, Tensor]:
    """N_s / N and the radius, of the vectors as they are and on the sphere: (d, r, 2, len(top_n)).

    rows: r of them with one set of vectors, with at least as many selected keys as the largest N. targets (d, r, w):
    the new key of every key, for d draws. Meaningless where n <= N.
    """
    weights, x, visible, heaviest = rows.weights, rows.vectors, rows.visible, rows.indices
    shape = targets.shape
    dealt = torch.empty(shape, dtype=weights.dtype, device=x.device).scatter_(-1, targets, weights.expand(shape))
    chosen = targets.gather(-1, heaviest.expand(len(targets), -1, -1))
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1)
    # On the sphere y_i = a_i x_i / ||x_i||: the same vectors with other weights.
    kinds = torch.stack([torch.ones_like(norms), torch.where(norms > 0, 1 / norms, 0.0)])
    coefficients = dealt.unsqueeze(-2) * kinds  # (d, r, 2, w)

    sizes = torch.tensor(top_n, device=x.device)
    inside = torch.arange(chosen.shape[-1], device=x.device) < sizes.unsqueeze(-1)  # (N, m)
    points = x.index_select(0, chosen.flatten()).unflatten(0, chosen.shape)  # (d, r, m, E)
    of_chosen = coefficients.gather(-1, _for_both(chosen)).unsqueeze(-2).expand(*shape[:2], 2, *inside.shape)
    context = (of_chosen * inside).flatten(2, 3) @ points
    distances = scaled_distances(of_chosen.flatten(2, 3), points, context).unflatten(2, (2, -1))  # (d, r, 2, N, m)

    own = (coefficients * norms).square_()
    own += torch.zeros_like(weights).masked_fill_(~visible, torch.inf).unsqueeze(-2)
    own.scatter_(-1, _for_both(chosen), torch.inf)
    nearest = _nearest(context.unflatten(2, (2, -1)), x, coefficients, own)
    not_outside = inside | ~visible.gather(-1, heaviest)[:, None, None]
    among_chosen = distances.masked_fill(not_outside, torch.inf).amin(-1)
    radius = torch.minimum(nearest, among_chosen)
    return ((distances <= radius.unsqueeze(-1)) & inside).sum(-1, dtype=x.dtype) / sizes, radius


def _for_both(keys: Tensor) -> Tensor:
    return keys.unsqueeze(-2).expand(*keys.shape[:-1], 2, keys.shape[-1])


def _nearest(context: Tensor, x: Tensor, coefficients: Tensor, own: Tensor) -> Tensor:
    """The smallest ||c_i x_i - s|| of each context (d, r, 2, N, E); own: ||c_i x_i||^2, infinite for keys left out."""
    kinds, sizes, width = context.shape[-3:]
    at_once = max(1, (CUDA_BLOCK_ELEMENTS if x.is_cuda else BLOCK_ELEMENTS) // (kinds * sizes * len(x)))
    workspace = Workspace(x)
    found = []
    for s, c, squares in zip(*(t.flatten(0, 1).split(at_once) for t in (context, coefficients, own)), strict=True):
        # ||y_i - s||^2 - ||s||^2 = ||y_i||^2 - 2 y_i.s
        along = workspace.array(*s.shape[:-1], len(x))
        torch.mm(s.reshape(-1, width), x.T, out=along.view(-1, len(x)))
        found.append(torch.addcmul(squares.unsqueeze(-2), c.unsqueeze(-2), along, value=-2, out=along).amin(-1))
    squared = torch.cat(found).reshape(context.shape[:-1]) + context.square().sum(-1)
    return squared.clamp(min=0).sqrt()
