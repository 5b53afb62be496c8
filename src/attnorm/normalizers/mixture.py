"""A learned mixture of two normalizers: g a(z) + (1 - g) b(z), g = sigmoid(theta) shared or per head."""

import math

import torch
from torch import Tensor

from attnorm.normalizers.block import Block
from attnorm.normalizers.contract import Map, Normalizer, Properties, RowSum, per_head, per_head_parameter


class Mixture(Map):
    def __init__(self, first: Normalizer, second: Normalizer, *, share: float = 0.5, heads: int | None = None) -> None:
        super().__init__()
        if not 0 < share < 1:
            raise ValueError(f"share (the first normalizer's part) must lie strictly between 0 and 1, got {share}")
        self.first, self.second = first, second
        self.theta = per_head_parameter(math.log(share / (1 - share)), heads)
        self.properties = mixed(first.properties, second.properties)

    def forward(self, block: Block) -> Tensor:
        share = torch.sigmoid(per_head(self.theta, block.logits).to(block.logits.dtype))
        return share * self.first.weights(block) + (1 - share) * self.second.weights(block)

    def lipschitz(self, n: int) -> float | None:
        bounds = self.first.lipschitz(n), self.second.lipschitz(n)
        return None if bounds[0] is None or bounds[1] is None else max(bounds[0], bounds[1])


def mixed(a: Properties, b: Properties) -> Properties:
    """What holds whether a row is one of a, of b, or a mixture of both."""
    order: tuple[RowSum, ...] = ("one", "at most one", "free")
    return Properties(
        row_sum=max(a.row_sum, b.row_sum, key=order.index),
        signed=a.signed or b.signed,
        exact_zeros=a.exact_zeros and b.exact_zeros,
        shift_invariant=a.shift_invariant and b.shift_invariant,
        permutation_equivariant=a.permutation_equivariant and b.permutation_equivariant,
        length=", ".join(dict.fromkeys(text for text in (a.length, b.length) if text)),
        swap_untrained=a.swap_untrained and b.swap_untrained,
    )
