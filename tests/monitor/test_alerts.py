"""Alerts: each at its threshold, once per layer and occasion, in words, in the log keys and in monitor.alerts."""

import math
import runpy
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from attnorm.monitor import monitor as monitoring
from attnorm.monitor.alerts import MEANING, AlertThresholds, AttentionAlert, states
from attnorm.monitor.monitor import AttentionMonitor
from tests.models.tiny import llama, tokens

ROOT = Path(__file__).resolve().parents[2]
HEALTHY = {
    "entropy": [2.0, 1.5],
    "entropy_ratio": [0.4, 0.3],
    "largest_logit": [9.0, 7.0],
    "sink_mass": [0.1, 0.2],
    "separability": [0.9, 0.8],
    "separability_null": [0.5, 0.5],
    "broken_rows": [0.0, 0.0],
}
AT_FIRST = 9.0  # the largest logit
CASES: list[tuple[dict[str, list[float]], set[str]]] = [
    ({}, set()),
    ({"entropy": [0.05, 2.0]}, {"entropy_collapse"}),
    ({"entropy": [0.051, 2.0]}, set()),
    ({"entropy": [0.01, 0.01], "sink_mass": [0.99, 0.98]}, set()),  # parked, not collapsed
    ({"entropy_ratio": [0.95, 0.2]}, {"dispersion"}),
    ({**{name: [values[0]] * 3 for name, values in HEALTHY.items()}, "entropy_ratio": [0.95, 0.2, 0.2]}, set()),
    ({"separability": [0.3, 0.35]}, {"saturation"}),
    ({"separability": [0.3, 0.35], "separability_null": [0.3, 0.3]}, set()),  # better than chance
    ({"separability": [0.33, 0.34]}, set()),
    ({"separability": [0.1, 0.8], "sink_mass": [0.6, 0.2]}, set()),  # parked, the first of them
    ({"separability": [math.nan] * 2, "separability_null": [math.nan] * 2}, set()),  # n <= N
    ({"largest_logit": [3.0, 100.0]}, {"exploding_logits"}),
    ({"largest_logit": [math.nan, 99.0]}, set()),
    ({"broken_rows": [0.0, 0.1], "entropy": [math.nan] * 2, "largest_logit": [math.nan] * 2}, {"not_finite"}),
]


@pytest.mark.parametrize(("change", "expected"), CASES)
def test_each_state_begins_at_its_threshold(change: dict[str, list[float]], expected: set[str]) -> None:
    assert {state.kind for state in states({**HEALTHY, **change}, AT_FIRST, AlertThresholds())} == expected


def test_large_logits_explode_only_if_they_have_grown() -> None:
    large = {**HEALTHY, "largest_logit": [220.0, 3.0]}
    assert not [*states(large, 111.0, AlertThresholds())]
    for first in (110.0, math.nan):
        (state,) = states(large, first, AlertThresholds())
        assert state.words == f"largest logit 220, at first {first:.3g}"


def test_thresholds_can_be_moved() -> None:
    moved = AlertThresholds(exploding_logit=8.0, logit_growth=1.0)
    assert [state.kind for state in states(HEALTHY, AT_FIRST, moved)] == ["exploding_logits"]
    assert not [*states({**HEALTHY, "entropy": [0.0, 2.0]}, AT_FIRST, AlertThresholds(heads=0.6))]


def queries_times(factor: float) -> Callable[[PreTrainedModel], None]:
    def change(model: PreTrainedModel) -> None:
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.q_proj.weight.mul_(factor)

    return change


def test_a_layer_is_told_of_when_it_enters_a_state_and_again_when_that_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(monitoring, "FORGOTTEN", 2)
    model, ids = llama(), tokens(1, 40)
    monitor = AttentionMonitor(every=1)
    heard: list[list[str]] = []
    counts: list[float] = []
    for factor in (1.0, 1e-3, 1e3, 1e-3, 1e3, 1.0, 1e-3):  # flat in the second, the fourth and the last
        queries_times(factor)(model)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with monitor.step(model) as numbers:
                model(input_ids=ids)
        heard.append([str(one.message) for one in caught if "spreads over" in str(one.message)])
        assert all(issubclass(one.category, AttentionAlert) for one in caught)
        counts.append(numbers["attn/alert/dispersion"])
    assert counts == [0, 2, 0, 2, 0, 0, 2]
    assert [len(words) for words in heard] == [0, 1, 0, 0, 0, 0, 1]
    assert heard[1][0].startswith("step 2: layer_00 spreads over")
    assert str(monitor.alerts[0]).startswith("step 2: layer_00 spreads over")
    assert "layer_01" in heard[1][0]
    alerts = [(alert.step, alert.layer) for alert in monitor.alerts if alert.kind == "dispersion"]
    assert alerts == [(2, "layer_00"), (2, "layer_01"), (7, "layer_00"), (7, "layer_01")]


@pytest.mark.parametrize(("factor", "kinds"), [(1e-4, {"dispersion"}), (1e4, {"entropy_collapse", "exploding_logits"})])
def test_a_model_that_goes_wrong(factor: float, kinds: set[str]) -> None:
    model, ids = llama(), tokens(1, 40)
    monitor = AttentionMonitor(every=1)
    with monitor.step(model):
        model(input_ids=ids)
    assert not kinds & {alert.kind for alert in monitor.alerts}
    queries_times(factor)(model)
    with pytest.warns(AttentionAlert), monitor.step(model) as numbers:
        model(input_ids=ids)
    assert kinds <= {alert.kind for alert in monitor.alerts}
    assert {f"attn/alert/{kind}" for kind in MEANING} <= {*numbers}


def test_weights_that_are_not_finite_are_told_of_and_not_averaged() -> None:
    model = llama()
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight.fill_(torch.inf)
    monitor = AttentionMonitor(every=1)
    warned = pytest.warns(AttentionAlert, match=r"layer_01.*not finite")
    with warned, monitor.step(model) as numbers:
        model(input_ids=tokens(1, 40))
    assert all(math.isfinite(value) for value in numbers.values())
    assert "attn/layer_00/entropy_mean" in numbers
    assert "attn/layer_01/entropy_mean" not in numbers


LOOP = """
import torch
from attnorm import AttentionMonitor
from tests.models.tiny import llama, tokens

model = llama()
for layer in model.model.layers:
    layer.self_attn.q_proj.weight.data.mul_(1e-4)
with AttentionMonitor(every=1).step(model):
    model(input_ids=tokens(1, 40))
"""


def test_a_warning_points_to_the_training_loop(tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    with pytest.warns(AttentionAlert, match="step 1: layer_00") as caught:
        runpy.run_path(str(script))
    line = next(number for number, text in enumerate(LOOP.splitlines(), start=1) if text.startswith("with "))
    assert {(one.filename, one.lineno) for one in caught} == {(str(script), line)}


def test_a_monitor_says_how_it_is_set_and_what_it_has_seen() -> None:
    model, ids = llama(), tokens(1, 40)
    monitor = AttentionMonitor(every=1, rows=8)
    assert repr(monitor).startswith("AttentionMonitor(every=1, rows=8, top_n=20, thresholds=AlertThresholds(")
    assert repr(monitor).endswith("): 0 measurements, 0 alerts")
    queries_times(1e-4)(model)
    with pytest.warns(AttentionAlert), monitor.step(model):
        model(input_ids=ids)
    assert repr(monitor).endswith("): 1 measurements, 2 alerts")
