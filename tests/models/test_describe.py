"""describe(), its fingerprint, and how far a model reaches."""

import json
from typing import Any

import pytest
import torch
from transformers import Gemma4ForCausalLM, Gemma4TextConfig, PreTrainedModel

from attnorm.models.describe import _positions, _sample, describe, fingerprint, longest_context, position_kind
from attnorm.models.load import LoadedModel, load
from tests.models.families import tiny


def test_a_description_says_what_the_model_is() -> None:
    about = describe(LoadedModel(tiny("llama"), None, "mine", "abc"))
    assert json.loads(json.dumps(about)) == about
    parameters = sum(parameter.numel() for parameter in tiny("llama").parameters())
    assert about.pop("fingerprint") == fingerprint(tiny("llama"))
    assert about == {
        "name": "mine",
        "revision": "abc",
        "class": "LlamaForCausalLM",
        "model_type": "llama",
        "parameters": parameters,
        "dtype": "float32",
        "device": "cpu",
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "max_positions": 64,
        "position_kind": "rotary",
        "kernel": "sdpa",
    }


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "bart", "vit", "gemma3", "albert", "opt"])
def test_every_family_can_be_described(name: str) -> None:
    about = describe(load(tiny(name)))
    assert about["heads"] == 4
    assert about["head_dim"] == 8
    assert about["kv_heads"] in (2, 4)
    assert all(type(about[size]) is int for size in ("layers", "heads", "head_dim", "kv_heads", "parameters"))


def test_what_differs_from_layer_to_layer_is_not_told() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 99, "vocab_size_per_layer_input": 99}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 16}
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    config = Gemma4TextConfig(**sizes, **heads, **layers)
    about = describe(load(Gemma4ForCausalLM(config)))
    assert (about["heads"], about["kv_heads"]) == (4, 2)
    assert about["head_dim"] == (None if getattr(config, "is_heterogeneous", False) else 8)


LIMITS = {
    "gpt2": (64, True, "learned"),
    "opt": (64, True, "learned"),
    "bert": (64, True, "learned"),
    "roberta": (62, True, "learned"),  # two rows of the table are for padding
    "bart": (64, True, "learned"),
    "vit": (17, True, "learned"),
    "llama": (64, False, "rotary"),
    "modernbert": (64, False, "rotary"),
    "t5": (None, False, "relative"),
}


@pytest.mark.parametrize("name", LIMITS)
def test_how_far_a_model_reaches(name: str) -> None:
    model = tiny(name)
    assert (*longest_context(model), position_kind(model)) == LIMITS[name]


@pytest.mark.parametrize("name", ["gpt2", "opt", "bert", "roberta", "bart"])
def test_a_hard_limit_is_exact(name: str) -> None:
    model = tiny(name)
    longest, hard = longest_context(model)
    assert hard
    assert longest is not None
    with torch.no_grad():
        model(input_ids=torch.full((1, longest), 7))
        with pytest.raises((IndexError, RuntimeError)):
            model(input_ids=torch.full((1, longest + 1), 7))


def test_the_fingerprint_is_that_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(change: object) -> PreTrainedModel:
        model = tiny("llama")
        with torch.no_grad():
            change(model)  # type: ignore[operator]
        return model

    original = fingerprint(tiny("llama"))
    assert fingerprint(tiny("llama")) == original
    with monkeypatch.context() as as_on_gpu:  # where the values of all weights arrive together
        as_on_gpu.setattr("attnorm.models.describe.runs_asynchronously", lambda tensor: True)
        assert fingerprint(tiny("llama")) == original
    assert fingerprint(tiny("llama", "eager")) == original  # another kernel is not another model
    assert fingerprint(changed(lambda model: model.model.layers[1].mlp.up_proj.weight.mul_(1.001))) != original
    assert fingerprint(changed(lambda model: model.model.norm.weight[3].fill_(2.0))) != original
    assert fingerprint(tiny("llama").to(torch.bfloat16)) != original
    assert fingerprint(tiny("llama", rope_parameters={"rope_type": "default", "rope_theta": 5.0})) != original


def test_the_fingerprint_sees_a_patched_layer() -> None:
    from attnorm.normalizers.registry import get

    model = tiny("llama")
    before = fingerprint(model)
    model.model.layers[0].self_attn.attnorm_normalizer = get("entmax15")
    assert fingerprint(model) != before


def test_weights_that_are_elsewhere_are_no_obstacle() -> None:
    accelerate = pytest.importorskip("accelerate")
    offloaded = accelerate.cpu_offload(tiny("llama"), execution_device="cpu")
    assert len(fingerprint(offloaded)) == 64


class SinusoidTable(torch.nn.Embedding):
    pass


@pytest.mark.parametrize(
    ("tables", "kind", "rows"),
    [
        ({"wpe": (torch.nn.Embedding, True, 9)}, "learned", 9),
        ({"wpe": (torch.nn.Embedding, False, 9)}, "learned", 9),  # frozen, but not a table of sines
        ({"embed_positions": (SinusoidTable, True, 7)}, "sinusoidal", 7),
        ({"embed_positions": (SinusoidTable, False, 7)}, "sinusoidal", 7),
        ({"embed_positions": (SinusoidTable, False, 7), "pos_emb": (torch.nn.Embedding, True, 5)}, "learned", 5),
        ({"embed_positions": (SinusoidTable, False, 7), "pos_emb": (torch.nn.Embedding, False, 5)}, "sinusoidal", 5),
        ({"token_table": (torch.nn.Embedding, True, 9)}, "none", None),
        ({"relative_bias": (torch.nn.Embedding, True, 9)}, "relative", None),
    ],
)
def test_positions_are_of_the_kind_of_the_tables(tables: dict[str, Any], kind: str, rows: int | None) -> None:
    model = torch.nn.Module()
    for name, (table, trained, size) in tables.items():
        setattr(model, name, table(size, 3))
        getattr(model, name).weight.requires_grad_(trained)
    assert _positions(model) == (kind, rows)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "found"), [((1, 9, 3), ("learned", 9)), ((9, 3), ("learned", 9)), ((9,), ("none", None))]
)
def test_positions_may_be_a_parameter(shape: tuple[int, ...], found: tuple[str, int | None]) -> None:
    model = torch.nn.Module()
    model.pos_embed = torch.nn.Parameter(torch.zeros(shape))
    assert _positions(model) == found  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("offset", "padding", "rows"), [(None, None, 9), (2, None, 7), (None, 1, 7), (None, 0, 8), (3, 1, 6)]
)
def test_rows_that_no_token_uses_do_not_count(offset: int | None, padding: int | None, rows: int) -> None:
    model = torch.nn.Module()
    model.wpe = torch.nn.Embedding(9, 3, padding_idx=padding)
    if offset is not None:
        model.wpe.offset = offset
    assert _positions(model) == ("learned", rows)  # type: ignore[arg-type]


@pytest.mark.parametrize(("size", "step"), [(3, 1), (4096, 1), (8191, 1), (8192, 2), (40_960, 10)])
def test_the_fingerprint_takes_about_4096_values_of_a_weight(size: int, step: int) -> None:
    """Saved fingerprints are compared with those of later versions."""
    values = torch.arange(size, dtype=torch.int32)
    assert _sample(values.reshape(1, -1)) == values[::step].numpy().tobytes()
