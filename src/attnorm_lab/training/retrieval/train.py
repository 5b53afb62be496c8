"""Train and test models for several normalizers in one folder; finished work is not repeated.

    records.jsonl   a line per normalizer, seed, size and normalizer at test time
    metrics.jsonl   the training loss of every seed, each hundred steps
    models/         the weights, one safetensors file per normalizer and group of seeds
    checkpoints/    weights and optimizer state of the models in training
    manifest.json   versions, command, and the settings of every file of weights

The folder may hold several tasks and recipes: lines and models carry the key of their run. Its files are always
complete, so an interrupted run continues with the same call.

All seeds of a normalizer train at once, on the same data for every normalizer. On CUDA the steps are so small that
kernel launches would cost more than the work. So the loss and its gradient are compiled into one CUDA graph
(torch.compile, reduce-overhead), and AdamW is one fused kernel. `compiled=False` runs uncompiled on any device.

The data of a step follow from seed and step, so a checkpoint needs only weights, optimizer state and the step. Losses
logged after the last checkpoint are dropped when training resumes from it.
"""

import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attnorm.files import append_jsonl, read_jsonl, write_json, write_text
from attnorm.normalizers.contract import Normalizer
from attnorm.provenance import now, versions
from attnorm.run_folder import only_process, require_only
from attnorm_lab.training.checkpoints import (
    StopRequest,
    TrainingInterrupted,
    finished_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from attnorm_lab.training.device import accelerated, check_accelerate, chosen_device, device_name
from attnorm_lab.training.retrieval.data import Batch, RetrievalRecipe, Task, find_task, training_batches
from attnorm_lab.training.retrieval.evaluate import RECORDS, Record, Trials, leaked_share, records_of
from attnorm_lab.training.retrieval.model import (
    FOLDER,
    Retrievers,
    TrainedSeeds,
    find_trained_seeds,
    mixture,
    normalizer_for,
    run_key,
    save_trained_seeds,
    trained_seeds_name,
)
from attnorm_lab.training.run import CHECKPOINTS

if TYPE_CHECKING:
    from accelerate import Accelerator

MANIFEST = "manifest.json"
METRICS = "metrics.jsonl"
REPORT_EVERY = 100  # steps; reading the loss makes the GPU wait
_SMALLEST_VARIANCE = 1e-12
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


RetrievalCallback = Callable[[RetrievalProgress], None]


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
    report: RetrievalCallback = lambda progress: None,
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
    out: Path, job: _Job, seeds: Sequence[int], progress: RetrievalProgress, report: RetrievalCallback
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
        "device": device_name(device),
        "versions": versions(),
        "models": [
            {"file": stack.path.relative_to(out).as_posix(), **stack.about} for stack in find_trained_seeds(out)
        ],
    }
    write_json(out / MANIFEST, manifest)
    return manifest


def _report_sizes(report: RetrievalCallback, testing: RetrievalProgress, done: int) -> None:
    report(replace(testing, done=done))


def _check_names(normalizers: Sequence[str], seeds: Sequence[int]) -> None:
    for what, values in (("normalizers", normalizers), ("seeds", seeds)):
        if not values:
            raise ValueError(f"{what}: expected at least one, got none.")
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


@dataclass(frozen=True)
class Journal:
    """Checkpoints and losses of the models `name`, in the folder of their run."""

    out: Path
    name: str
    every: int = 2000  # steps from one checkpoint to the next

    @property
    def folder(self) -> Path:
        return self.out / CHECKPOINTS / self.name

    def resume(
        self, models: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> tuple[int, float]:
        """Restore the last checkpoint; return the steps done and the seconds spent until then.

        Raises:
            ValueError: The checkpoint is damaged or belongs to other models.
        """
        checkpoints = finished_checkpoints(self.folder)
        record = load_checkpoint(checkpoints[-1], models, optimizer, device) if checkpoints else {}
        step, seconds = int(record.get("step", 0)), float(record.get("seconds", 0))
        self._forget_after(step)
        return step, seconds

    def log(self, step: int, losses: Sequence[float], seconds: float) -> None:
        """Log the cross entropy of each seed in a step, without penalties; null if it is not finite."""
        numbers = [round(loss, 6) if math.isfinite(loss) else None for loss in losses]
        append_jsonl(
            self.out / METRICS, [{"stack": self.name, "step": step, "losses": numbers, "seconds": round(seconds, 2)}]
        )

    def save(self, models: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, seconds: float) -> None:
        save_checkpoint(self.folder, models, optimizer, step, {"seconds": seconds})

    def close(self) -> None:
        """Remove the checkpoints, after the trained weights are saved elsewhere."""
        shutil.rmtree(self.folder, ignore_errors=True)
        if self.folder.parent.is_dir() and not any(self.folder.parent.iterdir()):
            self.folder.parent.rmdir()

    def _forget_after(self, step: int) -> None:
        path = self.out / METRICS
        lines = read_jsonl(path)
        kept = [line for line in lines if line.get("stack") != self.name or line["step"] <= step]
        if len(kept) < len(lines):
            write_text(path, "".join(json.dumps(line) + "\n" for line in kept))


@dataclass(frozen=True)
class Trained:
    models: Retrievers
    losses: list[float]  # of each copy in the last step, without penalties
    seconds: float


def train(
    task: Task,
    normalizer: Normalizer,
    seeds: Sequence[int],
    recipe: RetrievalRecipe,
    *,
    device: torch.device,
    compiled: bool = False,
    journal: Journal | None = None,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> Trained:
    """Train one model per seed.

    Args:
        journal: Where to resume from and where to write checkpoints and losses (default: nothing is kept).
        report: Called with steps done and mean loss, every hundred steps.

    Raises:
        ValueError: The recipe squeezes priorities but the task has none, or the checkpoint is damaged.
        TrainingInterrupted: Ctrl-C or SIGTERM, with a journal; a checkpoint was written.
    """
    check_recipe(recipe, task)
    began = time.monotonic()
    models = Retrievers(task, normalizer, seeds, recipe.width).to(device)
    optimizer = _optimizer(models, recipe, device)
    first, spent = journal.resume(models, optimizer, device) if journal else (0, 0.0)
    losses = torch.full((len(seeds),), torch.nan)

    def seconds() -> float:
        return spent + time.monotonic() - began

    with accelerated(device, recipe.dtype) as accelerator, StopRequest() if journal else nullcontext() as stop:
        step_loss = _step_loss(models, recipe, accelerator, compiled)
        for done, batch in enumerate(training_batches(task, seeds, recipe, device, first), first + 1):
            if recipe.cosine:
                _set_rate(optimizer, recipe.rate_at(done - 1))
            optimizer.zero_grad(set_to_none=True)
            total, losses = step_loss(batch)
            accelerator.backward(total)
            optimizer.step()
            last = done == recipe.steps
            if done % REPORT_EVERY == 0 or last:
                seed_losses = losses.tolist()
                if journal:
                    journal.log(done, seed_losses, seconds())
                report(done, sum(seed_losses) / len(seed_losses))
            if journal and not last and (done % journal.every == 0 or (stop and stop.requested)):
                journal.save(models, optimizer, done, seconds())
            if stop and stop.requested and not last:
                raise TrainingInterrupted(done)
    return Trained(models.eval(), losses.tolist(), seconds())


def check_recipe(recipe: RetrievalRecipe, task: Task) -> None:
    """Check that the recipe fits the task.

    Raises:
        ValueError: The recipe squeezes priorities, but the task has none.
    """
    if recipe.squeezed and not task.has_priority:
        raise ValueError(
            f"squeezed: expected 0 for the task {task.name!r}, which has no priorities, got {recipe.squeezed:g}. "
            "Set it to 0."
        )


def _optimizer(models: Retrievers, recipe: RetrievalRecipe, device: torch.device) -> torch.optim.AdamW:
    """Return AdamW; on CUDA as one fused kernel without synchronization, so its learning rate is a tensor.

    accelerate does not wrap it: its wrapper searches for packages on disk at every step, and steps are short.
    """
    on_cuda = device.type == "cuda"
    rate = torch.tensor(recipe.learning_rate, device=device) if on_cuda else recipe.learning_rate
    return torch.optim.AdamW(
        models.parameters(), lr=rate, weight_decay=recipe.weight_decay, fused=on_cuda, capturable=on_cuda
    )


def _step_loss(
    models: Retrievers, recipe: RetrievalRecipe, accelerator: "Accelerator", compiled: bool
) -> Callable[[Batch], tuple[Tensor, Tensor]]:
    def loss_of(batch: Batch) -> tuple[Tensor, Tensor]:
        return _loss(models, batch, recipe)

    if compiled:
        torch.compiler.reset()  # after eight models in one process it would stop compiling and only log it
        loss_of = torch.compile(loss_of, mode="reduce-overhead")

    def step(batch: Batch) -> tuple[Tensor, Tensor]:
        if compiled:
            torch.compiler.cudagraph_mark_step_begin()  # from here the previous step's gradients may be overwritten
        with accelerator.autocast():
            return loss_of(batch)

    return step


def _loss(models: Retrievers, batch: Batch, recipe: RetrievalRecipe) -> tuple[Tensor, Tensor]:
    """Return the sum over the copies, so that each gets the gradient of its own mean, and each cross entropy."""
    read = models.read(batch.items_SBNF)
    logits = models.logits(read, batch.query_SBF)
    values = models.values(read, batch.label_SB.shape[1])
    scaled = _standardized(logits, batch.visible_SBN, recipe.standardized) if recipe.standardized else logits
    scores = models.classes(mixture(models.weights(scaled, batch.visible_SBN), values))
    entropies = F.cross_entropy(scores.flatten(0, 1), batch.label_SB.flatten(), reduction="none")
    losses = entropies.unflatten(0, batch.label_SB.shape).mean(-1)
    total = losses.sum()
    if batch.other_SBN is not None:
        total = total + recipe.leak_penalty * leaked_share(models, batch, logits).sum()
    return total, losses.detach()


def _standardized(logits_SBN: Tensor, visible_SBN: Tensor, deviation: float) -> Tensor:
    """Scale every set's logits to mean 0 and this standard deviation; equal logits stay equal."""
    n = visible_SBN.sum(-1, keepdim=True)
    centered = logits_SBN - (logits_SBN * visible_SBN).sum(-1, keepdim=True) / n
    variance = (centered.square() * visible_SBN).sum(-1, keepdim=True) / n
    return deviation * centered * (variance + _SMALLEST_VARIANCE).rsqrt()


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
