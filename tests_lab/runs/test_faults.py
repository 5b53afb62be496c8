"""Kill -9 of workers, of a node and of the driver of a real sweep on Ray: every item once, with the same bytes."""

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from attnorm_lab.runs.plan import read_plan
from tests_lab.runs.ray_cluster import run_with_kills, start, two_nodes

KILLS = int(os.environ.get("ATTNORM_TEST_KILLS", "50"))
PLAN = """
command = "analyze"
[grid]
model = ["bundled"]
length = [160, 176, 192, 208, 224, 240, 256, 272, 288, 304]
seed = [0, 1, 2, 3]
[options]
windows = 2
rows = 64
normalizers = ["model", "entmax15"]
"""


def digests(out: Path) -> dict[str, str]:
    """Hash of every table of every item."""
    files = sorted((out / "items").glob("*/*.parquet"))
    return {f"{path.parent.name}/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def table(out: Path) -> pa.Table:
    """The merged table without times, which differ from run to run."""
    return pq.read_table(out / "table.parquet").drop_columns(["seconds"])


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_fifty_kills_a_lost_node_and_two_lost_drivers_lose_nothing(cluster: Any, tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN)
    expected = {item.id for item in read_plan(plan).items}
    assert len(expected) == 40
    assert start("sweep", plan, tmp_path / "calm").wait() == 0

    total, rounds = 0, 0
    while total < KILLS:  # a fast machine finishes 40 items before 50 kills
        rounds += 1
        out = tmp_path / f"killed-{rounds}"
        total += run_with_kills("sweep", plan, out, cluster, KILLS - total).workers
        assert {path.stem for path in (out / "results").iterdir()} == expected
        assert digests(out) == digests(tmp_path / "calm")
        assert table(out).equals(table(tmp_path / "calm"))
        assert rounds < 10
    call = [sys.executable, "-m", "attnorm", "lab", "sweep", "--status", "--out", str(tmp_path / "killed-1"), "--json"]
    states = json.loads(subprocess.run(call, capture_output=True, check=True).stdout)
    assert {each["state"] for each in states} == {"finished"}


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_cluster_whose_head_is_gone_is_an_error_and_finished_items_stay(tmp_path: Path) -> None:
    plan, out = tmp_path / "plan.toml", tmp_path / "out"
    plan.write_text(PLAN.replace("seed = [0, 1, 2, 3]", "seed = [0, 1]"))
    with two_nodes() as lost:
        driver = start("sweep", plan, out, "--on", "ray", "--address", lost.address)
        while len(list(out.glob("results/*.json"))) < 2:
            assert driver.poll() is None
            time.sleep(0.2)
        lost.head_node.kill_all_processes(check_alive=False, allow_graceful=False)
        assert driver.wait(timeout=120) == 2
    assert "lost the Ray cluster" in (tmp_path / "out.log").read_text()
    kept = {path: path.stat().st_mtime_ns for path in out.glob("results/*.json")}
    assert 2 <= len(kept) < 20
    assert start("sweep", plan, out, "--workers", "1").wait() == 0
    assert len(list(out.glob("results/*.json"))) == 20
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
