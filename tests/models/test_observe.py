"""observe(): what is recorded is what the model computes, and the model computes what it always did."""

import weakref
from functools import cache

import pytest
import torch
from transformers import AttentionInterface

from attnorm.metrics.call import AttentionCall
from attnorm.models.observe import observe
from tests.models import dense
from tests.models.families import CASES, FAMILIES, tiny, tiny_inputs

unchanged = cache(tiny)  # observe leaves a model as it was

Outputs = list[tuple[AttentionCall, torch.Tensor]]


@pytest.mark.parametrize(("name", "kernel"), CASES)
def test_the_model_computes_the_same_bits(name: str, kernel: str) -> None:
    model, inputs = unchanged(name, kernel), tiny_inputs(name)
    with torch.no_grad():
        before = model(**inputs)
        with observe(model, lambda call: None):
            watched = model(**inputs)
        after = model(**inputs)
    assert torch.equal(before[0], watched[0])
    assert torch.equal(before[0], after[0])


@pytest.mark.parametrize(("name", "kernel"), CASES)
def test_weights_times_values_is_the_kernels_output(name: str, kernel: str, outputs: Outputs) -> None:
    model, inputs = unchanged(name, kernel), tiny_inputs(name)
    with torch.no_grad(), observe(model, lambda call: None):
        model(**inputs)
    assert outputs
    for call, output in outputs:
        torch.testing.assert_close(output.double(), dense.output(call), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if "eager" in family.kernels])
def test_weights_are_those_of_transformers_eager_attention(name: str) -> None:
    model, inputs = unchanged(name, "eager"), tiny_inputs(name)
    calls: list[AttentionCall] = []
    with torch.no_grad(), observe(model, calls.append):
        result = model(**inputs, output_attentions=True)
    own = {"encoder": "encoder_attentions", "decoder": "decoder_attentions", "cross": "cross_attentions"}
    for kind in FAMILIES[name].kinds:
        attentions = result[own[kind] if own[kind] in result else "attentions"]
        of_kind = [call for call in calls if call.kind == kind]
        assert [call.layer for call in of_kind] == list(range(len(attentions)))
        for call, expected in zip(of_kind, attentions, strict=True):
            torch.testing.assert_close(dense.weights(call), expected.double(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("name", "kernel"), CASES)
def test_attention_is_far_from_uniform_here(name: str, kernel: str) -> None:
    """Else a wrong scale, softcap or window would hardly show in the tests above."""
    model, calls = unchanged(name, kernel), []
    with torch.no_grad(), observe(model, calls.append):
        model(**tiny_inputs(name))
    assert max(dense.weights(call)[:, :, -1].max().item() for call in calls) > 0.3


def test_no_square_mask_where_transformers_makes_none() -> None:
    calls: list[AttentionCall] = []
    model = tiny("llama", "sdpa")
    with torch.no_grad(), observe(model, calls.append):
        model(**tiny_inputs("llama"), attention_mask=torch.ones(2, 12, dtype=torch.long))
    assert all(call.causal and call.mask is None for call in calls)


def test_queries_keys_and_values_keep_their_own_head_counts() -> None:
    calls: list[AttentionCall] = []
    model = tiny("llama", "sdpa")
    with torch.no_grad(), observe(model, calls.append):
        model(**tiny_inputs("llama"))
    assert [tuple(call.query_BHQD.shape) for call in calls] == [(2, 4, 12, 8)] * 2
    assert [tuple(call.key_BGKD.shape) for call in calls] == [(2, 2, 12, 8)] * 2


def test_values_may_be_narrower_than_keys() -> None:
    calls: list[AttentionCall] = []
    model = tiny("deepseek_v3", "sdpa")
    with torch.no_grad(), observe(model, calls.append):
        model(**tiny_inputs("deepseek_v3"))
    assert calls[0].key_BGKD.shape[-1] == 12
    assert calls[0].value_BGKE.shape[-1] == 6


def test_softcap_sinks_and_scale_are_recorded() -> None:
    calls: list[AttentionCall] = []
    for name in ("gemma2", "gpt_oss", "granite"):
        model = tiny(name, "eager")
        with torch.no_grad(), observe(model, calls.append):
            model(**tiny_inputs(name))
    assert [call.softcap for call in calls] == [0.5, 0.5, None, None, None, None]
    assert [call.sinks_H is not None for call in calls] == [False, False, True, True, False, False]
    assert [round(call.scale, 6) for call in calls[::2]] == [round(3**-0.5, 6), round(8**-0.5, 6), 0.3]


def test_gradients_are_those_of_the_unobserved_run() -> None:
    model, inputs = tiny("llama", "sdpa"), tiny_inputs("llama")
    gradients = []
    for watched in (False, True):
        model.zero_grad()
        if watched:
            with observe(model, lambda call: None):
                model(**inputs, labels=inputs["input_ids"]).loss.backward()
        else:
            model(**inputs, labels=inputs["input_ids"]).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_recomputed_layers_are_not_counted_twice() -> None:
    model, inputs = tiny("llama", "sdpa").train(), tiny_inputs("llama")
    model.gradient_checkpointing_enable()
    calls: list[AttentionCall] = []
    with observe(model, calls.append):
        model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
    assert [call.layer for call in calls] == [0, 1]


def test_training_mode_with_dropout_is_left_alone() -> None:
    model, inputs = tiny("gpt2", "sdpa", attn_pdrop=0.5).train(), tiny_inputs("gpt2")
    results = []
    for watched in (False, True):
        torch.manual_seed(3)
        if watched:
            with observe(model, lambda call: None):
                results.append(model(**inputs).logits)
        else:
            results.append(model(**inputs).logits)
    assert torch.equal(*results)


def test_inputs_are_recorded_when_asked_for() -> None:
    model, inputs = tiny("t5", "sdpa"), tiny_inputs("t5")
    calls: list[AttentionCall] = []
    with torch.no_grad(), observe(model, calls.append, inputs=True):
        encoder = model(**inputs).encoder_last_hidden_state
    for call in calls:
        assert call.inputs_BKC is not None
        assert call.inputs_BKC.shape == (2, call.key_BGKD.shape[2], 32)
        if call.kind == "cross":
            assert torch.equal(call.inputs_BKC, encoder)
    with torch.no_grad(), observe(model, calls.append):
        model(**inputs)
    assert calls[-1].inputs_BKC is None


def test_nothing_is_held_after_a_layer_has_run() -> None:
    """Else the inputs of all layers would be in memory at once."""
    model = tiny("llama", num_hidden_layers=4)
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def count(call: AttentionCall) -> None:
        nonlocal most
        assert call.inputs_BKC is not None
        alive.extend([weakref.ref(call.inputs_BKC), weakref.ref(call.query_BHQD)])
        most = max(most, sum(one() is not None for one in alive))

    with torch.no_grad(), observe(model, count, inputs=True):
        model(**tiny_inputs("llama"), use_cache=False)
    assert len(alive) == 8
    assert most <= 2


def test_a_patched_layer_shows_its_normalizer() -> None:
    from attnorm.normalizers.registry import get

    model, calls = tiny("llama", "sdpa"), []
    normalizer = get("ssmax")
    model.model.layers[1].self_attn.attnorm_normalizer = normalizer
    with torch.no_grad(), observe(model, calls.append):
        model(**tiny_inputs("llama"))
    assert [call.normalizer for call in calls] == [None, normalizer]


def test_transformers_lookup_of_kernels_is_replaced_until_the_last_model_is_left() -> None:
    plain = AttentionInterface.get_interface
    first, second = tiny("llama"), tiny("llama")
    seen: list[AttentionCall] = []
    for _ in range(2):
        with observe(first, seen.append):
            replaced = AttentionInterface.get_interface
            assert replaced is not plain
            with observe(second, lambda call: None):
                assert AttentionInterface.get_interface is replaced
            assert AttentionInterface.get_interface is replaced
            with torch.no_grad():
                first(**tiny_inputs("llama"))
        assert AttentionInterface.get_interface is plain
    assert len(seen) == 2 * len(first.model.layers)
