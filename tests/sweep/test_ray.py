"""The same plan on a real Ray cluster of two nodes: killed workers and a killed node lose nothing."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from attnorm.sweep.engines import open_engine
from attnorm.sweep.folder import merged_rows, open_sweep
from attnorm.sweep.plan import Resources
from attnorm.sweep.run import run_items
from attnorm.sweep.work import run_item
from tests.sweep.conftest import plan_of
from tests.sweep.hooks import counted, most_at_once
from tests.sweep.ray_cluster import busy_workers

ray = pytest.importorskip("ray")


def kill_some(cluster: Any, kills: int, pause: float, done: threading.Event) -> None:
    while kills and not done.is_set():
        time.sleep(pause)
        if workers := busy_workers(*cluster.list_all_nodes()):
            os.kill(workers[kills % len(workers)].pid, signal.SIGKILL)
            kills -= 1


def test_killed_workers_lose_nothing_and_repeat_nothing(
    cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 12
    plan = plan_of(count, memory_gb=0.1)
    open_sweep(tmp_path / "kills", plan)
    engine = open_engine("ray", tmp_path / "kills", plan.resources, address=cluster.address, hook=counted)
    assert engine.slots == 2
    done = threading.Event()
    killer = threading.Thread(target=kill_some, args=(cluster, 3, 0.7, done))
    killer.start()
    try:
        found = list(run_items(engine, tmp_path / "kills", plan.items, retries=5))
    finally:
        done.set()
        killer.join()
    assert not [each.error for each in found if each.error]
    assert sorted(each.id for each in found) == sorted(item.id for item in plan.items)
    assert (tmp_path / "kills" / "ended").read_text().count("\n") == count

    monkeypatch.setenv("ATTNORM_TEST_SECONDS", "0")
    open_sweep(tmp_path / "calm", plan)
    for item in plan.items:
        run_item(tmp_path / "calm", item, counted)
    calm, killed = (_without_time(merged_rows(tmp_path / name, plan.items)) for name in ("calm", "kills"))
    assert killed == calm


def _without_time(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def test_a_named_cluster_runs_no_more_items_at_once_than_workers(cluster: Any, tmp_path: Path) -> None:
    plan = plan_of(6)
    open_sweep(tmp_path, plan)
    engine = open_engine("ray", tmp_path, plan.resources, address=cluster.address, workers=1, hook=counted)
    assert engine.slots == 1
    assert len(ray.nodes()) >= 3  # the named cluster, which could run two
    found = list(run_items(engine, tmp_path, plan.items, retries=0))
    assert [each.error for each in found] == [""] * 6
    assert most_at_once(tmp_path) == 1


def test_an_item_that_no_node_can_hold_is_refused(cluster: Any, tmp_path: Path) -> None:
    for resources in (Resources(memory_gb=1e5), Resources(gpus=1), Resources(cpus=64)):
        with pytest.raises(ValueError, match="Lower"):
            open_engine("ray", tmp_path, resources, address=cluster.address)
