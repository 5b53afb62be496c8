"""How measurements use the hardware: torch's threads on a CPU, and no synchronization on a GPU.

A GPU runs asynchronously. Reading a number from it (`if bool(x.any())`, `.item()`, `.nonzero()`) waits until all queued
work is done and leaves the GPU idle afterwards: in training this costs more than a few unnecessary passes.

On a CPU, many small tensors are faster in one thread, and large work is divided: one part of the heads per thread.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from attnorm.engines.inputs import without_autocast


def runs_asynchronously(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


def sent_to(device: torch.device, tensor: Tensor) -> Tensor:
    """Return the tensor on that device. A copy from pinned memory to a GPU does not wait for its queued work."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def sent_to_cpu(tensor: Tensor) -> Tensor:
    """Return the tensor on the CPU. Call the function that `arrival` returns before you read its values."""
    return tensor.to("cpu", non_blocking=tensor.is_cuda)


def arrival(device: torch.device) -> Callable[[], None]:
    """Return a function that waits until everything sent from the device so far has arrived."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event.synchronize


MAX_THREADS = 16
Item = TypeVar("Item")
Result = TypeVar("Result")


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one torch thread. Small tensors are faster this way, and sums have a fixed order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def in_threads(measure: Callable[[range], None], parts: int, device: torch.device, *, whole: bool = False) -> None:
    """Call measure(range) for the parts 0 to `parts` - 1, divided among as many threads as torch uses.

    Each call runs with one torch thread; the number of torch threads is restored afterwards. whole: one call for all
    parts, in this thread.
    """
    threads = torch.get_num_threads()
    shares = 1 if whole or device.type != "cpu" else min(threads, parts)
    if shares == 1:
        with without_autocast(device):
            measure(range(parts))
        return

    inference = torch.is_inference_mode_enabled()  # a new thread does not inherit it

    def measure_share(share: int) -> None:
        torch.set_num_threads(1)
        with torch.inference_mode(inference), torch.no_grad(), without_autocast(device):
            measure(range(parts * share // shares, parts * (share + 1) // shares))

    try:
        with ThreadPoolExecutor(shares) as pool:
            for done in [pool.submit(measure_share, share) for share in range(shares)]:
                done.result()
    finally:
        torch.set_num_threads(threads)


def in_new_thread(work: Callable[[], Result], device: torch.device) -> Result:
    """Return work(), computed in a new thread on the current stream of this device."""
    if device.type != "cuda":
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(work).result()
    stream = torch.cuda.current_stream(device)  # a new thread does not inherit it

    def work_on_stream() -> Result:
        with torch.cuda.stream(stream):
            return work()

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work_on_stream).result()


def each_in_a_thread(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Return work(item) for all items, computed in threads. Meant for work that is a few torch operations."""
    if len(items) == 1:
        return [work(items[0])]
    with ThreadPoolExecutor(min(len(items), MAX_THREADS)) as pool:
        return list(pool.map(work, items))
