"""`attnorm lab train retrieval` from the command line: tables and a folder, JSON for machines, errors that help."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from attnorm.cli import app
from attnorm_lab.training.retrieval import train
from attnorm_lab.training.retrieval.evaluate import Trials

runner = CliRunner()
TINY = ["--steps", "4", "--batch", "4", "--width", "8", "--seeds", "2", "--sizes", "4,32", "--sets", "8"]


@pytest.fixture
def call(tmp_path: Path) -> list[str]:
    return ["lab", "train", "retrieval", "--out", str(tmp_path / "out"), "--device", "cpu", *TINY]


def test_it_prints_accuracy_and_errors_and_writes_the_folder(call: list[str], tmp_path: Path) -> None:
    result = runner.invoke(app, [*call, "--normalizers", "softmax, kneemax"])
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.split())
    assert "max: right answers in %, mean over 2 seeds ± 95 % confidence" in words
    assert "logits wrong" in words
    assert "class leak" in words
    assert result.stdout.count("kneemax") == 4, "own and hard, in two tables"
    assert "kneemax (2 of 2): training: 4 of 4, loss" in result.stderr
    assert (tmp_path / "out" / "manifest.json").is_file()
    assert len((tmp_path / "out" / "records.jsonl").read_text().splitlines()) == 2 * 2 * 2 * 2


def test_json_and_a_second_call_that_only_reads(call: list[str]) -> None:
    first, second = (
        runner.invoke(app, [*call, "--normalizers", "ssmax", "--test-with", "", "--json"]) for _ in range(2)
    )
    assert first.exit_code == 0, first.output
    rows = json.loads(first.stdout)
    assert [(row["task"], row["normalizer"], row["tested_with"], row["size"], row["seeds"]) for row in rows] == [
        ("max", "ssmax", "own", 4, 2), ("max", "ssmax", "own", 32, 2),
    ]  # fmt: skip
    assert second.stdout == first.stdout
    assert "training" not in second.stderr


def test_a_task_without_a_target_shows_accuracy_alone(call: list[str]) -> None:
    result = runner.invoke(app, [*call, "--task", "majority", "--normalizers", "softmax", "--seeds", "1"])
    assert result.exit_code == 0, result.output
    assert "one seed" in result.stdout
    assert "logits wrong" not in result.stdout
    assert "leak" not in result.stdout


def test_the_flags_reach_the_recipe_and_quick_yields_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def stop(normalizers: Any, out: Any, **options: Any) -> None:
        seen.update(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "train_retrieval", stop)
    flags = [
        "--quick", "--batch", "7", "--lr", "0.5", "--weight-decay", "0.25", "--cosine", "--smallest", "3",
        "--largest", "9", "--leak-penalty", "2", "--leak-from", "0.1", "--squeezed", "0.5", "--no-compile",
    ]  # fmt: skip
    result = runner.invoke(app, ["lab", "train", "retrieval", "--out", str(tmp_path), *flags])
    assert result.exit_code == 130
    assert "Interrupted" in result.stderr
    recipe = seen["recipe"]
    assert (recipe.batch, recipe.learning_rate, recipe.weight_decay, recipe.cosine) == (7, 0.5, 0.25, True)
    assert (recipe.smallest, recipe.largest, recipe.leak_penalty, recipe.leak_from) == (3, 9, 2.0, 0.1)
    assert (recipe.squeezed, recipe.steps, len(seen["seeds"]), seen["compiled"]) == (0.5, 400, 3, False)
    assert seen["trials"].sizes == (16, 64, 256, 1024)


def test_the_command_tests_on_fewer_sets_than_the_reproduction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def stop(normalizers: Any, out: Any, **options: Any) -> None:
        seen.append(options["trials"].sets)
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "train_retrieval", stop)
    for more in ([], ["--test-sets", "1024"], ["--sets", "7"]):
        runner.invoke(app, ["lab", "train", "retrieval", "--out", str(tmp_path), *more])
    assert seen == [128, 1024, 7]
    assert Trials().sets == 1024


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--normalizers", "sofmax"], "did you mean 'softmax'"),
        (["--normalizers", "linear"], "is a mechanism"),
        (["--normalizers", ","], "normalizers: expected at least one"),
        (["--task", "mux"], "did you mean 'max'"),
        (["--sizes", "16,1"], "at least 2 items, got 1"),
        (["--sizes", "16,many"], "got '16,many'"),
        (["--seeds", "0"], "seeds: expected at least one"),
        (["--steps", "0"], "steps must be at least 1"),
        (["--device", "abacus"], "cannot use device"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_why(call: list[str], more: list[str], message: str) -> None:
    result = runner.invoke(app, [*call, *more])
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_a_full_disk_exits_with_1(call: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device", "records.jsonl")

    monkeypatch.setattr(train, "train_retrieval", full)
    result = runner.invoke(app, call)
    assert result.exit_code == 1
    assert "No space left on device: records.jsonl" in result.stderr
