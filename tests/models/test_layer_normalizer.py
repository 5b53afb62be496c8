"""What a layer gets: a normalizer on some of its heads, a recipe of several, the start that changes least."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from transformers import GPT2Config, LlamaConfig, T5Config

import attnorm
from attnorm.models.layer_normalizer import (
    ByHead,
    check_fit,
    compact,
    head_count,
    layer_groups,
    parse_layers,
    read_recipe_file,
    restrict_to_heads,
    specs_by_layer,
    trained_length,
    validate_heads,
    write_recipe_file,
)
from attnorm.models.patch import patch, swap
from attnorm.models.patch_state import patched_modules, recipe_of
from attnorm.models.saving import from_pretrained, save_pretrained
from attnorm.normalizers import Normalizer, get
from attnorm.normalizers.contract import Map
from attnorm.normalizers.declaration import LayerFacts
from attnorm.normalizers.registry import BUILT_IN
from tests.models.tiny import llama, quiet_logits, tiny, tokens


class Holder(nn.Module):
    def __init__(self, **attributes: object) -> None:
        super().__init__()
        self.config = nn.Module()
        for name, value in attributes.items():
            setattr(self, name, value)


def normalizer(name: str, **options: object) -> Normalizer:
    found = get(name, **options)
    assert isinstance(found, Normalizer)
    return found


@pytest.mark.parametrize("heads", [(0,), (2,), (1, 3), (3, 1), (0, 1, 2, 3)])
@pytest.mark.parametrize("shape", [None, (3, 5), (4, 3, 5), (2, 1, 1, 5), (2, 4, 3, 5)])
def test_chosen_heads_have_the_normalizer_and_the_others_softmax(
    heads: tuple[int, ...], shape: tuple[int, ...] | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(2, 4, 3, 5, generator=generator)
    mask = None if shape is None else torch.rand(shape, generator=generator) < 0.7
    found = Normalizer(ByHead(normalizer("sparsemax"), heads), name="x")(z, mask=mask)
    for head in range(4):
        own = "sparsemax" if head in heads else "softmax"
        torch.testing.assert_close(found[:, head], normalizer(own)(z, mask=mask)[:, head])


def test_a_mask_of_two_heads_is_taken_by_head() -> None:
    z, mask = torch.zeros(1, 2, 1, 3), torch.tensor([[[True, False, False]], [[False, True, True]]])
    found = Normalizer(ByHead(normalizer("sparsemax"), (1,)), name="x")(z, mask=mask)
    torch.testing.assert_close(found[0, :, 0], torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.5, 0.5]]))


def test_the_constant_is_the_larger_one_and_unknown_where_one_is() -> None:
    for n in (2, 5):
        bounds = normalizer("sigmoid").lipschitz(n), normalizer("sparsemax").lipschitz(n)
        assert bounds[0] != bounds[1]
        for one, other in (("sigmoid", "sparsemax"), ("sparsemax", "sigmoid")):
            assert ByHead(normalizer(one), (0,), normalizer(other)).lipschitz(n) == max(bounds)  # type: ignore[type-var]
    for one, other in (("stick_breaking", "softmax"), ("softmax", "stick_breaking")):
        assert ByHead(normalizer(one), (0,), normalizer(other)).lipschitz(3) is None
    assert "heads=(2, 0)" in repr(ByHead(normalizer("sigmoid"), (2, 0)))


def test_all_heads_take_the_normalizer_itself() -> None:
    one = normalizer("sigmoid")
    assert restrict_to_heads(one, None) is one
    assert isinstance(restrict_to_heads(one, (1,)).map, ByHead)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="'gaussian'"):
        restrict_to_heads(get("gaussian"), (1,))
    assert restrict_to_heads(get("gaussian"), None).name == "gaussian"


@pytest.mark.parametrize("name", ["num_heads", "num_attention_heads", "n_heads", "n_head"])
def test_the_number_of_heads_is_read_from_the_module_or_its_configuration(name: str) -> None:
    assert head_count(Holder(**{name: 3})) == 3
    module = Holder()
    setattr(module.config, name, 5)
    assert head_count(module) == 5
    found = head_count(Holder(q_proj=nn.Linear(8, 12), head_dim=4))
    assert found == 3
    assert isinstance(found, int)
    with pytest.raises(ValueError, match="Holder"):
        head_count(Holder(q_proj=nn.Linear(8, 12)))
    with pytest.raises(ValueError, match="Holder"):
        head_count(Holder(q_proj=nn.Identity(), head_dim=4))


@pytest.mark.parametrize("heads", [0, 3, [0, 3], (2,), range(4)])
def test_indices_of_heads(heads: object) -> None:
    expected = (heads,) if isinstance(heads, int) else tuple(heads)  # type: ignore[arg-type]
    assert validate_heads(heads, Holder(num_heads=4), "layer") == expected


def test_parameters_must_fit_the_heads() -> None:
    check_fit(normalizer("ssmax", heads=4), Holder(num_heads=4), "layer")
    check_fit(normalizer("ssmax"), Holder(num_heads=4), "layer")
    check_fit(get("gaussian"), Holder(num_heads=4), "layer")
    with pytest.raises(ValueError, match="'ssmax' does not fit layer, which has 4 heads"):
        check_fit(normalizer("ssmax", heads=3), Holder(num_heads=4), "layer")
    assert isinstance(normalizer("softmax").map, Map)


def test_a_recipe_is_the_same_as_one_patch_per_group() -> None:
    ids = tokens()
    whole, parts = llama(num_hidden_layers=4), llama(num_hidden_layers=4)
    parts.load_state_dict(whole.state_dict())
    untouched = quiet_logits(whole, ids)
    handle = patch(whole, {"0": "softmax", "1-2": "entmax:alpha=1.3", 3: "ssmax"})
    patch(parts, "entmax", layers=[1, 2], alpha=1.3)
    patch(parts, "ssmax", layers=3)
    assert torch.equal(quiet_logits(whole, ids), quiet_logits(parts, ids))
    assert [path.split(".")[2] for path in handle.normalizers] == ["1", "2", "3"]
    handle.remove()
    assert torch.equal(quiet_logits(whole, ids), untouched)


def test_a_recipe_is_saved_and_loaded_with_the_model(tmp_path: Path) -> None:
    model, ids = llama(num_hidden_layers=3), tokens()
    patch(model, {"0-1": "ssmax", "2": "topk:k=4"})
    save_pretrained(model, tmp_path / "model")
    loaded = from_pretrained(tmp_path / "model")
    assert [recipe_of(module).name for module in patched_modules(loaded).values()] == ["ssmax", "ssmax", "topk"]
    assert torch.equal(quiet_logits(loaded, ids), quiet_logits(model, ids))


def test_a_recipe_file_says_the_same(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    recipe = {"0": "softmax", "1": "entmax15"}
    write_recipe_file(path, recipe, learning_rate=3e-3, note="found\nby a test")
    assert path.read_text().startswith("# found\n# by a test\n")
    assert read_recipe_file(path).layers == recipe
    assert read_recipe_file(path).learning_rate == 3e-3
    model, ids = llama(num_hidden_layers=2), tokens()
    with swap(model, recipe):
        expected = quiet_logits(model, ids)
    for given in (path, str(path)):
        with attnorm.swap(model, given):
            assert torch.equal(quiet_logits(model, ids), expected)


def test_a_recipe_of_softmax_alone_changes_nothing() -> None:
    model = llama(num_hidden_layers=2)
    handle = patch(model, {"0-1": "softmax"})
    assert not patched_modules(model)
    assert "softmax" in repr(handle)


@pytest.mark.parametrize(
    ("recipe", "named"),
    [
        ({}, "none"),
        ({"0-5": "ssmax"}, "layer 2"),
        ({"5": "softmax"}, "layer 5"),
        ({"0-1": "ssmax", "1": "entmax15"}, "layer 1"),
        ({"1-0": "ssmax"}, "'1-0'"),
        ({"first": "ssmax"}, "'first'"),
        ({True: "ssmax"}, "True"),
        ({"0,0": "ssmax"}, "'0,0'"),
        ({"0": "ssmaxx"}, "'ssmax'"),
        ({"0": "topk:k"}, "'k'"),
    ],
)
def test_a_wrong_recipe_is_refused_and_the_model_untouched(recipe: dict[Any, str], named: str) -> None:
    model = llama(num_hidden_layers=2)
    with pytest.raises(ValueError, match=named):
        patch(model, recipe)
    assert not patched_modules(model)


def test_a_recipe_is_given_alone() -> None:
    model = llama(num_hidden_layers=2)
    with pytest.raises(TypeError, match="layers="):
        patch(model, {"0": "ssmax"}, layers=[1])
    with pytest.raises(TypeError, match="alpha="):
        patch(model, {"0": "entmax"}, alpha=1.3)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "layers"), ("[layers]", r"got \{\}"), ("[layers", "TOML"), ('[layer]\n"0" = "ssmax"', "'layers'"),
        ('learning_rate = 0\n[layers]\n"0" = "ssmax"', "learning_rate"), ('[layers]\n"0" = 4', "4"),
        ('[layers]\n"0-2" = "ssmax"\n"1" = "softmax"', "layer 1"),
    ],
)  # fmt: skip
def test_a_wrong_recipe_file_is_refused(content: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(content)
    with pytest.raises(ValueError, match=named) as error:
        read_recipe_file(path)
    assert "recipe.toml" in str(error.value)


def test_a_missing_recipe_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gone\.toml"):
        patch(llama(num_hidden_layers=2), tmp_path / "gone.toml")


def test_equal_recipes_have_one_shortest_form() -> None:
    specs = specs_by_layer({"1,2": "ssmax", "4": "entmax15"}, 5)
    assert specs == ["softmax", "ssmax", "ssmax", "softmax", "entmax15"]
    assert compact(specs) == {"0": "softmax", "1-2": "ssmax", "3": "softmax", "4": "entmax15"}
    assert layer_groups(compact(specs))[(1, 2)] == "ssmax"


@pytest.mark.parametrize("count", [1, 5])
def test_a_layer_beyond_the_last_is_named_with_the_range(count: int) -> None:
    assert specs_by_layer({str(count - 1): "ssmax"}, count)[-1] == "ssmax"
    with pytest.raises(ValueError, match=rf"0 to {count - 1}, got {count} "):
        specs_by_layer({f"0-{count}": "ssmax"}, count)


@pytest.mark.parametrize(
    ("key", "layers"), [(4, (4,)), ("4", (4,)), ("0-3", (0, 1, 2, 3)), (" 0 - 1 ,6", (0, 1, 6)), ("9999", (9999,))]
)
def test_layers_are_numbers_and_ranges(key: Any, layers: tuple[int, ...]) -> None:
    assert parse_layers(key) == layers


def test_shortest_forms_of_recipes() -> None:
    assert compact(["a"]) == {"0": "a"}
    assert compact(["a", "a", "b"]) == {"0-1": "a", "2": "b"}
    assert compact(["b", "c", "c", "c", "d"]) == {"0": "b", "1-3": "c", "4": "d"}
    assert compact([]) == {}


STARTS = {name: entry.declaration.warm_start for name, entry in BUILT_IN.items()}
THE_SAME: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("softmax", "log_scaled", "composed", "tempered")},
    "ssmax": {"bias": True},
    "topk": {"k": 12},
    "local": {"window": 12},
    "kernel": {"function": "exp"},
}


def test_every_normalizer_but_those_of_another_architecture_declares_its_start() -> None:
    assert [name for name, start in STARTS.items() if start is None] == ["differential", "differential_v2", "tda"]


@pytest.mark.parametrize("name", THE_SAME)
def test_some_start_as_softmax_itself(name: str) -> None:
    model, ids = llama(), tokens()
    before = quiet_logits(model, ids)
    with swap(model, name, **THE_SAME[name]):
        assert_close(quiet_logits(model, ids), before, rtol=0, atol=1e-5)


def change(name: str, before: Tensor, ids: Tensor, **options: Any) -> float:
    model = llama()
    with swap(model, name, **options):
        return float((quiet_logits(model, ids) - before).abs().mean())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ssmax", {"train_length": 12}),
        ("sink", {}),
        ("scale_invariant", {}),
        ("forget", {}),
        ("asentmax", {}),
        ("entmax", {"learned": True}),
    ],
)
def test_a_warm_start_is_closer_to_the_trained_model_than_a_cold_one(name: str, options: dict[str, Any]) -> None:
    model, ids = llama(), tokens()
    before = quiet_logits(model, ids)
    warm, cold = (change(name, before, ids, warm_start=warm, **options) for warm in (True, False))
    assert warm < 0.8 * cold


@pytest.mark.parametrize(
    ("layer", "visible"),
    [
        (LayerFacts(4, 100), list(range(1, 101))),
        (LayerFacts(4, 100, window=7), [min(n, 7) for n in range(1, 101)]),
        (LayerFacts(4, 100, window=200), list(range(1, 101))),
        (LayerFacts(4, 100, causal=False), [100] * 100),
    ],
)
def test_mean_log_n_is_the_mean_over_the_rows_of_a_text(layer: LayerFacts, visible: list[int]) -> None:
    assert layer.mean_log_n() == pytest.approx(sum(map(math.log, visible)) / 100)


def test_ssmax_starts_from_the_length_of_the_layer() -> None:
    model = tiny("gemma3")
    with swap(model, "ssmax") as handle:
        sliding, full = (p.detach() for p in handle.parameters())
    assert_close(full, torch.full((4,), 1 / LayerFacts(4, 64).mean_log_n()))
    assert_close(sliding, torch.full((4,), 1 / LayerFacts(4, 64, window=5).mean_log_n()))


@pytest.mark.parametrize(
    ("config", "length"),
    [
        (LlamaConfig(max_position_embeddings=4096), 4096),
        (GPT2Config(n_positions=512), 512),
        (T5Config(), 1024),
        (
            LlamaConfig(
                max_position_embeddings=131072,
                rope_parameters={
                    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
                },
            ),
            8192,
        ),
    ],
)  # fmt: skip
def test_the_training_length_is_what_the_config_says(config: Any, length: int) -> None:
    assert trained_length(config) == length


def test_a_train_length_among_the_options_is_where_ssmax_starts() -> None:
    for bias, name in ((False, "s"), (True, "bias")):
        options = {"bias": True, "s": 0.6} if bias else {}
        with swap(llama(), {0: "ssmax:train_length=512" + ":bias=true:s=0.6" * bias}) as handle:
            (stated,) = (one.rules[0].state_dict()[name] for one in handle.normalizers.values())
        with swap(llama(), "ssmax", layers=0, train_length=512, **options) as handle:
            (given,) = (one.rules[0].state_dict()[name] for one in handle.normalizers.values())
        assert torch.equal(stated, given)


def test_given_options_win() -> None:
    model = llama()
    with swap(model, "ssmax", s=0.43) as handle:
        assert all((p == 0.43).all() for p in (q.detach().round(decimals=4) for q in handle.parameters()))
    with swap(model, "ssmax", heads=None) as handle:
        assert all(p.dim() == 0 for p in handle.parameters())


def test_a_sink_starts_from_the_models_own() -> None:
    model, ids = tiny("gpt_oss"), tokens()
    before = quiet_logits(model, ids)
    handle = patch(model, "sink")
    assert_close(quiet_logits(model, ids), before, rtol=0, atol=1e-5)
    own = model.model.layers[0].self_attn.sinks
    first = next(handle.parameters())
    assert torch.equal(first, own)
    assert first is not own


def test_the_models_own_sinks_are_kept_in_front_of_another_map() -> None:
    model, ids = tiny("gpt_oss"), tokens()
    with swap(model, "entmax15"):
        kept = quiet_logits(model, ids)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.sinks.fill_(-1e4)
        assert (quiet_logits(model, ids) - kept).abs().max() > 1e-3
