"""observe(): what is recorded is what the model computes, and the model computes what it always did."""

import threading
import weakref
from contextlib import ExitStack
from functools import cache

import pytest
import torch
import transformers
from transformers import AttentionInterface, PreTrainedModel

from attnorm.metrics.call import AttentionCall
from attnorm.models.dispatch import UnsupportedModel
from attnorm.models.observe import observe
from tests.models import dense
from tests.models.families import (
    BERT,
    CASES,
    FAMILIES,
    LLAMA,
    VIT,
    VOCABULARY,
    ids,
    image,
    source_and_target,
    tiny,
    tiny_inputs,
)

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


ORIGINAL = AttentionInterface.get_interface


def hooks(model: PreTrainedModel) -> int:
    return sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())


@pytest.fixture(autouse=True)
def _nothing_is_left() -> None:
    yield
    assert AttentionInterface.get_interface is ORIGINAL


def test_after_an_exception_in_the_model() -> None:
    model = tiny("llama")
    configured, attached = model.config.to_dict(), hooks(model)
    with pytest.raises(IndexError), observe(model, lambda call: None):
        model(input_ids=torch.tensor([[1, 10**6]]))
    assert AttentionInterface.get_interface is ORIGINAL
    assert (model.config.to_dict(), hooks(model)) == (configured, attached)


def test_after_an_exception_in_the_callback() -> None:
    model = tiny("llama")
    expected = model(input_ids=ids()).logits

    def fail(call: AttentionCall) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), observe(model, fail):
        model(input_ids=ids())
    assert hooks(model) == 0
    assert torch.equal(model(input_ids=ids()).logits, expected)


def test_after_a_generator_was_dropped_halfway() -> None:
    model = tiny("llama")

    def half() -> object:
        with observe(model, lambda call: None):
            yield model(input_ids=ids())

    next(half())
    assert hooks(model) == 0


def test_a_model_can_be_observed_again() -> None:
    model = tiny("llama")
    calls: list[AttentionCall] = []
    for _ in range(2):
        with observe(model, calls.append):
            model(input_ids=ids())
    assert [call.layer for call in calls] == [0, 1, 0, 1]


def test_two_observers_at_once_see_every_call_and_leave_in_any_order() -> None:
    model, first, second = tiny("llama"), [], []
    expected = model(input_ids=ids()).logits
    outer, inner = ExitStack(), ExitStack()
    outer.enter_context(observe(model, first.append))
    inner.enter_context(observe(model.model, second.append))
    assert torch.equal(model(input_ids=ids()).logits, expected)
    outer.close()
    model(input_ids=ids())
    inner.close()
    model(input_ids=ids())
    assert ([call.layer for call in first], [call.layer for call in second]) == ([0, 1], [0, 1, 0, 1])
    assert hooks(model) == 0


def test_another_model_is_not_seen() -> None:
    model, other, calls = tiny("llama"), tiny("llama"), []
    with observe(model, calls.append):
        model(input_ids=ids())
        other(input_ids=ids())
    assert len(calls) == 2


def test_two_models_in_two_threads_see_their_own_calls() -> None:
    models = [tiny("llama", num_hidden_layers=layers) for layers in (2, 3)]
    seen: list[list[AttentionCall]] = [[], []]
    together = threading.Barrier(2)

    def watch(number: int) -> None:
        with torch.no_grad(), observe(models[number], seen[number].append):
            together.wait(10)
            for _ in range(5):
                models[number](input_ids=ids())
            together.wait(10)

    threads = [threading.Thread(target=watch, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [[call.layer for call in calls] for calls in seen] == [[0, 1] * 5, [0, 1, 2] * 5]


def test_a_run_without_one_visible_call_is_an_error() -> None:
    """reorder_and_upcast_attn sends GPT-2 past the interface."""
    model = tiny("gpt2", "eager", reorder_and_upcast_attn=True)
    with pytest.raises(UnsupportedModel, match="made no call"), observe(model, lambda call: None):
        model(input_ids=ids())


def test_not_running_the_model_is_no_error() -> None:
    with observe(tiny("llama"), lambda call: None):
        pass


def test_attention_that_is_not_what_it_seems_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama import modeling_llama

    plain = modeling_llama.eager_attention_forward

    def secretly_sharper(module, query, *others, **options):  # type: ignore[no-untyped-def]
        return plain(module, query * 3, *others, **options)

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", secretly_sharper)
    model = tiny("llama", "eager")
    refused = pytest.raises(UnsupportedModel, match=r"model\.layers\.0\.self_attn.*not softmax")
    with refused, observe(model, lambda call: None), torch.no_grad():
        model(input_ids=ids())


def test_broken_weights_are_no_reason_to_refuse() -> None:
    """NaN in, NaN out: for the measurement to flag, not for the observer to stumble over."""
    model, calls = tiny("llama"), []
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[0] = torch.nan
        with observe(model, calls.append):
            model(input_ids=ids())
    assert len(calls) == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_compiled_model_is_seen() -> None:
    model, calls = tiny("llama", num_hidden_layers=1), []
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        compiled(input_ids=ids())
        expected = model(input_ids=ids()).logits
        with observe(compiled, calls.append):
            seen = compiled(input_ids=ids()).logits
    assert len(calls) == 1
    assert torch.equal(seen, expected)


def test_offloaded_weights_are_no_obstacle() -> None:
    accelerate = pytest.importorskip("accelerate")
    model, calls = tiny("llama"), []
    with torch.no_grad():
        expected = model(input_ids=ids()).logits
        offloaded = accelerate.cpu_offload(model, execution_device="cpu")
        with observe(offloaded, calls.append, inputs=True):
            seen = offloaded(input_ids=ids()).logits
    assert torch.equal(seen, expected)
    assert [call.inputs_BKC is not None for call in calls] == [True, True]


def places(model: PreTrainedModel, **inputs: object) -> list[tuple[str, int]]:
    calls: list[AttentionCall] = []
    with torch.no_grad(), observe(model.eval(), calls.append):
        model(**inputs)
    return [(call.kind, call.layer) for call in calls]


def test_each_kind_counts_from_zero() -> None:
    expected = [("encoder", 0), ("encoder", 1)]
    expected += [place for layer in range(3) for place in (("decoder", layer), ("cross", layer))]
    for name in ("t5", "bart"):
        assert places(tiny(name), **source_and_target()) == expected


def test_the_next_forward_counts_anew() -> None:
    for name in ("bart", "albert"):
        model, calls = tiny(name), []
        inputs = source_and_target() if name == "bart" else {"input_ids": ids()}
        with torch.no_grad(), observe(model, calls.append):
            model(**inputs)
            first = len(calls)
            model(**inputs)
        found = [(call.kind, call.layer) for call in calls]
        assert found[:first] == found[first:]


def test_shared_layers_are_counted_by_their_calls() -> None:
    assert places(tiny("albert"), input_ids=ids()) == [("encoder", 0), ("encoder", 1), ("encoder", 2)]
    groups = tiny("albert", num_hidden_layers=4, num_hidden_groups=2)
    assert places(groups, input_ids=ids()) == [("encoder", layer) for layer in range(4)]


def test_layers_without_attention_leave_a_gap() -> None:
    config = transformers.Lfm2Config(
        **LLAMA | {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"]}
    )
    model = transformers.Lfm2ForCausalLM._from_config(config, attn_implementation="sdpa")
    assert places(model, input_ids=ids()) == [("decoder", 1), ("decoder", 3)]


def test_a_decoder_with_cross_attention_is_no_encoder() -> None:
    model = tiny("gpt2", add_cross_attention=True)
    found = places(model, input_ids=ids(), encoder_hidden_states=torch.randn(2, 5, 32))
    assert found == [("decoder", 0), ("cross", 0), ("decoder", 1), ("cross", 1)]


def test_bert_as_a_decoder_is_a_decoder() -> None:
    model = transformers.BertLMHeadModel._from_config(
        transformers.BertConfig(**BERT, is_decoder=True, add_cross_attention=True), attn_implementation="sdpa"
    )
    found = places(model, input_ids=ids(), encoder_hidden_states=torch.randn(2, 5, 32))
    assert found == [("decoder", 0), ("cross", 0), ("decoder", 1), ("cross", 1)]


def test_two_encoders_do_not_share_numbers() -> None:
    config = transformers.ChineseCLIPConfig(
        text_config={**BERT, "pad_token_id": 0}, vision_config=VIT, projection_dim=16
    )
    model = transformers.ChineseCLIPModel._from_config(config, attn_implementation="sdpa")
    found = places(model, input_ids=ids(), **image())
    assert len(found) == 4
    assert sorted(found) == [("encoder", layer) for layer in range(4)]


def test_the_parts_of_a_nested_model_keep_their_own_kernels() -> None:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**VIT),
        text_config=transformers.LlamaConfig(**LLAMA),
        image_token_index=VOCABULARY - 1,
        vision_feature_layer=-1,
    )
    model = transformers.LlavaForConditionalGeneration._from_config(
        config, attn_implementation={"vision_config": "eager", "text_config": "sdpa"}
    ).eval()
    prompt = torch.full((2, 20), VOCABULARY - 1)
    prompt[:, :2], prompt[:, 18:] = 5, 6
    inputs = {"input_ids": prompt, **image()}
    with torch.no_grad():
        expected = model(**inputs).logits
    calls: list[AttentionCall] = []
    with torch.no_grad(), observe(model, calls.append):
        seen = model(**inputs).logits
    assert torch.equal(seen, expected)
    assert [(call.kind, call.layer) for call in calls] == [
        ("encoder", 0), ("encoder", 1), ("decoder", 0), ("decoder", 1),
    ]  # fmt: skip
