"""The validation loss is the mean over tokens, and the counted baselines are those of the whole table."""

from math import log

import numpy as np
import pytest
import torch

from attnorm.evaluation.windows import validation_windows
from attnorm_lab.training.lm import evaluate as evaluation
from attnorm_lab.training.lm import evaluate as module
from attnorm_lab.training.lm.evaluate import baselines, output_logits, validation_loss
from attnorm_lab.training.lm.model import build_model
from tests_lab.training.conftest import tiny


@pytest.mark.parametrize("batch", [1, 2, 16])
def test_every_token_weighs_the_same(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "EVALUATION_BATCH", batch)
    model = build_model(tiny(context=8), vocabulary=50, end_of_text=0).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)  # so that losses differ from token to token
    tokens = np.random.default_rng(0).integers(0, 50, 8 * 5 + 4, dtype=np.uint16)  # the last window is short
    windows = validation_windows(tokens, context=8)
    losses = []
    for window in windows:
        log_p = model(window[None, :-1]).logits[0].detach().double().log_softmax(-1)
        losses += [-float(log_p[index, token]) for index, token in enumerate(window[1:])]
    assert len(losses) == len(tokens) - 1
    assert validation_loss(model, windows, torch.device("cpu"), torch.float32) == pytest.approx(
        np.mean(losses), rel=1e-5
    )


@pytest.mark.parametrize("vocabulary", [50, 64])
def test_logits_do_not_depend_on_the_size_of_their_product(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 12, generator=generator, requires_grad=True) for n in (7, vocabulary))
    results = []
    for step in (1, 64):
        logits = output_logits(hidden, weight, step)
        gradients = torch.autograd.grad(logits.logsumexp(-1).square().sum(), (hidden, weight))
        results.append((logits, *gradients))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_weights_depend_on_the_seed_alone_and_leave_the_generator_as_it_was() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one = build_model(tiny(), vocabulary=50, end_of_text=0)
    assert torch.equal(torch.rand(3), expected)
    other = build_model(tiny(), vocabulary=50, end_of_text=0)
    assert all(torch.equal(*pair) for pair in zip(one.parameters(), other.parameters(), strict=True))


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
