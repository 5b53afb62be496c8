"""Read a flex_attention call: its mask_mod and score_mod become the mask and the bias of an AttentionCall.

A score_mod may be any function of a logit. It is evaluated once for every query and key, and the difference to the
plain logit is kept as a bias, so that what is measured are the model's own logits. That takes an array of size
B x H x Q x K, which is why a limit applies.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask, noop_mask

from attnorm.metrics.call import AttentionCall
from attnorm.models.dispatch import UnsupportedModel
from attnorm.models.hf_call import Visible, read_mask
from attnorm.models.private_names import is_identity_score_mod
from attnorm.models.torch_functions import kind_of

LARGEST = 2**29  # scores that a score_mod is evaluated for at once: 2 GiB in float32


def read_flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    *_: Any,
) -> AttentionCall:
    """Arguments of the operator behind torch.nn.attention.flex_attention.flex_attention."""
    query, key, value = (tensor.detach() for tensor in (query, key, value))
    key, value = (tensor.expand(query.shape[0], *tensor.shape[1:]) for tensor in (key, value))
    queries, keys = query.shape[-2], key.shape[-2]
    visible = _masked(block_mask, queries, keys, query.device)
    if not is_identity_score_mod(score_mod):
        visible = _scored(query, key, score_mod, scale, visible)
    return AttentionCall(
        layer=0,
        kind=kind_of(visible, queries, keys, itself=queries == keys),
        query_BHQD=query,
        key_BGKD=key,
        value_BGKE=value,
        scale=float(scale),
        causal=visible.causal,
        mask=visible.mask,
        bias=visible.bias,
    )


def _masked(block_mask: tuple[Any, ...], queries: int, keys: int, device: torch.device) -> Visible:
    mask_mod = block_mask[-1]
    if mask_mod is noop_mask:
        return Visible(causal=False)
    blocks = next(part for part in block_mask if isinstance(part, Tensor))  # (B or 1, H or 1, blocks of queries)
    _check_size(blocks.shape[0] * blocks.shape[1] * queries * keys, "mask_mod")
    mask = create_mask(mask_mod, blocks.shape[0], blocks.shape[1], queries, keys, device=str(device))
    return read_mask("sdpa", mask, queries, keys)


def _scored(query: Tensor, key: Tensor, score_mod: Callable[..., Tensor], scale: float, visible: Visible) -> Visible:
    """What the mask leaves visible, without keys that the score_mod sets to -inf, and what it adds to the others."""
    batch, heads, queries, _ = query.shape
    keys = key.shape[-2]
    _check_size(batch * heads * queries * keys, "score_mod")
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    key = key.repeat_interleave(heads // key.shape[1], 1)
    logits = (query.to(wide) @ key.to(wide).mT) * scale
    places = [torch.arange(size, dtype=torch.int, device=query.device) for size in (batch, heads, queries, keys)]
    over = score_mod
    for dimension in (4, 3, 2, 1):  # the innermost is the keys'
        over = torch.vmap(over, in_dims=(0, *(0 if place == dimension else None for place in range(1, 5))))
    scores = over(logits, *places).to(wide)
    if bool(scores.isnan().any()):
        raise UnsupportedModel("expected numbers from the score_mod of flex_attention, got NaN. Check the score_mod.")
    bias = (scores - logits).masked_fill(scores == -torch.inf, -torch.inf)
    found = read_mask("sdpa", bias, queries, keys)
    mask = found.mask
    if visible.mask is not None:
        mask = visible.mask if mask is None else mask & visible.mask
    if visible.causal != found.causal and mask is not None and mask.shape[-2] > 1:
        ordered = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
        return Visible(causal=False, mask=mask & ordered, bias=found.bias)
    return Visible(causal=visible.causal or found.causal, mask=mask, bias=found.bias)


def _check_size(scores: int, what: str) -> None:
    if scores > LARGEST:
        raise UnsupportedModel(
            f"expected at most {LARGEST} scores (batch x heads x queries x keys) to evaluate the {what} of "
            f"flex_attention for, got {scores}. Observe a shorter input or a smaller batch."
        )
