"""Find a model by its name: in this package, in a folder, in a .gguf file or on the Hugging Face hub.

This file imports no large package, so that a wrong name is reported quickly. Transformers dequantizes the weights of a
.gguf file (llama.cpp's format), so that the quantized model is measured at full arithmetic precision.
"""

import difflib
import importlib.util
import os
import socket
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies

from huggingface_hub import constants, try_to_load_from_cache

BUNDLED = "bundled"
GGUF = ".gguf"
CACHED = "models--"  # prefix of a model's folder in the hub's cache; its name follows, with -- for /


class CannotLoad(ValueError):  # noqa: N818 - as UnsupportedModel
    """Raised if a model or its tokenizer cannot be read."""


class Source(NamedTuple):
    place: str | Path  # a hub name, a folder or a .gguf file
    name: str  # what to call it
    local_only: bool  # a folder, or the hub cannot be reached


def find(model: str | Path) -> Source:
    """Return the folder or hub name that a model name stands for.

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
            "Give the folder that contains it."
        )
    name = str(model)
    if can_only_be_a_folder(model):
        raise CannotLoad(
            f"there is no folder {name!r}; {did_you_mean(name)}give a folder, a hub name such as 'gpt2', or '{BUNDLED}'"
        )
    offline = not hub_answers()
    if offline and name not in cached():
        raise CannotLoad(f"{name}: {unreachable(name)}")
    return Source(name, name, offline)


def can_only_be_a_folder(model: str | os.PathLike[str]) -> bool:
    """Whether no hub repository could have this name."""
    name = str(model)
    given_as_path = not isinstance(model, str)
    return given_as_path or name.startswith(("/", "./", "../", "~")) or name.count("/") > 1 or not name.strip()


def unreachable(name: str) -> str:
    instead = f"give a folder, connect, or use '{BUNDLED}', the small model that comes with attnorm"
    return (
        "no folder of this name, not in the Hugging Face cache, and the hub cannot be reached; "
        f"{did_you_mean(name).strip() or instead}"
    )


def did_you_mean(name: str) -> str:
    """Return "did you mean ...? " with similar names of available models, or an empty text."""
    beside = Path(name).expanduser().parent
    folders = [str(config.parent) for config in beside.glob("*/config.json")] if name.strip() else []
    close = difflib.get_close_matches(os.path.normpath(name), [BUNDLED, *folders, *cached()], n=2, cutoff=0.75)
    return f"did you mean {' or '.join(map(repr, close))}? " if close else ""


def cached() -> list[str]:
    """Return the hub names in the cache, complete or not."""
    folders = Path(constants.HF_HUB_CACHE).glob(f"{CACHED}*")
    return [folder.name.removeprefix(CACHED).replace("--", "/", 1) for folder in folders]


def _bundled() -> Path:
    folder = Path(str(files("attnorm.models") / BUNDLED))
    if not (folder / "config.json").is_file():
        raise CannotLoad(
            "this installation of attnorm has no bundled model (attnorm/models/bundled is empty). Install the "
            "released package, or name a model: attnorm analyze FOLDER or HUB/NAME."
        )
    return folder


def hub_answers() -> bool:
    """Whether the hub can be reached. Checked first, because transformers retries for half a minute."""
    if constants.HF_HUB_OFFLINE:
        return False
    hub = urlsplit(constants.ENDPOINT)
    proxy = getproxies().get(hub.scheme)
    if proxy is None:
        return _listens(hub)
    return _listens(urlsplit(proxy if "://" in proxy else f"http://{proxy}"))


def commit_of(name: str, revision: str | None) -> str | None:
    """Return the commit of a hub model in the cache; the name of its folder is the commit."""
    config = try_to_load_from_cache(name, "config.json", revision=revision)
    return Path(config).parent.name if isinstance(config, str) else None


def _listens(address: SplitResult) -> bool:
    try:
        port = address.port or (443 if address.scheme == "https" else 80)
        socket.create_connection((address.hostname or "", port), timeout=5).close()
    except (OSError, ValueError):
        return False
    return True


MAGIC = b"GGUF"
NEEDED = ("gguf", "accelerate")  # by transformers, to read one


def is_gguf(source: str | Path) -> bool:
    return isinstance(source, Path) and source.suffix == GGUF


def in_its_folder(file: Path) -> tuple[Path, dict[str, Any]]:
    """Return the folder and the options with which from_pretrained reads a .gguf file.

    Raises:
        CannotLoad: A package is missing, or the file is something else.
    """
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise CannotLoad(
            f"reading {file.name} needs {' and '.join(missing)}, which is not installed. Run: pip install "
            f"{' '.join(missing)}"
        )
    with file.open("rb") as opened:
        start = opened.read(len(MAGIC))
    if start != MAGIC:
        raise CannotLoad(
            f"expected a file that starts with {MAGIC.decode()}, got {start!r} in {file}. The file is damaged or "
            "not GGUF. Download it again."
        )
    return file.absolute().parent, {"gguf_file": file.name}
