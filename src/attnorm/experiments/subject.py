"""What an experiment runs on: a model and texts, loaded once for all experiments of a call."""

import hashlib
import lzma
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from attnorm.models.inputs import Text
    from attnorm.models.loaded import LoadedModel

BUNDLED = "bundled"


@dataclass(frozen=True)
class Subject:
    """A model by name and texts by path; nothing is read before it is asked for."""

    model: str = BUNDLED  # "bundled", a folder or a hub name
    texts: tuple[Path, ...] = ()  # none: the text that attnorm.analyze takes for that model
    valid: tuple[Path, ...] = ()  # texts that nothing is trained on, for the experiments that train
    quick: bool = False  # small sizes: seconds, for CI
    seed: int = 0
    device: str | None = None
    only: tuple[str, ...] = ()  # parts of a long experiment, e.g. names of normalizers; none: all

    def loaded(self) -> "LoadedModel":
        return _loaded(self.model, self.device)

    def passages(self) -> "list[Text]":
        """The texts under their names."""
        return _passages(self.texts, self.model == BUNDLED)

    def model_inputs(self, length: int, text: int = 0) -> "dict[str, Tensor]":
        """The first `length` tokens of a text, ready for the model."""
        from attnorm.models.inputs import prepared

        return prepared(self.passages()[text], self.loaded(), length)

    def lengths(self, wanted: Iterable[int]) -> tuple[int, ...]:
        """Those of the lengths that the first text and the model have tokens and positions for, in order."""
        from attnorm.models.inputs import prepared
        from attnorm.models.positions import longest_context

        loaded, passage = self.loaded(), self.passages()[0]
        limit, _ = longest_context(loaded.model)
        asked = sorted(set(wanted))
        fitting = tuple(length for length in asked if limit is None or length <= limit)
        # Tokenizing the start of a book is enough to know that it goes on.
        start = str(passage.content)[: 16 * max(fitting, default=1)]
        tokens = prepared(type(passage)(passage.name, start), loaded, None)["input_ids"].shape[1]
        if tokens < max(fitting, default=0):
            tokens = prepared(passage, loaded, None)["input_ids"].shape[1]
        fitting = tuple(length for length in fitting if length <= tokens)
        if not fitting:
            raise ValueError(
                f"{passage.name!r} has {tokens} tokens and {loaded.name} positions for {limit or 'any number of'}; "
                f"this needs at least {asked[0]}: give a longer text with --text, or another model"
            )
        return fitting

    def identity(self, *, with_model: bool) -> dict[str, Any]:
        """Everything about it that decides a result, as plain values: what a finished result is recognised by."""
        told: dict[str, Any] = {"quick": self.quick, "seed": self.seed, "only": sorted(self.only)}
        if with_model:
            from attnorm.analysis.manifest import content_hash
            from attnorm.models.describe import fingerprint

            loaded = self.loaded()
            told |= {"model": loaded.name, "fingerprint": fingerprint(loaded.model)}
            told["texts"] = [[text.name, content_hash(text.content)] for text in self.passages()]
        elif self.texts:
            # Texts to train on may be packed and as long as a library: their bytes tell them apart.
            told["texts"] = [[path.name, _file_hash(path)] for path in self.texts]
        if self.valid:
            told["valid"] = [[path.name, _file_hash(path)] for path in self.valid]
        return told


@lru_cache(maxsize=1)
def _loaded(model: str, device: str | None) -> "LoadedModel":
    from attnorm.models.load import load
    from attnorm.models.support import check_observable

    loaded = load(model, device=device)
    check_observable(loaded.model)
    return loaded


@lru_cache(maxsize=1)
def _passages(files: tuple[Path, ...], bundled: bool) -> "list[Text]":
    from attnorm.models.inputs import texts_from

    if not files:
        from attnorm.analysis.default_text import default_text

        return texts_from(default_text(bundled=bundled))
    names = [path.name for path in files]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two texts are named {twice!r}; results are told apart by file names: rename one")
    return texts_from({path.name: _read(path) for path in files})


def _read(path: Path) -> str:
    try:
        with lzma.open(path, "rt", encoding="utf-8") if path.suffix == ".xz" else path.open(encoding="utf-8") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}); convert it") from None
    except (lzma.LZMAError, EOFError):
        raise ValueError(f"{path} is no xz file, or it is cut off; pack it again") from None
    except OSError as error:
        raise ValueError(f"cannot read the text {path}: {error.strerror}") from None


def _file_hash(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"cannot read the text {path}: {error.strerror}") from None
