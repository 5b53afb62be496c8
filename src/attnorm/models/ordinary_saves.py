"""What happens when a patched model is saved the ordinary way: the normalizers are written too, with a warning.

By itself, as a part of a larger one, by a Trainer at a checkpoint: transformers' save_pretrained leaves the parameters
of the normalizers among the model's own weights, from where a Trainer resumes, and forgets what they are parameters of.
PEFT saves its adapters and forgets both. Only attnorm.from_pretrained reads what is added here; a mark in the
configuration of the adapters makes PEFT warn where it loads them alone.
"""

import functools
import importlib
import importlib.util
import inspect
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from attnorm.models.normalizer_files import RECIPE_FILE, VALUES_FILE
from attnorm.models.saving import ADAPTER_FILE, NotSavableError, ours, recipes_of, write_normalizers

BELOW_ADAPTERS = "base_model.model."  # where PEFT's models have the model that was given to them


def keep_when_saved() -> None:
    """From now on every save_pretrained of transformers and PEFT writes the normalizers too, and warns.

    Of every model, because the one that is saved need not be the one that was patched: its encoder was, or a layer.
    """
    _keep(PreTrainedModel)
    if importlib.util.find_spec("peft") is not None:
        # Installed, but it does not go with the other packages; or a folder that happens to have the name.
        with suppress(ImportError, RuntimeError, AttributeError):
            _keep(importlib.import_module("peft").PeftModel)


def _keep(saved: Any) -> None:
    if not hasattr(saved.save_pretrained, "keeps_normalizers"):
        saved.save_pretrained = _keeping(saved.save_pretrained)


def _keeping(plain: Callable[..., None]) -> Callable[..., None]:
    parameters = inspect.signature(plain)

    @functools.wraps(plain)
    def save_pretrained(self: Any, *args: Any, **options: Any) -> None:
        plain(self, *args, **options)
        given = parameters.bind(self, *args, **options)
        given.apply_defaults()
        named = {**given.arguments, **given.arguments.get("kwargs", {})}
        if named["is_main_process"] and not ours.get():
            _add_normalizers(self, named)

    save_pretrained.keeps_normalizers = True  # type: ignore[attr-defined]
    return save_pretrained


def _add_normalizers(saved: Any, given: Mapping[str, Any]) -> None:
    """After an ordinary save."""
    folder = Path(given["save_directory"])
    if not folder.is_dir():  # transformers has said why it saved nothing
        return
    state: Mapping[str, Tensor] = given.get("state_dict") or {}
    model: nn.Module = saved
    folders = [folder]
    if not isinstance(saved, PreTrainedModel):
        model = saved.get_base_model()
        state = {key.removeprefix(BELOW_ADAPTERS): value for key, value in state.items()}
        folders += [folder / name for name in saved.peft_config if (folder / name / ADAPTER_FILE).is_file()]
    try:
        recipes, problem = recipes_of(model), None
    except NotSavableError as reason:
        recipes, problem = {}, reason
    for each in folders:
        write_normalizers(each, model, recipes, state)
    if problem is not None:
        kept = "" if folders[1:] or (folder / ADAPTER_FILE).is_file() else ", only the values it holds"
        warnings.warn(f"the normalizer was not saved{kept}: {problem}", stacklevel=3)
    elif recipes:
        warnings.warn(_how_to_load(folder, bool(given.get("push_to_hub"))), stacklevel=3)


def _how_to_load(folder: Path, uploaded: bool) -> str:
    what, how = "a model", "attnorm.from_pretrained"
    if (folder / ADAPTER_FILE).is_file():
        what, how = "adapters of a model", "attnorm.from_pretrained(..., model_class=transformers.AutoModelForCausalLM)"
    left_out = f"; {RECIPE_FILE} and {VALUES_FILE} were not uploaded" if uploaded else ""
    return (
        f"{folder} holds {what} whose softmax was replaced: load it with {how}, since transformers alone would go back "
        f"to softmax{left_out}"
    )
