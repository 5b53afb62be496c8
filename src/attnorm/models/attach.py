"""The state of a patched model: what hangs on its attention modules, and how it comes off again.

    attnorm_normalizer   a submodule: its parameters train, move and are saved with the model
    attnorm_recipe       how it was made, and which kernel was there before

Everything is found on the modules themselves, so that a copy of a patched model is a patched model.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from attnorm.models import kernel
from attnorm.models.observe import NORMALIZER
from attnorm.normalizers.contract import Mechanism, Normalizer

RECIPE = "attnorm_recipe"


@dataclass(frozen=True)
class Recipe:
    """How a module's normalizer was made; `name` is None where the user gave an object."""

    name: str | None
    options: dict[str, Any] = field(default_factory=dict)
    heads: tuple[int, ...] | None = None  # those that have it; None: all


@dataclass(frozen=True)
class _Attached:
    recipe: Recipe
    former_kernel: str | None


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
    attached: _Attached = getattr(module, RECIPE)
    return attached.recipe


def attach(model: nn.Module, parts: dict[nn.Module, tuple[Normalizer | Mechanism, Recipe]]) -> None:
    """Hangs normalizers on attention modules of the model."""
    kernel.register()
    former = [_former_kernel(model, _config(module)) for module in parts]
    for (module, (normalizer, recipe)), kernel_before in zip(parts.items(), former, strict=True):
        setattr(module, NORMALIZER, normalizer.train(module.training))
        setattr(module, RECIPE, _Attached(recipe, kernel_before))
        _config(module)._attn_implementation_internal = kernel.KERNEL


def detach(model: nn.Module, modules: Collection[nn.Module]) -> None:
    """Takes them off; a config gets its kernel back when none of the model's patched modules shares it any more."""
    removed = [(_config(module), getattr(module, RECIPE).former_kernel) for module in modules if is_patched(module)]
    for module in modules:
        if is_patched(module):
            delattr(module, NORMALIZER)
            delattr(module, RECIPE)
    in_use = {id(_config(module)) for module in patched_modules(model).values()}
    for config, former in removed:
        if id(config) not in in_use:
            config._attn_implementation_internal = former


def device_of(module: nn.Module) -> torch.device:
    """Where the module computes: weights that accelerate offloads are elsewhere in between."""
    hook = getattr(module, "_hf_hook", None)
    placed = getattr(hook, "execution_device", None)
    if placed is not None:
        return torch.device(placed)
    return next((p.device for p in module.parameters() if p.device.type != "meta"), torch.device("cpu"))


def _config(module: nn.Module) -> Any:
    """Shared by the layers of a stack and by what builds their masks: they change together."""
    return module.config


def _former_kernel(model: nn.Module, config: Any) -> str | None:
    if config._attn_implementation_internal != kernel.KERNEL:
        name: str | None = config._attn_implementation_internal
        return name
    sharing = [module for module in patched_modules(model).values() if _config(module) is config]
    if not sharing:
        raise ValueError(
            f"the model's config names the kernel {kernel.KERNEL!r}, but none of its layers is patched: it shares its "
            "config with a patched model, or is a part of one; patch the whole model, or give it a copy of the config"
        )
    return getattr(sharing[0], RECIPE).former_kernel  # type: ignore[no-any-return]
