"""Start local workers of sweeps and searches fast: as forks of one process that has imported the libraries.

A worker of a user is a new interpreter, which takes seconds to import them. One test of tests/sweep runs a plan on such
workers, and so do the nightly tests. The process is multiprocessing's fork server, which itself is a fork of the tests
instead of a new interpreter.
"""

import gc
import importlib
import itertools
import os
import sys
import traceback
from collections.abc import Sequence
from multiprocessing import forkserver, util

import pytest

from attnorm_lab.runs import engines

IMPORTED = [
    "attnorm_lab.runs.run",
    "attnorm.analysis.analyze",
    "attnorm.report.page",
    "attnorm_lab.training.lm",
    "attnorm_lab.training.retrieval.train",
]


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "START_METHOD", "forkserver")
    for name in IMPORTED:
        importlib.import_module(name)
    with monkeypatch.context() as patch:
        patch.setattr(util, "spawnv_passfds", _fork)
        forkserver.ensure_running()


def _fork(executable: bytes, command: Sequence[bytes | str], descriptors: Sequence[int]) -> int:
    """Run the last argument of a command, which is Python code, in a fork that has only these descriptors open."""
    pid = os.fork()
    if pid == 0:
        try:
            gc.freeze()  # a file of the tests, closed in here, would take a descriptor of the same number with it
            edges = [2, *sorted(descriptors), os.sysconf("SC_OPEN_MAX")]
            for before, after in itertools.pairwise(edges):
                os.closerange(before + 1, after)
            exec(command[-1], {})
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(0)
    return pid
