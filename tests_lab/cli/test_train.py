"""`attnorm lab train lm` from the command line: a table and a folder, JSON for machines, errors that help."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from attnorm.cli import app
from attnorm_lab.training.checkpoints import TrainingInterrupted
from attnorm_lab.training.lm import train as trainer

runner = CliRunner()
TINY = ["--layers", "1", "--heads", "2", "--width", "16", "--context", "16", "--vocab", "300", "--batch", "4"]


@pytest.fixture
def call(tmp_path: Path) -> list[str]:
    (tmp_path / "train.txt").write_text("A rose is a rose.\n\n" * 300)
    (tmp_path / "valid.txt").write_text("A rose is a rose is a rose.\n\n" * 20)
    paths = [str(tmp_path / name) for name in ("train.txt", "valid.txt", "out")]
    return ["lab", "train", "lm", paths[0], "--valid", paths[1], "--out", paths[2], *TINY]


def test_it_prints_the_losses_and_writes_the_model(call: list[str], tmp_path: Path) -> None:
    result = runner.invoke(app, [*call, "--steps", "4", "--eval-every", "2"])
    assert result.exit_code == 0, result.output
    assert all(name in result.stdout for name in ("model", "bigram", "unigram", "bits per byte"))
    assert "training: 4 of 4, loss" in result.stderr
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert "float32" in (tmp_path / "out" / "README.md").read_text()


def test_tokens_in_place_of_steps_and_json(call: list[str]) -> None:
    result = runner.invoke(app, [*call, "--tokens", "130", "--json"])
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["run"]["steps"] == 3  # the first whole number of steps of 64 tokens
    assert record["result"]["tokens"] == 192


def test_another_normalizer_and_other_lengths(call: list[str], tmp_path: Path) -> None:
    more = ["--architecture", "llama", "--normalizer", "entmax", "--normalizer-options", "alpha=1.3, learned=True"]
    result = runner.invoke(app, [*call, *more, "--steps", "2", "--eval-lengths", "16,48"])
    assert result.exit_code == 0, result.output
    assert "windows of 48" in result.stdout
    assert "tokens/s" in result.stdout
    record = json.loads((tmp_path / "out" / "training.json").read_text())
    assert record["run"]["normalizer_options"] == {"alpha": 1.3, "learned": True}
    assert [each["length"] for each in record["result"]["validation"]["by_length"]] == [16, 48]
    assert "`entmax` with alpha=1.3, learned=True" in (tmp_path / "out" / "README.md").read_text()


def test_a_recipe_file_gives_layers_and_learning_rate(call: list[str], tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('learning_rate = 0.002\n[layers]\n"1" = "ssmax"\n')
    more = ["--recipe", str(recipe), "--steps", "2", "--layers", "2", "--json"]
    result = runner.invoke(app, [*call, *more])
    assert result.exit_code == 0, result.output
    run = json.loads(result.stdout)["run"]
    assert run["recipe"] == {"0": "softmax", "1": "ssmax"}
    assert run["learning_rate"] == 0.002
    result = runner.invoke(app, [*call, *more, "--normalizer", "ssmax"])
    assert result.exit_code == 2
    assert "ssmax" in result.output


def test_a_trained_folder_is_measured_with_the_normalizer_it_was_trained_with(call: list[str], tmp_path: Path) -> None:
    result = runner.invoke(app, [*call, "--normalizer", "sparsemax", "--steps", "2"])
    assert result.exit_code == 0, result.output
    (tmp_path / "text.txt").write_text("A rose is a rose.\n\n" * 20)
    measuring = ["--text", str(tmp_path / "text.txt"), "--lengths", "16", "--metrics", "core", "--device", "cpu"]
    measured = runner.invoke(app, ["analyze", str(tmp_path / "out"), *measuring, "--out", str(tmp_path / "measured")])
    assert measured.exit_code == 0, measured.output
    about = json.loads((tmp_path / "measured" / "manifest.json").read_text())["model"]
    assert about["runs"] == "sparsemax"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--width", "15"], "multiple of the number of heads"),
        (["--steps", "3", "--tokens", "100"], "--steps or --tokens"),
        (["--context", "5000"], "fewer than one window of 5000"),
        (["--device", "abacus"], "cannot use device"),
        (["--valid", "absent.txt"], "no such text file: absent.txt"),
        (["--normalizer", "entmax51"], "unknown normalizer 'entmax51'"),
        (["--normalizer-options", "alpha"], "got 'alpha'"),
        (["--eval-lengths", "64"], "gpt2 has 16 positions, so that"),
        (["--eval-lengths", "long"], "--eval-lengths: "),
        (["--max-minutes", "nan"], "got nan"),
        (["--data", __file__], "got the file"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_why(call: list[str], more: list[str], message: str) -> None:
    result = runner.invoke(app, [*call, *more])
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_another_run_in_the_folder_is_refused(call: list[str]) -> None:
    assert runner.invoke(app, [*call, "--steps", "1"]).exit_code == 0
    result = runner.invoke(app, [*call, "--steps", "1", "--lr", "0.5"])
    assert result.exit_code == 2
    assert "learning_rate is 0.5 here and 0.001 there" in " ".join(result.stderr.replace("│", " ").split())


def test_an_interruption_exits_with_130_and_a_full_disk_with_1(
    call: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for interruption, words in (
        (TrainingInterrupted(7), "interrupted after step 7; the same command continues from there"),
        (KeyboardInterrupt(), "checkpoints are kept"),  # as while it learns a tokenizer
    ):
        monkeypatch.setattr(trainer, "train_lm", Mock(side_effect=interruption))
        result = runner.invoke(app, call)
        assert result.exit_code == 130
        assert words in result.stderr

    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device", "model.safetensors")

    monkeypatch.setattr(trainer, "train_lm", full)
    result = runner.invoke(app, call)
    assert result.exit_code == 1
    assert "No space left on device: model.safetensors" in result.stderr


def test_quick_needs_no_folder_and_says_what_its_loss_is_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    train_lm = Mock(return_value={})
    monkeypatch.setattr(trainer, "train_lm", train_lm)
    for steps, noted in ([], True), (["--steps", "500"], False):
        result = runner.invoke(app, ["lab", "train", "lm", "--quick", "--json", *steps])
        assert result.exit_code == 0, result.output
        assert train_lm.call_args.args[2] == Path("quick-lm")
        assert ("20 steps of a tiny model" in result.stderr) == noted
        assert "wrote quick-lm" in result.stderr


def test_the_package_itself_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "attnorm", "lab", "train", "--help"], stdout=subprocess.PIPE, text=True
    )
    assert done.returncode == 0
    assert "lm" in done.stdout
