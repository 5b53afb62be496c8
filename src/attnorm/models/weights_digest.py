"""Hash the weights of a module: names, shapes, dtypes and some values, so that fine-tuned weights differ.

Quantized weights are tensor subclasses that have few of a tensor's operations (torchao's cannot be reshaped). The plain
tensors inside them are hashed: those that the subclass names for torch.compile, or its dequantized values.
"""

import re
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

SAMPLED = 4096  # values of each weight that enter the hash
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # of an object in memory: another one in every process


def add_weights(digest: Any, module: nn.Module) -> None:
    """Update a hashlib digest with the parameters of a module."""
    for name, weight in module.named_parameters():
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        _add_values(digest, weight)


def _add_values(digest: Any, weight: Tensor) -> None:
    if weight.device.type == "meta":
        return
    if hasattr(weight, "__tensor_flatten__"):
        names, how = weight.__tensor_flatten__()
        digest.update(f"{type(weight).__name__} {ADDRESS.sub('', str(how))}".encode())
        for name in names:
            inner = getattr(weight, name)
            digest.update(f"{name} {tuple(inner.shape)} {inner.dtype}".encode())
            _add_values(digest, inner)
        return
    try:
        digest.update(_sample(weight))
    except (NotImplementedError, RuntimeError, TypeError):
        if type(weight) in (Tensor, nn.Parameter):
            raise
        with suppress(NotImplementedError, RuntimeError, TypeError):  # name, shape and dtype must do
            digest.update(_sample(weight.dequantize()))


def _sample(weight: Tensor) -> bytes:
    flat = weight.detach().reshape(-1)
    step = max(1, flat.numel() // SAMPLED)
    taken = flat[::step].cpu()
    return taken.contiguous().view(torch.uint8).numpy().tobytes()
