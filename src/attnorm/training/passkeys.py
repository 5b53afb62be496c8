"""Texts with a pass key hidden in them and a question at the end: does a model find the key again, and how far back?

    ... filler ... The pass key is 40713. ... filler ... What is the pass key? The pass key is 40713

Every digit is a token of its own, so that all keys are equally long. After Mohtashami & Jaggi 2023,
https://arxiv.org/abs/2305.16300.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64

from attnorm.training.tokens import Tokens

Ids = np.ndarray[Any, np.dtype[np.int64]]

BEFORE_KEY = "\n\nThe pass key is"
AFTER_KEY = ".\n\n"
QUESTION = "\n\nWhat is the pass key? The pass key is"


@dataclass(frozen=True)
class Puzzles:
    """Windows of tokens and where the answers stand in them."""

    windows: "Int64[torch.Tensor, 'batch length']"
    answers: "Int64[torch.Tensor, 'batch digits']"
    """Places of the answer's tokens: each is predicted from all tokens before it."""

    def to(self, device: torch.device) -> "Puzzles":
        moved = (self.windows, self.answers)
        if device.type == "cuda":
            moved = (self.windows.pin_memory(), self.answers.pin_memory())
        return Puzzles(*(part.to(device, non_blocking=True) for part in moved))

    @property
    def targets(self) -> "Int64[torch.Tensor, 'batch digits']":
        return self.windows.gather(1, self.answers)


@dataclass(frozen=True)
class Wording:
    """The sentences around a key, as tokens of one tokenizer."""

    before: tuple[int, ...]
    after: tuple[int, ...]
    question: tuple[int, ...]
    digits: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Any) -> "Wording":
        """From a `tokenizers.Tokenizer`.

        Raises:
            ValueError: It has no tokens for single digits.
        """
        digits = [tokenizer.token_to_id(str(digit)) for digit in range(10)]
        if None in digits:
            raise ValueError(
                f"the tokenizer has no token for the digit {digits.index(None)}; a pass key is made of single digits"
            )
        before, after, question = (
            tuple(tokenizer.encode(text, add_special_tokens=False).ids) for text in (BEFORE_KEY, AFTER_KEY, QUESTION)
        )
        return cls(before, after, question, tuple(digits))

    def needle(self, key: Sequence[int]) -> list[int]:
        return [*self.before, *key, *self.after]

    def answered(self, key: Sequence[int]) -> list[int]:
        return [*self.question, *key]

    def size(self, digits: int) -> int:
        """Tokens that the two sentences take."""
        return len(self.before) + len(self.after) + len(self.question) + 2 * digits


def shortest_window(wording: Wording, digits: int) -> int:
    return wording.size(digits) + 1  # at least one token of filler between the two


def training_puzzles(
    filler: Tokens, wording: Wording, *, digits: int, seed: int, step: int, batch: int, length: int
) -> Puzzles:
    """Windows with the question anywhere after the key: all distances up to the length, in windows of one shape.

    Half of the distances are uniform and half log-uniform: without near ones a model takes long to find out what is
    asked of it.
    """
    generator = np.random.default_rng((seed, step))
    longest = length - wording.size(digits)
    windows, answers = [], []
    for row in range(batch):
        if row % 2:
            distance = int(generator.integers(1, longest + 1))
        else:
            distance = int(math.exp(generator.uniform(0.0, math.log(longest + 1))))
        start = int(generator.integers(0, longest - distance + 1))
        window, answer = _puzzle(filler, wording, generator, digits, length, start, distance)
        windows.append(window)
        answers.append(answer)
    return Puzzles(torch.from_numpy(np.stack(windows)), torch.from_numpy(np.stack(answers)))


def puzzles_at(
    filler: Tokens, wording: Wording, *, digits: int, seed: int, count: int, length: int, depth: float
) -> Puzzles:
    """Windows that end with the answer; depth 0 has the key at the very start, 1 right before the question."""
    generator = np.random.default_rng((seed, length, round(1000 * depth)))
    room = length - wording.size(digits)
    start = round(depth * (room - 1))
    made = [_puzzle(filler, wording, generator, digits, length, start, room - start) for _ in range(count)]
    return Puzzles(*(torch.from_numpy(np.stack(part)) for part in zip(*made, strict=True)))


def _puzzle(
    filler: Tokens,
    wording: Wording,
    generator: np.random.Generator,
    digits: int,
    length: int,
    start: int,
    distance: int,
) -> tuple[Ids, Ids]:
    """The key from `start` on, `distance` tokens of filler, the question with its answer, and filler to the end."""
    key = [wording.digits[digit] for digit in generator.integers(0, 10, size=digits)]
    needle, question = wording.needle(key), wording.answered(key)
    room = length - len(needle) - len(question)
    place = int(generator.integers(0, len(filler) - room + 1))
    text = filler[place : place + room].astype(np.int64)
    middle, end = start + distance, start + len(needle) + distance + len(question)
    window = np.concatenate([text[:start], needle, text[start:middle], question, text[middle:]])
    return window, np.arange(end - digits, end)
