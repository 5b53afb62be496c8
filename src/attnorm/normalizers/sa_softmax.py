"""Self-adjusted softmax: softmax weights multiplied by the logit, or by its relative position in the row's range.

    plain:       z_j p_j
    normalised:  (z_j - min(z_min, 0)) / (max(z_max, 0) - min(z_min, 0)) p_j,   p = softmax(z)

Zheng et al. 2025, https://arxiv.org/abs/2502.18277; z_min and z_max over the visible keys. The gradient of the plain
form does not vanish as p_j -> 1. Neither form is shift invariant, and no row sum is fixed (plain: any; normalised: at
most 1).
"""

import torch
from torch import Tensor

from attnorm.normalizers.block import Block
from attnorm.normalizers.contract import KernelForm, Map, Normalizer, Properties
from attnorm.normalizers.declaration import Row, WarmStart, declare
from attnorm.normalizers.softmax import softmax_row


class SelfAdjusted(Map):
    def __init__(self, *, normalised: bool = True) -> None:
        super().__init__()
        self.normalised = normalised
        self.properties = Properties(
            row_sum="at most one" if normalised else "free",
            signed=not normalised,
            exact_zeros=normalised,
            shift_invariant=False,
        )

    def forward(self, block: Block) -> Tensor:
        p = torch.softmax(block.filled_low(), dim=-1)
        # Hidden logits are 0 in the block, and both clamps include 0 anyway.
        return block.hide(p * (self._position_in_range(block.logits) if self.normalised else block.logits))

    def kernel_form(self) -> KernelForm:
        return KernelForm("self_adjusted", power=2 if self.normalised else 1, ranged=self.normalised)

    @staticmethod
    def _position_in_range(z: Tensor) -> Tensor:
        low = z.amin(-1, keepdim=True).clamp(max=0)
        high = z.amax(-1, keepdim=True).clamp(min=0)
        width = high - low
        return (z - low) / torch.where(width > 0, width, 1.0)


def _reference(row: Row, normalised: bool = True) -> Tensor:
    if not normalised:
        return row.z * softmax_row(row.z)
    low, high = row.z.min().clamp(max=0), row.z.max().clamp(min=0)
    if high == low:
        return 0 * row.z
    return (row.z - low) / (high - low) * softmax_row(row.z)


@declare(reference=_reference, examples=[{}, {"normalised": False}], warm_start=WarmStart())
def sa_softmax(*, normalised: bool = True) -> Normalizer:
    """softmax weights times the logit (plain) or times its position in the row's range (normalised).

    Larger gradients at sharp rows. Train from scratch. It is not shift invariant, so biases, ALiBi and softcaps change
    it. normalised=False: z p, signed, any sum.
    """
    return Normalizer(SelfAdjusted(normalised=normalised), name="sa_softmax")
