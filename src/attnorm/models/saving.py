"""Save and load patched models.

Normalizers are part of a model's weights (models.patch_state), so every ordinary save keeps them. `save_pretrained`
also checks that they can be restored, saves a digest of their values and writes a model card. `from_pretrained`
restores them. Transformers' own from_pretrained loads the model with softmax and reports unexpected weights.
"""

import os
import re
import reprlib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import transformers
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from transformers import AutoConfig, PreTrainedModel

from attnorm.files import atomic_replace
from attnorm.models.dispatch import NORMALIZER, attention_sites
from attnorm.models.layer_normalizer import check_fit, restrict_to_heads, validate_heads
from attnorm.models.output_head import SAVED as SAVED_OUTPUT
from attnorm.models.output_head import has_saved_output, restore_output
from attnorm.models.patch_state import (
    RECORD,
    attach,
    device_of,
    normalizer_of,
    patched_modules,
    recipe_of,
    remove_record,
)
from attnorm.models.private_names import expecting_weights, find_file, uncompiled
from attnorm.models.recipe import FORMAT, RECIPE, SavedNormalizer, read_normalizers, values_digest
from attnorm.models.source import can_only_be_a_folder, did_you_mean, hub_answers
from attnorm.models.threads import exclusive
from attnorm.models.untrusted import check_config, ignore_foreign_kernels
from attnorm.normalizers.contract import Mechanism, Normalizer
from attnorm.normalizers.registry import entries, get

CONFIG, ADAPTER_FILE = "config.json", "adapter_config.json"
# Options of from_pretrained that locate the files.
LOCATION_OPTIONS = ("cache_dir", "revision", "token", "local_files_only")

FRONT_MATTER = """\
---
library_name: transformers
tags:
- attnorm
---

"""
# attnorm replaces only the text between these lines of a README.
BEGIN, END = "<!-- attnorm: written by save_pretrained -->", "<!-- /attnorm -->"
SECTION = """\
## Attention

This model does not use softmax in its attention:

{lines}

Load it with [attnorm](https://pypi.org/project/attnorm/), which restores the normalizers:

```python
import attnorm

model = attnorm.from_pretrained("path or repository")
```

`transformers` alone would load the same weights and run them with softmax: another model than the one that was trained.
"""


class NotSavableError(ValueError):
    """Raised for a normalizer that cannot be restored from a name and options."""


def save_pretrained(model: nn.Module, directory: str | os.PathLike[str], **options: Any) -> None:
    """Save a patched model with its normalizers to a folder.

    options: as for transformers' model.save_pretrained.

    >>> save_pretrained(model, "my-model")
    """
    _check_directory(directory)
    if not os.fspath(directory).strip():  # Path("") is the current folder
        raise ValueError(f"expected the path of a folder, e.g. 'my-model', got {directory!r}")
    model, folder = _unwrap(model), Path(directory)
    check_savable(model)
    if folder.is_file():
        raise NotADirectoryError(f"expected a folder, got the file {folder}")
    state = options.pop("state_dict", None) or model.state_dict()
    with _digest_in_config(model, state), ordinary_files(folder):
        model.save_pretrained(folder, state_dict=state, **options)
    if options.get("is_main_process", True):
        write_card(folder, model)


@contextmanager
def ordinary_files(folder: Path) -> Iterator[None]:
    """Treat the weights that the block saves like other files: permissions as of the config, disk errors as OSError.

    safetensors lets only the owner read them, and raises errors of its own.
    """
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        raise OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(str(error)) from None
    if (config := folder / CONFIG).is_file():
        for weights in folder.glob("*.safetensors"):
            with suppress(OSError):  # a file of another user or process, or a file system without permissions
                weights.chmod(config.stat().st_mode)


@exclusive(alone=True)
def from_pretrained(
    directory: str | os.PathLike[str], *, model_class: type[Any] | None = None, **options: Any
) -> PreTrainedModel:
    """Load a patched model from a folder or a hub repository, with its normalizers.

    Weights are read from safetensors only, unless use_safetensors=False allows pickles.

    Args:
        model_class: Class to load the model as (default: the class that was saved).
        options: As for its from_pretrained.

    >>> model = from_pretrained("my-model", dtype="bfloat16")
    """
    _check_directory(directory)
    _check_location(directory)
    if options.get("output_loading_info"):
        raise ValueError(
            "output_loading_info=True is not supported, because it returns more than a model. Use transformers' "
            "from_pretrained for it."
        )
    offline = not Path(directory).is_dir() and not hub_answers()
    if offline:
        options["local_files_only"] = True  # without it, transformers would retry the connection many times
    location: dict[str, Any] = {name: options[name] for name in LOCATION_OPTIONS if name in options}
    options = {"use_safetensors": True, **options}
    files = {**location, "variant": options.get("variant"), "pickles": not options["use_safetensors"]}
    if not read_normalizers(directory, **files) and not has_saved_output(directory, **files):
        raise FileNotFoundError(
            f"expected a folder or a model in the Hugging Face cache, got {str(directory)!r}, and the hub cannot be "
            "reached. Give the folder of a patched model, or connect."
            if offline
            else f"expected a patched model in {directory}, got one without normalizers. Load it with transformers' "
            "from_pretrained."
        )
    adapters, config = (find_file(directory, name, **location) for name in (ADAPTER_FILE, CONFIG))
    if model_class is None and adapters and not config:
        raise ValueError(
            f"expected a model in {directory}, got adapters alone. Name the class of their model, e.g. "
            "model_class=transformers.AutoModelForCausalLM."
        )
    trusted = {"trust_remote_code": options["trust_remote_code"]} if "trust_remote_code" in options else {}
    if Path(directory).is_dir():
        check_config(Path(directory))
    settings = None
    if model_class is None or config:
        reader = getattr(model_class, "config_class", None) or AutoConfig
        settings = reader.from_pretrained(directory, **location, **trusted)
        if ignore_foreign_kernels(settings, str(directory)):
            options.setdefault("config", settings)
    loaded_class = model_class or _saved_class(settings, directory)
    attnorm_names = rf"\.({NORMALIZER}|{RECIPE})\.|{SAVED_OUTPUT.pattern}"
    with expecting_weights(loaded_class, attnorm_names), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "(?s).*attnorm: these adapters"
        )  # a warning of PEFT about an entry that models/peft_adapters.py writes
        model: PreTrainedModel = loaded_class.from_pretrained(directory, **options)
    restore_normalizers(model, directory, **files)
    restore_output(model, directory, **files)
    return with_known_loss(model)


def restore_normalizers(model: PreTrainedModel, directory: str | os.PathLike[str], **files: Any) -> None:
    """Attach the normalizers that were saved with a model; a model without any does not change.

    files: options of read_normalizers.
    """
    record = remove_record(model)
    digest = record.get("values") if isinstance(record, Mapping) else None
    saved = read_normalizers(directory, digest=digest, **files)
    if record is not None and not saved:
        warnings.warn(
            f"{directory}: the config names normalizers, but the weights hold none: they were saved without "
            f"attnorm. The model uses softmax. Delete the entry {RECORD!r} of config.json.",
            stacklevel=2,
        )
    modules = {_base_path(model, site.path): module for module, site in attention_sites(model).items()}
    registered = entries()
    parts = {}
    for saved_normalizer in saved:
        path = _base_path(model, saved_normalizer.path)
        if saved_normalizer.recipe.name not in registered:
            raise ValueError(
                f"{directory}: expected the normalizer {saved_normalizer.recipe.name!r} of {path} to be registered. "
                f"Run the code with @attnorm.register({saved_normalizer.recipe.name!r}) before loading the model."
            )
        if path not in modules:
            raise ValueError(
                f"{directory}: expected attention modules of {type(model).__name__}, got a normalizer for {path!r}"
            )
        parts[modules[path]] = (_restore_normalizer(path, saved_normalizer, modules[path]), saved_normalizer.recipe)
    if parts:
        attach(model, parts)


def with_known_loss(model: PreTrainedModel) -> PreTrainedModel:
    """Set the loss type that transformers does not find for GPT-2 by its class name.

    Without it, transformers warns and uses the same loss, but Trainer logs a wrong number: lower by the share of each
    text's first token.
    """
    if getattr(model, "loss_type", "known") is None and hasattr(model, "generate"):
        model.loss_type = "ForCausalLM"
    return model


def _check_directory(directory: Any) -> None:
    if not isinstance(directory, str | os.PathLike):
        raise TypeError(f"expected the path of a folder, e.g. 'my-model', got {reprlib.repr(directory)}")


def _check_location(directory: str | os.PathLike[str]) -> None:
    """Raise an error for what is neither a folder nor a possible hub name; transformers' own message would mislead."""
    path, hint = Path(directory), "Give the folder of a saved model."
    if path.is_file():
        raise NotADirectoryError(f"expected a folder, got the file {path}. {hint}")
    if can_only_be_a_folder(directory) and not (os.fspath(directory).strip() and path.is_dir()):
        name = os.fspath(directory)
        guess = did_you_mean(name)
        between = f"; {guess}" if guess else ". "
        raise FileNotFoundError(f"expected a folder, got {name!r}, which does not exist{between}{hint}")


def _unwrap(model: Any) -> PreTrainedModel:
    """Return the transformers model inside a wrapper of torch.compile or of parallel training."""
    inner = model
    while not isinstance(inner, PreTrainedModel) and isinstance(inner, nn.Module):
        inner = plain if (plain := uncompiled(inner)) is not inner else getattr(inner, "module", None)
    if isinstance(inner, PreTrainedModel):
        return inner
    adapted = " Call its own save_pretrained, which keeps the normalizers, or merge_and_unload() first."
    raise TypeError(
        f"expected a transformers model, got {type(model).__name__}."
        f"{adapted if hasattr(model, 'merge_and_unload') else ''}"
    )


def check_savable(model: nn.Module) -> None:
    """Raise NotSavableError for a normalizer that could not be restored from what is saved."""
    for path, module in patched_modules(model).items():
        recipe = recipe_of(module)
        if not isinstance(getattr(module, NORMALIZER), Normalizer | Mechanism):
            raise NotSavableError(
                f"PEFT has wrapped the normalizer of {path}. Leave {NORMALIZER!r} out of modules_to_save and patch "
                "after get_peft_model; its parameters then learn and are saved."
            )
        if recipe.name is None:
            raise NotSavableError(
                f"expected a normalizer by name in {path}, got the object {normalizer_of(module).name!r}. Patch by "
                "name, e.g. patch(model, 'ssmax'); your own has a name after @attnorm.register('name')."
            )
        if any(map(is_parametrized, normalizer_of(module).modules())):
            raise NotSavableError(
                f"the normalizer of {path} is parametrized (torch.nn.utils.parametrize), which no name describes. Save "
                "a copy of the model without it: parametrize.remove_parametrizations(module, name)."
            )
        if recipe.to_json()["options"] is None:
            raise NotSavableError(
                f"expected options of {recipe.name!r} in {path} that JSON can hold, got {recipe.options}. Register a "
                "factory that has them inside: @attnorm.register('name')."
            )


@contextmanager
def _digest_in_config(model: PreTrainedModel, state: Mapping[str, Tensor]) -> Iterator[None]:
    """Within the with statement, the config contains a digest of the normalizers' values.

    It is removed afterwards, because training would make it wrong.
    """
    record = getattr(model.config, RECORD, None)
    if not patched_modules(model):
        yield
        return
    setattr(model.config, RECORD, {**(record or {"format": FORMAT}), "values": values_digest(state)})
    try:
        yield
    finally:
        if record is None:
            delattr(model.config, RECORD)
        else:
            setattr(model.config, RECORD, record)


def _restore_normalizer(path: str, saved: SavedNormalizer, module: nn.Module) -> Normalizer | Mechanism:
    recipe = saved.recipe
    assert recipe.name is not None
    heads = None if recipe.heads is None else validate_heads(recipe.heads, module, path)
    normalizer = restrict_to_heads(get(recipe.name, **recipe.options), heads)
    try:
        normalizer.load_state_dict(dict(saved.values))
    except RuntimeError as error:
        raise ValueError(f"the saved values do not fit {recipe.name!r} in {path}: {error}") from None
    check_fit(normalizer, module, path)
    return normalizer.to(device_of(module))


def _saved_class(config: Any, directory: str | os.PathLike[str]) -> type[Any]:
    names = getattr(config, "architectures", None) or ["none"]
    saved_class: type[Any] | None = getattr(transformers, names[0], None)
    if saved_class is None:
        raise ValueError(
            f"expected a class of transformers, got {names[0]!r} in {directory}. Name what to load it as, e.g. "
            "model_class=transformers.AutoModelForCausalLM."
        )
    return saved_class


def _base_path(model: nn.Module, path: str) -> str:
    """Return the path within the base model, so that a model without its head can load the same normalizers."""
    prefix = getattr(model, "base_model_prefix", "")
    return path.removeprefix(f"{prefix}.") if prefix else path


def model_card(model: nn.Module) -> str:
    """Return a README in Markdown: the model's normalizers, their papers, and how to load the model."""
    return f"{FRONT_MATTER}{_card_section(model)}\n"


def write_card(folder: Path, model: nn.Module) -> None:
    """Write a README for a patched model if there is none, or update attnorm's section of an existing one."""
    path = folder / "README.md"
    if not path.exists() and patched_modules(model):
        _write_atomically(path, model_card(model).encode())
    content = path.read_bytes() if path.is_file() else b""
    before, begin, rest = content.partition(BEGIN.encode())
    _, end, after = rest.partition(END.encode())
    if not begin or not end:
        return
    section = _card_section(model).encode() if patched_modules(model) else b""
    if not section and not after.strip() and before == FRONT_MATTER.encode():
        path.unlink()
    elif before + section + after != content:
        _write_atomically(path, before + section + after)


def _write_atomically(path: Path, content: bytes) -> None:
    with atomic_replace(path) as draft:
        draft.write_bytes(content)


def _card_section(model: nn.Module) -> str:
    counts: dict[str, int] = {}
    for module in patched_modules(model).values():
        described = _describe_normalizer(module)
        counts[described] = counts.get(described, 0) + 1
    lines = [f"- {text}, in {count} attention module{'' if count == 1 else 's'}" for text, count in counts.items()]
    return f"{BEGIN}\n{SECTION}{END}".format(lines="\n".join(lines))


def _describe_normalizer(module: nn.Module) -> str:
    recipe = recipe_of(module)
    name = recipe.name or normalizer_of(module).name
    entry = entries().get(name)
    paper = f" ([{entry.paper}]({entry.url}))" if entry is not None and entry.url.startswith("https://") else ""
    return f"`{name}`{paper}" + ("" if recipe.heads is None else " on some of the heads")
