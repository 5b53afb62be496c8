"""`attnorm lab train clrs` from the command line: a table, JSON for machines, errors that help."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from attnorm.cli import app
from attnorm_lab.training.clrs import train

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
    flags = [
        "--lr",
        "0.5",
        "--normalizer",
        "topk:k=3",
        "--test-with",
        "hard,re-fitted",
        "--held-out",
        "2",
        "--seed",
        "3",
    ]
    call = [
        "lab",
        "train",
        "clrs",
        str(paths[0]),
        "--test",
        str(paths[1]),
        "--out",
        str(tmp_path / "out"),
        "--quick",
        *flags,
    ]
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
