"""Launch the entmax kernels: tensors in, tensors out."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from attnorm.kernels import entmax
from attnorm.kernels.launch import Launch, in_rows, padded

MOST_STEPS = 100  # rows built against Newton need 24, ordinary ones three


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None, causal: bool, scale: float,
    alpha: float, trains: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Output; where it trains, the mean of the values under u and, (B, H, Q, 2), peaks and thresholds; else nothing.

    mask: boolean (B, H, Q, K) or None; factor: (B, H, Q) in float32 or None; causal: bottom-right; alpha: 1.5 or 2.
    """
    call = _EntmaxLaunch.of(q, k, v, mask, factor, causal, scale, alpha)
    batch, heads, queries = q.shape[:3]
    output = q.new_empty(batch, heads, queries, v.shape[-1])
    mean_u = torch.empty_like(output if trains else output[:0], dtype=torch.float32)
    threshold = torch.empty((*mean_u.shape[:-1], 2), dtype=torch.float32, device=q.device)
    rows, columns, warps, stages = _forward_tile(q, v)
    with call.device:
        entmax.forward[(triton.cdiv(queries, rows) * batch * heads,)](
            *call.tensors, output, mean_u, threshold, *call.strides, *output.stride()[:3],
            *call.sizes, _tolerance(q.dtype),
            **call.constants, TRAINS=trains, ROWS=rows, COLUMNS=columns, MOST=MOST_STEPS,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return output, mean_u, threshold


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None, mean_u: Tensor,
    threshold: Tensor, causal: bool, scale: float, alpha: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k, v and factor; the last one is empty where there is none."""
    call = _EntmaxLaunch.of(q, k, v, mask, factor, causal, scale, alpha)
    grad, threshold = grad.contiguous(), threshold.contiguous()
    delta = (grad.float() * mean_u).sum(-1).contiguous()
    grad_q, grad_k, grad_v = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    grad_factor = call.rows(factor is not None)
    given = (*call.tensors, grad, threshold, delta)
    strides = (*call.strides, *grad.stride()[:3])
    rows, columns, warps, stages = _backward_tile(q, v)
    options = {**call.constants, "num_warps": warps, "num_stages": stages}
    with call.device:
        entmax.backward_queries[(triton.cdiv(q.shape[-2], rows) * q.shape[0] * q.shape[1],)](
            *given, grad_q, grad_factor, *strides, *grad_q.stride()[:3], *call.sizes, scale,
            **options, ROWS=rows, COLUMNS=columns,
        )  # fmt: skip
        entmax.backward_keys[(triton.cdiv(k.shape[-2], rows) * k.shape[0] * k.shape[1],)](
            *given, grad_k, grad_v, *strides, *grad_k.stride()[:3], *grad_v.stride()[:3], *call.sizes, scale,
            **options, ROWS=columns, COLUMNS=rows,
        )  # fmt: skip
    return grad_q, grad_k, grad_v, grad_factor


@dataclass(frozen=True)
class _EntmaxLaunch(Launch):
    scale: float
    alpha: float

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None, causal: bool, scale: float,
        alpha: float,
    ) -> "_EntmaxLaunch":  # fmt: skip
        factor = None if factor is None else factor.contiguous()
        return cls(in_rows(q), in_rows(k), in_rows(v), mask, factor, causal, scale, alpha)

    @property
    def sizes(self) -> tuple[int | float, ...]:
        return (*self.lengths, self.q.shape[-1], self.v.shape[-1], self.scale * (self.alpha - 1))

    @property
    def constants(self) -> dict[str, object]:
        return {**self.shared_constants, "SQUARED": self.alpha == 1.5}


def _tolerance(dtype: torch.dtype) -> float:
    """Of the sum of a row before the last step."""
    return 1e-4 if dtype == torch.float32 else 1e-2


def _forward_tile(q: Tensor, v: Tensor) -> tuple[int, int, int, int]:
    """Rows, columns, warps, stages."""
    width = max(padded(q), padded(v))
    if q.dtype == torch.float32:
        return (64, 32, 4, 2) if width <= 64 else (32, 32, 4, 2)
    return (64, 64, 4, 2) if width <= 64 else (64, 32, 4, 2)


def _backward_tile(q: Tensor, v: Tensor) -> tuple[int, int, int, int]:
    width = max(padded(q), padded(v))
    if q.dtype == torch.float32:
        return (32, 32, 4, 2)
    return (64, 64, 4, 4) if width <= 64 else (64, 64, 4, 2) if width <= 128 else (32, 32, 4, 2)
