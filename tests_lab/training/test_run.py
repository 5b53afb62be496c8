"""Learning rate, optimizer, and what surrounds a captured step, with a stand-in for the CUDA graph."""

import math
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from attnorm.engines.inputs import head_numbers, validate_inputs
from attnorm_lab.experiments.language_models.stages import _random_corpus
from attnorm_lab.training import run as training_run
from attnorm_lab.training.checkpoints import StopRequest
from attnorm_lab.training.device import MemoryPeak, accelerated
from attnorm_lab.training.lm.model import build_model
from attnorm_lab.training.lm.train import Run, TrainingStep
from attnorm_lab.training.run import learning_rate, make_optimizer
from tests_lab.training.conftest import tiny


class Uncaptured:
    """Leaves the gradients where they are, as a graph does, and overwrites them in every call."""

    def __init__(self, gradients: Callable[[Tensor], Tensor], windows: Tensor) -> None:
        self.gradients, self.model = gradients, gradients.__self__.model  # type: ignore[attr-defined]

    def __call__(self, windows: Tensor) -> Tensor:
        self.model.zero_grad()
        return self.gradients(windows)


def test_a_run_with_captured_steps_learns_the_same_keeps_no_gradients_and_logs_the_highest_peak(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tiny(steps=12, batch=2, context=8, layers=1)
    monkeypatch.setattr(training_run, "CapturedStep", Uncaptured)
    losses = []
    for captures in (False, True):
        monkeypatch.setattr(TrainingStep, "_can_be_captured", lambda self, captures=captures: captures)
        peaks = iter([700, 200])
        monkeypatch.setattr(MemoryPeak, "bytes", lambda self, peaks=peaks: next(peaks))
        out = tmp_path / str(captures)
        out.mkdir()
        with accelerated(torch.device("cpu"), settings.dtype) as accelerator, StopRequest() as stop:
            run = Run(out, settings, _random_corpus(300, settings.context), accelerator)
            entries = list(run.steps(math.inf, stop, 100, None))
        losses.append([entry["loss"] for entry in entries])
        assert [entry["peak_memory_bytes"] for entry in entries] == [700, 700]
        assert all(parameter.grad is None for parameter in run.model.parameters())
    assert losses[0] == losses[1]


def test_a_step_that_cannot_be_captured_continues_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(gradients: Callable[[Tensor], Tensor], windows: Tensor) -> None:
        gradients(windows)
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    settings = tiny(steps=6, batch=2, context=8, layers=1)
    batches = torch.randint(257, (6, 2, 9), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(training_run, "CapturedStep", fails)
    courses = []
    for captures in (False, True):
        monkeypatch.setattr(TrainingStep, "_can_be_captured", lambda self, captures=captures: captures)
        model = build_model(settings, 257, 0)
        with (
            accelerated(torch.device("cpu"), settings.dtype) as accelerator,
            warnings.catch_warnings(record=True) as said,
        ):
            warnings.simplefilter("always")
            update = TrainingStep(model, settings, accelerator)
            courses.append([[float(t) for t in update(1e-3, windows)] for windows in batches])
        assert [str(one.message).endswith("capturing") for one in said if "CUDA graph" in str(one.message)] == [
            True
        ] * captures
    assert courses[0] == courses[1]


def test_kernels_take_one_number_for_all_heads_or_one_for_each() -> None:
    q = torch.zeros(1, 4, 2, 8)
    inputs = validate_inputs(q, q, q, mask=None, causal=True, scale=None, positions=None)
    assert head_numbers(torch.tensor(0.5), inputs).tolist() == [0.5] * 4
    assert head_numbers(torch.tensor([1.0, 2.0, 3.0, 4.0]), inputs).tolist() == [1, 2, 3, 4]
    for heads in (1, 3):
        with pytest.raises(ValueError, match=f"{heads} heads?,.*4 heads"):
            head_numbers(torch.ones(heads), inputs)


def test_the_learning_rate_climbs_and_then_falls_to_almost_nothing() -> None:
    settings = tiny(steps=100, warmup=10, learning_rate=0.5)
    rates = [learning_rate(step, settings) for step in range(100)]
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert max(rates) == rates[10] == pytest.approx(0.5, rel=1e-3)
    assert 0 < rates[-1] < 0.5 * 1e-3
    assert rates[55] == pytest.approx(0.25, rel=0.05)


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 100), (5, 5), (5, 4)])
def test_short_runs_move_at_every_step(steps: int, warmup: int) -> None:
    settings = tiny(steps=steps, warmup=warmup)
    assert all(0 < learning_rate(step, settings) <= settings.learning_rate for step in range(steps))


def test_biases_and_layer_norms_do_not_decay() -> None:
    model = build_model(tiny(weight_decay=0.3), vocabulary=300, end_of_text=0)
    decaying, free = make_optimizer(model, tiny(weight_decay=0.3)).param_groups
    assert decaying["weight_decay"] == 0.3
    assert free["weight_decay"] == 0.0
    assert {parameter.dim() for parameter in free["params"]} == {1}
    assert len(decaying["params"]) + len(free["params"]) == len(list(model.parameters()))
