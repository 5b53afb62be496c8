"""A patched model on CUDA computes what it computes on the CPU, in every precision. Skipped without a GPU."""

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import PreTrainedModel

import attnorm
from attnorm.metrics.call import AttentionCall
from attnorm.models.load import load
from attnorm.models.observe import observe
from tests.cuda.on_device import (
    DEVICE,
    DIFFERENT,
    FAMILIES,
    NARROW,
    NEEDS_DEVICE,
    NORMALIZERS,
    relative_error,
    tiny,
    tokens,
    wide,
)
from tests.models.tiny import quiet_logits

pytestmark = NEEDS_DEVICE

# Every normalizer in one model, and in every family those that differ.
PAIRS = [("llama", name) for name in NORMALIZERS]
PAIRS += [(family, name) for family in FAMILIES if family != "llama" for name in DIFFERENT]
CAUSAL = [pair for pair in PAIRS if pair[0] != "bert"]
# Rounding changes which keys they take, or (gpt-oss) which expert.
JUMPS = {"hard", "topk", "gpt_oss"}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_softmax_in_the_place_of_softmax_changes_no_logit(family: str, kernel: str, padded: bool) -> None:
    if family == "gpt_oss" and kernel == "sdpa":
        pytest.skip("has no SDPA")
    model, ids = tiny(family, attn_implementation=kernel), tokens()
    attention_mask = torch.ones_like(ids)
    if padded:
        attention_mask[0, :4] = 0
    before = quiet_logits(model, ids, attention_mask=attention_mask)
    with attnorm.swap(model, "softmax"):
        after = quiet_logits(model, ids, attention_mask=attention_mask)
    assert_close(after[attention_mask.bool()], before[attention_mask.bool()], rtol=0, atol=5e-5)
    assert torch.equal(quiet_logits(model, ids, attention_mask=attention_mask), before)


def exact(model: PreTrainedModel, name: str, ids: Tensor) -> Tensor:
    """What the model says with that normalizer, in float64 on the CPU."""
    twin = copy.deepcopy(model).cpu()
    attnorm.patch(twin, name, **NARROW.get(name, {}))
    return quiet_logits(twin.double(), ids.cpu())


@pytest.mark.parametrize(("family", "name"), PAIRS)
def test_in_float32_it_says_what_the_cpu_says(family: str, name: str) -> None:
    model, ids = tiny(family), tokens()
    with attnorm.swap(model, name, **NARROW.get(name, {})) as handle:
        found = quiet_logits(model, ids)
        assert all(p.device == model.device for p in handle.parameters())
    assert relative_error(found, exact(model, name, ids)) < 1e-4


@pytest.mark.parametrize("way", ["weights", "autocast"])
@pytest.mark.parametrize(("family", "name"), PAIRS)
def test_in_bfloat16_it_stays_close(family: str, name: str, way: str) -> None:
    model, ids = tiny(family), tokens()
    expected = exact(model, name, ids)
    if way == "weights":
        model.to(torch.bfloat16)
    with attnorm.swap(model, name, **NARROW.get(name, {})) as handle:
        assert all(p.dtype == torch.float32 for p in handle.parameters())
        with torch.autocast(DEVICE, torch.bfloat16, enabled=way == "autocast"):
            found = quiet_logits(model, ids)
    assert found.isfinite().all()
    if not JUMPS & {family, name}:
        assert relative_error(found, expected) < 0.1


@pytest.mark.parametrize(("family", "name"), CAUSAL)
def test_no_token_sees_a_later_one(family: str, name: str) -> None:
    model, ids = tiny(family), tokens()
    other = ids.clone()
    other[:, -1] = (ids[:, -1] + 7) % 50 + 3
    with attnorm.swap(model, name, **NARROW.get(name, {})):
        first, second = quiet_logits(model, ids), quiet_logits(model, other)
    assert_close(first[:, :-1], second[:, :-1], rtol=0, atol=1e-5)
    assert (first[:, -1] - second[:, -1]).abs().max() > 1e-2


@pytest.mark.parametrize(("family", "name"), [*CAUSAL, ("bert", "ssmax"), ("bert", "entmax15"), ("bert", "soft")])
def test_padding_changes_nothing(family: str, name: str) -> None:
    model, ids = tiny(family), tokens(1, 9)
    padding = torch.zeros(1, 4, dtype=torch.long, device=DEVICE)
    if family == "bert":  # to the right, where positions stay
        inputs: dict[str, Any] = {"attention_mask": torch.cat([torch.ones_like(ids), padding], 1)}
        padded, shown = torch.cat([ids, padding], 1), slice(9)
    else:
        mask = torch.cat([padding, torch.ones_like(ids)], 1)
        inputs = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
        padded, shown = torch.cat([padding, ids], 1), slice(4, None)
    with attnorm.swap(model, name, **NARROW.get(name, {})):
        alone, together = quiet_logits(model, ids), quiet_logits(model, padded, **inputs)
    assert_close(together[:, shown], alone, rtol=1e-3, atol=1e-4)


def assert_generates(model: PreTrainedModel, ids: Tensor, **options: Any) -> None:
    """The logits at every new token, with the cache, are those of the whole text in one forward."""
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    settings = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = model.generate(
        input_ids=ids, attention_mask=mask, return_dict_in_generate=True, output_logits=True, **settings, **options
    )
    full = torch.cat([mask, torch.ones_like(found.sequences[:, ids.shape[1] :])], 1)
    positions = (full.cumsum(-1) - 1).clamp(min=0)
    whole = quiet_logits(model, found.sequences, attention_mask=full, position_ids=positions, use_cache=False)
    assert_close(torch.stack(found.logits, 1), whole[:, ids.shape[1] - 1 : -1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("family", "name"), [pair for pair in CAUSAL if pair[1] != "selective"])
def test_generation_with_a_cache_says_what_the_whole_text_says(family: str, name: str) -> None:
    model = tiny(family)
    with attnorm.swap(model, name, **NARROW.get(name, {})):
        assert_generates(model, tokens(2, 9))


@pytest.mark.parametrize("name", ["ssmax", "entmax15", "local"])
def test_generation_with_a_cache_of_fixed_size(name: str) -> None:
    model = tiny("llama")
    with attnorm.swap(model, name, **NARROW.get(name, {})):
        assert_generates(model, tokens(2, 9), cache_implementation="static", disable_compile=True)


@pytest.mark.parametrize("name", ["sigmoid", "scale_invariant"])
def test_generation_through_flex_attention(name: str) -> None:
    model = wide()
    with attnorm.swap(model, name):
        assert_generates(model, tokens(2, 20))


@pytest.mark.parametrize("family", FAMILIES)
def test_observed_calls_are_those_of_the_cpu(family: str) -> None:
    model, ids = tiny(family), tokens()
    attnorm.patch(model, "ssmax", layers=[1])
    seen: dict[str, list[AttentionCall]] = {DEVICE: [], "cpu of the same": []}
    for (_, calls), twin in zip(seen.items(), (model, copy.deepcopy(model).cpu()), strict=True):
        with observe(twin, calls.append):
            quiet_logits(twin, ids.to(twin.device))
    assert len(seen[DEVICE]) == 2
    for found, expected in zip(*seen.values(), strict=True):
        assert found.query_BHQD.device == model.device
        assert (found.layer, found.kind, found.causal, found.scale) == (
            (expected.layer, expected.kind, expected.causal, expected.scale)
        )
        for name in ("query_BHQD", "key_BGKD", "value_BGKE", "sinks_H", "mask"):
            a, b = getattr(found, name), getattr(expected, name)
            assert (a is None) == (b is None)
            assert a is None or relative_error(a, b) < 1e-4, name


@pytest.mark.parametrize("name", ["ssmax", "entmax", "sink"])
def test_what_was_saved_on_the_device_is_loaded_anywhere(tmp_path: Path, name: str) -> None:
    model, ids = tiny("llama"), tokens()
    handle = attnorm.patch(model, name, layers={0: [1, 2], 1: None}, **({"learned": True} if name == "entmax" else {}))
    with torch.no_grad():
        for parameter in handle.parameters():
            parameter.add_(torch.linspace(0.1, 0.2, parameter.numel(), device=DEVICE).reshape(parameter.shape))
    expected = quiet_logits(model, ids)
    attnorm.save_pretrained(model, tmp_path)
    loaded = attnorm.from_pretrained(tmp_path)
    assert relative_error(quiet_logits(loaded, ids.cpu()), expected) < 1e-4
    assert_close(quiet_logits(loaded.to(DEVICE), ids), expected)
    if importlib.util.find_spec("accelerate"):
        placed = attnorm.from_pretrained(tmp_path, device_map=DEVICE)
        assert all(p.device == model.device for p in placed.parameters())
        assert_close(quiet_logits(placed, ids), expected)
    model.save_pretrained(tmp_path / "plain")
    assert_close(quiet_logits(attnorm.from_pretrained(tmp_path / "plain").to(DEVICE), ids), expected)


def test_a_model_that_was_patched_on_the_cpu_moves_with_its_normalizers() -> None:
    model, ids = tiny("llama").cpu(), tokens()
    attnorm.patch(model, "sink")
    expected = quiet_logits(model, ids.cpu())
    assert relative_error(quiet_logits(model.to(DEVICE), ids), expected) < 1e-4


@pytest.mark.parametrize("name", ["softmax", "ssmax", "entmax15"])
def test_the_bundled_model_reads_as_on_the_cpu(name: str) -> None:
    model = load("bundled", device=DEVICE, dtype=torch.float32).model
    ids = torch.arange(2 * 200, device=DEVICE).reshape(2, 200) * 7 % model.config.vocab_size
    twin = copy.deepcopy(model).cpu().double()
    with attnorm.swap(model, name), attnorm.swap(twin, name):
        assert relative_error(quiet_logits(model, ids), quiet_logits(twin, ids.cpu())) < 1e-3
