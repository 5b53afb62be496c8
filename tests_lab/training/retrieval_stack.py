"""Small stacks that learn in seconds on a CPU."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from attnorm_lab.training.retrieval.data import RetrievalRecipe, find_task
from attnorm_lab.training.retrieval.evaluate import evaluate
from attnorm_lab.training.retrieval.model import Retrievers, normalizer_for
from attnorm_lab.training.retrieval.train import Trained, train

CPU = torch.device("cpu")


def small(**changed: Any) -> RetrievalRecipe:
    usual: dict[str, Any] = {"steps": 200, "batch": 64, "width": 32, "learning_rate": 5e-3}
    return RetrievalRecipe(**{**usual, **changed})


def trained(normalizer: str = "softmax", seeds: Sequence[int] = (0,), task: str = "max", **changed: Any) -> Trained:
    chosen = normalizer_for(normalizer, len(seeds))
    return train(find_task(task), chosen, seeds, small(**changed), device=CPU)


@cache
def learned() -> Trained:
    """Seeds 0 and 1, which can pick the largest of 16."""
    return trained(seeds=(0, 1))


def outcomes(
    models: Retrievers, seeds: Sequence[int], size: int, task: str = "max", sets: int = 256, others: Sequence[str] = ()
) -> list[dict[str, Any]]:
    tests = {"own": None} | {name: normalizer_for(name, len(seeds)) for name in others}
    return evaluate(models, find_task(task), seeds, size, sets, tests)
