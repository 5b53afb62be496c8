"""`attnorm lab search` as a user runs it: real worker processes, a database, and three objectives at once."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from attnorm.cli import app
from attnorm_lab.runs.search.run import JOURNAL
from tests_lab.training.conftest import write_text

optuna = pytest.importorskip("optuna")

TRIALS = 3  # enough for an importance here
OBJECTIVES = ["loss", "retrieval", "tokens_per_second"]
PLAN = f"""
objectives = {OBJECTIVES}
trials = {TRIALS}
prune = false
[space]
groups = "each"
normalizers = ["softmax", "ssmax"]
learning_rate = [0.003, 0.03]
[options]
texts = ["train.txt"]
valid = "valid.txt"
architecture = "llama"
layers = 2
heads = 1
width = 8
context = 48
vocab = 300
steps = 2
batch = 2
warmup = 1
[options.needle]
characters = 1
keys = 1
steps = 1
batch = 1
warmup = 1
questions = 1
depths = [0.5]
"""


@pytest.mark.nightly  # 19 CPU seconds; test_search.py runs the same search in this process
def test_a_search_in_processes_with_a_database_weighs_three_objectives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnorm_lab.runs.search.results.ENOUGH", TRIALS)
    write_text(tmp_path / "train.txt", 300, seed=1)
    write_text(tmp_path / "valid.txt", 120, seed=2)
    (tmp_path / "plan.toml").write_text(PLAN)
    out, storage = tmp_path / "out", f"sqlite:///{tmp_path / 'study.db'}"
    call = ["lab", "search", str(tmp_path / "plan.toml"), "--out", str(out), "--workers", "1", "--storage", storage]
    result = CliRunner().invoke(app, call)
    assert result.exit_code == 0, result.output

    trials = optuna.load_study(study_name="search", storage=storage).get_trials()
    assert [trial.state.name for trial in trials] == ["COMPLETE"] * TRIALS
    assert not (out / JOURNAL).exists()
    table = pq.read_table(out / "trials.parquet").to_pylist()
    for row, trial in zip(table, trials, strict=True):
        assert [row[name] for name in OBJECTIVES] == trial.values
        assert row["loss"] > 0
        assert 0 <= row["retrieval"] <= 1
        assert row["tokens_per_second"] > 0

    importance = json.loads((out / "importance.json").read_text())
    assert importance["failed"] == {}
    assert list(importance["importance"]) == OBJECTIVES
    for shares in importance["importance"].values():
        assert set(shares) == {"layer 0", "layer 1", "learning_rate"}
        assert all(0 <= share <= 1 for share in shares.values())
    assert sum(importance["importance"]["loss"].values()) == pytest.approx(1, abs=1e-3)
    picture = (out / "objectives.svg").read_text()
    assert all(label in picture for label in ("loss", "retrieval", "Pareto front"))
    front = {int(path.stem) for path in (out / "front").iterdir()}
    assert front == {trial.number for trial in optuna.load_study(study_name="search", storage=storage).best_trials}
