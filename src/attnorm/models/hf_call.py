"""Read an attention call of transformers: the only file that interprets its arguments and masks.

Transformers calls an attention function as function(module, query, key, value, attention_mask, **options). `read_call`
turns that into one AttentionCall; `observe` measures it, `patched_attention` computes it.

The meaning of a mask depends on the kernel (attention implementation) that the model built it for:

    eager            everything is added to the logits, a boolean mask too (as 0 and 1); None hides nothing
    sdpa             True = visible, numbers are added; None is causal where the module is causal and Q > 1
    flash_attention  None or the (B, K) padding; the kernel itself adds causality and the sliding window
    flex_attention   a BlockMask, or numbers that are added
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnorm.metrics.call import AttentionCall
from attnorm.models.dispatch import mask_kernel, running_normalizer

# Mask entries at or below this number hide a key; models write -1e4, -1e9, finfo.min or -inf.
HIDDEN_BELOW = -1e4
MAX_CACHED_MASKS = 4  # more than a model has kinds of masks, but few, so that masks of earlier steps are freed
POSITIONAL = ("query", "key", "value", "attention_mask")  # transformers gives these without names
IGNORED_BY_SDPA = ("softcap", "s_aux")  # some versions of transformers pass them to SDPA, which ignores them


@dataclass(frozen=True)
class VisibleKeys:
    """Which keys a query sees: those that `mask` allows and, if causal, that are not after the query.

    mask: broadcastable to (B, H, Q, K). bias: added to the logits.
    """

    causal: bool
    mask: Tensor | None = None
    bias: Tensor | None = None


ReadMask = Callable[..., VisibleKeys]


def read_call(
    kernel: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    *,
    read_mask: ReadMask,
    masks: str | None = None,
    scaling: float | Tensor | None = None,
    is_causal: bool | None = None,
    dropout: float = 0.0,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> AttentionCall:
    """Return the call of an attention function as AttentionCall, with layer 0.

    kernel: name of the attention function. masks: the kernel that the model builds masks for, if known. read_mask:
    `mask_as_given` or a `MaskReader`. The other names are those of transformers. indices: keys that the model chose for
    each query. s_aux: learned sinks. position_bias: added to the logits.
    """
    if kernel == "sdpa":
        options = {name: option for name, option in options.items() if name not in IGNORED_BY_SDPA}
    masks, queries = mask_kernel(module, kernel) if masks is None else masks, query.shape[2]
    causal = bool(is_causal if is_causal is not None else getattr(module, "is_causal", True))
    if masks == "sdpa" and causal and attention_mask is None and 1 < queries < key.shape[2]:
        # The first tokens in a cache of fixed size: the rest of it is still empty.
        key, value = key[:, :, :queries], value[:, :, :queries]
        position_bias = None if position_bias is None else position_bias[..., :queries]
    if isinstance(scaling, Tensor) and scaling.numel() > 1:
        query, scaling = query * scaling, 1.0
    keys = key.shape[2]
    if attention_mask is None and not (sliding_window and masks.startswith("flash")):
        visible = VisibleKeys(causal=causal and masks not in ("eager", "flex_attention") and queries > 1)
    elif attention_mask is None:
        visible = VisibleKeys(causal=causal, mask=_window_mask(queries, keys, sliding_window, causal, query.device))
    else:
        visible = read_mask(masks, attention_mask, queries, keys, causal=causal, window=sliding_window)
    mask, bias = visible.mask, visible.bias
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    if indices is not None:
        selected = _mask_of_indices(indices, keys)
        mask = selected if mask is None else mask & selected
    declared = is_causal is not None or hasattr(module, "is_causal")
    return AttentionCall(
        layer=0,
        kind="decoder" if visible.causal or (causal and declared) else "encoder",
        query_BHQD=query,
        key_BGKD=key,
        value_BGKE=value,
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        causal=visible.causal,
        mask=mask,
        softcap=options.get("softcap"),
        sinks_H=options.get("s_aux"),
        bias=bias,
        dropout=dropout,
        normalizer=running_normalizer(module),
    )


class MaskReader:
    """Reads masks in their simplest form, with a cache: transformers passes the same mask to many layers."""

    def __init__(self) -> None:
        self._read: dict[tuple[Any, ...], tuple[weakref.ref[Any], VisibleKeys]] = {}

    def __call__(
        self,
        kernel: str,
        given: Any,
        queries: int,
        keys: int,
        *,
        causal: bool = False,
        window: int | None = None,
    ) -> VisibleKeys:
        key = (id(given), kernel, causal, queries, keys, window)
        cached = self._read.get(key)
        if cached is not None and cached[0]() is given:
            return cached[1]
        while len(self._read) >= MAX_CACHED_MASKS:
            self._read.pop(next(iter(self._read)))
        visible = read_mask(kernel, given, queries, keys, causal=causal, window=window)
        self._read[key] = (weakref.ref(given), visible)
        return visible


def read_mask(
    kernel: str, given: Any, queries: int, keys: int, *, causal: bool = False, window: int | None = None
) -> VisibleKeys:
    """Interpret a mask, and replace an array of size Q x K by causality and padding if these describe it."""
    visible = mask_as_given(kernel, given, queries, keys, causal=causal, window=window)
    if visible.causal or visible.mask is None or (isinstance(given, Tensor) and kernel.startswith("flash")):
        return visible
    return _simplify(visible.mask, visible.bias)


def mask_as_given(
    kernel: str, given: Any, queries: int, keys: int, *, causal: bool = False, window: int | None = None
) -> VisibleKeys:
    """Interpret a mask without simplifying it. Compiled code does not read its values.

    kernel: the kernel that the mask was built for. window: size of the sliding window, which flash kernels apply.
    """
    if not isinstance(given, Tensor):
        return VisibleKeys(causal=False, mask=_read_block_mask(given, queries, keys))
    if kernel.startswith("flash"):
        padding = given[:, None, None, -keys:].bool()
        within = _window_mask(queries, keys, window, causal, given.device)
        return VisibleKeys(causal=causal, mask=padding if within is None else padding & within)
    given = given if given.shape[-1] <= keys else given[..., :keys]
    if given.dtype == torch.bool and kernel != "eager":
        return VisibleKeys(causal=False, mask=given)
    added = given if given.is_floating_point() else given.float()
    mask = added > HIDDEN_BELOW
    bias = torch.where(mask, added, 0.0)
    # Most masks add 0 to visible keys. Without a bias, the fused engine can run.
    if not torch.compiler.is_compiling() and not bool(bias.any()):
        return VisibleKeys(causal=False, mask=mask)
    return VisibleKeys(causal=False, mask=mask, bias=bias)


def _mask_of_indices(indices_BQN: Tensor, keys: int) -> Tensor:
    """Return the mask (B, 1, Q, K) of the keys that a model chose for each query (DeepSeek 3.2, GLM 5).

    For sdpa and eager, such a model hides the other keys in the mask. To other kernels it passes its choice as
    `indices`.
    """
    nothing = torch.zeros(*indices_BQN.shape[:-1], keys, dtype=torch.bool, device=indices_BQN.device)
    return nothing.scatter(-1, indices_BQN.long(), True)[:, None]


def _simplify(mask: Tensor, bias: Tensor | None) -> VisibleKeys:
    """Replace a mask of size Q x K by causality and padding, if these describe it completely."""
    if mask.shape[-2] == 1:
        return VisibleKeys(causal=False, mask=None if bool(mask.all()) else mask, bias=bias)
    queries, keys = mask.shape[-2:]
    # The last query sees every key that is not padding, so its row is the padding mask if the rest is causality.
    padding = mask[..., -1:, :].clone()
    if torch.equal(mask, padding.expand_as(mask)):
        return VisibleKeys(causal=False, mask=None if bool(padding.all()) else padding, bias=bias)
    rows = max(1, 2**22 // keys)
    for start in range(0, queries, rows):
        stop = min(start + rows, queries)
        last_visible = torch.arange(start, stop, device=mask.device)[:, None] + (keys - queries)
        if not torch.equal(
            mask[..., start:stop, :], padding & (torch.arange(keys, device=mask.device) <= last_visible)
        ):
            return VisibleKeys(causal=False, mask=mask, bias=bias)
    return VisibleKeys(causal=True, mask=None if bool(padding.all()) else padding, bias=bias)


def _window_mask(queries: int, keys: int, window: int | None, causal: bool, device: torch.device) -> Tensor | None:
    """Return the sliding window of a flash kernel as a mask, since transformers' mask does not contain it.

    None if the window covers every key.
    """
    if not window or window >= keys:
        return None
    distance = torch.arange(queries, device=device)[:, None] + (keys - queries) - torch.arange(keys, device=device)
    within = distance < window
    return (within & (distance >= 0) if causal else within & (distance > -window))[None, None]


def _read_block_mask(block_mask: Any, queries: int, keys: int) -> Tensor:
    from torch.nn.attention.flex_attention import create_mask

    batch, heads = block_mask.shape[:2]
    return create_mask(block_mask.mask_mod, batch, heads, queries, keys, device=str(block_mask.kv_indices.device))
