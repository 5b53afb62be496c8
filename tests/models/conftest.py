"""What the tests of the models room share."""

from collections.abc import Callable

import pytest
from torch import Tensor

from attnorm.metrics.call import AttentionCall
from tests.real_model import smollm2 as smollm2


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[AttentionCall, Tensor]]:
    """Every call together with what the kernel returned for it, for models that run under observe()."""
    from attnorm.models import observe

    seen: list[tuple[AttentionCall, Tensor]] = []
    check = observe.check_output

    def record(call: AttentionCall, output: Tensor, path: str, kernel: str) -> Callable[[], None]:
        seen.append((call, output))
        return check(call, output, path, kernel)

    monkeypatch.setattr(observe, "check_output", record)
    return seen
