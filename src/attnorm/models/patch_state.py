"""The state of a patched model: the attributes of its attention modules, and how they are attached and removed.

    attnorm_normalizer     a submodule: its parameters train, move and are saved with the model
    attnorm_recipe         a submodule that contains name and options of the normalizer and writes them into state dicts
    attnorm_model_config   the model's config; `module.config` is replaced by a copy that names our attention function
    attnorm_hook           the handle of a forward hook, for normalizers that read the layer's input

Values and recipe are part of the state dict, so every ordinary save keeps them: save_pretrained, push_to_hub, Trainer's
checkpoints, accelerate's save_state, torch.save. The config of the model names the normalizers under `attnorm`.
Transformers without attnorm reports the entries of the state dict as unexpected weights.

Masks and other layers of the model do not change. There is no state outside the modules, so a copy of a patched model
is a patched model, and patches of different modules are independent.
"""

import importlib.util
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from attnorm.models.dispatch import KERNEL, MODEL_CONFIG, NORMALIZER
from attnorm.models.patched_attention import check_masks, register, unwatch_input, watch_input
from attnorm.models.private_names import copy_with_kernel, offload_devices
from attnorm.models.recipe import FORMAT, RECIPE, Recipe, SavedRecipe
from attnorm.normalizers.contract import Mechanism, Normalizer

RECORD = "attnorm"  # attribute of a model's config


def is_patched(module: nn.Module) -> bool:
    return hasattr(module, NORMALIZER)


def patched_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return path -> module for the patched attention modules."""
    return {path: module for path, module in model.named_modules() if is_patched(module)}


def normalizer_of(module: nn.Module) -> Normalizer | Mechanism:
    normalizer = getattr(module, NORMALIZER)
    assert isinstance(normalizer, Normalizer | Mechanism)
    return normalizer


def recipe_of(module: nn.Module) -> Recipe:
    recipe: Recipe = getattr(module, RECIPE).recipe
    return recipe


def attach(model: nn.Module, parts: dict[nn.Module, tuple[Normalizer | Mechanism, Recipe]]) -> None:
    """Attach normalizers to attention modules of the model. Checks all of them before it changes the first."""
    for module in parts:
        check_masks(module)
    register()
    models = [(part.config, {*part.modules()}) for part in model.modules() if isinstance(part, PreTrainedModel)]
    copies: dict[int, Any] = {}  # one copy for all layers that share a config, so that torch compiles them once
    for module, (normalizer, recipe) in parts.items():
        config: Any = module.config
        if id(config) not in copies:
            copies[id(config)] = copy_with_kernel(config, KERNEL)
        outer_configs = [model_config for model_config, inside in models if module in inside]
        configs = tuple({id(affected): affected for affected in (config, *outer_configs)}.values())
        setattr(module, NORMALIZER, normalizer.train(module.training))
        setattr(module, RECIPE, _make_saved_recipe(recipe, configs, normalizer, model))
        setattr(module, MODEL_CONFIG, config)
        module.config = copies[id(config)]
        watch_input(module)
        for affected in configs:
            _count_in_config(affected, recipe, 1)


def _make_saved_recipe(
    recipe: Recipe, configs: tuple[Any, ...], normalizer: Normalizer | Mechanism, model: nn.Module
) -> SavedRecipe:
    """Return the submodule that saves the recipe; if PEFT is installed, one that PEFT saves with adapters as well."""
    if importlib.util.find_spec("peft") is not None:
        with suppress(ImportError, RuntimeError, AttributeError):
            from attnorm.models.peft_adapters import AdapterRecipe

            return AdapterRecipe(recipe, configs, normalizer, model)
    return SavedRecipe(recipe, configs)


def detach(modules: Iterable[nn.Module]) -> None:
    """Remove normalizers; modules without one do not change."""
    for module in modules:
        if is_patched(module):
            unwatch_input(module)
            module.config = getattr(module, MODEL_CONFIG)
            for config in getattr(module, RECIPE).configs:
                _count_in_config(config, recipe_of(module), -1)
            for name in (NORMALIZER, RECIPE, MODEL_CONFIG):
                delattr(module, name)


@contextmanager
def temporarily_unpatched(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within the with statement, patched modules run as before the patch; their normalizers stay attached."""
    patched = {module: (module.config, normalizer_of(module)) for module in modules}
    for module in patched:
        module.config = getattr(module, MODEL_CONFIG)
    try:
        yield
    finally:
        for module, (config, normalizer) in patched.items():
            if getattr(module, NORMALIZER, None) is normalizer:  # not removed meanwhile
                module.config = config


def _count_in_config(config: Any, recipe: Recipe, change: int) -> None:
    """Add `change` to the number of attention modules with this recipe in the config's list of recipes."""
    recipes = [dict(entry) for entry in getattr(config, RECORD, {}).get("recipes", ())]
    entry = next((candidate for candidate in recipes if recipe.to_json().items() <= candidate.items()), None)
    if entry is None:
        entry = {**recipe.to_json(), "modules": 0}
        recipes.append(entry)
    entry["modules"] += change
    recipes = [listed for listed in recipes if listed["modules"] > 0]
    if recipes:
        setattr(config, RECORD, {"format": FORMAT, "recipes": recipes, "load_with": "attnorm.from_pretrained"})
    elif hasattr(config, RECORD):
        delattr(config, RECORD)


def remove_record(model: nn.Module) -> Any:
    """Remove the record of normalizers that was loaded with a config; return that of the outermost config."""
    record = getattr(getattr(model, "config", None), RECORD, None)
    for part in model.modules():
        if hasattr(config := getattr(part, "config", None), RECORD):
            delattr(config, RECORD)
    return record


def device_of(module: nn.Module) -> torch.device:
    """Return the device on which the module computes; accelerate may store its weights on another one."""
    devices = offload_devices(module) or [weight.device for weight in module.parameters()]
    device = next((device for device in devices if device.type != "meta"), None)
    if devices and device is None:
        raise ValueError(
            "expected a model with weights, got one on the meta device, where to_empty() would overwrite the values "
            "of a normalizer. Load the weights first, then patch."
        )
    return device or torch.device("cpu")
