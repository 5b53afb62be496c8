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

from attnorm.models import inputs, smollm2
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
