"""entmax15 and sparsemax on a GPU: Triton kernels, forward and backward, memory O(K).

Operators of torch.library, so that compiled code contains them as they are.
"""

from typing import Any, Never

import torch
from torch import Tensor

from attnorm.engines.inputs import Inputs, row_factors, transformed
from attnorm.engines.triton_support import FEWEST_QUERIES, runs_kernels
from attnorm.normalizers.contract import Normalizer, ScaleRule
from attnorm.normalizers.entmax import Entmax

ALPHAS = (1.5, 2.0)


def applies(inputs: Inputs, normalizer: Normalizer) -> bool:
    """Whether this call can run on the kernels with the same result."""
    map_ = normalizer.map
    if not isinstance(map_, Entmax) or map_.theta is not None or map_.alpha not in ALPHAS:
        return False
    if normalizer.selections or normalizer.sink is not None or not inputs.plain_logits or inputs.dropout > 0:
        return False
    if not all(isinstance(rule, ScaleRule) for rule in normalizer.rules):
        return False
    return inputs.queries >= FEWEST_QUERIES and runs_kernels(inputs.q_BHQD, inputs.v_BGKE) and not transformed()


def sparse(inputs: Inputs, normalizer: Normalizer) -> Tensor:
    """Output (B, H, Q, E) of a normalizer for which `applies` is true."""
    q, k, v, map_ = inputs.q_BHQD, inputs.k_BGKD, inputs.v_BGKE, normalizer.map
    assert isinstance(map_, Entmax)
    factor = row_factors(inputs, normalizer)  # stays in float32: q is not rounded a second time
    if factor is not None:
        factor = factor[..., 0].contiguous()
    mask = None if inputs.mask is None else inputs.mask.expand(inputs.weights_shape)
    trains = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (q, k, v, factor))
    output: Tensor = _forward(q, k, v, mask, factor, inputs.causal, inputs.scale, map_.alpha, trains)[0]
    return output


@torch.library.custom_op("attnorm::sparse_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None, causal: bool, scale: float,
    alpha: float, trains: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from attnorm.kernels import entmax_attention  # loads Triton

    return entmax_attention.forward(q, k, v, mask, factor, causal, scale, alpha, trains)


@_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None, causal: bool, scale: float,
    alpha: float, trains: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    output = q.new_empty(*q.shape[:-1], v.shape[-1])
    mean_u = torch.empty_like(output if trains else output[:0], dtype=torch.float32)
    return output, mean_u, mean_u.new_empty((*mean_u.shape[:-1], 2))


@torch.library.custom_op("attnorm::sparse_attention_backward", mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None, mean_u: Tensor,
    threshold: Tensor, causal: bool, scale: float, alpha: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from attnorm.kernels import entmax_attention

    return entmax_attention.backward(grad, q, k, v, mask, factor, mean_u, threshold, causal, scale, alpha)


@_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None, mean_u: Tensor,
    threshold: Tensor, causal: bool, scale: float, alpha: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    rows = q.new_empty(q.shape[:3] if factor is not None else (0,), dtype=torch.float32)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), rows


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, causal, scale, alpha, ctx.trains = inputs
    _, mean_u, threshold = output
    ctx.save_for_backward(*tensors, mean_u, threshold)
    ctx.options = causal, scale, alpha
    ctx.factored = tensors[-1] is not None


def _gradients(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    if not ctx.trains:
        raise RuntimeError("this entmax attention was traced without gradients; trace it where they are enabled")
    grad_q, grad_k, grad_v, grad_factor = _backward(grad, *ctx.saved_tensors, *ctx.options)
    return grad_q, grad_k, grad_v, None, grad_factor if ctx.factored else None, None, None, None, None


def _second_gradients(*_: Any) -> Never:
    raise RuntimeError("the kernels of entmax are differentiated once only; use engine='blocked'")


_forward.register_autograd(_gradients, setup_context=_keep)
_backward.register_autograd(_second_gradients)
