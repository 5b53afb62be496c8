"""Attention over the whole matrix of weights at once: the fastest form of most normalizers at training lengths.

At a thousand tokens the matrix of a layer is a few gigabytes and fits; traced into the graph of a compiled block, a
normalizer becomes one or two kernels over whole rows, where a loop over blocks or several passes of FlexAttention would
launch many. Longer sequences are for the engines, which never hold the matrix.
"""

from typing import Any

import torch
from torch import Tensor, nn

from attnorm.models.support import NORMALIZER
from attnorm.normalizers.block import Block
from attnorm.normalizers.contract import Normalizer, ScaleRule


def dense_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Output (B, L, H, D) of a patched attention module that sees its whole causal sequence, without padding.

    Logits and weights are float32; half precision queries and keys enter the logits unrounded, also where matrix units
    read float32 as TF32, but for a scale rule's factors. The weights are rounded to the values' dtype, as fused
    kernels do.
    """
    normalizer = getattr(module, NORMALIZER)
    assert isinstance(normalizer, Normalizer)
    if attention_mask is not None or dropout or query.shape[1] != key.shape[1]:
        raise ValueError("dense training attention takes whole windows: no padding, dropout or grouped keys")
    dtype = _working_dtype(query)
    query, key, value = (t.to(dtype) for t in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    with torch.autocast(query.device.type, enabled=False):
        output = _weights(query.float() * scale, key.float(), normalizer).to(dtype) @ value
    return output.transpose(1, 2).contiguous(), None


def _weights(query: Tensor, key: Tensor, normalizer: Normalizer) -> Tensor:
    """(B, H, L, L). Scale rules in front multiply the queries: on the logits they would take two more passes over the
    matrix, one of them for the gradients of their own parameters."""
    place = torch.arange(query.shape[2], device=query.device)
    n = (place[:, None] + 1).to(query.dtype)
    rules = normalizer.rules
    while rules and isinstance(rules[0], ScaleRule):
        query, rules = rules[0].scaled(query, n, None, None), rules[1:]
    block = Block.of(query @ key.transpose(-1, -2), place[:, None] >= place)
    for rule in rules:
        block = block.with_logits(block.hide(rule(block)))
    for selection in normalizer.selections:
        block = block.narrowed(selection(block))
    weights: Tensor = normalizer.map(block) if normalizer.sink is None else normalizer.sink(block, normalizer.map)
    return block.hide(weights)


def _working_dtype(query: Tensor) -> torch.dtype:
    """Rotary embeddings leave float32 queries beside half precision values."""
    device = query.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
