"""The largest numbers of each row, and where they are: exactly, without sorting the row."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from attnorm.engines.device_sync import runs_asynchronously


def heaviest(rows: Tensor, count: int, *, scratch: Tensor | None = None) -> Tensor:
    """The `count` largest of each row (rows, L), largest first; fewer where L is smaller. `scratch` is overwritten."""
    count = min(count, rows.shape[-1])
    if runs_asynchronously(rows):
        return rows.topk(count, dim=-1).values
    # numpy selects with vector instructions: ten times as fast as torch's topk.
    part = torch.empty_like(rows) if scratch is None else scratch
    numbers = part.copy_(rows).numpy()
    numbers.partition(numbers.shape[-1] - count, axis=-1)
    return torch.from_numpy(np.sort(numbers[:, -count:], axis=-1)[:, ::-1].copy())


def masses(weights: Tensor, top_n: Sequence[int]) -> Tensor:
    """Sums of the N largest weights of each row, one for each N: (rows, len(top_n))."""
    ordered = heaviest(weights, weights.shape[-1])
    sums = ordered.cumsum(-1)
    return torch.stack([sums[:, min(N, sums.shape[-1]) - 1] for N in top_n], -1)


def heaviest_keys(weights: Tensor, visible: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Columns and weights (..., count) of the visible keys with the largest |weight|, the largest first.

    Fewer where a row has fewer columns. Equal weights: the earlier column first, on every device. -1 and 0 stand for no
    key: a row has fewer visible keys of weight other than 0, or its weights are not finite.
    """
    count = min(count, weights.shape[-1])
    size = weights.abs().masked_fill(~visible, 0.0)
    sound = size.sum(-1, keepdim=True).isfinite()
    size = size.masked_fill(~sound, 0.0)
    # topk may return any of several equal weights: it gives the threshold, the columns are counted from the left.
    least = size.topk(count, dim=-1).values[..., -1:]
    heavier, tied = size > least, size == least
    chosen = heavier | (tied & (tied.cumsum(-1) <= count - heavier.sum(-1, keepdim=True)))
    every = torch.arange(size.shape[-1], device=size.device)
    columns = torch.where(chosen, every, size.shape[-1]).topk(count, dim=-1, largest=False).values
    order = size.gather(-1, columns).sort(dim=-1, descending=True, stable=True).indices
    columns = columns.gather(-1, order)
    values = weights.gather(-1, columns)
    read = size.gather(-1, columns) > 0
    return torch.where(read, columns, -1), torch.where(read, values, 0.0)
