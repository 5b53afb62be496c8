"""Save and load patched models. Transformers alone would forget the normalizer: no file of its own names one.

Beside the ordinary files lie those of attnorm.models.normalizer_files. Whatever model is saved into a folder, files of
an earlier one do not stay there. attnorm.models.ordinary_saves does the same where transformers or PEFT save.
"""

import json
import os
import reprlib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import transformers
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from transformers import AutoConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from attnorm.files import write_json
from attnorm.models import normalizer_files
from attnorm.models.dispatch import NORMALIZER, attention_sites
from attnorm.models.head_subset import check_fit, checked_heads, on_heads
from attnorm.models.model_card import correct_card, write_card
from attnorm.models.normalizer_files import RECIPE_FILE, VALUES_FILE
from attnorm.models.patch_state import Recipe, attach, device_of, normalizer_of, patched_modules, recipe_of
from attnorm.models.source import can_only_be_a_folder, did_you_mean, hub_answers
from attnorm.normalizers.contract import Mechanism, Normalizer
from attnorm.normalizers.registry import entries, get

CONFIG, ADAPTER_FILE = "config.json", "adapter_config.json"
# A key of adapter_config.json that PEFT does not know: it warns and prints the key where it loads such adapters alone,
# even in a process without attnorm.
ADAPTER_MARK = "attnorm_replaced_softmax_so_load_with_attnorm_from_pretrained"
# Which options of from_pretrained say where the files are.
PLACE = ("cache_dir", "revision", "token", "local_files_only")

ours: ContextVar[bool] = ContextVar("ours", default=False)  # whether attnorm's own save_pretrained is at work


class NotSavableError(ValueError):
    """Raised for a normalizer that no name and options describe."""


def save_pretrained(model: nn.Module, directory: str | os.PathLike[str], **options: Any) -> None:
    """Saves the model as transformers does and its normalizers beside it; options as for model.save_pretrained.

    >>> save_pretrained(model, "my-model")
    """
    if options.get("push_to_hub"):
        raise ValueError(
            "push_to_hub=True would leave the normalizers behind; save to a folder, then upload that: "
            "huggingface_hub.upload_folder(repo_id=..., folder_path=...)"
        )
    _check_directory(directory)
    model = _unwrapped(model)
    folder, recipes = Path(directory), recipes_of(model)
    if folder.is_file():
        raise NotADirectoryError(f"{folder} is a file; give a folder, which is made where there is none")
    state = options.pop("state_dict", None) or model.state_dict()
    own = {key: value for key, value in state.items() if NORMALIZER not in key.split(".")}
    before = ours.set(True)
    try:
        model.save_pretrained(folder, state_dict=own, **options)
    finally:
        ours.reset(before)
    if options.get("is_main_process", True):
        write_normalizers(folder, model, recipes, state)
        if recipes:
            write_card(folder, model)


def from_pretrained(
    directory: str | os.PathLike[str], *, model_class: type[Any] | None = None, **options: Any
) -> PreTrainedModel:
    """The model of a folder (or a hub repository) that `save_pretrained` wrote, with its normalizers in place.

    model_class: what to load it as, unless the class that was saved. options: as for the class's from_pretrained, but
    weights are read from safetensors only, unless use_safetensors=False allows pickles.

    >>> model = from_pretrained("my-model", dtype="bfloat16")
    """
    _check_directory(directory)
    _check_place(directory)
    if options.get("output_loading_info"):
        raise ValueError("output_loading_info=True returns more than a model; ask transformers' from_pretrained for it")
    offline = not Path(directory).is_dir() and not hub_answers()
    if offline:
        options["local_files_only"] = True  # or transformers would try again and again
    where: dict[str, Any] = {name: options[name] for name in PLACE if name in options}
    if _saved_file(directory, RECIPE_FILE, where) is None:
        raise FileNotFoundError(
            f"there is no folder {str(directory)!r}, the Hugging Face cache has no {RECIPE_FILE} of that name, and the "
            "hub cannot be reached; give the folder that attnorm.save_pretrained wrote, or connect"
            if offline
            else f"{directory} has no {RECIPE_FILE}: no patched model was saved there by attnorm.save_pretrained; "
            "an ordinary model loads with transformers' from_pretrained"
        )
    if (
        model_class is None
        and _saved_file(directory, ADAPTER_FILE, where)
        and not _saved_file(directory, CONFIG, where)
    ):
        raise ValueError(
            f"{directory} holds adapters and not the model that they belong to; say what to load it as, e.g. "
            "model_class=transformers.AutoModelForCausalLM"
        )
    trusted = {"trust_remote_code": options["trust_remote_code"]} if "trust_remote_code" in options else {}
    chosen = model_class or _saved_class(AutoConfig.from_pretrained(directory, **where, **trusted), directory)
    with _expecting_normalizers(chosen), warnings.catch_warnings():
        warnings.filterwarnings("ignore", f"(?s).*{ADAPTER_MARK}")
        model: PreTrainedModel = chosen.from_pretrained(directory, **{"use_safetensors": True, **options})
    restore_normalizers(model, directory, **where)
    return with_known_loss(model)


def with_known_loss(model: PreTrainedModel) -> PreTrainedModel:
    """Name the loss that transformers does not find for GPT-2 by its class name.

    Without it transformers takes this loss after a warning, and a Trainer logs a loss that is lower by the share of
    each text's first token.
    """
    if getattr(model, "loss_type", "known") is None and hasattr(model, "generate"):
        model.loss_type = "ForCausalLM"
    return model


def _check_directory(directory: Any) -> None:
    if not isinstance(directory, str | os.PathLike):
        raise TypeError(f"expected the path of a folder, e.g. 'my-model', got {reprlib.repr(directory)}")


def _check_place(directory: str | os.PathLike[str]) -> None:
    """What is neither a folder nor a possible name on the hub is told here: transformers speaks of repositories."""
    path, wanted = Path(directory), "give the folder that attnorm.save_pretrained wrote"
    if path.is_file():
        raise NotADirectoryError(f"{path} is a file; {wanted}")
    if can_only_be_a_folder(directory) and not (os.fspath(directory).strip() and path.is_dir()):
        name = os.fspath(directory)
        raise FileNotFoundError(f"there is no folder {name!r}; {did_you_mean(name)}{wanted}")


def restore_normalizers(model: PreTrainedModel, directory: str | os.PathLike[str], **where: Any) -> None:
    """Puts the normalizers that lie beside the model's files into the model; an ordinary model stays as it is."""
    recipe_file, values_file = (_saved_file(directory, name, where) for name in (RECIPE_FILE, VALUES_FILE))
    if recipe_file is None:
        return
    recipes, weights = normalizer_files.read_recipes(recipe_file)
    normalizer_files.check_weights(
        str(directory), weights, ((name, _saved_file(directory, name, where)) for name in weights)
    )
    digest = normalizer_files.values_digest(recipe_file)
    if values_file is None and digest is not None:
        raise ValueError(
            f"{directory}: expected {VALUES_FILE} beside {RECIPE_FILE}, got none. Copy it there or save the model again"
        )
    values = {} if values_file is None else normalizer_files.read_values(values_file, digest)
    modules = {_base_path(model, site.path): module for module, site in attention_sites(model).items()}
    parts = {}
    known = entries()
    for path, recipe in recipes.items():
        if recipe.name not in known:
            raise ValueError(
                f"{directory}: expected the normalizer {recipe.name!r} of {path} to be registered, got no such name. "
                f"Run the code with @attnorm.register({recipe.name!r}) before loading the model."
            )
        if path not in modules:
            raise ValueError(
                f"{directory}: {RECIPE_FILE} names {path!r}, which is no attention module of {type(model).__name__}"
            )
        parts[modules[path]] = (_restored(path, recipe, values, modules[path]), recipe)
    attach(parts)


def _unwrapped(model: Any) -> PreTrainedModel:
    """The transformers model inside torch.compile's or a parallel wrapper."""
    inner = model
    while not isinstance(inner, PreTrainedModel) and isinstance(inner, nn.Module):
        inner = getattr(inner, "_orig_mod", None) or getattr(inner, "module", None)
    if isinstance(inner, PreTrainedModel):
        return inner
    adapted = "; merge the adapters first: merge_and_unload()" if hasattr(model, "merge_and_unload") else ""
    raise TypeError(f"expected a transformers model, got {type(model).__name__}{adapted}")


def recipes_of(model: nn.Module) -> dict[str, Recipe]:
    recipes = {}
    for path, module in patched_modules(model).items():
        recipe = recipe_of(module)
        if not isinstance(getattr(module, NORMALIZER), Normalizer | Mechanism):
            raise NotSavableError(
                f"PEFT has wrapped the normalizer of {path}; leave {NORMALIZER!r} out of modules_to_save and patch "
                "after get_peft_model, so that its parameters learn and are saved without that"
            )
        if recipe.name is None:
            raise NotSavableError(
                f"{path} holds {normalizer_of(module).name!r}, which was given as an object; patch by name instead, "
                "e.g. patch(model, 'ssmax'); your own has a name after @attnorm.register('name')"
            )
        if any(map(is_parametrized, normalizer_of(module).modules())):
            raise NotSavableError(
                f"the normalizer of {path} is parametrized (torch.nn.utils.parametrize), which no name describes; save "
                "a copy of the model without it: parametrize.remove_parametrizations(module, name)"
            )
        try:
            json.dumps(recipe.options, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise NotSavableError(
                f"the options of {recipe.name!r} in {path} cannot be written as JSON: {recipe.options} ({error}); "
                "register a factory that has them inside: @attnorm.register('name')"
            ) from None
        recipes[_base_path(model, path)] = recipe
    return recipes


def write_normalizers(
    folder: Path, model: nn.Module, recipes: Mapping[str, Recipe], state: Mapping[str, Tensor]
) -> None:
    """Both files, or neither for a model without normalizers: what an earlier model left there must not stay."""
    correct_card(folder, model)
    _mark_adapters(folder / ADAPTER_FILE, replaced=bool(recipes))
    if not recipes:
        normalizer_files.remove(folder)
        return
    values = {}
    for path, module in patched_modules(model).items():
        for key, value in normalizer_of(module).state_dict().items():
            gathered = state.get(f"{path}.{NORMALIZER}.{key}", value)  # a Trainer hands over what it collected
            values[f"{_base_path(model, path)}.{key}"] = gathered.detach().cpu().contiguous().clone()
    normalizer_files.write(folder, recipes, values)


def _mark_adapters(config: Path, *, replaced: bool) -> None:
    """Make a plain load of adapters warn if their model's softmax was replaced."""
    if not config.is_file():
        return
    content = json.loads(config.read_text(encoding="utf-8"))
    if replaced != (ADAPTER_MARK in content):
        content.pop(ADAPTER_MARK, None)
        write_json(config, {**content, ADAPTER_MARK: RECIPE_FILE} if replaced else content)


def _saved_file(directory: str | os.PathLike[str], name: str, where: Mapping[str, Any]) -> str | None:
    """Where the file is, once fetched; None where there is none, or none in the cache of a machine without network."""
    found: str | None = cached_file(
        directory,
        name,
        **where,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return found


def _restored(path: str, recipe: Recipe, values: Mapping[str, Tensor], module: nn.Module) -> Normalizer | Mechanism:
    assert recipe.name is not None
    heads = None if recipe.heads is None else checked_heads(recipe.heads, module, path)
    normalizer = on_heads(get(recipe.name, **recipe.options), heads)
    held = {key.removeprefix(f"{path}."): value for key, value in values.items() if key.startswith(f"{path}.")}
    try:
        normalizer.load_state_dict(held)
    except RuntimeError as error:
        raise ValueError(
            f"{VALUES_FILE} does not fit {recipe.name!r} in {path} as {RECIPE_FILE} has it: {error}"
        ) from None
    check_fit(normalizer, module, path)
    return normalizer.to(device_of(module))


def _saved_class(config: Any, directory: str | os.PathLike[str]) -> type[Any]:
    names = getattr(config, "architectures", None) or ["none"]
    found: type[Any] | None = getattr(transformers, names[0], None)
    if found is None:
        raise ValueError(
            f"{directory} was saved as {names[0]!r}, which transformers does not have; say what to load it as, e.g. "
            "model_class=transformers.AutoModelForCausalLM"
        )
    return found


@contextmanager
def _expecting_normalizers(model_class: type[Any]) -> Iterator[None]:
    """A Trainer's checkpoint has the normalizers' parameters among the weights: no reason to report them as strange."""
    if not hasattr(model_class, "_keys_to_ignore_on_load_unexpected"):  # an Auto class
        yield
        return
    inherits = "_keys_to_ignore_on_load_unexpected" not in vars(model_class)
    before = model_class._keys_to_ignore_on_load_unexpected
    model_class._keys_to_ignore_on_load_unexpected = [*(before or []), rf"\.{NORMALIZER}\."]
    try:
        yield
    finally:
        if inherits:
            del model_class._keys_to_ignore_on_load_unexpected
        else:
            model_class._keys_to_ignore_on_load_unexpected = before


def _base_path(model: nn.Module, path: str) -> str:
    """The path within the base model, so that a language model's normalizers fit the model without its head too."""
    prefix = getattr(model, "base_model_prefix", "")
    return path.removeprefix(f"{prefix}.") if prefix else path
