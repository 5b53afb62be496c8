"""Plans for tests, and a Ray cluster of two nodes on this machine, real or not."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attnorm_lab.runs.plan import Plan, Resources
from tests.forked_workers import forked_workers as forked_workers
from tests_lab.runs.forked_ray import forked_cluster
from tests_lab.runs.hooks import items
from tests_lab.runs.ray_cluster import two_nodes


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
    with two_nodes() as made:
        yield made


@pytest.fixture(scope="module", params=["forks", pytest.param("ray", marks=pytest.mark.nightly)])
def small_cluster(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A cluster of forks on every commit, of Ray itself at night."""
    with forked_cluster() if request.param == "forks" else two_nodes(head=False) as made:
        yield made
