"""NormSoftmax: softmax((z - mean) / (sigma T)), mean and standard deviation sigma over the visible keys of the row.

Jiang, Gu & Pan 2022, https://openreview.net/forum?id=4g7nCbpjNwd: the input of softmax is brought to unit variance, so
that neither the length of q and k nor 1/sqrt(d) matters. Multiplying all logits of a row by a positive number changes
nothing. A single key that leads n - 1 equal ones is always sqrt(n) deviations above them.
"""

import math

import torch
from torch import Tensor

from attnorm.normalizers.block import Block
from attnorm.normalizers.contract import LogitRule, Normalizer
from attnorm.normalizers.declaration import Row, WarmStart, declare
from attnorm.normalizers.softmax import Softmax, softmax_row

MIN_DEVIATION = 1e-6  # its square is added to the variance: equal logits have a gradient, 0


class UnitVariance(LogitRule):
    length = "variance of the row"

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        if not temperature > 0 or math.isinf(temperature):
            raise ValueError(f"expected a positive temperature, got {temperature}")
        self.temperature = float(temperature)

    def factor(self, variance: Tensor) -> Tensor:
        """Return the factor of the centered logits of rows with this variance."""
        # In units of the least one: ONNX's optimizer takes the addition of a number as small as 1e-12 for that of 0.
        return torch.rsqrt(variance / MIN_DEVIATION**2 + 1) / (MIN_DEVIATION * self.temperature)

    def forward(self, block: Block) -> Tensor:
        n = block.n.clamp(min=1)
        centered = block.hide(block.logits - block.logits.sum(-1, keepdim=True) / n)
        variance = centered.square().sum(-1, keepdim=True) / n
        return centered * self.factor(variance)

    def extra_repr(self) -> str:
        return f"temperature={self.temperature}"


def _reference(row: Row, temperature: float = 1.0) -> Tensor:
    centered = row.z - row.z.mean()
    return softmax_row(centered / torch.sqrt((centered**2).mean() + MIN_DEVIATION**2) / temperature)


@declare(
    reference=_reference,
    examples=[{}, {"temperature": 0.5}],
    warm_start=WarmStart("nothing to set: rows of every spread get the same one"),
)
def norm_softmax(temperature: float = 1.0) -> Normalizer:
    """softmax((z - mean) / (sigma T)): logits of unit variance, so that the norms of q and k do not matter.

    Train from scratch. Noise is scaled to unit variance too: a row of almost equal logits is not flat. One key that
    leads n - 1 equal ones gets all of the weight as n grows, however small its lead. 1e-12 is added to the variance.
    """
    return Normalizer(Softmax(), scale=[UnitVariance(temperature)], name="norm_softmax")
