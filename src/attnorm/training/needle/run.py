"""Pass keys for a model that `train lm` wrote: fine-tune a copy in memory and count the keys that it finds."""

import json
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from attnorm.training.device import check_accelerate, chosen_device
from attnorm.training.lm.data import Tokens, encode
from attnorm.training.lm.evaluate import LONGER, check_lengths
from attnorm.training.lm.settings import RECORD, ROTARY, LMSettings
from attnorm.training.needle.data import Wording
from attnorm.training.needle.evaluate import among_many, find_keys, summary
from attnorm.training.needle.train import NeedleTask, fine_tune, split_filler

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
    found = find_keys(loaded, settings, tested, wording, task, torch_device)
    return {
        "model": folder.name,
        "normalizer": settings.normalizer,
        "context": settings.context,
        "text": text.name,
        "task": asdict(task),
        "course": course,
        "among_many": among_many(loaded, settings, tested, wording, task, torch_device),
        "by_length": summary(found),
        "answers": [each.as_dict() for each in found],
    }


def folder_of(model: str | Path) -> Path:
    return Path(str(files("attnorm.models") / BUNDLED)) if model == BUNDLED else Path(model)


def usual_longer(model: str | Path) -> tuple[int, ...]:
    """Return the default test lengths as multiples of the training length: only 1 without rotary positions.

    Raises:
        ValueError: The folder holds no model of `train lm`.
    """
    return LONGER if ROTARY[settings_of(folder_of(model)).architecture] else LONGER[:1]


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
    return LMSettings(**{name: value for name, value in run.items() if name in known})


def tokens_of(tokenizer: Any, text: Path) -> Tokens:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.npy"
        encode(tokenizer, [text], path)
        found: Tokens = np.load(path)
        return found
