"""Which tests run, and the ground rules for the processes that run them."""

import atexit
import gc
import importlib
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.case_selection import mark_further_cases
from tests.clean_interpreter import start_server
from tests.parallel_rewriting import rewrite_share
from tests.real_model import smollm2 as smollm2

ROOT = Path(__file__).resolve().parent

# Read once, when torch starts: two workers on two cores must not fight over them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
# Read once, when Triton starts: the conftest.py of a folder named on the command line may import it first.
DRIVERS = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
if shutil.which("nvidia-smi") is None and not any(Path(driver).exists() for driver in DRIVERS):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run, slowly, on a CPU

gc.disable()  # until the tests are collected: it took a fifth of that time and found nothing

# The process that hands tests to workers runs none. In others the package is imported with checks of shapes, before the
# conftest.py of a folder named on the command line imports it without.
if "PYTEST_XDIST_WORKER" in os.environ or not any(given.startswith(("-n", "--numprocesses")) for given in sys.argv):
    start_server()
    importlib.import_module("tests.global_fixtures")


def pytest_configure(config: pytest.Config) -> None:
    """The process that hands tests to workers runs none: without torch it starts them two seconds earlier.

    A worker leaves without freeing its million objects, which takes three seconds.
    """
    worker = hasattr(config, "workerinput")
    if worker:
        atexit.register(os._exit, 0)
        _send_fewer_reports(config)
    else:
        atexit.register(gc.unfreeze)  # or nanobind reports what was never freed
    if worker or not config.getoption("numprocesses", None):
        config.pluginmanager.register(importlib.import_module("tests.global_fixtures"), "global_fixtures")


def _send_fewer_reports(config: pytest.Config) -> None:
    """A worker keeps what nobody reads: starts of tests, setups and teardowns that passed, too short for --durations.

    They are three of six messages, and half of the time that pytest-xdist takes.
    """
    plugins = config.pluginmanager
    (sender,) = (one for one in plugins.get_plugins() if type(one).__name__ == "WorkerInteractor")
    send = sender.pytest_runtest_logreport

    def pytest_runtest_logreport(report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed or report.duration > 0.005:
            send(report)

    plugins.unregister(sender)
    sender.pytest_runtest_logreport = pytest_runtest_logreport
    sender.pytest_runtest_logstart = lambda nodeid, location: None
    plugins.register(sender)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    config = session.config
    if hasattr(config, "workerinput") and config.args == config.getini("testpaths"):
        number, workers = int(config.workerinput["workerid"].removeprefix("gw")), config.workerinput["workercount"]
        rewrite_share(config, sorted((ROOT / "tests").rglob("test_*.py")), number, workers)


@pytest.hookimpl(tryfirst=True)  # the markers must be there before -m is applied
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out nightly tests, and further cases of a test, unless the -m expression names them."""
    mark_further_cases(items)
    for name in ("nightly", "further_case"):
        if name not in config.option.markexpr:
            left_out = {id(item): item for item in items if item.get_closest_marker(name)}
            config.hook.pytest_deselected(items=[*left_out.values()])
            items[:] = [item for item in items if id(item) not in left_out]


def pytest_collection_finish() -> None:
    """From here on the garbage collector looks at what the tests make, not at the million objects before them."""
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)  # by default it takes a fiftieth of the time, half of it in hypothesis
    gc.enable()


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared texts and tokenizers, which are not part of the package."""
    folder = Path(os.environ.get("ATTNORM_SHARED", ROOT.parent / "shared"))
    if not folder.is_dir():
        pytest.skip(f"no shared data at {folder}; set ATTNORM_SHARED to the folder that holds it")
    return folder
