"""describe(), its fingerprint, and how far a model reaches."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Gemma4ForCausalLM, Gemma4TextConfig, PreTrainedModel

import attnorm
from attnorm.models.describe import _positions, _sample, describe, fingerprint, longest_context, position_kind
from attnorm.models.load import LoadedModel, load
from tests.analysis.tiny_models import llama
from tests.models.families import tiny


def test_a_description_says_what_the_model_is() -> None:
    about = describe(LoadedModel(tiny("llama"), None, "mine", "abc"))
    assert json.loads(json.dumps(about)) == about
    parameters = sum(parameter.numel() for parameter in tiny("llama").parameters())
    assert about.pop("fingerprint") == fingerprint(tiny("llama"))
    assert about == {
        "name": "mine", "revision": "abc", "class": "LlamaForCausalLM", "model_type": "llama",
        "parameters": parameters, "dtype": "float32", "device": "cpu", "layers": 2, "heads": 4, "kv_heads": 2,
        "head_dim": 8, "max_positions": 64, "position_kind": "rotary", "kernel": "sdpa",
    }  # fmt: skip


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


class Int8(Tensor):
    """A weight in 8 bits that, as torchao's, can neither be reshaped nor indexed."""

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor) -> "Int8":
        return Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype)

    def __init__(self, data: Tensor, scale: Tensor) -> None:
        self.inner, self.scale = data, scale

    def __tensor_flatten__(self) -> tuple[list[str], object]:
        return ["inner", "scale"], {"by": object()}

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner, args[0].scale)
        if func in (torch.ops.aten.t.default, torch.ops.aten.linear.default):
            plain = [arg.inner * arg.scale if isinstance(arg, cls) else arg for arg in args]
            return func(*plain, **(kwargs or {}))
        raise NotImplementedError(f"no {func}")


def quantized(seed: int = 0) -> Any:
    model = llama(seed)
    for module in model.modules():
        if isinstance(module, nn.Linear) and module is not model.lm_head:
            scale = module.weight.abs().amax(1, keepdim=True).detach() / 127
            weight = Int8((module.weight.detach() / scale).round().to(torch.int8), scale)
            module.weight = nn.Parameter(weight, requires_grad=False)
    return model


def test_quantized_weights_have_a_fingerprint_that_depends_on_their_values() -> None:
    assert fingerprint(quantized()) == fingerprint(quantized())
    assert fingerprint(quantized()) != fingerprint(llama())
    changed = quantized()
    weight = changed.model.layers[1].mlp.up_proj.weight
    weight.inner[3, 4] += 1
    assert fingerprint(changed) != fingerprint(quantized())


@pytest.mark.filterwarnings("ignore")
def test_a_model_quantized_by_torchao_is_analyzed() -> None:
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model = llama()
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    analysis = attnorm.analyze(model, torch.arange(1, 33), metrics="core")
    assert analysis.heads.num_rows == 8
