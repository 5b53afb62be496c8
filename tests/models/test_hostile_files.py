"""A model folder from elsewhere: hostile recipes end in a ValueError; nothing else is opened or allocated."""

import builtins
import io
import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import attnorm
from attnorm.models import recipe as recipe_module
from attnorm.models.recipe import RecipeError, parse_json, read_recipe, validate_recipe
from tests.models.families import tiny

MODULE = "layers.0.self_attn"


def recipe(**changed: Any) -> dict[str, Any]:
    return {"format": 2, "path": MODULE, "normalizer": "entmax15", "options": {}, "heads": None, **changed}


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


HOSTILE: dict[str, Any] = {
    "10**12 heads": recipe(normalizer="ssmax", options={"heads": 10**12}),
    "heads that are true": recipe(normalizer="ssmax", options={"heads": True}),
    "a head number of 10**12": recipe(heads=[10**12]),
    "a negative head number": recipe(heads=[-1]),
    "many heads": recipe(heads=list(range(5000))),
    "heads that are a word": recipe(heads="all"),
    "3,000 coefficients": recipe(normalizer="adaptive_temperature", options={"coefficients": [0.1] * 3000}),
    "a deep option": recipe(options={"alpha": nested(50)}),
    "a number that overflows": recipe(options={"alpha": 10**400}),
    "NaN": recipe(options={"alpha": float("nan")}),
    "many options": recipe(options={f"option{i}": 1 for i in range(100)}),
    "options that are a list": recipe(options=[1]),
    "a long text": recipe(options={"alpha": "x" * 5000}),
    "an escape sequence in a name": recipe(normalizer="\x1b]0;title\x07"),
    "a normalizer that is a number": recipe(normalizer=7),
    "an object without a name": recipe(normalizer=None),
    "an earlier format": recipe(format=1),
    "a later format": recipe(format=3),
    "an escape sequence in a path": recipe(path="\x1b[31m"),
    "a path that is a list": recipe(path=[]),
    "no options": {"format": 2, "path": MODULE, "normalizer": "entmax15"},
    "a list": [],
}  # fmt: skip
IN_WEIGHTS = {name: json.dumps(content) for name, content in HOSTILE.items()} | {
    "deep nesting": '{"format": 2, "path": "", "options": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "an infinite number": json.dumps(recipe(options={"alpha": 12345})).replace("12345", "1e999"),
    "20 MB": '{"format": 2, "note": "' + "x" * 20_000_000 + '"}',
    "nothing": "",
    "a byte that is no text": "\x00",
}


def as_bytes(text: str | bytes) -> torch.Tensor:
    content = text if isinstance(text, bytes) else text.encode()
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy())


@pytest.mark.parametrize("name", IN_WEIGHTS)
def test_a_hostile_recipe_is_named_and_opens_and_allocates_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    content = as_bytes(IN_WEIGHTS[name])
    opened: list[str] = []
    for module in (builtins, io):
        monkeypatch.setattr(module, "open", lambda path, *_, **__: opened.append(str(path)))
    tracemalloc.start()
    try:
        with pytest.raises(RecipeError) as refused:
            read_recipe(content)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        monkeypatch.undo()
    assert opened == []
    assert peak < 50 * 2**20
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 1000


def test_only_bytes_are_a_recipe() -> None:
    for content in (torch.zeros(3), torch.zeros(2, 2, dtype=torch.uint8)):
        with pytest.raises(RecipeError, match="bytes"):
            read_recipe(content)


@pytest.mark.parametrize("name", ["10**12 heads", "deep nesting", "20 MB"])
def test_from_pretrained_rejects_such_weights(name: str, tmp_path: Path) -> None:
    model = tiny("llama")
    attnorm.patch(model, "entmax15")
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    key = next(key for key in weights if key.endswith("attnorm_recipe.json"))
    save_file({**weights, key: as_bytes(IN_WEIGHTS[name])}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
        attnorm.from_pretrained(tmp_path)


def test_a_header_that_claims_more_than_the_file_is_named(tmp_path: Path) -> None:
    model = tiny("llama")
    attnorm.patch(model, "entmax15")
    model.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes((2**60).to_bytes(8, "little") + weights.read_bytes()[8:])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        attnorm.from_pretrained(tmp_path)


def test_an_index_names_no_file_outside_the_folder(tmp_path: Path) -> None:
    model = tiny("llama")
    attnorm.patch(model, "entmax15")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    key = next(key for key in content["weight_map"] if key.endswith("attnorm_recipe.json"))
    content["weight_map"][key] = "../../etc/hostname"
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="etc/hostname"):
        attnorm.from_pretrained(tmp_path)


# The largest value that is accepted, and the smallest that is not.
LIMITS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "number": ({"options": {"alpha": 2**40}}, {"options": {"alpha": 2**40 + 1}}),
    "negative number": ({"options": {"alpha": -(2**40)}}, {"options": {"alpha": -(2**40) - 1}}),
    "text": ({"options": {"alpha": "x" * 1024}}, {"options": {"alpha": "x" * 1025}}),
    "name": ({"normalizer": "x" * 1024}, {"normalizer": "x" * 1025}),
    "short name": ({"normalizer": "x"}, {"normalizer": ""}),
    "key": ({"options": {"x" * 1024: 1}}, {"options": {"x" * 1025: 1}}),
    "items": ({"options": {"alpha": [1] * 256}}, {"options": {"alpha": [1] * 257}}),
    "entries": ({"options": {"a": {str(i): 1 for i in range(64)}}}, {"options": {"a": {str(i): 1 for i in range(65)}}}),
    "options": ({"options": {str(i): 1 for i in range(64)}}, {"options": {str(i): 1 for i in range(65)}}),
    "depth": ({"options": {"alpha": nested(4)}}, {"options": {"alpha": nested(5)}}),
    "count of heads": ({"options": {"heads": 4096}}, {"options": {"heads": 4097}}),
    "fewest heads": ({"options": {"heads": 1}}, {"options": {"heads": 0}}),
    "head index": ({"heads": [0, 4095]}, {"heads": [4096]}),
    "head indices": ({"heads": [0] * 4096}, {"heads": [0] * 4097}),
}


@pytest.mark.parametrize("limit", LIMITS)
def test_a_recipe_may_be_as_large_as_its_limits_and_no_larger(limit: str) -> None:
    accepted, rejected = ({"normalizer": "entmax15", "options": {}, "heads": None, **one} for one in LIMITS[limit])
    found = validate_recipe(MODULE, accepted)
    assert (found.name, found.options) == (accepted["normalizer"], accepted["options"])
    assert found.heads == (accepted["heads"] and tuple(accepted["heads"]))
    with pytest.raises(RecipeError):
        validate_recipe(MODULE, rejected)


def test_json_of_16_megabytes_is_read_and_no_longer() -> None:
    content = b'{"a": 1}'.ljust(16 * 2**20)
    assert parse_json(content, "recipe") == {"a": 1}
    with pytest.raises(RecipeError, match="16,777,216"):
        parse_json(content + b" ", "recipe")


TEXT = st.text(st.characters(exclude_categories=["Cs"]))  # as by default, which takes 3 s to find out in a new clone
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=20,
)


@st.composite
def damaged_recipes(draw: st.DrawFn) -> bytes:
    """A recipe with anything in the place of one entry, and sometimes with other bytes in the text."""
    content = recipe(normalizer="ssmax", options={"heads": 4}, heads=[0, 1])
    place: Any = content
    while True:
        key = draw(st.sampled_from([*place, draw(TEXT)]))
        if not isinstance(place.get(key), dict) or draw(st.booleans()):
            break
        place = place[key]
    place[key] = draw(VALUES)
    text = bytearray(json.dumps(content).encode())
    for _ in range(draw(st.integers(0, 2))):
        first = draw(st.integers(0, len(text)))
        text[first : first + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(text)


def is_read_or_refused(content: bytes) -> None:
    refused = ""
    try:
        path, found = read_recipe(as_bytes(content))
    except RecipeError as error:
        refused = str(error)
    else:
        assert path.isprintable()
        assert all(0 <= head < 4096 for head in found.heads or ())
    assert not refused or refused.isprintable()


@settings(max_examples=settings.default.max_examples // 2)
@given(damaged_recipes())
def test_a_damaged_recipe_is_read_within_the_limits_or_refused(content: bytes) -> None:
    is_read_or_refused(content)


@pytest.mark.nightly
@settings(max_examples=5000)
@given(damaged_recipes())
def test_many_damaged_recipes_are_read_within_the_limits_or_refused(content: bytes) -> None:
    is_read_or_refused(content)


@pytest.mark.parametrize(("size", "read"), [(8, True), (9, False)])
def test_a_recipe_in_the_weights_may_have_so_many_bytes(
    size: int, read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe_module, "MAX_BYTES", 8)
    key = f"layer.{recipe_module.RECIPE}.json"
    save_file({key: torch.zeros(size, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    if read:
        assert recipe_module._tensors_of(tmp_path / "model.safetensors", re.compile("json"))[key].numel() == size
    else:
        with pytest.raises(ValueError, match="8 bytes"):
            recipe_module._tensors_of(tmp_path / "model.safetensors", re.compile("json"))
