"""Sigmoid attention: p_j = sigmoid(z_j + b), each key by itself, b = -log n.

Ramapuram et al. 2024, https://arxiv.org/abs/2409.04431. The paper's n is the training length, one constant for all
rows; pass it as `bias=-math.log(length)`. By default n is the row's own visible keys, so a row of one key starts at
mass 1/2.
"""

import math

import torch
from torch import Tensor

from attnorm.normalizers.block import Block
from attnorm.normalizers.contract import KernelForm, Map, Normalizer, Properties
from attnorm.normalizers.declaration import Row, WarmStart, declare


class Sigmoid(Map):
    def __init__(self, bias: float | None = None) -> None:
        super().__init__()
        self.bias = bias
        self.properties = Properties(
            row_sum="free", shift_invariant=False, length="" if bias is not None else "bias -log n"
        )

    def forward(self, block: Block) -> Tensor:
        return block.hide(torch.sigmoid(block.logits + self.bias_of(block.n)))

    def bias_of(self, n: Tensor) -> Tensor:
        return -torch.log(n.clamp(min=1)) if self.bias is None else torch.full_like(n, self.bias)

    def lipschitz(self, n: int) -> float | None:
        return 0.25

    def kernel_form(self) -> KernelForm:
        return KernelForm("sigmoid", row_shift=self.bias_of, counts_keys=True)


def _reference(row: Row, bias: float | None = None) -> Tensor:
    return 1 / (1 + torch.exp(-(row.z + (-math.log(row.n) if bias is None else bias))))


@declare(
    reference=_reference,
    examples=[{}, {"bias": -2.0}],
    warm_start=WarmStart("far", "nothing to set: the bias -log n of each row keeps the sum of weights near 1"),
)
def sigmoid(bias: float | None = None) -> Normalizer:
    """sigmoid(z + b) per key, b = -log n of the row, or a fixed number."""
    return Normalizer(Sigmoid(bias), name="sigmoid")
