"""Fine-tune a language model to find pass keys in its context.

Every model gets the same few hundred steps. The comparison shows how well a trained model learns to find a sentence
again, and how far beyond the training length this works. Small models have few heads that copy from far back, so every
window of the fine-tuning asks for several keys, first near ones and then distant ones.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional as F

from attnorm.training.device import accelerated
from attnorm.training.lm.attention import Attention, compile_blocks, in_training
from attnorm.training.lm.captured_step import whole_windows
from attnorm.training.lm.data import Tokens
from attnorm.training.lm.model import LMSettings
from attnorm.training.lm.step import LARGEST_GRADIENT, make_optimizer
from attnorm.training.lm.train import learning_rate
from attnorm.training.needle.data import Puzzles, Wording, shortest_window, training_puzzles

LOG_EVERY = 20
MIN_FILLER = 2  # times the longest window, in each part of the text
TESTED_SHARE = 0.25  # of the filler: the end, which fine-tuning does not see


@dataclass(frozen=True, kw_only=True)
class NeedleTask:
    """The task and its fine-tuning; the same for all models that are compared."""

    characters: int = 5
    keys: int = 10  # per window in fine-tuning, or as many as fit; one in the test
    steps: int = 600
    batch: int = 32
    learning_rate: float = 1e-3
    warmup: int = 40
    nearest: float = 0.02  # largest distance in the first step, as a share of the window
    near_share: float = 0.7  # share of the steps in which it grows to the whole window
    seed: int = 0
    depths: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)
    questions: int = 20  # per length and depth
    longer: tuple[int, ...] = (1, 2, 4)  # lengths to test at, in training lengths

    def __post_init__(self) -> None:
        for name in ("characters", "keys", "steps", "batch", "questions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.longer or min(self.longer) < 1 or not self.depths:
            raise ValueError(f"test at one or more lengths and depths, got {self.longer} and {self.depths}")
        if not all(0 <= depth <= 1 for depth in self.depths):
            raise ValueError(f"depths must lie between 0 (the start) and 1 (the end), got {self.depths}")
        if not (0 < self.nearest <= 1 and 0 <= self.near_share <= 1):
            raise ValueError(
                f"nearest and near_share are shares between 0 and 1, the first above 0; got {self.nearest} and "
                f"{self.near_share}"
            )

    def reach(self, step: int) -> float:
        """Return the largest distance of a step as a share of the window; it grows by equal factors."""
        growing = self.near_share * self.steps
        return 1.0 if step >= growing else float(self.nearest ** (1 - step / growing))


def split_filler(filler: Tokens, task: NeedleTask, wording: Wording, length: int) -> tuple[Tokens, Tokens]:
    """Split the filler text into a part for fine-tuning and a part for the test.

    Raises:
        ValueError: The text or the windows are too short.
    """
    least = shortest_window(wording, task.characters)
    if length < least:
        raise ValueError(
            f"a key of {task.characters} characters and its question take {least} tokens, got windows of {length}; "
            "ask for fewer characters, or train a model with a longer context"
        )
    cut = len(filler) - int(TESTED_SHARE * len(filler))
    practised, tested = filler[:cut], filler[cut:]
    needed = MIN_FILLER * max(task.longer) * length
    if len(tested) < needed:
        raise ValueError(
            f"the text has {len(filler)} tokens, a quarter for the test; windows of {max(task.longer) * length} "
            f"need {math.ceil(needed / TESTED_SHARE)}: give more text, or test at fewer lengths"
        )
    return practised, tested


def fine_tune(
    model: Any,
    settings: LMSettings,
    filler: Tokens,
    wording: Wording,
    task: NeedleTask,
    device: torch.device,
    *,
    compiled: bool = False,
    attention: Attention = "engine",
    deadline: float = math.inf,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> list[dict[str, float]]:
    """Fine-tune the model in place, with the loss on the answers only; return that loss over the steps, in nats.

    settings: those of the model's training; the windows have its training length.
    """
    recipe = as_settings(task, settings)
    if compiled:
        compile_blocks(model, settings)
    course: list[dict[str, float]] = []
    losses: list[torch.Tensor] = []
    model.train()
    with (
        accelerated(device, settings.dtype) as accelerator,
        in_training(model, compiled=compiled, attention=attention, dtype=settings.dtype),
        whole_windows(),
    ):
        optimizer = accelerator.prepare(make_optimizer(model, recipe))
        for step in range(task.steps):
            puzzles = training_puzzles(
                filler, wording, characters=task.characters, keys=task.keys, seed=task.seed, step=step,
                batch=task.batch, length=settings.context + 1, reach=task.reach(step),
            ).to(device)  # fmt: skip
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, recipe)
            with accelerator.autocast():
                loss = answer_loss(model, puzzles)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), LARGEST_GRADIENT)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            late = time.monotonic() >= deadline
            if late or (step + 1) % LOG_EVERY == 0 or step + 1 == task.steps:
                mean, losses = float(torch.stack(losses).mean()), []
                if not math.isfinite(mean):
                    raise ValueError(
                        f"after step {step + 1} the loss is {mean}; lower the learning rate (now {task.learning_rate})"
                    )
                course.append({"step": step + 1, "loss": round(mean, 5)})
                report(step + 1, mean)
            if late:
                break
    model.eval()
    return course


def as_settings(task: NeedleTask, settings: LMSettings) -> LMSettings:
    """Return the settings of the fine-tuning, for the optimizer and its schedule."""
    return replace(
        settings, steps=task.steps, batch=task.batch, learning_rate=task.learning_rate, warmup=task.warmup,
        weight_decay=0.0,
    )  # fmt: skip


def answer_loss(model: Any, puzzles: Puzzles) -> Any:
    """Return the mean cross entropy of the answers' characters, in nats."""
    return F.cross_entropy(answer_logits(model, puzzles).flatten(0, 2).float(), puzzles.targets.flatten())


def answer_logits(model: Any, puzzles: Puzzles) -> torch.Tensor:
    """Return the logits of the answers, (windows, questions, characters, vocabulary)."""
    hidden = model.base_model(input_ids=puzzles.windows[:, :-1], use_cache=False).last_hidden_state
    before = (puzzles.answers.flatten(1) - 1)[..., None].expand(-1, -1, hidden.shape[-1])
    logits: torch.Tensor = model.get_output_embeddings()(hidden.gather(1, before))
    return logits.reshape(*puzzles.answers.shape, -1)
