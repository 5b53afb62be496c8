"""Avoid GPU synchronization.

A GPU runs asynchronously. Reading a number from it (`if bool(x.any())`, `.item()`, `.nonzero()`) waits until all queued
work is done and leaves the GPU idle afterwards: in training this costs more than a few unnecessary passes.
"""

from torch import Tensor


def runs_asynchronously(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"
