"""Which models can be watched: those whose attention asks transformers' attention interface for its kernel.

A class shows it in its own code (`ALL_ATTENTION_FUNCTIONS.get_interface(...)`), so nothing here is a list to keep.
"""

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any

import transformers
from torch import nn

INTERFACE = "ALL_ATTENTION_FUNCTIONS"
ASKED_FOR = "get_interface"
# What a patched attention module has: what replaces softmax, the config that its model goes by (its own is a copy that
# names our kernel), and how that kernel is called.
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
    """Raises UnsupportedModel, with the families that work, where no attention module can be watched."""
    if any(map(_watchable, check_model(model).modules())):
        return
    kind = getattr(getattr(model, "config", None), "model_type", None)
    raise UnsupportedModel(
        f"{type(model).__name__}{f' (model type {kind!r})' if kind else ''} does not compute attention through "
        f"transformers' attention interface, so attnorm cannot see it. {what_works()}"
    )


def mask_kernel(module: nn.Module, kernel: str) -> str:
    """The kernel that the model builds an attention module's masks for; `kernel` is the one that runs there."""
    config = getattr(module, MODEL_CONFIG, None)
    return kernel if config is None else config._attn_implementation or "eager"


def is_paused(module: nn.Module) -> bool:
    """Whether an attention module is patched and goes by its model's config all the same: it runs as before."""
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
    asks = f"{INTERFACE}.{ASKED_FOR}("
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
    return any({INTERFACE, ASKED_FOR} <= {*part.co_names} for part in _nested(code))


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _stack(path: str) -> str:
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path)
