"""The loss of a language model with another normalizer, without training, in nats per token.

Only the second half of each window counts, where every context is long. Windows differ far more in their loss than in
the change that a normalizer causes, so the change is computed window by window.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import t as student
from torch import Tensor

from attnorm.experiments.experiment import ExperimentSubject, Floats, ProgressCallback, Verdict
from attnorm.models.patch import swap
from attnorm.normalizers.contract import Normalizer
from attnorm.training.lm.evaluate import predicted_loss

AS_IT_RUNS = "as it runs"


@dataclass(frozen=True)
class WindowMean:
    """Mean of one number per window."""

    value: float
    error: float  # standard error
    windows: int

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval by Student's t."""
        reach = float(student.ppf(0.975, self.windows - 1)) * self.error
        return self.value - reach, self.value + reach

    def __str__(self) -> str:
        return f"{self.value:+.3f} ± {self.error:.3f}"


def mean(values: Floats) -> WindowMean:
    """Return the mean of two or more windows."""
    return WindowMean(float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values))), len(values))


def weighed(change: WindowMean, little: float, much: float) -> tuple[Verdict, str]:
    """Judge whether a loss stays the same: "reproduces" below `little`, "does not" above `much`, else "partly".

    little, much: changes in nats per token. Also return the interval in words.
    """
    low, high = change.interval
    verdict: Verdict = "reproduces" if high < little else "does not" if low >= much else "partly"
    crossed = [f"{line:g}" for line in (little, much) if low < line <= high]
    across = f", across our line at {' and '.join(crossed)}" if crossed else ""
    return verdict, f"mean ± standard error of {change.windows} windows, 95 % interval {low:.3f} to {high:.3f}{across}"


def windows_of(subject: ExperimentSubject, length: int, count: int) -> Tensor:
    """Return consecutive windows of the first text, (windows, length), at most `count`.

    A text that is too short for two windows is cut into two shorter ones: an interval needs two.
    """
    tokens = subject.tokens(count * length)
    if tokens < 2 * length:
        length, count = tokens // 2, 2
    count = min(count, tokens // length)
    return subject.model_inputs(count * length)["input_ids"][0].reshape(count, length)


@torch.inference_mode()
def losses(
    subject: ExperimentSubject,
    progress: ProgressCallback,
    normalizers: Mapping[str, Normalizer | None],
    windows: Sequence[Tensor] | Tensor,
) -> dict[str, Floats]:
    """Return one loss per window for each normalizer, put into every layer; None is the unchanged model."""
    model = subject.loaded().model
    losses_by_name: dict[str, Floats] = {}
    for index, (name, normalizer) in enumerate(normalizers.items()):

        def report(done: int, name: str = name, index: int = index) -> None:
            progress(f"loss: {name}", index * len(windows) + done, len(normalizers) * len(windows))

        if normalizer is None:
            losses_by_name[name] = _losses(model, windows, report)
            continue
        with swap(model, normalizer, warm_start=False):
            losses_by_name[name] = _losses(model, windows, report)
    return losses_by_name


def _losses(model: Any, windows: Sequence[Tensor] | Tensor, report: Callable[[int], None]) -> Floats:
    values = []
    for index, window in enumerate(windows):
        report(index)
        half = len(window) // 2
        hidden = model.base_model(input_ids=window[None, :-1], use_cache=False).last_hidden_state[:, half:]
        values.append(float(predicted_loss(hidden, model.get_output_embeddings(), window[None, half + 1 :])))
    return np.array(values)
