"""Avoid GPU synchronization.

A GPU runs asynchronously. Reading a number from it (`if bool(x.any())`, `.item()`, `.nonzero()`) waits until all queued
work is done and leaves the GPU idle afterwards: in training this costs more than a few unnecessary passes.
"""

from collections.abc import Callable

import torch
from torch import Tensor


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
