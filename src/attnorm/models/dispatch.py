"""Which modules of a model compute attention through transformers' attention interface, and their layer indices.

A class shows it in its own code (`ALL_ATTENTION_FUNCTIONS.get_interface(...)`), so no list of families is kept here.

The layer index is the model's own `layer_idx` where every module of a stack has a different one (layers without
attention leave a gap), else the order of calls. A second stack of one kind (a text and an image encoder) continues the
first one's indices. A looped model, which runs one module several times in a forward pass, gets new indices each time.
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

# Attributes of a patched attention module: its normalizer, and the config of its model; its own config is a copy that
# names our kernel.
NORMALIZER = "attnorm_normalizer"
MODEL_CONFIG = "attnorm_model_config"
KERNEL = "attnorm_patched"
# Shown first in an error, where this version of transformers has them.
FAMILIAR = "llama mistral qwen3 gemma2 gemma3 gpt_oss gpt2 gpt_neox opt phi3 bert modernbert t5 bart whisper vit clip"


class UnsupportedModel(ValueError):  # noqa: N818 - says what is wrong; that it is an error, ValueError says
    """Raised for a model whose attention cannot be watched, or is none that attnorm knows how to measure."""


@dataclass(frozen=True)
class Site:
    """One attention module of a model."""

    path: str
    stack: str  # its path without numbers: modules that follow each other have the same one
    layer_index: int | None  # what the model calls it


def attention_sites(model: nn.Module) -> dict[nn.Module, Site]:
    """Every module that asks the interface for its kernel, in the model's order."""
    paths = {module: path for path, module in model.named_modules() if _watchable(module)}
    indices: dict[str, list[Any]] = {}
    for module, path in paths.items():
        indices.setdefault(_stack(path), []).append(getattr(module, "layer_idx", None))
    numbered = {stack for stack, found in indices.items() if None not in found and len({*found}) == len(found)}
    return {
        module: Site(path, _stack(path), getattr(module, "layer_idx", None) if _stack(path) in numbered else None)
        for module, path in paths.items()
    }


def check_model(model: object) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    named = f"; load it first: transformers.AutoModelForCausalLM.from_pretrained({model!r})"
    raise TypeError(f"expected a model, got {model!r}{named if isinstance(model, str) else ''}")


def check_observable(model: object) -> None:
    """Raises UnsupportedModel, with the families that work, where no attention module can be watched.

    Also where a process sees only a part of the heads or of the keys: its numbers would be those of other heads.
    """
    if any(map(_watchable, check_model(model).modules())):
        _reject_partial_heads(model)
        return
    kind = getattr(getattr(model, "config", None), "model_type", None)
    raise UnsupportedModel(
        f"{type(model).__name__}{f' (model type {kind!r})' if kind else ''} does not compute attention through "
        f"transformers' attention interface, so attnorm cannot see it. {what_works()}"
    )


def _reject_partial_heads(model: Any) -> None:
    if is_tensor_parallel(model):
        raise UnsupportedModel(
            "expected a model whose processes hold all heads, got one with tensor parallelism: each process sees a "
            "part of the heads under other numbers. Load it with device_map='auto' (--device auto) instead of tp_plan."
        )
    if is_context_parallel():
        raise UnsupportedModel(
            "expected whole sequences, got context parallelism: each process sees a part of the keys. Measure outside "
            "of context_parallel(), with device_map='auto' (--device auto) if the model needs several GPUs."
        )


def mask_kernel(module: nn.Module, kernel: str) -> str:
    """The kernel that the model builds an attention module's masks for; `kernel` is the one that runs there."""
    config = getattr(module, MODEL_CONFIG, None)
    return kernel if config is None else kernel_name(config)


def is_paused(module: nn.Module) -> bool:
    """Whether an attention module is patched but uses its model's config, so that it runs as before."""
    config = getattr(module, MODEL_CONFIG, None)
    return config is not None and module.config is config


def running_normalizer(module: nn.Module) -> Any:
    """What takes softmax's place in an attention module as it runs now; None where nothing does."""
    return None if is_paused(module) else getattr(module, NORMALIZER, None)


def what_works() -> str:
    families = supported_families()
    familiar = [name for name in FAMILIAR.split() if name in families]
    return (
        f"Models of {len(families)} families can be measured with transformers {transformers.__version__}: "
        f"{', '.join(familiar)} and others (attnorm.models.dispatch.supported_families() names all)"
    )


@cache
def supported_families() -> tuple[str, ...]:
    """The families of the installed transformers that can be watched, read from its source files."""
    root = Path(transformers.__file__).parent / "models"
    asks = f"{INTERFACE}.{GET_INTERFACE}("
    found = {path.parent.name for path in root.glob("*/modeling_*.py") if asks in path.read_text(encoding="utf-8")}
    return tuple(sorted(found))


def _watchable(module: nn.Module) -> bool:
    return _dispatches(type(module))  # type: ignore[arg-type] # a class can be hashed


@cache  # reading the code of every class takes longer than measuring a small model
def _dispatches(module_class: type[nn.Module]) -> bool:
    """Whether a method of the class, or of one it inherits from, asks the interface."""
    members = [member for parent in module_class.__mro__ for member in vars(parent).values()]
    return any(inspect.isfunction(member) and _asks(inspect.unwrap(member).__code__) for member in members)


def _asks(code: CodeType) -> bool:
    return any({INTERFACE, GET_INTERFACE} <= {*part.co_names} for part in _nested(code))


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _stack(path: str) -> str:
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path)


class LayerNumbers:
    """Layer indices of attention modules, from the order in which they run."""

    def __init__(self, sites: Mapping[nn.Module, Site]) -> None:
        self._sites = sites
        self._indices: dict[str, set[int]] = {}  # of each stack, in its own numbers
        for site in sites.values():
            indices = self._indices.setdefault(site.stack, set())
            indices.add(len(indices) if site.layer_index is None else site.layer_index)
        self._order: Counter[str] = Counter()  # of the calls of a stack in this forward
        self._times: Counter[nn.Module] = Counter()
        self._offsets: dict[tuple[Kind, str], int] = {}
        self._extra: dict[tuple[Kind, str, int], int] = {}
        self._taken: dict[Kind, set[int]] = {}

    def restart(self, modules: Iterable[nn.Module]) -> None:
        """A forward of the model that holds these begins."""
        for module in modules:
            self._order.pop(self._sites[module].stack, None)
            self._times.pop(module, None)

    def enter(self, module: nn.Module) -> int:
        """Its number within its stack, for the call that begins."""
        site = self._sites[module]
        order, times = self._order[site.stack], self._times[module]
        self._order[site.stack] += 1
        self._times[module] += 1
        if site.layer_index is None:
            return order
        return site.layer_index + times * (max(self._indices[site.stack]) + 1)

    def within_kind(self, module: nn.Module, kind: Kind, own: int) -> int:
        """The number within its kind, from the one within its stack."""
        stack = self._sites[module].stack
        indices, taken = self._indices[stack], self._taken.setdefault(kind, set())
        if (kind, stack) not in self._offsets:
            self._offsets[kind, stack] = max(taken) + 1 if taken & indices else 0
            taken |= {index + self._offsets[kind, stack] for index in indices}
        if own in indices:
            return own + self._offsets[kind, stack]
        if (kind, stack, own) not in self._extra:
            self._extra[kind, stack, own] = max(taken) + 1
            taken.add(self._extra[kind, stack, own])
        return self._extra[kind, stack, own]
