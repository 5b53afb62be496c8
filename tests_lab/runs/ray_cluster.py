"""A real Ray cluster of two nodes on this machine, and kill -9 of its workers, of a node and of the driver."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
ITEMS = ("ray::seed", "ray::model", "ray::trial")  # how processes that run an item are called
PAUSE = 2.0  # seconds
DRIVERS = 2
KILLS_PER_DRIVER = 5
KILLS_BEFORE_NODE = 8


@contextmanager
def two_nodes(*, head: bool = True) -> Iterator[Any]:
    """Two Ray nodes with one CPU each, and a head without any, or one of the two is the head: it starts sooner."""
    pytest.importorskip("ray")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (before, str(ROOT))))  # workers import tests_lab.runs.hooks
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": int(not head), "include_dashboard": False})
    try:
        for _ in range(2 if head else 1):
            made.add_node(num_cpus=1)
        yield made
    finally:
        made.shutdown()
        os.environ["PYTHONPATH"] = before


def busy_workers(*nodes: Any) -> list[psutil.Process]:
    """Processes of these nodes that run an item."""
    found = []
    for node in nodes:
        for started in node.all_processes.get("raylet", ()):
            if started.process.poll() is None:
                children = psutil.Process(started.process.pid).children()
                found += [each for each in children if _title(each).startswith(ITEMS)]
    return found


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def start(command: str, plan: Path, out: Path, *options: str) -> subprocess.Popen[bytes]:
    """Start `attnorm lab sweep` or `attnorm lab search`; its errors are appended to OUT.log."""
    call = [sys.executable, "-m", "attnorm", command, str(plan), "--out", str(out), *options]
    return subprocess.Popen(call, stdout=subprocess.DEVNULL, stderr=(out.parent / f"{out.name}.log").open("ab"))


@dataclass(frozen=True)
class Kills:
    workers: int
    drivers: int
    nodes: int


def run_with_kills(command: str, plan: Path, out: Path, cluster: Any, most: int) -> Kills:
    """Run a command on Ray to its end; kill at most `most` workers, one node and two drivers meanwhile."""
    options = ("--on", "ray", "--address", cluster.address, "--retries", "60")
    driver = start(command, plan, out, *options)
    kills, drivers, lost = 0, 0, 0
    while driver.poll() is None:
        time.sleep(PAUSE)
        # The worker of one node for a while, then that of the other: a worker needs longer than a pause to start.
        nodes = cluster.list_all_nodes()[1:]
        if kills < most and (workers := busy_workers(nodes[kills // 10 % len(nodes)])):
            os.kill(workers[0].pid, signal.SIGKILL)
            kills += 1
        if kills >= KILLS_PER_DRIVER * (drivers + 1) and drivers < DRIVERS:
            driver.kill()
            driver.wait()
            drivers += 1
            driver = start(command, plan, out, *options)
        if kills >= KILLS_BEFORE_NODE and not lost:
            cluster.remove_node(nodes[-1], allow_graceful=False)
            cluster.add_node(num_cpus=1)
            lost += 1
    assert driver.returncode == 0, (out.parent / f"{out.name}.log").read_text()
    assert (drivers, lost) == (DRIVERS, 1) or kills < KILLS_PER_DRIVER * DRIVERS
    return Kills(kills, drivers, lost)
