"""Fine-tune a copy of a model of `train lm` on pass keys, and count the keys that it finds by length and depth.

Every model gets the same few hundred steps. The comparison shows how well a trained model learns to find a sentence
again, and how far beyond the training length this works. Small models have few heads that copy from far back, so every
window of the fine-tuning asks for several keys, first near ones and then distant ones.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from attnorm.evaluation.pass_keys import (
    CHARACTERS,
    DEPTHS,
    Puzzles,
    Wording,
    answer_logits,
    puzzles_at,
    shortest_window,
    training_puzzles,
)
from attnorm.evaluation.windows import Tokens
from attnorm.models.private_names import whole_windows
from attnorm_lab.training.device import accelerated, check_accelerate, chosen_device
from attnorm_lab.training.lm.attention import (
    Attention,
    compile_blocks,
    in_training,
    without_compiled_blocks,
)
from attnorm_lab.training.lm.data import encode
from attnorm_lab.training.lm.evaluate import EVALUATION_BATCH, LONGER, check_lengths
from attnorm_lab.training.lm.model import ANY_LENGTH, LMSettings
from attnorm_lab.training.run import LARGEST_GRADIENT, RECORD, learning_rate, make_optimizer

BUNDLED = "bundled"
LOG_EVERY = 20
MIN_FILLER = 2  # times the longest window, in each part of the text
TESTED_SHARE = 0.25  # of the filler: the end, which fine-tuning does not see


@dataclass(frozen=True, kw_only=True)
class NeedleTask:
    """The task and its fine-tuning; the same for all models that are compared."""

    characters: int = CHARACTERS
    keys: int = 10  # per window in fine-tuning, or as many as fit; one in the test
    steps: int = 600
    batch: int = 32
    learning_rate: float = 1e-3
    warmup: int = 40
    nearest: float = 0.02  # largest distance in the first step, as a share of the window
    near_share: float = 0.7  # share of the steps in which it grows to the whole window
    seed: int = 0
    depths: tuple[float, ...] = DEPTHS
    questions: int = 20  # per length and depth
    longer: tuple[int, ...] = (1, 2, 4)  # lengths to test at, in training lengths

    def __post_init__(self) -> None:
        for name in ("characters", "keys", "steps", "batch", "questions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.longer or min(self.longer) < 1 or not self.depths:
            raise ValueError(f"expected at least one test length and depth, got {self.longer} and {self.depths}.")
        if not all(0 <= depth <= 1 for depth in self.depths):
            raise ValueError(f"depths must lie between 0 (the start) and 1 (the end), got {self.depths}")
        if not (0 < self.nearest <= 1 and 0 <= self.near_share <= 1):
            raise ValueError(
                f"expected nearest above 0 and near_share of at least 0, both at most 1, got {self.nearest} and "
                f"{self.near_share}."
            )

    def reach(self, step: int) -> float:
        """Return the largest distance of a step as a share of the window; it grows by equal factors."""
        growing = self.near_share * self.steps
        return 1.0 if step >= growing else float(self.nearest ** (1 - step / growing))


@dataclass(frozen=True)
class Answered:
    """The share of keys found at one length and depth."""

    length: int
    depth: float
    questions: int
    exact: float
    """Share of keys with every character right under greedy decoding."""
    characters: float
    """Share of characters right, given the correct characters before them."""

    def as_dict(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in ("length", "depth", "questions", "exact", "characters")}


def train_needle(
    model: str | Path,
    text: Path,
    task: NeedleTask,
    *,
    device: str | None = None,
    dtype: str | None = None,
    compiled: bool = False,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> dict[str, Any]:
    """Fine-tune a copy of the model and return the record: the task, the loss, the keys found by length and depth.

    Args:
        model: A folder that `train lm` wrote, or "bundled". It is not changed.
        text: Filler; fine-tuning uses its first three quarters, the test its last quarter.
        dtype: float32 or bfloat16 (default: as in the model's training).

    Raises:
        ImportError: accelerate is not installed.
        ValueError: No such model or text, a text that is too short, lengths beyond the model's positions, or several
            processes.
    """
    from tokenizers import Tokenizer

    from attnorm.models.load import load

    check_accelerate()
    folder = folder_of(model)
    settings = settings_of(folder)
    torch_device = chosen_device(device)
    usual = settings.dtype if torch_device.type == "cuda" else "float32"
    settings = replace(settings, dtype=dtype or usual)
    check_lengths([times * settings.context for times in task.longer], settings)
    if not (folder / "tokenizer.json").is_file():  # written with the model, at the end
        raise ValueError(
            f"{folder} contains a training run that is not finished. Run `attnorm lab train lm` again to finish it."
        )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    wording = Wording.of(tokenizer)
    practised, tested = split_filler(tokens_of(tokenizer, text), task, wording, settings.context)
    loaded: Any = load(folder, device=str(torch_device), dtype=torch.float32).model
    course = fine_tune(loaded, settings, practised, wording, task, torch_device, compiled=compiled, report=report)
    answers = find_keys(loaded, settings, tested, wording, task, torch_device)
    return {
        "model": folder.name,
        "normalizer": settings.normalizer,
        **({"recipe": settings.recipe} if settings.recipe else {}),
        "context": settings.context,
        "text": text.name,
        "task": asdict(task),
        "course": course,
        "among_many": among_many(loaded, settings, tested, wording, task, torch_device),
        "by_length": summary(answers),
        "answers": [answer.as_dict() for answer in answers],
    }


def folder_of(model: str | Path) -> Path:
    return Path(str(files("attnorm.models") / BUNDLED)) if model == BUNDLED else Path(model)


def usual_longer(model: str | Path) -> tuple[int, ...]:
    """Return the default test lengths as multiples of the training length: only 1 if positions are learned.

    Raises:
        ValueError: The folder contains no model of `train lm`.
    """
    return LONGER if ANY_LENGTH[settings_of(folder_of(model)).architecture] else LONGER[:1]


def settings_of(folder: Path) -> LMSettings:
    """Return the settings of a model's training.

    Raises:
        ValueError: The folder contains no model of `train lm`.
    """
    try:
        run = json.loads((folder / RECORD).read_text(encoding="utf-8"))["run"]
    except (OSError, json.JSONDecodeError, KeyError):
        raise ValueError(
            f"expected a folder that `attnorm lab train lm` wrote, or {BUNDLED!r}, got {folder}, which has no "
            f"readable {RECORD}."
        ) from None
    known = {field.name for field in fields(LMSettings)}
    return LMSettings(**{name: value for name, value in run.items() if name in known})


def tokens_of(tokenizer: Any, text: Path) -> Tokens:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.npy"
        encode(tokenizer, [text], path)
        tokens: Tokens = np.load(path)
        return tokens


def split_filler(filler: Tokens, task: NeedleTask, wording: Wording, length: int) -> tuple[Tokens, Tokens]:
    """Split the filler text into a part for fine-tuning and a part for the test.

    Raises:
        ValueError: The text or the windows are too short.
    """
    least = shortest_window(wording, task.characters)
    if length < least:
        raise ValueError(
            f"a key of {task.characters} characters and its question take {least} tokens, got windows of "
            f"{length}. Use fewer characters, or a model with a longer context."
        )
    cut = len(filler) - int(TESTED_SHARE * len(filler))
    practised, tested = filler[:cut], filler[cut:]
    needed = MIN_FILLER * max(task.longer) * length
    if len(tested) < needed:
        raise ValueError(
            f"the text has {len(filler)} tokens, of which the test uses a quarter. Windows of "
            f"{max(task.longer) * length} need {math.ceil(needed / TESTED_SHARE)}. Use more text, or test at "
            "fewer lengths."
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
                        f"after step {step + 1} the loss is {mean}. Lower the learning rate (now {task.learning_rate})."
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


@torch.inference_mode()
def find_keys(
    model: Any, settings: LMSettings, filler: Tokens, wording: Wording, task: NeedleTask, device: torch.device
) -> list[Answered]:
    """Count the keys found, by length and depth; the questions are the same for every model."""
    model.eval()
    answers = []
    with without_compiled_blocks(model, settings):
        for times in task.longer:
            length = times * settings.context  # tokens read; the last character is only predicted
            together = max(1, EVALUATION_BATCH * settings.context // length)
            for depth in task.depths:
                puzzles = puzzles_at(
                    filler, wording, characters=task.characters, seed=task.seed + 1, count=task.questions,
                    length=length + 1, depth=depth,
                )  # fmt: skip
                right = _right_characters(model, puzzles, together, device, settings)
                answers.append(
                    Answered(
                        length,
                        depth,
                        task.questions,
                        exact=round(float(right.all(-1).mean()), 5),
                        characters=round(float(right.mean()), 5),
                    )
                )
    return answers


@torch.inference_mode()
def among_many(
    model: Any, settings: LMSettings, filler: Tokens, wording: Wording, task: NeedleTask, device: torch.device
) -> dict[str, float]:
    """Count the keys found in windows as in fine-tuning, with many keys and all distances, in held-out text."""
    model.eval()
    puzzles = training_puzzles(
        filler, wording, characters=task.characters, keys=task.keys, seed=task.seed + 1, step=0, batch=task.questions,
        length=settings.context + 1,
    )  # fmt: skip
    with without_compiled_blocks(model, settings):
        right = _right_characters(model, puzzles, EVALUATION_BATCH, device, settings)
    return {
        "keys": right.shape[1],
        "questions": right.shape[0] * right.shape[1],
        "exact": round(float(right.all(-1).mean()), 5),
        "characters": round(float(right.mean()), 5),
    }


def _right_characters(model: Any, puzzles: Puzzles, together: int, device: torch.device, settings: LMSettings) -> Any:
    """Return (windows, questions, characters), 1 where the likeliest token is the right one."""
    parts, dtype = [], getattr(torch, settings.dtype)
    for start in range(0, len(puzzles.windows), together):
        batch = puzzles.some(start, together).to(device)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            parts.append((answer_logits(model, batch).argmax(-1) == batch.targets).cpu().numpy())
    return np.concatenate(parts)


def summary(answers: Sequence[Answered]) -> dict[str, dict[str, float]]:
    """Return the shares by length, averaged over depths."""
    by_length: dict[str, dict[str, float]] = {}
    for length in sorted({answer.length for answer in answers}):
        at_length = [answer for answer in answers if answer.length == length]
        by_length[str(length)] = {
            "questions": sum(answer.questions for answer in at_length),
            "exact": round(float(np.mean([answer.exact for answer in at_length])), 5),
            "characters": round(float(np.mean([answer.characters for answer in at_length])), 5),
        }
    return by_length
