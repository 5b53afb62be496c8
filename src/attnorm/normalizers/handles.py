"""Find a normalizer by a handle, a tensor with its id, while it exists.

An operator of torch.library takes tensors and numbers, no objects. torch.compile would compile once more for every
number; a tensor is an input of the graph, so that all layers share one.
"""

from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

_normalizers: WeakValueDictionary[int, nn.Module] = WeakValueDictionary()


def remember(normalizer: nn.Module) -> Tensor:
    """Return the handle of this normalizer, on the CPU."""
    _normalizers[id(normalizer)] = normalizer
    # Not torch.tensor: tests reject it in code that runs beside a GPU, where it would copy from pageable memory.
    return torch.full((), id(normalizer), dtype=torch.int64, device="cpu")


def normalizer_of(handle: Tensor) -> nn.Module:
    return _normalizers[int(handle)]
