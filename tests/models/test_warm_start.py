"""A normalizer starts in a trained model where the model's function changes least."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import GPT2Config, LlamaConfig, T5Config

from attnorm.models.layer_normalizer import trained_length
from attnorm.models.patch import patch, swap
from attnorm.normalizers.declaration import LayerFacts
from attnorm.normalizers.registry import BUILT_IN
from tests.models.tiny import llama, quiet_logits, tiny, tokens

STARTS = {name: entry.declaration.warm_start for name, entry in BUILT_IN.items()}
THE_SAME: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("softmax", "log_scaled", "composed", "tempered")},
    "ssmax": {"bias": True},
    "topk": {"k": 12},
    "local": {"window": 12},
    "kernel": {"function": "exp"},
}


def test_every_normalizer_but_those_of_another_architecture_declares_its_start() -> None:
    assert [name for name, start in STARTS.items() if start is None] == ["differential", "differential_v2", "tda"]


@pytest.mark.parametrize("name", THE_SAME)
def test_some_start_as_softmax_itself(name: str) -> None:
    model, ids = llama(), tokens()
    before = quiet_logits(model, ids)
    with swap(model, name, **THE_SAME[name]):
        assert_close(quiet_logits(model, ids), before, rtol=0, atol=1e-5)


def change(name: str, before: Tensor, ids: Tensor, **options: Any) -> float:
    model = llama()
    with swap(model, name, **options):
        return float((quiet_logits(model, ids) - before).abs().mean())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ssmax", {"train_length": 12}),
        ("sink", {}),
        ("scale_invariant", {}),
        ("forget", {}),
        ("asentmax", {}),
        ("entmax", {"learned": True}),
    ],
)
def test_a_warm_start_is_closer_to_the_trained_model_than_a_cold_one(name: str, options: dict[str, Any]) -> None:
    model, ids = llama(), tokens()
    before = quiet_logits(model, ids)
    warm, cold = (change(name, before, ids, warm_start=warm, **options) for warm in (True, False))
    assert warm < 0.8 * cold


@pytest.mark.parametrize(
    ("layer", "visible"),
    [
        (LayerFacts(4, 100), list(range(1, 101))),
        (LayerFacts(4, 100, window=7), [min(n, 7) for n in range(1, 101)]),
        (LayerFacts(4, 100, window=200), list(range(1, 101))),
        (LayerFacts(4, 100, causal=False), [100] * 100),
    ],
)
def test_mean_log_n_is_the_mean_over_the_rows_of_a_text(layer: LayerFacts, visible: list[int]) -> None:
    assert layer.mean_log_n() == pytest.approx(sum(map(math.log, visible)) / 100)


def test_ssmax_starts_from_the_length_of_the_layer() -> None:
    model = tiny("gemma3")
    with swap(model, "ssmax") as handle:
        sliding, full = (p.detach() for p in handle.parameters())
    assert_close(full, torch.full((4,), 1 / LayerFacts(4, 64).mean_log_n()))
    assert_close(sliding, torch.full((4,), 1 / LayerFacts(4, 64, window=5).mean_log_n()))


@pytest.mark.parametrize(
    ("config", "length"),
    [
        (LlamaConfig(max_position_embeddings=4096), 4096),
        (GPT2Config(n_positions=512), 512),
        (T5Config(), 1024),
        (
            LlamaConfig(
                max_position_embeddings=131072,
                rope_parameters={
                    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
                },
            ),
            8192,
        ),
    ],
)  # fmt: skip
def test_the_training_length_is_what_the_config_says(config: Any, length: int) -> None:
    assert trained_length(config) == length


def test_a_train_length_among_the_options_is_where_ssmax_starts() -> None:
    for bias, name in ((False, "s"), (True, "bias")):
        options = {"bias": True, "s": 0.6} if bias else {}
        with swap(llama(), {0: "ssmax:train_length=512" + ":bias=true:s=0.6" * bias}) as handle:
            (stated,) = (one.rules[0].state_dict()[name] for one in handle.normalizers.values())
        with swap(llama(), "ssmax", layers=0, train_length=512, **options) as handle:
            (given,) = (one.rules[0].state_dict()[name] for one in handle.normalizers.values())
        assert torch.equal(stated, given)


def test_given_options_win() -> None:
    model = llama()
    with swap(model, "ssmax", s=0.43) as handle:
        assert all((p == 0.43).all() for p in (q.detach().round(decimals=4) for q in handle.parameters()))
    with swap(model, "ssmax", heads=None) as handle:
        assert all(p.dim() == 0 for p in handle.parameters())


def test_a_sink_starts_from_the_models_own() -> None:
    model, ids = tiny("gpt_oss"), tokens()
    before = quiet_logits(model, ids)
    handle = patch(model, "sink")
    assert_close(quiet_logits(model, ids), before, rtol=0, atol=1e-5)
    own = model.model.layers[0].self_attn.sinks
    first = next(handle.parameters())
    assert torch.equal(first, own)
    assert first is not own


def test_the_models_own_sinks_are_kept_in_front_of_another_map() -> None:
    model, ids = tiny("gpt_oss"), tokens()
    with swap(model, "entmax15"):
        kept = quiet_logits(model, ids)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.sinks.fill_(-1e4)
        assert (quiet_logits(model, ids) - kept).abs().max() > 1e-3
