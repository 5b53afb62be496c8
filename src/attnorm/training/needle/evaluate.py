"""How often a fine-tuned model finds a pass key, by length and depth."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from attnorm.training.lm.attention import without_compiled_blocks
from attnorm.training.lm.data import Tokens
from attnorm.training.lm.evaluate import EVALUATION_BATCH
from attnorm.training.lm.settings import LMSettings
from attnorm.training.needle.data import Puzzles, Wording, puzzles_at, training_puzzles
from attnorm.training.needle.train import NeedleTask, answer_logits


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
    model: Any,
    settings: LMSettings,
    filler: Tokens,
    wording: Wording,
    task: NeedleTask,
    device: torch.device,
) -> list[Answered]:
    """Count the keys found, by length and depth; the questions are the same for every model."""
    model.eval()
    found = []
    with without_compiled_blocks(model, settings):
        for times in task.longer:
            length = times * settings.context  # tokens read; the last character is only predicted
            together = max(1, EVALUATION_BATCH * settings.context // length)
            for depth in task.depths:
                puzzles = puzzles_at(
                    filler, wording, characters=task.characters, seed=task.seed + 1, count=task.questions,
                    length=length + 1, depth=depth,
                )  # fmt: skip
                right = _right(model, puzzles, together, device, settings)
                found.append(
                    Answered(
                        length,
                        depth,
                        task.questions,
                        exact=round(float(right.all(-1).mean()), 5),
                        characters=round(float(right.mean()), 5),
                    )
                )
    return found


@torch.inference_mode()
def among_many(
    model: Any,
    settings: LMSettings,
    filler: Tokens,
    wording: Wording,
    task: NeedleTask,
    device: torch.device,
) -> dict[str, float]:
    """Count the keys found in windows as in fine-tuning, with many keys and all distances, in held-out text."""
    model.eval()
    puzzles = training_puzzles(
        filler, wording, characters=task.characters, keys=task.keys, seed=task.seed + 1, step=0, batch=task.questions,
        length=settings.context + 1,
    )  # fmt: skip
    with without_compiled_blocks(model, settings):
        right = _right(model, puzzles, EVALUATION_BATCH, device, settings)
    return {
        "keys": right.shape[1],
        "questions": right.shape[0] * right.shape[1],
        "exact": round(float(right.all(-1).mean()), 5),
        "characters": round(float(right.mean()), 5),
    }


def _right(model: Any, puzzles: Puzzles, together: int, device: torch.device, settings: LMSettings) -> Any:
    """Return (windows, questions, characters), 1 where the likeliest token is the right one."""
    parts, dtype = [], getattr(torch, settings.dtype)
    for start in range(0, len(puzzles.windows), together):
        some = puzzles.some(start, together).to(device)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            parts.append((answer_logits(model, some).argmax(-1) == some.targets).cpu().numpy())
    return np.concatenate(parts)


def summary(found: Sequence[Answered]) -> dict[str, dict[str, float]]:
    """Return the shares by length, averaged over depths."""
    by_length: dict[str, dict[str, float]] = {}
    for length in sorted({each.length for each in found}):
        here = [each for each in found if each.length == length]
        by_length[str(length)] = {
            "questions": sum(each.questions for each in here),
            "exact": round(float(np.mean([each.exact for each in here])), 5),
            "characters": round(float(np.mean([each.characters for each in here])), 5),
        }
    return by_length
