"""Arguments of every attention kernel: tensors with contiguous rows, their strides and sizes, the device."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnorm.arithmetic import ceil_div


@dataclass(frozen=True)
class Launch:
    """Arguments of one launch: q (B, H, Q, D), k and v (B, G, K, D or E), and a boolean mask (B, H, Q, K) or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    factor: Tensor | None  # (B, H, Q) in float32, contiguous: multiplies the logits of each row
    causal: bool  # bottom-right: the last query sees every key

    @property
    def device(self) -> AbstractContextManager[object]:
        return device_of(self.q)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """q, k, v, mask, factor. If one is None, q is passed instead: the kernel does not read it."""
        mask = self.q if self.mask is None else self.mask.view(torch.uint8)
        return self.q, self.k, self.v, mask, self.q if self.factor is None else self.factor

    @property
    def strides(self) -> tuple[int, ...]:
        mask = (0, 0, 0, 0) if self.mask is None else self.mask.stride()
        return (*self.q.stride()[:3], *self.k.stride()[:3], *self.v.stride()[:3], *mask)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Heads, query heads per key head, queries, keys, keys before the first query."""
        heads, queries, keys = self.q.shape[1], self.q.shape[2], self.k.shape[2]
        return heads, heads // self.k.shape[1], queries, keys, keys - queries

    @property
    def shared_constants(self) -> dict[str, object]:
        exact = torch.backends.cuda.matmul.fp32_precision != "tf32"
        return {
            "CAUSAL": self.causal,
            "MASKED": self.mask is not None,
            "FACTORED": self.factor is not None,
            "PRECISION": "tf32x3" if exact else "tf32",  # of float32; exact products would take minutes to compile
            "WIDTH": padded(self.q),
            "V_WIDTH": padded(self.v),
        }

    @classmethod
    def without_values(cls, q: Tensor, k: Tensor, mask: Tensor | None, factor: Tensor | None, causal: bool) -> "Launch":
        q, k = in_rows(q), in_rows(k)
        return cls(q, k, k, mask, None if factor is None else factor.contiguous(), causal)

    def run(self, kernel: Any, scale: float, *numbers: Tensor | int, over_keys: bool = False) -> None:
        """Launch a kernel that reads no values, with one program per block of queries, or of keys (over_keys)."""
        q, k, _, mask, _ = self.tensors
        rows, columns, warps, stages = tile_without_values(q)
        over, per_program = (k, columns) if over_keys else (q, rows)
        constants = {name: value for name, value in self.shared_constants.items() if name in kernel.arg_names}
        with self.device:
            kernel[(ceil_div(over.shape[-2], per_program) * over.shape[0] * over.shape[1],)](
                q, k, mask, *numbers, *self.strides[:6], *self.strides[9:], *self.lengths, q.shape[-1], scale,
                **constants, ROWS=rows, COLUMNS=columns, FULL=padded(q) == q.shape[-1], num_warps=warps,
                num_stages=stages,
            )  # fmt: skip

    def rows(self, used: bool) -> Tensor:
        """Return an uninitialised float32 tensor (B, H, Q), or an empty one if it is not used."""
        shape = self.q.shape[:3] if used else (0,)
        return torch.empty(shape, dtype=torch.float32, device=self.q.device)


def device_of(t: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device the current one, where Triton launches kernels."""
    return torch.cuda.device(t.device) if t.is_cuda else nullcontext()


def in_rows(t: Tensor) -> Tensor:
    """Return the tensor with contiguous rows, as the kernels expect; saved tensors may have other strides."""
    return t if t.stride(-1) == 1 else t.contiguous()


def empty_rows(t: Tensor, width: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Return an uninitialised tensor (B, H, L, width) like t with contiguous rows.

    If the heads of a position lie next to each other in t, as in models, they do so in the result: then a model copies
    neither the output nor a gradient.
    """
    batch, heads, length = t.shape[:3]
    width, dtype = t.shape[-1] if width is None else width, t.dtype if dtype is None else dtype
    if t.stride(1) < t.stride(2):
        return torch.empty((batch, length, heads, width), dtype=dtype, device=t.device).transpose(1, 2)
    return torch.empty((batch, heads, length, width), dtype=dtype, device=t.device)


def padded(t: Tensor) -> int:
    """Return the width of t in a tile: the next power of two, at least 16."""
    return max(16, 1 << (t.shape[-1] - 1).bit_length())


def tile_without_values(q: Tensor) -> tuple[int, int, int, int]:
    """Return rows, columns, warps and stages: the fastest of eight for the entropy kernel, bfloat16 on an H200."""
    if q.dtype == torch.float32:
        return (64, 32, 4, 2) if padded(q) <= 64 else (32, 32, 4, 2)
    return (64, 64, 4, 3) if padded(q) <= 64 else (64, 64, 4, 2) if padded(q) <= 128 else (64, 32, 4, 2)
