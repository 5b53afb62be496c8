"""Padding, caches, packed sequences and masks of the user's own: each query sees what the model lets it see."""

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

from attnorm.metrics.call import AttentionCall
from attnorm.models.observe import observe
from tests.models import dense
from tests.models.families import ids, tiny

Outputs = list[tuple[AttentionCall, Tensor]]
KERNELS = ["sdpa", "eager"]


def watched(model: PreTrainedModel, **inputs: object) -> list[AttentionCall]:
    calls: list[AttentionCall] = []
    with torch.no_grad(), observe(model, calls.append):
        model(**inputs)
    return calls


def padding(left: bool) -> Tensor:
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :4] = 0
    return mask if left else mask.flip(1)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_padded_keys_are_hidden_from_a_decoder(name: str, left: bool, kernel: str) -> None:
    mask = padding(left)
    for call in watched(tiny(name, kernel), input_ids=ids(), attention_mask=mask):
        seen = dense.visible(call)
        assert not seen[1, :, :, mask[1] == 0].any()
        assert seen[0, :, -1, -1].all()
        if name != "mistral":
            assert seen[0, 0].sum(-1).tolist() == list(range(1, 13))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("left", [True, False])
def test_a_padded_sequence_is_measured_as_it_is_alone(left: bool, kernel: str) -> None:
    model = tiny("llama", kernel)
    mask = padding(left)
    real = mask[1].bool()
    together = watched(model, input_ids=ids(), attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    alone = watched(model, input_ids=ids()[1:, real])
    for padded, plain in zip(together, alone, strict=True):
        rows = dense.weights(padded)[1:][:, :, real][..., real]
        torch.testing.assert_close(rows, dense.weights(plain), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kernel", KERNELS)
def test_padding_in_a_decoder_needs_no_square_mask(kernel: str) -> None:
    for call in watched(tiny("llama", kernel), input_ids=ids(), attention_mask=padding(True)):
        assert call.causal
        assert call.mask is not None
        assert call.mask.shape[-2] == 1


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_padded_keys_are_hidden_from_an_encoder(name: str, kernel: str) -> None:
    mask = padding(False)
    for call in watched(tiny(name, kernel), input_ids=ids(), attention_mask=mask):
        assert not dense.visible(call)[1, :, :8, mask[1] == 0].any()


@pytest.mark.parametrize("kernel", KERNELS)
def test_padding_of_the_source_is_hidden_in_cross_attention(kernel: str) -> None:
    mask = padding(False)
    calls = watched(tiny("t5", kernel), input_ids=ids(), attention_mask=mask, decoder_input_ids=ids()[:, :7])
    crossing = [call for call in calls if call.kind == "cross"]
    assert len(crossing) == 3
    for call in crossing:
        assert tuple(dense.visible(call).shape) == (2, 4, 7, 12)
        assert not dense.visible(call)[1, :, :, mask[1] == 0].any()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "gemma3"])
def test_queries_after_a_cache_see_what_the_full_sequence_shows_them(name: str, step: int, kernel: str) -> None:
    model = tiny(name, kernel)
    full = watched(model, input_ids=ids())
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=ids()[:, :-step], past_key_values=cache, use_cache=True)
    for late, whole in zip(watched(model, input_ids=ids()[:, -step:], past_key_values=cache), full, strict=True):
        assert late.query_BHQD.shape[2] == step
        keys = late.key_BGKD.shape[2]  # a sliding layer's cache forgets what its window has left
        torch.testing.assert_close(
            dense.weights(late), dense.weights(whole)[:, :, -step:, -keys:], atol=1e-5, rtol=1e-4
        )


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_empty_part_of_a_static_cache_is_hidden(kernel: str) -> None:
    model = tiny("llama", kernel)
    cache = StaticCache(config=model.config, max_cache_len=32)
    full = watched(model, input_ids=ids())
    first = watched(model, input_ids=ids()[:, :9], past_key_values=cache, use_cache=True)
    rest = watched(model, input_ids=ids()[:, 9:], past_key_values=cache, use_cache=True)
    for layer, whole in enumerate(full):
        expected = dense.weights(whole)
        torch.testing.assert_close(dense.weights(first[layer])[..., :9], expected[:, :, :9, :9], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(dense.weights(rest[layer])[..., :12], expected[:, :, 9:], atol=1e-5, rtol=1e-4)
        assert not dense.visible(rest[layer])[..., 12:].any()


@pytest.mark.parametrize("kernel", KERNELS)
def test_generation_is_the_same_and_every_step_is_seen(kernel: str) -> None:
    model = tiny("llama", kernel)
    calls: list[AttentionCall] = []
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    plain = model.generate(ids(), **options)
    with observe(model, calls.append):
        seen = model.generate(ids(), **options)
    assert torch.equal(plain, seen)
    assert [call.key_BGKD.shape[2] for call in calls if call.layer == 0] == [12, 13, 14, 15]
    assert {call.layer for call in calls} == {0, 1}


@pytest.mark.parametrize("kernel", KERNELS)
def test_packed_sequences_do_not_see_each_other(kernel: str) -> None:
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]] * 2)
    for call in watched(tiny("llama", kernel), input_ids=ids(), position_ids=positions, use_cache=False):
        seen = dense.visible(call)
        assert not seen[:, :, 5:, :5].any()
        assert seen[0, 0].sum(-1).tolist() == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 6, 7]


def prefix_mask() -> Tensor:
    """The first four tokens see each other: no causal mask."""
    allowed = torch.ones(12, 12, dtype=torch.bool).tril()
    allowed[:4, :4] = True
    return allowed.expand(2, 1, 12, 12)


@pytest.mark.parametrize("hiding", [torch.finfo(torch.float32).min, -torch.inf, -1e9, -1e4])
@pytest.mark.parametrize("kernel", KERNELS)
def test_an_additive_mask_of_the_user_is_taken_as_it_is(kernel: str, hiding: float, outputs: Outputs) -> None:
    additive = torch.zeros(2, 1, 12, 12).masked_fill(~prefix_mask(), hiding)
    for call in watched(tiny("llama", kernel), input_ids=ids(), attention_mask=additive):
        assert torch.equal(dense.visible(call), prefix_mask().expand(2, 4, 12, 12))
        assert call.bias is None
    for call, output in outputs:
        torch.testing.assert_close(output.double(), dense.output(call), atol=1e-5, rtol=1e-4)


def test_a_boolean_mask_of_the_user_is_taken_as_it_is(outputs: Outputs) -> None:
    for call in watched(tiny("llama", "sdpa"), input_ids=ids(), attention_mask=prefix_mask()):
        assert torch.equal(dense.visible(call), prefix_mask().expand(2, 4, 12, 12))
    for call, output in outputs:
        torch.testing.assert_close(output.double(), dense.output(call), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kernel", KERNELS)
def test_numbers_in_a_mask_are_part_of_the_logits(kernel: str, outputs: Outputs) -> None:
    distance = (torch.arange(12)[:, None] - torch.arange(12)).float()
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0])[None, :, None, None]
    alibi = (-distance * slopes).masked_fill(distance < 0, -torch.inf).expand(2, 4, 12, 12)
    for call in watched(tiny("llama", kernel), input_ids=ids(), attention_mask=alibi):
        assert call.causal
        assert call.bias is not None
        assert bool(call.bias.isfinite().all())
    for call, output in outputs:
        torch.testing.assert_close(output.double(), dense.output(call), atol=1e-5, rtol=1e-4)


def test_eager_attention_adds_even_a_boolean_mask(outputs: Outputs) -> None:
    """So the model runs; what it runs is what is measured."""
    for call in watched(tiny("llama", "eager"), input_ids=ids(), attention_mask=prefix_mask()):
        assert dense.visible(call).all()
    for call, output in outputs:
        torch.testing.assert_close(output.double(), dense.output(call), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["t5", "gemma2"])
def test_half_precision_runs(name: str) -> None:
    model = tiny(name, "eager").to(torch.bfloat16)
    inputs = {"input_ids": ids()} | ({"decoder_input_ids": ids()} if name == "t5" else {})
    for call in watched(model, **inputs):
        assert call.query_BHQD.dtype == torch.bfloat16


def test_a_fully_masked_row_has_no_visible_key() -> None:
    for call in watched(tiny("llama", "sdpa"), input_ids=ids(), attention_mask=padding(True)):
        assert dense.visible(call)[1, :, :4].sum() == 0
