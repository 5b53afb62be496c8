"""Which (text, length, window) parts a run consists of, and how much of each text they leave out.

Everything that can be wrong with the input is found here, before anything is measured.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from attnorm.analysis.manifest import content_hash
from attnorm.analysis.settings import BUDGET, Windows
from attnorm.models.describe import longest_context
from attnorm.models.inputs import Media, Text, prepared
from attnorm.models.load import LoadedModel
from attnorm.models.token_windows import Tokens, bos_problem, tokens_of, window_inputs

SHORTEST = 8  # visible keys; with fewer, "which keys does it select" is no question
MOST_WINDOWS = 8
SMALL_REST = 0.1  # of a text may be left out rather than measured in shorter windows


@dataclass(frozen=True)
class PartPlan:
    text: Text
    length: int | None  # None: a dict of model inputs, measured as it is
    model_inputs: dict[str, Tensor]
    window: int = 0
    start: int = 0  # token of the text at which the window starts

    @property
    def tokens(self) -> int:
        """Positions of the batch: a measure of progress."""
        ids = next(
            (self.model_inputs[name] for name in ("input_ids", "inputs_embeds") if name in self.model_inputs), None
        )
        return int(ids.shape[0] * ids.shape[1]) if ids is not None and ids.dim() >= 2 else 1


@dataclass(frozen=True)
class TextCoverage:
    """How much of a text is measured: its tokens, and those in no window."""

    tokens: int
    left_out: int
    windows: int

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True)
class AnalysisPlan:
    parts: tuple[PartPlan, ...]
    notes: tuple[str, ...]
    coverage: dict[str, TextCoverage] = field(default_factory=dict)  # by the name of the text

    @property
    def windows(self) -> int:
        """The most windows of any text."""
        return max((part.window for part in self.parts), default=0) + 1


def plan(
    loaded: LoadedModel,
    texts: Sequence[Text],
    lengths: Sequence[int] | int | None,
    *,
    windows: Windows = "auto",
    budget: int = BUDGET,
    bos: bool | None = None,
) -> AnalysisPlan:
    """Windows of every text at every length. A text that fits into the model and the budget is one window."""
    if not texts:
        raise ValueError("there is nothing to measure: inputs is empty")
    names = [text.name for text in texts]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two texts are named {twice!r}; give them different names, e.g. as a dict name -> text")
    check_windows(windows, budget)
    longest, hard_limit = longest_context(loaded.model)
    notes: list[str] = []
    checked = _checked(lengths)
    for length in checked or ():
        if longest is not None and length > longest:
            _beyond(loaded, length, longest, hard_limit, notes)
    parts: list[PartPlan] = []
    coverage: dict[str, TextCoverage] = {}
    for text in texts:
        if not isinstance(text.content, str | Tensor):
            parts += [PartPlan(text, one, prepared(text, loaded, one)) for one in checked or (None,)]
            continue
        tokens = tokens_of(text, loaded, bos)
        chosen = checked or (_own_length(text, tokens, longest, windows, budget),)
        count, starts, tokens = _placed(text, tokens, loaded, max(chosen), windows, budget, bos)
        parts += [
            PartPlan(text, length, window_inputs(text, tokens, loaded, start, length), window, start)
            for length in chosen
            for window, start in enumerate(starts)
        ]
        measured = count * (max(chosen) - tokens.special) + tokens.special
        coverage[text.name] = TextCoverage(tokens.count, tokens.count - measured, count)
        notes += _left_out(text, coverage[text.name], max(chosen), tokens.whole)
        problem = bos_problem(tokens, loaded) if bos is None and isinstance(text.content, str) else None
        notes += [problem] if problem and problem not in notes else []
    return AnalysisPlan(tuple(parts), tuple(notes), coverage)


def check_windows(windows: Windows, budget: int) -> None:
    if windows != "auto" and (isinstance(windows, bool) or not isinstance(windows, int) or windows < 1):
        raise ValueError(f"windows: expected 'auto' or a whole number of at least 1, got {windows!r}")
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < SHORTEST:
        raise ValueError(f"budget: expected a number of tokens of at least {SHORTEST}, got {budget!r}")


def described(text: Text) -> dict[str, Any]:
    """A text in the manifest: its content only as a hash."""
    content = text.content
    if isinstance(content, str):
        size = f"{len(content)} characters"
    elif isinstance(content, Tensor):
        size = f"{content.numel()} token ids"
    else:
        assert not isinstance(content, Media), "media become model inputs before"
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


def _own_length(text: Text, tokens: Tokens, longest: int | None, windows: Windows, budget: int) -> int:
    """Every token where the text fits; else windows of an eighth of the budget, or of the model's limit if shorter."""
    if tokens.count < SHORTEST:
        raise ValueError(
            f"the text {text.name!r} has {tokens.count} token{'s' * (tokens.count != 1)}; at least {SHORTEST} are "
            "needed to say anything about selection, some hundred to say it well"
        )
    limit = min(longest or budget, budget)
    if windows != "auto":
        return min(limit, budget // windows, (tokens.count - tokens.special) // windows + tokens.special)
    if tokens.count <= limit:
        return tokens.count
    length = min(limit, max(budget // MOST_WINDOWS, SHORTEST))
    whole = tokens.count // length
    if whole >= budget // length or tokens.count - whole * length <= SMALL_REST * tokens.count:
        return length
    return (tokens.count - tokens.special) // (whole + 1) + tokens.special


def _placed(
    text: Text, tokens: Tokens, loaded: LoadedModel, length: int, windows: Windows, budget: int, bos: bool | None
) -> tuple[int, list[int], Tokens]:
    """How many windows of that length, where they start, and the tokens that they start in."""
    body = length - tokens.special
    if windows == "auto":
        fitting = (tokens.count - tokens.special) // max(body, 1)
        count = max(1, min(MOST_WINDOWS, budget // length, fitting))
    else:
        count = windows
    starts = tokens.starts(count, length)
    if starts is None and not tokens.whole:
        tokens = tokens_of(text, loaded, bos, whole=True)
        starts = tokens.starts(count, length)
    if starts is not None and body > 0:
        return count, starts, tokens
    if count == 1:
        raise ValueError(
            f"{text.name!r} has {tokens.count} tokens, fewer than the length {length} that was asked for; "
            "give a longer text or a smaller length"
        )
    raise ValueError(
        f"{text.name!r} has {tokens.count} tokens: expected at least {count * body + tokens.special} for {count} "
        f"windows of {length}. Use fewer windows, a smaller length or a longer text."
    )


def _left_out(text: Text, coverage: TextCoverage, length: int, exact: bool) -> list[str]:
    if coverage.left_out <= 0:
        return []
    about, several = "" if exact else "about ", f"{coverage.windows} windows" if coverage.windows > 1 else "1 window"
    spread = ", spread over the text," if coverage.windows > 1 else ""
    share = coverage.left_out / coverage.tokens
    return [
        (
            f"{text.name!r} has {about}{coverage.tokens:,} tokens: {several} of {length:,} tokens{spread} "
            f"{'are' if coverage.windows > 1 else 'is'} measured, {about}{coverage.left_out:,} tokens "
            f"({'<1' if share < 0.01 else f'{min(share, 0.999) * 100:.3g}'} %) are left out"
        )
    ]


def _beyond(loaded: LoadedModel, length: int, longest: int, hard_limit: bool, notes: list[str]) -> None:
    if hard_limit:
        raise ValueError(
            f"{loaded.name} has positions for {longest} tokens and no more; got the length {length}; "
            f"use lengths up to {longest}"
        )
    note = f"{length} tokens is more than the {longest} that {loaded.name} was made for"
    if note not in notes:
        notes.append(note)
