"""Fixtures of every test: one thread, fixed random seeds, run-time checks of annotated shapes.

A plugin that tests/conftest.py registers in each process that runs tests.
"""

import base64
import gc
import importlib
import os
import platform
import random
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hypothesis
import jaxtyping
import numpy as np
import pytest
import setuptools  # noqa: F401  # torch.compile needs it, and it must come before anyone's distutils
import torch
from hypothesis.internal.conjecture import providers
from matplotlib.figure import Figure

from tests import shape_checks
from tests.shape_checks import check_shapes_in

ROOT = Path(__file__).resolve().parents[1]

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run, slowly, on a CPU
    if find_spec("triton") is not None:
        importlib.import_module("triton.language")  # reads the variable once; a test may change the environment

_savefig = Figure.savefig
_coarse = True
WHITE_PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGP4DwABAQEAsTj2FAAAAABJRU5ErkJggg=="
)


def _savefig_coarsely(figure: Figure, *given: Any, **options: Any) -> None:
    """Few pixels, not packed as tightly as possible, and one if the figure was drawn as SVG before; no PDF at all.

    Pixels and the fonts of a PDF take longer than to draw.
    """
    path = Path(str(given[0]))
    if _coarse and path.suffix == ".pdf":
        path.write_bytes(b"%PDF-1.4")
        return
    if _coarse and path.suffix == ".png" and getattr(figure, "drawn_as_svg", None) == path.with_suffix(""):
        path.write_bytes(WHITE_PIXEL)
        return
    if _coarse and "dpi" in options:
        options = {**options, "dpi": 40, "pil_kwargs": None}
    _savefig(figure, *given, **options)
    if path.suffix == ".svg":
        figure.drawn_as_svg = path.with_suffix("")  # type: ignore[attr-defined]


Figure.savefig = _savefig_coarsely  # type: ignore[method-assign]
torch.set_num_threads(1)
os.fsync = lambda descriptor: None  # an analysis would wait for the disk 100 times

hypothesis.settings.register_profile("fixed", deadline=None, max_examples=40, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=500, print_blob=True)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "fixed")
hypothesis.settings.load_profile(PROFILE)
if PROFILE == "fixed":
    # Or it reads the source of every module for constants to try, for seconds, and examples depend on what is imported.
    providers._get_local_constants = lambda: providers._local_constants

# On ARM oneDNN prepares each product of matrices anew, which takes 0.1 ms, longer than to multiply small ones. Tests of
# an installed package and the nightly run of all tests compute as users do.
EVERYWHERE = os.environ.get("ATTNORM_CHECK_ANNOTATIONS") == "everywhere"
ONE_DNN = EVERYWHERE or platform.machine() not in ("aarch64", "arm64")
torch.backends.mkldnn.enabled = ONE_DNN

# Shape annotations are dense in theory: its own tests check them. The nightly run checks every call of every module
# that has some, in all tests. mypy checks the other annotations; tests pass stand-ins with only the attributes in use.
SOURCE = ROOT / "src"
CHECKED = ["attnorm.theory"]
CHECKING = (ROOT / "tests" / "theory", ROOT / "tests" / "test_shape_checks.py")
if EVERYWHERE:
    CHECKING = (ROOT,)
    shape_checks.most_calls = float("inf")
    with_shapes = (path for path in SOURCE.rglob("*.py") if "from jaxtyping" in path.read_text(encoding="utf-8"))
    CHECKED = [".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in sorted(with_shapes)]
check_shapes_in(*CHECKED)

from attnorm.engines.execution import known_calls  # noqa: E402  # after the checks are in place
from attnorm.normalizers import registry  # noqa: E402
from tests.fast_interpreter import speed_up_interpreter  # noqa: E402

if not torch.cuda.is_available():
    speed_up_interpreter()

# Fixtures of a module or a session, which many tests share, are not checked on every commit.
DISABLED = jaxtyping.config.jaxtyping_disable
jaxtyping.config.update("jaxtyping_disable", DISABLED or ROOT not in CHECKING)


@pytest.fixture(autouse=True)
def _global_fixtures(request: pytest.FixtureRequest) -> Iterator[None]:
    """Seeds, registrations and known calls that end with the test, checks, pictures.

    One fixture, since each costs 0.1 ms per test.
    """
    global _coarse
    _seed()
    before = jaxtyping.config.jaxtyping_disable
    shape_checks.start_counting()
    checking = any(request.path.is_relative_to(path) for path in CHECKING)
    as_installed = request.node.get_closest_marker("as_installed") is not None
    jaxtyping.config.update("jaxtyping_disable", DISABLED or not checking or as_installed)
    _coarse = not as_installed
    torch.backends.mkldnn.enabled = as_installed or ONE_DNN
    registered = registry._registered
    registry._registered = dict(registered)
    known_calls.forget()
    yield
    registry._registered = registered
    torch.backends.mkldnn.enabled = ONE_DNN
    jaxtyping.config.update("jaxtyping_disable", before)


MODULES = 100  # imported since, whose objects are worth a look
_looked_at = 0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """After a file that imported much, take its objects away from the garbage collector.

    A Trainer collects garbage by itself, as benchmarks and experiments do: 0.3 s each time with 400,000 objects.
    """
    global _looked_at
    yield
    if (nextitem is None or nextitem.path != item.path) and len(sys.modules) > _looked_at + MODULES:
        gc.collect()
        gc.freeze()
        _looked_at = len(sys.modules)


def _seed() -> None:
    random.seed(0)
    np.random.seed(0)
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)  # torch.manual_seed formats a stack trace per absent device: 4 ms a test
