"""Give mechanisms the layer input inside a patched attention module: `forget` and `differential_v2` need it.

Attention functions of transformers receive queries, keys and values, but not the hidden states. A forward pre-hook of
the attention module computes the log gates of the new tokens, or the second queries, and adds them to the arguments.

Decoding with a cache needs the gates of all earlier tokens. They are stored as additional columns of the values. So
everything that a cache does with values (reorder for beams, crop, repeat, slide) it also does with the gates. Columns
have the dtype of the values: in half precision a gate is split into its rounded value and the remainder.
"""

import inspect
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnorm.mechanisms.differential import DifferentialV2
from attnorm.mechanisms.forget import Forget
from attnorm.models.dispatch import running_normalizer
from attnorm.models.private_names import rotary_files
from attnorm.normalizers.contract import Mechanism

READ = "attnorm_read"  # name of the argument that the hook adds
HOOK = "attnorm_hook"  # attribute of a patched module that reads its input
INPUT, CACHE, ROTATION = "hidden_states", "past_key_values", "position_embeddings"
# Models whose queries are a projection of the input, with or without rotation, and no further step.
PLAIN_QUERIES = ("GPT2Attention", "LlamaAttention", "SmolLM3Attention")


class KeyGates:
    """Log gates of all keys, (B, H, K). Before the cache adds the earlier ones: gates of the new tokens only."""

    def __init__(self, log_gates: Tensor) -> None:
        self.log_gates = log_gates

    def columns(self, value_BGKE: Tensor) -> Tensor:
        """Return the gates as columns of values, (B, G, K, columns); a key head has those of its query heads."""
        by_head = self.log_gates.unflatten(1, (value_BGKE.shape[1], -1)).mT
        rounded: Tensor = by_head.to(value_BGKE.dtype)
        if rounded.dtype.itemsize >= by_head.dtype.itemsize:
            return rounded
        return torch.cat([rounded, (by_head - rounded).to(rounded.dtype)], -1)

    def read(self, columns: Tensor) -> None:
        """Read the gates of all keys from the columns that a cache returns."""
        heads, working = self.log_gates.shape[1] // columns.shape[1], self.log_gates.dtype
        parts = columns.to(device=self.log_gates.device, dtype=working).split(heads, -1)
        self.log_gates = torch.stack(parts).sum(0).mT.flatten(1, 2)


@dataclass(frozen=True)
class SecondQueries:
    query_BHQD: Tensor
    hidden_states: Tensor  # from which lambda is read

    def paired(self, query_BHQD: Tensor) -> Tensor:
        """Return first and second query of each head, alternating, (B, 2H, Q, D)."""
        return torch.stack([query_BHQD, self.query_BHQD.to(query_BHQD.dtype)], 2).flatten(1, 2)


class CacheWithGates:
    """Wraps the cache of a model for one attention module: stores the gates as additional columns of the values."""

    def __init__(self, cache: Any, gates: KeyGates) -> None:
        self._cache, self._gates = cache, gates

    def update(self, key: Tensor, value: Tensor, layer: int, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        width, columns = value.shape[-1], self._gates.columns(value)
        self._check(layer, width + columns.shape[-1])
        keys, values = self._cache.update(key, torch.cat([value, columns], -1), layer, *args, **options)
        self._gates.read(values[..., width:])
        return keys, values[..., :width]

    def _check(self, layer: int, expected: int) -> None:
        layers = getattr(self._cache, "layers", [])
        stored = getattr(layers[layer], "values", None) if layer < len(layers) else None
        if isinstance(stored, Tensor) and stored.dim() == 4 and stored.shape[-1] != expected:
            raise ValueError(
                f"expected a cache with {expected} columns of values in layer {layer}, of which the last ones are "
                f"forget gates, got {stored.shape[-1]}. Start with an empty cache: the model was patched, paused or "
                "unpatched since this one was filled, or its sizes were fixed in advance."
            )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def check_readable(module: nn.Module, mechanism: Forget | DifferentialV2, place: str) -> None:
    """Raise ValueError if the attention module does not pass its input on, or has another width."""
    parameters = inspect.signature(module.forward).parameters
    others = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    if INPUT not in parameters or not others:
        raise ValueError(
            f"{mechanism.name!r} with width= reads the layer's input, which {place} ({type(module).__name__}) does not "
            f"hand on: its forward has no {INPUT}= and **kwargs. Leave width= out, so that gates are learned per head."
        )
    if isinstance(mechanism, DifferentialV2) and type(module).__name__ not in PLAIN_QUERIES:
        raise ValueError(
            f"expected {', '.join(PLAIN_QUERIES)} for 'differential_v2', got {type(module).__name__} in {place}. "
            "Train a small model with it: attnorm train lm --normalizer differential_v2."
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
