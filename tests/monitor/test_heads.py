"""Single heads in training: what is logged of them, the worst of each metric, and their series."""

from typing import Any

import numpy as np
import pytest
import torch

from attnorm.monitor.measure import REPORTED
from attnorm.monitor.monitor import AttentionMonitor
from attnorm.monitor.watch import KEPT, History, layer_of, worst_of_layer
from tests.models.tiny import llama, tiny, tokens

pytestmark = pytest.mark.filterwarnings("ignore::attnorm.monitor.alerts.AttentionAlert")


def measured(monitor: AttentionMonitor, model: Any, step: int = 1, **inputs: Any) -> dict[str, float]:
    with monitor.measuring(model, step) as numbers:
        model(**inputs)
    return numbers


def test_every_head_is_logged_where_asked_and_layers_summarize_them() -> None:
    model = llama()
    numbers = measured(AttentionMonitor(per_head=True, top_n=5), model, input_ids=tokens(1, 40))
    heads, layers = model.config.num_attention_heads, model.config.num_hidden_layers
    for layer in range(layers):
        for name, metric in REPORTED.items():
            own = np.array([numbers[f"attn/layer_{layer:02}/head_{head:02}/{name}"] for head in range(heads)])
            assert numbers[f"attn/layer_{layer:02}/{name}_mean"] == pytest.approx(own.mean())
            worst = own.min() if metric.worst == "min" else own.max()
            assert numbers[f"attn/layer_{layer:02}/{name}_{metric.worst}"] == worst
            assert own[int(numbers[f"attn/layer_{layer:02}/{name}_{metric.worst}_head"])] == worst


def test_a_list_of_heads_is_logged_and_no_other() -> None:
    numbers = measured(AttentionMonitor(per_head=[(1, 2)], top_n=5), llama(), input_ids=tokens(1, 40))
    assert {key for key in numbers if "/head_" in key} == {f"attn/layer_01/head_02/{name}" for name in REPORTED}
    quiet = measured(AttentionMonitor(top_n=5), llama(), input_ids=tokens(1, 40))
    assert not [key for key in quiet if "/head_" in key]


def test_the_worst_head_of_the_model_has_its_layer_and_index() -> None:
    numbers = measured(AttentionMonitor(per_head=True, top_n=5), llama(), input_ids=tokens(1, 40))
    for name, metric in REPORTED.items():
        own = {key: value for key, value in numbers.items() if "/head_" in key and key.endswith(f"/{name}")}
        worst = (min if metric.worst == "min" else max)(own.values())
        assert numbers[f"attn/worst/{name}"] == worst
        layer, head = (int(numbers[f"attn/worst/{name}_{what}"]) for what in ("layer", "head"))
        assert numbers[f"attn/layer_{layer:02}/head_{head:02}/{name}"] == worst


def test_each_stack_of_a_model_has_its_own_worst_head() -> None:
    ids = tokens(1, 40)
    monitor = AttentionMonitor(per_head=[("cross", 0, 1)], top_n=5)
    numbers = measured(monitor, tiny("t5"), input_ids=ids, decoder_input_ids=ids)
    assert {key.split("/")[1] for key in numbers if "/worst/" in key} == {"encoder", "decoder", "cross"}
    assert "attn/cross/layer_00/head_01/entropy" in numbers
    assert set(monitor.history.table()["kind"].to_pylist()) == {"encoder", "decoder", "cross"}


def test_the_series_of_a_head_are_its_logged_numbers() -> None:
    model, monitor = llama(), AttentionMonitor(per_head=True, top_n=5)
    logged = [measured(monitor, model, step, input_ids=tokens(1, 40, seed=step)) for step in (3, 6, 9)]
    expected = [(step, one["attn/layer_01/head_03/entropy"]) for step, one in zip((3, 6, 9), logged, strict=True)]
    assert monitor.history.series("entropy", 1, 3) == expected
    frame = pytest.importorskip("pandas") and monitor.to_pandas()
    heads = model.config.num_attention_heads * model.config.num_hidden_layers
    assert len(frame) == 3 * heads
    own = frame[(frame["layer"] == 1) & (frame["head"] == 3)]
    assert list(zip(own["step"], own["entropy"], strict=True)) == expected
    assert len(monitor.history) == 3
    assert monitor.history[-1].step == 9


def test_history_keeps_the_last_measurements_only() -> None:
    history = History(kept=3)
    for step in range(5):
        history.add(step, {})
    assert [one.step for one in history] == [2, 3, 4]
    assert KEPT == 1000


def test_a_head_that_was_not_measured_and_an_unknown_metric_are_named() -> None:
    monitor = AttentionMonitor(top_n=5)
    measured(monitor, llama(), input_ids=tokens(1, 40))
    with pytest.raises(KeyError, match="layer 9 head 0"):
        monitor.history.series("entropy", 9, 0)
    with pytest.raises(ValueError, match="'entropie'"):
        monitor.history.series("entropie", 0, 0)


def test_missing_numbers_are_no_worst_head() -> None:
    nan = float("nan")
    assert worst_of_layer([nan, 2.0, 1.0, 1.0], lowest=True) == (2, 1.0)
    assert worst_of_layer([nan, 2.0, 2.0, 1.0], lowest=False) == (1, 2.0)
    assert worst_of_layer([nan], lowest=True) is None
    assert layer_of("encoder/layer_03") == ("encoder", 3)
    assert layer_of("layer_12") == (None, 12)
    short = measured(AttentionMonitor(top_n=20), llama(), input_ids=torch.ones(1, 10, dtype=torch.long))
    assert not [key for key in short if "separability" in key]
