"""The one-pass kernels as operators of torch.library, so that compiled code contains them as they are."""

from typing import TYPE_CHECKING, Any, Never

import torch
from torch import Tensor

if TYPE_CHECKING:
    from attnorm.kernels.one_pass_attention import Form


def _form(
    map: str, power: int, floor: float, rule: str, parameter: float, softcap: float | None, causal: bool,
    window: int | None, scale: float,
) -> "Form":  # fmt: skip
    from attnorm.kernels.one_pass_attention import Form  # loads Triton

    return Form(
        map=map, power=power, floor=floor, rule=rule, parameter=parameter, softcap=softcap, causal=causal,
        window=window, scale=scale,
    )  # fmt: skip


@torch.library.custom_op("attnorm::extreme_keys", mutates_args=())
def extreme_keys(
    q: Tensor, k: Tensor, mask: Tensor | None, factor: Tensor | None, softcap: float | None, causal: bool,
    window: int | None, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from attnorm.kernels import one_pass_attention

    form = _form("softmax", 1, 0.0, "none", 0.0, softcap, causal, window, scale)
    return one_pass_attention.extreme_keys(q, k, mask, factor, form)


@extreme_keys.register_fake
def _(
    q: Tensor, k: Tensor, mask: Tensor | None, factor: Tensor | None, softcap: float | None, causal: bool,
    window: int | None, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape[:3], dtype=torch.int32), q.new_empty(q.shape[:3], dtype=torch.int32)


@torch.library.custom_op("attnorm::keys_at", mutates_args=())
def keys_at(k: Tensor, index: Tensor) -> Tensor:
    """The keys at an index (B, H, Q): (B, H, Q, D). Its backward is deterministic and fast for repeated keys."""
    batches = torch.arange(index.shape[0], device=k.device)[:, None, None]
    key_heads = torch.arange(index.shape[1], device=k.device) // (index.shape[1] // k.shape[1])
    return k[batches, key_heads[:, None], index.long()]


@keys_at.register_fake
def _(k: Tensor, index: Tensor) -> Tensor:
    return k.new_empty(*index.shape, k.shape[-1])


@torch.library.custom_op("attnorm::sum_by_key", mutates_args=())
def _sum_by_key(rows: Tensor, index: Tensor, keys: int, groups: int) -> Tensor:
    from attnorm.kernels import one_pass_attention

    return one_pass_attention.sum_by_key(rows, index, keys, groups)


@_sum_by_key.register_fake
def _(rows: Tensor, index: Tensor, keys: int, groups: int) -> Tensor:
    return rows.new_empty(rows.shape[0], rows.shape[1] // groups, keys, rows.shape[-1])


def _keep_index(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    k, index = inputs
    ctx.save_for_backward(index)
    ctx.sizes = k.shape[2], index.shape[1] // k.shape[1]


def _gradient_by_key(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return _sum_by_key(grad, *ctx.saved_tensors, *ctx.sizes), None


keys_at.register_autograd(_gradient_by_key, setup_context=_keep_index)


@torch.library.custom_op("attnorm::least_of_top", mutates_args=())
def least_of_top(
    q: Tensor, k: Tensor, mask: Tensor | None, factor: Tensor | None, count: Tensor, softcap: float | None,
    causal: bool, window: int | None, scale: float,
) -> Tensor:  # fmt: skip
    from attnorm.kernels import one_pass_attention

    form = _form("softmax", 1, 0.0, "none", 0.0, softcap, causal, window, scale)
    return one_pass_attention.least_of_top(q, k, mask, factor, count, form)


@least_of_top.register_fake
def _(
    q: Tensor, k: Tensor, mask: Tensor | None, factor: Tensor | None, count: Tensor, softcap: float | None,
    causal: bool, window: int | None, scale: float,
) -> Tensor:  # fmt: skip
    return q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("attnorm::decode_attention", mutates_args=())
def decode(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None, shift: Tensor | None,
    sink: Tensor | None, map: str, power: int, floor: float, rule: str, parameter: float, softcap: float | None,
    causal: bool, window: int | None, scale: float, precise: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from attnorm.kernels import decode_attention

    form = _form(map, power, floor, rule, parameter, softcap, causal, window, scale)
    return decode_attention.forward(q, k, v, mask, factor, shift, sink, form, precise=precise)


@decode.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None, shift: Tensor | None,
    sink: Tensor | None, map: str, power: int, floor: float, rule: str, parameter: float, softcap: float | None,
    causal: bool, window: int | None, scale: float, precise: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from attnorm.kernels.maps import MAPS, Reference

    output = q.new_empty(*q.shape[:-1], v.shape[-1], dtype=torch.float32 if precise else q.dtype)
    scaled = MAPS[map].reference != Reference.NONE
    return output, q.new_empty(q.shape[:3] if scaled else (0,), dtype=torch.float32)


@torch.library.custom_op("attnorm::one_pass_attention", mutates_args=())
def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None, shift: Tensor | None,
    sink: Tensor | None, least: Tensor | None, map: str, power: int, floor: float, rule: str, parameter: float,
    softcap: float | None, causal: bool, window: int | None, scale: float, precise: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from attnorm.kernels import one_pass_attention

    form = _form(map, power, floor, rule, parameter, softcap, causal, window, scale)
    output, saved = one_pass_attention.forward(q, k, v, mask, factor, shift, sink, least, form, precise=precise)
    return output, *saved


@forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None, shift: Tensor | None,
    sink: Tensor | None, least: Tensor | None, map: str, power: int, floor: float, rule: str, parameter: float,
    softcap: float | None, causal: bool, window: int | None, scale: float, precise: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from attnorm.kernels.maps import MAPS, Reference

    output = q.new_empty(*q.shape[:-1], v.shape[-1], dtype=torch.float32 if precise else q.dtype)
    scaled = MAPS[map].reference != Reference.NONE
    used = (scaled, MAPS[map].normalised and not scaled)
    return output, *(q.new_empty(q.shape[:3] if one else (0,), dtype=torch.float32) for one in used)  # type: ignore[return-value]


@torch.library.custom_op("attnorm::one_pass_attention_backward", mutates_args=())
def _backward(
    grad: Tensor, grad_reference: Tensor | None, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None,
    factor: Tensor | None, shift: Tensor | None, sink: Tensor | None, least: Tensor | None, output: Tensor,
    reference: Tensor, inverse: Tensor, map: str, power: int, floor: float, rule: str, parameter: float,
    softcap: float | None, causal: bool, window: int | None, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from attnorm.kernels import one_pass_attention

    form = _form(map, power, floor, rule, parameter, softcap, causal, window, scale)
    saved = one_pass_attention.Saved(reference, inverse)
    return one_pass_attention.backward(
        grad, grad_reference, q, k, v, mask, factor, shift, sink, least, output, saved, form
    )


@_backward.register_fake
def _(
    grad: Tensor, grad_reference: Tensor | None, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None,
    factor: Tensor | None, shift: Tensor | None, sink: Tensor | None, least: Tensor | None, output: Tensor,
    reference: Tensor, inverse: Tensor, map: str, power: int, floor: float, rule: str, parameter: float,
    softcap: float | None, causal: bool, window: int | None, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    rows = [q.new_empty(q.shape[:3] if t is not None else (0,), dtype=torch.float32) for t in (factor, shift)]
    sinks = q.new_empty((q.shape[1],) if sink is not None else (0,), dtype=torch.float32)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), *rows, sinks  # type: ignore[return-value]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, mask, factor, shift, sink, least, *options, _precise = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, mask, factor, shift, sink, least, *output)
    ctx.options = options


def _gradients(
    ctx: Any, grad: Tensor | None, grad_reference: Tensor | None, grad_inverse: Tensor | None
) -> tuple[Tensor | None, ...]:
    if grad_inverse is not None:
        raise RuntimeError("the denominator of this map carries no gradient; use engine='blocked'")
    q, k, v, mask, factor, shift, sink, least, output, reference, inverse = ctx.saved_tensors
    if grad is None:
        grad = torch.zeros_like(output)
    grad_q, grad_k, grad_v, *found = _backward(
        grad, grad_reference, q, k, v, mask, factor, shift, sink, least, output, reference, inverse, *ctx.options
    )
    rows = [None if given is None else one for given, one in zip((factor, shift, sink), found, strict=True)]
    return grad_q, grad_k, grad_v, None, *rows, *([None] * (len(ctx.options) + 2))


def _second_gradients(*_: Any) -> Never:
    raise RuntimeError("the one-pass kernels are differentiated once only; use engine='blocked'")


forward.register_autograd(_gradients, setup_context=_keep)
_backward.register_autograd(_second_gradients)
_sum_by_key.register_autograd(_second_gradients)
