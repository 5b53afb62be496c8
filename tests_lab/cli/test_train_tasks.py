"""`attnorm lab train clrs` and `train retrieval`: tables, JSON for machines, errors that help."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from attnorm.cli import app
from attnorm_lab.cli.train_tasks import TimeLeft
from attnorm_lab.training.clrs import train
from attnorm_lab.training.retrieval import train as retrieval_train
from attnorm_lab.training.retrieval.evaluate import Trials
from attnorm_lab.training.retrieval.train import RetrievalProgress

runner = CliRunner()
TINY = ["--steps", "2", "--batch", "2", "--width", "8", "--layers", "1", "--observed", "0", "--dense"]


def test_it_prints_a_table_and_a_second_call_only_reads(tmp_path: Path) -> None:
    call = ["lab", "train", "clrs", "--quick", "--out", str(tmp_path / "out"), "--device", "cpu", *TINY]
    result = runner.invoke(app, call)
    assert result.exit_code == 0, result.output
    assert "insertion_sort" in result.stdout
    again = runner.invoke(app, [*call, "--json"])
    record = json.loads(again.stdout)
    assert "training" not in again.stderr
    assert record["result"]["steps"] == 2
    assert set(record["result"]["exact"]["own"]["minimum"]) == {"2", "3", "4", "5", "6"}
    assert record == json.loads((tmp_path / "out" / "training.json").read_text())


def test_options_reach_the_trainer_and_quick_yields_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def stop(out: Any, base: Any, recipe: Any, data: Any, tests: Any, **options: Any) -> None:
        seen.update(options, recipe=recipe, tests=tests, data=data, base=base)
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "train_clrs", stop)
    records = [
        {"algorithm": "bfs", "size": size, "question": f"bfs {size} {n}\n", "answer": "0\n\n"}
        for size in (4, 5) for n in range(8)
    ]  # fmt: skip
    paths = [tmp_path / name for name in ("train.jsonl", "test.jsonl")]
    for path, part in zip(paths, (records[::2], records[1::2]), strict=True):
        path.write_text("".join(json.dumps(record) + "\n" for record in part))
    flags = ["--quick", "--lr", "0.5", "--normalizer", "topk:k=3", "--test-with", "hard,re-fitted"]
    flags += ["--held-out", "2", "--seed", "3"]
    call = ["lab", "train", "clrs", str(paths[0]), "--test", str(paths[1]), "--out", str(tmp_path / "out"), *flags]
    result = runner.invoke(app, call)
    assert result.exit_code == 130, result.output
    recipe = seen["recipe"]
    assert (recipe.normalizer, recipe.normalizer_options, recipe.learning_rate) == ("topk", {"k": 3}, 0.5)
    assert (recipe.seed, recipe.steps) == (3, 30)
    assert seen["tests"].others == ("hard", "re-fitted")
    assert (len(seen["data"].train), len(seen["data"].held_out), len(seen["data"].test)) == (6, 2, 8)
    assert seen["base"].path is None


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ([], "--quick"),
        (["missing.jsonl"], "--test"),
        (["missing.jsonl", "--test", "missing.jsonl"], "missing.jsonl"),
        (["--quick", "--normalizer", "softmx"], "softmx"),
        (["--quick", "--algorithms", "dfs"], "got dfs"),
    ],
)
def test_wrong_calls_are_explained(flags: list[str], named: str, tmp_path: Path) -> None:
    result = runner.invoke(app, ["lab", "train", "clrs", "--out", str(tmp_path / "out"), "--device", "cpu", *flags])
    assert result.exit_code == 2, result.output
    assert named in result.stderr
    assert not (tmp_path / "out" / "training.json").exists()


TINY_STACK = ["--steps", "4", "--batch", "4", "--width", "8", "--seeds", "2", "--sizes", "4,32", "--sets", "8"]


@pytest.fixture
def call(tmp_path: Path) -> list[str]:
    return ["lab", "train", "retrieval", "--out", str(tmp_path / "out"), "--device", "cpu", *TINY_STACK]


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

    monkeypatch.setattr(retrieval_train, "train_retrieval", stop)
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

    monkeypatch.setattr(retrieval_train, "train_retrieval", stop)
    for more in ([], ["--test-sets", "1024"], ["--sets", "7"]):
        runner.invoke(app, ["lab", "train", "retrieval", "--out", str(tmp_path), *more])
    assert seen == [128, 1024, 7]
    assert Trials().sets == 1024


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--normalizers", "sofmax"], "did you mean 'softmax'"), (["--normalizers", "linear"], "is a mechanism"),
        (["--normalizers", ","], "normalizers: expected at least one"), (["--task", "mux"], "did you mean 'max'"),
        (["--sizes", "16,1"], "at least 2 items, got 1"), (["--sizes", "16,many"], "got '16,many'"),
        (["--seeds", "0"], "seeds: expected at least one"), (["--steps", "0"], "steps must be at least 1"),
        (["--device", "abacus"], "cannot use device"),
    ],
)  # fmt: skip
def test_wrong_usage_exits_with_2_and_says_why(call: list[str], more: list[str], message: str) -> None:
    result = runner.invoke(app, [*call, *more])
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_a_full_disk_exits_with_1(call: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device", "records.jsonl")

    monkeypatch.setattr(retrieval_train, "train_retrieval", full)
    result = runner.invoke(app, call)
    assert result.exit_code == 1
    assert "No space left on device: records.jsonl" in result.stderr


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def at(number: int, stage: str, done: int, total: int) -> RetrievalProgress:
    return RetrievalProgress(f"normalizer {number}", number, 2, stage, done, total)


def test_the_estimate_counts_the_normalizers_and_tests_to_come() -> None:
    clock = Clock()
    left = TimeLeft(sizes=(10, 90), sets=4, now=clock)
    assert left.words == ""
    words = []
    for seconds, state in [
        (0, at(1, "training", 0, 300)),
        (50, at(1, "training", 100, 300)),  # slow: compilation; not in the pace
        (60, at(1, "training", 200, 300)),  # 0.1 s a step; 100 steps here and 300 of the second normalizer: 40 s
        (70, at(1, "training", 300, 300)),
        (70, at(1, "testing", 0, 2)),
        (72, at(1, "testing", 1, 2)),  # 40 items in 2 s: 360 + 400 items take 38 s, 300 steps 30 s
        (90, at(1, "testing", 2, 2)),
        (90, at(2, "training", 0, 300)),
        (110, at(2, "testing", 0, 2)),
        (112, at(2, "testing", 1, 2)),
        (130, at(2, "testing", 2, 2)),
    ]:
        clock.seconds = seconds
        left.see(state)
        words.append(left.words)
    assert words[:2] == ["", ""]
    assert words[2] == "about 40 s of training left, then tests"
    assert words[5] == "about 68 s left"
    assert words[6] == "about 50 s left"
    assert words[9] == "about 18 s left"
    assert words[10] == ""


@pytest.mark.parametrize("done", [0, 100])
def test_a_resumed_training_is_estimated_from_its_own_steps(done: int) -> None:
    clock = Clock()
    left = TimeLeft(sizes=(10,), sets=4, now=clock)
    for seconds, steps in [(0, done), (10, 200), (20, 300)]:
        clock.seconds = seconds
        left.see(at(2, "training", steps, 400))
    assert left.words == "about 10 s of training left, then tests"
