"""The attention function that transformers calls in a patched attention module.

The model still builds masks for its own attention implementation, and models/hf_call.py reads them accordingly. Masks
of flash and flex attention are rejected: they are not tensors over queries and keys.

Attention functions of transformers receive queries, keys and values only. `forget` and `differential_v2` also need the
input of the layer. For them a forward pre-hook of the attention module (`watch_input`) computes the log gates of the
new tokens, or the second queries, and adds them to the arguments.
"""

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from attnorm.attention import attend
from attnorm.engines.inputs import Inputs, autocast_dtype, in_dtype, validate_inputs
from attnorm.mechanisms.differential import DifferentialV2, SecondQueries
from attnorm.mechanisms.forget import CacheWithGates, Forget, KeyGates
from attnorm.models.dispatch import KERNEL as KERNEL
from attnorm.models.dispatch import MODEL_CONFIG, NORMALIZER, running_normalizer
from attnorm.models.hf_call import mask_as_given, read_call
from attnorm.models.layer_normalizer import ByHead
from attnorm.models.private_names import kernel_name, rotary_files
from attnorm.normalizers.block import Positions, is_exporting
from attnorm.normalizers.composition import check_plain_class
from attnorm.normalizers.contract import Mechanism, Normalizer, Sink

READABLE = ("sdpa", "eager")

READ = "attnorm_read"  # name of the argument that the hook adds
HOOK = "attnorm_hook"  # attribute of a patched module that reads its input
INPUT, CACHE, ROTATION = "hidden_states", "past_key_values", "position_embeddings"
# Models whose queries are a projection of the input, with or without rotation, and no further step.
PLAIN_QUERIES = ("GPT2Attention", "LlamaAttention", "SmolLM3Attention")


def register() -> None:
    """Register the function with transformers; a second call changes nothing."""
    AttentionInterface.register(KERNEL, patched_attention)
    # For modules that build a mask from their own config: without a mask function they would see future keys.
    AttentionMaskInterface.register(KERNEL, sdpa_mask)


def check_masks(module: nn.Module) -> str:
    """Return the attention implementation that this module's masks are built for.

    Raises:
        ValueError: attnorm cannot read masks of this implementation.
    """
    model_config: Any = getattr(module, MODEL_CONFIG, None)
    masks = kernel_name(module.config if model_config is None else model_config)
    if masks not in READABLE:
        raise ValueError(
            f"expected a model that runs 'sdpa' or 'eager', got {masks!r}, whose masks attnorm cannot read. Call "
            "model.set_attn_implementation('sdpa') first, or load the model with attn_implementation='sdpa' "
            "('eager' if it has no 'sdpa')."
        )
    return masks


def patched_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    output_attentions: bool | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return the output (B, Q, H, D), and the weights (B, H, Q, K) if output_attentions is true.

    The arguments are those that transformers passes to every attention function.
    """
    masks = check_masks(module)
    _reject_unreadable(module, attention_mask, options)
    call = read_call(KERNEL, module, query, key, value, attention_mask, masks=masks, read_mask=mask_as_given, **options)
    query, key, value = _to_common_dtype(call.query_BHQD, call.key_BGKD, call.value_BGKE)
    inputs = validate_inputs(query, key, value, mask=call.mask, causal=call.causal, scale=call.scale, positions=None)
    normalizer: Any = getattr(module, NORMALIZER)
    if isinstance(normalizer, Mechanism):
        output = _run_mechanism(normalizer, inputs, call.softcap, call.bias, options.get(READ))
        return output.transpose(1, 2).contiguous(), None
    bias = None if call.bias is None else call.bias.expand(*call.bias.shape[:2], inputs.queries, inputs.keys)
    positions = _positions_from_mask(normalizer, inputs)
    if call.dropout > 0 or any(option is not None for option in (call.softcap, bias, positions)):
        inputs = replace(inputs, softcap=call.softcap, bias=bias, dropout=call.dropout, positions=positions)
    if call.sinks_H is not None:
        normalizer = with_sinks(normalizer, call.sinks_H)
    output = in_dtype(attend(inputs, normalizer), query.dtype).transpose(1, 2).contiguous()
    return output, _compute_weights(inputs, normalizer) if output_attentions else None


def _reject_unreadable(module: nn.Module, mask: Tensor | None, options: Mapping[str, Any]) -> None:
    if options.get("cache") is not None:
        raise NotImplementedError(
            "expected no paged cache in a patched model, got one. Use generate() instead of continuous batching."
        )
    if options.get("block_indices") is not None:
        raise NotImplementedError(
            f"{type(module).__name__} chooses blocks of keys for each query (block_indices), which attnorm cannot "
            "read. Leave out the layers that choose, with layers=."
        )
    if mask is not None and mask.dim() != 4:
        raise ValueError(
            f"expected an attention mask of shape (batch, 1, queries, keys), got {tuple(mask.shape)}. Give the model a "
            "mask of shape (batch, keys); it builds the other one."
        )


class ModelSinks(Sink):
    """The model's own learned sinks, of all or some heads. Uses the model's parameter itself, which still trains."""

    def __init__(self, sinks_H: Tensor, heads: Sequence[int] | None = None) -> None:
        super(Sink, self).__init__()
        self.sinks_H = sinks_H
        self.heads = heads

    @property
    def logit(self) -> Tensor:  # type: ignore[override]
        return self.sinks_H if self.heads is None else self.sinks_H[list(self.heads)]


def with_sinks(normalizer: Normalizer, sinks_H: Tensor, heads: Sequence[int] | None = None) -> Normalizer:
    """Return the normalizer with the model's learned sinks.

    A normalizer with its own sink replaces the model's sinks. One that depends on the order of keys cannot have a sink.
    """
    map_ = normalizer.map
    if isinstance(map_, ByHead):
        rest = [head for head in range(sinks_H.shape[0]) if head not in map_.heads]
        changed, others = with_sinks(map_.chosen, sinks_H, map_.heads), with_sinks(map_.others, sinks_H, rest)
        return Normalizer(ByHead(changed, map_.heads, others), name=normalizer.name)
    if normalizer.sink is not None or not map_.properties.permutation_equivariant:
        return normalizer
    check_plain_class(normalizer)
    return Normalizer(
        map_,
        scale=normalizer.rules,
        select=normalizer.selections,
        sink=ModelSinks(sinks_H, heads),
        name=normalizer.name,
    )


def _to_common_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Convert the tensors to one dtype, as SDPA does under autocast; rotary embeddings may return float32 queries."""
    dtype = autocast_dtype(tensors[0].device) or tensors[-1].dtype
    return tuple(in_dtype(t, dtype) for t in tensors)


def _positions_from_mask(normalizer: Normalizer, inputs: Inputs) -> Positions | None:
    """Return the positions of queries and keys in a cache, for normalizers that depend on order or distance.

    The position of a query is that of the last key it sees. Counting from the last key of the cache would be wrong: a
    cache of fixed size has empty entries at its end.
    """
    if inputs.mask is None or inputs.queries == inputs.keys or _is_permutation_equivariant(normalizer):
        return None
    mask = inputs.mask[:, 0].expand(-1, inputs.queries, -1)
    last = inputs.keys - 1 - mask.flip(-1).byte().argmax(-1)
    first = mask.any(-2).byte().argmax(-1, keepdim=True)
    return Positions(last - first, torch.arange(inputs.keys, device=mask.device) - first)


def _is_permutation_equivariant(normalizer: Normalizer) -> bool:
    rules, selections = normalizer.rules, normalizer.selections
    by_parts = all(r.permutation_equivariant for r in rules) and all(s.permutation_equivariant for s in selections)
    return by_parts and normalizer.map.properties.permutation_equivariant


def _run_mechanism(mechanism: Any, inputs: Inputs, softcap: float | None, bias: Tensor | None, read: Any) -> Tensor:
    """Run a mechanism in a patched module. read: gates or second queries that `read_input` added, or None."""
    check_plain_logits(mechanism, softcap=softcap is not None, bias=bias is not None and bool(bias.any()))
    if is_exporting():
        raise NotImplementedError(
            f"expected a row normalizer in a model to export, got the mechanism {mechanism.name!r}, which reads "
            "the values of the mask. Export a model with a normalizer whose kind is row (attnorm normalizers "
            "lists them)."
        )
    if mechanism.needs_every_query and inputs.queries != inputs.keys:
        raise ValueError(
            f"{mechanism.name!r} needs every earlier query, got {inputs.queries} queries for {inputs.keys} keys. "
            "Run the model with use_cache=False."
        )
    mask = inputs.mask
    if mask is not None and torch.equal(mask, mask[:, :, :1].expand_as(mask)):
        mask = mask[:, :, :1]  # padding only: `soft` supports no other mask, and `linear` is linear in n only then
    q, k, v = inputs.q_BHQD, inputs.k_BGKD, inputs.v_BGKE
    options_of_call: dict[str, Any] = {"mask": mask, "causal": inputs.causal, "scale": inputs.scale}
    if isinstance(read, SecondQueries):
        output: Tensor = mechanism(read.paired(q), k, v, hidden_states=read.hidden_states, **options_of_call)
    elif isinstance(read, KeyGates):
        # A cache of fixed size has more keys than the tokens so far.
        output = mechanism.attend(q, k, v, log_gates=read.log_gates[..., : inputs.keys], **options_of_call)
    else:
        if mechanism.reads_hidden_states:
            raise ValueError(
                f"{mechanism.name!r} with width= needs the input of the layer, which this attention module does "
                "not pass to its attention function. Patch without width=, so that gates are learned per head."
            )
        output = mechanism(q, k, v, **options_of_call)
    return output


def _compute_weights(inputs: Inputs, normalizer: Normalizer) -> Tensor:
    """Return all weights (B, H, Q, K): the output for values that are the identity matrix."""
    identity = torch.eye(inputs.keys, dtype=inputs.v_BGKE.dtype, device=inputs.v_BGKE.device)
    values = identity.expand(*inputs.v_BGKE.shape[:2], -1, -1)
    return attend(replace(inputs, v_BGKE=values, dropout=0.0), normalizer)


def check_plain_logits(mechanism: Mechanism, *, softcap: bool, bias: bool) -> None:
    """Raise ValueError if the model caps logits or adds a bias to them, which a mechanism does not have."""
    if softcap or bias:
        feature = "a softcap" if softcap else "a position bias"
        raise ValueError(
            f"{mechanism.name!r} has no logits, to which the model's attention applies {feature}. Use a row "
            "normalizer (attnorm.available() lists all names), or a model without it."
        )


def check_readable(module: nn.Module, mechanism: Forget | DifferentialV2, place: str) -> None:
    """Raise ValueError if the attention module does not pass its input on, or has another width."""
    parameters = inspect.signature(module.forward).parameters
    others = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    if INPUT not in parameters or not others:
        raise ValueError(
            f"{mechanism.name!r} with width= needs the input of the layer, which {place} "
            f"({type(module).__name__}) does not pass on: its forward has no {INPUT}= and **kwargs. Leave width= "
            "out, so that gates are learned per head."
        )
    if isinstance(mechanism, DifferentialV2) and type(module).__name__ not in PLAIN_QUERIES:
        raise ValueError(
            f"expected {', '.join(PLAIN_QUERIES)} for 'differential_v2', got {type(module).__name__} in {place}. "
            "Train a small model with it: attnorm lab train lm --normalizer differential_v2."
        )
    if isinstance(mechanism, DifferentialV2) and mechanism.head_width != (wide := getattr(module, "head_dim", None)):
        raise ValueError(f"expected head_width={wide}, that of {place}, got head_width={mechanism.head_width}.")
    projection = getattr(module, "q_proj", None)
    wide = getattr(projection, "in_features", None) or getattr(module.config, "hidden_size", None)
    if mechanism.width != wide:
        raise ValueError(f"expected width={wide}, that of the input of {place}, got width={mechanism.width}.")


def read_input(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
    """Forward pre-hook of an attention module: add what its mechanism reads, and wrap the cache."""
    names = inspect.signature(module.forward).parameters
    arguments = {**dict(zip(names, args, strict=False)), **options}
    mechanism: Any = running_normalizer(module)
    if mechanism is None:  # paused
        return (), arguments
    if isinstance(mechanism, DifferentialV2):
        query = _rotated(module, mechanism.second_queries(arguments[INPUT]), arguments.get(ROTATION))
        return (), {**arguments, READ: SecondQueries(query, arguments[INPUT])}
    gates = KeyGates(mechanism.log_gates(arguments[INPUT]))
    cache = arguments.get(CACHE)
    if cache is not None:
        if hasattr(cache, "self_attention_cache") or "Quantized" in type(cache).__name__:
            raise NotImplementedError(
                f"forget gates cannot be kept in a {type(cache).__name__}. Use a DynamicCache, or use_cache=False."
            )
        arguments[CACHE] = CacheWithGates(cache, gates)
    return (), {**arguments, READ: gates}


def _rotated(module: nn.Module, query: Tensor, rotation: Any) -> Tensor:
    if rotation is None or not getattr(module, "use_rope", True):  # learned positions, or none
        return query
    rotate = rotary_files([module])[sys.modules[type(module).__module__]]
    rotated: Tensor = rotate(query, query, *rotation)[0]
    return rotated


def watch_input(module: nn.Module) -> None:
    """Register the hook on a patched module, if its normalizer reads the layer input."""
    mechanism = running_normalizer(module)
    if isinstance(mechanism, Mechanism) and mechanism.reads_hidden_states:
        setattr(module, HOOK, module.register_forward_pre_hook(read_input, with_kwargs=True))


def unwatch_input(module: nn.Module) -> None:
    hook = getattr(module, HOOK, None)
    if hook is not None:
        hook.remove()
        delattr(module, HOOK)
