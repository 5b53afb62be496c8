"""The variance of the logits of each row as an operator of torch.library, with its gradient by q and k."""

from typing import Any

import torch
from torch import Tensor

from attnorm.engines.one_pass_operators import raise_second_gradient
from attnorm.engines.triton_support import kernel_operator

EQUAL = 1e-6  # deviation over mean up to which the logits of a row differ by rounding only: no gradient


@kernel_operator("attnorm::row_variance")
def row_variance(
    q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Variance and mean of the visible logits, 0 for rows that see nothing, and their number. Only the first has a
    gradient."""
    from attnorm.kernels import variance

    return variance.variance_of_rows(q, k, mask, causal, scale)


@row_variance.register_fake
def _(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(q.new_empty(q.shape[:3], dtype=torch.float32) for _ in range(3))  # type: ignore[return-value]


@kernel_operator("attnorm::row_variance_backward")
def _backward(
    slope: Tensor, q: Tensor, k: Tensor, mask: Tensor | None, mean: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    from attnorm.kernels import variance

    return variance.gradients(slope, q, k, mask, mean, causal, scale)


@_backward.register_fake
def _(
    slope: Tensor, q: Tensor, k: Tensor, mask: Tensor | None, mean: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.options = inputs[3:]


def _gradients(ctx: Any, grad: Tensor | None, _mean: None, _count: None) -> tuple[Tensor | None, ...]:
    q, k, mask, variance, mean, count = ctx.saved_tensors
    if grad is None:
        return (None,) * 5
    differ = variance > (EQUAL * mean).square()
    slope = torch.where(differ, 2 * grad / count.clamp(min=1), 0.0)
    grad_q, grad_k = _backward(slope, q, k, mask, mean, *ctx.options)
    return grad_q, grad_k, None, None, None


row_variance.register_autograd(_gradients, setup_context=_save_for_backward)
_backward.register_autograd(raise_second_gradient)
