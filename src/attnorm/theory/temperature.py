"""The temperature of a claim: a number or one tensor entry per row, always positive."""

import torch
from torch import Tensor


def positive_temperature(temperature: float | Tensor, like: Tensor | None = None) -> Tensor:
    """As a tensor of the dtype and device of `like`; without it a number becomes float64, a tensor stays as it is."""
    if like is not None:
        value = torch.as_tensor(temperature, dtype=like.dtype, device=like.device)
    elif isinstance(temperature, Tensor):
        value = temperature
    else:
        value = torch.tensor(temperature, dtype=torch.float64)
    if not bool((value > 0).all()):
        raise ValueError(f"temperature must be positive, got {float(value.min()):g}")
    return value
