"""What a kernel of transformers makes of its mask argument: which keys are visible, and what is added to the logits.

    eager            everything is added to the logits, a boolean mask too (as 0 and 1); None hides nothing
    sdpa             True = visible, numbers are added; None means causal where the module is causal and Q > 1
    flash_attention  None or the (B, K) padding; causality and the sliding window are the kernel's own business
    flex_attention   a BlockMask, or numbers that are added

Transformers passes one mask object to many layers: it is read once. Masks that only say "causal" or "causal and these
keys are padding" are given back as that, without an array of size Q x K.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Added to a logit it leaves a weight of exactly 0, whether written as -1e4, -1e9, finfo.min or -inf.
HIDING = -1e4
REMEMBERED = 4  # more than a model has kinds of masks, few enough not to hold on to those of earlier steps


@dataclass(frozen=True)
class Visible:
    """Keys that `mask` (broadcastable to (B, H, Q, K)) allows and, if causal, that are not after the query."""

    causal: bool
    mask: Tensor | None = None
    bias: Tensor | None = None


def chosen_keys(indices_BQN: Tensor, keys: int) -> Tensor:
    """The mask (B, 1, Q, K) of the keys that a model chose for each query (DeepSeek 3.2, GLM 5).

    Such a model hides the others in the masks of sdpa and eager, and hands any other kernel its choice as `indices`.
    """
    nothing = torch.zeros(*indices_BQN.shape[:-1], keys, dtype=torch.bool, device=indices_BQN.device)
    return nothing.scatter(-1, indices_BQN.long(), True)[:, None]


class MaskReader:
    """Reads mask arguments and remembers the last few."""

    def __init__(self) -> None:
        self._read: dict[tuple[Any, ...], tuple[weakref.ref[Any], Visible]] = {}

    def __call__(
        self,
        kernel: str,
        given: Any,
        *,
        causal: bool,
        queries: int,
        keys: int,
        window: int | None,
        device: torch.device,
    ) -> Visible:
        if given is None and not (window and kernel.startswith("flash")):
            return Visible(causal=causal and kernel not in ("eager", "flex_attention") and queries > 1)
        if given is None:
            return Visible(causal=causal, mask=_window(queries, keys, window, causal, device))
        key = (id(given), kernel, causal, queries, keys, window)
        known = self._read.get(key)
        if known is not None and known[0]() is given:
            return known[1]
        while len(self._read) >= REMEMBERED:
            self._read.pop(next(iter(self._read)))
        visible = read_mask(kernel, given, queries, keys, causal=causal, window=window)
        self._read[key] = (weakref.ref(given), visible)
        return visible


def read_mask(
    kernel: str, given: Any, queries: int, keys: int, *, causal: bool = False, window: int | None = None
) -> Visible:
    """What one mask argument that is not None means to a kernel."""
    if not isinstance(given, Tensor):
        return _simplified(_block_mask(given, queries, keys), None)
    if kernel.startswith("flash"):
        padding = given[:, None, None, -keys:].bool()
        within = _window(queries, keys, window, causal, given.device)
        return Visible(causal=causal, mask=padding if within is None else padding & within)
    given = given if given.shape[-1] <= keys else given[..., :keys]
    if given.dtype == torch.bool and kernel != "eager":
        return _simplified(given, None)
    added = given.float() if not given.is_floating_point() else given
    mask = added > HIDING
    bias = added.masked_fill(~mask, 0.0)
    return _simplified(mask, bias if bool(bias.any()) else None)


def _simplified(mask: Tensor, bias: Tensor | None) -> Visible:
    """The same, without an array of size Q x K where causality and padding say it all."""
    if mask.shape[-2] == 1:
        return Visible(causal=False, mask=None if bool(mask.all()) else mask, bias=bias)
    queries, keys = mask.shape[-2:]
    padding = mask[..., -1:, :].clone()  # what the last query may not see, if nothing but causality is at work besides
    if torch.equal(mask, padding.expand_as(mask)):
        return Visible(causal=False, mask=None if bool(padding.all()) else padding, bias=bias)
    rows = max(1, 2**22 // keys)
    for start in range(0, queries, rows):
        stop = min(start + rows, queries)
        own = torch.arange(start, stop, device=mask.device)[:, None] + (keys - queries)
        if not torch.equal(mask[..., start:stop, :], padding & (torch.arange(keys, device=mask.device) <= own)):
            return Visible(causal=False, mask=mask, bias=bias)
    return Visible(causal=True, mask=None if bool(padding.all()) else padding, bias=bias)


def _window(queries: int, keys: int, window: int | None, causal: bool, device: torch.device) -> Tensor | None:
    """A flash kernel's sliding window, which no mask of transformers holds; None where it reaches every key."""
    if not window or window >= keys:
        return None
    distance = torch.arange(queries, device=device)[:, None] + (keys - queries) - torch.arange(keys, device=device)
    within = distance < window
    return (within & (distance >= 0) if causal else within & (distance > -window))[None, None]


def _block_mask(given: Any, queries: int, keys: int) -> Tensor:
    from torch.nn.attention.flex_attention import create_mask

    batch, heads = given.shape[:2]
    return create_mask(given.mask_mod, batch, heads, queries, keys, device=str(given.kv_indices.device))
