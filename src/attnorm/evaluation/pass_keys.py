"""Make texts with hidden pass keys and questions for them, which test up to what distance a model finds a key.

    ... filler ... The pass key is K4qZ7b. ... filler ... The pass key is K4qZ7b

A key is some letters and digits, each a single token; the question gives the first, the answer is the rest. No letter
or digit occurs twice in the keys of a window. So a window can hold several keys, and each answer needs only a lookup of
what followed the previous character: of all tasks that reach far back, small models learn this one first. After
Mohtashami & Jaggi 2023, https://arxiv.org/abs/2305.16300, who hide one key of digits.
"""

import math
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64

from attnorm.evaluation.windows import Tokens

Ids = np.ndarray[Any, np.dtype[np.int64]]

BEFORE_KEY = "\n\nThe pass key is"
AFTER_KEY = ".\n\n"
ALPHABET = string.ascii_letters + string.digits
CHARACTERS = 5  # of a key
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)  # of the key in the text: 0 is its start
LARGEST_SHARE = 0.75  # of a training window that key sentences may take; the rest is filler


@dataclass(frozen=True)
class Puzzles:
    """Windows of tokens and the positions of the answers."""

    windows: "Int64[torch.Tensor, 'batch length']"
    answers: "Int64[torch.Tensor, 'batch questions characters']"
    """Positions of the answers' tokens; each is predicted from all tokens before it."""

    def to(self, device: torch.device) -> "Puzzles":
        moved = (self.windows, self.answers)
        if device.type == "cuda":
            moved = (self.windows.pin_memory(), self.answers.pin_memory())
        return Puzzles(*(part.to(device, non_blocking=True) for part in moved))

    def some(self, start: int, count: int) -> "Puzzles":
        return Puzzles(self.windows[start : start + count], self.answers[start : start + count])

    @property
    def targets(self) -> "Int64[torch.Tensor, 'batch questions characters']":
        return self.windows.gather(1, self.answers.flatten(1)).view_as(self.answers)


@dataclass(frozen=True)
class Wording:
    """The sentences around a key, as tokens of one tokenizer."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    alphabet: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Any) -> "Wording":
        """From a `tokenizers.Tokenizer`.

        Raises:
            ValueError: The tokenizer has no token for some letter or digit.
        """
        token_ids = {character: tokenizer.token_to_id(character) for character in ALPHABET}
        lacking = [character for character, token in token_ids.items() if token is None]
        if lacking:
            raise ValueError(
                "expected a tokenizer with a token for each letter and digit, which pass keys consist of, got "
                f"none for {lacking[0]!r}. Use another tokenizer."
            )
        before, after = (tokenizer.encode(text, add_special_tokens=False).ids for text in (BEFORE_KEY, AFTER_KEY))
        return cls(tuple(before), tuple(after), tuple(token_ids.values()))

    def statement(self, key: Sequence[int]) -> list[int]:
        return [*self.before, *key, *self.after]

    def question(self, key: Sequence[int]) -> list[int]:
        """Return the question followed by its answer, the key without its first character."""
        return [*self.before, *key]

    def size(self, characters: int) -> int:
        """Return the number of tokens of a key and its question, for an answer of so many characters."""
        return 2 * (len(self.before) + 1 + characters) + len(self.after)


def shortest_window(wording: Wording, characters: int) -> int:
    return wording.size(characters) + 1  # at least one token of filler between the two


def keys_that_fit(wording: Wording, characters: int, length: int, wanted: int) -> int:
    """Return how many keys fit into a window with filler between them, and into the alphabet; at most `wanted`."""
    return max(
        1,
        min(wanted, len(wording.alphabet) // (characters + 1), int(LARGEST_SHARE * length) // wording.size(characters)),
    )


def training_puzzles(
    filler: Tokens, wording: Wording, *, characters: int, keys: int, seed: int, step: int, batch: int, length: int,
    reach: float = 1.0,
) -> Puzzles:  # fmt: skip
    """Return windows with several keys, each question anywhere after its key.

    Half of the distances between a key and its question are uniform and half log-uniform, in tokens of filler.

    reach: largest distance as a share of the window.
    """
    generator = np.random.default_rng((seed, step))
    fitting = keys_that_fit(wording, characters, length, keys)
    room = length - fitting * wording.size(characters)
    longest = max(1, round(reach * room))
    puzzles = []
    for _ in range(batch):
        distances = [_distance(generator, longest, uniform=bool(number % 2)) for number in range(fitting)]
        starts = [int(generator.integers(0, room - distance + 1)) for distance in distances]
        puzzles.append(_puzzle(filler, wording, generator, characters, length, starts, distances))
    return _stack_puzzles(puzzles)


def puzzles_at(
    filler: Tokens, wording: Wording, *, characters: int, seed: int, count: int, length: int, depth: float
) -> Puzzles:
    """Return windows with one key that end with the answer; depth 0 is the start, 1 is right before the question."""
    generator = np.random.default_rng((seed, length, round(1000 * depth)))
    room = length - wording.size(characters)
    start = round(depth * (room - 1))
    return _stack_puzzles(
        [_puzzle(filler, wording, generator, characters, length, [start], [room - start]) for _ in range(count)]
    )


def _distance(generator: np.random.Generator, longest: int, *, uniform: bool) -> int:
    if uniform:
        return int(generator.integers(1, longest + 1))
    return min(longest, int(math.exp(generator.uniform(0.0, math.log(longest + 1)))))


def _puzzle(
    filler: Tokens,
    wording: Wording,
    generator: np.random.Generator,
    characters: int,
    length: int,
    starts: Sequence[int],
    distances: Sequence[int],
) -> tuple[Ids, Ids]:
    """Insert each key after `start` tokens of filler and its question `distance` tokens of filler later."""
    drawn = generator.choice(wording.alphabet, size=(len(starts), characters + 1), replace=False)
    keys = [[int(character) for character in key] for key in drawn]
    # A question follows all keys inserted at the same position; its own key always comes before it.
    cuts = [(start, False, wording.statement(key)) for start, key in zip(starts, keys, strict=True)]
    cuts += [
        (start + distance, True, wording.question(key))
        for start, distance, key in zip(starts, distances, keys, strict=True)
    ]
    room = length - sum(len(sentence) for _, _, sentence in cuts)
    offset = int(generator.integers(0, len(filler) - room + 1))
    text = filler[offset : offset + room].astype(np.int64)
    window: list[int] = []
    answers, used = [], 0
    for cut, is_question, sentence in sorted(cuts, key=lambda insertion: insertion[:2]):
        window += [*text[used:cut].tolist(), *sentence]
        used = cut
        if is_question:
            answers.append(np.arange(len(window) - characters, len(window)))
    return np.array([*window, *text[used:].tolist()], dtype=np.int64), np.stack(answers)


def _stack_puzzles(puzzles: Sequence[tuple[Ids, Ids]]) -> Puzzles:
    return Puzzles(*(torch.from_numpy(np.stack(part)) for part in zip(*puzzles, strict=True)))


def answer_logits(model: Any, puzzles: Puzzles) -> torch.Tensor:
    """Return the logits of the answers, (windows, questions, characters, vocabulary)."""
    hidden = model.base_model(input_ids=puzzles.windows[:, :-1], use_cache=False).last_hidden_state
    before = (puzzles.answers.flatten(1) - 1)[..., None].expand(-1, -1, hidden.shape[-1])
    logits: torch.Tensor = model.get_output_embeddings()(hidden.gather(1, before))
    return logits.reshape(*puzzles.answers.shape, -1)
