"""alpha-entmax, the family from softmax (alpha = 1) to sparsemax (alpha = 2).

    p = argmax_p <p, z> + H_alpha(p),   H_alpha = sum (p - p^alpha) / (alpha (alpha - 1))
    p_j = [1 + (alpha-1)(z_j - mu)]_+ ^ (1/(alpha-1)),   mu such that sum p = 1

Written with mu instead of the usual tau = (alpha-1) mu - 1, the formula is the deformed exponential of z - mu, and
alpha = 1 is its limit (mu = logsumexp z). The Jacobian is diag(u) - u u^T / sum u with u = p^(2-alpha) on the
support: at most 1 in norm.
Papers: Martins & Astudillo 2016, https://arxiv.org/abs/1602.02068 (sparsemax); Peters, Niculae & Martins 2019,
https://arxiv.org/abs/1905.05702 (entmax); Correia, Niculae & Martins 2019, https://arxiv.org/abs/1909.00015 (learned).
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from attnorm.normalizers.block import Block
from attnorm.normalizers.contract import (
    Map,
    Normalizer,
    Properties,
    ThresholdForm,
    per_head,
    per_head_parameter,
    same_as,
)
from attnorm.normalizers.declaration import HEADS, LayerFacts, Options, Row, WarmStart, bisect, declare
from attnorm.normalizers.softmax import softmax_row
from attnorm.normalizers.threshold import Newton, solve_threshold

# A learned alpha keeps this distance from 1 and 2, where its gradient would divide 0 by 0.
MIN_DEFORMATION = 1e-6

MIN_KERNEL_ALPHA = 1.01  # below it the weights are nearly softmax's, and float32 has too few digits for a threshold


def entmax_rows(z: Tensor, alpha: float | Tensor) -> Tensor:
    """Return alpha-entmax over the last dimension, 1 < alpha <= 2, in one batch."""
    y = z - z.amax(-1, keepdim=True)  # the largest logit becomes 0: a common offset would cost digits
    if isinstance(alpha, float) and alpha == 2.0:
        return solve_threshold(y.add_(1), _sparsemax, _positive_part)
    if isinstance(alpha, float) and alpha == 1.5:
        return solve_threshold(y.mul_(0.5).add_(1), _entmax15, _squared_positive_part)
    return solve_threshold(y, _entmax, _deformed_exp, torch.as_tensor(alpha, dtype=y.dtype, device=y.device))


def _sparsemax(base: Tensor, _: Tensor | None, buffer: Tensor | None) -> Newton:
    """p = [base]_+; the excess is sum p - 1."""
    p = base.relu_()
    return Newton(p.sum(-1, keepdim=True) - 1, torch.sign(p, out=buffer).sum(-1, keepdim=True))


def _entmax15(base: Tensor, _: Tensor | None, buffer: Tensor | None) -> Newton:
    """p = [base]_+^2; the excess is the norm of the root of p, minus 1."""
    root = base.relu_()
    total = root.sum(-1, keepdim=True)
    # Not torch.norm, which loses many small weights next to a large one.
    norm = torch.square(root, out=buffer).sum(-1, keepdim=True).sqrt()
    return Newton(norm - 1, total / norm)


def _entmax(x: Tensor, alpha: Tensor | None, buffer: Tensor | None) -> Newton:
    """p = [1 + d x]_+^(1/d) with d = alpha - 1; the excess is (S^d - 1) / d with S = sum p.

    S^d is a norm of [1 + d x]_+, hence convex. log1p and expm1 keep the digits for alpha near 1.
    """
    assert alpha is not None
    d = alpha - 1
    log_p = torch.mul(d, x, out=buffer).clamp_(min=-1).log1p_().div_(d)
    p = torch.exp(log_p)
    log_total = torch.log(p.sum(-1, keepdim=True))
    slope = log_p.mul_(1 - d).exp_().sum(-1, keepdim=True) * torch.exp((d - 1) * log_total)
    return Newton(torch.expm1(d * log_total) / d, slope)


def _positive_part(base: Tensor, _: Tensor | None, buffer: Tensor | None) -> Tensor:
    return base.relu_()


def _squared_positive_part(base: Tensor, _: Tensor | None, buffer: Tensor | None) -> Tensor:
    return base.relu_().square_()


def _deformed_exp(x: Tensor, alpha: Tensor | None, buffer: Tensor | None) -> Tensor:
    assert alpha is not None
    d = alpha - 1
    return x.mul_(d).clamp_(min=-1).log1p_().div_(d).exp_()


def one_against_equals_norm(n: int, alpha: float) -> float:
    """Return the largest Jacobian norm over rows with one weight and n - 1 other, equal weights.

    The largest norm over all rows is the value of this function for 2 or for n keys. Proof: docs/theory/gradient.md.
    """
    others = n - 1
    return (1 + 1 / others) * math.pow(1 + math.pow(others, -(alpha - 1) / (3 - alpha)), alpha - 3)


class _Entmax(torch.autograd.Function):
    """entmax_rows with gradients for z and alpha. Both are functions of p alone, so only p is saved."""

    @staticmethod
    def forward(z: Tensor, alpha: float | Tensor) -> Tensor:
        return entmax_rows(z, alpha)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        alpha = inputs[1]
        ctx.alpha = None if isinstance(alpha, Tensor) else alpha
        ctx.save_for_backward(output, *([alpha] if isinstance(alpha, Tensor) else []))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (grad,) = grads
        p, *learned = ctx.saved_tensors  # read once: gradient checkpointing returns each of them only once
        alpha = learned[0] if learned else ctx.alpha
        support = p > 0
        u = _slopes(p, support, alpha)
        share = u / u.sum(-1, keepdim=True)
        mean = (share * grad).sum(-1, keepdim=True)
        grad_z = u * (grad - mean) if ctx.needs_input_grad[0] else None
        if ctx.alpha is not None or not ctx.needs_input_grad[1]:
            return grad_z, None
        change = torch.where(support, _change_with_alpha(torch.where(support, p, 1.0), alpha), 0.0)
        per_row = (change * (grad - mean)).sum(-1, keepdim=True)
        return grad_z, per_row.sum_to_size(alpha.shape)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], z: Tensor, alpha: float | Tensor) -> tuple[Tensor, int]:
        z = z.movedim(in_dims[0], 0) if in_dims[0] is not None else z.expand(info.batch_size, *z.shape)
        if isinstance(alpha, Tensor) and in_dims[1] is not None:
            alpha = alpha.movedim(in_dims[1], 0)
            alpha = alpha.reshape(alpha.shape[0], *([1] * (z.dim() - alpha.dim())), *alpha.shape[1:])
        return _Entmax.apply(z, alpha), 0  # type: ignore[no-untyped-call]


def _slopes(p: Tensor, support: Tensor, alpha: float | Tensor) -> Tensor:
    if isinstance(alpha, float) and alpha == 2.0:
        return support.to(p.dtype)
    return torch.where(support, torch.where(support, p, 1.0) ** (2 - alpha), 0.0)


def _change_with_alpha(p: Tensor, alpha: Tensor) -> Tensor:
    """d p / d alpha at fixed mu: -p y^2 (e^-t - 1 + t) / t^2 with y = log p, t = (alpha-1) y; finite as alpha -> 1."""
    y = torch.log(p)
    t = (alpha - 1) * y
    small = t.abs() < 1e-2
    safe = torch.where(small, 1.0, t)
    series = 0.5 - t / 6 + t**2 / 24 - t**3 / 120 + t**4 / 720
    return -p * y**2 * torch.where(small, series, (torch.expm1(-safe) + safe) / safe**2)


class Entmax(Map):
    """alpha fixed, or learned per head as 1 + sigmoid(theta)."""

    properties = Properties(row_sum="one", exact_zeros=True)
    jacobian = "threshold"

    def __init__(self, alpha: float = 1.5, *, learned: bool = False, heads: int | None = None) -> None:
        super().__init__()
        if not 1 <= alpha <= 2:
            raise ValueError(f"alpha must lie in [1, 2] (1 = softmax, 2 = sparsemax), got {alpha}")
        if learned and alpha in (1, 2):
            raise ValueError(f"a learned alpha starts strictly between 1 and 2, got {alpha}. Use e.g. 1.5.")
        self.alpha = float(alpha)
        self.theta: nn.Parameter | None = None
        if learned:
            start = math.log((alpha - 1) / (2 - alpha))
            self.theta = per_head_parameter(start, heads)
        elif heads is not None:
            raise ValueError(
                f"expected learned=True with heads={heads}, got learned=False. A fixed alpha is shared by all heads: "
                "remove heads, or learn alpha."
            )
        if alpha == 1:
            self.properties = Properties(row_sum="one")

    def forward(self, block: Block) -> Tensor:
        z = block.filled_low()
        if self.theta is not None:
            weights = _Entmax.apply(z, per_head(1 + self.share(z.dtype), z))  # type: ignore[no-untyped-call]
        elif self.alpha == 1:
            weights = torch.softmax(z, dim=-1)
        else:
            weights = _Entmax.apply(z, self.alpha)  # type: ignore[no-untyped-call]
        return block.hide(weights)

    def share(self, dtype: torch.dtype) -> Tensor:
        """Return alpha - 1, if alpha is learned."""
        assert self.theta is not None
        return torch.sigmoid(self.theta.to(dtype)).clamp(MIN_DEFORMATION, 1 - MIN_DEFORMATION)

    def threshold_form(self) -> ThresholdForm | None:
        if self.theta is not None:
            return ThresholdForm("entmax", lambda n: per_head(self.share(n.dtype), n))
        if self.alpha in (1.5, 2.0):
            return ThresholdForm("entmax15" if self.alpha == 1.5 else "sparsemax")
        if self.alpha < MIN_KERNEL_ALPHA:
            return None
        return ThresholdForm("entmax", lambda n: same_as(n, self.alpha - 1), takes_numbers=True)

    def lipschitz(self, n: int) -> float | None:
        """Exact for a fixed alpha; 1, the largest over all alpha, for a learned one."""
        if n == 1:
            return 0.0
        if self.theta is not None:
            return 1.0
        return max(one_against_equals_norm(2, self.alpha), one_against_equals_norm(n, self.alpha))

    def slopes(self, block: Block, weights: Tensor) -> Tensor:
        alpha = self.alpha if self.theta is None else per_head(1 + self.share(weights.dtype), weights)
        return _slopes(weights, weights > 0, alpha)

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}" if self.theta is None else f"alpha learned from {self.alpha}"


def entmax_row(z: Tensor, alpha: float | Tensor) -> Tensor:
    """Reference for one row: bisection on mu.

    A last Newton step makes it differentiable (implicit function theorem).
    """
    if not isinstance(alpha, Tensor) and alpha == 1:
        return softmax_row(z)
    d, y = alpha - 1, z - z.max().detach()

    def weights(mu: float | Tensor) -> Tensor:
        x = d * (y - mu)
        return torch.where(x > -1, torch.exp(torch.log1p(torch.where(x > -1, x, 0.0)) / d), 0.0)

    fixed = torch.as_tensor(d).detach().item()
    most = -math.expm1(-fixed * math.log(len(z))) / fixed
    with torch.no_grad():
        mu = bisect(lambda mu: weights(mu).sum().item(), 0.0, most)
    p = weights(mu)
    slope = torch.where(p > 0, torch.where(p > 0, p, 1.0) ** (2 - alpha), 0.0).sum().detach()
    return weights(mu + (p.sum() - 1) / slope)


def _reference(row: Row, alpha: float = 1.5, learned: bool = False, **_: Any) -> Tensor:
    if not learned:
        return entmax_row(row.z, alpha)
    return entmax_row(row.z, 1 + torch.sigmoid(row.value("map.theta", math.log((alpha - 1) / (2 - alpha)))))


def _start(layer: LayerFacts, given_options: Options) -> dict[str, Any]:
    return {"alpha": 1.05, "heads": layer.heads} if given_options.get("learned") else {}


@declare(reference=lambda row: entmax_row(row.z, 2.0), warm_start=WarmStart())
def sparsemax() -> Normalizer:
    """[z - tau]_+, the Euclidean projection onto the simplex: entmax with alpha = 2, the sparsest of the family.

    A gap of 1 between the two largest logits gives a one-hot row, whose gradient is 0.
    """
    return Normalizer(Entmax(2.0), name="sparsemax")


@declare(reference=lambda row: entmax_row(row.z, 1.5), warm_start=WarmStart())
def entmax15() -> Normalizer:
    """[z/2 - tau]_+^2: entmax with alpha = 1.5, sparse, with quadratic instead of exponential weights.

    The first sparse normalizer to try. A row is one-hot from a gap of 2, and then no gradient reaches its logits: at a
    high learning rate one key may get nearly all of the weight. The Jacobian norm is 0.869 at 1,024 keys, 0.985 at a
    million, and stays below 1.
    """
    return Normalizer(Entmax(1.5), name="entmax15")


@declare(
    reference=_reference,
    examples=[
        {},
        {"alpha": 1.0},
        {"alpha": 1.0001},
        {"alpha": 1.2},
        {"alpha": 1.85},
        {"alpha": 1.6, "learned": True, "heads": HEADS},
    ],
    warm_start=WarmStart("learned=True starts at alpha = 1.05; a fixed alpha is as given", _start),
)
def entmax(alpha: float = 1.5, *, learned: bool = False, heads: int | None = None) -> Normalizer:
    """[1 + (alpha-1)(z - mu)]_+^(1/(alpha-1)), any alpha in [1, 2], fixed or learned per head.

    alpha = 1 is softmax, 2 the sparsest map. learned: train alpha = 1 + sigmoid(theta), with an exact gradient.
    """
    return Normalizer(Entmax(alpha, learned=learned, heads=heads), name="entmax")
