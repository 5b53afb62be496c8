"""Softcap: logits become c tanh(z / c), so that none exceeds the cap c; any map may follow.

Gemma 2 (https://arxiv.org/abs/2408.00118) caps its logits at 50. Slopes are at most 1, so that a cap never stretches a
difference. A cap that the model applies itself is not part of the normalizer: attnorm honors it in every engine.
"""

import math

import torch
from torch import Tensor

from attnorm.normalizers.block import Block
from attnorm.normalizers.contract import LogitRule, Normalizer
from attnorm.normalizers.declaration import Row, WarmStart, declare
from attnorm.normalizers.softmax import Softmax, softmax_row


class Softcap(LogitRule):
    shift_invariant = False

    def __init__(self, cap: float = 50.0) -> None:
        super().__init__()
        if not cap > 0 or math.isinf(cap):
            raise ValueError(f"expected a positive cap, got {cap}. Leave the rule out for logits without a cap.")
        self.cap = float(cap)

    def forward(self, block: Block) -> Tensor:
        return self.cap * torch.tanh(block.logits / self.cap)

    def gain(self, n: int) -> float | None:
        return 1.0

    def extra_repr(self) -> str:
        return f"cap={self.cap}"


def _reference(row: Row, cap: float = 50.0) -> Tensor:
    return softmax_row(cap * torch.tanh(row.z / cap))


@declare(
    reference=_reference,
    examples=[{}, {"cap": 3.0}],
    warm_start=WarmStart("c = 50: a logit of 10 becomes 9.87, one of 30 becomes 26.9", safe=True),
)
def softcap(cap: float = 50.0) -> Normalizer:
    """softmax(c tanh(z / c)): no logit exceeds the cap c.

    Against logits that grow during training. A model that caps its logits itself (Gemma 2 and 3) needs no second cap.
    With another map: compose("entmax15", scale="softcap").
    """
    return Normalizer(Softmax(), scale=[Softcap(cap)], name="softcap")
