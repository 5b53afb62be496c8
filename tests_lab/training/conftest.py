"""A text with a grammar that a tiny model learns in a second, and the settings of such a model."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnorm_lab.training.lm.model import LMSettings
from attnorm_lab.training.lm.train import train_lm

SUBJECTS = ("the old captain", "a young woman", "her brother", "the prince", "nobody")
VERBS = ("saw", "never forgot", "asked for", "lost", "had always known")
OBJECTS = ("the sea", "a letter", "the house on the hill", "two horses", "the truth")


def write_text(path: Path, sentences: int, seed: int) -> Path:
    chooser = random.Random(seed)
    lines = [
        f"{chooser.choice(SUBJECTS)} {chooser.choice(VERBS)} {chooser.choice(OBJECTS)}.".capitalize()
        for _ in range(sentences)
    ]
    path.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("texts")
    return write_text(folder / "train.txt", 2000, seed=1), write_text(folder / "valid.txt", 50, seed=2)


@pytest.fixture(scope="session")
def encoded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all runs of the session share their tokens."""
    return tmp_path_factory.mktemp("encoded")


@pytest.fixture(scope="session")
def train(texts: tuple[Path, Path], encoded: Path) -> Callable[..., dict[str, Any]]:
    """train(out, steps=..., ...) trains the tiny model; what is no setting goes to `train_lm`."""

    def run(out: Path, *, options: dict[str, Any] | None = None, **changed: Any) -> dict[str, Any]:
        return train_lm([texts[0]], texts[1], out, tiny(**changed), data=encoded, device="cpu", **(options or {}))

    return run


def tiny(**changed: Any) -> LMSettings:
    small: dict[str, Any] = {
        "layers": 2, "heads": 2, "width": 32, "context": 32, "vocab": 300, "steps": 30, "batch": 8,
        "learning_rate": 1e-2, "warmup": 5,
    }  # fmt: skip
    return LMSettings(**{**small, **changed})
