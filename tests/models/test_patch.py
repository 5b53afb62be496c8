"""A patched model computes what it says, layer by layer and head by head, and is itself again afterwards."""

import copy
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    BloomForCausalLM,
    LwDetrConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StaticCache,
    T5Gemma2DecoderConfig,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.lw_detr.modeling_lw_detr import LwDetrAttention
from transformers.models.t5gemma2.modeling_t5gemma2 import T5Gemma2MergedAttention

import attnorm
from attnorm.analysis.settings import passage
from attnorm.metrics.call import AttentionCall
from attnorm.models.dispatch import KERNEL, NORMALIZER, UnsupportedModel, attention_sites
from attnorm.models.layer_normalizer import head_count
from attnorm.models.load import load
from attnorm.models.observe import observe
from attnorm.models.patch import patch, swap, unpatch
from attnorm.models.patch_state import device_of, normalizer_of, patched_modules, recipe_of
from attnorm.models.patched_attention import patched_attention
from attnorm.normalizers.block import Block
from attnorm.normalizers.contract import Normalizer
from attnorm.normalizers.declaration import warm_start_of
from attnorm.normalizers.registry import BUILT_IN
from attnorm.normalizers.softmax import Softmax
from tests.models.dense import visible
from tests.models.tiny import FAMILIES, llama, quiet_logits, tiny, tokens

LEARNED: dict[str, dict[str, Any]] = {
    "softmax": {"learned": True},
    "ssmax": {},
    "sink": {},
    "asentmax": {},
    "entmax": {"learned": True},
}


def fingerprint(model: PreTrainedModel) -> tuple[Any, ...]:
    """All that a patch could leave behind."""
    modules = {path: sorted(vars(module)) for path, module in model.named_modules()}
    configs = [module.config._attn_implementation for module in model.modules() if hasattr(module, "config")]
    return list(model.state_dict()), modules, configs, model.config.to_dict()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_softmax_in_the_place_of_softmax_changes_no_logit(family: str, padded: bool) -> None:
    model, ids = tiny(family), tokens()
    attention_mask = torch.ones_like(ids)
    if padded:
        attention_mask[0, :4] = 0
    before = quiet_logits(model, ids, attention_mask=attention_mask)
    with swap(model, "softmax"):
        after = quiet_logits(model, ids, attention_mask=attention_mask)
    assert_close(after[attention_mask.bool()], before[attention_mask.bool()], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_another_normalizer_changes_the_logits_and_its_removal_changes_them_back(family: str) -> None:
    model, ids = tiny(family), tokens()
    before, state = quiet_logits(model, ids), fingerprint(model)
    handle = patch(model, "entmax15")
    assert (quiet_logits(model, ids) - before).abs().max() > 1e-2
    handle.remove()
    assert fingerprint(model) == state
    assert torch.equal(quiet_logits(model, ids), before)
    handle.remove()
    assert fingerprint(model) == state


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_that_are_left_out_keep_softmax(family: str) -> None:
    model, ids = tiny(family), tokens()
    before, untouched = quiet_logits(model, ids), first_layer(model, ids)
    with swap(model, "softmax", layers=[1]) as handle:
        assert_close(quiet_logits(model, ids), before, rtol=0, atol=1e-5)
        assert handle.normalizers
        assert all(".1." in path for path in handle.normalizers)
    with swap(model, "entmax15", layers=1):
        assert torch.equal(first_layer(model, ids), untouched)


def first_layer(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """What the first attention module returns."""
    seen: list[Tensor] = []
    first = next(iter(attention_sites(model)))
    hook = first.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
    try:
        quiet_logits(model, ids)
    finally:
        hook.remove()
    return seen[0]


def head_outputs(model: PreTrainedModel, ids: Tensor, layer: int) -> Tensor:
    """(B, L, H, D) of a layer's heads, before the output projection."""
    seen: list[Tensor] = []
    projection = model.get_submodule(f"model.layers.{layer}.self_attn.o_proj")
    hook = projection.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    try:
        quiet_logits(model, ids)
    finally:
        hook.remove()
    return seen[0].unflatten(-1, (4, -1))


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_heads_that_are_left_out_keep_softmax(family: str) -> None:
    model, ids = tiny(family), tokens()
    plain = head_outputs(model, ids, 0)
    with swap(model, "entmax15"):
        every_head = head_outputs(model, ids, 0)
    with swap(model, "entmax15", layers={0: [3, 1]}):
        some_heads = head_outputs(model, ids, 0)
    assert_close(some_heads[..., [0, 2], :], plain[..., [0, 2], :], rtol=0, atol=1e-5)
    assert_close(some_heads[..., [1, 3], :], every_head[..., [1, 3], :], rtol=0, atol=1e-5)
    assert (some_heads - plain)[..., [1, 3], :].abs().max() > 1e-2


def test_heads_and_whole_layers_mix() -> None:
    model = llama()
    with swap(model, "ssmax", layers={0: [2], 1: None}) as handle:
        shapes = [p.shape for p in handle.parameters()]
    assert shapes == [(1,), (4,)]


@pytest.mark.parametrize("name", LEARNED)
def test_what_is_learned_belongs_to_the_model(name: str) -> None:
    model = llama()
    handle = patch(model, name, **LEARNED[name])
    learned = list(handle.parameters())
    assert learned
    assert {id(p) for p in learned} <= {id(p) for p in model.parameters()}
    assert all(p.shape == (4,) and p.dtype == torch.float32 and p.requires_grad for p in learned)
    assert {key.split(".attnorm_normalizer.")[0] for key in model.state_dict() if "attnorm_normalizer" in key} == {
        "model.layers.0.self_attn",
        "model.layers.1.self_attn",
    }
    model.to(torch.float64)
    assert all(p.dtype == torch.float64 for p in handle.parameters())


def test_every_layer_has_parameters_of_its_own_also_from_an_object() -> None:
    model = llama()
    mine = attnorm.get("ssmax", heads=4)
    handle = patch(model, mine)
    first, second = handle.parameters()
    assert first is not second
    with torch.no_grad():
        first.fill_(7.0)
    assert (second != 7).all()
    assert all((p != 7).all() for p in mine.parameters())


def test_a_composition_of_ones_own_runs() -> None:
    model, ids = llama(), tokens()
    mine = attnorm.compose("entmax15", scale="ssmax", select="local", sink="softmax1")
    with swap(model, mine):
        assert quiet_logits(model, ids).isfinite().all()


def test_patching_twice_is_refused_and_changes_nothing() -> None:
    model = llama()
    patch(model, "ssmax", layers=[0])
    state = fingerprint(model)
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn .*'ssmax'.*handle\.remove"):
        patch(model, "entmax15")
    assert fingerprint(model) == state


def test_different_layers_may_have_different_normalizers() -> None:
    model, ids = llama(), tokens()
    state = fingerprint(model)
    first = patch(model, "ssmax", layers=[0])
    second = patch(model, "entmax15", layers=[1])
    both = quiet_logits(model, ids)
    first.remove()
    assert (quiet_logits(model, ids) - both).abs().max() > 1e-3
    second.remove()
    assert fingerprint(model) == state


def test_attention_modules_are_patched_one_by_one() -> None:
    model, ids = llama(), tokens()
    plain, state = quiet_logits(model, ids), fingerprint(model)
    with swap(model, "entmax15"):
        whole = quiet_logits(model, ids)
    first, second = (patch(layer.self_attn, "entmax15") for layer in model.model.layers)
    assert torch.equal(quiet_logits(model, ids), whole)
    with pytest.raises(ValueError, match=r"LlamaAttention .*'entmax15'"):
        patch(model.model.layers[0].self_attn, "ssmax")
    first.remove()
    with swap(model, "entmax15", layers=[0]):
        assert torch.equal(quiet_logits(model, ids), whole)
    second.remove()
    assert fingerprint(model) == state
    assert torch.equal(quiet_logits(model, ids), plain)


def test_what_was_patched_by_parts_is_given_back_as_a_whole() -> None:
    model, ids = llama(), tokens()
    plain, state = quiet_logits(model, ids), fingerprint(model)
    patch(model.model, "ssmax", layers=[0])
    patch(model.model.layers[1].self_attn, "entmax15")
    unpatch(model)
    assert fingerprint(model) == state
    assert torch.equal(quiet_logits(model, ids), plain)


def test_a_handle_leaves_alone_what_was_patched_after_it() -> None:
    model, ids = llama(), tokens()
    first = patch(model, "ssmax")
    first.remove()
    second = patch(model, "entmax15")
    patched = quiet_logits(model, ids)
    assert not first.normalizers
    assert not [*first.parameters()]
    first.remove()
    assert torch.equal(quiet_logits(model, ids), patched)
    assert len(second.normalizers) == 2


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3", "bert", "t5"])
def test_a_patch_outlives_a_change_of_the_models_kernel(family: str) -> None:
    model, ids = tiny(family), tokens()
    attention_mask = torch.ones_like(ids)
    attention_mask[0, :4] = 0
    visible = attention_mask.bool()
    handle = patch(model, "entmax15")
    expected = quiet_logits(model, ids, attention_mask=attention_mask)
    model.set_attn_implementation("eager")
    assert_close(quiet_logits(model, ids, attention_mask=attention_mask)[visible], expected[visible])
    seen: list[AttentionCall] = []
    with observe(model, seen.append):
        quiet_logits(model, ids, attention_mask=attention_mask)
    assert all(call.normalizer is not None and call.normalizer.name == "entmax15" for call in seen)
    assert any(call.causal for call in seen) == (family != "bert")
    handle.remove()
    # Some versions of transformers do not reach the two stacks of T5.
    assert {module.config._attn_implementation for module in attention_sites(model)} <= {"eager", "sdpa"}
    assert model.config._attn_implementation == "eager"
    assert (quiet_logits(model, ids) - expected).abs().max() > 1e-2


def test_a_kernel_whose_masks_cannot_be_read_is_refused() -> None:
    model, ids = llama(), tokens()
    handle = patch(model, "ssmax")
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match=r"'flash_attention_2'.*set_attn_implementation\('sdpa'\)"):
        quiet_logits(model, ids)
    handle.remove()
    with pytest.raises(ValueError, match=r"'flash_attention_2'.*set_attn_implementation\('sdpa'\)"):
        patch(model, "ssmax")
    assert not any("attnorm" in name for module in model.modules() for name in vars(module))


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_the_first_tokens_into_a_cache_of_fixed_size_are_observed(kernel: str) -> None:
    model, ids = llama(attn_implementation=kernel), tokens()
    seen: list[AttentionCall] = []
    with swap(model, "ssmax"), observe(model, seen.append):
        quiet_logits(model, ids, past_key_values=StaticCache(model.config, max_cache_len=20), use_cache=True)
    assert len(seen) == 2
    rows = torch.ones(12, seen[0].key_BGKD.shape[2], dtype=torch.bool).tril()
    assert seen[0].causal or torch.equal(seen[0].mask.expand(2, 1, -1, -1)[0, 0], rows)


def test_an_exception_gives_the_model_back() -> None:
    model = llama()
    state = fingerprint(model)

    def fail() -> None:
        with swap(model, "ssmax"):
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail()
    assert fingerprint(model) == state


@pytest.mark.parametrize("normalizer", ["sofmax", {"0": "entmax15", "1": "sofmax"}])
def test_an_unknown_name_is_reported_before_an_earlier_patch(normalizer: str | dict[str, str]) -> None:
    model = llama()
    handle = patch(model, "ssmax")
    with pytest.raises(ValueError, match="'sofmax'"), swap(model, normalizer):
        pass
    assert {part.name for part in handle.normalizers.values()} == {"ssmax"}
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn.*'ssmax'"), swap(model, "entmax15"):
        pass


@pytest.mark.parametrize(
    ("normalizer", "options", "message"),
    [
        ("sofmax", {}, "did you mean"),
        ("ssmax", {"layers": [2]}, "layers=: .*from 0 to 1 .*got layer 2"),
        ("ssmax", {"layers": []}, "layers from 0 to 1 .*got none"),
        ("ssmax", {"layers": {0: [4]}}, r"heads from 0 to 3, got \[4\]"),
        ("ssmax", {"layers": {0: [1, 1]}}, "each head once"),
        ("ssmax", {"alpha": 3}, "accepts"),
        ("differential", {}, "another architecture"),
        ("differential_v2", {}, "another architecture"),
        ("tda", {}, "another architecture"),
        ("forget", {"width": 31}, "width=32.*self_attn.*width=31"),
        ("soft", {}, "no causal form"),
        ("linear", {"layers": {0: [1]}}, "Leave the heads out"),
        ("asentmax", {"width": 32}, "Leave width out"),
        ("ssmax", {"train_length": 1}, "at least 3"),
        ("ssmax", {"train_length": True}, "number of tokens, e.g. 1024, got True"),
        ("ssmax", {"train_length": "512"}, "number of tokens, e.g. 1024, got '512'"),
        ("ssmax", {"layers": "01"}, "indices of layers, e.g. .10, 11.*got '01'"),
        ("ssmax", {"layers": 1.5}, "indices of layers.*got 1.5"),
        ("ssmax", {"layers": True}, "indices of layers.*got True"),
        ("ssmax", {"layers": [False, True]}, "indices of layers.*False, True"),
        ("ssmax", {"layers": {0: [True, False]}}, "heads from 0 to 3, got .True, False"),
        ("ssmax", {"layers": 7}, "layers=: .*from 0 to 1 .*got layer 7"),
        ("ssmax", {"layers": {0: 4}}, "heads from 0 to 3, got 4"),
        ("ssmax", {"layers": {0: 0.5}}, "heads from 0 to 3, got 0.5"),
        ("ssmax", {"heads": 2}, "heads=4 .*heads=2.*layers="),
        ("ssmax", {"heads": [0, 1]}, r"heads=\[0, 1\].*layers="),
        ("entmax15", {"heads": [0, 1]}, "layers="),
        (attnorm.get("ssmax", heads=2), {}, "'ssmax'.*model.layers.0.self_attn.*4 heads"),
        (attnorm.get("sink", heads=2), {"layers": {0: [1]}}, "'sink'.*4 heads"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_changes(
    normalizer: str | attnorm.Normalizer, options: dict[str, Any], message: str
) -> None:
    model = llama()
    state = fingerprint(model)
    with pytest.raises((ValueError, TypeError), match=message):
        patch(model, normalizer, **options)
    assert fingerprint(model) == state


@pytest.mark.parametrize(("family", "feature"), [("gemma2", "softcap"), ("t5", "position bias")])
def test_a_mechanism_is_refused_before_anything_changes_where_logits_are_capped_or_biased(
    family: str, feature: str
) -> None:
    model = tiny(family)
    state = fingerprint(model)
    with pytest.raises(ValueError, match=f"'linear'.*{feature}"):
        patch(model, "linear")
    assert fingerprint(model) == state
    if family == "t5":  # cross-attention has no position bias
        crossing = attention_sites(model.decoder.block[0].layer[1])
        with swap(model.decoder.block[0].layer[1], "linear") as handle:
            assert len(handle.normalizers) == len(crossing) == 1


def test_an_encoder_takes_mechanisms_without_a_causal_form_and_none_that_is_causal_only() -> None:
    model = tiny("bert")
    with pytest.raises(ValueError, match=r"'forget'.*only a causal form.*attention"):
        patch(model, "forget")
    with swap(model, "soft") as handle:
        assert {normalizer.name for normalizer in handle.normalizers.values()} == {"soft"}


def test_options_are_written_behind_the_name_or_passed() -> None:
    models = [llama() for _ in range(3)]
    patch(models[0], "entmax:alpha=1.3")
    patch(models[1], "entmax", alpha=1.3)
    assert fingerprint(models[0]) == fingerprint(models[1])
    with pytest.raises(ValueError, match=r"'entmax:alpha=1.3' and as alpha="):
        patch(models[2], "entmax:alpha=1.3", alpha=1.5)


def patched_normalizers(model: PreTrainedModel) -> list[Any]:
    return [normalizer_of(module) for module in patched_modules(model).values()]


def test_an_option_may_be_named_as_the_argument_normalizer() -> None:
    models = [llama() for _ in range(3)]
    patch(models[0], "laser:normalizer=entmax15", layers=[1])
    patch(models[1], "laser", normalizer="entmax15", layers=[1])
    assert fingerprint(models[0]) == fingerprint(models[1])
    assert [part.normalizer.name for part in patched_normalizers(models[1])] == ["entmax15"]
    with swap(models[2], "forget", normalizer="kneemax+knee=0.1"):
        assert {part.normalizer.name for part in patched_normalizers(models[2])} == {"kneemax"}
        joined = fingerprint(models[2])
    with swap(models[2], "forget", normalizer="kneemax:knee=0.1"):
        assert fingerprint(models[2]) == joined
    with pytest.raises(TypeError, match=r"patch\(model, attnorm.get\('laser', normalizer=...\)\)"):
        patch(models[2], "laser", normalizer=attnorm.get("entmax15"))
    with pytest.raises(TypeError, match=r"'ssmax'.*'normalizer'.*accepts"):
        patch(models[2], "ssmax", normalizer="entmax15")
    for chosen in (attnorm.get("laser"), {0: "laser"}):
        with pytest.raises(TypeError, match=r"normalizer= together with a name.*(Laser|dict)"):
            patch(models[2], chosen, normalizer="entmax15")
    patch(model=models[2], normalizer=attnorm.get("laser", normalizer=attnorm.get("entmax15")))


def test_a_model_with_attention_of_its_own_is_refused() -> None:
    model = BloomForCausalLM(BloomConfig(vocab_size=61, hidden_size=32, n_layer=1, n_head=4))
    with pytest.raises(UnsupportedModel, match=r"Bloom.*by hand, docs/how-to/replace-sdpa\.md"):
        patch(model, "ssmax")


def test_a_model_without_weights_is_refused() -> None:
    model = llama().to("meta")
    state = fingerprint(model)
    with pytest.raises(ValueError, match="meta device"):
        patch(model, "ssmax")
    assert fingerprint(model) == state


@pytest.mark.parametrize("normalizer", ["ssmax", "entmax15", "linear"])
def test_a_patched_model_computes_shapes_on_the_meta_device(normalizer: str) -> None:
    model = llama()
    patch(model, normalizer)
    ids = tokens().to("meta")
    logits = model.to("meta")(ids).logits
    logits.sum().backward()
    assert (logits.shape, logits.device.type) == ((*ids.shape, model.config.vocab_size), "meta")
    assert all(p.grad is not None for p in model.parameters())


def test_a_model_whose_weights_are_offloaded_is_patched_where_it_computes() -> None:
    accelerate = pytest.importorskip("accelerate")
    model, ids = llama(), tokens()
    plain = quiet_logits(model, ids)
    attention = llama().model.layers[0].self_attn
    attention.q_proj._hf_hook = SimpleNamespace(
        execution_device="cuda:1"
    )  # accelerate has none on the attention itself
    assert device_of(attention) == torch.device("cuda:1")
    accelerate.cpu_offload(model, execution_device="cpu")
    with swap(model, "ssmax", bias=True):  # starts at softmax
        assert_close(quiet_logits(model, ids), plain)


def test_a_copy_of_a_patched_model_is_patched_on_its_own() -> None:
    model, ids = llama(), tokens()
    plain = quiet_logits(model, ids)
    patch(model, "entmax15")
    patched = quiet_logits(model, ids)
    twin = copy.deepcopy(model)
    unpatch(model)
    assert torch.equal(quiet_logits(model, ids), plain)
    assert torch.equal(quiet_logits(twin, ids), patched)
    unpatch(twin)
    assert torch.equal(quiet_logits(twin, ids), plain)


def test_a_pickled_model_runs_in_a_process_that_patched_none(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = llama(), tokens()
    patch(model, "entmax15")
    patched, pickled = quiet_logits(model, ids), pickle.dumps(model)
    for known in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
        monkeypatch.delitem(known._global_mapping, KERNEL)
    unpickled = pickle.loads(pickled)
    assert torch.equal(quiet_logits(unpickled, ids), patched)
    assert list(unpickled.state_dict()) == list(model.state_dict()), "what is saved there would lose its normalizers"


def test_a_model_that_shares_the_config_of_a_patched_one_is_left_alone() -> None:
    model, ids = llama(), tokens()
    plain = quiet_logits(model, ids)
    handle = patch(model, "entmax15")
    sibling = type(model)(model.config).eval()
    sibling.load_state_dict(model.state_dict(), strict=False)
    assert torch.equal(quiet_logits(sibling, ids), plain)
    patch(sibling, "ssmax")
    handle.remove()
    assert torch.equal(quiet_logits(model, ids), plain)
    assert (quiet_logits(sibling, ids) - plain).abs().max() > 1e-3


def test_one_layer_and_one_head_need_no_list() -> None:
    model = llama()
    with swap(model, "ssmax", layers=1) as handle:
        assert [*handle.normalizers] == ["model.layers.1.self_attn"]
        assert repr(handle) == "Patch(ssmax in 1 attention module)"
    with swap(model, "ssmax", layers={0: 2}) as handle:
        assert handle.normalizers["model.layers.0.self_attn"].map.heads == (2,)


def test_numbers_out_of_a_table_are_numbers() -> None:
    model, one = llama(), np.array([1])
    for layers in (one, torch.tensor([1]), {one[0]: one}, {1: torch.tensor([1])}, {1: list(one)}):
        with swap(model, "ssmax", layers=layers) as handle:
            assert [*handle.normalizers] == ["model.layers.1.self_attn"]
            assert not isinstance(layers, dict) or handle.normalizers["model.layers.1.self_attn"].map.heads == (1,)
    with swap(model, "log_scaled", train_length=np.int64(128)):
        recipe = recipe_of(model.model.layers[0].self_attn)
        assert type(recipe.options["train_length"]) is int, "or it could not be saved"
    for name, option, value in [
        ("topk", "k", np.int64(3)), ("entmax", "alpha", np.float32(1.5)), ("entmax", "alpha", torch.tensor(1.5)),
        ("entmax", "learned", np.True_),
    ]:  # fmt: skip
        with swap(model, name, **{option: value}):
            kept = recipe_of(model.model.layers[0].self_attn).options[option]
            assert (kept, type(kept)) == (value.item(), type(value.item()))


def test_order_means_nothing_in_cross_attention() -> None:
    model = tiny("t5")
    with swap(model, "stick_breaking") as handle:
        assert handle.normalizers
        assert not any("EncDec" in path for path in handle.normalizers)
    with swap(model, "entmax15") as handle:
        assert any("EncDec" in path for path in handle.normalizers)


def test_order_means_nothing_where_a_layer_attends_to_both_sequences_at_once() -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    merged = T5Gemma2MergedAttention(T5Gemma2DecoderConfig(**sizes), layer_idx=0)
    with pytest.raises(ValueError, match="cross-attention"):
        patch(merged, "stick_breaking")
    with swap(merged, "entmax15") as handle:
        assert handle.normalizers


def test_only_a_part_of_a_model_can_be_patched() -> None:
    model, ids = tiny("t5"), tokens()
    before = quiet_logits(model, ids)
    with swap(model.get_encoder(), "entmax15") as handle:
        assert len(handle.normalizers) == 2
        assert (quiet_logits(model, ids) - before).abs().max() > 1e-3
    assert torch.equal(quiet_logits(model, ids), before)


def test_the_weights_are_shown_on_request() -> None:
    model, ids = llama(), tokens()
    with swap(model, "entmax15"), torch.no_grad():
        weights = model(ids, output_attentions=True).attentions
    assert len(weights) == 2
    assert weights[0].shape == (2, 4, 12, 12)
    assert_close(weights[0].sum(-1), torch.ones(2, 4, 12))
    assert (weights[0].triu(1) == 0).all()
    assert (weights[0].tril() == 0).any(), "entmax sets some visible keys to zero"


def test_keys_that_the_model_chooses_are_the_only_ones_that_are_seen() -> None:
    """It hides the others in the masks of its own kernels alone, and hands any other kernel the choice itself."""
    model, calls = tiny("glm_moe_dsa"), []
    for normalizer in ("softmax", "entmax15"):
        with swap(model, normalizer), observe(model, calls.append):
            quiet_logits(model, tokens())
    assert all((visible(call).sum(-1) == torch.arange(1, 13).clamp(max=4)).all() for call in calls)
    assert len(calls) == 4


def test_blocks_of_keys_that_a_model_chooses_are_refused() -> None:
    model = llama()
    patch(model, "entmax15")
    module, q = model.model.layers[0].self_attn, torch.randn(1, 4, 6, 8)
    with pytest.raises(NotImplementedError, match=r"LlamaAttention .*layers="):
        patched_attention(module, q, q, q, None, block_indices=torch.zeros(1, 2, 6, 1, dtype=torch.long))


def test_heads_are_counted_where_no_module_says_how_many() -> None:
    config = LwDetrConfig(d_model=32, decoder_self_attention_heads=4)
    assert head_count(LwDetrAttention(config, layer_idx=0)) == 4
    model = llama()
    model.model.layers[0].self_attn.config = PreTrainedConfig()
    del model.model.layers[0].self_attn.head_dim
    with pytest.raises(ValueError, match=r"LlamaAttention: .*number of heads.*layers="):
        patch(model, "ssmax")


def test_an_observer_sees_the_normalizer() -> None:
    model, names = llama(), []
    with swap(model, "ssmax", layers=[1]), observe(model, lambda call: names.append(call.normalizer)):
        quiet_logits(model, tokens())
    assert names[0] is None
    assert isinstance(names[1], attnorm.Normalizer)
    assert names[1].name == "ssmax"


def test_layers_of_a_hybrid_model_have_the_numbers_of_the_model() -> None:
    """Attention stands in layers 1 and 3, convolutions in 0 and 2: layer 1 is the first attention, not the second."""
    kinds = ["conv", "full_attention", "conv", "full_attention"]
    config = transformers.Lfm2Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, layer_types=kinds,
    )  # fmt: skip
    model = transformers.Lfm2ForCausalLM._from_config(config, attn_implementation="sdpa")
    attnorm.patch(model, "entmax15", layers=[1])
    patched = [path for path, module in model.named_modules() if NORMALIZER in dict(module.named_children())]
    assert patched == ["model.layers.1.self_attn"]
    with pytest.raises(ValueError, match="1 to 3"):
        attnorm.patch(model, "entmax15", layers=[0])


def test_methods_that_a_normalizer_overrides_are_not_lost_beside_the_sinks_of_a_model() -> None:
    class Halved(Normalizer):
        def weights(self, block: Block) -> Tensor:
            return super().weights(block) / 2

    model = FAMILIES["gpt_oss"]().eval()
    with swap(model, Halved(Softmax())), pytest.raises(ValueError, match="Halved"):
        model(tokens())


# ssmax is near softmax at one length only, so it is not called safe; at the length of this prompt it holds.
OPTIONS: dict[str, dict[str, Any]] = {"ssmax": {"train_length": 256}}

# Long enough that top-k has keys to leave out.
QUESTION = """\
I am preparing a lesson about the countries of Europe for a class of ten-year-olds. For every country I want to show a
map, a photograph of the landscape, a flag, and a short text about the largest rivers, the mountains, the climate, the
food that people like to eat, and the most famous buildings. We begin in the west. Last week the children learned about
Spain, whose capital is Madrid, and about Portugal, whose capital is Lisbon. Today it is the turn of France. Please help
me with the first line of the text. What is the capital of France?"""
SAFE = [name for name, entry in BUILT_IN.items() if warm_start_of(entry.factory()).safe and name != "softmax"]


@torch.no_grad()
def test_the_bundled_model_loses_a_tenth_of_a_nat_at_most() -> None:
    """The model is trained, so a normalizer that is far from softmax costs it more: entmax15 2.5 nats."""
    bundled = load("bundled", device="cpu")
    tokens = bundled.tokenizer(passage(), return_tensors="pt").input_ids[:, :128]
    losses = {}
    for name in ("softmax", *OPTIONS, *SAFE, "entmax15"):
        with swap(bundled.model, name, **OPTIONS.get(name, {})):
            losses[name] = bundled.model(input_ids=tokens, labels=tokens).loss.item()
    assert losses.pop("entmax15") > losses["softmax"] + 0.5
    assert max(losses.values()) < losses["softmax"] + 0.1


@pytest.fixture(scope="module")
def smol(smollm2: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(smollm2)


def answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str) -> str:
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        tokens = model.generate(**prompt, max_new_tokens=8, do_sample=False)
    return str(tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))


@pytest.mark.nightly  # 2 s each, and half a minute where the model is not unpacked yet
@pytest.mark.real_model
@pytest.mark.parametrize("name", [*OPTIONS, *SAFE])
def test_it_still_knows_the_capital_of_france(name: str, smol: tuple[PreTrainedModel, PreTrainedTokenizerBase]) -> None:
    model, tokenizer = smol
    with swap(model, name, **OPTIONS.get(name, {})):
        text = answer(model, tokenizer, QUESTION)
    assert "Paris" in text


@pytest.mark.parametrize("family", FAMILIES)
def test_a_paused_model_is_the_model_before_and_comes_back(family: str) -> None:
    model, ids = tiny(family), tokens()
    plain = quiet_logits(model, ids)
    handle = patch(model, "ssmax", s=0.7)
    patched, learned, keys = quiet_logits(model, ids), [*handle.parameters()], [*model.state_dict()]
    with handle.paused():
        assert torch.equal(quiet_logits(model, ids), plain)
        assert all(now is before for now, before in zip(handle.parameters(), learned, strict=True))
        assert [*model.state_dict()] == keys
    assert (patched - plain).abs().max() > 1e-3
    assert torch.equal(quiet_logits(model, ids), patched)


def test_an_optimizer_goes_on_after_a_pause_and_a_saved_model_has_its_normalizer(tmp_path: Path) -> None:
    model, ids = llama(), tokens()
    handle = patch(model, "ssmax")
    optimizer = torch.optim.SGD(handle.parameters(), lr=0.1)
    with handle.paused():
        model(ids).logits.square().mean().backward()
        assert all(parameter.grad is None for parameter in handle.parameters())
        attnorm.save_pretrained(model, tmp_path)
    assert torch.equal(quiet_logits(attnorm.from_pretrained(tmp_path).eval(), ids), quiet_logits(model, ids))
    before = [parameter.detach().clone() for parameter in handle.parameters()]
    model(ids).logits.square().mean().backward()
    optimizer.step()
    assert all((now != then).all() for now, then in zip(handle.parameters(), before, strict=True))


def test_who_looks_at_a_paused_model_sees_softmax() -> None:
    model, ids = llama(), tokens()
    handle = patch(model, "entmax15", layers=[0])
    seen: list[AttentionCall] = []
    with handle.paused():
        with observe(model, seen.append):
            quiet_logits(model, ids)
        paused = attnorm.analyze(model, ids[:1], metrics="core")
    running = attnorm.analyze(model, ids[:1], metrics="core")
    assert [call.normalizer for call in seen] == [None, None]
    assert paused.manifest["model"]["runs"] == "softmax"
    assert running.manifest["model"]["runs"] is None  # its layers differ
    assert paused.manifest["model"]["fingerprint"] != running.manifest["model"]["fingerprint"]


def test_an_exception_ends_the_pause() -> None:
    model, ids = llama(), tokens()
    handle = patch(model, "entmax15")
    patched = quiet_logits(model, ids)

    def fail() -> None:
        with handle.paused():
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail()
    assert torch.equal(quiet_logits(model, ids), patched)


def test_a_pause_within_a_pause_is_refused_and_one_of_other_layers_is_not() -> None:
    model, ids = llama(), tokens()
    plain = quiet_logits(model, ids)
    first, second = patch(model, "ssmax", layers=[0]), patch(model, "entmax15", layers=[1])
    both = quiet_logits(model, ids)
    with first.paused():
        with pytest.raises(RuntimeError, match="paused already"), first.paused():
            pass
        with second.paused():
            assert torch.equal(quiet_logits(model, ids), plain)
        with pytest.raises(ValueError, match="'ssmax'"), swap(model, "softmax", layers=[0]):
            pass
    assert torch.equal(quiet_logits(model, ids), both)


def test_what_was_removed_cannot_be_paused_and_stays_removed_after_a_pause() -> None:
    model, ids = llama(), tokens()
    plain = quiet_logits(model, ids)
    handle = patch(model, "ssmax", layers=[0])
    other = patch(model, "entmax15", layers=[1])
    with handle.paused():
        handle.remove()
    with other.paused():
        unpatch(model)
        again = patch(model, "entmax15", layers=[1])
        patched = quiet_logits(model, ids)
    assert torch.equal(quiet_logits(model, ids), patched)
    again.remove()
    assert torch.equal(quiet_logits(model, ids), plain)
    with pytest.raises(RuntimeError, match="was removed"), handle.paused():
        pass


def test_a_kernel_chosen_in_the_pause_stays_chosen() -> None:
    model, ids = llama(), tokens()
    handle = patch(model, "entmax15")
    patched = quiet_logits(model, ids)
    with handle.paused():
        model.set_attn_implementation("eager")
    assert torch.allclose(quiet_logits(model, ids), patched, atol=1e-5)
    handle.remove()
    assert model.config._attn_implementation == "eager"
