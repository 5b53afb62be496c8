"""What a patched model is survives saving and loading; what cannot survive is said aloud."""

import copy
import io
import json
import logging
import random
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import parametrize
from torch.testing import assert_close
from transformers import AutoModel, LlamaForCausalLM, PreTrainedModel, Trainer, TrainingArguments

import attnorm
from attnorm.models.load import load
from attnorm.models.patch import patch, unpatch
from attnorm.models.patch_state import patched_modules
from attnorm.models.saving import END, NotSavableError, from_pretrained, model_card, save_pretrained
from attnorm.normalizers import registry
from tests.models.tiny import FAMILIES, llama, quiet_logits, tiny, tokens

CASES: dict[str, dict[str, Any]] = {
    "ssmax": {"bias": True},
    "sink": {},
    "asentmax": {},
    "entmax": {"learned": True, "alpha": 1.4},
    "softmax1": {},
    "topk": {"k": "sqrt"},
    "adaptive_temperature": {"coefficients": (0.5, 1.0), "monotone": True},
    "kernel": {"function": "elu+1"},
    "linear": {},
}


def trained(model: PreTrainedModel) -> PreTrainedModel:
    """With parameters that no start value has."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "attnorm_normalizer" in name:
                parameter.add_(torch.rand_like(parameter) * 0.2)
    return model


@pytest.mark.parametrize("name", CASES)
def test_a_saved_model_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    model, ids = llama(), tokens()
    patch(model, name, **CASES[name])
    expected = quiet_logits(trained(model), ids)
    save_pretrained(model, tmp_path)
    loaded = from_pretrained(tmp_path)
    assert type(loaded) is type(model)
    assert torch.equal(quiet_logits(loaded, ids), expected)
    assert list(loaded.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"llama"}))
def test_a_saved_model_of_any_family_comes_back_as_it_was(family: str, tmp_path: Path) -> None:
    model, ids = tiny(family), tokens()
    patch(model, "ssmax", layers=[1])
    expected = quiet_logits(trained(model), ids)
    save_pretrained(model, tmp_path)
    # The layer that was left out runs the model's kernel, which transformers does not save.
    again = from_pretrained(tmp_path, attn_implementation=model.config._attn_implementation)
    assert_close(quiet_logits(again, ids), expected)


def test_others_may_read_the_weights_if_they_may_read_the_config(tmp_path: Path) -> None:
    model = llama()
    patch(model, "ssmax")
    save_pretrained(model, tmp_path)
    modes = {path.stat().st_mode for path in (tmp_path / "config.json", tmp_path / "model.safetensors")}
    assert len(modes) == 1


def test_weights_are_saved_where_permissions_cannot_be_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "chmod", Mock(side_effect=PermissionError(1, "Operation not permitted")))
    model = llama()
    patch(model, "ssmax")
    save_pretrained(model, tmp_path)
    assert patched_modules(from_pretrained(tmp_path))


def test_both_ways_of_loading_name_the_same_loss(tmp_path: Path) -> None:
    """A Trainer divides by other numbers of tokens where it does not know the loss."""
    model = tiny("gpt2")
    patch(model, "ssmax")
    save_pretrained(model, tmp_path)
    assert from_pretrained(tmp_path).loss_type == load(tmp_path).model.loss_type == "ForCausalLM"


def test_some_heads_come_back_as_some_heads(tmp_path: Path) -> None:
    model, ids = llama(), tokens()
    patch(model, "ssmax", layers={0: [3, 1]})
    patch(model, "entmax15", layers=[1])
    expected = quiet_logits(trained(model), ids)
    save_pretrained(model, tmp_path)
    assert torch.equal(quiet_logits(from_pretrained(tmp_path), ids), expected)


def test_transformers_alone_reports_what_it_does_not_use(tmp_path: Path) -> None:
    """Also of a normalizer without parameters, whose weights say nothing."""
    transformers.logging.set_verbosity_warning()
    said = io.StringIO()
    handler = logging.StreamHandler(said)
    transformers.logging.add_handler(handler)
    model, ids = llama(), tokens()
    plain = quiet_logits(model, ids)
    patch(model, "entmax15")
    model.save_pretrained(tmp_path)
    assert torch.equal(quiet_logits(LlamaForCausalLM.from_pretrained(tmp_path), ids), plain)
    assert "attnorm_recipe" in said.getvalue()
    said.truncate(0)
    from_pretrained(tmp_path)
    assert "attnorm" not in said.getvalue()
    transformers.logging.remove_handler(handler)


@pytest.mark.parametrize("save", [save_pretrained, lambda model, folder: model.save_pretrained(folder)])
def test_the_config_names_the_normalizers(save: Callable[[Any, Path], None], tmp_path: Path) -> None:
    model = llama()
    patch(model, "topk", k=3, layers=[0])
    handle = patch(model, "ssmax", layers={1: [0, 2]})
    save(model, tmp_path)
    recipes = json.loads((tmp_path / "config.json").read_text())["attnorm"]["recipes"]
    assert [(one["normalizer"], one["heads"], one["modules"]) for one in recipes] == [
        ("topk", None, 1),
        ("ssmax", [0, 2], 1),
    ]
    assert recipes[0]["options"] == {"k": 3}
    handle.remove()
    assert [one["normalizer"] for one in model.config.attnorm["recipes"]] == ["topk"]
    unpatch(model)
    assert not hasattr(model.config, "attnorm")
    patch(model, "sink", layers=[0])
    handle = patch(model, "sink", layers=[1])
    assert [one["modules"] for one in model.config.attnorm["recipes"]] == [2]
    handle.remove()
    assert [one["modules"] for one in model.config.attnorm["recipes"]] == [1]


def test_a_config_without_its_weights_is_noticed(tmp_path: Path) -> None:
    """As transformers alone leaves it: it keeps the config's entry and drops the weights."""
    model = llama()
    patch(model, "entmax15")
    model.save_pretrained(tmp_path / "patched")
    LlamaForCausalLM.from_pretrained(tmp_path / "patched").save_pretrained(tmp_path / "again")
    with pytest.warns(UserWarning, match=r"again.*softmax") as warned:
        loaded = load(tmp_path / "again", device="cpu").model
    assert Path(warned[0].filename).name == "load.py"  # where the weights are read
    assert not patched_modules(loaded)
    assert not hasattr(loaded.config, "attnorm")
    with pytest.raises(FileNotFoundError, match="again"):
        from_pretrained(tmp_path / "again")


def test_a_loaded_model_can_be_saved_and_loaded_again(tmp_path: Path) -> None:
    model, ids = llama(), tokens()
    patch(model, "ssmax")
    save_pretrained(trained(model), tmp_path / "first")
    save_pretrained(from_pretrained(tmp_path / "first"), tmp_path / "second")
    assert torch.equal(quiet_logits(from_pretrained(tmp_path / "second"), ids), quiet_logits(model, ids))


def test_a_pickle_is_not_read_unless_it_is_asked_for(tmp_path: Path) -> None:
    model = llama()
    patch(model, "ssmax")
    save_pretrained(model, tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError):
        from_pretrained(tmp_path)
    assert patched_modules(from_pretrained(tmp_path, use_safetensors=False))


def test_a_class_that_expects_no_strange_weights_is_left_as_it_was(tmp_path: Path) -> None:
    class WithExtras(LlamaForCausalLM):
        _keys_to_ignore_on_load_unexpected = (r"model\.extra",)

    class WithoutExtras(WithExtras):
        _keys_to_ignore_on_load_unexpected = None  # as some families of transformers have it

    model = llama()
    patch(model, "ssmax")
    save_pretrained(model, tmp_path)
    from_pretrained(tmp_path, model_class=WithoutExtras)
    assert WithoutExtras._keys_to_ignore_on_load_unexpected is None


def test_it_loads_without_the_language_models_head(tmp_path: Path) -> None:
    model = llama()
    patch(model, "ssmax")
    save_pretrained(trained(model), tmp_path)
    base = from_pretrained(tmp_path, model_class=AutoModel)
    with torch.no_grad():
        assert_close(base(tokens()).last_hidden_state, model.model(tokens()).last_hidden_state)


def test_weights_in_half_precision_leave_the_normalizer_in_full(tmp_path: Path) -> None:
    model = llama()
    patch(model, "ssmax")
    save_pretrained(trained(model), tmp_path)
    loaded = from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert loaded.dtype == torch.bfloat16
    held, kept = (
        [p for module in patched_modules(m).values() for p in module.attnorm_normalizer.parameters()]
        for m in (loaded, model)
    )
    assert all(torch.equal(a, b) for a, b in zip(held, kept, strict=True))


def test_saving_the_ordinary_way_loses_nothing(tmp_path: Path) -> None:
    model, ids = llama(), tokens()
    patch(model, "ssmax")
    expected = quiet_logits(trained(model), ids)
    model.save_pretrained(tmp_path)
    assert torch.equal(quiet_logits(from_pretrained(tmp_path), ids), expected)


PARTS: dict[str, Callable[[PreTrainedModel], nn.Module]] = {
    "base": lambda model: model.model,
    "layer": lambda model: model.model.layers[0],
    "attention": lambda model: model.model.layers[1].self_attn,
    "compiled": lambda model: torch.compile(model),
    "wrapped": lambda model: nn.ModuleDict({"inside": model}),
}


@pytest.mark.parametrize("part", PARTS)
def test_saving_a_model_of_which_a_part_is_patched_loses_nothing(part: str, tmp_path: Path) -> None:
    model, ids = llama(), tokens()
    patch(PARTS[part](model), "ssmax")
    expected = quiet_logits(trained(model), ids)
    model.save_pretrained(tmp_path)
    assert torch.equal(quiet_logits(from_pretrained(tmp_path), ids), expected)


def test_saving_a_model_whose_encoder_is_patched_loses_nothing(tmp_path: Path) -> None:
    model, ids = tiny("t5"), tokens()
    patch(model.get_encoder(), "ssmax")
    expected = quiet_logits(trained(model), ids)
    copy.deepcopy(model).save_pretrained(tmp_path)
    assert_close(quiet_logits(from_pretrained(tmp_path), ids), expected)


def test_a_compiled_model_is_saved_as_the_model_inside(tmp_path: Path) -> None:
    model, ids = llama(), tokens()
    compiled = torch.compile(model)
    patch(compiled, "ssmax")
    expected = quiet_logits(trained(model), ids)
    save_pretrained(compiled, tmp_path / "ours")
    assert torch.equal(quiet_logits(from_pretrained(tmp_path / "ours"), ids), expected)
    compiled.save_pretrained(tmp_path / "plain")
    assert torch.equal(quiet_logits(from_pretrained(tmp_path / "plain"), ids), expected)


def test_what_is_no_transformers_model_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="Linear"):
        save_pretrained(nn.Linear(2, 2), tmp_path)


def test_a_folder_that_is_called_peft_is_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "peft").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "peft", raising=False)
    model = llama()
    patch(model, "ssmax")
    model.save_pretrained(tmp_path / "model")
    assert patched_modules(from_pretrained(tmp_path / "model"))


def test_what_is_no_path_is_told() -> None:
    for call in (lambda: save_pretrained(llama(), 3), lambda: from_pretrained(llama())):
        with pytest.raises(TypeError, match="path"):
            call()


def test_an_empty_name_is_not_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("", " "):
        with pytest.raises(ValueError, match="my-model"):
            save_pretrained(llama(), name)
    assert not list(tmp_path.iterdir())


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("mine")
    with pytest.raises(NotADirectoryError, match="model"):
        save_pretrained(llama(), tmp_path / "model")
    assert (tmp_path / "model").read_text() == "mine"


@pytest.mark.parametrize("given_back", [unpatch, lambda model: unpatch(model.model)])
def test_a_part_that_was_given_back_is_saved_without_a_word(
    given_back: Callable[[Any], None], tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    model = llama()
    patch(model.model, "ssmax")
    given_back(model)
    model.save_pretrained(tmp_path)
    model.model.save_pretrained(tmp_path / "base")
    assert not [w for w in recwarn if "attnorm" in str(w.message)]
    assert not list(tmp_path.rglob("attnorm*"))


def test_a_model_that_was_given_back_is_saved_without_a_word(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    model = llama()
    patch(model, "ssmax").remove()
    model.save_pretrained(tmp_path)
    assert not [w for w in recwarn if "attnorm" in str(w.message)]
    assert not list(tmp_path.glob("attnorm*"))


@pytest.mark.parametrize("save", [save_pretrained, lambda model, folder: model.save_pretrained(folder)])
def test_a_removed_normalizer_does_not_come_back(save: Callable[[Any, Path], None], tmp_path: Path) -> None:
    model = llama()
    handle = patch(model, "ssmax")
    save_pretrained(model, tmp_path)
    handle.remove()
    save(model, tmp_path)
    left = {path.name for path in tmp_path.iterdir()} - ({"README.md"} if save is not save_pretrained else set())
    assert left == {"config.json", "generation_config.json", "model.safetensors"}
    assert not patched_modules(load(tmp_path, device="cpu").model)


def test_a_folder_saved_in_pieces_comes_back(tmp_path: Path) -> None:
    model, ids = llama(), tokens()
    patch(model, "ssmax")
    save_pretrained(model, tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert torch.equal(quiet_logits(from_pretrained(tmp_path), ids), quiet_logits(model, ids))


def test_an_object_is_not_savable_by_name(tmp_path: Path) -> None:
    model = llama()
    patch(model, attnorm.compose("entmax15", scale="ssmax"))
    with pytest.raises(NotSavableError, match=r"layers\.0\.self_attn.*register"):
        save_pretrained(model, tmp_path)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn.*name"):
        from_pretrained(tmp_path)


def test_an_option_that_json_cannot_hold_is_named(tmp_path: Path) -> None:
    model = llama()
    patch(model, "kernel", function=torch.exp, derivative=torch.exp)
    with pytest.raises(NotSavableError, match=r"'kernel' in model.layers.0.self_attn.*JSON"):
        save_pretrained(model, tmp_path)


def test_a_parametrized_normalizer_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    model = llama()
    first, _ = patch(model, "ssmax").normalizers.values()
    parametrize.register_parametrization(first.scale[0], "s", nn.Softplus())
    with pytest.raises(NotSavableError, match=r"layers.0.self_attn.*remove_parametrizations"):
        save_pretrained(model, tmp_path)
    parametrize.remove_parametrizations(first.scale[0], "s")
    save_pretrained(model, tmp_path)
    assert torch.equal(quiet_logits(from_pretrained(tmp_path), tokens()), quiet_logits(model, tokens()))


def test_an_ordinary_folder_is_refused(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match=re.escape(str(tmp_path))):
        from_pretrained(tmp_path)


def test_a_path_that_is_no_folder_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = llama()
    patch(model, "ssmax")
    save_pretrained(model, tmp_path / "my-model")
    for missing in (tmp_path / "my-modle", Path("my-modle"), "./my-modle", "a/b/my-modle", "~/my-modle"):
        with pytest.raises(FileNotFoundError, match="my-modle"):
            from_pretrained(missing)
    with pytest.raises(FileNotFoundError, match="'my-model'"):
        from_pretrained("./my-modle")
    with pytest.raises(NotADirectoryError, match=r"config\.json"):
        from_pretrained(tmp_path / "my-model" / "config.json")


def test_loading_info_is_left_to_transformers(tmp_path: Path) -> None:
    model = llama()
    patch(model, "ssmax")
    save_pretrained(model, tmp_path)
    with pytest.raises(ValueError, match="output_loading_info"):
        from_pretrained(tmp_path, output_loading_info=True)


def test_a_misspelt_name_is_refused_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """At once: transformers would try to connect again and again, and wait longer each time."""
    asked: list[object] = []

    def refuse(*address: object, **_: object) -> None:
        asked.append(address)
        raise OSError("no network")

    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(socket, "create_connection", refuse)
    with pytest.raises(FileNotFoundError, match="my-modle"):
        from_pretrained("my-modle")
    assert len(asked) <= 2


def change_recipes(folder: Path, **changes: Any) -> None:
    weights = load_file(folder / "model.safetensors")
    for key in [key for key in weights if key.endswith("attnorm_recipe.json")]:
        content = json.dumps({**json.loads(weights[key].numpy().tobytes()), **changes})
        weights[key] = torch.frombuffer(bytearray(content.encode()), dtype=torch.uint8)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 1}, "format: expected 2.*got 1"),
        ({"normalizer": "os.system"}, "os.system"),
        ({"options": {"command": "true"}}, "accepts"),
        ({"options": {"heads": 3}}, "'ssmax' in layers.0.self_attn"),
        ({"options": [1]}, "damaged"),
        ({"path": "model.layers.7.self_attn"}, "LlamaForCausalLM"),
        ({"path": "model.layers.0.mlp"}, "LlamaForCausalLM"),
        ({"path": ""}, "LlamaForCausalLM"),
        ({"heads": 5}, "damaged"),
        ({"heads": [9]}, "0 to 3.*9"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    model = llama()
    patch(model, "ssmax")
    model.save_pretrained(tmp_path)
    change_recipes(tmp_path, **changes)
    with pytest.raises((ValueError, TypeError), match=message):
        from_pretrained(tmp_path)


def test_pushing_to_the_hub_uploads_the_normalizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is in the ordinary files, which transformers uploads."""
    uploaded: list[str] = []
    monkeypatch.setattr(
        PreTrainedModel, "_upload_modified_files", lambda self, folder, *_, **__: uploaded.append(folder)
    )
    made = type("Made", (), {"repo_id": "me/model"})
    api = type("Api", (), {"create_repo": lambda self, *_, **__: made})
    monkeypatch.setattr(transformers.modeling_utils, "hf_api", api, raising=False)
    monkeypatch.setattr(
        transformers.modeling_utils, "create_and_tag_model_card", lambda *_, **__: Mock(), raising=False
    )
    model, ids = llama(), tokens()
    patch(model, "ssmax")
    save_pretrained(trained(model), tmp_path / "model", push_to_hub=True)
    assert [Path(folder).name for folder in uploaded] == ["model"]
    assert torch.equal(quiet_logits(from_pretrained(uploaded[0]), ids), quiet_logits(model, ids))


def test_the_card_says_what_the_model_is_and_how_to_load_it(tmp_path: Path) -> None:
    model = llama()
    patch(model, "ssmax")
    save_pretrained(model, tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert card == model_card(model)
    assert "`ssmax` ([Nakanishi 2025](https://arxiv.org/abs/2501.19399)), in 2 attention modules" in card
    assert "attnorm.from_pretrained" in card
    half = card.partition(END)[0]
    for mine in ("mine", half):
        (tmp_path / "README.md").write_text(mine)
        save_pretrained(model, tmp_path)
        assert (tmp_path / "README.md").read_text() == mine


def test_the_card_does_not_speak_of_an_earlier_normalizer(tmp_path: Path) -> None:
    model, card = llama(), tmp_path / "README.md"
    patch(model, "ssmax")
    save_pretrained(model, tmp_path)
    card.write_bytes(b"# Mine\r\n" + card.read_bytes() + b"\nof \xff and\n")
    unpatch(model)
    patch(model, "entmax15", layers=[1])
    save_pretrained(model, tmp_path)
    told = card.read_bytes()
    assert b"ssmax" not in told
    assert b"- `entmax15` ([Peters et al. 2019](https://arxiv.org/abs/1905.05702)), in 1 attention module\n" in told
    unpatch(model)
    save_pretrained(model, tmp_path)
    left = card.read_bytes()
    assert b"softmax" not in left
    assert left.startswith(b"# Mine\r\n")
    assert left.endswith(b"\nof \xff and\n")


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = tokens(batch=1, length=8, seed=index)[0]
        return {"input_ids": ids, "labels": ids}


def arguments(folder: Path, steps: int) -> TrainingArguments:
    return TrainingArguments(
        str(folder), max_steps=steps, save_steps=2, per_device_train_batch_size=2, learning_rate=0.05,
        report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=100,
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*pin_memory")
def test_a_trainer_saves_and_resumes_what_the_normalizer_learned(tmp_path: Path) -> None:
    transformers.logging.set_verbosity_error()
    model, ids = llama(), tokens()
    handle = patch(model, "ssmax")
    start = [p.detach().clone() for p in handle.parameters()]
    Trainer(model=model, args=arguments(tmp_path, 4), train_dataset=Texts()).train()
    learned = [p.detach().clone() for p in handle.parameters()]
    assert all((a - b).abs().min() > 1e-3 for a, b in zip(learned, start, strict=True))

    assert_close(quiet_logits(from_pretrained(tmp_path / "checkpoint-4"), ids), quiet_logits(model, ids))
    again = llama()
    resumed = patch(again, "ssmax")
    trainer = Trainer(model=again, args=arguments(tmp_path, 4), train_dataset=Texts())
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_close([p.detach() for p in resumed.parameters()], learned)


def test_a_normalizer_of_ones_own_is_saved_under_its_registered_name(tmp_path: Path) -> None:
    @attnorm.register("sparse_ssmax_of_a_test")
    def sparse_ssmax(heads: int | None = None) -> attnorm.Normalizer:
        return attnorm.compose("entmax15", scale=attnorm.get("ssmax", heads=heads))

    model, ids = llama(), tokens()
    handle = patch(model, "sparse_ssmax_of_a_test")
    assert [p.shape for p in handle.parameters()] == [(4,), (4,)]
    expected = quiet_logits(trained(model), ids)
    save_pretrained(model, tmp_path)
    assert torch.equal(quiet_logits(from_pretrained(tmp_path), ids), expected)
    registry._registered.pop("sparse_ssmax_of_a_test")
    with pytest.raises(ValueError, match=r"@attnorm\.register\('sparse_ssmax_of_a_test'\)"):
        from_pretrained(tmp_path)


@pytest.mark.parametrize("bits", [3, pytest.param(200, marks=pytest.mark.nightly)])
def test_a_flipped_bit_of_the_saved_values_is_noticed(bits: int, tmp_path: Path) -> None:
    model = llama()
    patch(model, "ssmax")
    save_pretrained(model, tmp_path)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    chance = random.Random(0)
    ours = [header[key]["data_offsets"] for key in header if "attnorm" in key]
    assert len(ours) == 4, "recipe and s of two layers"
    for first, last in ours:
        for _ in range(bits):
            damaged = bytearray(content)
            damaged[start + chance.randrange(first, last)] ^= 1 << chance.randrange(8)
            file.write_bytes(damaged)
            with pytest.raises(ValueError, match=re.escape(str(tmp_path))):
                from_pretrained(tmp_path)
    file.write_bytes(content)
    from_pretrained(tmp_path)


def test_only_our_save_has_a_digest_of_the_values(tmp_path: Path) -> None:
    """docs/reliability.md says so: what the model's own method saved loads with a flipped bit."""
    model = llama()
    patch(model, "ssmax")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    key = next(key for key in weights if key.endswith("scale.0.s"))
    save_file({**weights, key: weights[key] + 1}, file, metadata={"format": "pt"})
    assert torch.equal(from_pretrained(tmp_path).state_dict()[key], weights[key] + 1)
    save_pretrained(model, tmp_path)
    save_file({**weights, key: weights[key] + 1}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="SHA-256"):
        from_pretrained(tmp_path)


def test_learning_after_a_save_changes_no_digest(tmp_path: Path) -> None:
    model = llama()
    patch(model, "ssmax")
    save_pretrained(model, tmp_path)
    loaded = from_pretrained(tmp_path)
    trained(loaded).save_pretrained(tmp_path)
    assert torch.equal(quiet_logits(from_pretrained(tmp_path), tokens()), quiet_logits(loaded, tokens()))


@pytest.mark.parametrize(
    ("spec", "written"), [("kneemax", {}), ("laser:normalizer=kneemax", {"normalizer": "kneemax"})]
)
def test_a_saved_kneemax_is_the_kneemax_that_a_user_names(spec: str, written: dict[str, Any], tmp_path: Path) -> None:
    model, ids = llama(), tokens()
    patch(model, {"0-1": spec})
    expected = quiet_logits(model, ids)
    save_pretrained(model, tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())["attnorm"]["recipes"]
    assert [recipe["options"] for recipe in saved] == [written]
    assert torch.equal(quiet_logits(from_pretrained(tmp_path), ids), expected)


def test_a_strict_state_dict_of_an_earlier_version_loads(tmp_path: Path) -> None:
    """It has the values and no recipe."""
    one, other = llama(), llama()
    for model in (one, other):
        patch(model, "ssmax")
    state = {key: value for key, value in trained(one).state_dict().items() if "attnorm_recipe" not in key}
    other.load_state_dict(state)
    assert torch.equal(quiet_logits(other, tokens()), quiet_logits(one, tokens()))
    torch.save(one.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt"))


def test_accelerate_saves_the_normalizers(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    model, ids = llama(), tokens()
    patch(model, "ssmax")
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.save_model(trained(model), tmp_path)
    model.config.save_pretrained(tmp_path)
    loaded = from_pretrained(tmp_path, model_class=LlamaForCausalLM)
    assert torch.equal(quiet_logits(loaded, ids), quiet_logits(model, ids))


def test_weights_that_transformers_renames_find_their_module(tmp_path: Path) -> None:
    """The recipe has the path within the model; the names of the weights follow their file."""
    model = llama()
    patch(model, "ssmax")
    trained(model).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    renamed = {
        key.replace("model.layers", "text.blocks") if "attnorm" in key else key: value for key, value in weights.items()
    }
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(quiet_logits(from_pretrained(tmp_path), tokens()), quiet_logits(model, tokens()))
