"""Compiled blocks, with the attention of a replaced softmax beside the graphs where it brings kernels of its own.

A rescaled softmax is traced like the rest of a block, and so is every normalizer where the whole matrix of weights is
computed at once (`dense`). Otherwise they run on Triton kernels or FlexAttention, which are compiled already, or block
by block with a backward pass of its own: traced into the graph of a block they would be compiled twice, or unrolled. So
a graph ends before such an attention call and another begins after it.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attnorm.models.support import NORMALIZER
from attnorm.normalizers.block import Block
from attnorm.normalizers.contract import Mechanism, Normalizer, ScaleRule
from attnorm.normalizers.registry import get
from attnorm.normalizers.softmax import Softmax
from attnorm.training.lm.model import ARCHITECTURES
from attnorm.training.lm.settings import LMSettings

Attention = Literal["engine", "dense"]
LARGEST_NUMBER_OF_GRAPHS = 64  # of one function; past it torch would go on uncompiled, and say so only in a log


def check_attention(attention: Attention, settings: LMSettings) -> None:
    """
    Raises:
        ValueError: Dense attention is asked of a mechanism, which has no matrix of weights.
    """
    if attention == "dense" and isinstance(get(settings.normalizer, **settings.normalizer_options), Mechanism):
        raise ValueError(
            f"dense attention multiplies values by a matrix of weights, and {settings.normalizer!r} is a mechanism "
            "that makes none; leave --dense (attention='dense') out"
        )


def compile_blocks(model: Any, settings: LMSettings) -> None:
    for block in ARCHITECTURES[settings.architecture].blocks(model):
        block.compile(dynamic=False)


@contextmanager
def in_training(model: Any, *, compiled: bool = False, attention: Attention = "engine") -> Iterator[None]:
    """While a model is trained: how its patched layers attend, and how many graphs may be compiled."""
    from transformers import AttentionInterface

    from attnorm.models import kernel
    from attnorm.models.attach import normalizer_of, patched_modules

    normalizers = [normalizer_of(module) for module in patched_modules(model).values()]
    if attention == "dense":
        AttentionInterface.register(kernel.KERNEL, dense_attention)
    elif compiled and not all(_is_rescaled_softmax(normalizer) for normalizer in normalizers):
        AttentionInterface.register(kernel.KERNEL, torch.compiler.disable(kernel.patched_attention))
    try:
        with torch._dynamo.config.patch(recompile_limit=LARGEST_NUMBER_OF_GRAPHS) if compiled else nullcontext():
            yield
    finally:
        kernel.register()


@contextmanager
def without_compiled_blocks(model: Any, settings: LMSettings) -> Iterator[None]:
    """The blocks as written, for other shapes than in training: compiling for them would cost more than it saves.

    Nothing else is kept from compiling: FlexAttention uncompiled would hold all weights at once.
    """
    blocks = list(ARCHITECTURES[settings.architecture].blocks(model))
    compiled = [block._compiled_call_impl for block in blocks]
    for block in blocks:
        block._compiled_call_impl = None
    try:
        yield
    finally:
        for block, call in zip(blocks, compiled, strict=True):
            block._compiled_call_impl = call


def _is_rescaled_softmax(normalizer: Any) -> bool:
    return (
        isinstance(normalizer, Normalizer)
        and isinstance(normalizer.map, Softmax)
        and not normalizer.selections
        and all(isinstance(rule, ScaleRule) for rule in normalizer.rules)
    )


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
    position = torch.arange(query.shape[2], device=query.device)
    n = (position[:, None] + 1).to(query.dtype)
    rules = normalizer.rules
    while rules and isinstance(rules[0], ScaleRule):
        query, rules = rules[0].scaled(query, n, None, None), rules[1:]
    block = Block.of(query @ key.transpose(-1, -2), position[:, None] >= position)
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
