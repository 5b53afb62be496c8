"""Read the arguments of torch's attention functions, such as scaled_dot_product_attention, as an AttentionCall.

    scaled_dot_product_attention      boolean mask: True = visible; is_causal aligned top-left; key heads may be shared
    multi_head_attention_forward      boolean mask: True = hidden; queries, keys and values are projected inside
    _native_multi_head_attention,     the fast path of nn.MultiheadAttention and nn.TransformerEncoderLayer in eval
    _transformer_encoder_layer_fwd    mode; masks hide where they are not zero, inputs may be nested tensors

Every reader takes the function's arguments under torch's names and returns an AttentionCall with layer 0.

The mask_mod and score_mod of flex_attention become a mask and a bias. A score_mod may be any function of a logit. It is
evaluated once for every query and key, and the difference to the plain logit is kept as a bias, so that what is
measured are the model's own logits. That takes an array of size B x H x Q x K, which is why a limit applies.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_mask, noop_mask

from attnorm.engines.inputs import autocast_dtype
from attnorm.metrics.call import AttentionCall, Kind
from attnorm.models.dispatch import UnsupportedModel
from attnorm.models.hf_call import VisibleKeys, read_mask
from attnorm.models.private_names import is_identity_score_mod

LARGEST = 2**29  # scores that a score_mod is evaluated for at once: 2 GiB in float32


def read_scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionCall:
    """Read a call of scaled_dot_product_attention: dimension -3 is the heads, all earlier ones are the batch."""
    if any(tensor.is_nested for tensor in (query, key, value)):
        raise UnsupportedModel(
            "expected dense tensors in scaled_dot_product_attention, got a nested tensor. Pad the batch and give a "
            "mask while it is observed."
        )
    query, key, value = _autocast(query, key, value)
    query, key, value, mask = _four_dimensional(query, key, value, attn_mask)
    queries, keys = query.shape[-2], key.shape[-2]
    mask = None if mask is None else mask.expand(*mask.shape[:-1], keys)
    visible = VisibleKeys(causal=False) if mask is None else read_mask("sdpa", mask, queries=queries, keys=keys)
    kind = "decoder" if is_causal else kind_of(visible, queries, keys, itself=queries == keys)
    if is_causal and mask is None:
        if queries <= keys:  # top-left: keys after the last query are hidden from all
            key, value, visible = key[..., :queries, :], value[..., :queries, :], VisibleKeys(causal=True)
        else:
            ordered = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril()
            visible = VisibleKeys(causal=False, mask=ordered[None, None])
    return _call(kind, query, key, value, query.shape[-1] ** -0.5 if scale is None else float(scale), visible)


def read_multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> AttentionCall:
    """Read a call of torch.nn.functional.multi_head_attention_forward: inputs (length, batch, width)."""
    itself = key is query or value is query
    if query.dim() == 2:
        query, key, value = (states.unsqueeze(1) for states in (query, key, value))
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
    weights: tuple[Tensor | None, ...]
    if use_separate_proj_weight:
        weights = (q_proj_weight, k_proj_weight, v_proj_weight)
    else:
        assert in_proj_weight is not None
        weights = in_proj_weight.chunk(3)
    biases = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
    q, k, v = (
        F.linear(states, weight, bias)  # type: ignore[arg-type]
        for states, weight, bias in zip((query, key, value), weights, biases, strict=True)
    )
    batch, queries, keys = q.shape[1], q.shape[0], k.shape[0]
    if bias_k is not None and bias_v is not None:
        k, v = (torch.cat([states, extra.expand(1, batch, -1)]) for states, extra in ((k, bias_k), (v, bias_v)))
    query_BHQD, key_BHKD, value_BHKD = (
        states.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3) for states in (q, k, v)
    )
    if static_k is not None:
        key_BHKD, keys = static_k.unflatten(0, (batch, num_heads)), static_k.shape[1]
    if static_v is not None:
        value_BHKD = static_v.unflatten(0, (batch, num_heads))
    if add_zero_attn:
        key_BHKD, value_BHKD = (F.pad(states, (0, 0, 0, 1)) for states in (key_BHKD, value_BHKD))
    scale = query_BHQD.shape[-1] ** -0.5
    if is_causal and key_padding_mask is None and not need_weights:
        # Torch drops the mask here and asks scaled_dot_product_attention for a causal one.
        return read_scaled_dot_product_attention(query_BHQD, key_BHKD, value_BHKD, is_causal=True, scale=scale)
    visible = VisibleKeys(causal=False)
    if attn_mask is not None:
        mask = attn_mask.unflatten(0, (batch, num_heads)) if attn_mask.dim() == 3 else attn_mask[None, None]
        visible = read_mask("sdpa", _hidden_to_visible(mask), queries=queries, keys=keys)
    kind = kind_of(visible, queries, keys, itself=itself)
    if key_padding_mask is not None:
        visible = _combine(visible, read_mask("sdpa", _hidden_to_visible(key_padding_mask[:, None, None]), 1, keys))
    visible = _with_extra_keys(visible, key_BHKD.shape[-2] - keys, queries, keys)
    return _call(kind, query_BHQD, key_BHKD, value_BHKD, scale, visible)


def read_native_multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> AttentionCall:
    """Read a call of the fast path of nn.MultiheadAttention: self-attention, inputs (batch, length, width).

    mask_type 0: mask (queries, keys); 1: padding (batch, keys); 2: (batch, heads, queries, keys).
    """
    visible = None if mask is None else mask.logical_not()
    if query.is_nested:
        lengths = torch.tensor([states.shape[0] for states in query.unbind()], device=query.device)
        query = torch.nested.to_padded_tensor(query, 0.0)
        visible, mask_type = torch.arange(query.shape[1], device=query.device) < lengths[:, None], 1
    length = query.shape[1]
    if visible is not None:
        heads = num_head if mask_type == 2 else 1
        visible = visible[:, None, None] if mask_type == 1 else visible.reshape(-1, heads, length, length)
    query_BHQD, key_BHKD, value_BHKD = (
        states.unflatten(-1, (num_head, -1)).transpose(1, 2)
        for states in F.linear(query, qkv_weight, qkv_bias).chunk(3, dim=-1)
    )
    visible_keys = (
        VisibleKeys(causal=False) if visible is None else read_mask("sdpa", visible, queries=length, keys=length)
    )
    kind = kind_of(visible_keys, length, length, itself=True)
    return _call(kind, query_BHQD, key_BHKD, value_BHKD, query_BHQD.shape[-1] ** -0.5, visible_keys)


def read_transformer_encoder_layer(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    *rest: Tensor | int | None,
) -> AttentionCall:
    """Read a call of nn.TransformerEncoderLayer's fast path. rest: second norm, feed-forward part, mask, mask_type."""
    mask, mask_type = rest[-2:]
    states = F.layer_norm(src, (embed_dim,), norm_weight_1, norm_bias_1, eps) if norm_first else src
    return read_native_multi_head_attention(
        states, states, states, embed_dim, num_heads, qkv_weight, qkv_bias, proj_weight, proj_bias,
        mask if isinstance(mask, Tensor) else None, mask_type=mask_type if isinstance(mask_type, int) else None,
    )  # fmt: skip


def kind_of(visible: VisibleKeys, queries: int, keys: int, *, itself: bool) -> Kind:
    """Return "decoder" if no query sees a later key. itself: queries and keys come from one sequence."""
    mask = visible.mask
    if mask is not None and mask.shape[-2] > 1 and not visible.causal:
        later = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).triu(1 + keys - queries)
        if not bool((mask & later).any()):
            return "decoder"
    return "decoder" if visible.causal else "encoder" if itself else "cross"


def _call(kind: Kind, query: Tensor, key: Tensor, value: Tensor, scale: float, visible: VisibleKeys) -> AttentionCall:
    return AttentionCall(
        layer=0,
        kind=kind,
        query_BHQD=query.detach(),
        key_BGKD=key.detach(),
        value_BGKE=value.detach(),
        scale=scale,
        causal=visible.causal,
        mask=visible.mask,
        bias=None if visible.bias is None else visible.bias.detach(),
    )


def _four_dimensional(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Batch, heads, length, width: leading dimensions broadcast as torch does, key and value heads made the same."""
    dimensions = max(4, query.dim(), key.dim(), value.dim())
    tensors = [tensor.reshape(*([1] * (dimensions - tensor.dim())), *tensor.shape) for tensor in (query, key, value)]
    batch = torch.broadcast_shapes(*(tensor.shape[:-3] for tensor in tensors))
    query, key, value = (tensor.expand(*batch, *tensor.shape[-3:]) for tensor in tensors)
    if mask is not None and dimensions > 4:
        mask = mask.reshape(*([1] * (dimensions - mask.dim())), *mask.shape)
        mask = mask.expand(*batch, *mask.shape[-3:]).flatten(0, -4)
    if query.shape[-3] == 1:
        query = query.expand(*batch, max(key.shape[-3], value.shape[-3]), *query.shape[-2:])
    if key.shape[-3] != value.shape[-3]:
        heads = query.shape[-3]
        key, value = (tensor.repeat_interleave(heads // tensor.shape[-3], -3) for tensor in (key, value))
    if dimensions > 4:
        query, key, value = (tensor.flatten(0, -4) for tensor in (query, key, value))
    return query, key, value, mask


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast the inputs of scaled_dot_product_attention as autocast does after the call that is observed here."""
    dtype = autocast_dtype(tensors[0].device)
    if dtype is None or tensors[0].dtype == torch.float64:
        return tensors
    return tuple(tensor.to(dtype) for tensor in tensors)


def _hidden_to_visible(mask: Tensor) -> Tensor:
    """Invert a boolean mask of nn.MultiheadAttention, where True = hidden; numbers do not change."""
    return mask.logical_not() if mask.dtype == torch.bool else mask


def _combine(first: VisibleKeys, second: VisibleKeys) -> VisibleKeys:
    """Combine two masks and two biases: a key is visible if both allow it."""
    if first.mask is None or second.mask is None:
        mask = second.mask if first.mask is None else first.mask
    else:
        mask = first.mask & second.mask
    if first.bias is None or second.bias is None:
        bias = second.bias if first.bias is None else first.bias
    else:
        bias = first.bias + second.bias
    return VisibleKeys(causal=first.causal, mask=mask, bias=bias)


def _with_extra_keys(visible: VisibleKeys, extra: int, queries: int, keys: int) -> VisibleKeys:
    """Add the keys that nn.MultiheadAttention appends (add_bias_kv, add_zero_attn); every query sees them."""
    if not extra:
        return visible
    mask, bias = visible.mask, visible.bias
    if visible.causal:
        device = None if mask is None else mask.device
        ordered = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
        mask = ordered[None, None] if mask is None else mask & ordered
    return VisibleKeys(
        causal=False,
        mask=None if mask is None else F.pad(mask, (0, extra), value=True),
        bias=None if bias is None else F.pad(bias, (0, extra)),
    )


def read_flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    *_: Any,
) -> AttentionCall:
    """Read a call of the operator behind torch.nn.attention.flex_attention.flex_attention."""
    query, key, value = (tensor.detach() for tensor in (query, key, value))
    key, value = (tensor.expand(query.shape[0], *tensor.shape[1:]) for tensor in (key, value))
    queries, keys = query.shape[-2], key.shape[-2]
    visible = _masked(block_mask, queries, keys, query.device)
    if not is_identity_score_mod(score_mod):
        visible = _scored(query, key, score_mod, scale, visible)
    kind = kind_of(visible, queries, keys, itself=queries == keys)
    return _call(kind, query, key, value, float(scale), visible)


def _masked(block_mask: tuple[Any, ...], queries: int, keys: int, device: torch.device) -> VisibleKeys:
    mask_mod = block_mask[-1]
    if mask_mod is noop_mask:
        return VisibleKeys(causal=False)
    blocks = next(part for part in block_mask if isinstance(part, Tensor))  # (B or 1, H or 1, blocks of queries)
    _check_size(blocks.shape[0] * blocks.shape[1] * queries * keys, "mask_mod")
    mask = create_mask(mask_mod, blocks.shape[0], blocks.shape[1], queries, keys, device=str(device))
    return read_mask("sdpa", mask, queries, keys)


def _scored(
    query: Tensor, key: Tensor, score_mod: Callable[..., Tensor], scale: float, visible: VisibleKeys
) -> VisibleKeys:
    """Return the visible keys, without those that the score_mod sets to -inf, and its bias for the others."""
    batch, heads, queries, _ = query.shape
    keys = key.shape[-2]
    _check_size(batch * heads * queries * keys, "score_mod")
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    key = key.repeat_interleave(heads // key.shape[1], 1)
    logits = (query.to(wide) @ key.to(wide).mT) * scale
    indices = [torch.arange(size, dtype=torch.int, device=query.device) for size in (batch, heads, queries, keys)]
    over = score_mod
    for dimension in (4, 3, 2, 1):  # the innermost is the keys'
        over = torch.vmap(over, in_dims=(0, *(0 if argument == dimension else None for argument in range(1, 5))))
    scores = over(logits, *indices).to(wide)
    if bool(scores.isnan().any()):
        raise UnsupportedModel("expected numbers from the score_mod of flex_attention, got NaN. Check the score_mod.")
    bias = (scores - logits).masked_fill(scores == -torch.inf, -torch.inf)
    scored = read_mask("sdpa", bias, queries, keys)
    mask = scored.mask
    if visible.mask is not None:
        mask = visible.mask if mask is None else mask & visible.mask
    if visible.causal != scored.causal and mask is not None and mask.shape[-2] > 1:
        ordered = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
        return VisibleKeys(causal=False, mask=mask & ordered, bias=scored.bias)
    return VisibleKeys(causal=visible.causal or scored.causal, mask=mask, bias=scored.bias)


def _check_size(scores: int, function: str) -> None:
    if scores > LARGEST:
        raise UnsupportedModel(
            f"expected at most {LARGEST} scores (batch x heads x queries x keys) to evaluate the {function} of "
            f"flex_attention for, got {scores}. Observe a shorter input or a smaller batch."
        )
