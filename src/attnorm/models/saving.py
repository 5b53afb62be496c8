"""Save and load patched models. Transformers alone would forget the normalizer: no file of its own names one.

Beside the ordinary files lie

    attnorm.json          which normalizer every attention module has, by name and options
    attnorm.safetensors   what the normalizers hold, if they hold anything

A patched model that is saved the ordinary way - by itself, or by a Trainer at a checkpoint - gets both files too, with
a warning, since only attnorm.from_pretrained reads them. In that case the normalizers' parameters are also among the
model's own weights, from where a Trainer resumes.
"""

import functools
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.utils.hub import cached_file

from attnorm.models.attach import Recipe, attach, device_of, normalizer_of, patched_modules, recipe_of
from attnorm.models.by_head import on_heads
from attnorm.models.model_card import model_card
from attnorm.models.observe import NORMALIZER
from attnorm.normalizers.contract import Mechanism, Normalizer
from attnorm.normalizers.registry import get

RECIPE_FILE = "attnorm.json"
VALUES_FILE = "attnorm.safetensors"
FORMAT = 1
# Which options of from_pretrained say where the files are.
PLACE = ("cache_dir", "revision", "token", "local_files_only")


class NotSavableError(ValueError):
    """Raised for a normalizer that no name and options describe."""


def save_pretrained(model: PreTrainedModel, directory: str | os.PathLike[str], **options: Any) -> None:
    """Saves the model as transformers does and its normalizers beside it; options as for model.save_pretrained.

    >>> save_pretrained(model, "my-model")
    """
    if options.get("push_to_hub"):
        raise ValueError(
            "push_to_hub=True would leave the normalizers behind; save to a folder, then upload that: "
            "huggingface_hub.upload_folder(repo_id=..., folder_path=...)"
        )
    folder, recipes = Path(directory), _recipes(model)
    state = options.pop("state_dict", None) or model.state_dict()
    own = {key: value for key, value in state.items() if NORMALIZER not in key.split(".")}
    type(model).save_pretrained(model, folder, state_dict=own, **options)
    if options.get("is_main_process", True):
        _write(folder, model, recipes, state)
        if recipes and not (folder / "README.md").exists():
            _replace(folder / "README.md", model_card(model).encode())


def from_pretrained(
    directory: str | os.PathLike[str], *, model_class: type[Any] | None = None, **options: Any
) -> PreTrainedModel:
    """The model of a folder (or a hub repository) that `save_pretrained` wrote, with its normalizers in place.

    model_class: what to load it as, unless the class that was saved. options: as for the class's from_pretrained.

    >>> model = from_pretrained("my-model", dtype="bfloat16")
    """
    where: dict[str, Any] = {name: options[name] for name in PLACE if name in options}
    if _saved_file(directory, RECIPE_FILE, where) is None:
        raise FileNotFoundError(
            f"{directory} has no {RECIPE_FILE}: no patched model was saved there by attnorm.save_pretrained; "
            "an ordinary model loads with transformers' from_pretrained"
        )
    trusted = {"trust_remote_code": options["trust_remote_code"]} if "trust_remote_code" in options else {}
    chosen = model_class or _saved_class(AutoConfig.from_pretrained(directory, **where, **trusted), directory)
    with _expecting_normalizers(chosen):
        model: PreTrainedModel = chosen.from_pretrained(directory, **options)
    restore_normalizers(model, directory, **where)
    return model


def restore_normalizers(model: PreTrainedModel, directory: str | os.PathLike[str], **where: Any) -> None:
    """Puts the normalizers that lie beside the model's files into the model; an ordinary model stays as it is."""
    recipe_file, values_file = (_saved_file(directory, name, where) for name in (RECIPE_FILE, VALUES_FILE))
    if recipe_file is None:
        return
    recipes = _read_recipes(recipe_file)
    values = {} if values_file is None else load_file(values_file)
    modules = {_base_path(model, path): module for path, module in model.named_modules()}
    parts = {}
    for path, recipe in recipes.items():
        if path not in modules:
            raise ValueError(f"{directory}: {RECIPE_FILE} names {path!r}, which {type(model).__name__} does not have")
        parts[modules[path]] = (_restored(path, recipe, values).to(device_of(modules[path])), recipe)
    attach(model, parts)
    keep_when_saved(model)


def keep_when_saved(model: nn.Module) -> None:
    """From now on the model's own save_pretrained writes the normalizers too, and warns."""
    if isinstance(model, PreTrainedModel):
        vars(model)["save_pretrained"] = functools.partial(_save_the_ordinary_way, model)


def release(model: nn.Module) -> None:
    vars(model).pop("save_pretrained", None)


def _save_the_ordinary_way(
    model: PreTrainedModel, save_directory: str | os.PathLike[str], *args: Any, **options: Any
) -> None:
    type(model).save_pretrained(model, save_directory, *args, **options)
    if not options.get("is_main_process", True):
        return
    try:
        _write(Path(save_directory), model, _recipes(model), options.get("state_dict") or {})
    except NotSavableError as reason:
        warnings.warn(f"the normalizer was not saved, only the values it holds: {reason}", stacklevel=2)
        return
    left_out = f"; {RECIPE_FILE} and {VALUES_FILE} were not uploaded" if options.get("push_to_hub") else ""
    warnings.warn(
        f"{save_directory} holds a model whose softmax was replaced: load it with attnorm.from_pretrained, since "
        f"transformers alone would go back to softmax without a word{left_out}",
        stacklevel=2,
    )


def _recipes(model: nn.Module) -> dict[str, Recipe]:
    recipes = {}
    for path, module in patched_modules(model).items():
        recipe = recipe_of(module)
        if recipe.name is None:
            raise NotSavableError(
                f"{path} holds {normalizer_of(module).name!r}, which was given as an object; patch by name instead, "
                "e.g. patch(model, 'ssmax'); your own has a name after @attnorm.register('name')"
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


def _write(folder: Path, model: nn.Module, recipes: Mapping[str, Recipe], state: Mapping[str, Tensor]) -> None:
    """Both files, or neither for a model without normalizers: what an earlier model left there must not stay."""
    if not recipes:
        for name in (RECIPE_FILE, VALUES_FILE):
            (folder / name).unlink(missing_ok=True)
        return
    modules = {path: {"normalizer": r.name, "options": r.options, "heads": r.heads} for path, r in recipes.items()}
    values = {}
    for path, module in patched_modules(model).items():
        for key, value in normalizer_of(module).state_dict().items():
            gathered = state.get(f"{path}.{NORMALIZER}.{key}", value)  # a Trainer hands over what it collected
            values[f"{_base_path(model, path)}.{key}"] = gathered.detach().cpu().contiguous().clone()
    if values:
        save_file(values, folder / f"{VALUES_FILE}.part", metadata={"format": "pt"})
        (folder / f"{VALUES_FILE}.part").replace(folder / VALUES_FILE)
    else:
        (folder / VALUES_FILE).unlink(missing_ok=True)
    _replace(folder / RECIPE_FILE, json.dumps({"format": FORMAT, "modules": modules}, indent=2).encode())


def _replace(path: Path, content: bytes) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(content)
    part.replace(path)


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


def _read_recipes(file: str) -> dict[str, Recipe]:
    content = json.loads(Path(file).read_text(encoding="utf-8"))
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(
            f"{file} is not of the format {FORMAT} that this attnorm reads; was it written by a newer one?"
        )
    try:
        return {
            path: Recipe(part["normalizer"], part["options"], None if part["heads"] is None else tuple(part["heads"]))
            for path, part in content["modules"].items()
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is damaged: every module needs normalizer, options and heads ({error!r})") from None


def _restored(path: str, recipe: Recipe, values: Mapping[str, Tensor]) -> Normalizer | Mechanism:
    assert recipe.name is not None
    normalizer = on_heads(get(recipe.name, **recipe.options), recipe.heads)
    held = {key.removeprefix(f"{path}."): value for key, value in values.items() if key.startswith(f"{path}.")}
    try:
        normalizer.load_state_dict(held)
    except RuntimeError as error:
        raise ValueError(
            f"{VALUES_FILE} does not fit {recipe.name!r} in {path} as {RECIPE_FILE} has it: {error}"
        ) from None
    return normalizer


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
    before = vars(model_class).get("_keys_to_ignore_on_load_unexpected")
    inherited = model_class._keys_to_ignore_on_load_unexpected or []
    model_class._keys_to_ignore_on_load_unexpected = [*inherited, rf"\.{NORMALIZER}\."]
    try:
        yield
    finally:
        if before is None:
            del model_class._keys_to_ignore_on_load_unexpected
        else:
            model_class._keys_to_ignore_on_load_unexpected = before


def _base_path(model: nn.Module, path: str) -> str:
    """The path within the base model, so that a language model's normalizers fit the model without its head too."""
    prefix = getattr(model, "base_model_prefix", "")
    return path.removeprefix(f"{prefix}.") if prefix else path
