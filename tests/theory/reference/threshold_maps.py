"""Threshold maps p_j = phi(y_j - tau) by plain bisection in float64: slow, short and independent of the package."""

from collections.abc import Callable

import torch
from torch import Tensor


def by_bisection(y: Tensor, phi: Callable[[Tensor], Tensor], reach: float) -> Tensor:
    """phi increasing, 0 at and below 0, 1 at `reach`; tau then lies between max y - reach and max y."""
    y = y.double()
    high = y.amax(-1, keepdim=True)
    low = high - reach
    for _ in range(60):  # to 1e-17
        tau = (low + high) / 2
        too_much = phi((y - tau).clamp(min=0)).sum(-1, keepdim=True) > 1
        low, high = torch.where(too_much, tau, low), torch.where(too_much, high, tau)
    p = phi((y - low).clamp(min=0))
    return p / p.sum(-1, keepdim=True)


def entmax(z: Tensor, alpha: float) -> Tensor:
    if alpha == 1:
        return torch.softmax(z.double(), dim=-1)
    d = alpha - 1
    return by_bisection(z, lambda t: (d * t) ** (1 / d), 1 / d)


def kneemax(z: Tensor, temperature: float = 1.0, share: float = 1.0) -> Tensor:
    """phi(t) = t^2/(4k) up to t = 2k, t - k beyond, on z/(2T), with the knee k = share/n."""
    k = share / z.shape[-1]

    def phi(t: Tensor) -> Tensor:
        return torch.where(t <= 2 * k, t.square() / (4 * k), t - k)

    return by_bisection(z / (2 * temperature), phi, 1 + k if k <= 1 else 2 * k**0.5)


def kneemax_slopes(p: Tensor, share: float = 1.0) -> Tensor:
    return (p * p.shape[-1] / share).clamp(max=1).sqrt()
