"""Which (text, length) parts a run consists of; everything that can be wrong with the input is found here, at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from attnorm.analysis.manifest import content_hash
from attnorm.models.inputs import Text, prepared
from attnorm.models.load import LoadedModel, longest_context

SHORTEST = 8  # visible keys; with fewer, "which keys does it select" is no question
LONGEST_BY_DEFAULT = 4096  # where the model itself sets no limit


@dataclass(frozen=True)
class PartPlan:
    text: Text
    length: int | None  # None: a dict of model inputs, measured as it is
    model_inputs: dict[str, Tensor]

    @property
    def tokens(self) -> int:
        """Positions of the batch: a measure of progress."""
        ids = next(
            (self.model_inputs[name] for name in ("input_ids", "inputs_embeds") if name in self.model_inputs), None
        )
        return int(ids.shape[0] * ids.shape[1]) if ids is not None and ids.dim() >= 2 else 1


@dataclass(frozen=True)
class Plan:
    parts: tuple[PartPlan, ...]
    notes: tuple[str, ...]


def plan(loaded: LoadedModel, texts: Sequence[Text], lengths: Sequence[int] | int | None) -> Plan:
    """Every text at every length; without lengths, each text as far as it and the model go."""
    if not texts:
        raise ValueError("there is nothing to measure: inputs is empty")
    names = [text.name for text in texts]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two texts are named {twice!r}; give them different names, e.g. as a dict name -> text")
    longest, hard_limit = longest_context(loaded.model)
    notes: list[str] = []
    checked = _checked(lengths)
    parts: list[PartPlan] = []
    for text in texts:
        as_it_is = checked is None and not isinstance(text.content, str | Tensor)
        if as_it_is:
            parts.append(PartPlan(text, None, prepared(text, loaded, None)))
            continue
        for length in [_own_length(loaded, text, longest)] if checked is None else checked:
            if longest is not None and length > longest:
                _beyond(loaded, length, longest, hard_limit, notes)
            parts.append(PartPlan(text, length, prepared(text, loaded, length)))
    return Plan(tuple(parts), tuple(notes))


def described(text: Text) -> dict[str, Any]:
    """A text in the manifest: its content only as a hash."""
    content = text.content
    if isinstance(content, str):
        size = f"{len(content)} characters"
    elif isinstance(content, Tensor):
        size = f"{content.numel()} token ids"
    else:
        size = ", ".join(f"{name} {tuple(value.shape)}" for name, value in content.items())
    return {"name": text.name, "sha256": content_hash(content), "size": size, "file": text.file}


def _checked(lengths: Sequence[int] | int | None) -> tuple[int, ...] | None:
    if lengths is None:
        return None
    asked = [lengths] if isinstance(lengths, int) else list(lengths)
    if not asked or any(isinstance(length, bool) or not isinstance(length, int) for length in asked):
        raise ValueError(f"lengths must be numbers of tokens, e.g. (256, 1024), got {lengths!r}")
    if min(asked) < SHORTEST:
        raise ValueError(
            f"a length must be at least {SHORTEST} tokens to say anything about selection, got {min(asked)}"
        )
    return tuple(sorted(set(asked)))


def _own_length(loaded: LoadedModel, text: Text, longest: int | None) -> int:
    """All of the text that the model was made for, in whole steps of 64 so that texts of about one size compare."""
    tokens = int(prepared(text, loaded, None)["input_ids"].shape[-1])
    if tokens < SHORTEST:
        raise ValueError(
            f"the text {text.name!r} has {tokens} token{'s' * (tokens != 1)}; at least {SHORTEST} are needed to say "
            "anything about selection, some hundred to say it well"
        )
    limit = min(longest or LONGEST_BY_DEFAULT, LONGEST_BY_DEFAULT)
    length = min(tokens, limit)
    return length if length == limit or length < 128 else length - length % 64


def _beyond(loaded: LoadedModel, length: int, longest: int, hard_limit: bool, notes: list[str]) -> None:
    if hard_limit:
        raise ValueError(
            f"{loaded.name} has positions for {longest} tokens and no more; got the length {length}; "
            f"use lengths up to {longest}"
        )
    note = f"{length} tokens is more than the {longest} that {loaded.name} was made for"
    if note not in notes:
        notes.append(note)
