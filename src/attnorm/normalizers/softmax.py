"""Softmax, p_j = exp(z_j / T) / sum exp(z / T).

Its Jacobian (diag(p) - p p^T) / T has norm at most 1/(2T), attained at p = (1/2, 1/2, 0, ...):
Nair 2025, https://arxiv.org/abs/2510.23012. A weight is at most 1 / (1 + (n-1) e^(-spread/T)).
"""

import torch
from torch import Tensor

from attnorm.normalizers.block import Block
from attnorm.normalizers.contract import Map, Normalizer, Properties
from attnorm.normalizers.temperature import Temperature


class Softmax(Map):
    properties = Properties(row_sum="one", swap_untrained=True)

    def forward(self, block: Block) -> Tensor:
        return block.hide(torch.softmax(block.filled_low(), dim=-1))

    def lipschitz(self, n: int) -> float | None:
        return 0.5 if n > 1 else 0.0


def softmax(temperature: float = 1.0, *, learned: bool = False, heads: int | None = None) -> Normalizer:
    """exp(z / T) over its sum; T fixed, or learned per head."""
    plain = temperature == 1.0 and not learned and heads is None
    scale = [] if plain else [Temperature(temperature, learned=learned, heads=heads)]
    return Normalizer(Softmax(), scale=scale, name="softmax")
