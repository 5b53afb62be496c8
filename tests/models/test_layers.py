"""Layers and kinds: every attention module has a place of its own, under the number the model gives it."""

import torch
import transformers
from transformers import PreTrainedModel

from attnorm.metrics.call import AttentionCall
from attnorm.models.observe import observe
from tests.models.families import BERT, LLAMA, VIT, VOCABULARY, ids, image, source_and_target, tiny


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


def test_layers_that_run_again_and_again_have_a_place_for_each_time() -> None:
    config = transformers.HrmTextConfig(**LLAMA)
    model = transformers.HrmTextForCausalLM._from_config(config, attn_implementation="sdpa")
    found = places(model, input_ids=ids())
    assert len(found) > len(list(model.model.children()))
    assert sorted(found) == [("decoder", layer) for layer in range(len(found))]


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
        ("encoder", 0),
        ("encoder", 1),
        ("decoder", 0),
        ("decoder", 1),
    ]
