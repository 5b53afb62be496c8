"""What a stack is tested on, and its records: those in the file already, and the missing ones, made and added."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from attnorm.normalizers.contract import Normalizer
from attnorm.training.retrieval.evaluation import evaluate, sets_at
from attnorm.training.retrieval.leak import class_leak, leak_at_top
from attnorm.training.retrieval.model import Retrievers
from attnorm.training.retrieval.normalizer import normalizer_for
from attnorm.training.retrieval.records import RECORDS, Record, append_records, read_records
from attnorm.training.retrieval.stacks import Stack, load_stack
from attnorm.training.retrieval.tasks import Task

SIZES = (16, 64, 256, 1024, 4096, 16_384)
OWN = "own"  # tested with the normalizer it was trained with


@dataclass(frozen=True, kw_only=True)
class Trials:
    """Sets of every size, fewer of very large ones; `others` are normalizers put in place of the trained one.

    Raises:
        ValueError: Sizes or their number make no sense, or a normalizer is unknown.
    """

    sizes: tuple[int, ...] = SIZES
    sets: int = 1024
    others: tuple[str, ...] = ("hard",)

    def __post_init__(self) -> None:
        if not self.sizes:
            raise ValueError("no sizes to test; at least one is needed")
        if min(self.sizes) < 2:
            raise ValueError(f"a set must have at least 2 items, got size {min(self.sizes)}")
        if self.sets < 1:
            raise ValueError(f"at least 1 set must be tested, got {self.sets}")
        for name in self.others:
            normalizer_for(name, 1)

    @property
    def names(self) -> tuple[str, ...]:
        return (OWN, *self.others)

    def asked(self, record: Record) -> bool:
        """Whether a record is among the results of these trials."""
        return (
            record["size"] in self.sizes
            and record["sets"] == sets_at(record["size"], self.sets)
            and record["tested_with"] in self.names
        )


def records_of(
    out: Path,
    stack: Stack,
    task: Task,
    trials: Trials,
    device: torch.device,
    report: Callable[[int], None],
) -> list[Record]:
    """All records of the stack that the tests ask for. `report(sizes done)` comes before each size and at the end."""
    path = out / RECORDS
    known = [
        r for r in read_records(path) if r.get("run") == stack.run and r["seed"] in stack.seeds and trials.asked(r)
    ]
    models: Retrievers | None = None
    for done, size in enumerate(trials.sizes):
        there = {(r["tested_with"], r["seed"]) for r in known if r["size"] == size}
        missing = [name for name in trials.names if any((name, seed) not in there for seed in stack.seeds)]
        if not missing:
            continue
        report(done)
        models = models or load_stack(stack, task, device)
        others: dict[str, Normalizer | None] = {
            name: None if name == OWN else normalizer_for(name, len(stack.seeds)).to(device) for name in missing
        }
        made = evaluate(models, task, stack.seeds, size, sets_at(size, trials.sets), others)
        about = _about(stack, models, task, size)
        new = [about[r["seed"]] | r for r in made if (r["tested_with"], r["seed"]) not in there]
        append_records(path, new)
        known += new
    report(len(trials.sizes))
    return known


def _about(stack: Stack, models: Retrievers, task: Task, size: int) -> dict[int, dict[str, Any]]:
    """For every seed: how it was trained, and how it ranks, over all and at the top of sets of this size."""
    about = stack.about
    shared = {name: about[name] for name in ("run", "task", "normalizer", "device")}
    leaks: list[dict[str, float | None]] = [{} for _ in stack.seeds]
    if task.has_priority:
        leaks = [
            over_all | at_top for over_all, at_top in zip(class_leak(models), leak_at_top(models, size), strict=True)
        ]
    return {
        seed: {
            **shared,
            **about["recipe"],
            "train_seconds": about["train_seconds"],
            "train_loss": about["train_losses"][copy],
            "learned": {name: value[copy].item() for name, value in models.normalizer.named_parameters()},
            **leaks[copy],
        }
        for copy, seed in enumerate(stack.seeds)
    }
