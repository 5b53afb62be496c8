"""Softmax attention whose factor per row is a function of the row's entropy, as operators of torch.library.

`row_entropy` gives the entropy and carries no gradient. The gradient through it is a part of `sharpened_attention`: its
backward knows the gradient of the factor before that of k, so one kernel computes both parts of the latter.
"""

from typing import Any

import torch
from torch import Tensor

from attnorm.engines.one_pass_operators import raise_second_gradient
from attnorm.engines.triton_support import kernel_operator


@kernel_operator("attnorm::row_entropy")
def row_entropy(
    q: Tensor, k: Tensor, mask: Tensor | None, factor: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Entropy in nats of softmax over each row, and log2 of its denominator; 0 for rows that see nothing."""
    from attnorm.kernels import entropy

    return entropy.entropy_of_rows(q, k, mask, factor, causal, scale)


@row_entropy.register_fake
def _(
    q: Tensor, k: Tensor, mask: Tensor | None, factor: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    return tuple(q.new_empty(q.shape[:3], dtype=torch.float32) for _ in range(2))  # type: ignore[return-value]


@kernel_operator("attnorm::sharpened_attention")
def sharpened_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor, cutoff: Tensor | None,
    soft_factor: Tensor | None, entropy: Tensor, soft_reference: Tensor, slope: Tensor, causal: bool,
    window: int | None, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output, and log2 of each row's denominator.

    entropy, soft_reference: `row_entropy` with the factor soft_factor; slope: the derivative of factor by the entropy.
    """
    from attnorm.kernels.one_pass import Form, forward

    form = Form(map="softmax", causal=causal, window=window, scale=scale)
    output, saved = forward(q, k, v, mask, factor, None, None, cutoff, None, form)
    return output, saved.reference


@sharpened_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor, cutoff: Tensor | None,
    soft_factor: Tensor | None, entropy: Tensor, soft_reference: Tensor, slope: Tensor, causal: bool,
    window: int | None, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:3], dtype=torch.float32)


@kernel_operator("attnorm::sharpened_attention_backward")
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor, cutoff: Tensor | None,
    soft_factor: Tensor | None, entropy: Tensor, soft_reference: Tensor, slope: Tensor, output: Tensor,
    reference: Tensor, causal: bool, window: int | None, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from attnorm.kernels.one_pass import Form, Saved
    from attnorm.kernels.one_pass_backward import RowEntropy, backward

    form = Form(map="softmax", causal=causal, window=window, scale=scale)
    saved = Saved(reference, reference.new_empty(0))
    sharpened = RowEntropy(soft_factor, entropy, soft_reference, slope)
    grad_q, grad_k, grad_v, grad_factor, _, _, grad_soft = backward(
        grad, q, k, v, mask, factor, None, None, cutoff, None, output, saved, form, sharpened
    )
    return grad_q, grad_k, grad_v, grad_factor, grad_soft


@_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor, cutoff: Tensor | None,
    soft_factor: Tensor | None, entropy: Tensor, soft_reference: Tensor, slope: Tensor, output: Tensor,
    reference: Tensor, causal: bool, window: int | None, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    rows = [q.new_empty(q.shape[:3] if used else (0,), dtype=torch.float32) for used in (True, soft_factor is not None)]
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), *rows  # type: ignore[return-value]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:10], *output)
    ctx.options = inputs[10:]


def _gradients(ctx: Any, grad: Tensor, _reference: None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # read once: gradient checkpointing returns each of them only once
    grad_q, grad_k, grad_v, grad_factor, grad_soft = _backward(grad, *saved, *ctx.options)
    soft_factor = saved[6]
    rows = (grad_factor, None, None if soft_factor is None else grad_soft)
    return grad_q, grad_k, grad_v, None, *rows, *([None] * 6)


sharpened_attention.register_autograd(_gradients, setup_context=_save_for_backward)
_backward.register_autograd(raise_second_gradient)
