"""The one-pass kernels as operators of torch.library, so that torch.compile can include them in a graph.

Each operator has three parts: the function that launches the kernel, a `register_fake` function that gives the compiler
the shapes of its outputs, and its gradient. Operators take plain numbers and tensors only; `Form` is the record of
plain numbers that the kernels take.

    forward, decode               attention
    softmax_gradients             gradients of softmax by torch's SDPA, for the output of another kernel
    extreme_logits, top_k_cutoff  numbers of each row that a map needs first
    row_variance                  the same; its gradient reaches q and k
    row_entropy                   the same, without gradient
    sharpened_attention           softmax whose factor per row is a function of that entropy, with the gradient through
                                  it: backward knows the gradient of the factor before that of k, so one kernel computes
                                  both parts of the latter
    scaled_rows                   rows times one factor each, for the queries of torch's SDPA
"""

import math
from typing import Any

import torch
from torch import Tensor

from attnorm.engines.execution import kernel_operator
from attnorm.kernels.launch import Form, empty_numbers, empty_rows, in_rows


@kernel_operator("attnorm::extreme_logits")
def extreme_logits(
    q: Tensor, k: Tensor, mask: Tensor | None, factor: Tensor | None, softcap: float | None, causal: bool,
    window: int | None, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the smallest and the largest logit of each row, and the keys of both.

    Of equal logits, the first one gets the gradient.
    """
    from attnorm.kernels import extremes

    form = Form("softmax", softcap=softcap, causal=causal, window=window, scale=scale)
    return extremes.extreme_logits(q, k, mask, factor, form)


@extreme_logits.register_fake
def _(q: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dtypes = (torch.float32, torch.float32, torch.int32, torch.int32)
    return tuple(q.new_empty(q.shape[:3], dtype=dtype) for dtype in dtypes)  # type: ignore[return-value]


def _save_extremes(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, _, factor, ctx.softcap, _, _, ctx.scale = inputs
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(q, k, factor, *output[2:])


def _gradients_of_extremes(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    q, k, factor, *keys = ctx.saved_tensors
    grad_q, grad_k = (torch.zeros_like(t, dtype=torch.float32) for t in (q, k))
    grad_factor = torch.zeros_like(grads[0])
    for grad, indices in zip(grads, keys, strict=False):  # the outputs that hold key indices have no gradient
        key = _keys_at(k, indices).float()
        logit = ctx.scale * (q.float() * key).sum(-1)
        to_dot = grad * ctx.scale if factor is None else grad * ctx.scale * factor
        if ctx.softcap is not None:
            capped = torch.tanh(logit / ctx.softcap)
            logit, to_dot = ctx.softcap * capped, to_dot * (1 - capped * capped)
        grad_factor += grad * logit
        grad_q += to_dot[..., None] * key
        rows = (to_dot[..., None] * q.float()).to(k.dtype)
        grad_k += _sum_by_key(rows, indices, k.shape[2], q.shape[1] // k.shape[1])
    rest = (None, None, None, None)
    return grad_q.to(q.dtype), grad_k.to(k.dtype), None, None if factor is None else grad_factor, *rest


def _keys_at(k: Tensor, index: Tensor) -> Tensor:
    """Return the keys (B, H, Q, D) at the given indices (B, H, Q)."""
    batches = torch.arange(index.shape[0], device=k.device)[:, None, None]
    key_heads = torch.arange(index.shape[1], device=k.device) // (index.shape[1] // k.shape[1])
    return k[batches, key_heads[:, None], index.long()]


extreme_logits.register_autograd(_gradients_of_extremes, setup_context=_save_extremes)


@kernel_operator("attnorm::sum_by_key")
def _sum_by_key(rows: Tensor, index: Tensor, keys: int, groups: int) -> Tensor:
    """Sum the rows by the key at their index; deterministic, and fast if keys repeat."""
    from attnorm.kernels import extremes

    return extremes.sum_by_key(rows, index, keys, groups)


@_sum_by_key.register_fake
def _(rows: Tensor, keys: int, groups: int) -> Tensor:
    return rows.new_empty(rows.shape[0], rows.shape[1] // groups, keys, rows.shape[-1])


@kernel_operator("attnorm::scaled_rows")
def scaled_rows(
    a: Tensor, factor: Tensor | None, constant: float, keys: int | None, causal: bool, shortest: int
) -> Tensor:
    """Return each row of a times constant times its factor, (B, H, Q) in float32, rounded once to the dtype of a.

    keys: None, or the number of keys, for one more factor log(max(n, shortest)), n being the visible keys of the row.
    """
    from attnorm.kernels import linear_algebra

    return linear_algebra.scaled_rows(a, factor, constant, keys, causal, shortest)


@scaled_rows.register_fake
def _(a: Tensor) -> Tensor:
    return empty_rows(in_rows(a))


@kernel_operator("attnorm::scaled_rows_backward")
def _scaled_rows_backward(
    grad: Tensor, a: Tensor, factor: Tensor | None, grad_of_factor: bool, constant: float, keys: int | None,
    causal: bool, shortest: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the gradients of a and of its factors; the second is empty unless it is asked for."""
    from attnorm.kernels import linear_algebra

    options = factor, constant, keys, causal, shortest
    if not grad_of_factor:
        return linear_algebra.scaled_rows(grad, *options), empty_numbers(a, False)
    grad_factor = empty_numbers(a)
    return linear_algebra.scaled_rows(grad, *options, a, grad_factor), grad_factor


@_scaled_rows_backward.register_fake
def _(grad: Tensor, a: Tensor, grad_of_factor: bool) -> tuple[Tensor, Tensor]:
    return empty_rows(in_rows(grad)), empty_numbers(a, grad_of_factor)


def _save_rows(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, factor, *ctx.options = inputs
    ctx.save_for_backward(a, factor)


def _gradients_of_rows(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    learned = ctx.needs_input_grad[1]
    grad_a, grad_factor = _scaled_rows_backward(grad, *ctx.saved_tensors, learned, *ctx.options)
    return grad_a, grad_factor if learned else None, *([None] * len(ctx.options))


scaled_rows.register_autograd(_gradients_of_rows, setup_context=_save_rows)


@kernel_operator("attnorm::top_k_cutoff")
def top_k_cutoff(
    q: Tensor, k: Tensor, mask: Tensor | None, factor: Tensor | None, count: Tensor, most: int,
    softcap: float | None, causal: bool, window: int | None, scale: float,
) -> Tensor:  # fmt: skip
    from attnorm.kernels import extremes

    form = Form("softmax", softcap=softcap, causal=causal, window=window, scale=scale)
    return extremes.top_k_cutoff(q, k, mask, factor, count, most, form)


@top_k_cutoff.register_fake
def _(q: Tensor) -> Tensor:
    return empty_numbers(q)


@kernel_operator("attnorm::decode_attention")
def decode(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None, exponent: Tensor | None,
    shift: Tensor | None, common_shift: float | None, sink: Tensor | None, parameters: Tensor | None,
    common_parameter: float | None, map: str, power: int, floor: float, rule: str, softcap: float | None, causal: bool,
    window: int | None, scale: float, log2_base: float, delta: float,
) -> Tensor:  # fmt: skip
    """Return the output. common_shift and common_parameter: the same for all rows, in place of a tensor."""
    from attnorm.kernels import one_pass

    form = Form(map, power, floor, rule, softcap, causal, window, scale, log2_base, delta)
    return one_pass.decode(
        q, k, v, mask, factor, exponent, common_shift if shift is None else shift, sink,
        common_parameter if parameters is None else parameters, form,
    )  # fmt: skip


@decode.register_fake
def _(q: Tensor, v: Tensor) -> Tensor:
    return q.new_empty(*q.shape[:-1], v.shape[-1])


@kernel_operator("attnorm::one_pass_attention")
def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None, shift: Tensor | None,
    sink: Tensor | None, cutoff: Tensor | None, parameters: Tensor | None, map: str, power: int, floor: float,
    rule: str, softcap: float | None, causal: bool, window: int | None, scale: float, precise: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from attnorm.kernels import one_pass

    form = Form(map, power, floor, rule, softcap, causal, window, scale)
    output, saved = one_pass.forward(q, k, v, mask, factor, shift, sink, cutoff, parameters, form, precise=precise)
    return output, *saved


@forward.register_fake
def _(q: Tensor, v: Tensor, map: str, precise: bool) -> tuple[Tensor, Tensor, Tensor]:
    from attnorm.kernels.maps import MAPS, Reference

    output = empty_rows(q, v.shape[-1], torch.float32 if precise else q.dtype)
    scaled = MAPS[map].reference != Reference.NONE
    used = (scaled, MAPS[map].normalised and not scaled)
    return output, *(empty_numbers(q, needed) for needed in used)  # type: ignore[return-value]


@kernel_operator("attnorm::one_pass_attention_backward")
def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None, shift: Tensor | None,
    sink: Tensor | None, cutoff: Tensor | None, parameters: Tensor | None, output: Tensor, reference: Tensor,
    inverse: Tensor, grad_of_factor: bool, map: str, power: int, floor: float, rule: str, softcap: float | None,
    causal: bool, window: int | None, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients. grad_of_factor: whether to compute that of the factor; it is empty otherwise."""
    from attnorm.kernels import one_pass, one_pass_backward

    form = Form(map, power, floor, rule, softcap, causal, window, scale)
    saved = one_pass.Saved(reference, inverse)
    *grads, _ = one_pass_backward.backward(
        grad, q, k, v, mask, factor, shift, sink, cutoff, parameters, output, saved, form,
        grad_of_factor=grad_of_factor,
    )  # fmt: skip
    return tuple(grads)  # type: ignore[return-value]


@backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, shift: Tensor | None, sink: Tensor | None, grad_of_factor: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    used = (grad_of_factor, shift is not None)
    rows = [empty_numbers(q, needed) for needed in used]
    sinks = q.new_empty((q.shape[1],) if sink is not None else (0,), dtype=torch.float32)
    return empty_rows(q), empty_rows(k), empty_rows(v), *rows, sinks  # type: ignore[return-value]


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, (*options, _precise) = inputs[:9], inputs[9:]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output)
    ctx.options = options


def _gradients(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # read once: gradient checkpointing returns each of them only once
    grad_of_factor = saved[4] is not None and ctx.needs_input_grad[4]
    grad_q, grad_k, grad_v, *row_gradients = backward(grad, *saved, grad_of_factor, *ctx.options)
    used = (grad_of_factor, saved[5] is not None, saved[6] is not None)
    rows = [gradient if is_used else None for is_used, gradient in zip(used, row_gradients, strict=True)]
    return grad_q, grad_k, grad_v, None, *rows, *([None] * (len(ctx.options) + 3))  # cutoff, parameters, precise


forward.register_autograd(_gradients, setup_context=_save_for_backward)
backward.refuse_gradient()
_sum_by_key.refuse_gradient()


@kernel_operator("attnorm::softmax_gradients")
def softmax_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, reference: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v for a call to which `fused.gradients_apply`, from its output.

    reference: log2 of what each row is divided by, (B, H, Q) in float32.
    """
    q, k, v = (in_rows(t) for t in (q, k, v))
    log_sum = reference * math.log(2)
    found = sdpa_gradients(_in_layout_of(output, grad), q, k, v, output, log_sum, causal, scale)
    if found is None:
        from attnorm.kernels import one_pass, one_pass_backward

        form = Form("softmax", causal=causal, scale=scale)
        saved = one_pass.Saved(reference, reference.new_empty(0))
        found = one_pass_backward.backward(
            grad, q, k, v, None, None, None, None, None, None, output, saved, form
        )[:3]  # fmt: skip
    return tuple(_in_layout_of(t, gradient) for t, gradient in zip((q, k, v), found, strict=True))  # type: ignore[return-value]


@softmax_gradients.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(empty_rows(in_rows(t)) for t in (q, k, v))  # type: ignore[return-value]


softmax_gradients.refuse_gradient()


def sdpa_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, log_sum: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the gradients of softmax attention from its output and the logsumexp of each row, (B, H, Q).

    None if no kernel of torch's is enabled for these tensors. Only its internal operators take an output and a
    logsumexp; without dropout they do not read the random state.
    """
    params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, causal, q.shape[1] != k.shape[1])
    unread = torch.empty((), dtype=torch.int64, device=q.device)
    lengths = q.shape[2], k.shape[2]
    if torch.backends.cuda.can_use_cudnn_attention(params):
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, output, log_sum[..., None], unread, unread, None, None, None, *lengths, 0.0, causal,
            scale=scale,
        )  # fmt: skip
        return found
    if torch.backends.cuda.can_use_flash_attention(params):
        found = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, output, log_sum, None, None, *lengths, 0.0, causal, unread, unread, scale=scale
        )
        return found
    return None


def _in_layout_of(t: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient with the strides of `empty_rows(t)`; a copy only if it has others."""
    if t.stride(1) < t.stride(2):
        return gradient.transpose(1, 2).contiguous().transpose(1, 2)
    return gradient.contiguous()


@kernel_operator("attnorm::row_entropy")
def row_entropy(
    q: Tensor, k: Tensor, mask: Tensor | None, factor: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Entropy in nats of softmax over each row, and log2 of its denominator; 0 for rows that see nothing."""
    from attnorm.kernels import row_spread

    return row_spread.entropy_of_rows(q, k, mask, factor, causal, scale)


@row_entropy.register_fake
def _(q: Tensor) -> tuple[Tensor, Tensor]:
    return empty_numbers(q), empty_numbers(q)


@kernel_operator("attnorm::sharpened_attention")
def sharpened_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor, cutoff: Tensor | None,
    soft_factor: Tensor | None, entropy: Tensor, soft_reference: Tensor, slope: Tensor, causal: bool,
    window: int | None, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output, and log2 of each row's denominator.

    entropy, soft_reference: `row_entropy` with the factor soft_factor; slope: the derivative of factor by the entropy.
    """
    from attnorm.kernels import one_pass

    form = Form("softmax", causal=causal, window=window, scale=scale)
    output, saved = one_pass.forward(q, k, v, mask, factor, None, None, cutoff, None, form)
    return output, saved.reference


@sharpened_attention.register_fake
def _(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return empty_rows(q, v.shape[-1]), empty_numbers(q)


@kernel_operator("attnorm::sharpened_attention_backward")
def _sharpened_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor, cutoff: Tensor | None,
    soft_factor: Tensor | None, entropy: Tensor, soft_reference: Tensor, slope: Tensor, output: Tensor,
    reference: Tensor, causal: bool, window: int | None, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from attnorm.kernels.one_pass import Saved
    from attnorm.kernels.one_pass_backward import RowEntropy, backward

    form = Form("softmax", causal=causal, window=window, scale=scale)
    saved = Saved(reference, reference.new_empty(0))
    sharpened = RowEntropy(soft_factor, entropy, soft_reference, slope)
    grad_q, grad_k, grad_v, grad_factor, _, _, grad_soft = backward(
        grad, q, k, v, mask, factor, None, None, cutoff, None, output, saved, form, sharpened
    )
    return grad_q, grad_k, grad_v, grad_factor, grad_soft


@_sharpened_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, soft_factor: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return empty_rows(q), empty_rows(k), empty_rows(v), empty_numbers(q), empty_numbers(q, soft_factor is not None)


def _save_sharpened(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:10], *output)
    ctx.options = inputs[10:]


def _gradients_of_sharpened(ctx: Any, grad: Tensor, _reference: None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # read once: gradient checkpointing returns each of them only once
    grad_q, grad_k, grad_v, grad_factor, grad_soft = _sharpened_backward(grad, *saved, *ctx.options)
    soft_factor = saved[6]
    rows = (grad_factor, None, None if soft_factor is None else grad_soft)
    return grad_q, grad_k, grad_v, None, *rows, *([None] * 6)


sharpened_attention.register_autograd(_gradients_of_sharpened, setup_context=_save_sharpened)
_sharpened_backward.refuse_gradient()

EQUAL_LOGITS = 1e-6  # deviation over mean up to which the logits of a row differ by rounding only: no gradient


@kernel_operator("attnorm::row_variance")
def row_variance(
    q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Variance and mean of the visible logits, 0 for rows that see nothing, and their number. Only the first has a
    gradient."""
    from attnorm.kernels import row_spread

    return row_spread.variance_of_rows(q, k, mask, causal, scale)


@row_variance.register_fake
def _(q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return empty_numbers(q), empty_numbers(q), empty_numbers(q)


@kernel_operator("attnorm::row_variance_backward")
def _variance_backward(
    slope: Tensor, q: Tensor, k: Tensor, mask: Tensor | None, mean: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    from attnorm.kernels import row_spread

    return row_spread.variance_gradients(slope, q, k, mask, mean, causal, scale)


@_variance_backward.register_fake
def _(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _save_variance(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.options = inputs[3:]


def _gradients_of_variance(ctx: Any, grad: Tensor | None, _mean: None, _count: None) -> tuple[Tensor | None, ...]:
    q, k, mask, variance, mean, count = ctx.saved_tensors
    if grad is None:
        return (None,) * 5
    differ = variance > (EQUAL_LOGITS * mean).square()
    slope = torch.where(differ, 2 * grad / count.clamp(min=1), 0.0)
    grad_q, grad_k = _variance_backward(slope, q, k, mask, mean, *ctx.options)
    return grad_q, grad_k, None, None, None


row_variance.register_autograd(_gradients_of_variance, setup_context=_save_variance)
_variance_backward.refuse_gradient()
