"""attnorm lab reproduce without --model: gpt2 out of the Hugging Face cache, and what is said where it is not there."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2Model
from typer.testing import CliRunner

from attnorm.cli import app
from attnorm_lab.experiments import experiment
from tests.analysis.tiny_models import gpt2
from tests.cli.saved_model import save_model, save_text
from tests_lab.experiments.toy_experiments import Toy

runner = CliRunner()
COMMIT = "607a30d783dfa663caf39e06633721c8d4cfcd7e"
OPENING = "“Well, Prince, so Genoa and Lucca are now just family estates of the Buonapartes. "


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache of the hub, and no network."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(experiment, "_held", {})
    experiment._described.cache_clear()
    yield tmp_path / "hub"
    experiment._described.cache_clear()


def put_gpt2(cache: Path, tokenizer: Path) -> None:
    """As the hub has it - names of weights without a prefix, the class of the language model - but 8 wide per head."""
    folder = cache / "models--gpt2" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    (cache / "models--gpt2" / "refs").mkdir()
    (cache / "models--gpt2" / "refs" / "main").write_text(COMMIT)
    config = GPT2Config(n_embd=96)
    torch.manual_seed(0)
    weights = {name: weight.contiguous() for name, weight in GPT2Model(config).state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), "architectures": ["GPT2LMHeadModel"]}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 1024}))
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(tokenizer / name, folder / name)


def plain(output: str) -> str:
    return " ".join(output.replace("│", " ").split())


def test_gpt2_runs_out_of_the_cache_and_the_record_says_what_is_not_the_papers(
    cache: Path, shared: Path, tmp_path: Path
) -> None:
    tokenizer = shared / "tokenizers" / "gpt2"
    if not tokenizer.is_dir():
        pytest.skip(f"no tokenizer of GPT-2 at {tokenizer}")
    put_gpt2(cache, tokenizer)
    novel = tmp_path / "novel.txt"
    novel.write_text(OPENING * 20, encoding="utf-8")
    command = ["lab", "reproduce", "fig1", "--text", str(novel), "--out", str(tmp_path / "out"), "--json"]
    result = runner.invoke(app, command)
    assert result.exit_code == 0, result.output
    (one,) = json.loads(result.stdout)["experiments"]
    record = json.loads((tmp_path / "out" / "fig1" / "outcome.json").read_text(encoding="utf-8"))
    model = record["manifest"]["model"]
    assert (model["name"], model["layers"], model["heads"]) == ("gpt2", 12, 12)
    assert model["max_positions"] == 1024
    assert model["revision"] == COMMIT
    assert one["paper_setting"] == record["manifest"]["paper_setting"]
    assert one["paper_setting"]["same"] is False
    assert "what is called gpt2 here has another shape (head_dim 8)." in one["paper_setting"]["sentence"]
    for page in ("index.html", "fig1/verdict.md"):
        assert "has another shape (head_dim 8)" in (tmp_path / "out" / page).read_text(encoding="utf-8")
    assert "War and Peace: give it" not in result.stderr
    again = json.loads(runner.invoke(app, command).stdout)
    assert again["experiments"][0]["found_finished"] is True


def test_without_gpt2_the_error_names_what_was_tried_and_what_runs_here(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = Toy(needs_model=True).enter(monkeypatch)
    result = runner.invoke(app, ["lab", "reproduce", "toy", "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    said = plain(result.output)
    assert "gpt2: no folder of this name, not in the Hugging Face cache, and the hub cannot be reached" in said
    assert "--model bundled" in said
    assert "gpt2 on pydoc_data.topics" in said
    assert "the paper's text is War and Peace: give it with --text FILE" in said
    assert toy.runs == 0
    assert not (tmp_path / "out").exists()
    named = plain(
        runner.invoke(app, ["lab", "reproduce", "toy", "--model", "no/such", "--out", str(tmp_path / "out")]).output
    )
    assert "no/such: no folder of this name" in named
    assert "Without --model" not in named


@pytest.mark.parametrize("arguments", [["--quick"], ["--model", "bundled"]])
def test_the_bundled_model_needs_no_hub(
    arguments: list[str], cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Toy(needs_model=True).enter(monkeypatch)
    result = runner.invoke(app, ["lab", "reproduce", "toy", "--out", str(tmp_path), *arguments])
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "toy" / "outcome.json").read_text(encoding="utf-8"))
    assert record["manifest"]["model"]["name"] == "bundled"
    assert "War and Peace" not in result.stderr


@pytest.mark.parametrize("name", ["retrieval", "language-models"])
def test_what_trains_its_own_models_looks_for_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subjects = []
    monkeypatch.setattr(
        "attnorm_lab.experiments.run.reproduce", lambda names, subject, out, **options: subjects.append(subject) or []
    )
    monkeypatch.setattr("attnorm_lab.experiments.experiment.PAPER_MODEL", "must-not-be-asked-for")
    result = runner.invoke(app, ["lab", "reproduce", name])
    assert result.exit_code == 0, result.output
    assert subjects[0].model == "bundled"
    assert "War and Peace" not in result.output


def test_several_models_in_one_table_are_found_finished_again(cache: Path, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "tiny")
    gpt2(layers=2, heads=2, positions=512, seed=0).save_pretrained(folder)
    text = save_text(tmp_path / "words.txt", words=600)
    command = ["lab", "reproduce", "spread", "--quick", "--model", "bundled", "--model", str(folder),
        "--text", str(text),
        "--out", str(tmp_path / "out"),
    ]  # fmt: skip
    result = runner.invoke(app, command)
    assert result.exit_code == 0, result.output
    lines = (tmp_path / "out" / "spread" / "spread.csv").read_text(encoding="utf-8").splitlines()
    assert [line.split(",")[0] for line in lines[1:]] == ['"Gemma 2B"', '"Gemma 7B"', '"bundled"', '"tiny"']
    record = json.loads((tmp_path / "out" / "spread" / "outcome.json").read_text(encoding="utf-8"))
    assert [model["name"] for model in (record["manifest"]["model"], *record["manifest"]["others"])] == [
        "bundled",
        "tiny",
    ]
    assert "Model bundled, tiny;" in plain((tmp_path / "out" / "index.html").read_text(encoding="utf-8"))
    assert "found finished" in runner.invoke(app, command).stdout
    swapped = runner.invoke(app, [*command[:3], "--model", "bundled", *command[7:]])
    assert swapped.exit_code == 2
    assert "others is none here and tiny there" in plain(swapped.output)
