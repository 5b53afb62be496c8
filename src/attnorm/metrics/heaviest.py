"""The largest numbers of each row, exactly, without sorting it."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from attnorm.engines.waiting import runs_behind


def heaviest(rows: Tensor, count: int, *, scratch: Tensor | None = None) -> Tensor:
    """The `count` largest of each row (rows, L), largest first; fewer where L is smaller. `scratch` is overwritten."""
    count = min(count, rows.shape[-1])
    if runs_behind(rows):
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
