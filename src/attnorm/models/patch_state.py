"""The state of a patched model: what hangs on its attention modules, and how it comes off again.

    attnorm_normalizer     a submodule: its parameters train, move and are saved with the model
    attnorm_recipe         how it was made
    attnorm_model_config   the config that the model goes by; the module's own is meanwhile a copy that names our kernel

Nothing else changes: the model's config, its masks and its other layers stay as they were, and a call to
set_attn_implementation reaches only those. Everything is found on the modules themselves, so that a copy of a patched
model is a patched model, and patches of different modules know nothing of each other.
"""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from attnorm.models.dispatch import KERNEL, MODEL_CONFIG, NORMALIZER
from attnorm.models.patched_attention import check_masks, register
from attnorm.normalizers.contract import Mechanism, Normalizer

RECIPE = "attnorm_recipe"


@dataclass(frozen=True)
class Recipe:
    """How a module's normalizer was made; `name` is None where the user gave an object."""

    name: str | None
    options: dict[str, Any] = field(default_factory=dict)
    heads: tuple[int, ...] | None = None  # those that have it; None: all

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A pickled model may wake up in a process that never patched one."""
        vars(self).update(state)
        _prepare()


def is_patched(module: nn.Module) -> bool:
    return hasattr(module, NORMALIZER)


def patched_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The patched attention modules by path."""
    return {path: module for path, module in model.named_modules() if is_patched(module)}


def normalizer_of(module: nn.Module) -> Normalizer | Mechanism:
    normalizer = getattr(module, NORMALIZER)
    assert isinstance(normalizer, Normalizer | Mechanism)
    return normalizer


def recipe_of(module: nn.Module) -> Recipe:
    recipe: Recipe = getattr(module, RECIPE)
    return recipe


def attach(parts: dict[nn.Module, tuple[Normalizer | Mechanism, Recipe]]) -> None:
    """Hangs normalizers on attention modules; nothing is changed where one of them cannot have it."""
    for module in parts:
        check_masks(module)
    _prepare()
    copies: dict[int, Any] = {}  # one for all layers that share a config: they are compiled once
    for module, (normalizer, recipe) in parts.items():
        config: Any = module.config
        if id(config) not in copies:
            copies[id(config)] = copy.copy(config)
            copies[id(config)]._attn_implementation_internal = KERNEL
        setattr(module, NORMALIZER, normalizer.train(module.training))
        setattr(module, RECIPE, recipe)
        setattr(module, MODEL_CONFIG, config)
        module.config = copies[id(config)]


def detach(modules: Iterable[nn.Module]) -> None:
    """Takes them off; modules that have none stay as they are."""
    for module in modules:
        if is_patched(module):
            module.config = getattr(module, MODEL_CONFIG)
            for name in (NORMALIZER, RECIPE, MODEL_CONFIG):
                delattr(module, name)


@contextmanager
def without(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, patched modules run as they did before; what they learned stays on them."""
    ours = {module: (module.config, normalizer_of(module)) for module in modules}
    for module in ours:
        module.config = getattr(module, MODEL_CONFIG)
    try:
        yield
    finally:
        for module, (config, normalizer) in ours.items():
            if getattr(module, NORMALIZER, None) is normalizer:  # not taken off meanwhile
                module.config = config


def _prepare() -> None:
    """What a process needs in which there is a patched model."""
    from attnorm.models.ordinary_saves import keep_when_saved  # which imports this module

    register()
    keep_when_saved()


def device_of(module: nn.Module) -> torch.device:
    """Where the module computes: weights that accelerate offloads are elsewhere in between."""
    hooks = [getattr(part, "_hf_hook", None) for part in module.modules()]
    placed = [device for hook in hooks if (device := getattr(hook, "execution_device", None)) is not None]
    devices = [torch.device(device) for device in placed] or [weight.device for weight in module.parameters()]
    found = next((device for device in devices if device.type != "meta"), None)
    if devices and found is None:
        raise ValueError(
            "the model is on the meta device, where weights have no values, and to_empty() would overwrite those of a "
            "normalizer; load the weights first, then patch"
        )
    return found or torch.device("cpu")
