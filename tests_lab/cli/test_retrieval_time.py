"""The estimate of `train retrieval`: all normalizers, training by steps, tests by items."""

import pytest

from attnorm_lab.cli.train_tasks import TimeLeft
from attnorm_lab.training.retrieval.train import RetrievalProgress


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def at(number: int, stage: str, done: int, total: int) -> RetrievalProgress:
    return RetrievalProgress(f"normalizer {number}", number, 2, stage, done, total)


def test_the_estimate_counts_the_normalizers_and_tests_to_come() -> None:
    clock = Clock()
    left = TimeLeft(sizes=(10, 90), sets=4, now=clock)
    assert left.words == ""
    words = []
    for seconds, state in [
        (0, at(1, "training", 0, 300)),
        (50, at(1, "training", 100, 300)),  # slow: compilation; not in the pace
        (60, at(1, "training", 200, 300)),  # 0.1 s a step; 100 steps here and 300 of the second normalizer: 40 s
        (70, at(1, "training", 300, 300)),
        (70, at(1, "testing", 0, 2)),
        (72, at(1, "testing", 1, 2)),  # 40 items in 2 s: 360 + 400 items take 38 s, 300 steps 30 s
        (90, at(1, "testing", 2, 2)),
        (90, at(2, "training", 0, 300)),
        (110, at(2, "testing", 0, 2)),
        (112, at(2, "testing", 1, 2)),
        (130, at(2, "testing", 2, 2)),
    ]:
        clock.seconds = seconds
        left.see(state)
        words.append(left.words)
    assert words[:2] == ["", ""]
    assert words[2] == "about 40 s of training left, then tests"
    assert words[5] == "about 68 s left"
    assert words[6] == "about 50 s left"
    assert words[9] == "about 18 s left"
    assert words[10] == ""


@pytest.mark.parametrize("done", [0, 100])
def test_a_resumed_training_is_estimated_from_its_own_steps(done: int) -> None:
    clock = Clock()
    left = TimeLeft(sizes=(10,), sets=4, now=clock)
    for seconds, steps in [(0, done), (10, 200), (20, 300)]:
        clock.seconds = seconds
        left.see(at(2, "training", steps, 400))
    assert left.words == "about 10 s of training left, then tests"
