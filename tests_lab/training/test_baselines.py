"""Counting, checked by hand and against the plain V x V table."""

from math import log

import numpy as np
import pytest

from attnorm_lab.training.lm import evaluate as module
from attnorm_lab.training.lm.evaluate import baselines


def test_a_text_counted_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STRENGTHS", (2.0,))
    train = np.array([0, 1, 0, 1, 0, 2], dtype=np.uint16)
    valid = np.array([0, 1, 2], dtype=np.uint16)
    counted = baselines(train, valid, vocabulary=3)
    # Unigram, one added to each of the counts 3, 2, 1: p = 4/9, 3/9, 2/9.
    assert counted.unigram == pytest.approx(-(log(3 / 9) + log(2 / 9)) / 2)
    # Bigram, k = 2: 0 is followed by 1 twice of three times; 1 is followed by 0 twice of two times, never by 2.
    first, second = (2 + 2 * 3 / 9) / (3 + 2), (0 + 2 * 2 / 9) / (2 + 2)
    assert counted.bigram == pytest.approx(-(log(first) + log(second)) / 2)
    assert counted.bigram_strength == 2.0


def test_it_agrees_with_the_whole_table_however_the_text_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AT_ONCE", 7)
    generator = np.random.default_rng(0)
    vocabulary = 11
    train, valid = (generator.integers(0, vocabulary, size, dtype=np.uint16) for size in (500, 90))
    pairs = np.zeros((vocabulary, vocabulary))
    np.add.at(pairs, (train[:-1], train[1:]), 1)
    unigram = (np.bincount(train, minlength=vocabulary) + 1) / (len(train) + vocabulary)
    losses = {}
    for strength in module.STRENGTHS:
        table = (pairs + strength * unigram) / (pairs.sum(1, keepdims=True) + strength)
        assert table.sum(1) == pytest.approx(1)
        losses[strength] = -np.log(table[valid[:-1], valid[1:]]).mean()
    counted = baselines(train, valid, vocabulary)
    assert counted.bigram == pytest.approx(min(losses.values()))
    assert losses[counted.bigram_strength] == min(losses.values())
    assert counted.unigram == pytest.approx(-np.log(unigram[valid[1:]]).mean())


def test_a_large_vocabulary_needs_no_large_table() -> None:
    train = np.arange(2**16, dtype=np.uint16)
    counted = baselines(train, train[::-1].copy(), 2**16)
    assert counted.unigram == pytest.approx(log(2**16))
    assert np.isfinite(counted.bigram)
