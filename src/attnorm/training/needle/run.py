"""Pass keys for a model that `train lm` wrote: fine-tune a copy in memory, count the keys found by length and depth."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from attnorm.normalizers.former_defaults import read_settings
from attnorm.training.device import check_accelerate, chosen_device
from attnorm.training.lm.attention import without_compiled_blocks
from attnorm.training.lm.data import Tokens, encode
from attnorm.training.lm.evaluate import EVALUATION_BATCH, LONGER, check_lengths
from attnorm.training.lm.model import ANY_LENGTH, RECORD, LMSettings
from attnorm.training.needle.data import Puzzles, Wording, puzzles_at, training_puzzles
from attnorm.training.needle.train import NeedleTask, answer_logits, fine_tune, split_filler


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


BUNDLED = "bundled"


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
        raise ValueError(f"{folder} holds a training run that is not finished; let `attnorm train lm` finish it first")
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
        ValueError: The folder holds no model of `train lm`.
    """
    return LONGER if ANY_LENGTH[settings_of(folder_of(model)).architecture] else LONGER[:1]


def settings_of(folder: Path) -> LMSettings:
    """Return the settings of a model's training.

    Raises:
        ValueError: The folder holds no model of `train lm`.
    """
    try:
        run = json.loads((folder / RECORD).read_text(encoding="utf-8"))["run"]
    except (OSError, json.JSONDecodeError, KeyError):
        raise ValueError(
            f"{folder} has no readable {RECORD}: name a folder that `attnorm train lm` wrote, or {BUNDLED!r}"
        ) from None
    known = {field.name for field in fields(LMSettings)}
    return LMSettings(**{name: value for name, value in read_settings(run).items() if name in known})


def tokens_of(tokenizer: Any, text: Path) -> Tokens:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.npy"
        encode(tokenizer, [text], path)
        tokens: Tokens = np.load(path)
        return tokens
