"""A training run: model, learning rates (warmup, cosine), steps, checkpoints and the log of metrics.

The windows of a step depend only on the seed and the step, and checkpoints are atomic. So a resumed run continues
exactly where it stopped.
"""

import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch

from attnorm.files import write_text
from attnorm.training.checkpoints import StopRequest, finished_checkpoints, load_checkpoint, save_checkpoint
from attnorm.training.device import MemoryPeak, Processes
from attnorm.training.lm.attention import Attention, in_training, without_compiled_blocks
from attnorm.training.lm.data import Corpus, training_windows, validation_windows
from attnorm.training.lm.evaluate import validation_loss
from attnorm.training.lm.model import LMSettings, build_model
from attnorm.training.lm.step import TrainingStep, whole_windows

if TYPE_CHECKING:
    from accelerate import Accelerator

METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
LOG_EVERY = 10  # steps; reading the loss synchronizes with the GPU
QUICK_VALIDATION = 64  # windows of the validation loss while training; the final loss uses all
CLEAR_RISE = 0.05  # nats per token above the lowest validation loss


class Run:
    """A training run in a folder; it resumes from the last checkpoint if there is one."""

    def __init__(
        self,
        out: Path,
        settings: LMSettings,
        corpus: Corpus,
        accelerator: "Accelerator",
        *,
        compiled: bool = False,
        attention: Attention = "engine",
        processes: Processes | None = None,
    ) -> None:
        self.out, self.settings, self.corpus, self.accelerator = out, settings, corpus, accelerator
        self.compiled, self.attention, self.processes = compiled, attention, processes or Processes()
        # Not prepared by accelerate: it would wrap `forward` permanently, and the loss calls the base model.
        self.model = build_model(settings, corpus.vocabulary, corpus.end_of_text).to(accelerator.device)
        self.update = TrainingStep(
            self.model, settings, accelerator, compiled=compiled, attention=attention, processes=self.processes
        )
        self.optimizer = self.update.optimizer
        self.step, self.seconds = 0, 0.0
        if done := self.processes.by_first(lambda: finished_checkpoints(out / CHECKPOINTS)):
            state = load_checkpoint(done[-1], self.model, self.optimizer, accelerator.device)
            self.step, self.seconds = state["step"], state["seconds"]
        self.processes.by_first(lambda: keep_metrics(out / METRICS, self.step))
        self.quick = validation_windows(corpus.valid, settings.context, QUICK_VALIDATION)

    def steps(
        self, deadline: float, stop: StopRequest, evaluate_every: int, checkpoint_every: int | None
    ) -> Iterator[dict[str, float]]:
        """Train until the last step, the deadline or a request to stop; yield the log entries.

        An entry is checked to be finite before a checkpoint is written, so no checkpoint holds a broken model.
        checkpoint_every: None for no checkpoints.
        """
        try:
            with (
                in_training(self.model, compiled=self.compiled, attention=self.attention, dtype=self.settings.dtype),
                whole_windows(),
            ):
                yield from self._steps(deadline, stop, evaluate_every, checkpoint_every)
        finally:
            del self.update  # before the processes are disconnected
            self.optimizer.zero_grad()  # a captured step keeps its gradients; evaluation needs their memory

    def _steps(
        self, deadline: float, stop: StopRequest, evaluate_every: int, checkpoint_every: int | None
    ) -> Iterator[dict[str, float]]:
        """The loop of `steps`, inside its contexts."""
        self.model.train()
        losses: list[torch.Tensor] = []
        memory, clock = MemoryPeak(self.accelerator.device), time.monotonic()
        highest = 0  # peak memory of all steps; torch does not count the memory of captured steps
        path = self.out / METRICS if self.processes.first else Path(os.devnull)
        with path.open("a", encoding="utf-8") as log:
            ending = self.step == self.settings.steps
            while not ending:
                rate = learning_rate(self.step, self.settings)
                loss, norm = self._update(rate)
                losses.append(loss)
                self.step += 1
                complete = self.step == self.settings.steps
                ending = complete or self.processes.any(stop.asked or time.monotonic() >= deadline)
                evaluate = complete or self.step % evaluate_every == 0
                save = checkpoint_every is not None and (ending or self.step % checkpoint_every == 0)
                if evaluate or ending or save or self.step % LOG_EVERY == 0:
                    entry = self._entry(losses, rate, norm)
                    elapsed = time.monotonic() - clock
                    entry["tokens_per_second"] = round(len(losses) * self.settings.tokens_per_step / elapsed, 1)
                    self.seconds += elapsed
                    if (peak := memory.bytes()) is not None:
                        entry["peak_memory_bytes"] = highest = max(highest, peak)
                    if evaluate:
                        entry["valid_loss"] = self.processes.by_first(self._quick_loss)
                    log.write(json.dumps(entry) + "\n")
                    log.flush()
                    yield entry
                    if save:
                        self.processes.by_first(self._save)
                    memory.restart()
                    losses, clock = [], time.monotonic()

    def _update(self, rate: float) -> tuple[torch.Tensor, torch.Tensor]:
        settings = self.settings
        windows = training_windows(
            self.corpus.train, seed=settings.seed, step=self.step, batch=settings.batch, context=settings.context
        )
        windows = self.processes.share(windows)
        if self.accelerator.device.type == "cuda":
            windows = windows.pin_memory()
        return self.update(windows.to(self.accelerator.device, non_blocking=True), rate)

    def _entry(self, losses: list[torch.Tensor], rate: float, norm: torch.Tensor) -> dict[str, float]:
        loss, length = float(self.processes.mean(torch.stack(losses).mean())), float(norm)
        if not math.isfinite(loss + length):
            raise ValueError(
                f"at step {self.step} the loss is {loss} and the norm of the gradient {length}; start over in a new "
                f"folder with a lower learning rate (now {self.settings.learning_rate}) or a longer warmup"
            )
        tokens = self.step * self.settings.tokens_per_step
        return {
            "step": self.step, "tokens": tokens, "loss": round(loss, 5),
            "learning_rate": rate, "gradient_norm": round(length, 5),
        }  # fmt: skip

    def _quick_loss(self) -> float:
        self.model.eval()
        with without_compiled_blocks(self.model, self.settings):
            loss = validation_loss(self.model, self.quick, self.accelerator.device, getattr(torch, self.settings.dtype))
        self.model.train()
        return round(loss, 5)

    def _save(self) -> None:
        save_checkpoint(self.out / CHECKPOINTS, self.model, self.optimizer, self.step, {"seconds": self.seconds})


def learning_rate(step: int, settings: LMSettings) -> float:
    """Return the learning rate of a step, counted from 0; the first and the last are above 0."""
    warmup = min(settings.warmup, settings.steps)
    if step < warmup:
        return settings.learning_rate * (step + 1) / (warmup + 1)
    progress = (step - warmup + 1) / (settings.steps - warmup + 1)
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def loss_rise(path: Path) -> dict[str, float] | None:
    """Return where the validation loss was lowest, if it has risen clearly since; None otherwise.

    Causes are a learning rate that is too high, or overfitting.
    """
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    measured = [entry for entry in entries if "valid_loss" in entry]
    if not measured:
        return None
    lowest = min(measured, key=lambda entry: entry["valid_loss"])
    last = measured[-1]["valid_loss"]
    if last < lowest["valid_loss"] + CLEAR_RISE:
        return None
    return {"lowest": lowest["valid_loss"], "at_step": lowest["step"], "last": last}


def speed_and_memory(path: Path) -> dict[str, float | int | None]:
    """Return the median of the logged speeds, which ignores compilation, and the highest memory peak."""
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    speeds = [entry["tokens_per_second"] for entry in entries]
    peaks = [entry["peak_memory_bytes"] for entry in entries if entry.get("peak_memory_bytes") is not None]
    return {"tokens_per_second": median(speeds) if speeds else None, "peak_memory_bytes": max(peaks, default=None)}


def keep_metrics(path: Path, step: int) -> None:
    """Drop entries after `step`, the last checkpoint: those steps are repeated."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:  # incomplete line of a killed program
            break
        if entry["step"] <= step:
            kept.append(line + "\n")
    write_text(path, "".join(kept))
