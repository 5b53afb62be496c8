"""What a language model must beat: counting tokens, and counting pairs of tokens.

Unigram: p(b) = (c(b) + 1) / (sum c + V). Bigram, interpolated with it: p(b | a) = (c(a, b) + k p(b)) / (c(a) + k),
where k is the one of a few that does best *on the validation text itself*: the comparison favours the baseline.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnorm.training.tokens import Tokens

STRENGTHS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
AT_ONCE = 2**22  # tokens of the training text in memory

Floats = np.ndarray[Any, np.dtype[np.float64]]
Counts = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class Baselines:
    """Nats per token, over every token of the validation text but its first."""

    unigram: float
    bigram: float
    bigram_strength: float


def baselines(train: Tokens, valid: Tokens, vocabulary: int) -> Baselines:
    counts = _token_counts(train, vocabulary)
    probabilities = (counts + 1) / (counts.sum() + vocabulary)
    before, after = valid[:-1].astype(np.int64), valid[1:].astype(np.int64)

    pairs, occurrences = np.unique(before * vocabulary + after, return_counts=True)
    contexts, targets = pairs // vocabulary, pairs % vocabulary
    together = _pair_counts(train, pairs, vocabulary)
    as_context = counts - np.bincount(train[-1:], minlength=vocabulary)  # nothing follows the last token
    losses = {
        strength: _mean_loss(
            (together + strength * probabilities[targets]) / (as_context[contexts] + strength), occurrences
        )
        for strength in STRENGTHS
    }
    best = min(losses, key=lambda strength: losses[strength])
    return Baselines(unigram=_mean_loss(probabilities[targets], occurrences), bigram=losses[best], bigram_strength=best)


def _mean_loss(probabilities: Floats, occurrences: Counts) -> float:
    return float(-(np.log(probabilities) * occurrences).sum() / occurrences.sum())


def _token_counts(tokens: Tokens, vocabulary: int) -> Counts:
    counts = np.zeros(vocabulary, dtype=np.int64)
    for start in range(0, len(tokens), AT_ONCE):
        counts += np.bincount(tokens[start : start + AT_ONCE], minlength=vocabulary)
    return counts


def _pair_counts(tokens: Tokens, pairs: Counts, vocabulary: int) -> Counts:
    """How often each of the sorted pairs occurs; only these are kept, so a large vocabulary costs no V x V table."""
    counts = np.zeros(len(pairs), dtype=np.int64)
    for seen in _pairs_of(tokens, vocabulary):
        place = np.searchsorted(pairs, seen)
        place[place == len(pairs)] = 0
        counts += np.bincount(place[pairs[place] == seen], minlength=len(pairs))
    return counts


def _pairs_of(tokens: Tokens, vocabulary: int) -> Iterator[Counts]:
    for start in range(0, len(tokens) - 1, AT_ONCE):
        some = tokens[start : start + AT_ONCE + 1].astype(np.int64)
        yield some[:-1] * vocabulary + some[1:]
