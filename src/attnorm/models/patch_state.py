"""The state of a patched model: what is attached to its attention modules, and how it is saved and removed.

    attnorm_normalizer     a submodule: its parameters train, move and are saved with the model
    attnorm_recipe         a submodule that holds how the normalizer was made, and writes it into every state dict
    attnorm_model_config   the model's config; the module's own config is meanwhile a copy that names our kernel
    attnorm_hook           where the normalizer reads the layer's input: what removes its hook

Values and recipe are part of the state dict, so every ordinary save keeps them: save_pretrained, push_to_hub, Trainer's
checkpoints, accelerate's save_state, torch.save. The config of the model names the normalizers under `attnorm`.
Transformers without attnorm reports the entries of the state dict as unexpected weights.

The masks and other layers of the model stay as they were. Everything is found on the modules themselves, so that a copy
of a patched model is a patched model, and patches of different modules are independent.
"""

import importlib.util
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from attnorm.models.dispatch import KERNEL, MODEL_CONFIG, NORMALIZER
from attnorm.models.layer_input import unwatch_input, watch_input
from attnorm.models.patched_attention import check_masks, register
from attnorm.models.private_names import copy_with_kernel, offload_devices
from attnorm.models.recipe import FORMAT, RECIPE, Recipe, SavedRecipe
from attnorm.normalizers.contract import Mechanism, Normalizer

RECORD = "attnorm"  # attribute of a model's config


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
    recipe: Recipe = getattr(module, RECIPE).recipe
    return recipe


def attach(model: nn.Module, parts: dict[nn.Module, tuple[Normalizer | Mechanism, Recipe]]) -> None:
    """Attach normalizers to attention modules of the model; nothing is changed if one of them cannot have it."""
    for module in parts:
        check_masks(module)
    register()
    models = [(part.config, {*part.modules()}) for part in model.modules() if isinstance(part, PreTrainedModel)]
    copies: dict[int, Any] = {}  # one for all layers that share a config, so that they are compiled once
    for module, (normalizer, recipe) in parts.items():
        config: Any = module.config
        if id(config) not in copies:
            copies[id(config)] = copy_with_kernel(config, KERNEL)
        around = [outer for outer, inside in models if module in inside]
        configs = tuple({id(each): each for each in (config, *around)}.values())
        setattr(module, NORMALIZER, normalizer.train(module.training))
        setattr(module, RECIPE, _saved(recipe, configs, normalizer, model))
        setattr(module, MODEL_CONFIG, config)
        module.config = copies[id(config)]
        watch_input(module)
        for each in configs:
            _record(each, recipe, 1)


def _saved(
    recipe: Recipe, configs: tuple[Any, ...], normalizer: Normalizer | Mechanism, model: nn.Module
) -> SavedRecipe:
    """One that PEFT saves too where PEFT is installed and fits the other packages."""
    if importlib.util.find_spec("peft") is not None:
        with suppress(ImportError, RuntimeError, AttributeError):
            from attnorm.models.peft_adapters import AdapterRecipe

            return AdapterRecipe(recipe, configs, normalizer, model)
    return SavedRecipe(recipe, configs)


def detach(modules: Iterable[nn.Module]) -> None:
    """Remove normalizers; modules that have none stay as they are."""
    for module in modules:
        if is_patched(module):
            unwatch_input(module)
            module.config = getattr(module, MODEL_CONFIG)
            for config in getattr(module, RECIPE).configs:
                _record(config, recipe_of(module), -1)
            for name in (NORMALIZER, RECIPE, MODEL_CONFIG):
                delattr(module, name)


@contextmanager
def temporarily_unpatched(modules: Iterable[nn.Module]) -> Iterator[None]:
    """While inside, patched modules run as they did before; their normalizers stay attached."""
    ours = {module: (module.config, normalizer_of(module)) for module in modules}
    for module in ours:
        module.config = getattr(module, MODEL_CONFIG)
    try:
        yield
    finally:
        for module, (config, normalizer) in ours.items():
            if getattr(module, NORMALIZER, None) is normalizer:  # not removed meanwhile
                module.config = config


def _record(config: Any, recipe: Recipe, change: int) -> None:
    """Count the attention modules with this recipe in the config's list of recipes."""
    recipes = [dict(entry) for entry in getattr(config, RECORD, {}).get("recipes", ())]
    entry = next((each for each in recipes if recipe.to_json().items() <= each.items()), None)
    if entry is None:
        entry = {**recipe.to_json(), "modules": 0}
        recipes.append(entry)
    entry["modules"] += change
    recipes = [each for each in recipes if each["modules"] > 0]
    if recipes:
        setattr(config, RECORD, {"format": FORMAT, "recipes": recipes, "load_with": "attnorm.from_pretrained"})
    elif hasattr(config, RECORD):
        delattr(config, RECORD)


def forget_record(model: nn.Module) -> Any:
    """Remove what was read with a saved config, and return the outermost record."""
    found = getattr(getattr(model, "config", None), RECORD, None)
    for part in model.modules():
        if hasattr(config := getattr(part, "config", None), RECORD):
            delattr(config, RECORD)
    return found


def device_of(module: nn.Module) -> torch.device:
    """Where the module computes: weights that accelerate offloads are elsewhere in between."""
    devices = offload_devices(module) or [weight.device for weight in module.parameters()]
    found = next((device for device in devices if device.type != "meta"), None)
    if devices and found is None:
        raise ValueError(
            "expected a model with weights, got one on the meta device, where to_empty() would overwrite the values "
            "of a normalizer. Load the weights first, then patch."
        )
    return found or torch.device("cpu")
