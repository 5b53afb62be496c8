"""Sigmoid attention: p_j = sigmoid(z_j + b), every key judged alone, b = -log n.

Ramapuram et al. 2024, https://arxiv.org/abs/2409.04431. The paper's n is the training length, one constant for all
rows; pass it as `bias=-math.log(length)`. By default n is the row's own visible keys, so a row of one key starts at
mass 1/2.
"""

import torch
from torch import Tensor

from attnorm.normalizers.block import Block
from attnorm.normalizers.contract import Map, Normalizer, Properties


class Sigmoid(Map):
    def __init__(self, bias: float | None = None) -> None:
        super().__init__()
        self.bias = bias
        self.properties = Properties(
            row_sum="free", shift_invariant=False, length="" if bias is not None else "bias -log n"
        )

    def forward(self, block: Block) -> Tensor:
        return block.hide(torch.sigmoid(block.logits + self.bias_of(block.n)))

    def bias_of(self, n: Tensor) -> Tensor | float:
        return -torch.log(n.clamp(min=1)) if self.bias is None else self.bias

    def lipschitz(self, n: int) -> float | None:
        return 0.25


def sigmoid(bias: float | None = None) -> Normalizer:
    """sigmoid(z + b) per key, b = -log n of the row, or a fixed number."""
    return Normalizer(Sigmoid(bias), name="sigmoid")
