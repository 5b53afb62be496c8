"""A recipe gives every layer its normalizer, in Python and as a file, and is saved and loaded with the model."""

from pathlib import Path
from typing import Any

import pytest
import torch

import attnorm
from attnorm.models.layer_normalizer import (
    compact,
    layer_groups,
    parse_layers,
    read_recipe_file,
    specs_by_layer,
    write_recipe_file,
)
from attnorm.models.patch import patch, swap
from attnorm.models.patch_state import patched_modules, recipe_of
from attnorm.models.saving import from_pretrained, save_pretrained
from tests.models.tiny import llama, quiet_logits, tokens


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
        ("", "layers"),
        ("[layers]", r"got \{\}"),
        ("[layers", "TOML"),
        ('[layer]\n"0" = "ssmax"', "'layers'"),
        ('learning_rate = 0\n[layers]\n"0" = "ssmax"', "learning_rate"),
        ('[layers]\n"0" = 4', "4"),
        ('[layers]\n"0-2" = "ssmax"\n"1" = "softmax"', "layer 1"),
    ],
)
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
