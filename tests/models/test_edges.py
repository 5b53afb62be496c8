"""Values at a limit and just beyond it, fallbacks, and code for libraries that are not installed."""

import importlib
import json
import sys
from decimal import Decimal
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnorm.models import (
    inputs,
    private_names,
    smollm2,
    source,
    torch_calls,
    torch_functions,
)
from attnorm.models.inputs import Tokens
from attnorm.models.layer_normalizer import parse_layers, trained_length
from attnorm.models.recipe import Recipe, RecipeError, read_recipe


@pytest.mark.parametrize(("given", "length"), [(2, 1024), (3, 3), (None, 1024), ("many", 1024)])
def test_a_length_of_two_or_less_is_no_trained_length(given: Any, length: int) -> None:
    assert trained_length(SimpleNamespace(max_position_embeddings=given)) == length


def test_only_texts_and_whole_numbers_name_layers() -> None:
    assert parse_layers(3) == parse_layers("3") == (3,)
    for key in (True, None, Decimal(3), (3,)):
        with pytest.raises(ValueError, match="expected layers such as"):
            parse_layers(key)


def no_score(score: Tensor, *_: Tensor) -> Tensor:
    return score


@pytest.mark.parametrize(("queries", "keys", "kind"), [(4, 4, "encoder"), (3, 4, "cross")])
def test_a_flex_call_without_a_mask_reads_its_own_sequence_where_the_lengths_are_equal(
    queries: int, keys: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_functions, "is_identity_score_mod", lambda _: True)
    query, key = torch.zeros(2, 4, queries, 8), torch.zeros(1, 2, keys, 8)
    call = torch_functions.read_flex_attention(query, key, key, no_score, (torch_functions.noop_mask,), 0.5)
    assert (call.kind, call.layer, call.scale, call.causal, call.mask) == (kind, 0, 0.5, False, None)
    assert call.key_BGKD.shape == call.value_BGKE.shape == (2, 2, keys, 8)


def test_the_command_that_fetches_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(folder: str, gguf: Path | None) -> Path:
        raise smollm2.CannotFetch(f"no network for {folder} and {gguf}")

    monkeypatch.setattr(sys, "argv", ["smollm2", "here", "--gguf", "a.gguf"])
    monkeypatch.setattr(smollm2, "fetch", fails)
    with pytest.raises(SystemExit) as ended:
        smollm2.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == "error: no network for here and a.gguf\n"
    monkeypatch.setattr(smollm2, "fetch", lambda *_: tmp_path)
    smollm2.main()
    assert capsys.readouterr().out == f"{tmp_path}\n"
    monkeypatch.setattr(sys, "argv", ["smollm2", "--help"])
    with pytest.raises(SystemExit):
        smollm2.main()
    assert (smollm2.__doc__ or "").splitlines()[0][:40] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("problem", "said"), [("it needs sentencepiece", "it needs sentencepiece"), (None, "none was")]
)
def test_why_there_is_no_tokenizer(problem: str | None, said: str) -> None:
    loaded: Any = SimpleNamespace(name="a/model", model=None, tokenizer=None, tokenizer_problem=problem)
    with pytest.raises(ValueError, match=rf"a/model: expected a tokenizer, got none \({said}"):
        inputs.needs_tokenizer(loaded)


@pytest.mark.parametrize(
    ("own", "general", "token"),
    [
        ({"decoder_start_token_id": 5, "bos_token_id": 6}, {"decoder_start_token_id": 7}, 5),
        ({"pad_token_id": 3}, {"decoder_start_token_id": 7}, 3),
        ({}, {"bos_token_id": 8, "pad_token_id": 9}, 8),
        ({"bos_token_id": None}, {}, 0),
    ],
)
def test_the_token_with_which_a_decoder_starts(own: dict[str, Any], general: dict[str, Any], token: int) -> None:
    model: Any = SimpleNamespace(generation_config=SimpleNamespace(**own), config=SimpleNamespace(**general))
    assert inputs._start_token(model) == token


def test_names_that_a_config_lacks() -> None:
    assert private_names.kernel_name(SimpleNamespace(_attn_implementation=None)) == "eager"
    assert private_names.kernel_name(SimpleNamespace(_attn_implementation="sdpa")) == "sdpa"
    assert private_names.loaded_from(SimpleNamespace(_name_or_path=None)) == ""
    assert private_names.loaded_from(SimpleNamespace()) == ""
    assert private_names.loaded_from(SimpleNamespace(_name_or_path="a/b")) == "a/b"


def test_adapters_are_marked_where_peft_saves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for PEFT, which need not be installed."""
    utils = ModuleType("peft.utils")
    monkeypatch.setattr(utils, "AuxiliaryTrainingWrapper", type("Wrapper", (nn.Module,), {}), raising=False)
    monkeypatch.setitem(sys.modules, "peft", ModuleType("peft"))
    monkeypatch.setitem(sys.modules, "peft.utils", utils)
    monkeypatch.delitem(sys.modules, "attnorm.models.peft_adapters", raising=False)
    try:
        adapters = importlib.import_module("attnorm.models.peft_adapters")
    finally:
        sys.modules.pop("attnorm.models.peft_adapters", None)

    class Config:
        def to_dict(self) -> dict[str, Any]:
            return {"r": 8}

    model, config, normalizer = nn.Identity(), Config(), nn.Linear(1, 1)
    model.peft_config = {"default": config}
    saved = adapters.AdapterRecipe(Recipe("sigmoid"), (), normalizer, model)
    state = {"json": torch.zeros(3, dtype=torch.uint8)}
    found = saved.adapter_state_dict("default", state)
    assert found["json"] is state["json"]
    assert {name for name in found if name != "json"} == {"values.weight", "values.bias"}
    assert torch.equal(found["values.weight"], normalizer.weight)
    assert config.to_dict() == {"r": 8, adapters.MARK: "recipe and values are in the adapter weights"}
    assert config.to_dict() == {"r": 8}  # once
    assert saved.adapter_state_dict("another", state).keys() == found.keys()
    assert config.to_dict() == {"r": 8}
    saved.model = None  # as after pickling
    assert saved.adapter_state_dict("default", state).keys() == found.keys()
    assert saved.__getstate__()["model"] is None


def written(**changed: Any) -> Tensor:
    content = {"format": 2, "path": "a.b", "normalizer": "sigmoid", "options": {}, "heads": None, **changed}
    return torch.tensor([*json.dumps(content).encode()], dtype=torch.uint8)


def test_a_saved_path_is_printable_and_has_at_most_1024_characters() -> None:
    path, found = read_recipe(written(path="m" * 1024))
    assert (path, found) == ("m" * 1024, Recipe("sigmoid", {}, None))
    for wrong in ("m" * 1025, "a\nb", 3, None):
        with pytest.raises(RecipeError, match="the path of an attention module"):
            read_recipe(written(path=wrong))
    for bytes_ in (written()[None], written().long()):
        with pytest.raises(RecipeError, match="bytes of JSON"):
            read_recipe(bytes_)


def test_what_has_the_shape_of_the_ids_is_cut_with_them() -> None:
    given = {
        "input_ids": torch.arange(12).reshape(2, 6),
        "attention_mask": torch.ones(2, 6),
        "labels": torch.arange(2)[:, None],
        "prefix": torch.zeros(2, 9),
        "states": torch.zeros(2, 6, 3),
        "numbers": torch.zeros(2),
    }
    found = inputs._cut_inputs(inputs.Text("t", given), given, 4)
    shapes = {name: tuple(value.shape) for name, value in found.items()}
    assert shapes == {
        "input_ids": (2, 4), "attention_mask": (2, 4), "labels": (2, 1), "prefix": (2, 9), "states": (2, 6, 3),
        "numbers": (2,),
    }  # fmt: skip
    assert found["input_ids"].tolist() == [[0, 1, 2, 3], [6, 7, 8, 9]]


@pytest.mark.parametrize(("ends", "fit"), [((5, 10, 15), True), ((5, 9, 15), False), ((4, 10, 15), False)])
def test_every_piece_must_hold_a_window(ends: tuple[int, ...], fit: bool) -> None:
    assert (Tokens(torch.arange(15)[None], piece_ends=ends).starts(2, 5) is not None) is fit


def test_a_name_is_similar_if_three_quarters_of_its_letters_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the six letters in common, over the seven and nine (ten) of both."""
    monkeypatch.setattr(source, "cached", list)
    assert source.did_you_mean("bundlexyz") == "did you mean 'bundled'? "
    assert source.did_you_mean("bundlewxyz") == ""


@pytest.mark.parametrize(
    ("args", "kwargs", "comparable"),
    [
        ((0, 0, 0, None), {}, True),
        ((0, 0, 0, None, 0.1), {}, False),
        ((0, 0, 0, None, 0.0), {}, True),
        ((0, 0, 0), {"dropout_p": 0.1}, False),
        ((0, 0, 0), {"dropout_p": 0.0}, True),
    ],
)
def test_an_output_with_dropout_is_not_compared(
    args: tuple[Any, ...], kwargs: dict[str, Any], comparable: bool
) -> None:
    plain: Any = SimpleNamespace(read=torch_calls.read_scaled_dot_product_attention)
    assert torch_calls._comparable(plain, torch.zeros(1), args, kwargs) is comparable
    assert not torch_calls._comparable(plain, (torch.zeros(1),), args, kwargs)
    assert not torch_calls._comparable(SimpleNamespace(read=None), torch.zeros(1), args, kwargs)  # type: ignore[arg-type]
