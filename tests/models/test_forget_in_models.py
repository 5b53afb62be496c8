"""`forget` with gates that read the layer's input, inside models: formula, caches, saving, training."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.testing import assert_close
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import attnorm
from attnorm.models.patch_state import normalizer_of, patched_modules
from tests.models.tiny import tiny

WIDTH, HEADS = 32, 4


def llama(layers: int = 2) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=HEADS,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def tokens(length: int = 20, batch: int = 2) -> Tensor:
    return torch.randint(3, 61, (batch, length), generator=torch.Generator().manual_seed(1))


def forgetting(model: Any) -> Any:
    """The model with gates that differ between tokens and forget clearly."""
    handle = attnorm.patch(model, "forget", width=WIDTH)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in handle.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    return model


@torch.no_grad()
def logits(model: Any, ids: Tensor, **options: Any) -> Tensor:
    found: Tensor = model(input_ids=ids, **options).logits
    return found


@torch.no_grad()
def decoded(model: Any, ids: Tensor, cache: Any, first: int = 7, mask: Tensor | None = None) -> Tensor:
    """The logits of all tokens: `first` of them at once, the others one by one."""
    parts, start = [], 0
    for end in range(first, ids.shape[1] + 1):
        options = {} if mask is None else {"attention_mask": mask[:, :end]}
        parts.append(model(input_ids=ids[:, start:end], past_key_values=cache, use_cache=True, **options).logits)
        start = end
    return torch.cat(parts, 1)


def test_a_warm_start_leaves_the_model_as_it_was() -> None:
    model, ids = llama(), tokens(60)
    before = logits(model, ids)
    handle = attnorm.patch(model, "forget", width=WIDTH)
    assert [tuple(parameter.shape) for parameter in handle.parameters()] == [(HEADS,), (HEADS, WIDTH)] * 2
    difference = (logits(model, ids) - before).abs().max()
    assert 0 < difference < 1e-4
    handle.remove()
    assert torch.equal(logits(model, ids), before)
    assert not model.model.layers[0].self_attn._forward_pre_hooks


def test_one_layer_is_softmax_with_the_sum_of_log_gates_on_its_logits() -> None:
    model, ids = llama(layers=1), tokens()
    layer = model.model.layers[0]
    with torch.no_grad():
        x = layer.input_layernorm(model.model.embed_tokens(ids))
    plain = copy.deepcopy(model)
    forget: Any = normalizer_of(next(iter(patched_modules(forgetting(model)).values())))
    running = logsigmoid(x @ forget.weight.T + forget.bias).mT.cumsum(-1)  # (B, H, K)
    later = torch.ones(20, 20, dtype=torch.bool).triu(1)
    bias = (running[..., :, None] - running[..., None, :]).masked_fill(later, float("-inf")).detach()
    assert_close(logits(model, ids), logits(plain, ids, attention_mask=bias), rtol=1e-4, atol=1e-5)
    assert (logits(model, ids) - logits(plain, ids)).abs().max() > 1e-2


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])  # gemma3: sliding windows in every other layer
def test_decoding_with_a_cache_equals_one_pass(family: str) -> None:
    model = forgetting(tiny(family).eval())
    ids = tokens()
    assert_close(decoded(model, ids, DynamicCache(config=model.config)), logits(model, ids, use_cache=False))


def test_a_cache_of_fixed_size() -> None:
    model, ids = forgetting(llama()), tokens()
    expected = logits(model, ids, use_cache=False)
    assert_close(decoded(model, ids, StaticCache(config=model.config, max_cache_len=32)), expected)


def test_padding_on_the_left() -> None:
    model, ids = forgetting(llama()), tokens()
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    expected = logits(model, ids[:1, 5:], use_cache=False)
    assert_close(decoded(model, ids, DynamicCache(), mask=mask)[:1, 5:], expected, rtol=1e-4, atol=1e-4)


def test_what_reorders_and_crops_a_cache_reorders_and_crops_the_gates() -> None:
    model, ids = forgetting(llama()), tokens()
    cache = DynamicCache()
    decoded(model, ids, cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    cache.crop(-8)
    kept = cache.get_seq_length()
    assert 0 < kept < 20
    swapped = ids.flip(0)
    with torch.no_grad():
        found = model(input_ids=swapped[:, kept:], past_key_values=cache).logits
    assert_close(found, logits(model, swapped, use_cache=False)[:, kept:])


@pytest.mark.parametrize("beams", [1, 3])
def test_generation_is_the_same_with_and_without_a_cache(beams: int) -> None:
    model, ids = forgetting(llama()), tokens(8)
    options = {"max_new_tokens": 8, "do_sample": False, "num_beams": beams, "pad_token_id": 0}
    one, other = (model.generate(ids, use_cache=cached, **options) for cached in (True, False))
    assert torch.equal(one, other)


def test_a_cache_from_before_the_patch_is_refused() -> None:
    model, ids = llama(), tokens()
    cache = DynamicCache()
    logits(model, ids, past_key_values=cache)
    attnorm.patch(model, "forget", width=WIDTH)
    with pytest.raises(ValueError, match=r"10 columns.*layer 0.*got 8"):
        logits(model, ids[:, :1], past_key_values=cache)


@pytest.mark.parametrize("how", ["attnorm", "transformers"])
def test_a_saved_model_forgets_as_before(how: str, tmp_path: Path) -> None:
    model, ids = forgetting(llama()), tokens()
    expected = logits(model, ids)
    save = attnorm.save_pretrained if how == "attnorm" else type(model).save_pretrained
    save(model, tmp_path)
    again = attnorm.from_pretrained(tmp_path).eval()
    assert again.config.attnorm["recipes"][0]["options"] == {"heads": HEADS, "bias": 14.0, "width": WIDTH}
    assert_close(logits(again, ids), expected)
    assert_close(decoded(again, ids, DynamicCache()), expected)


def test_a_copy_forgets_too_and_can_be_unpatched_alone() -> None:
    model, ids = forgetting(llama()), tokens()
    expected, softmax = logits(model, ids), logits(llama(), ids)
    other = copy.deepcopy(model)
    attnorm.unpatch(other)
    assert_close(logits(other, ids), softmax)
    assert_close(logits(model, ids), expected)


def test_paused_it_runs_as_before() -> None:
    model, ids = llama(), tokens()
    before = logits(model, ids)
    handle = attnorm.patch(model, "forget", width=WIDTH, warm_start=False)
    with handle.paused():
        assert torch.equal(logits(model, ids), before)
    assert not torch.equal(logits(model, ids), before)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gates_learn(checkpointing: bool) -> None:
    model, ids = llama(), tokens()
    handle = attnorm.patch(model, "forget", width=WIDTH)
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.train()
    model(input_ids=ids, labels=ids).loss.backward()
    for parameter in handle.parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().max() > 0


def test_an_attention_module_that_hides_its_input_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    attention = type(model.model.layers[0].self_attn)
    monkeypatch.setattr(attention, "forward", lambda self, x: attention.forward)  # type: ignore[misc]
    with pytest.raises(ValueError, match=r"forget.*self_attn.*LlamaAttention.*width="):
        attnorm.patch(model, "forget", width=WIDTH)
