"""Scale-invariant attention: logits a_t z + m_t for a key t steps behind; no distance dominates by many keys.

    a_t = sqrt(2 log(1 + t/tau) + 1),   m_t = -2 log(1 + t/tau)

Anson, Wang & Aitchison 2025, https://arxiv.org/abs/2505.17083. Keys ahead of the query count as t = |distance|.
"""

import torch
from torch import Tensor

from attnorm.normalizers.block import Block
from attnorm.normalizers.contract import LogitRule, Normalizer
from attnorm.normalizers.declaration import Row, WarmStart, declare
from attnorm.normalizers.softmax import Softmax, softmax_row


class DistanceRule(LogitRule):
    length = "distance of the key"
    shift_invariant = False
    permutation_equivariant = False

    def __init__(self, tau: float = 10.0) -> None:
        super().__init__()
        if not tau > 0:
            raise ValueError(f"tau must be positive, got {tau}")
        self.tau = tau

    def coefficients(self, distance: Tensor) -> tuple[Tensor, Tensor]:
        """Return a_t and m_t for these distances."""
        log_distance = torch.log1p(distance.abs() / self.tau)
        return torch.sqrt(2 * log_distance + 1), -2 * log_distance

    def forward(self, block: Block) -> Tensor:
        slope, offset = self.coefficients(block.positions.distance.to(block.logits.dtype))
        return slope * block.logits + offset

    def kernel_rule(self) -> tuple[str, float]:
        return "distance", 1 / self.tau


def _reference(row: Row, tau: float = 10.0) -> Tensor:
    far = torch.log(1 + row.distance.to(row.z.dtype).abs() / tau)
    return softmax_row(torch.sqrt(2 * far + 1) * row.z - 2 * far)


@declare(
    reference=_reference,
    examples=[{}, {"tau": 2.0}],
    warm_start=WarmStart(
        "tau = the training length: within it no logit is stretched by more than 1.55 or lowered by more than 1.39",
        options=lambda layer, given_options: {"tau": float(layer.length)},
    ),
)
def scale_invariant(tau: float = 10.0) -> Normalizer:
    """softmax(a_t z + m_t): scale and shift depend on the distance t; no distance dominates by its number of keys.

    a = sqrt(2 log(1 + t/tau) + 1), m = -2 log(1 + t/tau). Train from the start, for contexts far longer than in
    training. With logits well below 0 far keys lose their weight.
    """
    return Normalizer(Softmax(), scale=[DistanceRule(tau)], name="scale_invariant")
