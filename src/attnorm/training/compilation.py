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

from attnorm.normalizers.contract import Mechanism, Normalizer, ScaleRule
from attnorm.normalizers.registry import get
from attnorm.normalizers.softmax import Softmax
from attnorm.training.architectures import ARCHITECTURES
from attnorm.training.settings import Settings

Attention = Literal["engine", "dense"]
LARGEST_NUMBER_OF_GRAPHS = 64  # of one function; past it torch would go on uncompiled, and say so only in a log


def check_attention(attention: Attention, settings: Settings) -> None:
    """
    Raises:
        ValueError: Dense attention is asked of a mechanism, which has no matrix of weights.
    """
    if attention == "dense" and isinstance(get(settings.normalizer, **settings.normalizer_options), Mechanism):
        raise ValueError(
            f"dense attention multiplies values by a matrix of weights, and {settings.normalizer!r} is a mechanism "
            "that makes none; leave --dense (attention='dense') out"
        )


def compile_blocks(model: Any, settings: Settings) -> None:
    for block in ARCHITECTURES[settings.architecture].blocks(model):
        block.compile(dynamic=False)


@contextmanager
def in_training(model: Any, *, compiled: bool = False, attention: Attention = "engine") -> Iterator[None]:
    """While a model is trained: how its patched layers attend, and how many graphs may be compiled."""
    from transformers import AttentionInterface

    from attnorm.models import kernel
    from attnorm.models.attach import normalizer_of, patched_modules
    from attnorm.training.dense_attention import dense_attention

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
def without_compiled_blocks(model: Any, settings: Settings) -> Iterator[None]:
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
