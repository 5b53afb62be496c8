"""Plans for tests, and a Ray cluster of two nodes on this machine."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from attnorm_lab.runs.plan import Plan, Resources
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


@pytest.fixture(scope="module")
def small_cluster() -> Iterator[Any]:
    with two_nodes(head=False) as made:
        yield made
