"""A search finds recipes that other commands accept, continues after any end, and explains wrong plans."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

import attnorm
from attnorm.models.layer_normalizer import read_recipe_file
from attnorm_lab.runs.engines import Outcome, Work, WorkerDied
from attnorm_lab.runs.plan import Item
from attnorm_lab.runs.run import run_item
from attnorm_lab.runs.search import run as searching
from attnorm_lab.runs.search.plan import read_search_plan
from attnorm_lab.runs.search.results import TrialResult, _front
from attnorm_lab.runs.search.run import open_storage, quiet_optuna, run_trial, search, uniform_parameters
from tests.models.tiny import llama
from tests_lab.runs.search.conftest import PLAN
from tests_lab.training.conftest import write_text

optuna = pytest.importorskip("optuna")


class Inline:
    """Runs trials in this process; the driver or a worker ends after some of them."""

    slots = 2
    in_flight: int | None = None

    def __init__(self, work: Work, driver_ends_after: int = 99, worker_dies_at: tuple[int, ...] = ()) -> None:
        self.work, self.left, self.dies = work, driver_ends_after, worker_dies_at
        self.submitted = 0

    def chunks(self, items: Any) -> list[list[Item]]:
        return [[item] for item in items]

    def submit(self, items: list[Item]) -> "Future[list[Outcome]]":
        self.submitted += 1
        if self.submitted > self.left:
            raise KeyboardInterrupt
        future: Future[list[Outcome]] = Future()
        if self.submitted in self.dies:
            future.set_exception(WorkerDied("killed"))
        else:
            threads = torch.get_num_threads()
            future.set_result(self.work([item.as_dict() for item in items]))
            torch.set_num_threads(threads)
        return future

    def close(self, *, kill: bool = False) -> None: ...


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    write_text(tmp_path / "train.txt", 300, seed=1)
    write_text(tmp_path / "valid.txt", 12, seed=2)
    (tmp_path / "plan.toml").write_text(PLAN)
    return tmp_path / "plan.toml"


def inline(monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
    monkeypatch.setattr(searching, "open_engine", lambda on, out, needs, work, **_: Inline(work, **options))


def trials_of(out: Path) -> list[Any]:
    return optuna.load_study(study_name="search", storage=open_storage(out, None)).get_trials()


def test_the_same_command_tries_failed_trials_again(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inline(monkeypatch, worker_dies_at=(1, 3))
    planned, out = read_search_plan(plan), tmp_path / "out"
    first = search(planned, out, retries=0)
    assert [trial.state for trial in first.trials] == ["fail", "complete", "fail", "complete"]
    inline(monkeypatch)
    again = search(planned, out)
    assert [trial.state for trial in again.trials] == ["complete"] * 4
    assert sorted(trial.item for trial in again.trials) == sorted(trial.item for trial in first.trials)
    assert search(planned, out) == again  # nothing is left to try


def test_a_trial_that_diverged_is_not_tried_again(plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan.write_text(PLAN.replace("[0.003, 0.03]", "[1e30, 1e31]"))
    inline(monkeypatch)
    first = search(read_search_plan(plan), tmp_path / "out")
    assert [trial.state for trial in first.trials] == ["fail"] * 4
    assert search(read_search_plan(plan), tmp_path / "out") == first


def test_a_search_ends_with_a_recipe_that_patch_and_training_accept(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inline(monkeypatch)
    result = search(read_search_plan(plan), tmp_path / "out")
    assert len(result.trials) == 4
    assert [trial.uniform for trial in result.trials[:2]] == [True, True]  # what a mixed recipe has to beat
    assert result.best is not None
    assert result.best.number in {trial.number for trial in result.front}
    found = read_recipe_file(tmp_path / "out" / "recipe.toml")
    assert found.layers == result.best.recipe
    assert found.learning_rate == pytest.approx(result.best.learning_rate)
    attnorm.patch(llama(num_hidden_layers=2), tmp_path / "out" / "recipe.toml")
    names = {"index.html", "objectives.svg", "trials.parquet", "table.parquet", "importance.json", "result.json"}
    assert names <= {path.name for path in (tmp_path / "out").iterdir()}
    table = pq.read_table(tmp_path / "out" / "trials.parquet").to_pylist()
    assert [row["trial"] for row in table] == list(range(4))
    for row in table:
        if row["state"] == "complete":
            record = json.loads((tmp_path / "out" / "items" / row["item"] / "training.json").read_text())
            assert row["loss"] == record["result"]["validation"]["model"]["nats_per_token"]
            assert row["loss at 4x"] == record["result"]["validation"]["by_length"][-1]["nats_per_token"]


def test_a_search_continues_without_losing_or_repeating_a_trial(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    for ends in (1, 1):  # the first ends with one trial drawn and not started
        inline(monkeypatch, driver_ends_after=ends)
        with pytest.raises(KeyboardInterrupt):
            search(read_search_plan(plan), out)
    before = {trial.number: trial.params for trial in trials_of(out)}
    assert any(trial.state.name == "RUNNING" for trial in trials_of(out))
    inline(monkeypatch, worker_dies_at=(1,))
    result = search(read_search_plan(plan), out)
    after = {trial.number: trial.params for trial in trials_of(out)}
    assert sorted(after) == list(range(4))
    assert all(after[number] == parameters for number, parameters in before.items() if parameters)
    assert {trial.state for trial in result.trials} <= {"complete", "pruned"}
    assert len(list((out / "results").iterdir())) == 4
    monkeypatch.setattr(searching, "open_engine", lambda *_, **__: pytest.fail("an engine was started"))
    again = search(read_search_plan(plan), out)
    assert again == result
    plan.write_text(PLAN.replace('"entmax"]', '"entmax", "ssmax"]'))
    with pytest.raises(ValueError, match="space"):
        search(read_search_plan(plan), out)
    inline(monkeypatch)
    plan.write_text(PLAN.replace("trials = 4", "trials = 5"))
    assert len(search(read_search_plan(plan), out).trials) == 5  # more trials continue it


def test_a_trial_that_was_half_drawn_is_completed(plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver ends after two of three parameters of an enqueued trial, then while uniform recipes are enqueued."""
    out, parsed = tmp_path / "out", read_search_plan(plan)
    expected = uniform_parameters(parsed)
    searching._open_folder(out, parsed)
    with monkeypatch.context() as context, quiet_optuna():
        context.setattr(searching, "uniform_parameters", lambda plan: expected[:1])
        drawn = searching._open_study(out, parsed, None).ask()
    for name in ("layer 0", "layer 1"):
        drawn.suggest_categorical(name, list(parsed.normalizers))
    inline(monkeypatch)
    search(parsed, out)
    found = trials_of(out)
    assert [trial.number for trial in found] == list(range(4))
    assert [trial.params for trial in found[:2]] == expected
    assert {trial.state.name for trial in found} <= {"COMPLETE", "PRUNED"}


def test_a_trial_that_is_worse_than_others_at_the_same_step_is_pruned(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnorm_lab.runs.search.run.STARTUP_TRIALS", 1)
    out = tmp_path / "out"
    out.mkdir()
    study = optuna.create_study(study_name="search-pruning", storage=open_storage(out, None))
    good = study.ask()
    for step in (2, 4):
        good.report(0.1, step)
    study.tell(good, 0.1)
    found = read_search_plan(plan)
    item = found.item({"0-1": "softmax"}, 0.01, {})
    (out / "sweep.json").write_text("{}")
    values = {**item.values, "search": {"storage": None, "prune": True}}
    outcome = run_item(out, Item(item.id, item.command, values, {}), run_trial)
    assert outcome.pruned
    assert outcome.rows[0]["steps_done"] == 2
    assert not (out / "items" / item.id / "model.safetensors").exists()
    assert run_item(out, Item(item.id, item.command, values, {}), run_trial).found  # and not trained again


def test_the_winners_are_trained_again_with_other_seeds(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inline(monkeypatch)
    engine = lambda on, out, needs, work, **_: Inline(work)  # noqa: E731
    monkeypatch.setattr("attnorm_lab.runs.run.open_engine", engine)
    plan.write_text(PLAN.replace("steps = 4", "steps = 2") + "[confirm]\nseeds = 2\n")
    found = search(read_search_plan(plan), tmp_path / "out").confirmation
    assert found is not None
    assert found["seeds"] == [1, 2]
    loss = found["objectives"]["loss"]
    assert {len(values) for values in loss["values"].values()} == {2}
    mixed, uniform = loss["values"]["mixed"], loss["values"]["uniform"]
    assert loss["difference"] == pytest.approx(sum(mixed) / 2 - sum(uniform) / 2)


def test_the_front_has_what_no_other_trial_beats() -> None:
    def trial(number: int, loss: float, speed: float) -> TrialResult:
        return TrialResult(number, "complete", {}, 0.1, {"loss": loss, "tokens_per_second": speed}, "")

    plan: Any = type("Plan", (), {"directions": ["minimize", "maximize"]})
    front = _front(plan, [trial(0, 1.0, 10), trial(1, 2.0, 20), trial(2, 2.0, 10), trial(3, 1.0, 10)])
    assert [each.number for each in front] == [0, 1, 3]


def test_uniform_recipes_come_first(plan: Path) -> None:
    plan.write_text(PLAN.replace('groups = "each"', 'groups = ["0-1"]\nuniform = 2'))
    found = read_search_plan(plan)
    given = uniform_parameters(found)
    assert [each["layers 0-1"] for each in given] == ["softmax", "entmax"] * 2
    assert found.recipe(given[1]) == {"0-1": "entmax:alpha=1.5"}
    rates = sorted({each["learning_rate"] for each in given})
    assert 0.003 < rates[0] < rates[1] < 0.03


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("trials = 4", "trails = 6", "'trials'"), ("trials = 4", "trials = 0", "trials"),
        ('"loss at 4x"]', '"lost"]', "'loss'"), ('"loss at 4x"]', '"loss"]', "different"),
        ("normalizers = ", "normalisers = ", "'normalizers'"),
        ('"softmax", "entmax"', '"sofmax", "entmax"', "'softmax'"),
        ('"softmax", "entmax"', '"softmax", "entmaxx"', "unknown normalizer 'entmaxx'"),
        ('groups = "each"', 'groups = ["0"]', "2 layers"), ('groups = "each"', 'groups = ["0-2"]', "2 layers"),
        ("learning_rate = [0.003, 0.03]", "learning_rate = [0.03, 0.003]", "learning_rate"),
        ("[space.options.entmax]", "[space.options.ssmax]", "'ssmax'"),
        ("alpha = [1.1, 1.9]", "alpha = [1.1]", "alpha"), ("alpha = [1.1, 1.9]", "beta = [1.1, 1.9]", "beta"),
        ("steps = 4", "steps = 4\nnormalizer = 'ssmax'", "normalizer"), ("steps = 4", "stepps = 4", "'steps'"),
        ('"llama"', '"gpt2"', "gpt2"), ("valid.txt", "gone.txt", "gone.txt"),
    ],
)  # fmt: skip
def test_a_wrong_plan_is_explained(plan: Path, old: str, new: str, named: str) -> None:
    assert old in PLAN
    plan.write_text(PLAN.replace(old, new))
    with pytest.raises(ValueError, match=named) as error:
        read_search_plan(plan)
    assert "plan.toml" in str(error.value)


def test_a_missing_library_and_a_wrong_database_are_named(
    plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="nosuch://"):
        search(read_search_plan(plan), tmp_path / "out", storage="nosuch://x")
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "submitit", None)
        with pytest.raises(ImportError, match=r"attnorm\[lab\]"):
            search(read_search_plan(plan), tmp_path / "new", on="slurm")
    with monkeypatch.context() as patched:
        patched.setattr("attnorm_lab.training.device.find_spec", lambda name: None)
        with pytest.raises(ImportError, match=r"pip install 'attnorm\[lab\]'"):
            search(read_search_plan(plan), tmp_path / "new")
    assert not (tmp_path / "new").exists()
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match=r"attnorm\[lab\]"):
        search(read_search_plan(plan), tmp_path / "out")


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_killed_search_has_every_trial_once(plan: Path, tmp_path: Path) -> None:
    """Kill -9 of the driver and of workers, again and again."""
    import psutil

    plan.write_text(PLAN.replace("trials = 4", "trials = 16").replace("steps = 4", "steps = 60"))
    out, kills = tmp_path / "out", 0
    call = [sys.executable, "-m", "attnorm", "lab", "search", str(plan), "--out", str(out)]
    call += ["--workers", "2", "--retries", "50"]
    driver = subprocess.Popen(call, stdout=subprocess.DEVNULL)
    while driver.poll() is None:
        time.sleep(3)
        children = psutil.Process(driver.pid).children() if driver.poll() is None else []
        finished = len(list((out / "results").glob("*.json"))) if out.is_dir() else 0
        if finished >= kills and kills < 12 and children:
            kills += 1
            if kills % 4 == 0:
                driver.kill()
                driver.wait()
                driver = subprocess.Popen(call, stdout=subprocess.DEVNULL)
            else:
                os.kill(children[-1].pid, signal.SIGKILL)
    assert driver.returncode == 0
    found = trials_of(out)
    drawn = [trial for trial in found if trial.params]
    assert len(drawn) == 16
    assert {trial.state.name for trial in drawn} <= {"COMPLETE", "PRUNED"}
    result = json.loads((out / "result.json").read_text())
    assert [trial["number"] for trial in result["trials"]] == [trial.number for trial in drawn]
    assert kills >= 8
