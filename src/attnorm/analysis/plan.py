"""The parts of a run, one per (text, length, window), and how much of each text they leave out.

Wrong input raises an error here, before anything is measured.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

from torch import Tensor

from attnorm.analysis.settings import BUDGET, Windows
from attnorm.models.describe import longest_context
from attnorm.models.inputs import Text, Tokens, bos_problem, prepared, tokens_of, window_inputs
from attnorm.models.load import LoadedModel

SHORTEST = 8  # tokens; a shorter row has too few keys to select from
MAX_WINDOWS = 16
USUAL_WINDOWS = 8  # of a text longer than the budget: they share it if no length is given
SMALL_REST = 0.1  # share of a text that may be left out to avoid shorter windows


@dataclass(frozen=True)
class PartPlan:
    text: Text
    length: int | None  # None: a dict of model inputs, which is measured whole
    model_inputs: dict[str, Tensor]
    window: int = 0
    start: int = 0  # token of the text at which the window starts

    @property
    def tokens(self) -> int:
        """Number of positions in the batch; progress is counted in them."""
        rows, length = self._shape or (1, 1)
        return rows * length

    @property
    def sequence_length(self) -> int | None:
        """Tokens of one sequence; None: not known before the model runs, as for an image."""
        return self._shape[1] if self._shape else self.length

    @property
    def _shape(self) -> tuple[int, int] | None:
        for name in ("input_ids", "inputs_embeds"):
            if name in self.model_inputs and self.model_inputs[name].dim() >= 2:
                return self.model_inputs[name].shape[0], self.model_inputs[name].shape[1]
        return None


@dataclass(frozen=True)
class TextCoverage:
    """The tokens of a text, and how many of them are in no window."""

    tokens: int
    left_out: int
    windows: int

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


@dataclass(frozen=True)
class AnalysisPlan:
    parts: tuple[PartPlan, ...]
    notes: tuple[str, ...]
    coverage: dict[str, TextCoverage] = field(default_factory=dict)  # by name of the text

    @property
    def windows(self) -> int:
        """Largest number of windows of a text."""
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
    """Cut every text into windows of every length. A text that fits into the model and the budget is one window."""
    if not texts:
        raise ValueError("inputs: expected at least one text, got none. Pass a text.")
    names = [text.name for text in texts]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(
            f"inputs: expected texts with different names, got {twice!r} twice. Pass a dict {{name: text}}."
        )
    check_windows(windows, budget)
    longest, hard_limit = longest_context(loaded.model)
    valid_lengths = _validate_lengths(lengths)
    beyond = [length for length in valid_lengths or () if longest is not None and length > longest]
    if beyond and hard_limit:
        raise ValueError(
            f"{loaded.name}: expected lengths of at most {longest} tokens, got {beyond[0]}, because the model "
            "has no further positions. Use smaller lengths."
        )
    notes = [f"{length} tokens is more than the {longest} that {loaded.name} was made for" for length in beyond]
    parts: list[PartPlan] = []
    coverage: dict[str, TextCoverage] = {}
    for text in texts:
        if not isinstance(text.content, str | Tensor):
            given = [PartPlan(text, length, prepared(text, loaded, length)) for length in valid_lengths or (None,)]
            for part in given:
                if "input_ids" in part.model_inputs:
                    _check_count(text, part.model_inputs["input_ids"].shape[-1])
            parts += given
            continue
        tokens = tokens_of(text, loaded, bos)
        text_lengths = valid_lengths or (_default_length(text, tokens, longest, windows, budget),)
        count, starts, tokens = _window_starts(text, tokens, loaded, max(text_lengths), windows, budget, bos)
        parts += [
            PartPlan(text, length, window_inputs(text, tokens, loaded, start, length), window, start)
            for length in text_lengths
            for window, start in enumerate(starts)
        ]
        measured = count * (max(text_lengths) - tokens.special) + tokens.special
        coverage[text.name] = TextCoverage(tokens.count, tokens.count - measured, count)
        notes += _coverage_note(text, coverage[text.name], max(text_lengths), tokens.whole)
        problem = bos_problem(tokens, loaded) if bos is None and isinstance(text.content, str) else None
        notes += [problem] if problem and problem not in notes else []
    return AnalysisPlan(tuple(parts), tuple(notes), coverage)


def check_windows(windows: Windows, budget: int) -> None:
    if windows != "auto" and (isinstance(windows, bool) or not isinstance(windows, int) or windows < 1):
        raise ValueError(f"windows: expected 'auto' or an integer of at least 1, got {windows!r}")
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < SHORTEST:
        raise ValueError(f"budget: expected at least {SHORTEST} tokens, got {budget!r}")


def check_read_rows(rows: int | Sequence[int], parts: Sequence[PartPlan]) -> None:
    """Raise ValueError for a listed row that is in no window."""
    lengths = [part.length for part in parts if part.length is not None]
    if isinstance(rows, int) or len(lengths) < len(parts):
        return
    longest = max(lengths)
    beyond = [row for row in rows if not -longest <= row < longest]
    if beyond:
        raise ValueError(
            f"read_rows (--token-rows): expected rows from {-longest} to {longest - 1} in windows of {longest} tokens, "
            f"got {beyond[0]}"
        )


def unigram_entropies(parts: Iterable[PartPlan]) -> dict[str, float]:
    """Return the entropy in nats of the token counts of each text, over all its windows; texts without ids are skipped.

    It is the loss of a table of token frequencies. A model whose loss is hardly lower does not read the text.
    """
    counts: dict[str, Counter[int]] = {}
    for part in parts:
        ids = part.model_inputs.get("input_ids")
        if ids is not None:
            counts.setdefault(part.text.name, Counter()).update(ids.flatten().tolist())
    return {text: _entropy(token_counts) for text, token_counts in counts.items()}


def _validate_lengths(lengths: Sequence[int] | int | None) -> tuple[int, ...] | None:
    if lengths is None:
        return None
    length_list = [lengths] if isinstance(lengths, int) else list(lengths)
    if not length_list or any(isinstance(length, bool) or not isinstance(length, int) for length in length_list):
        raise ValueError(f"lengths: expected integers (tokens), for example (256, 1024), got {lengths!r}.")
    if min(length_list) < SHORTEST:
        raise ValueError(f"lengths: expected at least {SHORTEST} tokens, got {min(length_list)}")
    return tuple(sorted(set(length_list)))


def _check_count(text: Text, tokens: int) -> None:
    if tokens < SHORTEST:
        raise ValueError(
            f"{text.name!r}: expected at least {SHORTEST} tokens, got {tokens}. Use a text of a few hundred tokens."
        )


def _default_length(text: Text, tokens: Tokens, longest: int | None, windows: Windows, budget: int) -> int:
    """Return the whole length if the text fits, else an eighth of the budget, or the model's limit if shorter."""
    _check_count(text, tokens.count)
    limit = min(longest or budget, budget)
    if windows != "auto":
        return min(limit, budget // windows, (tokens.count - tokens.special) // windows + tokens.special)
    if tokens.count <= limit:
        return tokens.count
    length = min(limit, max(budget // USUAL_WINDOWS, SHORTEST))
    full_windows = tokens.count // length
    if full_windows >= budget // length or tokens.count - full_windows * length <= SMALL_REST * tokens.count:
        return length
    return (tokens.count - tokens.special) // (full_windows + 1) + tokens.special


def _window_starts(
    text: Text, tokens: Tokens, loaded: LoadedModel, length: int, windows: Windows, budget: int, bos: bool | None
) -> tuple[int, list[int], Tokens]:
    """Return the number of windows of that length, where they start, and the tokens (the whole text if needed)."""
    body = length - tokens.special
    if windows == "auto":
        fitting = (tokens.count - tokens.special) // max(body, 1)
        count = max(1, min(MAX_WINDOWS, budget // length, fitting))
    else:
        count = windows
    starts = tokens.starts(count, length)
    if starts is None and not tokens.whole and 1 < count <= MAX_WINDOWS:
        tokens = tokens_of(text, loaded, bos, pieces=count)
        starts = tokens.starts(count, length)
    if starts is None and not tokens.whole:
        tokens = tokens_of(text, loaded, bos, whole=True)
        starts = tokens.starts(count, length)
    if starts is not None and body > 0:
        return count, starts, tokens
    requested = f"{count} windows of {length}" if count > 1 else f"the length {length}"
    raise ValueError(
        f"{text.name!r}: expected at least {count * body + tokens.special} tokens for {requested}, got {tokens.count}. "
        f"Use a longer text, {'fewer windows ' if count > 1 else ''}or a smaller length."
    )


def _coverage_note(text: Text, coverage: TextCoverage, length: int, exact: bool) -> list[str]:
    if coverage.left_out <= 0:
        return []
    about, several = "" if exact else "about ", f"{coverage.windows} windows" if coverage.windows > 1 else "1 window"
    spread = ", spread over the text," if coverage.windows > 1 else ""
    share = coverage.left_out / coverage.tokens
    return [
        (
            f"{text.name!r} has {about}{coverage.tokens:,} tokens: {several} of {length:,} tokens{spread} "
            f"{'are' if coverage.windows > 1 else 'is'} measured; {about}{coverage.left_out:,} tokens "
            f"({'<1' if share < 0.01 else f'{min(share, 0.999) * 100:.3g}'} %) are left out"
        )
    ]


def _entropy(counts: Counter[int]) -> float:
    total = counts.total()
    return -sum(count / total * math.log(count / total) for count in counts.values()) if total else 0.0
