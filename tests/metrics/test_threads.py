"""Heads shared out among threads give the same numbers, and torch keeps its number of threads."""

from collections.abc import Iterator

import pytest
import torch

from attnorm.engines.execution import in_threads, one_thread, torch_threads
from attnorm.metrics.rows import measure_rows
from tests.metrics.calls import CALLS

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    with torch_threads(2):
        yield


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.every_second("kind")
def test_as_with_one_thread(kind: str) -> None:
    call = CALLS[kind]
    rows = torch.arange(call.query_BHQD.shape[-2])
    shared = measure_rows(call, [None, "ssmax"], rows, (1, 5))
    assert torch.get_num_threads() == 2
    with one_thread():
        alone = measure_rows(call, [None, "ssmax"], rows, (1, 5))
    for name in alone:
        for metric, values in alone[name].values.items():
            torch.testing.assert_close(shared[name].values[metric], values, equal_nan=True)


def test_inside_inference_mode() -> None:
    call = CALLS["causal"]
    with torch.inference_mode():
        found = measure_rows(call, [None], torch.arange(33), (1,))["model"]
    assert found.values["entropy_nats"].isfinite().any()


def test_every_head_is_measured_once_and_errors_come_through() -> None:
    seen: list[int] = []
    in_threads(lambda heads: seen.extend(heads), 5, CPU, whole=False)
    assert sorted(seen) == [0, 1, 2, 3, 4]

    def fail(heads: range) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        in_threads(fail, 5, CPU, whole=False)
    assert torch.get_num_threads() == 2
