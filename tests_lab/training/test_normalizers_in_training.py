"""`train_lm` with another normalizer than softmax: it learns, is saved and resumed whole, and runs at other lengths."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from attnorm.evaluation.windows import validation_windows
from attnorm.models.load import load
from attnorm.models.patch_state import normalizer_of, patched_modules
from attnorm.models.saving import from_pretrained
from attnorm_lab.training.lm.data import prepare
from attnorm_lab.training.lm.evaluate import validation_loss
from attnorm_lab.training.lm.model import build_model, learned_values
from attnorm_lab.training.run import make_optimizer
from tests_lab.training.conftest import tiny
from tests_lab.training.test_lm import assert_equal_runs, last_state, metrics

Train = Callable[..., dict[str, Any]]
NORMALIZERS = ("ssmax", "entmax15", pytest.param("sigmoid", marks=pytest.mark.nightly))


@pytest.fixture(scope="module")
def runs(train: Train, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("normalizers")

    class Runs(dict[str, tuple[Path, dict[str, Any]]]):
        """Trained when a test asks for it."""

        def __missing__(self, name: str) -> tuple[Path, dict[str, Any]]:
            record = train(folder / name, architecture="llama", normalizer=name)
            return self.setdefault(name, (folder / name, record))

    return Runs()


@pytest.mark.parametrize("name", NORMALIZERS)
def test_every_kind_of_normalizer_learns(name: str, runs: dict[str, Any]) -> None:
    out, record = runs[name]
    losses = [entry["loss"] for entry in metrics(out)]
    assert losses[-1] < 0.6 * losses[0]
    assert losses != [entry["loss"] for entry in metrics(runs["softmax"][0])]
    validation = record["result"]["validation"]
    assert validation["model"]["nats_per_token"] < validation["unigram"]["nats_per_token"]


def test_what_a_normalizer_learns_moves_and_does_not_decay(runs: dict[str, Any]) -> None:
    learned = [value for name, value in last_state(runs["ssmax"][0]).items() if name.endswith("normalizer.scale.0.s")]
    assert len(learned) == 2
    assert all(value.shape == (2,) and (value - 0.1685).abs().min() > 1e-3 for value in learned)
    settings = tiny(architecture="llama", normalizer="ssmax", weight_decay=0.3)
    model = build_model(settings, vocabulary=300, end_of_text=0)
    decaying, free = make_optimizer(model, settings).param_groups
    learning = {id(parameter) for module in patched_modules(model).values() for parameter in _learned(module)}
    assert len(learning) == 2
    assert learning <= {id(parameter) for parameter in free["params"]}
    assert not learning & {id(parameter) for parameter in decaying["params"]}


def _learned(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return list(normalizer_of(module).parameters())


@pytest.mark.parametrize("name", NORMALIZERS)
def test_the_saved_folder_runs_with_the_normalizer_and_has_the_loss_it_says(
    name: str, runs: dict[str, Any], texts: tuple[Path, Path], encoded: Path
) -> None:
    out, record = runs[name]
    corpus = prepare([texts[0]], texts[1], encoded, vocab=300, seed=0)
    windows = validation_windows(corpus.valid, 32)
    stated = record["result"]["validation"]["model"]["nats_per_token"]
    for model in (from_pretrained(out, dtype=torch.float32).eval(), load(out, device="cpu").model):
        assert {normalizer_of(module).name for module in patched_modules(model).values()} == {name}
        loss = validation_loss(model, windows, torch.device("cpu"), torch.float32)
        assert loss == pytest.approx(stated, abs=2e-5)
    learned = {name: value for name, value in last_state(out).items() if "normalizer" in name and "/" not in name}
    assert all(torch.equal(model.state_dict()[name], value) for name, value in learned.items())


@pytest.mark.parametrize(
    "name", ["ssmax", *(pytest.param(n, marks=pytest.mark.nightly) for n in ("entmax15", "sigmoid"))]
)
def test_a_run_in_two_parts_equals_one_in_one(name: str, train: Train, runs: dict[str, Any], tmp_path: Path) -> None:
    again = {"architecture": "llama", "normalizer": name}
    train(tmp_path / "run", **again, options={"max_minutes": 0.0})
    train(tmp_path / "run", **again)
    assert_equal_runs(tmp_path / "run", runs[name][0])
    pair = [(out / "model.safetensors").read_bytes() for out in (tmp_path / "run", runs[name][0])]
    assert pair[0] == pair[1]
    assert b"attnorm_recipe" in pair[0]


def test_the_card_and_the_record_name_the_normalizer(runs: dict[str, Any]) -> None:
    out, record = runs["entmax15"]
    assert record["run"]["normalizer"] == "entmax15"
    card = (out / "README.md").read_text()
    assert "Attention uses `entmax15` ([Peters et al. 2019]" in card
    assert "attnorm.from_pretrained" in card
    plain = (runs["softmax"][0] / "README.md").read_text()
    assert "instead of softmax" not in plain
    assert "AutoModelForCausalLM" in plain


def test_softmax_without_options_is_the_model_s_own(runs: dict[str, Any]) -> None:
    out, record = runs["softmax"]
    assert "normalizer" not in record["run"]  # so that folders from before there was a choice continue
    assert b"attnorm_recipe" not in (out / "model.safetensors").read_bytes()
    assert not patched_modules(build_model(tiny(architecture="llama"), vocabulary=300, end_of_text=0))
    one, other = (
        build_model(tiny(architecture="llama", normalizer=name), vocabulary=300, end_of_text=0)
        for name in ("softmax", "entmax15")
    )
    assert all(torch.equal(*pair) for pair in zip(one.parameters(), other.parameters(), strict=True))


def test_a_llama_is_what_it_says() -> None:
    model = build_model(tiny(architecture="llama", width=96), vocabulary=300, end_of_text=7)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.intermediate_size == 256
    assert model.config.num_key_value_heads == 2
    assert model.config.eos_token_id == 7


def test_longer_windows_are_measured_where_the_model_has_positions(
    train: Train, runs: dict[str, Any], tmp_path: Path
) -> None:
    validation = runs["ssmax"][1]["result"]["validation"]
    assert [each["length"] for each in validation["by_length"]] == [32, 64, 128]
    assert validation["by_length"][0]["nats_per_token"] == validation["model"]["nats_per_token"]
    assert len({each["nats_per_token"] for each in validation["by_length"]}) == 3
    out = tmp_path / "run"
    assert [each["length"] for each in _by_length(train(out, steps=1))] == [32]
    with pytest.raises(ValueError, match=r"gpt2.*32.*64.*llama"):
        train(out, steps=1, options={"lengths": [64]})
    before = last_state(out)
    assert [each["length"] for each in _by_length(train(out, steps=1, options={"lengths": [8]}))] == [8, 32]
    assert all(torch.equal(before[name], value) for name, value in last_state(out).items())


def _by_length(record: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = record["result"]["validation"]["by_length"]
    return found


def test_speed_and_memory_are_kept(runs: dict[str, Any]) -> None:
    out, record = runs["sigmoid"]
    entries = metrics(out)
    assert record["result"]["tokens_per_second"] == sorted(entry["tokens_per_second"] for entry in entries)[1]
    assert record["result"]["peak_memory_bytes"] == max(entry["peak_memory_bytes"] for entry in entries) > 2**20
    assert json.loads((out / "training.json").read_text()) == record


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"normalizer": "sofmax"}, "'sofmax'.*'softmax'"),
        ({"normalizer": "entmax", "normalizer_options": {"beta": 1}}, "'entmax'.*alpha"),
        ({"normalizer": "soft"}, "'soft'.*causal"),
        ({"normalizer": "ssmax", "normalizer_options": {"train_length": 9}}, "context, 32"),
        ({"normalizer": "ssmax", "normalizer_options": {"layers": [0]}}, "'ssmax'.*'layers'"),
    ],
)
def test_a_normalizer_that_cannot_be(changed: dict[str, Any], message: str, train: Train, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        train(tmp_path / "run", **changed)
    assert not (tmp_path / "run").exists()


def test_what_a_record_says_that_a_normalizer_learned() -> None:
    model = build_model(tiny(architecture="llama", normalizer="ssmax"), 300, 0)
    found = learned_values(model)
    assert len(found) == 2, "a parameter per layer, and nothing of the model"
    for name, values in found.items():
        assert values == [round(value, 5) for value in model.get_parameter(name).flatten().tolist()]
    assert len(next(iter(found.values()))) == 2, "heads"
    assert learned_values(model, at_most=1) == {}


def test_another_normalizer_is_another_run(train: Train, runs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"normalizer.*sigmoid.*ssmax"):
        train(runs["ssmax"][0], architecture="llama", normalizer="sigmoid")


def test_a_recipe_is_trained_saved_and_described(train: Train, tmp_path: Path) -> None:
    record = train(tmp_path / "run", architecture="llama", recipe={"1": "ssmax"}, steps=6)
    assert record["run"]["recipe"] == {"0": "softmax", "1": "ssmax"}
    assert "normalizer" not in record["run"]
    loaded = from_pretrained(tmp_path / "run")
    assert [path.split(".")[2] for path in patched_modules(loaded)] == ["1"]
    assert "`ssmax` in layers 1" in (tmp_path / "run" / "README.md").read_text()
    assert train(tmp_path / "run", architecture="llama", recipe={"0": "softmax", "1": "ssmax"}, steps=6) == record
    with pytest.raises(ValueError, match="recipe is"):
        train(tmp_path / "run", architecture="llama", recipe={"1": "entmax15"}, steps=6)


def test_a_recipe_with_one_normalizer_is_that_normalizer() -> None:
    assert tiny(recipe={"0-1": "entmax:alpha=1.3"}) == tiny(normalizer="entmax", normalizer_options={"alpha": 1.3})
    assert tiny(recipe={"0": "softmax"}).as_dict() == tiny().as_dict()
    with pytest.raises(ValueError, match="both"):
        tiny(recipe={"0": "ssmax"}, normalizer="ssmax")
    with pytest.raises(ValueError, match="got 2"):
        tiny(recipe={"2": "ssmax"})
