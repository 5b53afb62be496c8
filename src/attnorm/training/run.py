"""A model in training: its weights, its optimizer, the number of steps done, and a log of how it went.

The windows of a step depend only on the seed and the step, and a checkpoint is whole or not there, so a run goes on
where it stopped as if it had not.
"""

import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from attnorm.training.architectures import build_model
from attnorm.training.checkpoints import finished_checkpoints, load_checkpoint, save_checkpoint
from attnorm.training.compilation import Attention, compile_blocks, in_training, without_compiled_blocks
from attnorm.training.evaluation import predicted_loss, validation_loss, window_loss
from attnorm.training.interruption import StopRequest
from attnorm.training.memory import MemoryPeak
from attnorm.training.optimization import LARGEST_GRADIENT, learning_rate, make_optimizer
from attnorm.training.run_folder import CHECKPOINTS, METRICS, keep_metrics
from attnorm.training.settings import Settings
from attnorm.training.tokens import Corpus
from attnorm.training.windows import training_windows, validation_windows

if TYPE_CHECKING:
    from accelerate import Accelerator

LOG_EVERY = 10  # steps; reading the loss makes the GPU wait
QUICK_VALIDATION = 64  # windows looked at while training; the final figures use all


class Run:
    """The run in a folder, from its last checkpoint on if there is one."""

    def __init__(
        self,
        out: Path,
        settings: Settings,
        corpus: Corpus,
        accelerator: "Accelerator",
        *,
        compiled: bool = False,
        attention: Attention = "engine",
    ) -> None:
        self.out, self.settings, self.corpus, self.accelerator = out, settings, corpus, accelerator
        self.compiled, self.attention = compiled, attention
        # Not prepared as the optimizer is: that would wrap its forward, which the loss goes around, and leave it so.
        self.model = build_model(settings, corpus.vocabulary, corpus.end_of_text).to(accelerator.device)
        self.optimizer = accelerator.prepare(make_optimizer(self.model, settings))
        self.step, self.seconds = 0, 0.0
        if done := finished_checkpoints(out / CHECKPOINTS):
            state = load_checkpoint(done[-1], self.model, self.optimizer, accelerator.device)
            self.step, self.seconds = state["step"], state["seconds"]
        keep_metrics(out / METRICS, self.step)
        self.loss: Callable[..., Any] = predicted_loss
        if compiled:
            self.loss = torch.compile(predicted_loss, dynamic=False)
            compile_blocks(self.model, settings)
        self.quick = validation_windows(corpus.valid, settings.context, QUICK_VALIDATION)

    def steps(
        self, deadline: float, stop: StopRequest, evaluate_every: int, checkpoint_every: int | None
    ) -> Iterator[dict[str, float]]:
        """Trains until the last step, the deadline or a request to stop; yields what it logs.

        What is saved is logged first, and what is logged is finite: no checkpoint holds a model that has broken down.
        checkpoint_every: None for a run too short to be worth any.
        """
        with in_training(self.model, compiled=self.compiled, attention=self.attention):
            yield from self._steps(deadline, stop, evaluate_every, checkpoint_every)

    def _steps(
        self, deadline: float, stop: StopRequest, evaluate_every: int, checkpoint_every: int | None
    ) -> Iterator[dict[str, float]]:
        self.model.train()
        losses: list[torch.Tensor] = []
        memory, clock = MemoryPeak(self.accelerator.device), time.monotonic()
        with (self.out / METRICS).open("a", encoding="utf-8") as log:
            ending = self.step == self.settings.steps
            while not ending:
                rate = learning_rate(self.step, self.settings)
                loss, norm = self._update(rate)
                losses.append(loss)
                self.step += 1
                complete = self.step == self.settings.steps
                ending = complete or stop.asked or time.monotonic() >= deadline
                evaluate = complete or self.step % evaluate_every == 0
                save = checkpoint_every is not None and (ending or self.step % checkpoint_every == 0)
                if evaluate or ending or save or self.step % LOG_EVERY == 0:
                    entry = self._entry(losses, rate, norm)
                    elapsed = time.monotonic() - clock
                    entry["tokens_per_second"] = round(len(losses) * self.settings.tokens_per_step / elapsed, 1)
                    self.seconds += elapsed
                    if (peak := memory.bytes()) is not None:
                        entry["peak_memory_bytes"] = peak
                    if evaluate:
                        entry["valid_loss"] = self._quick_loss()
                    log.write(json.dumps(entry) + "\n")
                    log.flush()
                    yield entry
                    if save:
                        self._save()
                    memory.restart()
                    losses, clock = [], time.monotonic()

    def _update(self, rate: float) -> tuple[torch.Tensor, torch.Tensor]:
        settings, accelerator = self.settings, self.accelerator
        windows = training_windows(
            self.corpus.train, seed=settings.seed, step=self.step, batch=settings.batch, context=settings.context
        )
        if accelerator.device.type == "cuda":
            windows = windows.pin_memory()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with accelerator.autocast():
            loss = window_loss(self.model, windows.to(accelerator.device, non_blocking=True), self.loss)
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(self.model.parameters(), LARGEST_GRADIENT)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach(), norm

    def _entry(self, losses: list[torch.Tensor], rate: float, norm: torch.Tensor) -> dict[str, float]:
        loss, length = float(torch.stack(losses).mean()), float(norm)
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
