"""Separability when the weights know nothing of the vectors: each row's weights dealt out to its visible keys anew.

What theory.geometry computes for one N at a time (`separability`), here for all N of a draw in one product: the null
takes many draws.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def deal(visible: Tensor, generator: torch.Generator | None) -> Tensor:
    """The new key of every key, of the shape of visible (..., w): visible ones among themselves, others as they are."""
    keys = torch.arange(visible.shape[-1], device=visible.device)
    device = None if generator is None else generator.device
    targets = []
    for row in visible.flatten(0, -2):
        own = row.nonzero().squeeze(-1)
        order = torch.randperm(len(own), generator=generator, device=device)
        targets.append(keys.scatter(0, own, own[order.to(own.device)]))
    return torch.stack(targets).reshape(visible.shape) if targets else keys.expand(visible.shape)


def separabilities(
    weights: Tensor, x: Tensor, squares: Tensor, visible: Tensor, heaviest: Tensor, top_n: Sequence[int]
) -> Tensor:
    """N_s / N for each N: (g, r, len(top_n)), meaningless where n <= N.

    weights, visible (g, r, w), x (g, w, E) and ||x||^2, heaviest (g, r, m): keys by weight, m the largest N or w.
    """
    rows, most = heaviest.shape[-2:]
    y = weights.gather(-1, heaviest).unsqueeze(-1) * _rows(x, heaviest.flatten(-2)).unflatten(-2, (rows, most))
    sums = y.cumsum(-2)
    last = [min(N, most) - 1 for N in top_n]
    context = sums[..., last, :]  # (g, r, N, E)
    # ||y_i - s||^2 - ||s||^2 = ||y_i||^2 - 2 y_i.s
    own = (weights.square() * squares.unsqueeze(-2)).masked_fill_(~visible, torch.inf)
    nearer = (context.flatten(1, 2) @ x.mT).unflatten(1, (rows, -1))
    nearer.mul_(-2 * weights.unsqueeze(-2)).add_(own.unsqueeze(-2))
    found = []
    for place, N in enumerate(top_n):
        s = context[..., place, :]
        outside = nearer[..., place, :].scatter_(-1, heaviest[..., :N], torch.inf)
        radius = (outside.amin(-1) + s.square().sum(-1)).clamp(min=0).sqrt().unsqueeze(-1)
        distances: Tensor = torch.linalg.vector_norm(y[..., :N, :] - s.unsqueeze(-2), dim=-1)
        found.append((distances <= radius).sum(-1).to(weights.dtype) / N)
    return torch.stack(found, -1)


def _rows(x: Tensor, which: Tensor) -> Tensor:
    return x.gather(-2, which.unsqueeze(-1).expand(*which.shape, x.shape[-1]))
