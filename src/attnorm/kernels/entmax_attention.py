"""The kernels of entmax, launched: tensors in, tensors out."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from attnorm.kernels import entmax

MOST_STEPS = 100  # rows built against Newton need 24, ordinary ones three


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, alpha: float, trains: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Output; where it trains, the mean of the values under u and, (B, H, Q, 2), peaks and thresholds; else nothing.

    mask: boolean (B, H, Q, L) or None; causal: bottom-right; alpha: 1.5 or 2.
    """
    q, k, v = _in_rows(q, k, v)
    call = _Call(q, k, v, mask, causal, scale, alpha)
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
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, mean_u: Tensor, threshold: Tensor,
    causal: bool, scale: float, alpha: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k and v."""
    q, k, v = _in_rows(q, k, v)
    call = _Call(q, k, v, mask, causal, scale, alpha)
    grad, threshold = grad.contiguous(), threshold.contiguous()
    delta = (grad.float() * mean_u).sum(-1).contiguous()
    grad_q, grad_k, grad_v = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    given = (*call.tensors, grad, threshold, delta)
    strides = (*call.strides, *grad.stride()[:3])
    rows, columns, warps, stages = _backward_tile(q, v)
    options = {**call.constants, "num_warps": warps, "num_stages": stages}
    with call.device:
        entmax.backward_queries[(triton.cdiv(q.shape[-2], rows) * q.shape[0] * q.shape[1],)](
            *given, grad_q, *strides, *grad_q.stride()[:3], *call.sizes, scale,
            **options, ROWS=rows, COLUMNS=columns,
        )  # fmt: skip
        entmax.backward_keys[(triton.cdiv(k.shape[-2], rows) * k.shape[0] * k.shape[1],)](
            *given, grad_k, grad_v, *strides, *grad_k.stride()[:3], *grad_v.stride()[:3], *call.sizes, scale,
            **options, ROWS=columns, COLUMNS=rows,
        )  # fmt: skip
    return grad_q, grad_k, grad_v


@dataclass(frozen=True)
class _Call:
    """What all kernels of a call are given."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    causal: bool
    scale: float
    alpha: float

    @property
    def device(self) -> AbstractContextManager[object]:
        """Triton launches on the current device, which need not be the tensors'."""
        return torch.cuda.device(self.q.device) if self.q.is_cuda else nullcontext()

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mask = self.q if self.mask is None else self.mask.view(torch.uint8)  # never read where there is none
        return self.q, self.k, self.v, mask

    @property
    def strides(self) -> tuple[int, ...]:
        mask = (0, 0, 0, 0) if self.mask is None else self.mask.stride()
        return (*self.q.stride()[:3], *self.k.stride()[:3], *self.v.stride()[:3], *mask)

    @property
    def sizes(self) -> tuple[int | float, ...]:
        heads, queries, keys = self.q.shape[1], self.q.shape[2], self.k.shape[2]
        groups, factor = heads // self.k.shape[1], self.scale * (self.alpha - 1)
        return heads, groups, queries, keys, keys - queries, self.q.shape[-1], self.v.shape[-1], factor

    @property
    def constants(self) -> dict[str, object]:
        exact = torch.backends.cuda.matmul.fp32_precision != "tf32"
        return {
            "CAUSAL": self.causal,
            "MASKED": self.mask is not None,
            "SQUARED": self.alpha == 1.5,
            "PRECISION": "tf32x3" if exact else "tf32",  # of float32; exact products would take minutes to compile
            "WIDTH": _padded(self.q),
            "V_WIDTH": _padded(self.v),
        }


def _in_rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The kernels take the elements of a row to lie side by side. (What was saved may come back with other strides.)"""
    return tuple(t if t.stride(-1) == 1 else t.contiguous() for t in tensors)


def _padded(t: Tensor) -> int:
    return max(16, int(triton.next_power_of_2(t.shape[-1])))


def _tolerance(dtype: torch.dtype) -> float:
    """Of the sum of a row before the last step."""
    return 1e-4 if dtype == torch.float32 else 1e-2


def _forward_tile(q: Tensor, v: Tensor) -> tuple[int, int, int, int]:
    """Rows, columns, warps, stages."""
    width = max(_padded(q), _padded(v))
    if q.dtype == torch.float32:
        return (64, 32, 4, 2) if width <= 64 else (32, 32, 4, 2)
    return (64, 64, 4, 2) if width <= 64 else (64, 32, 4, 2)


def _backward_tile(q: Tensor, v: Tensor) -> tuple[int, int, int, int]:
    width = max(_padded(q), _padded(v))
    if q.dtype == torch.float32:
        return (32, 32, 4, 2)
    return (64, 64, 4, 4) if width <= 64 else (64, 64, 4, 2) if width <= 128 else (32, 32, 4, 2)
