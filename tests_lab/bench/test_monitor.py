"""The monitor's overhead: both ways run, and what it costs per step follows from what it costs on a logging step."""

import pytest
import torch

from attnorm.monitor.monitor import AttentionMonitor
from attnorm_lab.bench.analyze import Shape, random_model, tokens
from attnorm_lab.bench.promises import SPEEDUPS
from attnorm_lab.bench.suites import run_benchmarks
from attnorm_lab.bench.training import EVERY, training_step


def test_a_quick_run_measures_both_and_judges_nothing() -> None:
    results = run_benchmarks("monitor", threads=1, quick=True)
    assert [result.met for result in results.results] == [None] * 4
    found = [{name: value or 0.0 for name, value in result.numbers.items()} for result in results.results]
    for watched, per_step in zip(found[::2], found[1::2], strict=True):
        assert 1 / per_step["speedup"] == pytest.approx(1 + (1 / watched["speedup"] - 1) / EVERY)
        extra = watched["ours_ms"] - watched["theirs_ms"]
        assert per_step["ours_ms"] - per_step["theirs_ms"] == pytest.approx(extra / EVERY)
    assert "AdamW" in results.results[0].table


@pytest.mark.parametrize("half", [False, True])
def test_the_step_trains_in_either_precision(half: bool) -> None:
    model = random_model(Shape(16, layers=1, heads=1)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    training_step(model, tokens(32).reshape(2, 16), half=half)()
    assert all(not torch.equal(value, before[name]) for name, value in model.named_parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_one_percent_is_promised_at_the_default_setting() -> None:
    assert AttentionMonitor().every == EVERY
    assert pytest.approx(1 / 1.01) == SPEEDUPS["monitor"]
