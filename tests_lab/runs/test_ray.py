"""The same plan on a Ray cluster of two nodes: killed workers lose nothing."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from attnorm_lab.runs.engines import open_engine
from attnorm_lab.runs.folder import merged_rows, open_sweep
from attnorm_lab.runs.plan import Resources
from attnorm_lab.runs.run import run_item, run_items, work_in
from tests_lab.runs.conftest import plan_of
from tests_lab.runs.hooks import counted, counted_after_a_kill, most_at_once

pytestmark = pytest.mark.nightly  # a cluster starts in half a minute

WORK = work_in(Path(), "local", 1)  # of engines that start nothing


def test_killed_workers_lose_nothing_and_repeat_nothing(
    small_cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 4
    plan = plan_of(count, memory_gb=0.1)
    open_sweep(tmp_path / "kills", plan)
    engine = open_engine(
        "ray",
        tmp_path / "kills",
        plan.resources,
        work_in(tmp_path / "kills", "ray", 1, counted_after_a_kill),
        address=small_cluster.address,
    )
    assert engine.slots == 2
    found = list(run_items(engine, tmp_path / "kills", plan.items, retries=5))
    assert not [each.error for each in found if each.error]
    assert sorted(each.id for each in found) == sorted(item.id for item in plan.items)
    started, ended = ((tmp_path / "kills" / name).read_text().count("\n") for name in ("started", "ended"))
    assert (started, ended) == (count + 1, count)

    monkeypatch.setenv("ATTNORM_TEST_SECONDS", "0")
    open_sweep(tmp_path / "calm", plan)
    for item in plan.items:
        run_item(tmp_path / "calm", item, counted)
    calm, killed = (_without_time(merged_rows(tmp_path / name, plan.items)) for name in ("calm", "kills"))
    assert killed == calm


def _without_time(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def test_a_named_cluster_runs_no_more_items_at_once_than_workers(small_cluster: Any, tmp_path: Path) -> None:
    plan = plan_of(3)
    open_sweep(tmp_path, plan)
    engine = open_engine(
        "ray", tmp_path, plan.resources, work_in(tmp_path, "ray", 1, counted), address=small_cluster.address, workers=1
    )
    assert engine.slots == 1
    assert len(importlib.import_module("ray").nodes()) >= 2  # the named cluster, which could run two
    found = list(run_items(engine, tmp_path, plan.items, retries=0))
    assert [each.error for each in found] == [""] * 3
    assert most_at_once(tmp_path) == 1


def test_workers_limit_a_named_cluster(small_cluster: Any, tmp_path: Path) -> None:
    engine = open_engine("ray", tmp_path, Resources(), WORK, address=small_cluster.address, workers=1)
    try:
        assert (engine.slots, engine.in_flight) == (1, 1)
        assert len(importlib.import_module("ray").nodes()) >= 2  # the named cluster, which could run two
    finally:
        engine.close()


@pytest.mark.parametrize("resources", [Resources(memory_gb=1e5), Resources(gpus=1), Resources(cpus=64)])
def test_an_item_that_no_node_can_hold_is_refused(small_cluster: Any, tmp_path: Path, resources: Resources) -> None:
    with pytest.raises(ValueError, match="Lower"):
        open_engine("ray", tmp_path, resources, WORK, address=small_cluster.address)
