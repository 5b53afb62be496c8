"""What an experiment runs on: a model and texts, loaded once for all experiments of a call."""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from attnorm.models.inputs import Text
    from attnorm.models.loaded import LoadedModel

BUNDLED = "bundled"
ProgressCallback = Callable[[str, int, int], None]
"""Called with what is being done, how many steps of it are finished, and the total."""


@dataclass(frozen=True)
class Subject:
    """A model by name and texts by path; nothing is read before it is asked for."""

    model: str = BUNDLED  # "bundled", a folder or a hub name
    others: tuple[str, ...] = ()  # further models, for the experiments that compare several
    texts: tuple[Path, ...] = ()  # none: the text that attnorm.analyze takes for that model
    valid: tuple[Path, ...] = ()  # texts that nothing is trained on, for the experiments that train
    quick: bool = False  # small sizes: seconds, for CI
    seed: int = 0
    device: str | None = None
    only: tuple[str, ...] = ()  # parts of a long experiment, e.g. names of normalizers; none: all
    longest: int | None = None  # tokens of the longest pass, for the experiments that go on as far as one likes

    def each(self) -> "list[Subject]":
        """One for every model, the first one first; each is read when its turn comes."""
        return [replace(self, model=model, others=()) for model in (self.model, *self.others)]

    def loaded(self) -> "LoadedModel":
        return _loaded(self.model, self.device)

    def described(self) -> dict[str, Any]:
        """What the model is, for a manifest; asked again, it is not read again."""
        return dict(_described(self.model, self.device))

    def passages(self) -> "list[Text]":
        """The texts under their names."""
        return _passages(self.texts, self.model == BUNDLED)

    def model_inputs(self, length: int, text: int = 0) -> "dict[str, Tensor]":
        """The first `length` tokens of a text, ready for the model."""
        from attnorm.models.inputs import prepared

        return prepared(self.passages()[text], self.loaded(), length)

    def lengths(self, wanted: Iterable[int]) -> tuple[int, ...]:
        """Those of the lengths that the first text and the model have tokens and positions for, in order."""
        from attnorm.models.positions import longest_context

        loaded = self.loaded()
        limit, _ = longest_context(loaded.model)
        asked = sorted(set(wanted))
        fitting = tuple(length for length in asked if limit is None or length <= limit)
        tokens = self.tokens(max(fitting, default=1))
        fitting = tuple(length for length in fitting if length <= tokens)
        if not fitting:
            raise ValueError(
                f"{self.passages()[0].name!r} has {tokens} tokens and {loaded.name} positions for "
                f"{limit or 'any number of'}; this needs at least {asked[0]}: give a longer text with --text, or "
                "another model"
            )
        return fitting

    def tokens(self, wanted: int) -> int:
        """How many the first text has; of a long text any number that is not below `wanted`."""
        from attnorm.models.inputs import prepared

        loaded, passage = self.loaded(), self.passages()[0]
        # Tokenizing the start of a book is enough to know that it goes on.
        start = str(passage.content)[: 16 * wanted]
        tokens = prepared(type(passage)(passage.name, start), loaded, None)["input_ids"].shape[1]
        if tokens < wanted and len(start) < len(str(passage.content)):
            tokens = prepared(passage, loaded, None)["input_ids"].shape[1]
        return int(tokens)

    def identity(self, *, with_model: bool) -> dict[str, Any]:
        """Everything about it that decides a result, as plain values: what a finished result is recognised by."""
        identity: dict[str, Any] = {"quick": self.quick, "seed": self.seed, "only": sorted(self.only)}
        if with_model:
            identity |= self._model_and_texts()
            if self.others:
                identity["others"] = [list(one._model_and_texts().values()) for one in self.each()[1:]]
                _require_different_names([identity["model"], *(other[0] for other in identity["others"])])
        elif self.texts:
            # Texts to train on may be packed and as long as a library: their bytes tell them apart.
            identity["texts"] = [[path.name, _file_hash(path)] for path in self.texts]
        if self.longest is not None:
            identity["longest"] = self.longest
        if self.valid:
            identity["valid"] = [[path.name, _file_hash(path)] for path in self.valid]
        return identity

    def _model_and_texts(self) -> dict[str, Any]:
        from attnorm.analysis.manifest import content_hash

        model = self.described()
        texts = [[text.name, content_hash(text.content)] for text in self.passages()]
        return {"model": model["name"], "fingerprint": model["fingerprint"], "texts": texts}


_held: "dict[tuple[str, str | None], LoadedModel]" = {}


def _loaded(model: str, device: str | None) -> "LoadedModel":
    from attnorm.models.load import load
    from attnorm.models.support import check_observable

    if (model, device) not in _held:
        _held.clear()  # before the next one is read: two may not fit into memory
        loaded = load(model, device=device)
        check_observable(loaded.model)
        _held[model, device] = loaded
    return _held[model, device]


@lru_cache(maxsize=32)
def _described(model: str, device: str | None) -> dict[str, Any]:
    from attnorm.models.describe import describe

    return describe(_loaded(model, device))


def _require_different_names(names: list[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"two models are named {name!r}; results are told apart by these names: leave one out, or "
                "rename its folder"
            )


@lru_cache(maxsize=1)
def _passages(files: tuple[Path, ...], bundled: bool) -> "list[Text]":
    from attnorm.models.inputs import texts_from
    from attnorm.models.text_files import read_text

    if not files:
        from attnorm.analysis.default_text import default_text

        return texts_from(default_text(bundled=bundled))
    names = [path.name for path in files]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two texts are named {twice!r}; results are told apart by file names: rename one")
    return texts_from({path.name: read_text(path) for path in files})


def _file_hash(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise ValueError(f"cannot read the text {path}: {error.strerror}") from None
