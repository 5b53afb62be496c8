"""Kneemax: linear above a knee at the uniform weight 1/n, fading quadratically to exact zero below it.

    p_j = phi(z_j/2 - tau),   phi(t) = t^2/(4k) for 0 <= t <= 2k,   t - k beyond,   k = share/n,   sum p = 1

phi is Huber's function of the positive part, so the slopes u_j = min(1, sqrt(p_j/k)) never exceed 1 and the Jacobian
(diag(u) - u u^T / sum u)/2 has norm at most 1/2 at every n - softmax's constant - while a token whose logit leads by g
keeps the weight min(1, g/2) up to 1/n, however many keys there are. k = 0 is sparsemax(z/2), k = 1 entmax15(z/2).
Theorems and proofs: docs/theory/kneemax.md.
"""

from typing import Any

import torch
from torch import Tensor

from attnorm.normalizers.block import Block
from attnorm.normalizers.contract import Map, Normalizer, Properties
from attnorm.normalizers.temperature import Temperature
from attnorm.normalizers.threshold import Newton, solve_threshold


def kneemax_rows(z: Tensor, knee: Tensor) -> Tensor:
    """Over the last dimension, with the knee k of each row (..., 1). In x = t/(2k): u = min(x, 1), p = k u (2x - u)."""
    reach = torch.where(knee <= 1, 1 + knee, 2 * knee.sqrt())  # phi^-1(1): a key 2 * reach below the largest gets 0
    x = (z - z.amax(-1, keepdim=True)).add_(2 * reach).mul_(0.25 / knee)
    return solve_threshold(x, _excess, _huber, knee)


def _huber(x: Tensor, knee: Tensor | None, room: Tensor | None) -> Tensor:
    """p up to the factor k, which the sum of the row divides out."""
    u = torch.clamp(x.relu_(), max=1, out=room)
    return x.mul_(2).sub_(u).mul_(u)


def _excess(x: Tensor, knee: Tensor | None, room: Tensor | None) -> Newton:
    """sum p - 1 = k (sum u^2 + 2 sum (x - u)) - 1: convex in the threshold, so Newton never passes the solution."""
    assert knee is not None
    beyond = x.relu_().sum(-1, keepdim=True)
    u = torch.clamp(x, max=1, out=room)
    slope = u.sum(-1, keepdim=True)
    squares = u.square_().sum(-1, keepdim=True)
    total = squares.add(beyond - slope, alpha=2).mul_(knee)
    return Newton(total.sub_(1), slope.mul_(2).mul_(knee))


class _Kneemax(torch.autograd.Function):
    """Saves only p and the knee: u is a function of both."""

    @staticmethod
    def forward(z: Tensor, knee: Tensor) -> Tensor:
        return kneemax_rows(z, knee)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(output, inputs[1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        (grad,) = grads
        p, knee = ctx.saved_tensors
        v = (p * (1 / knee)).clamp(max=1)
        u = v * v.clamp(min=torch.finfo(v.dtype).tiny).rsqrt()  # sqrt(v), and 0 with all its derivatives at v = 0
        mean = (u * grad).sum(-1, keepdim=True) / u.sum(-1, keepdim=True)
        return 0.5 * u * (grad - mean), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], z: Tensor, knee: Tensor) -> tuple[Tensor, int]:
        z = z.movedim(in_dims[0], 0) if in_dims[0] is not None else z.expand(info.batch_size, *z.shape)
        if in_dims[1] is not None:
            knee = knee.movedim(in_dims[1], 0)
            knee = knee.reshape(knee.shape[0], *([1] * (z.dim() - knee.dim())), *knee.shape[1:])
        return _Kneemax.apply(z, knee), 0  # type: ignore[no-untyped-call]


class Kneemax(Map):
    properties = Properties(row_sum="one", exact_zeros=True, length="knee at share/n")

    def __init__(self, share: float = 1.0) -> None:
        super().__init__()
        if not share > 0:
            raise ValueError(f"share must be positive (the knee in uniform weights 1/n), got {share}")
        self.share = float(share)

    def forward(self, block: Block) -> Tensor:
        knee = self.share / block.n.clamp(min=1)
        return block.hide(_Kneemax.apply(block.filled_low(), knee))  # type: ignore[no-untyped-call]

    def lipschitz(self, n: int) -> float | None:
        return 0.5 if n > 1 else 0.0

    def extra_repr(self) -> str:
        return f"share={self.share}"


def kneemax(
    share: float = 1.0, *, temperature: float = 1.0, learned: bool = False, heads: int | None = None
) -> Normalizer:
    """Length-adaptive, sparse and gradient-stable: the Jacobian norm is at most 1/(2T), at every number of keys."""
    plain = temperature == 1.0 and not learned and heads is None
    scale = [] if plain else [Temperature(temperature, learned=learned, heads=heads)]
    return Normalizer(Kneemax(share), scale=scale, name="kneemax")
