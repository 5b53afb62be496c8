"""Attention during training: compiled blocks, and dense attention over the whole matrix of weights.

A rescaled softmax is traced with the rest of a block. So is a normalizer on our Triton kernels, which are operators of
the graph, and every normalizer with dense attention. Otherwise attention runs block by block with its own
backward pass, which the graph would unroll, so it is split around the call.

Where a normalizer has no fused form, dense attention is its fastest form at training lengths: at a thousand tokens the
matrix of a layer is a few gigabytes, and a normalizer becomes one or two kernels over whole rows. For longer sequences
use the engines, which never hold the matrix.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attnorm.attention import choose_engine
from attnorm.engines.execution import MIN_QUERIES
from attnorm.engines.inputs import autocast_dtype, validate_inputs
from attnorm.mechanisms.linear import Linear
from attnorm.mechanisms.soft import Gaussian, Soft
from attnorm.models.dispatch import NORMALIZER
from attnorm.models.layer_normalizer import USUAL_LENGTH, build
from attnorm.models.private_names import replace_compiled_call
from attnorm.normalizers.block import Block
from attnorm.normalizers.contract import Mechanism, Normalizer, ScaleRule
from attnorm.normalizers.declaration import LayerFacts
from attnorm.normalizers.registry import get
from attnorm.normalizers.softmax import Softmax
from attnorm.normalizers.spec import parse_spec
from attnorm_lab.training.lm.model import ARCHITECTURES, DTYPES, LMSettings, with_sizes

Attention = Literal["engine", "dense"]
LARGEST_NUMBER_OF_GRAPHS = 64  # of one function; beyond it torch continues uncompiled and only logs it


def check_attention(attention: Attention, settings: LMSettings) -> None:
    """Check that dense attention is possible with this normalizer.

    Raises:
        ValueError: The normalizer is a mechanism, which has no matrix of weights.
    """
    for name, options in settings.normalizers if attention == "dense" else ():
        if isinstance(get(name, **with_sizes(name, options, settings)), Mechanism):
            raise ValueError(
                f"--dense: expected a row normalizer, got the mechanism {name!r}, which has no matrix of "
                "weights. Remove --dense (attention='dense')."
            )


def compile_blocks(model: Any, settings: LMSettings, *, any_length: bool = False) -> None:
    """Compile the blocks of the model. any_length: a few graphs for all shapes, instead of one graph per shape."""
    for block in ARCHITECTURES[settings.architecture].blocks(model):
        block.compile(dynamic=None if any_length else False)  # None: sizes that change between calls become variables


@contextmanager
def in_training(
    model: Any, *, compiled: bool = False, attention: Attention = "engine", dtype: str | None = None
) -> Iterator[None]:
    """Set how patched layers compute attention while a model is trained, and how many graphs may be compiled.

    dtype: dtype of the products, if known.
    """
    from transformers import AttentionInterface

    from attnorm.models.patched_attention import KERNEL, patched_attention, register

    if attention == "dense":
        AttentionInterface.register(KERNEL, dense_attention)
    elif compiled and not is_traceable(model, dtype):
        AttentionInterface.register(KERNEL, torch.compiler.disable(patched_attention))
    try:
        with torch._dynamo.config.patch(recompile_limit=LARGEST_NUMBER_OF_GRAPHS) if compiled else nullcontext():
            yield
    finally:
        register()


def is_traceable(model: Any, dtype: str | None = None) -> bool:
    """Whether every layer's attention can be part of a compiled block: a rescaled softmax, our kernels, or sums.

    dtype: dtype of the products; None: any of DTYPES.
    """
    from attnorm.models.patch_state import normalizer_of, patched_modules

    normalizers = (normalizer_of(module) for module in patched_modules(model).values())
    config, device = model.config, next(model.parameters()).device
    width = config.hidden_size // config.num_attention_heads
    dtypes = DTYPES if dtype is None else (dtype,)
    return all(
        isinstance(normalizer, Linear | Soft)
        or _is_rescaled_softmax(normalizer)
        or _runs_on_kernels(normalizer, width, device, dtypes)
        for normalizer in normalizers
    )


def fastest_attention(normalizer: str, device: torch.device, width: int = 64) -> Attention:
    """Return "dense" unless there is a fused form: of a rescaled softmax, of a mechanism, or one of our GPU kernels.

    normalizer: specification, such as `topk:k=4`. width: width of a head. On a GPU, products are in bfloat16.
    """
    name, options = parse_spec(normalizer)
    built, _ = build(name, options, LayerFacts(heads=2, length=USUAL_LENGTH), warm=False)
    fused = (
        isinstance(built, Mechanism)
        or _is_rescaled_softmax(built)
        or _runs_on_kernels(built, width, device, DTYPES[-1:])
    )
    return "engine" if fused else "dense"


@contextmanager
def without_compiled_blocks(model: Any, settings: LMSettings) -> Iterator[None]:
    """Run the blocks uncompiled, for shapes other than in training, where compiling costs more than it saves."""
    blocks = list(ARCHITECTURES[settings.architecture].blocks(model))
    compiled = [replace_compiled_call(block, None) for block in blocks]
    try:
        yield
    finally:
        for block, call in zip(blocks, compiled, strict=True):
            replace_compiled_call(block, call)


def _is_rescaled_softmax(normalizer: Any) -> bool:
    return (
        isinstance(normalizer, Normalizer)
        and type(normalizer.map) is Softmax
        and normalizer.has_known_parts()
        and not normalizer.selections
        and all(isinstance(rule, ScaleRule) for rule in normalizer.rules)
    )


def _runs_on_kernels(normalizer: Any, width: int, device: torch.device, dtypes: Sequence[str]) -> bool:
    if not isinstance(normalizer, Normalizer | Gaussian) or device.type != "cuda":
        return False
    for dtype in dtypes:
        q = torch.empty((1, 1, MIN_QUERIES, width), dtype=getattr(torch, dtype), device=device)
        inputs = validate_inputs(q, q, q, mask=None, causal=True, scale=None, positions=None)
        if isinstance(normalizer, Gaussian):
            takes = normalizer.kernel_products(inputs) is not None
        else:
            takes = choose_engine(inputs, normalizer) in ("triton", "sparse")
        if not takes:
            return False
    return True


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
    """Return the output (B, L, H, D) of a patched attention module for whole causal sequences without padding.

    Logits and weights are float32. Half precision queries and keys enter the logits exactly, even with TF32, except for
    the factors of a scale rule. The weights are rounded to the values' dtype, as in fused kernels.
    """
    normalizer = getattr(module, NORMALIZER)
    assert isinstance(normalizer, Normalizer)
    if attention_mask is not None or dropout:
        raise ValueError(
            "expected whole windows without padding, mask and dropout for dense attention in training, got others. "
            "Use the default engine."
        )
    dtype = _working_dtype(query)
    if query.shape[1] != key.shape[1]:  # several query heads share a key head
        shared_by = query.shape[1] // key.shape[1]
        key, value = (t.repeat_interleave(shared_by, dim=1) for t in (key, value))
    query, key, value = (t.to(dtype) for t in (query, key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    with torch.autocast(query.device.type, enabled=False):
        output = _weights(query.float() * scale, key.float(), normalizer).to(dtype) @ value
    return output.transpose(1, 2).contiguous(), None


def _weights(query: Tensor, key: Tensor, normalizer: Normalizer) -> Tensor:
    """Return the weights (B, H, L, L).

    Leading scale rules multiply the queries. On the logits they would need two more passes over the matrix, one of them
    for the gradients of their parameters.
    """
    position = torch.arange(query.shape[2], device=query.device)
    visible = position[:, None] >= position
    if not normalizer.has_known_parts():
        return normalizer.weights(Block.of(query @ key.transpose(-1, -2), visible))
    n = (position[:, None] + 1).to(query.dtype)
    rules = normalizer.rules
    while rules and isinstance(rules[0], ScaleRule):
        query, rules = rules[0].scaled(query, n, None, None), rules[1:]
    block = Block.of(query @ key.transpose(-1, -2), visible)
    for rule in rules:
        block = block.with_logits(block.hide(rule(block)))
    for selection in normalizer.selections:
        block = block.narrowed(selection(block))
    weights: Tensor = normalizer.map(block) if normalizer.sink is None else normalizer.sink(block, normalizer.map)
    return block.hide(weights)


def _working_dtype(query: Tensor) -> torch.dtype:
    """Return the dtype of the products; rotary embeddings make queries float32 even under autocast."""
    return autocast_dtype(query.device) or query.dtype
