"""What every attention kernel is given: tensors whose rows are contiguous, their strides and sizes, and the device."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Launch:
    """q (B, H, Q, D), k and v (B, G, K, D or E), and a boolean mask (B, H, Q, K) or None."""

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
        """q, k, v, mask, factor; q replaces a missing one and is not read there."""
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

    def rows(self, used: bool) -> Tensor:
        """A float32 number per row, (B, H, Q), or an empty tensor."""
        shape = self.q.shape[:3] if used else (0,)
        return torch.empty(shape, dtype=torch.float32, device=self.q.device)


def device_of(t: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's."""
    return torch.cuda.device(t.device) if t.is_cuda else nullcontext()


def in_rows(t: Tensor) -> Tensor:
    """With contiguous rows, as the kernels expect. (Saved tensors may come back with other strides.)"""
    return t if t.stride(-1) == 1 else t.contiguous()


def padded(t: Tensor) -> int:
    """The width of t in a tile."""
    return max(16, 1 << (t.shape[-1] - 1).bit_length())
