"""Which tokens are seen: a function of seed and step alone, every position possible, every validation token once."""

import numpy as np
import pytest
import torch

from attnorm.evaluation.windows import validation_windows
from attnorm_lab.training.lm.data import check_length, training_windows

TOKENS = np.arange(100, dtype=np.uint16)


def test_windows_depend_on_seed_and_step_alone() -> None:
    def windows(seed: int, step: int) -> torch.Tensor:
        return training_windows(TOKENS, seed=seed, step=step, batch=4, context=8)

    first = windows(3, 7)
    np.random.seed(1)
    torch.manual_seed(1)
    windows(3, 6)
    assert torch.equal(windows(3, 7), first)
    assert not torch.equal(windows(3, 8), first)
    assert not torch.equal(windows(4, 7), first)


def test_windows_are_runs_of_the_text_and_reach_both_of_its_ends() -> None:
    many = torch.cat([training_windows(TOKENS, seed=0, step=step, batch=100, context=8) for step in range(20)])
    assert many.shape == (2000, 9)
    assert torch.equal(many - many[:, :1], torch.arange(9).expand(2000, 9))
    assert set(many[:, 0].tolist()) == set(range(92))


@pytest.mark.parametrize("length", [10, 11, 17, 18, 19, 100])
def test_every_validation_token_but_the_first_is_predicted_once(length: int) -> None:
    windows = validation_windows(TOKENS[:length], context=9)
    predicted = torch.cat([window[1:] for window in windows])
    assert predicted.tolist() == list(range(1, length))
    assert all(len(window) <= 10 for window in windows)


def test_a_few_windows_are_spread_over_the_text() -> None:
    windows = validation_windows(TOKENS, context=9, most=3)
    assert [int(window[0]) for window in windows] == [0, 36, 81]
    assert all(len(window) == 10 for window in windows)


def test_the_shortest_text_has_one_window() -> None:
    check_length(TOKENS[:10], 8, "training")
    assert training_windows(TOKENS[:10], seed=0, step=0, batch=5, context=8).shape == (5, 9)
    with pytest.raises(ValueError, match=r"training text.*9 tokens.*8"):
        check_length(TOKENS[:9], 8, "training")
