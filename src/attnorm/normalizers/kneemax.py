"""Kneemax: linear above a knee, fading quadratically to exact zero below it.

    p_j = phi(z_j/2 - tau),   phi(t) = t^2/(4k) for 0 <= t <= 2k,   t - k beyond,   sum p = 1

phi is Huber's function of the positive part, so the slopes u_j = min(1, sqrt(p_j/k)) never exceed 1 and the Jacobian
(diag(u) - u u^T / sum u)/2 has norm at most 1/2 at every n: softmax's constant. k = 0 is sparsemax(z/2), k = 1
entmax15(z/2).

knee=1/4, the default: entmax15(z) below that weight, and straight above it. Undecided rows move less, which language
models need. share=c: the knee at c/n. Theorems and proofs: docs/theory/kneemax.md.
"""

import math
from typing import Any

import torch
from torch import Tensor

from attnorm.normalizers.block import Block
from attnorm.normalizers.contract import Map, Normalizer, Properties, ThresholdForm, at_least_one, same_as
from attnorm.normalizers.declaration import HEADS, Row, WarmStart, bisect, declare, heads_if_learned
from attnorm.normalizers.softmax import Temperature, tempered
from attnorm.normalizers.threshold import Newton, newton_step, solve_threshold

DEFAULT_KNEE = 0.25
LARGEST_KNEE = 0.5  # two weights can reach it, so that 1/2 is the Jacobian's largest norm and not only a bound


def kneemax_rows(z: Tensor, knee: Tensor) -> Tensor:
    """Return kneemax over the last dimension: p = w (2t - w) / (4k), w = min(t, 2k), k the knee of each row (..., 1).

    The rows stay in units of the logits: dividing them by the knee would round every key once more.
    """
    reach = torch.where(knee <= 1, 1 + knee, 2 * knee.sqrt())  # phi^-1(1): a key 2 * reach below the largest gets 0
    below = (z - z.amax(-1, keepdim=True)).mul_(0.5)
    return _recompute_weights(below, solve_threshold(below + reach, _excess, _huber, 2 * knee), knee)


def _recompute_weights(below: Tensor, p: Tensor, knee: Tensor) -> Tensor:
    """The weights p again, from the threshold that the largest of them names; both arguments are overwritten.

    Newton's steps round a key at each of its stages, the first near 1. The difference to the threshold itself is
    rounded once, and is exact for keys close to it. It starts a few units in the last place to the left, so that one
    step ends at a row sum of 1.
    """
    largest = p.amax(-1, keepdim=True)
    led = torch.where(largest > knee, largest + knee, 2 * (knee * largest).sqrt())  # phi^-1 of the largest weight
    t = below.add_(led + 4 * torch.finfo(p.dtype).eps)
    buffer = None if torch.compiler.is_compiling() else p
    excess, slope = _excess(t, 2 * knee, buffer)
    weights = _huber(t.sub_(newton_step(excess, slope)), 2 * knee, buffer)
    # Not in place in a compiled graph: torch 2.11 gives an autograd.Function whose output is no gradient then.
    return torch.div(weights, weights.sum(-1, keepdim=True), out=None if buffer is None else weights)


def _huber(t: Tensor, bend: Tensor | None, buffer: Tensor | None) -> Tensor:
    """Return p without the factor 1/(4k), which the division by the row sum removes; bend is 2k."""
    assert bend is not None
    w = torch.minimum(t.relu_(), bend, out=buffer)
    return t.mul_(2).sub_(w).mul_(w)


def _excess(t: Tensor, bend: Tensor | None, buffer: Tensor | None) -> Newton:
    """sum p - 1 = (sum w^2 + 4k sum (t - w)) / (4k) - 1: convex in the threshold, so Newton never passes it."""
    assert bend is not None
    sum_of_t = t.relu_().sum(-1, keepdim=True)
    w = torch.minimum(t, bend, out=buffer)
    below = w.sum(-1, keepdim=True)
    squares = w.square_().sum(-1, keepdim=True)
    total = squares.div_(2 * bend).add_(sum_of_t - below)
    return Newton(total.sub_(1), below / bend)


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
    """The map of kneemax. The knee is at the same weight in every row, or at share/n with `share`."""

    properties = Properties(row_sum="one", exact_zeros=True)
    jacobian = "threshold"

    def __init__(self, share: float | None = None, *, knee: float | None = None) -> None:
        super().__init__()
        if share is not None and not share > 0:
            raise ValueError(f"share (the knee as a multiple of the uniform weight 1/n) must be positive, got {share}")
        if knee is not None and not 0 < knee <= LARGEST_KNEE:
            raise ValueError(
                f"knee must lie in (0, {LARGEST_KNEE}], got {knee}. Above it, the knee changes single weights "
                "only. Use entmax15 instead."
            )
        if share is not None and knee is not None:
            raise ValueError(
                f"expected share or knee, got both: share={share} puts the knee at the weight share/n, knee={knee} "
                "at a fixed weight. Remove one."
            )
        self.share = None if share is None else float(share)
        self.knee = DEFAULT_KNEE if knee is None else float(knee)  # without a share
        if share is not None:
            self.properties = Properties(row_sum="one", exact_zeros=True, length="knee at share/n")

    def knees(self, n: Any) -> Any:
        """The knee of rows with n visible keys, a tensor or a number."""
        return same_as(n, self.knee) if self.share is None else self.share / at_least_one(n)

    def forward(self, block: Block) -> Tensor:
        return block.hide(_Kneemax.apply(block.filled_low(), self.knees(block.n)))  # type: ignore[no-untyped-call]

    def threshold_form(self) -> ThresholdForm:
        return ThresholdForm("kneemax", self.knees, takes_numbers=True)

    def lipschitz(self, n: int) -> float | None:
        return 0.5 if n > 1 else 0.0

    def slopes(self, block: Block, weights: Tensor) -> Tensor:
        knees: Tensor = self.knees(block.n)
        return 0.5 * (weights / knees).clamp(max=1).sqrt()  # 1/2 from the z/2 of the map

    def extra_repr(self) -> str:
        return f"knee={self.knee}" if self.share is None else f"share={self.share}"


def kneemax_row(z: Tensor, knee: float) -> Tensor:
    """Reference for one row: bisection on tau; a last Newton step makes it differentiable."""
    y, k = z / 2, knee

    def weights(tau: float | Tensor) -> Tensor:
        t = (y - tau).relu()
        return torch.where(t <= 2 * k, t**2 / (4 * k), t - k)

    highest = y.detach().max().item()
    with torch.no_grad():
        tau = bisect(lambda tau: weights(tau).sum().item(), highest - 1 - k - 2 * math.sqrt(k), highest)
    slope = ((y - tau).relu() / (2 * k)).clamp(max=1).sum().detach()
    return weights(tau + (weights(tau).sum() - 1) / slope)


def _reference(
    row: Row, share: float | None = None, knee: float | None = None, temperature: float = 1.0, **_: Any
) -> Tensor:
    return kneemax_row(tempered(row, temperature), (knee or 0.25) if share is None else share / row.n)


@declare(
    reference=_reference,
    examples=[
        {},
        {"share": 1.0},
        {"share": 30.0},
        {"knee": 0.1},
        {"temperature": 0.5, "learned": True, "heads": HEADS},
    ],
    warm_start=WarmStart(options=heads_if_learned),
)
def kneemax(
    share: float | None = None,
    *,
    knee: float | None = None,
    temperature: float = 1.0,
    learned: bool = False,
    heads: int | None = None,
) -> Normalizer:
    """Sparse and gradient-stable: entmax15 up to the weight 1/4, then linear; Jacobian norm <= 1/(2T) for every n.

    For sparse attention with a bounded gradient. All of the weight needs a lead of 2.5 T (2 T with share=1). share=1
    puts the knee at 1/n: a key that leads by g keeps min(1, g/(2T)) up to 1/n at every length, but language models lose
    0.28 nats.
    """
    plain = temperature == 1.0 and not learned and heads is None
    scale = [] if plain else [Temperature(temperature, learned=learned, heads=heads)]
    return Normalizer(Kneemax(share, knee=knee), scale=scale, name="kneemax")
