"""A sweep on this machine: every item once, also after kills, and errors stay with their item."""

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from attnorm.cli import app
from attnorm.run_folder import lock
from attnorm_lab.runs import engines
from attnorm_lab.runs import run as running
from attnorm_lab.runs.engines import ClusterLost, LocalEngine, Outcome, Work, WorkerDied, processes_that_fit
from attnorm_lab.runs.folder import item_folder, lock_of, open_sweep, result_of, states
from attnorm_lab.runs.plan import Item, Resources, read_plan
from attnorm_lab.runs.run import merge, run_item, run_items, sweep, work_in
from tests_lab.runs.conftest import plan_of
from tests_lab.runs.hooks import analyze_and_count_loads, counted, counted_after_a_kill, items

WORK = work_in(Path(), "local", 1)  # of engines that start nothing

RETRIEVAL = """
command = "train retrieval"
[grid]
normalizer = ["softmax", "ssmax"]
seed = [0, 1]
[options]
steps = 4
batch = 4
width = 8
sizes = [16]
sets = 4
"""


class Inline:
    """An engine that runs items in this process; `dies` says how often the worker of a seed is lost."""

    slots = 1
    in_flight: int | None = None

    def __init__(self, out: Path, dies: dict[int, int] | None = None) -> None:
        self.out, self.dies, self.started = out, dies or {}, []

    def chunks(self, wanted: Any) -> list[list[Item]]:
        return [[item] for item in wanted]

    def submit(self, chunk: list[Item]) -> "Future[list[Outcome]]":
        future: Future[list[Outcome]] = Future()
        seed = chunk[0].values["seed"]
        self.started.append(seed)
        if self.dies.get(seed, 0):
            self.dies[seed] -= 1
            future.set_exception(WorkerDied("killed"))
        else:
            future.set_result([run_item(self.out, item, counted) for item in chunk])
        return future

    def close(self, *, kill: bool = False) -> None: ...


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNORM_TEST_SECONDS", "0")


def outcomes(engine: Any, out: Path, count: int, bad: tuple[int, ...] = (), retries: int = 1) -> dict[str, Outcome]:
    plan = plan_of(count, bad)
    open_sweep(out, plan)
    return by_id(run_items(engine, out, plan.items, retries))


def by_id(found: Iterable[Outcome]) -> dict[str, Outcome]:
    return {each.id: each for each in sorted(found, key=lambda each: each.id)}


def test_a_plan_runs_on_this_machine_and_is_merged(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(RETRIEVAL)
    call = ["lab", "sweep", str(tmp_path / "plan.toml"), "--out", str(tmp_path / "out"), "--workers", "1"]
    result = CliRunner().invoke(app, call)
    assert result.exit_code == 0, result.output
    assert "4 finished" in result.stdout
    table = pq.read_table(tmp_path / "out" / "table.parquet").to_pylist()
    assert [(row["normalizer"], row["seed"]) for row in table] == [
        ("softmax", 0), ("softmax", 1), ("ssmax", 0), ("ssmax", 1),
    ]  # fmt: skip
    assert all(0 <= row["accuracy"] <= 1 for row in table)
    page = (tmp_path / "out" / "index.html").read_text()
    assert all(row["item"] in page for row in table)
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "results").iterdir()}
    started = time.monotonic()
    again = CliRunner().invoke(app, [*call, "--json"])
    assert [each["state"] for each in json.loads(again.stdout)] == ["finished"] * 4
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert time.monotonic() - started < 10  # no worker was started
    status = CliRunner().invoke(app, ["lab", "sweep", "--status", "--out", str(tmp_path / "out"), "--json"])
    assert json.loads(status.stdout)[0]["values"] == {"normalizer": "softmax", "seed": 0}


def test_an_item_that_fails_is_reported_and_stops_no_other(tmp_path: Path) -> None:
    found = outcomes(Inline(tmp_path), tmp_path, 4, bad=(2,))
    assert [bool(each.error) for each in found.values()] == [False, False, True, False]
    result = merge(tmp_path)
    assert result.counts == {"finished": 3, "failed": 1}
    assert "seed 2 is bad" in next(each.error for each in result.states if each.state == "failed")
    assert "seed 2 is bad" in (tmp_path / "index.html").read_text()


def test_a_failed_item_runs_again_with_the_next_command(tmp_path: Path) -> None:
    outcomes(Inline(tmp_path, dies={1: 9}), tmp_path, 2, retries=0)
    assert merge(tmp_path).counts == {"finished": 1, "failed": 1}
    engine = Inline(tmp_path)
    found = outcomes(engine, tmp_path, 2)
    assert found[items(2)[0].id].found
    assert not found[items(2)[1].id].error
    assert merge(tmp_path).counts == {"finished": 2}


def test_an_item_starts_again_after_its_worker_died_but_not_forever(tmp_path: Path) -> None:
    engine = Inline(tmp_path, dies={0: 2, 1: 99})
    found = outcomes(engine, tmp_path, 2, retries=2)
    assert (engine.started.count(0), engine.started.count(1)) == (3, 3)
    assert not found[items(2)[0].id].error
    assert "memory_gb" in found[items(2)[1].id].error
    assert merge(tmp_path).counts == {"finished": 1, "failed": 1}


def test_a_finished_item_of_a_lost_chunk_is_kept(tmp_path: Path) -> None:
    class Chunk(Inline):
        def chunks(self, wanted: Any) -> list[list[Item]]:
            return [list(wanted)]

        def submit(self, chunk: list[Item]) -> "Future[list[Outcome]]":
            if len(chunk) > 1:  # two of three are done when the job ends
                for item in chunk[:2]:
                    run_item(self.out, item, counted)
                future: Future[list[Outcome]] = Future()
                future.set_exception(WorkerDied("time limit"))
                return future
            return super().submit(chunk)

    assert not any(each.error for each in outcomes(Chunk(tmp_path), tmp_path, 3).values())
    assert (tmp_path / "ended").read_text().count("\n") == 3


def test_a_killed_process_takes_its_item_only(tmp_path: Path) -> None:
    plan = plan_of(4)
    open_sweep(tmp_path, plan)
    engine = LocalEngine(plan.resources, work_in(tmp_path, "local", 1, counted_after_a_kill), 2)
    found = list(run_items(engine, tmp_path, plan.items, retries=3))
    assert not [each.error for each in found if each.error]
    ended = [line.split()[0] for line in (tmp_path / "ended").read_text().splitlines()]
    assert sorted(ended) == sorted(map(str, range(4)))
    assert len((tmp_path / "started").read_text().splitlines()) == 5


DRIVER = """
import os, time
from attnorm_lab.runs import engines
from attnorm_lab.runs.plan import Resources
engine = engines.LocalEngine(Resources(), len, 1)
print(engine._pool().submit(os.getpid).result(), flush=True)
time.sleep(600)
"""


def test_a_worker_ends_with_its_driver(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True) as driver:
        worker = psutil.Process(int(driver.stdout.readline()))
        driver.kill()
        assert psutil.wait_procs([worker], timeout=120)[1] == []


def test_two_processes_never_run_one_item_twice(tmp_path: Path) -> None:
    open_sweep(tmp_path, plan_of(1))
    (item,) = items(1)
    threads = [threading.Thread(target=run_item, args=(tmp_path, item, counted)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "started").read_text() == "0\n"
    with lock(lock_of(tmp_path, "f" * 16)):
        waiting = Item("f" * 16, "train retrieval", {"seed": 5}, {})
        assert states(tmp_path, [waiting])[0].state == "running"


def test_another_plan_in_the_folder_is_refused_unless_it_extends(tmp_path: Path) -> None:
    outcomes(Inline(tmp_path), tmp_path, 2)
    with pytest.raises(ValueError, match=r"grid\.seed") as error:
        open_sweep(tmp_path, plan_of(3))
    assert "--extend" in str(error.value)
    open_sweep(tmp_path, plan_of(3), extend=True)
    engine = Inline(tmp_path)
    found = by_id(run_items(engine, tmp_path, plan_of(3).items, 0))
    assert [each.found for each in found.values()] == [True, True, False]


def test_a_changed_text_in_the_plan_is_another_plan(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n")
    path = tmp_path / "plan.toml"
    path.write_text("command='analyze'\n[grid]\nmodel=['bundled']\ntext=['a.txt']")
    open_sweep(tmp_path / "out", read_plan(path))
    (tmp_path / "a.txt").write_text("two\n")
    with pytest.raises(ValueError, match="another content"):
        open_sweep(tmp_path / "out", read_plan(path))


def test_a_full_disk_and_a_lack_of_memory_are_errors_of_the_item(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(2)
    open_sweep(tmp_path, plan)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "results")

    def huge(*_: Any) -> Any:
        torch.empty(2**60, dtype=torch.uint8, device="cpu")

    monkeypatch.setattr(running, "write_failure", full)  # not even the error can be written
    monkeypatch.setattr(running, "write_result", full)
    assert "no space left" in run_item(tmp_path, plan.items[0], counted).error
    assert "out of memory" in run_item(tmp_path, plan.items[1], huge).error
    monkeypatch.undo()
    assert not run_item(tmp_path, plan.items[0], counted).error


def test_a_worker_that_does_not_see_the_folder_says_so(tmp_path: Path) -> None:
    assert "share" in run_item(tmp_path / "elsewhere", items(1)[0], counted).error


def test_a_damaged_result_counts_as_missing(tmp_path: Path) -> None:
    outcomes(Inline(tmp_path), tmp_path, 1)
    key = items(1)[0].id
    (tmp_path / "results" / f"{key}.json").write_text("{")
    assert result_of(tmp_path, key) is None
    assert not outcomes(Inline(tmp_path), tmp_path, 1)[key].found


def test_items_that_fit_nowhere_are_refused() -> None:
    assert processes_that_fit(Resources()) >= 1
    with pytest.raises(ValueError, match="memory_gb"):
        processes_that_fit(Resources(memory_gb=1e6))
    with pytest.raises(ValueError, match="cpus"):
        processes_that_fit(Resources(cpus=1e6))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "plan"),
        (["gone.toml"], r"gone\.toml"),
        (["plan.toml", "--on", "cloud"], "'cloud'"),
        (["--status", "--out", "nothing"], r"sweep\.json"),
        (["plan.toml", "--on", "ray", "--address", "127.0.0.1:9"], "127.0.0.1:9"),
        (["plan.toml", "--out", "."], "no sweep"),
    ],
)
def test_wrong_usage_exits_with_2(
    arguments: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "ray" in arguments:
        pytest.importorskip("ray")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.toml").write_text(RETRIEVAL)
    result = CliRunner().invoke(app, ["lab", "sweep", *arguments])
    assert result.exit_code == 2
    output = result.output.replace("│", " ")
    assert re.search(named, " ".join(output.split())), output
    assert not (tmp_path / "sweep" / "failures").exists()


@pytest.mark.parametrize(("engine", "library"), [("ray", "ray"), ("slurm", "submitit")])
def test_a_missing_library_is_named(engine: str, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=rf"{library}.*attnorm\[lab\]"):
        engines.open_engine(engine, tmp_path, Resources(), WORK)
    (tmp_path / "plan.toml").write_text(RETRIEVAL)
    arguments = ["lab", "sweep", str(tmp_path / "plan.toml"), "--on", engine, "--out", str(tmp_path / "out")]
    assert CliRunner().invoke(app, arguments).exit_code == 2
    assert not (tmp_path / "out").exists(), "a folder belongs to its plan from then on"


@pytest.mark.parametrize(("cause", "named"), [("AuthenticationError: no token", "RAY_AUTH_TOKEN"), ("x", "--head")])
def test_a_cluster_that_refuses_says_why(cause: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ray:
        def init(self, *_: Any, **__: Any) -> None:
            raise ConnectionError("Failed to connect") from RuntimeError(cause)

    monkeypatch.setattr(engines, "_check_reachable", lambda address: None)
    with pytest.raises(ClusterLost, match=named):
        engines._join_cluster(Ray(), "here:1", None)


@pytest.mark.parametrize(
    ("address", "from_environment", "joined"),
    [("head:6379", "", "head:6379"), (None, "other:6379", "other:6379"), ("auto", "", "auto"), (None, "", "auto"),
     (None, "", "local"), ("local", "", "local")],
)  # fmt: skip
@pytest.mark.parametrize("workers", [None, 4])
def test_a_cluster_is_joined_whatever_the_number_of_workers_and_without_one_ray_starts_here(
    address: str | None, from_environment: str, joined: str, workers: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int | None]] = []

    class Ray:
        def init(self, named: str, num_cpus: int | None = None, **_: Any) -> None:
            calls.append((named, num_cpus))
            if named == "auto" and joined == "local":
                raise ConnectionError("no cluster")

    monkeypatch.setattr(engines, "_check_reachable", lambda address: None)
    monkeypatch.setenv("RAY_ADDRESS", from_environment)
    engines._join_cluster(Ray(), address, workers)
    assert calls[-1] == (joined, workers if joined == "local" else None)


def test_a_cluster_lost_in_mid_run_is_an_error_and_finished_items_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray answers for the first item; then its head is gone and it says nothing more."""

    class Task:
        def options(self, **_: Any) -> "Task":
            return self

        def remote(self, work: Work, chunk: list[dict[str, Any]]) -> Any:
            future: Future[list[Outcome]] = Future()
            if chunk[0]["values"]["seed"] == 0:
                future.set_result(work(chunk))
            return SimpleNamespace(future=lambda: future)

    ray = SimpleNamespace(
        is_initialized=lambda: True, nodes=lambda: [{"Alive": True, "Resources": {"CPU": 2.0}}],
        remote=lambda **_: lambda call: Task(),
        get_runtime_context=lambda: SimpleNamespace(gcs_address="127.0.0.1:9"),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(engines, "WATCH_SECONDS", 0.01)
    plan = plan_of(3)
    open_sweep(tmp_path, plan)
    engine = engines.open_engine("ray", tmp_path, plan.resources, work_in(tmp_path, "ray", 1, counted))
    with pytest.raises(ClusterLost, match="resume"):
        list(run_items(engine, tmp_path, plan.items, retries=1))
    assert [each.state for each in states(tmp_path, plan.items)] == ["finished", "waiting", "waiting"]
    with pytest.raises(ClusterLost):  # also what is submitted afterwards
        engine.submit([plan.items[1]]).result(timeout=10)
    assert [each.found for each in outcomes(Inline(tmp_path), tmp_path, 3).values()] == [True, False, False]


@pytest.mark.parametrize("cluster", ["debug", pytest.param("local", marks=pytest.mark.nightly)])
def test_slurm_runs_a_plan_through_submitit(cluster: str, tmp_path: Path) -> None:
    """Its jobs run in this process on every commit, in one of their own at night."""
    pytest.importorskip("submitit")
    plan = plan_of(3)
    open_sweep(tmp_path, plan)
    engine = engines.open_engine(
        "slurm", tmp_path, plan.resources, work_in(tmp_path, "slurm", 1, counted), workers=1, slurm={"cluster": cluster}
    )
    assert [len(chunk) for chunk in engine.chunks(plan.items)] == [3]
    assert not [each.error for each in run_items(engine, tmp_path, plan.items, 0) if each.error]
    processes = {line.split()[1] for line in (tmp_path / "ended").read_text().splitlines()}
    assert len(processes) == 1  # one job, one process: a model is loaded once
    with pytest.raises(ValueError, match="'minutes'"):
        engines.open_engine("slurm", tmp_path, plan.resources, WORK, slurm={"minute": 5, "cluster": "local"})
    with pytest.raises(ClusterLost, match="sbatch"):
        engines.open_engine("slurm", tmp_path, plan.resources, WORK)


def test_analyze_items_load_their_model_once_per_worker(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(
        "command='analyze'\n[grid]\nmodel=['bundled']\ndtype=['float32', 'float64']\nlength=[16, 24]\n"
        "[options]\nwindows=1\nrows=4\nread_keys=0"
    )
    plan = read_plan(path)
    open_sweep(tmp_path / "out", plan)
    engine = LocalEngine(plan.resources, work_in(tmp_path / "out", "local", 1, analyze_and_count_loads), 1)
    found = list(run_items(engine, tmp_path / "out", plan.items, retries=0))
    assert [each.error for each in found] == [""] * 4
    results = [result_of(tmp_path / "out", item.id) for item in plan.items]
    assert [result["models_loaded"] for result in results if result] == [1, 0, 1, 0]  # two models, two items of each
    (worker,) = {result["process"] for result in results if result}
    assert (tmp_path / "out" / "loads").read_text() == f"{worker}\n" * 2
    assert {row["keys"] for each in found for row in each.rows} == {16, 24}
    run = item_folder(tmp_path / "out", plan.items[0].id)
    assert (run / "report.html").is_file()
    assert json.loads((run / "manifest.json").read_text())["model"]["name"] == "bundled"


def test_nothing_runs_if_all_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes(Inline(tmp_path), tmp_path, 2)
    refuse: Callable[..., Any] = lambda *_, **__: pytest.fail("an engine was started")  # noqa: E731
    monkeypatch.setattr("attnorm_lab.runs.run.open_engine", refuse)
    assert sweep(plan_of(2), tmp_path).counts == {"finished": 2}
