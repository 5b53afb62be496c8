"""Kill -9 of workers, of a node and of the driver of a real search on Ray: no trial is lost, doubled or different."""

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from attnorm_lab.runs.folder import read_items, result_of
from attnorm_lab.runs.search.plan import read_search_plan
from attnorm_lab.runs.search.run import HOW, open_storage
from attnorm_lab.runs.tasks import TIMING, train_lm_item
from tests_lab.runs.ray_cluster import run_with_kills, two_nodes
from tests_lab.runs.search.conftest import PLAN
from tests_lab.training.conftest import write_text

optuna = pytest.importorskip("optuna")

KILLS = int(os.environ.get("ATTNORM_TEST_KILLS", "50"))
TRIALS = 40
LONGER = {
    "trials = 4": f"trials = {TRIALS}", '"softmax", "entmax"': '"softmax", "ssmax", "entmax"',
    "steps = 4": "steps = 60", "eval_every = 2": "eval_every = 20\ncheckpoint_every = 10",
}  # fmt: skip


@pytest.fixture
def cluster() -> Iterator[Any]:
    with two_nodes() as made:
        yield made


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_fifty_kills_a_lost_node_and_two_lost_drivers_lose_no_trial(cluster: Any, tmp_path: Path) -> None:
    write_text(tmp_path / "train.txt", 300, seed=1)
    write_text(tmp_path / "valid.txt", 30, seed=2)
    plan = tmp_path / "plan.toml"
    text = PLAN
    for old, new in LONGER.items():
        text = text.replace(old, new)
    plan.write_text(text)
    total, rounds = 0, 0
    while total < KILLS:  # a fast machine finishes the trials before 50 kills
        rounds += 1
        killed = run_with_kills("search", plan, tmp_path / f"killed-{rounds}", cluster, KILLS - total)
        print(f"round {rounds}: {killed}")  # noqa: T201 - shown by pytest -s
        total += killed.workers
        check_trials(plan, tmp_path / f"killed-{rounds}")
        assert rounds < 10
    check_values(tmp_path / "killed-1", tmp_path / "calm")


def check_trials(plan: Path, out: Path) -> None:
    """Every trial is in the study once, with the values that its item has."""
    trials = optuna.load_study(study_name="search", storage=open_storage(out, None)).get_trials()
    assert [trial.number for trial in trials] == list(range(TRIALS))
    assert {trial.state.name for trial in trials} <= {"COMPLETE", "PRUNED"}
    parsed = read_search_plan(plan)
    recorded = json.loads((out / "result.json").read_text())["trials"]
    assert [trial["number"] for trial in recorded] == list(range(TRIALS))
    assert {path.stem for path in (out / "results").iterdir()} == {trial["item"] for trial in recorded}
    assert set(Counter(trial["item"] for trial in recorded).values()) == {1}
    for trial, record in zip(trials, recorded, strict=True):
        result = result_of(out, record["item"])
        assert result is not None
        assert result["pruned"] == (trial.state.name == "PRUNED")
        if not result["pruned"]:
            assert trial.values == parsed.values(result["rows"][0])


def check_values(out: Path, calm: Path) -> None:
    """Training without kills gives exactly the same numbers for the same trial."""
    compared = 0
    for item in read_items(out):
        result = result_of(out, item.id)
        assert result is not None
        if not result["pruned"]:
            values = {name: value for name, value in item.values.items() if name != HOW}
            (row,) = train_lm_item(values, calm / item.id, calm)
            (found,) = result["rows"]
            assert {**found, **dict.fromkeys(TIMING)} == {**row, **dict.fromkeys(TIMING)}
            compared += 1
    assert compared >= 5
