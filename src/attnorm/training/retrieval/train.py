"""Train all seeds of a normalizer at once, on the same data for every normalizer; checkpoints and a log of losses.

On CUDA the steps are so small that kernel launches would cost more than the work. So the loss and its gradient are
compiled into one CUDA graph (torch.compile, reduce-overhead), and AdamW is one fused kernel. `compiled=False` runs
uncompiled on any device.

The data of a step follow from seed and step, so a checkpoint needs only weights, optimizer state and the step. Losses
logged after the last checkpoint are dropped when training resumes from it.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from attnorm.normalizers.contract import Normalizer
from attnorm.training.checkpoints import StopRequest, TrainingInterrupted
from attnorm.training.device import accelerated
from attnorm.training.retrieval.data import Batch, Task, training_batches
from attnorm.training.retrieval.evaluate import leaked_share
from attnorm.training.retrieval.model import Retrievers, mixture
from attnorm.training.retrieval.recipe import RetrievalRecipe

if TYPE_CHECKING:
    from accelerate import Accelerator
import json
import math
import shutil
from pathlib import Path

from attnorm.files import append_jsonl, read_jsonl, write_text
from attnorm.training.checkpoints import finished_checkpoints, load_checkpoint, save_checkpoint

METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
_SMALLEST_VARIANCE = 1e-12
REPORT_EVERY = 100  # steps; reading the loss makes the GPU wait


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
            if journal and not last and (done % journal.every == 0 or (stop and stop.asked)):
                journal.save(models, optimizer, done, seconds())
            if stop and stop.asked and not last:
                raise TrainingInterrupted(done)
    return Trained(models.eval(), losses.tolist(), seconds())


def check_recipe(recipe: RetrievalRecipe, task: Task) -> None:
    """Check that the recipe fits the task.

    Raises:
        ValueError: The recipe squeezes priorities, but the task has none.
    """
    if recipe.squeezed and not task.has_priority:
        raise ValueError(f"squeezed is for tasks with priorities, and {task.name!r} has none; leave it at 0")


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
    centred = logits_SBN - (logits_SBN * visible_SBN).sum(-1, keepdim=True) / n
    variance = (centred.square() * visible_SBN).sum(-1, keepdim=True) / n
    return deviation * centred * (variance + _SMALLEST_VARIANCE).rsqrt()


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
