"""Where a model is: in this package, in a folder or on the Hugging Face hub; told before anything heavy is imported."""

import difflib
import os
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import constants

from attnorm.models.hub import hub_answers

BUNDLED = "bundled"
GGUF = ".gguf"
CACHED = "models--"  # how a model's folder in the hub's cache begins; its name follows, with -- for /


class CannotLoad(ValueError):  # noqa: N818 - as UnsupportedModel
    """Raised where a model or its tokenizer cannot be read."""


class Source(NamedTuple):
    place: str | Path  # a hub name, a folder or a .gguf file
    name: str  # what to call it
    local_only: bool  # a folder, or the hub cannot be reached


def find(model: str | Path) -> Source:
    """The folder or hub name that a user means.

    Raises:
        CannotLoad: There is no such folder, or it can only be on the hub and the hub cannot be reached.
    """
    if model == BUNDLED:
        return Source(_bundled(), BUNDLED, True)
    path = Path(model).expanduser()
    if str(model).strip() and path.is_dir():  # an empty name would be the folder that we are in
        return Source(path, path.resolve().name, True)
    if path.is_file() and path.suffix == GGUF:
        return Source(path, path.stem, True)
    if path.is_file():
        raise CannotLoad(
            f"expected a folder with config.json and model.safetensors, or a {GGUF} file, got the file {path}. "
            "Give the folder that holds it."
        )
    name = str(model)
    if can_only_be_a_folder(model):
        raise CannotLoad(
            f"there is no folder {name!r}; {did_you_mean(name)}give a folder, a hub name like 'gpt2', or '{BUNDLED}'"
        )
    offline = not hub_answers()
    if offline and name not in cached():
        raise CannotLoad(f"{name}: {unreachable(name)}")
    return Source(name, name, offline)


def can_only_be_a_folder(model: str | os.PathLike[str]) -> bool:
    """Whether this is no name that the hub could have."""
    name = str(model)
    given_as_path = not isinstance(model, str)
    return given_as_path or name.startswith(("/", "./", "../", "~")) or name.count("/") > 1 or not name.strip()


def unreachable(name: str) -> str:
    return (
        f"no folder of this name, not in the Hugging Face cache, and the hub cannot be reached; {did_you_mean(name)}"
        f"give a folder, connect, or use '{BUNDLED}', the small model that comes with attnorm"
    )


def did_you_mean(name: str) -> str:
    """A question that ends in '? ', or nothing where no model at hand is called nearly so."""
    beside = Path(name).expanduser().parent
    folders = [str(config.parent) for config in beside.glob("*/config.json")] if name.strip() else []
    close = difflib.get_close_matches(os.path.normpath(name), [BUNDLED, *folders, *cached()], n=2, cutoff=0.75)
    return f"did you mean {' or '.join(map(repr, close))}? " if close else ""


def cached() -> list[str]:
    """Hub names in the cache, whether complete or not."""
    folders = Path(constants.HF_HUB_CACHE).glob(f"{CACHED}*")
    return [folder.name.removeprefix(CACHED).replace("--", "/", 1) for folder in folders]


def _bundled() -> Path:
    folder = Path(str(files("attnorm.models") / BUNDLED))
    if not (folder / "config.json").is_file():
        raise CannotLoad(
            "this installation of attnorm has no bundled model (attnorm/models/bundled is empty); "
            "install the released package, or name a model: attnorm analyze FOLDER or HUB/NAME"
        )
    return folder
