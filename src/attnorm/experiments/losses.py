"""What another normalizer does to a language model's predictions, without training: nats per token on a text.

Only the second half of each window counts: there every context is long enough to be selected from.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attnorm.experiments.experiment import Subject, Tell
from attnorm.models.patch import swap
from attnorm.normalizers.contract import Normalizer
from attnorm.training.evaluation import predicted_loss


def windows_of(subject: Subject, length: int, count: int) -> Tensor:
    """(windows, length): stretches of the first text one after the other, as many as it has up to `count`."""
    while count > 1:
        try:
            return subject.model_inputs(count * length)["input_ids"][0].reshape(count, length)
        except ValueError:
            count //= 2
    return subject.model_inputs(length)["input_ids"]


@torch.inference_mode()
def losses(
    subject: Subject, tell: Tell, normalizers: Mapping[str, Normalizer | None], windows: Sequence[Tensor] | Tensor
) -> dict[str, float]:
    """By name; None is the model as it runs. Every layer gets the normalizer at once."""
    model = subject.loaded().model
    found: dict[str, float] = {}
    for place, (name, normalizer) in enumerate(normalizers.items()):
        tell(f"loss with {name}", place, len(normalizers))
        if normalizer is None:
            found[name] = _loss(model, windows)
            continue
        with swap(model, normalizer, warm_start=False):
            found[name] = _loss(model, windows)
    return found


def _loss(model: Any, windows: Sequence[Tensor] | Tensor) -> float:
    total = 0.0
    for window in windows:
        half = len(window) // 2
        hidden = model.base_model(input_ids=window[None, :-1], use_cache=False).last_hidden_state[:, half:]
        total += float(predicted_loss(hidden, model.get_output_embeddings().weight, window[None, half + 1 :]))
    return total / len(windows)
