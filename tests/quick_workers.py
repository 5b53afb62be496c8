"""Local workers of sweeps and searches that start in no time: forks of one process that has imported the libraries.

A worker of a user is a new interpreter, which takes seconds to import them. One test of tests/sweep runs a plan on such
workers, and so do the nightly tests.
"""

import multiprocessing

import pytest

from attnorm.sweep import engines

IMPORTED = [
    "attnorm.sweep.work",
    "attnorm.analysis.analyze",
    "attnorm.report.html.page",
    "attnorm.training.lm",
    "attnorm.training.retrieval.run",
]


@pytest.fixture
def quick_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    multiprocessing.set_forkserver_preload(IMPORTED)
    monkeypatch.setattr(engines, "START_METHOD", "forkserver")
