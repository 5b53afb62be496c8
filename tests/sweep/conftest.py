"""Plans for tests, and a real Ray cluster of two nodes on this machine."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attnorm.sweep.plan import Plan, Resources
from tests.sweep.hooks import items

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def plan_file(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "plan.toml"
        path.write_text(text)
        return path

    return write


def plan_of(count: int, bad: tuple[int, ...] = (), **resources: Any) -> Plan:
    planned = items(count, bad)
    content = {"grid": {"seed": list(range(count))}, "options": {}}
    return Plan("train retrieval", planned, Resources(**resources), {}, content)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Two Ray nodes with one CPU each, and a head without any."""
    pytest.importorskip("ray")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (before, str(ROOT))))  # workers import tests.sweep.hooks
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    for _ in range(2):
        made.add_node(num_cpus=1)
    yield made
    made.shutdown()
    os.environ["PYTHONPATH"] = before
