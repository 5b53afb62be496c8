"""The ground rules of the test run: one thread per worker, fixed seeds, shapes checked where they are annotated."""

import gc
import os

# Read once, when torch starts: two workers on two cores must not fight over them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

import pkgutil
import random
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jaxtyping
import numpy as np
import pytest
import setuptools  # noqa: F401  # torch.compile needs it, and it must come before anyone's distutils
import torch

from tests import shape_checks
from tests.covering import mark_further_cases
from tests.real_model import smollm2 as smollm2
from tests.shape_checks import check_shapes_in

ROOT = Path(__file__).resolve().parents[1]

gc.disable()  # until the tests are collected: it took a fifth of that time and found nothing

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is first imported: kernels run, slowly, on a CPU

torch.set_num_threads(1)
os.fsync = lambda descriptor: None  # an analysis would wait for the disk 100 times

hypothesis.settings.register_profile("fixed", deadline=None, max_examples=40, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=500, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

# Shape annotations are dense in theory: its own tests check them. The nightly run checks every call and the annotations
# of every other room as well, in all tests, except the kernels: Triton reads the source of a kernel and would find the
# wrapper.
CHECKED = {"theory"}
CHECKING = (ROOT / "tests" / "theory", ROOT / "tests" / "test_shape_checks.py")
if os.environ.get("ATTNORM_CHECK_ANNOTATIONS") == "everywhere":
    CHECKING = (ROOT,)
    shape_checks.most_calls = float("inf")
    CHECKED = {room.name for room in pkgutil.iter_modules([str(ROOT / "src" / "attnorm")])} - {"kernels"}
check_shapes_in(*(f"attnorm.{room}" for room in sorted(CHECKED)))

from attnorm.normalizers import registry  # noqa: E402  # after the checks are in place


@pytest.hookimpl(tryfirst=True)  # the markers must be there before -m is applied
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out nightly tests, and further cases of a test, unless the -m expression names them."""
    mark_further_cases(items)
    for name in ("nightly", "further_case"):
        left_out = [item for item in items if item.get_closest_marker(name)]
        if left_out and name not in config.option.markexpr:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if not item.get_closest_marker(name)]


def pytest_collection_finish() -> None:
    """From here on the garbage collector looks at what the tests make, not at the million objects before them."""
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)  # by default it takes a fiftieth of the time, half of it in hypothesis
    gc.enable()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _ground_rules(request: pytest.FixtureRequest) -> Iterator[None]:
    """Seeds, registrations that end with the test, shape checks: one fixture, since each costs 0.1 ms per test."""
    _seed()
    before = jaxtyping.config.jaxtyping_disable
    shape_checks.start_counting()
    checking = any(request.path.is_relative_to(path) for path in CHECKING)
    plain = not checking or request.node.get_closest_marker("as_installed") is not None
    jaxtyping.config.update("jaxtyping_disable", before or plain)
    registered = registry._registered
    registry._registered = dict(registered)
    yield
    registry._registered = registered
    jaxtyping.config.update("jaxtyping_disable", before)


def _seed() -> None:
    random.seed(0)
    np.random.seed(0)
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)  # torch.manual_seed formats a stack trace per absent device: 4 ms a test


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared texts and tokenizers, which are not part of the package."""
    folder = Path(os.environ.get("ATTNORM_SHARED", ROOT.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"no shared data at {folder}; set ATTNORM_SHARED to the folder that holds it")
    return folder
