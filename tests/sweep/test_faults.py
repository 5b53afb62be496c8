"""Kill -9 of workers, of a node and of the driver of a real sweep on Ray: every item once, with the same bytes."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from attnorm.sweep.plan import read_plan
from tests.sweep.ray_cluster import run_with_kills, start

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
    call = [sys.executable, "-m", "attnorm", "sweep", "--status", "--out", str(tmp_path / "killed-1"), "--json"]
    states = json.loads(subprocess.run(call, capture_output=True, check=True).stdout)
    assert {each["state"] for each in states} == {"finished"}
