"""Records as a training leaves them, with numbers of our choice."""

from collections.abc import Mapping, Sequence
from typing import Any

from attnorm_lab.experiments.retrieval.plan import Section, Training, TrainingRecords
from attnorm_lab.training.retrieval.data import RetrievalRecipe
from attnorm_lab.training.retrieval.evaluate import Trials
from attnorm_lab.training.retrieval.model import run_key

SEEDS = (0, 1, 2)


def training(
    section: Section = "paper",
    label: str = "softmax",
    sizes: tuple[int, ...] = (16, 64),
    others: tuple[str, ...] = ("hard",),
    **changed: Any,
) -> Training:
    task = section if section in ("recall", "majority") else "max"
    recipe = RetrievalRecipe(**{"steps": 3, "batch": 4, "width": 8, **changed})
    normalizer = "softmax" if section in ("parts", "steps") else label
    return Training(section, label, task, normalizer, recipe, Trials(sizes=sizes, sets=10, others=others))


def record(of: Training, size: int, seed: int, tested_with: str, accuracy: float, **changed: Any) -> dict[str, Any]:
    usual = {
        "run": run_key(of.task, of.normalizer, of.recipe, changed.get("device", "cpu")),
        "task": of.task, "normalizer": of.normalizer, "device": "cpu", "seed": seed, "size": size, "sets": 10,
        "tested_with": tested_with, "accuracy": accuracy, "logits_wrong": 0.75 * (1 - accuracy),
        "dispersed": 0.25 * (1 - accuracy), "logits_right": accuracy, "winner_weight": 0.5, "slope": 100.0,
        "leak": 1e-3, "learned": {},
    }  # fmt: skip
    return {**usual, **changed}


def found(
    of: Training, percents: Mapping[str, Sequence[float]], jitter: float = 0.1, **changed: Any
) -> TrainingRecords:
    """% right by test, one for each size; seeds lie `jitter` points apart around it."""
    records = [
        record(of, size, seed, name, (percent + jitter * (seed - 1)) / 100, **changed)
        for name, numbers in percents.items()
        for size, percent in zip(of.trials.sizes, numbers, strict=True)
        for seed in SEEDS
    ]
    return TrainingRecords(of, records, True)
