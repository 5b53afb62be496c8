"""Separability of the heaviest keys, and its null: the same weights, permuted among the keys.

What theory.geometry computes for one N at a time (`separability`), here for all N in one product: the null takes many
draws, and the row itself is one more of them.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from attnorm.engines.device_sync import runs_asynchronously, sent_to
from attnorm.metrics.logits import BLOCK_ELEMENTS, CUDA_BLOCK_ELEMENTS, LogitWorkspace
from attnorm.theory.selection import SelectedRows, near_one, relative_weights


def draw_permutations(
    visible: Tensor, draws: int, generator: torch.Generator | None, dtype: torch.dtype = torch.int64
) -> Tensor:
    """The new key of every key of visible (h, r, w) in each draw: (draws, h, r, w).

    Visible keys are permuted among themselves, the others stay. Row by row, so that the block size does not matter.
    """
    heads, rows, keys = visible.shape
    device = visible.device if generator is None else generator.device
    # By numpy, which stays in this thread: several layers are drawn at the same time.
    every = np.tile(np.arange(keys, dtype=np.int32 if dtype == torch.int32 else np.int64), (draws, heads, rows, 1))
    targets = torch.from_numpy(every).to(visible.device)
    for row in range(rows):
        for head in range(heads):
            own = visible[head, row].nonzero().squeeze(-1)
            count = len(own)
            if count and device == own.device and int(own[-1]) < count:  # the first ones
                for target in targets[:, head, row, :count]:
                    torch.randperm(count, generator=generator, dtype=dtype, out=target)
                continue
            orders = [torch.randperm(count, generator=generator, device=device) for _ in range(draws)]
            targets[:, head, row, own] = own[torch.stack(orders).to(own.device)].to(dtype)
    return targets


def separabilities(rows: SelectedRows, targets: Tensor, top_n: Sequence[int]) -> Tensor:
    """N_s / N of the vectors as they are and on the sphere: (..., d, r, 2, len(top_n)).

    rows: r of them for each set of vectors (..., w, E), with at least as many selected keys as the largest N. targets
    (..., d, r, w): the new key of every key, for d draws. Meaningless where n <= N. Keys are compared by their
    closeness to the context vector (theory.selection): first those that are in no selected set, then the selected ones.
    """
    x, heaviest = near_one(rows.vectors), rows.indices
    chosen = targets.gather(-1, heaviest.unsqueeze(-3).expand(*targets.shape[:-1], -1))
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1)
    # On the sphere y_i = a_i x_i / ||x_i||: the same vectors with other weights.
    kinds = torch.stack([torch.ones_like(norms), torch.where(norms > 0, 1 / norms, 0.0)], -2)  # (..., 2, w)
    of_keys = kinds[..., None, None, :, :]
    shares, beyond = (
        _permuted(relative_weights(rows.weights, keys, rows.log_weights), targets).unsqueeze(-2) * of_keys
        for keys in (rows.visible, rows.outside)
    )  # (..., d, r, 2, w)

    sizes = sent_to(x.device, torch.tensor(top_n))
    inside = torch.arange(chosen.shape[-1], device=x.device) < sizes.unsqueeze(-1)  # (N, m)
    points, of_kind, lengths = _of_chosen(x, chosen), _of_chosen(kinds.mT, chosen), _of_chosen(norms[..., None], chosen)
    of_kind = of_kind.mT.unsqueeze(-2)  # (..., d, r, 2, 1, m)
    of_chosen = shares.gather(-1, _for_both(chosen)).unsqueeze(-2)  # (..., d, r, 2, 1, m)
    context = (of_chosen * inside).flatten(-3, -2) @ points  # (..., d, r, 2 N, E)

    own = -(beyond * shares * norms.square()[..., None, None, None, :])
    own.masked_fill_(~rows.visible[..., None, :, None, :], -torch.inf).scatter_(-1, _for_both(chosen), -torch.inf)
    nearest = _nearest(context.unflatten(-2, (2, -1)), x, 2 * beyond, own)  # (..., d, r, 2, N)

    factors, units = _in_units_of_each(rows, inside)
    # Many small products: without a copy, torch on ARM takes ten times as long.
    along = (points @ context.mT.contiguous()).mT.unflatten(-2, (2, -1))  # (..., d, r, 2, N, m)
    squares = lengths.squeeze(-1).square()[..., None, None, :]
    q = factors[..., None, :, None, :, :] * of_kind * (2 * along - of_chosen * squares)
    not_outside = inside | ~rows.visible.gather(-1, heaviest)[..., None, :, None, None, :]
    among_chosen = q.masked_fill(not_outside, -torch.inf).amax(-1)
    # -inf where no key lies beyond the selected ones
    nearest = torch.where(nearest.isfinite(), nearest * units[..., None, :, None, :], nearest)
    nearest = torch.maximum(nearest, among_chosen).unsqueeze(-1)
    distinguishable: Tensor = ((q >= nearest) & inside).sum(-1, dtype=x.dtype) / sizes
    return distinguishable


def _of_chosen(numbers: Tensor, chosen: Tensor) -> Tensor:
    """The numbers (..., w, c) of the chosen keys (..., d, r, m): (..., d, r, m, c)."""
    sets = chosen.shape[:-3]
    flat = numbers.reshape(-1, numbers.shape[-1])
    first = torch.arange(0, len(flat), numbers.shape[-2], device=flat.device).reshape(*sets, 1, 1, 1)
    found: Tensor = flat.index_select(0, (chosen + first).flatten()).unflatten(0, chosen.shape)
    return found


def _permuted(weights: Tensor, targets: Tensor) -> Tensor:
    return torch.empty(targets.shape, dtype=weights.dtype, device=weights.device).scatter_(
        -1, targets, weights.unsqueeze(-3).expand(targets.shape)
    )


def _in_units_of_each(rows: SelectedRows, inside: Tensor) -> tuple[Tensor, Tensor]:
    """For each N, relative to the heaviest key left out: the m selected weights, (..., r, N, m), and the weight that
    all keys beyond them are relative to, (..., r, N)."""
    order = rows.weights.abs() if rows.log_weights is None else rows.log_weights
    beyond = order.masked_fill(~rows.outside, -torch.inf).argmax(-1, keepdim=True)  # the heaviest of no set
    keys = torch.cat([rows.indices, beyond], -1)  # what is left out of a set is lighter than one of these
    weights = rows.weights.gather(-1, keys).unsqueeze(-2)
    logs = None if rows.log_weights is None else rows.log_weights.gather(-1, keys).unsqueeze(-2)
    left_out = torch.cat([~inside, torch.ones_like(inside[:, :1])], -1)
    seen = torch.cat([rows.visible.gather(-1, rows.indices), rows.outside.any(-1, keepdim=True)], -1)
    relative = relative_weights(weights, left_out & seen.unsqueeze(-2), logs)
    return relative[..., :-1], relative[..., -1].abs()


def _for_both(keys: Tensor) -> Tensor:
    return keys.unsqueeze(-2).expand(*keys.shape[:-1], 2, keys.shape[-1])


def _nearest(context: Tensor, x: Tensor, twice: Tensor, own: Tensor) -> Tensor:
    """The largest twice_i x_i.s + own_i of each context (..., d, r, 2, N, E); twice and own (..., d, r, 2, w)."""
    kinds, sizes, width = context.shape[-3:]
    keys = x.shape[-2]
    x = x.reshape(-1, keys, width)
    most = CUDA_BLOCK_ELEMENTS if runs_asynchronously(x) else BLOCK_ELEMENTS
    at_once = max(1, most // (len(x) * kinds * sizes * keys))
    workspace = LogitWorkspace(x)
    parts = (
        t.reshape(len(x), -1, *t.shape[-tail:]).split(at_once, 1) for t, tail in ((context, 3), (twice, 2), (own, 2))
    )
    found = []
    for s, c, squares in zip(*parts, strict=True):
        along = workspace.array(*s.shape[:-1], keys)
        torch.bmm(s.reshape(len(x), -1, width), x.mT, out=along.view(len(x), -1, keys))
        found.append(torch.addcmul(squares.unsqueeze(-2), c.unsqueeze(-2), along, out=along).amax(-1))
    return torch.cat(found, 1).reshape(context.shape[:-1])
