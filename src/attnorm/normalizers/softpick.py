"""Softpick: rectified softmax, p_j = [e^z_j - 1]_+ / (sum |e^z - 1| + eps).

Zuhri, Fuadi & Aji 2025, https://arxiv.org/abs/2504.20966. Weight 0 for negative logits, yet they still receive gradient
through the denominator; the row sums to 1 only where no visible logit is negative.
"""

import torch
from torch import Tensor

from attnorm.normalizers.block import Block
from attnorm.normalizers.contract import KernelForm, Map, Normalizer, Properties
from attnorm.normalizers.declaration import Row, WarmStart, declare


class Softpick(Map):
    properties = Properties(row_sum="at most one", exact_zeros=True, shift_invariant=False)

    def __init__(self, eps: float = 1e-8) -> None:
        super().__init__()
        if not eps > 0:
            raise ValueError(f"eps must be positive, got {eps}")
        self.eps = eps

    def forward(self, block: Block) -> Tensor:
        # Everything times e^-m with m = max(0, max z): no exp can overflow, and the result does not change with m.
        m = block.filled(0.0).amax(-1, keepdim=True).clamp(min=0).detach()
        # e^z - 1 = +-e^max(z, 0) (1 - e^-|z|): expm1 keeps the digits of small logits.
        size = torch.exp(block.logits.relu() - m) * -torch.expm1(-block.logits.abs())
        total = block.hide(size).sum(-1, keepdim=True) + self.eps * torch.exp(-m)
        return block.hide(torch.where(block.logits > 0, size, 0.0) / total)

    def kernel_form(self) -> KernelForm:
        return KernelForm("softpick", floor=self.eps)


def _reference(row: Row, eps: float = 1e-8) -> Tensor:
    above = torch.expm1(row.z)
    return above.relu() / (above.abs().sum() + eps)


@declare(reference=_reference, warm_start=WarmStart())
def softpick(eps: float = 1e-8) -> Normalizer:
    """[e^z - 1]_+ over sum |e^z - 1|: weights may be 0 for all keys, so no sink is needed.

    Against sinks, and for quantization. Negative logits have weight 0 but a gradient. It is reported to weaken at long
    context.
    """
    return Normalizer(Softpick(eps), name="softpick")
