"""Threads of torch: one for work on many small tensors, or one part of the heads for each."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

from attnorm.engines.inputs import without_autocast

MAX_THREADS = 16
Item = TypeVar("Item")
Result = TypeVar("Result")


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one torch thread: for small tensors a second one costs time, and sums keep one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def in_threads(measure: Callable[[range], None], parts: int, device: torch.device, *, whole: bool = False) -> None:
    """measure(parts) for all parts, divided among torch's threads; `whole`: all in one thread.

    Each part runs with one torch thread; the number of threads is restored afterwards.
    """
    threads = torch.get_num_threads()
    shares = 1 if whole or device.type != "cpu" else min(threads, parts)
    if shares == 1:
        with without_autocast(device):
            measure(range(parts))
        return

    inference = torch.is_inference_mode_enabled()  # each thread has a mode of its own

    def alone(share: int) -> None:
        torch.set_num_threads(1)
        with torch.inference_mode(inference), torch.no_grad(), without_autocast(device):
            measure(range(parts * share // shares, parts * (share + 1) // shares))

    try:
        with ThreadPoolExecutor(shares) as pool:
            for done in [pool.submit(alone, share) for share in range(shares)]:
                done.result()
    finally:
        torch.set_num_threads(threads)


def each_in_a_thread(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """work(item) of each, at the same time, for work that is a single torch operation or a few of them."""
    if len(items) == 1:
        return [work(items[0])]
    with ThreadPoolExecutor(min(len(items), MAX_THREADS)) as pool:
        return list(pool.map(work, items))
