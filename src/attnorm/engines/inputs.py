"""What every engine receives: q, k, v of one attention call with its mask, checked once.

Shape suffixes: B batch, H query heads, K key/value heads (H is a multiple of K), Q queries, L keys, D width.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attnorm.normalizers.block import Positions, check_mask


@dataclass(frozen=True)
class Inputs:
    q_BHQD: Tensor
    k_BKLD: Tensor
    v_BKLD: Tensor
    mask: Tensor | None  # boolean, broadcastable to (B, H, Q, L)
    causal: bool  # bottom-right: the last query sees every key
    scale: float
    positions: Tensor | Positions | None = None
    hidden_states: Tensor | None = None

    @property
    def queries(self) -> int:
        return self.q_BHQD.shape[-2]

    @property
    def keys(self) -> int:
        return self.k_BKLD.shape[-2]

    @property
    def groups(self) -> int:
        """Query heads per key/value head."""
        return self.q_BHQD.shape[1] // self.k_BKLD.shape[1]

    @property
    def offset(self) -> int:
        """Keys before the first query: query i sees keys up to offset + i where the call is causal."""
        return self.keys - self.queries

    @property
    def weights_shape(self) -> torch.Size:
        return torch.Size((*self.q_BHQD.shape[:3], self.keys))

    @property
    def needs_grad(self) -> bool:
        tensors = (self.q_BHQD, self.k_BKLD, self.v_BKLD, self.hidden_states)
        return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)

    def visible(self, start: int, stop: int, keys: int) -> Tensor | None:
        """The mask of queries start..stop over the first `keys` keys, causality included; None if all are seen."""
        mask = self.mask
        if mask is not None:
            mask = mask if mask.shape[-2] == 1 else mask[..., start:stop, :]
            mask = mask if mask.shape[-1] == 1 else mask[..., :keys]
        if not self.causal or keys <= self.offset + start + 1:
            return mask
        device = self.q_BHQD.device
        last_seen = torch.arange(self.offset + start, self.offset + stop, device=device)
        ordered = torch.arange(keys, device=device) <= last_seen[:, None]
        return ordered if mask is None else mask & ordered

    def reach(self, stop: int) -> int:
        """How many leading keys the queries before `stop` may see at the most (never less than 1)."""
        return max(self.offset + stop, 1) if self.causal else self.keys

    def n(self, rows_per_step: int = 1024) -> Tensor:
        """Visible keys of each row, (..., Q or 1, 1), without building the mask of all rows at once."""
        like = self.q_BHQD
        dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        if self.mask is None and not self.causal:
            return torch.full((1, 1), float(self.keys), dtype=dtype, device=like.device)
        if self.mask is None:
            seen = torch.arange(self.offset + 1, self.keys + 1, device=like.device).clamp(min=0)
            return seen.to(dtype)[:, None]
        counts = []
        for start in range(0, self.queries, rows_per_step):
            stop = min(start + rows_per_step, self.queries)
            visible = self.visible(start, stop, self.keys)
            assert visible is not None
            full = visible.expand(*visible.shape[:-1], self.keys)
            counts.append(full.sum(-1, keepdim=True, dtype=dtype))
            if full.shape[-2] == 1:
                return counts[0]
        return torch.cat(counts, dim=-2)

    def query_positions(self) -> Tensor | None:
        """(..., Q, 1) where the caller gave positions."""
        if self.positions is None:
            return None
        return Positions.of(self.positions, self.weights_shape, self.q_BHQD.device).query[..., None]


def checked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None,
    causal: bool,
    scale: float | None,
    positions: Tensor | Positions | None,
    hidden_states: Tensor | None = None,
) -> Inputs:
    """Inputs in four dimensions, with keys and values that no query may see set to zero."""
    _check_shapes(q, k, v)
    q, k, v = (t.reshape(*([1] * (4 - t.dim())), *t.shape) for t in (q, k, v))
    inputs = Inputs(
        q, k, v, mask, causal, 1 / math.sqrt(q.shape[-1]) if scale is None else float(scale), positions, hidden_states
    )
    if mask is None:
        return inputs
    check_mask(mask, inputs.weights_shape)
    seen = _seen_keys(inputs)
    k, v = (torch.where(seen, t, 0.0) for t in (k, v))
    return Inputs(q, k, v, mask, causal, inputs.scale, positions, hidden_states)


def _seen_keys(inputs: Inputs) -> Tensor:
    """(B, K, L, 1): keys that at least one query sees, so that garbage in padding cannot reach a product."""
    mask = inputs.mask
    assert mask is not None
    seen = mask.reshape(*([1] * (4 - mask.dim())), *mask.shape).any(-2)
    if inputs.queries == 0:
        seen = torch.ones_like(seen)
    if seen.shape[1] > 1:  # a mask per query head: a key is seen if any head of its group sees it
        seen = seen.unflatten(1, (-1, inputs.groups)).any(2)
    return seen[..., None]


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    given = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.dim() == k.dim() == v.dim() or q.dim() not in (2, 3, 4):
        raise ValueError(f"q, k, v must all be (batch, heads, length, width), or lack leading dimensions; got {given}")
    if not all(t.is_floating_point() for t in (q, k, v)) or not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k, v must share one floating dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q and k must have the same width, got {q.shape[-1]} and {k.shape[-1]} ({given})")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"k and v must agree in all but the width; got {given}")
    if k.shape[-2] == 0:
        raise ValueError(f"there is no key to attend to; got {given}")
    if q.dim() == 4 and q.shape[0] != k.shape[0]:
        raise ValueError(f"q and k must have the same batch size; got {given}")
    if q.dim() > 2 and (k.shape[-3] == 0 or q.shape[-3] % k.shape[-3]):
        raise ValueError(f"the query heads must be a multiple of the key heads; got {given}")
