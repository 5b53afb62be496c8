"""Launch the stick-breaking kernels: shapes, strides, tiles, chunks of queries in backward."""

from dataclasses import dataclass
from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnorm.kernels import stick_breaking, stick_breaking_backward
from attnorm.kernels.launch import Launch, in_rows, padded

_LOG2E = 1.4426950408889634
MAX_CARRIED = 2**24  # numbers between the tiles of a chunk, two arrays of them in float32
NOTHING_LEFT = 1024.0  # bits, for the tiles that a block of queries does not reach


@dataclass(frozen=True)
class Stick:
    """Settings of a stick-breaking call besides its tensors."""

    rest: bool  # the query's own key receives what is left
    causal: bool
    window: int | None
    scale: float


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None, stick: Stick
) -> tuple[Tensor, Tensor]:
    """Output, and what every row has spent in bits, (B, H, Q), empty unless its own key receives the rest."""
    call = _StickLaunch.of(q, k, v, mask, factor, stick)
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    spent = call.rows(stick.rest)
    rows, columns, warps, stages = forward_tile(q, v)
    with call.device:
        stick_breaking.forward[(triton.cdiv(q.shape[2], rows) * q.shape[0] * q.shape[1],)](
            *call.tensors, out, spent, *call.strides, *out.stride()[:3], *call.sizes, **call.constants,
            ROWS=rows, COLUMNS=columns, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return out, spent


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None, spent: Tensor,
    stick: Stick,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v and factor; the last is empty where there is none."""
    call = _StickLaunch.of(q, k, v, mask, factor, stick)
    grad, spent = in_rows(grad), spent.contiguous()
    rows, columns, warps, stages = backward_tile(q, v)
    heads, queries, tiles = q.shape[0] * q.shape[1], q.shape[2], triton.cdiv(k.shape[2], columns)
    chunk = min(triton.cdiv(queries, rows), max(1, MAX_CARRIED // (heads * tiles * rows))) * rows
    later, earlier = (torch.empty((heads, tiles, chunk), dtype=torch.float32, device=q.device) for _ in range(2))
    live = torch.empty((heads, chunk // rows), dtype=torch.int32, device=q.device)
    summed = torch.float32 if chunk < queries else k.dtype  # over chunks
    grad_q, grad_factor = torch.empty(q.shape, dtype=q.dtype, device=q.device), call.rows(factor is not None)
    grad_k, grad_v = (torch.empty(t.shape, dtype=summed, device=t.device) for t in (k, v))
    given, strides = (*call.tensors, grad), (*call.strides, *grad.stride()[:3])
    options = {**call.constants, "ROWS": rows, "COLUMNS": columns, "num_warps": warps, "num_stages": stages}
    with call.device:
        for begin in range(0, queries, chunk):
            later.fill_(NOTHING_LEFT)
            earlier.zero_()
            stick_breaking_backward.backward_queries[(chunk // rows * heads,)](
                *given, later, earlier, live, grad_q, grad_factor, *strides, *grad_q.stride()[:3], *call.sizes,
                stick.scale, begin, chunk, **options,
            )  # fmt: skip
            stick_breaking_backward.backward_keys[(tiles * k.shape[0] * k.shape[1],)](
                *given, spent, later, earlier, live, grad_k, grad_v, *strides, *grad_k.stride()[:3],
                *grad_v.stride()[:3], *call.sizes, stick.scale, begin, chunk, ADD=begin > 0, **options,
            )  # fmt: skip
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), grad_factor


@dataclass(frozen=True)
class _StickLaunch(Launch):
    stick: Stick

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None, stick: Stick
    ) -> "_StickLaunch":
        factor = None if factor is None else factor.contiguous()
        return cls(in_rows(q), in_rows(k), in_rows(v), mask, factor, stick.causal, stick)

    @property
    def sizes(self) -> tuple[int | float, ...]:
        stick = self.stick
        return (*self.lengths, stick.window or 0, self.q.shape[-1], self.v.shape[-1], stick.scale * _LOG2E)

    @cached_property
    def constants(self) -> dict[str, object]:
        return {
            **self.shared_constants,
            "FAST": self.q.is_cuda and self.q.dtype != torch.float32,
            "REST": self.stick.rest, "WINDOWED": self.stick.window is not None,
            "FULL": padded(self.q) == self.q.shape[-1], "V_FULL": padded(self.v) == self.v.shape[-1],
            "PART": _part(self.q),
            "LIFT": 1024.0 if self.q.dtype == torch.float16 else 1.0,  # float16 loses digits below 6e-5
        }  # fmt: skip


def _part(q: Tensor) -> tl.dtype:
    """The dtype of the parts that are summed inside a tile. Triton's interpreter has no bfloat16."""
    if q.dtype == torch.float32:
        return tl.float32
    return tl.bfloat16 if q.is_cuda else tl.float16


# Rows, columns, warps, stages: the fastest of four or more on an H200 in bfloat16, to width 128. Those of wider heads
# and of float32 spill least of all that were compiled for it.
def forward_tile(q: Tensor, v: Tensor) -> tuple[int, int, int, int]:
    width = max(padded(q), padded(v))
    if q.dtype == torch.float32:
        return (64, 32, 4, 2) if width <= 64 else (32, 16, 4, 2)
    return (64, 64, 4, 3) if width <= 64 else (64, 64, 4, 2) if width <= 128 else (64, 32, 4, 2)


def backward_tile(q: Tensor, v: Tensor) -> tuple[int, int, int, int]:
    """The same for both kernels, which share the tiles of keys and the blocks of queries."""
    width = max(padded(q), padded(v))
    if q.dtype == torch.float32:
        return (32, 32, 4, 2) if width <= 64 else (16, 32, 4, 2)
    return (64, 64, 4, 2) if width <= 64 else (64, 32, 4, 2) if width <= 128 else (32, 32, 8, 2)
