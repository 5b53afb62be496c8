"""The engine for stick-breaking attention on Triton kernels, forward and backward, memory O(K).

The kernels read the keys from the last to the first. They are operators of torch.library, so that torch.compile can
include them in a graph.
"""

from typing import Any

import torch
from torch import Tensor

from attnorm.engines.execution import MIN_QUERIES, kernel_operator, runs_kernels
from attnorm.engines.inputs import Inputs, row_factors, under_transform
from attnorm.kernels.launch import empty_numbers, empty_rows
from attnorm.normalizers.contract import Normalizer, ScaleRule
from attnorm.normalizers.stick_breaking import StickBreaking


def applies(inputs: Inputs, normalizer: Normalizer) -> bool:
    """Whether the kernels compute this call exactly."""
    if type(normalizer.map) is not StickBreaking or not all(isinstance(r, ScaleRule) for r in normalizer.rules):
        return False
    if not inputs.plain_logits or inputs.dropout > 0 or inputs.queries < MIN_QUERIES:
        return False
    if inputs.positions is not None and not normalizer.map.attend_current:
        return False
    return has_windows(inputs, normalizer) and runs_kernels(inputs.q_BHQD, inputs.v_BGKE) and not under_transform()


def has_windows(inputs: Inputs, normalizer: Normalizer) -> bool:
    """Whether all selections are sliding windows of a causal call."""
    windows = [selection.kernel_window for selection in normalizer.selections]
    return not windows or (None not in windows and inputs.causal and inputs.positions is None)


def stick_breaking(inputs: Inputs, normalizer: Normalizer) -> Tensor:
    """Return the output (B, H, Q, E) of a normalizer for which `applies` is true."""
    assert isinstance(normalizer.map, StickBreaking)
    factor = row_factors(inputs, normalizer)
    windows = [selection.kernel_window for selection in normalizer.selections if selection.kernel_window is not None]
    trains = inputs.needs_grad or (factor is not None and factor.requires_grad)
    output: Tensor = _forward(
        inputs.q_BHQD, inputs.k_BGKD, inputs.v_BGKE, inputs.full_mask, None if factor is None else factor[..., 0],
        not normalizer.map.attend_current, inputs.causal, min(windows, default=None), inputs.scale, trains,
    )[0]  # fmt: skip
    return output


@kernel_operator("attnorm::stick_breaking_attention")
def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None, rest: bool, causal: bool,
    window: int | None, scale: float, trains: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from attnorm.kernels.stick_breaking import Stick, forward  # loads Triton

    return forward(q, k, v, mask, factor, Stick(rest, causal, window, scale), trains)


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, rest: bool, trains: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from attnorm.kernels.stick_breaking import kept_shapes

    later, live = kept_shapes(q, k, v, trains)
    kept = q.new_empty(later, dtype=torch.float32), q.new_empty(live, dtype=torch.int32)
    return empty_rows(q, v.shape[-1]), empty_numbers(q, rest), *kept


@kernel_operator("attnorm::stick_breaking_attention_backward")
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None, spent: Tensor,
    later: Tensor, live: Tensor, rest: bool, causal: bool, window: int | None, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from attnorm.kernels.stick_breaking import Stick
    from attnorm.kernels.stick_breaking_backward import backward

    return backward(grad, q, k, v, mask, factor, spent, later, live, Stick(rest, causal, window, scale))


@_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return empty_rows(q), empty_rows(k), empty_rows(v), empty_numbers(q, factor is not None)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, rest, causal, window, scale, _trains = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.options = rest, causal, window, scale


def _gradients(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # read once: gradient checkpointing returns each of them only once
    *grads, grad_factor = _backward(grad, *saved, *ctx.options)
    return *grads, None, None if saved[4] is None else grad_factor, None, None, None, None, None


_forward.register_autograd(_gradients, setup_context=_save_for_backward)
_backward.refuse_gradient()
