"""Kill -9 of workers, of a node and of the driver of a real sweep on Ray: every item once, with the same bytes."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from attnorm.sweep.plan import read_plan
from tests.sweep.test_ray import busy_workers

PAUSE = 2.0  # seconds
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


def start(plan: Path, out: Path, *options: str) -> subprocess.Popen[bytes]:
    call = [sys.executable, "-m", "attnorm", "sweep", str(plan), "--out", str(out), *options]
    return subprocess.Popen(call, stdout=subprocess.DEVNULL, stderr=(out.parent / f"{out.name}.log").open("ab"))


def digests(out: Path) -> dict[str, str]:
    """Hash of every table of every item."""
    files = sorted((out / "items").glob("*/*.parquet"))
    return {f"{path.parent.name}/{path.name}": hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_fifty_kills_a_lost_node_and_two_lost_drivers_lose_nothing(cluster: Any, tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN)
    expected = {item.id for item in read_plan(plan).items}
    assert len(expected) == 40
    assert start(plan, tmp_path / "calm").wait() == 0

    total, rounds = 0, 0
    while total < KILLS:  # a fast machine finishes 40 items before 50 kills
        rounds += 1
        total += one_sweep_with_kills(plan, tmp_path / f"killed-{rounds}", cluster, KILLS - total)
        assert {path.stem for path in (tmp_path / f"killed-{rounds}" / "results").iterdir()} == expected
        assert digests(tmp_path / f"killed-{rounds}") == digests(tmp_path / "calm")
        assert rounds < 10
    call = [sys.executable, "-m", "attnorm", "sweep", "--status", "--out", str(tmp_path / "killed-1"), "--json"]
    states = json.loads(subprocess.run(call, capture_output=True, check=True).stdout)
    assert {each["state"] for each in states} == {"finished"}


def one_sweep_with_kills(plan: Path, out: Path, cluster: Any, most: int) -> int:
    """Run a sweep on Ray; kill workers, one node and two drivers meanwhile; return how many workers were killed."""
    options = ("--on", "ray", "--address", cluster.address, "--retries", "60")
    driver = start(plan, out, *options)
    kills, drivers, node_lost = 0, 0, False
    while driver.poll() is None:
        time.sleep(PAUSE)
        # The worker of one node for a while, then that of the other: a worker needs longer than a pause to start.
        nodes = cluster.list_all_nodes()[1:]
        if kills < most and (workers := busy_workers(nodes[kills // 10 % len(nodes)])):
            os.kill(workers[0].pid, signal.SIGKILL)
            kills += 1
        if kills >= 5 * (drivers + 1) and drivers < 2:
            driver.kill()
            driver.wait()
            drivers += 1
            driver = start(plan, out, *options)
        if kills >= 8 and not node_lost:
            cluster.remove_node(nodes[-1], allow_graceful=False)
            cluster.add_node(num_cpus=1)
            node_lost = True
    assert driver.returncode == 0, (out.parent / f"{out.name}.log").read_text()
    assert (drivers, node_lost) == (2, True) or most < 10
    return kills
