"""What costs time on a GPU: how many operations the metrics of sampled rows start, and that none waits for its result.

A meta tensor has no numbers. Reading one (`.item()`, `.cpu()`, `.nonzero()`, a boolean index) raises an error, as it
would make a program wait for a GPU.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attnorm.metrics.call import AttentionCall
from attnorm.metrics.normalized import Choice
from attnorm.metrics.reads import coverage_sums
from attnorm.metrics.sensitivity import measure_sensitivity
from attnorm.metrics.vectors import isotropy, measure_vectors
from attnorm.monitor import measure as monitor
from tests.metrics.calls import generators

LAYERS, HEADS, KEY_HEADS, KEYS = 4, 9, 3, 256
ROWS = torch.arange(192, 256, 4)
TOP_N = (1, 5, 10, 20, 100)
TEMPERATURES, EPSILONS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 10.0), (1e-3, 0.1, 10.0)


class Counted(TorchDispatchMode):
    """Operators with a result on the device, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, tuple | list) else [result]
        if any(isinstance(one, Tensor) and one.is_meta for one in results) and not func.is_view:
            self.operators[str(func)] += 1
        return result


def operators(measure: Callable[[], object]) -> int:
    with Counted() as counted:
        measure()
    return counted.operators.total()


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> AttentionCall:
    """The heads of several layers, on the device without numbers, which has no autocast."""
    monkeypatch.setattr("attnorm.engines.execution.without_autocast", lambda device: nullcontext())
    query, key, value = (
        torch.empty(1, LAYERS * heads, KEYS, 16, device="meta", dtype=torch.bfloat16)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    )
    return AttentionCall(0, "decoder", query, key, value, scale=0.25, causal=True)


def test_few_operations_for_all_layers_and_no_wait(call: AttentionCall) -> None:
    counts = {
        "vectors": operators(lambda: measure_vectors(call, [None], ROWS, TOP_N, generator=generators(LAYERS))),
        "sensitivity": operators(
            lambda: measure_sensitivity(call, [None], ROWS, TEMPERATURES, EPSILONS, generators(LAYERS))
        ),
        "coverage": operators(lambda: coverage_sums(call, [None], ROWS, TOP_N, LAYERS)),
        "isotropy": operators(lambda: isotropy(call.value_BGKE)),
    }
    # Of one layer alone there were 2,800, 1,080, 160 and 60.
    most = {"vectors": 860, "sensitivity": 200, "coverage": 90, "isotropy": 75}
    assert all(counts[name] <= most[name] for name in most), counts


def test_few_operations_for_separability_in_the_monitor(call: AttentionCall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "without_autocast", lambda device: nullcontext())
    assert operators(lambda: monitor._separability(call, ROWS[:8], 20)) <= 230


def test_more_sets_temperatures_and_steps_take_no_more_operations(call: AttentionCall) -> None:
    def vectors(top_n: Sequence[int]) -> int:
        return operators(lambda: measure_vectors(call, [None], ROWS, top_n, generator=generators(LAYERS)))

    def sensitivity(temperatures: Sequence[float], epsilons: Sequence[float]) -> int:
        return operators(lambda: measure_sensitivity(call, [None], ROWS, temperatures, epsilons, generators(LAYERS)))

    # gaps among selected keys, one N at a time
    assert vectors((1, 2, 4, 8, 16, 32)) - vectors((1, 32)) <= 4 * 6
    assert sensitivity(TEMPERATURES, EPSILONS) == sensitivity((1.0, 2.0), (1e-3, 0.1))


@pytest.mark.parametrize("choice", ["ssmax", "sigmoid"])
def test_other_normalizers_do_not_wait_for_their_weights(choice: Choice, call: AttentionCall) -> None:
    assert operators(lambda: measure_vectors(call, [choice], ROWS, TOP_N, generator=generators(LAYERS))) < 860
    assert operators(lambda: coverage_sums(call, [choice], ROWS, TOP_N, LAYERS)) < 200
