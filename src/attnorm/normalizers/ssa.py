"""Selective Self-Attention's length rule: softmax((1 + e^(-e^beta) log n) z), n the visible keys, beta learned.

Zhang et al. 2024, https://arxiv.org/abs/2411.12892, in the form of the authors' code for fine-tuning
(github.com/umich-sota/selective_attention, lit_gpt/model_finetune_att.py). It starts at beta = 2, where e^(-e^beta) is
0.00062: a trained model begins as it was and learns how much its logits should grow with the length. At most log n is
added, for beta -> -infinity. The paper's second temperature, which reads the token, is not part of this rule.
"""

import math
from typing import Any

import torch
from torch import Tensor

from attnorm.normalizers.contract import Normalizer, ScaleRule, set_per_head
from attnorm.normalizers.declaration import HEADS, Row, WarmStart, declare
from attnorm.normalizers.softmax import Softmax, softmax_row

START = 2.0


class SelectiveLengthScale(ScaleRule):
    length = "1 + e^(-e^beta) log n"
    beta: Tensor

    def __init__(self, beta: float = START, *, learned: bool = True, heads: int | None = None) -> None:
        super().__init__()
        if math.isinf(beta):
            raise ValueError(f"expected a finite beta, got {beta}. Take 'softmax' or 'ssmax' for the two limits.")
        set_per_head(self, "beta", beta, heads, learned=learned)
        self.swap_untrained = beta >= START

    def factor(self, n: Tensor, positions: Tensor | None, hidden_states: Tensor | None) -> Tensor:
        beta = self.beta if self.beta.dim() == 0 else self.beta[:, None, None]
        return 1 + torch.exp(-torch.exp(beta.to(n.dtype))) * torch.log(n.clamp(min=1))


def _reference(row: Row, beta: float = START, **_: Any) -> Tensor:
    share = torch.exp(-torch.exp(row.value("scale.0.beta", beta)))
    return softmax_row(row.z * (1 + share * math.log(row.n)))


@declare(
    reference=_reference,
    examples=[{}, {"beta": -0.5}, {"beta": 0.3, "heads": HEADS}],
    warm_start=WarmStart(
        "near",
        "beta = 2: a factor of 1.0043 at 1,024 keys and of 1.0073 at 131,072",
        options=lambda layer, given_options: {"heads": layer.heads},
    ),
)
def ssa(beta: float = START, *, learned: bool = True, heads: int | None = None) -> Normalizer:
    """softmax((1 + e^(-e^beta) log n) z): starts as softmax and learns how logits grow with the visible keys n."""
    return Normalizer(Softmax(), scale=[SelectiveLengthScale(beta, learned=learned, heads=heads)], name="ssa")
