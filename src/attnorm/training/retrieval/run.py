"""Train and test models for several normalizers in one folder; finished work is not repeated.

    records.jsonl   a line per normalizer, seed, size and normalizer at test time
    metrics.jsonl   the training loss of every seed, each hundred steps
    models/         the weights, one safetensors file per normalizer and group of seeds
    checkpoints/    weights and optimizer state of the models in training
    manifest.json   versions, command, and the settings of every file of weights

The folder may hold several tasks and recipes: lines and models carry the key of their run. Its files are always
complete, so an interrupted run continues with the same call.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from attnorm.files import write_json
from attnorm.normalizers.former_defaults import state_spec
from attnorm.provenance import now, versions
from attnorm.run_folder import only_process, require_only
from attnorm.training.device import check_accelerate, chosen_device
from attnorm.training.retrieval.data import Task, find_task
from attnorm.training.retrieval.evaluate import RECORDS, Record, Trials, records_of
from attnorm.training.retrieval.model import (
    FOLDER,
    TrainedSeeds,
    find_trained_seeds,
    normalizer_for,
    run_key,
    save_trained_seeds,
    trained_seeds_name,
)
from attnorm.training.retrieval.recipe import RetrievalRecipe
from attnorm.training.retrieval.train import CHECKPOINTS, METRICS, Journal, check_recipe, train

MANIFEST = "manifest.json"
SEEDS = tuple(range(10))


@dataclass(frozen=True)
class RetrievalProgress:
    """Training steps (with the loss) or test sizes done for the current normalizer, number `number` of `of`."""

    normalizer: str
    number: int
    of: int
    stage: str
    done: int
    total: int
    loss: float | None = None


Report = Callable[[RetrievalProgress], None]


@dataclass(frozen=True)
class Results:
    records: list[Record]  # sorted by normalizer, test, size and seed
    manifest: dict[str, Any]


def train_retrieval(
    normalizers: Sequence[str],
    out: Path,
    *,
    task: str = "max",
    seeds: Sequence[int] = SEEDS,
    recipe: RetrievalRecipe | None = None,
    trials: Trials | None = None,
    device: str | None = None,
    compiled: bool | None = None,
    checkpoint_every: int = 2000,
    command: str = "",
    report: Report = lambda progress: None,
) -> Results:
    """Train one model per normalizer and seed, and test each on sets of every size.

    Args:
        device: Default: a GPU if there is one.
        compiled: Compile the training step with torch.compile (default: on CUDA).
        checkpoint_every: Steps between checkpoints.
        command: The command line, for the manifest.

    Raises:
        ImportError: accelerate is not installed.
        ValueError: Unknown names, values out of range, a folder with other files or in use by another process, damaged
            files, or several processes.
        TrainingInterrupted: Ctrl-C or SIGTERM while training; a checkpoint was written.
    """
    if checkpoint_every < 1:
        raise ValueError(f"checkpoint_every must be at least 1, got {checkpoint_every}")
    check_accelerate()
    normalizers = [*map(state_spec, normalizers)]
    recipe, trials = recipe or RetrievalRecipe(), trials or Trials()
    chosen_task, torch_device = find_task(task), chosen_device(device)
    compiled = torch_device.type == "cuda" if compiled is None else compiled
    check_recipe(recipe, chosen_task)
    _check_names(normalizers, seeds)
    require_only(out, {RECORDS, METRICS, MANIFEST, FOLDER, CHECKPOINTS}, "files of something else")
    records: list[Record] = []
    manifest: dict[str, Any] = {}
    with only_process(out):
        for number, name in enumerate(normalizers, 1):
            progress = RetrievalProgress(name, number, len(normalizers), "training", 0, recipe.steps)
            job = _Job(chosen_task, name, recipe, torch_device, compiled, checkpoint_every, command)
            for stack in _trained_seeds(out, job, seeds, progress, report):
                testing = replace(progress, stage="testing", total=len(trials.sizes))
                stack_records = records_of(
                    out, stack, chosen_task, trials, torch_device, partial(_report_sizes, report, testing)
                )
                records += [record for record in stack_records if record["seed"] in seeds]
            manifest = _write_manifest(out, command, torch_device)  # after each, so that an interrupted run has one
    return Results(_sort_records(records, normalizers, trials.names), manifest)


@dataclass(frozen=True)
class _Job:
    """Everything besides the seeds that decides the weights of one normalizer's models, and how they are made."""

    task: Task
    normalizer: str
    recipe: RetrievalRecipe
    device: torch.device
    compiled: bool
    checkpoint_every: int
    command: str


def _trained_seeds(
    out: Path, job: _Job, seeds: Sequence[int], progress: RetrievalProgress, report: Report
) -> list[TrainedSeeds]:
    """Return the trained models with these seeds; train the missing seeds together."""
    key = run_key(job.task.name, job.normalizer, job.recipe, job.device.type)
    held = [stack for stack in find_trained_seeds(out, key) if set(stack.seeds) & set(seeds)]
    missing = sorted(set(seeds) - {seed for stack in held for seed in stack.seeds})
    if not missing:
        return held
    report(progress)
    journal = Journal(out, trained_seeds_name(key, missing), job.checkpoint_every)
    trained = train(
        job.task,
        normalizer_for(job.normalizer, len(missing)),
        missing,
        job.recipe,
        device=job.device,
        compiled=job.compiled,
        journal=journal,
        report=lambda step, loss: report(replace(progress, done=step, loss=loss)),
    )
    about = {
        "task": job.task.name,
        "normalizer": job.normalizer,
        "recipe": job.recipe.as_dict(),
        "device": job.device.type,
        "compiled": job.compiled,
        "train_losses": [loss if math.isfinite(loss) else None for loss in trained.losses],
        "train_seconds": round(trained.seconds, 2),
        "command": job.command,
        "versions": versions(),
    }
    stack = save_trained_seeds(out, key, missing, trained.models, about)
    journal.close()
    return [*held, stack]


def _write_manifest(out: Path, command: str, device: torch.device) -> dict[str, Any]:
    manifest = {
        "command": command,
        "written": now(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "versions": versions(),
        "models": [
            {"file": stack.path.relative_to(out).as_posix(), **stack.about} for stack in find_trained_seeds(out)
        ],
    }
    write_json(out / MANIFEST, manifest)
    return manifest


def _report_sizes(report: Report, testing: RetrievalProgress, done: int) -> None:
    report(replace(testing, done=done))


def _check_names(normalizers: Sequence[str], seeds: Sequence[int]) -> None:
    for what, values in (("normalizers", normalizers), ("seeds", seeds)):
        if not values:
            raise ValueError(f"no {what}; give at least one")
        twice = [value for value in values if list(values).count(value) > 1]
        if twice:
            raise ValueError(f"expected distinct {what}, got {twice[0]!r} twice. Remove one.")
    if min(seeds) < 0:
        raise ValueError(f"seeds must not be negative, got {min(seeds)}")
    for name in normalizers:
        normalizer_for(name, len(seeds))


def _sort_records(records: list[Record], normalizers: Sequence[str], tests: Sequence[str]) -> list[Record]:
    def order(record: Record) -> tuple[int, int, int, int]:
        first, second = list(normalizers).index(record["normalizer"]), list(tests).index(record["tested_with"])
        return first, second, record["size"], record["seed"]

    return sorted(records, key=order)
