"""Numbers by which a compiled graph names the normalizers it calls.

A graph holds tensors and constants, no objects. The number is a tensor: as a constant, every layer of a model would
need a graph of its own.
"""

import itertools
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

_numbers = itertools.count()
_normalizers: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()


def new_handle(normalizer: nn.Module) -> Tensor:
    number = next(_numbers)
    _normalizers[number] = normalizer
    return torch.tensor(number, device="cpu")


def named_by(handle: Tensor) -> nn.Module:
    normalizer = _normalizers.get(int(handle))
    if normalizer is None:
        raise RuntimeError("the normalizer of this compiled code is gone; keep its model until backward has run")
    return normalizer
