"""A training run on CLRS-Text: steps over groups of similar length, the loss on answers only, checkpoints and metrics.

The examples of a step depend only on the seed and the step, and checkpoints are atomic. So a resumed run continues
exactly where it stopped. Optimizer and schedule are those of the language model trainer.
"""

import json
import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from attnorm.training.checkpoints import StopRequest, finished_checkpoints, load_checkpoint, save_checkpoint
from attnorm.training.clrs.data import ClrsData, EncodedExample, groups_by_length, padded, step_indices
from attnorm.training.clrs.evaluate import answer_logits
from attnorm.training.clrs.model import ClrsBase, ClrsRecipe
from attnorm.training.device import MemoryPeak
from attnorm.training.lm.attention import Attention, compile_blocks, in_training, without_compiled_blocks
from attnorm.training.lm.captured_step import whole_windows
from attnorm.training.lm.step import LARGEST_GRADIENT, make_optimizer
from attnorm.training.lm.train import CHECKPOINTS, LOG_EVERY, METRICS, keep_metrics, learning_rate

if TYPE_CHECKING:
    from accelerate import Accelerator


class NotFiniteError(ValueError):
    """The loss or its gradient is not finite: the run diverged."""


class ClrsRun:
    """The run in a folder; it continues from the last checkpoint if there is one."""

    def __init__(
        self, out: Path, base: ClrsBase, recipe: ClrsRecipe, data: ClrsData, accelerator: "Accelerator",
        *, attention: Attention = "engine", compiled: bool = False,
    ) -> None:  # fmt: skip
        self.out, self.recipe, self.data, self.accelerator, self.attention = out, recipe, data, accelerator, attention
        self.model = base.build(recipe, accelerator.device)
        self.schedule = recipe.as_lm()
        self.device, self.compiled = accelerator.device, compiled
        if compiled:
            if not hasattr(getattr(self.model, "model", None), "layers"):
                raise ValueError(
                    f"expected a model with blocks in model.layers to compile, got {type(self.model).__name__}; "
                    "remove --compile (compiled=True)"
                )
            compile_blocks(self.model, self.schedule, any_length=True)
        self.optimizer = accelerator.prepare(make_optimizer(self.model, self.schedule))
        self.step, self.seconds, self.tokens = 0, 0.0, 0
        out.mkdir(parents=True, exist_ok=True)
        if done := finished_checkpoints(out / CHECKPOINTS):
            state = load_checkpoint(done[-1], self.model, self.optimizer, accelerator.device)
            self.step, self.seconds, self.tokens = state["step"], state["seconds"], state["tokens"]
        keep_metrics(out / METRICS, self.step)

    def steps(self, deadline: float, stop: StopRequest, checkpoint_every: int | None) -> Iterator[dict[str, float]]:
        """Train until the last step, the deadline or a request to stop; yield the log entries.

        checkpoint_every: steps between checkpoints; None for one only where training stops early.

        Raises:
            NotFiniteError: The loss is not finite.
        """
        with self.in_training():
            yield from self._steps(deadline, stop, checkpoint_every)

    @contextmanager
    def in_training(self) -> Iterator[None]:
        """Set how attention is computed, in training and in the tests. No pass waits for the GPU."""
        recipe = self.recipe
        with (
            in_training(self.model, compiled=self.compiled, attention=self.attention, dtype=recipe.dtype),
            whole_windows(),
        ):
            yield

    def uncompiled(self) -> AbstractContextManager[None]:
        """Run the blocks without their graphs, to observe attention."""
        return without_compiled_blocks(self.model, self.schedule) if self.compiled else nullcontext()

    def _steps(self, deadline: float, stop: StopRequest, checkpoint_every: int | None) -> Iterator[dict[str, float]]:
        self.model.train()
        losses: list[torch.Tensor] = []
        memory, clock, tokens = MemoryPeak(self.accelerator.device), time.monotonic(), self.tokens
        with (self.out / METRICS).open("a", encoding="utf-8") as log:
            while self.step < self.recipe.steps:
                rate = learning_rate(self.step, self.schedule)
                loss, norm = self._update(rate)
                losses.append(loss)
                self.step += 1
                complete = self.step == self.recipe.steps
                early = not complete and (stop.asked or time.monotonic() >= deadline)
                save = (
                    stop.asked
                    or early
                    or (checkpoint_every is not None and (complete or self.step % checkpoint_every == 0))
                )
                if complete or save or self.step % LOG_EVERY == 0:
                    entry = self._entry(losses, rate, norm)
                    elapsed = time.monotonic() - clock
                    self.seconds += elapsed
                    entry["tokens_per_second"] = round((self.tokens - tokens) / elapsed, 1)
                    if (peak := memory.bytes()) is not None:
                        entry["peak_memory_bytes"] = peak
                    log.write(json.dumps(entry) + "\n")
                    log.flush()
                    yield entry
                    if save:
                        self._save()
                    losses, clock, tokens = [], time.monotonic(), self.tokens
                if early:
                    return

    def _update(self, rate: float) -> tuple[torch.Tensor, torch.Tensor]:
        recipe, accelerator = self.recipe, self.accelerator
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        batch = [self.data.train[i] for i in step_indices(len(self.data.train), recipe.batch, recipe.seed, self.step)]
        answer_tokens = sum(len(example.tokens) - example.answer_from for example in batch)
        total = torch.zeros((), device=accelerator.device)
        for part in self._parts(batch):
            examples = padded(part).to(accelerator.device)
            with accelerator.autocast():
                logits = answer_logits(self.model, examples)
                # Every answer token of the step has the same weight, in whichever group it is.
                loss = F.cross_entropy(logits.float(), examples.targets, reduction="sum") / answer_tokens
            accelerator.backward(loss)
            total += loss.detach()
            self.tokens += sum(len(example.tokens) for example in part)
        norm = accelerator.clip_grad_norm_(self.model.parameters(), LARGEST_GRADIENT)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total, norm

    def _parts(self, batch: list[EncodedExample]) -> Iterator[list[EncodedExample]]:
        for group in groups_by_length(batch, self.recipe.tokens_at_once):
            yield [batch[index] for index in group]

    def _entry(self, losses: list[torch.Tensor], rate: float, norm: torch.Tensor) -> dict[str, Any]:
        loss, length = float(torch.stack(losses).mean()), float(norm)
        if not math.isfinite(loss + length):
            raise NotFiniteError(
                f"at step {self.step} the loss is {loss} and the norm of the gradient {length}; start over in a new "
                f"folder with a lower learning rate (now {self.recipe.learning_rate}) or a longer warmup"
            )
        return {
            "step": self.step, "tokens": self.tokens, "loss": round(loss, 5), "learning_rate": rate,
            "gradient_norm": round(length, 5),
        }  # fmt: skip

    def _save(self) -> None:
        state = {"seconds": self.seconds, "tokens": self.tokens}
        save_checkpoint(self.out / CHECKPOINTS, self.model, self.optimizer, self.step, state)
