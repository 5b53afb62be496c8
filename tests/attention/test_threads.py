"""Work divided among threads: every part once, one torch thread in each, and nothing changed afterwards."""

import threading
from collections.abc import Iterator

import pytest
import torch

from attnorm.engines.execution import in_threads, one_thread

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("parts", [1, 2, 3, 7])
@pytest.mark.parametrize("whole", [False, True])
def test_every_part_is_measured_once(count: int, parts: int, whole: bool) -> None:
    torch.set_num_threads(count)
    calls: list[tuple[range, int, str]] = []
    lock = threading.Lock()

    def measure(some: range) -> None:
        with lock:
            calls.append((some, torch.get_num_threads(), threading.current_thread().name))

    in_threads(measure, parts, CPU, whole=whole)
    shares = 1 if whole else min(count, parts)
    assert sorted(part for some, _, _ in calls for part in some) == list(range(parts))
    assert len(calls) == shares
    assert max(len(some) for some, _, _ in calls) - min(len(some) for some, _, _ in calls) <= 1
    assert all(own == (1 if shares > 1 else count) for _, own, _ in calls)
    assert (threading.current_thread().name in [name for _, _, name in calls]) == (shares == 1)
    assert torch.get_num_threads() == count


@pytest.mark.parametrize("count", [1, 2])
def test_modes_of_the_caller_hold_in_every_thread(count: int) -> None:
    torch.set_num_threads(count)
    seen: list[tuple[bool, bool, bool]] = []

    def measure(_: range) -> None:
        seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))

    with torch.inference_mode(), torch.autocast("cpu"):
        in_threads(measure, 2, CPU)
    assert set(seen) == {(True, False, False)}
    seen.clear()
    with torch.no_grad():
        in_threads(measure, 2, CPU)
    assert set(seen) == {(False, False, False)}


def test_another_device_takes_one_thread() -> None:
    torch.set_num_threads(2)
    calls: list[range] = []
    in_threads(calls.append, 4, torch.device("cuda"))
    assert calls == [range(4)]


def test_an_error_in_a_thread_is_raised_and_the_threads_are_restored() -> None:
    torch.set_num_threads(2)

    def measure(some: range) -> None:
        raise RuntimeError(f"part {some.start}")

    with pytest.raises(RuntimeError, match="part 0"):
        in_threads(measure, 4, CPU)
    assert torch.get_num_threads() == 2
    with one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
