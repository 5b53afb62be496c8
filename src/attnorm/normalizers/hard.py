"""Hard attention: all weight on the largest logit, with softmax's gradient (straight-through).

Ties share the weight equally. The forward map is piecewise constant; the gradient is declared, not its derivative.
Straight-through estimator: Bengio, Leonard & Courville 2013, https://arxiv.org/abs/1308.3432.
"""

import torch
from torch import Tensor

from attnorm.normalizers.block import Block
from attnorm.normalizers.contract import Map, Normalizer, Properties
from attnorm.normalizers.declaration import Row, WarmStart, declare
from attnorm.normalizers.softmax import softmax_row


class Hard(Map):
    properties = Properties(row_sum="one", exact_zeros=True)

    def forward(self, block: Block) -> Tensor:
        z = block.filled_low()
        best = (z == z.amax(-1, keepdim=True)).to(z.dtype)
        hard = block.hide(best / best.sum(-1, keepdim=True))
        soft = block.hide(torch.softmax(z, dim=-1))
        return hard + (soft - soft.detach())


def _reference(row: Row) -> Tensor:
    best = (row.z == row.z.max()).to(row.z.dtype)
    soft = softmax_row(row.z)
    return best / best.sum() + soft - soft.detach()


@declare(
    reference=_reference,
    warm_start=WarmStart("far"),
    exceptions={
        "first_derivative": "piecewise constant; its gradient is declared to be softmax's (straight-through)",
    },
)
def hard() -> Normalizer:
    """argmax forward, softmax's gradient backward (straight-through)."""
    return Normalizer(Hard(), name="hard")
