"""The engine for threshold maps (entmax, sparsemax, kneemax) on Triton kernels, forward and backward, memory O(K).

`sparse` prepares the call; kernels/threshold.py launches the kernels. They are operators of torch.library, so
that torch.compile can include them in a graph.
"""

from typing import Any

import torch
from torch import Tensor

from attnorm.engines.execution import MIN_QUERIES, kernel_operator, runs_kernels
from attnorm.engines.inputs import Inputs, head_numbers, row_factors, under_transform
from attnorm.kernels.launch import empty_numbers, empty_rows
from attnorm.normalizers.alibi import LinearBias
from attnorm.normalizers.asentmax import AdaptiveLengthScale
from attnorm.normalizers.contract import Normalizer, ScaleRule, ThresholdForm


def applies(inputs: Inputs, normalizer: Normalizer) -> bool:
    """Whether the kernels compute this call exactly."""
    if normalizer.map.threshold_form() is None or normalizer.selections or normalizer.sink is not None:
        return False
    if not inputs.plain_logits or inputs.dropout > 0:
        return False
    scales = all(isinstance(rule, ScaleRule) for rule in normalizer.rules)
    if not scales and _distance_rule(inputs, normalizer) is None:
        return False
    return inputs.queries >= MIN_QUERIES and runs_kernels(inputs.q_BHQD, inputs.v_BGKE) and not under_transform()


def _distance_rule(inputs: Inputs, normalizer: Normalizer) -> LinearBias | None:
    """Return the rule of the normalizer if it is the only one and a linear penalty on the distance; else None.

    The kernels count positions themselves, so given positions are not supported.
    """
    if len(normalizer.rules) != 1 or inputs.positions is not None or inputs.scale == 0:
        return None
    (rule,) = normalizer.rules
    return rule if isinstance(rule, LinearBias) else None


def sparse(inputs: Inputs, normalizer: Normalizer) -> Tensor:
    """Return the output (B, H, Q, E) of a normalizer for which `applies` is true."""
    form = normalizer.map.threshold_form()
    assert form is not None
    q, k, v = inputs.q_BHQD, inputs.k_BGKD, inputs.v_BGKE
    penalties = None
    if (rule := _distance_rule(inputs, normalizer)) is not None:
        penalties = head_numbers(rule.slopes, inputs) / inputs.scale
    factor, parameter, trains = row_numbers(inputs, normalizer, form)
    output: Tensor = _forward(
        q, k, v, inputs.full_mask, factor, parameter, penalties, inputs.causal, inputs.scale, form.map, trains
    )[0]
    return output


def row_numbers(
    inputs: Inputs, normalizer: Normalizer, form: ThresholdForm
) -> tuple[Tensor | None, Tensor | None, bool]:
    """Return the factor of the scale rules and the parameter of each row, (B, H, Q), and whether anything is trained.

    The factor stays in float32, so q is not rounded a second time.
    """
    q, k, v = inputs.q_BHQD, inputs.k_BGKD, inputs.v_BGKE
    factor = _length_factors(inputs, normalizer)
    if factor is None and (factor := row_factors(inputs, normalizer)) is not None:
        factor = factor[..., 0].contiguous()
    parameter = None
    if form.parameter is not None:
        rows = (*q.shape[:3], 1)
        parameter = form.parameter(inputs.n().float().expand(rows)).expand(rows)[..., 0]
    trained = (q, k, v, factor, parameter)
    trains = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in trained)
    return factor, parameter, trains


def _length_factors(inputs: Inputs, normalizer: Normalizer) -> Tensor | None:
    """Return asentmax's factors (B, H, Q) from one kernel, where n is known without a mask; else None.

    Compiled code fuses the operations of torch itself.
    """
    q, rules = inputs.q_BHQD, normalizer.rules
    if len(rules) != 1 or not isinstance(rule := rules[0], AdaptiveLengthScale) or rule.from_hidden is not None:
        return None
    b, c = rule.raw_beta, rule.raw_gamma
    one_per_head = b.shape == c.shape and b.shape in ((), q.shape[1:2]) and b.device == c.device == q.device
    if inputs.mask is not None or inputs.positions is not None or not one_per_head or torch.compiler.is_compiling():
        return None
    factors: Tensor = _length_powers(b, c, rule.delta, list(q.shape[:3]), inputs.keys, inputs.causal)
    return factors


@kernel_operator("attnorm::length_powers")
def _length_powers(b: Tensor, c: Tensor, delta: float, rows: list[int], keys: int, causal: bool) -> Tensor:
    from attnorm.kernels import linear_algebra  # loads Triton

    return linear_algebra.length_powers(b.contiguous(), c.contiguous(), delta, rows, keys, causal)


@_length_powers.register_fake
def _(b: Tensor, rows: list[int]) -> Tensor:
    return torch.empty(rows, dtype=torch.float32, device=b.device)


@kernel_operator("attnorm::length_powers_backward")
def _length_powers_backward(grad: Tensor, b: Tensor, c: Tensor, keys: int, causal: bool) -> tuple[Tensor, Tensor]:
    from attnorm.kernels import linear_algebra

    return linear_algebra.length_powers_backward(grad, b.contiguous(), c.contiguous(), keys, causal)


@_length_powers_backward.register_fake
def _(b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(b), torch.empty_like(c)


def _save_powers(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    b, c, _delta, _rows, *ctx.options = inputs
    ctx.save_for_backward(b, c)


def _gradients_of_powers(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *_length_powers_backward(grad, *ctx.saved_tensors, *ctx.options), None, None, None, None


@kernel_operator("attnorm::sparse_attention")
def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None, parameter: Tensor | None,
    penalties: Tensor | None, causal: bool, scale: float, map: str, trains: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from attnorm.kernels import threshold  # loads Triton

    output, saved = threshold.forward(q, k, v, mask, factor, parameter, penalties, causal, scale, map, trains)
    return output, *saved


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, trains: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from attnorm.kernels.threshold import saved_shapes

    threshold, live = saved_shapes(q, k, v, trains)
    mean_u = empty_rows(q, v.shape[-1]) if trains else q.new_empty(0)
    saved = q.new_empty(threshold, dtype=torch.float32), q.new_empty(live, dtype=torch.uint8)
    return empty_rows(q, v.shape[-1]), mean_u, *saved


@kernel_operator("attnorm::sparse_attention_backward")
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None,
    parameter: Tensor | None, penalties: Tensor | None, mean_u: Tensor, threshold: Tensor, live: Tensor, causal: bool,
    scale: float, map: str, learned: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from attnorm.kernels.threshold import Saved
    from attnorm.kernels.threshold_backward import backward

    saved = Saved(mean_u, threshold, live)
    return backward(grad, q, k, v, mask, factor, parameter, penalties, saved, causal, scale, map, learned)


@_backward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, factor: Tensor | None, learned: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    rows = empty_numbers(q, factor is not None), empty_numbers(q, learned)
    return empty_rows(q), empty_rows(k), empty_rows(v), *rows


def save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, causal, scale, map, ctx.trains = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output[1:])
    factor, parameter, _tilts = tensors[4:]
    ctx.learned = map == "entmax" and parameter.requires_grad
    ctx.options = causal, scale, map, ctx.learned
    ctx.factored = factor is not None


def gradients(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    if not ctx.trains:
        raise RuntimeError(
            "expected sparse attention that was traced with gradients, got one that was traced without gradients. "
            "Trace it with gradients enabled."
        )
    grad_q, grad_k, grad_v, grad_factor, grad_parameter = _backward(grad, *ctx.saved_tensors, *ctx.options)
    rows = grad_factor if ctx.factored else None, grad_parameter if ctx.learned else None
    return grad_q, grad_k, grad_v, None, *rows, None, None, None, None, None


_length_powers.register_autograd(_gradients_of_powers, setup_context=_save_powers)
_length_powers_backward.refuse_gradient()
_forward.register_autograd(gradients, setup_context=save_for_backward)
_backward.refuse_gradient()
