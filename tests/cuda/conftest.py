import inspect
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from attnorm.engines.execution import HAS_TRITON
from tests.cuda.on_device import NEEDS_DEVICE
from tests.miscompiled_reductions import refuse_scattered

_skipped: set[pytest.Collector] = set()  # files, each with one test that says so


def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: Any) -> list[pytest.Item] | None:
    """Without a GPU the first test of a file is skipped for all of them: 450 took a second of each run."""
    (without_device,) = NEEDS_DEVICE.args
    if not (without_device and name.startswith("test_") and inspect.isfunction(obj)):
        return None
    if collector in _skipped:
        return []
    _skipped.add(collector)
    return None


@pytest.fixture(scope="session", autouse=True)
def refuse_wrongly_compiled_kernels() -> Iterator[None]:
    """The numbers of such a kernel may come close enough to pass."""
    with pytest.MonkeyPatch.context() as patch:
        if HAS_TRITON:
            import triton

            if tuple(int(part) for part in triton.__version__.split(".")[:2]) < (3, 7):
                patch.setattr(triton.knobs.compilation, "listener", refuse_scattered)
        yield


@pytest.fixture(autouse=True)
def forget_compiled_code() -> Iterator[None]:
    """torch.compile keeps 8 variants of a function, and a partial of any function counts as the same one."""
    yield
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()
