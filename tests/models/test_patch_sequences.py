"""With any normalizer: no look into the future, and padding and caches change nothing."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import DynamicCache, PreTrainedModel, StaticCache

import attnorm
from attnorm.models.patch import swap
from tests.models.tiny import llama, quiet_logits, tiny, tokens

FAMILIES = ["gemma2", "gemma3", "gpt2", "gpt_oss"]  # besides llama
# Their own tests say why: no causal form, another architecture.
OTHERS = ("soft", "differential", "differential_v2", "tda")  # no causal form, or another architecture
NORMALIZERS = [name for name in attnorm.available() if name not in OTHERS]
WITH_CACHE = [name for name in NORMALIZERS if name != "selective"]
# One of each way through the engines: rescaled queries, blocks, a sink, distances.
DIFFERENT = ["ssmax", "entmax15", "sink", "scale_invariant"]
# So that these rows are longer than the window or k.
NARROW: dict[str, dict[str, Any]] = {"local": {"window": 3}, "topk": {"k": 3}, "scale_invariant": {"tau": 2.0}}

TOLERANCE: dict[str, float] = {"rtol": 1e-4, "atol": 2e-5}


@pytest.mark.parametrize("name", NORMALIZERS)
@pytest.mark.every_second("name")
def test_no_token_sees_a_later_one(name: str) -> None:
    assert_causal(llama(), name)


@pytest.mark.parametrize("name", DIFFERENT)
@pytest.mark.parametrize("family", FAMILIES)
def test_no_token_sees_a_later_one_in_any_family(family: str, name: str) -> None:
    assert_causal(tiny(family), name)


def assert_causal(model: PreTrainedModel, name: str) -> None:
    ids = tokens()
    other = ids.clone()
    other[:, -1] = (ids[:, -1] + 7) % 50 + 3
    with swap(model, name, **NARROW.get(name, {})):
        first, second = quiet_logits(model, ids), quiet_logits(model, other)
    assert torch.equal(first[:, :-1], second[:, :-1])
    assert not torch.equal(first[:, -1], second[:, -1])


def padded_left(ids: Tensor, by: int) -> dict[str, Tensor]:
    padding = torch.zeros(ids.shape[0], by, dtype=torch.long)
    mask = torch.cat([padding, torch.ones_like(ids)], 1)
    return {
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        "ids": torch.cat([padding, ids], 1),
    }


@pytest.mark.parametrize("name", NORMALIZERS)
@pytest.mark.every_second("name", first=1)
def test_left_padding_changes_nothing(name: str) -> None:
    assert_padding_is_unseen(llama(), name)


@pytest.mark.parametrize("name", DIFFERENT)
@pytest.mark.parametrize("family", FAMILIES)
def test_left_padding_changes_nothing_in_any_family(family: str, name: str) -> None:
    assert_padding_is_unseen(tiny(family), name)


def assert_padding_is_unseen(model: PreTrainedModel, name: str) -> None:
    ids = tokens(batch=1, length=9)
    with swap(model, name, **NARROW.get(name, {})):
        alone, padded = quiet_logits(model, ids), quiet_logits(model, **padded_left(ids, 4))
    assert_close(padded[:, 4:], alone, **TOLERANCE)


@pytest.mark.parametrize("name", ["ssmax", "entmax15", "gaussian", "soft"])
def test_right_padding_changes_nothing_in_an_encoder(name: str) -> None:
    model, ids = tiny("bert"), tokens(batch=1, length=9)
    padded = torch.cat([ids, torch.zeros(1, 3, dtype=torch.long)], 1)
    with swap(model, name):
        alone = quiet_logits(model, ids)
        together = quiet_logits(model, padded, attention_mask=(padded > 0).long())
    assert_close(together[:, :9], alone, **TOLERANCE)


def with_cache(model: PreTrainedModel, ids: Tensor, cache: Any, first: int, **inputs: Tensor) -> Tensor:
    """Logits of a sequence that arrives in three pieces: many tokens, two, then one by one."""
    ends = [first, first + 2, *range(first + 3, ids.shape[1] + 1)]
    pieces, start = [], 0
    for end in ends:
        given = {
            name: value[:, :end] if name == "attention_mask" else value[:, start:end] for name, value in inputs.items()
        }
        pieces.append(quiet_logits(model, ids[:, start:end], past_key_values=cache, use_cache=True, **given))
        start = end
    return torch.cat(pieces, 1)


CACHES = ("dynamic", "static")


def half(*indices: int) -> Any:
    """Marks every other case, counted along each factor, for the night."""
    return () if sum(indices) % 2 == 0 else pytest.mark.nightly


@pytest.mark.parametrize(
    ("name", "cache"),
    [pytest.param(n, c, marks=half(i, j)) for i, n in enumerate(WITH_CACHE) for j, c in enumerate(CACHES)],
)
@pytest.mark.every_second("name")
def test_a_cache_changes_nothing(name: str, cache: str) -> None:
    assert_cache_is_unseen(llama(), name, cache)


@pytest.mark.parametrize(
    ("family", "name", "cache"),
    [
        pytest.param(family, name, cache, marks=half(i, j, k))
        for i, family in enumerate(FAMILIES)
        for j, name in enumerate(DIFFERENT)
        for k, cache in enumerate(CACHES)
    ],
)
def test_a_cache_changes_nothing_in_any_family(family: str, name: str, cache: str) -> None:
    assert_cache_is_unseen(tiny(family), name, cache)


def assert_cache_is_unseen(model: PreTrainedModel, name: str, kind: str) -> None:
    ids = tokens(length=11)
    cache = DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=20)
    with swap(model, name, **NARROW.get(name, {})):
        whole, pieces = quiet_logits(model, ids), with_cache(model, ids, cache, 6)
    assert_close(pieces, whole, **TOLERANCE)


@pytest.mark.parametrize("name", ["ssmax", "stick_breaking", "local"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_cache_with_left_padding_changes_nothing(name: str, cache: str) -> None:
    model, ids = llama(), tokens(batch=1, length=9)
    inputs = padded_left(ids, 3)
    padded = inputs.pop("ids")
    held = DynamicCache(config=model.config) if cache == "dynamic" else StaticCache(model.config, max_cache_len=20)
    with swap(model, name, **NARROW.get(name, {})):
        whole, pieces = quiet_logits(model, ids), with_cache(model, padded, held, 6, **inputs)
    assert_close(pieces[:, 3:], whole, **TOLERANCE)


def test_selective_attention_asks_for_the_whole_sequence() -> None:
    model, ids = llama(), tokens()
    with swap(model, "selective"), pytest.raises(ValueError, match="use_cache=False"):
        with_cache(model, ids, DynamicCache(config=model.config), 6)


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static", "disable_compile": True}])
@pytest.mark.parametrize("name", ["ssmax", "entmax15"])
def test_generation_with_a_cache_finds_the_same_tokens(name: str, options: dict[str, Any]) -> None:
    model = llama()
    inputs = padded_left(tokens(length=7), 2)
    inputs["attention_mask"][1, :2] = 1  # one text is padded, the other is not
    given = {"input_ids": inputs["ids"], "attention_mask": inputs["attention_mask"]}
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with swap(model, name):
        slow = model.generate(**given, **settings, use_cache=False)
        fast = model.generate(**given, **settings, **options)
    assert slow.shape == (2, 15)
    assert torch.equal(fast, slow)


def test_an_encoder_decoder_generates_with_its_cache() -> None:
    model, ids = tiny("t5"), tokens(length=7)
    settings = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    with swap(model, "entmax15"):
        slow = model.generate(input_ids=ids, **settings, use_cache=False)
        fast = model.generate(input_ids=ids, **settings)
    assert torch.equal(fast, slow)


def test_packed_texts_do_not_see_each_other() -> None:
    model, ids = llama(), tokens(batch=1, length=12)
    position_ids = torch.cat([torch.arange(5), torch.arange(7)])[None]
    with swap(model, "ssmax"):
        packed = quiet_logits(model, ids, position_ids=position_ids, use_cache=False)
        parts = [quiet_logits(model, part) for part in (ids[:, :5], ids[:, 5:])]
    assert_close(packed, torch.cat(parts, 1), **TOLERANCE)


def test_a_mask_of_numbers_is_added_to_the_logits() -> None:
    model, ids = llama(), tokens(batch=1)
    seen = torch.ones(12, 12, dtype=torch.bool).tril()
    seen[8:, 2] = False
    added = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
    with swap(model, "ssmax"):
        by_numbers = quiet_logits(model, ids, attention_mask=added)
        by_truth = quiet_logits(model, ids, attention_mask=seen[None, None])
        assert_close(by_numbers, by_truth, **TOLERANCE)
        lowered = torch.where(torch.arange(12) == 0, -1.0, 0.0) + added
        assert (quiet_logits(model, ids, attention_mask=lowered) - by_truth).abs().max() > 1e-3
