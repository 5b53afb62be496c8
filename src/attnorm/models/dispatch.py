"""Find the modules of a model that compute attention through transformers' attention interface; number their layers.

The code of such a class contains `ALL_ATTENTION_FUNCTIONS.get_interface(...)`, so we need no list of model families.

Words of this package: a *site* is an attention module of a model. A *stack* is a sequence of sites whose paths differ
in a number only. A *kernel* is the attention implementation that transformers runs ("sdpa", "eager", or ours).

The layer index is the model's own `layer_idx` if every module of a stack has a different one (layers without attention
leave a gap); otherwise it is the order of calls. A second stack of one kind (a text and an image encoder) continues the
indices of the first. A looped model, which runs one module several times in a forward pass, gets new indices each time.
"""

import inspect
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import transformers
from torch import nn

from attnorm.metrics.call import Kind
from attnorm.models.private_names import (
    GET_INTERFACE,
    INTERFACE,
    is_context_parallel,
    is_tensor_parallel,
    kernel_name,
)
from attnorm.normalizers.contract import Mechanism

# Attributes of a patched attention module: its normalizer, and the config of its model. `module.config` is then a copy
# that names our kernel (models/patch_state.py).
NORMALIZER = "attnorm_normalizer"
MODEL_CONFIG = "attnorm_model_config"
KERNEL = "attnorm_patched"
# Model families that an error message names first, if this version of transformers has them.
FAMILIAR = "llama mistral qwen3 gemma2 gemma3 gpt_oss gpt2 gpt_neox opt phi3 bert modernbert t5 bart whisper vit clip"


class UnsupportedModel(ValueError):  # noqa: N818 - says what is wrong; that it is an error, ValueError says
    """Raised for a model whose attention calls attnorm cannot observe or cannot measure correctly."""


@dataclass(frozen=True)
class Site:
    """One attention module of a model."""

    path: str
    stack: str  # its path with * for numbers, the same for all modules of a stack
    layer_index: int | None  # the model's own layer_idx, if it can be used


def attention_sites(model: nn.Module) -> dict[nn.Module, Site]:
    """Return every module that computes attention through the interface, in the order of the model."""
    paths = {module: path for path, module in model.named_modules() if _is_observable(module)}
    indices: dict[str, list[Any]] = {}
    for module, path in paths.items():
        indices.setdefault(_stack_name(path), []).append(getattr(module, "layer_idx", None))
    numbered = {
        stack
        for stack, stack_indices in indices.items()
        if None not in stack_indices and len({*stack_indices}) == len(stack_indices)
    }
    return {
        module: Site(
            path, _stack_name(path), getattr(module, "layer_idx", None) if _stack_name(path) in numbered else None
        )
        for module, path in paths.items()
    }


def check_model(model: object) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    named = f"; load it first: transformers.AutoModelForCausalLM.from_pretrained({model!r})"
    raise TypeError(f"expected a model, got {model!r}{named if isinstance(model, str) else ''}")


def check_observable(model: object) -> None:
    """Raise UnsupportedModel if no attention module can be observed; the message lists families that work.

    Also raises it if a process sees only a part of the heads or of the keys: heads would have wrong indices.
    """
    if any(map(_is_observable, check_model(model).modules())):
        _reject_partial_heads(model)
        return
    kind = getattr(getattr(model, "config", None), "model_type", None)
    raise UnsupportedModel(
        f"{type(model).__name__}{f' (model type {kind!r})' if kind else ''} does not compute attention through "
        "transformers' attention interface, so that attnorm cannot observe it. If its attention is written by hand, "
        "docs/how-to/replace-sdpa.md shows how to replace softmax, and docs/own-models.md how to measure it. "
        f"{describe_support()}"
    )


def check_has_rows(model: nn.Module) -> None:
    """Raise UnsupportedModel if a layer runs a mechanism, which has no rows of logits that could be measured."""
    running = {path: running_normalizer(module) for path, module in model.named_modules()}
    mechanisms = {path: part.name for path, part in running.items() if isinstance(part, Mechanism)}
    if mechanisms:
        path, name = next(iter(mechanisms.items()))
        others = f" ({len(mechanisms)} layers run a mechanism)" if len(mechanisms) > 1 else ""
        raise UnsupportedModel(
            f"{path}: expected softmax or another row normalizer, got the mechanism {name!r}, which has no rows of "
            f"logits to measure{others}. Measure another model, or other normalizers on the queries and keys of this "
            "one: normalizers='softmax' (--normalizers softmax)."
        )


def _reject_partial_heads(model: Any) -> None:
    if is_tensor_parallel(model):
        raise UnsupportedModel(
            "expected a model whose processes hold all heads, got one with tensor parallelism: each process has "
            "a part of the heads, with other indices. Load it with device_map='auto' (--device auto) instead of "
            "tp_plan."
        )
    if is_context_parallel():
        raise UnsupportedModel(
            "expected whole sequences, got context parallelism: each process has a part of the keys. Measure "
            "outside of context_parallel(), with device_map='auto' (--device auto) if the model needs several "
            "GPUs."
        )


def mask_kernel(module: nn.Module, kernel: str) -> str:
    """Return the kernel that the model builds an attention module's masks for. `kernel` is the one that it runs."""
    config = getattr(module, MODEL_CONFIG, None)
    return kernel if config is None else kernel_name(config)


def is_paused(module: nn.Module) -> bool:
    """Whether an attention module is patched, but runs as before because it uses its model's config."""
    config = getattr(module, MODEL_CONFIG, None)
    return config is not None and module.config is config


def running_normalizer(module: nn.Module) -> Any:
    """Return the normalizer that currently replaces softmax in an attention module; None for softmax."""
    return None if is_paused(module) else getattr(module, NORMALIZER, None)


def describe_support() -> str:
    families = supported_families()
    familiar = [name for name in FAMILIAR.split() if name in families]
    return (
        f"Models of {len(families)} families can be measured with transformers {transformers.__version__}: "
        f"{', '.join(familiar)} and others (attnorm.models.dispatch.supported_families() names all)"
    )


@cache
def supported_families() -> tuple[str, ...]:
    """Return the model families of the installed transformers that can be observed, from its source files."""
    root = Path(transformers.__file__).parent / "models"
    asks = f"{INTERFACE}.{GET_INTERFACE}("
    families = {path.parent.name for path in root.glob("*/modeling_*.py") if asks in path.read_text(encoding="utf-8")}
    return tuple(sorted(families))


def _is_observable(module: nn.Module) -> bool:
    return _class_dispatches(type(module))  # type: ignore[arg-type] # a class can be hashed


@cache  # reading the code of every class takes longer than measuring a small model
def _class_dispatches(module_class: type[nn.Module]) -> bool:
    """Whether a method of the class or of a base class calls the attention interface."""
    members = [member for parent in module_class.__mro__ for member in vars(parent).values()]
    return any(inspect.isfunction(member) and _names_interface(inspect.unwrap(member).__code__) for member in members)


def _names_interface(code: CodeType) -> bool:
    return any({INTERFACE, GET_INTERFACE} <= {*part.co_names} for part in _nested_code(code))


def _nested_code(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested_code(constant)


def _stack_name(path: str) -> str:
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path)


class LayerNumbers:
    """Assigns a layer index to every attention call, from the order in which modules run."""

    def __init__(self, sites: Mapping[nn.Module, Site]) -> None:
        self._sites = sites
        self._indices: dict[str, set[int]] = {}  # stack -> layer indices within it
        for site in sites.values():
            indices = self._indices.setdefault(site.stack, set())
            indices.add(len(indices) if site.layer_index is None else site.layer_index)
        self._order: Counter[str] = Counter()  # stack -> calls so far in this forward pass
        self._times: Counter[nn.Module] = Counter()  # module -> calls so far in this forward pass
        self._offsets: dict[tuple[Kind, str], int] = {}
        self._extra: dict[tuple[Kind, str, int], int] = {}
        self._taken: dict[Kind, set[int]] = {}

    def restart(self, modules: Iterable[nn.Module]) -> None:
        """Reset the counts of these modules: a forward pass of the model that contains them starts."""
        for module in modules:
            self._order.pop(self._sites[module].stack, None)
            self._times.pop(module, None)

    def enter(self, module: nn.Module) -> int:
        """Return the layer index within its stack, for a call that starts."""
        site = self._sites[module]
        order, times = self._order[site.stack], self._times[module]
        self._order[site.stack] += 1
        self._times[module] += 1
        if site.layer_index is None:
            return order
        return site.layer_index + times * (max(self._indices[site.stack]) + 1)

    def within_kind(self, module: nn.Module, kind: Kind, own: int) -> int:
        """Return the layer index among all layers of a kind; own: the index within its stack."""
        stack = self._sites[module].stack
        indices, used_indices = self._indices[stack], self._taken.setdefault(kind, set())
        if (kind, stack) not in self._offsets:
            self._offsets[kind, stack] = max(used_indices) + 1 if used_indices & indices else 0
            used_indices |= {index + self._offsets[kind, stack] for index in indices}
        if own in indices:
            return own + self._offsets[kind, stack]
        if (kind, stack, own) not in self._extra:
            self._extra[kind, stack, own] = max(used_indices) + 1
            used_indices.add(self._extra[kind, stack, own])
        return self._extra[kind, stack, own]
