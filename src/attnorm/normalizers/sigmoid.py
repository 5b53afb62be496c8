"""Sigmoid attention: p_j = sigmoid(z_j + b), each key by itself, b = -log n.

Ramapuram et al. 2024, https://arxiv.org/abs/2409.04431. By default n is the row's own visible keys, so a row of one
key starts at mass 1/2. With `learned=True` a number per head is added to b and trained, from 0.
"""

import math
from typing import Any

import torch
from torch import Tensor

from attnorm.normalizers.block import Block
from attnorm.normalizers.contract import (
    KernelForm,
    Map,
    Normalizer,
    Properties,
    at_least_one,
    per_head,
    per_head_parameter,
    same_as,
)
from attnorm.normalizers.declaration import HEADS, Row, WarmStart, declare, heads_if_learned


class Sigmoid(Map):
    jacobian = "diagonal"
    offset: Tensor | None

    def __init__(self, bias: float | None = None, *, learned: bool = False, heads: int | None = None) -> None:
        super().__init__()
        if heads is not None and not learned:
            raise ValueError(
                f"expected learned=True with heads={heads}, got learned=False. A fixed bias is shared by all heads: "
                "remove heads, or learn the bias."
            )
        self.bias = bias
        self.register_parameter("offset", per_head_parameter(0.0, heads) if learned else None)
        self.properties = Properties(
            row_sum="free", shift_invariant=False, length="" if bias is not None else "bias -log n"
        )

    def forward(self, block: Block) -> Tensor:
        n = block.n if self.offset is None else block.n.expand(*block.logits.shape[:-1], 1)
        return block.hide(torch.sigmoid(block.logits + self.bias_of(n)))

    def bias_of(self, n: Any) -> Any:
        """Return the bias of rows with n visible keys, (..., heads, Q, 1); a number for one, if it is not learned."""
        log = torch.log if isinstance(n, Tensor) else math.log
        bias = -log(at_least_one(n)) if self.bias is None else same_as(n, self.bias)
        return bias if self.offset is None else bias + per_head(self.offset, n)

    def lipschitz(self, n: int) -> float | None:
        return 0.25

    def extra_repr(self) -> str:
        return f"bias={'-log n' if self.bias is None else self.bias}{'' if self.offset is None else ' + learned'}"

    def kernel_form(self) -> KernelForm:
        return KernelForm("sigmoid", row_shift=self.bias_of, counts_keys=True, takes_numbers=self.offset is None)


def _reference(row: Row, bias: float | None = None, **_: Any) -> Tensor:
    offset = row.value("map.offset", 0.0)
    return 1 / (1 + torch.exp(-(row.z + (-math.log(row.n) if bias is None else bias) + offset)))


@declare(
    reference=_reference,
    examples=[{}, {"bias": -2.0}, {"learned": True, "heads": HEADS}],
    warm_start=WarmStart(
        "nothing to set: the bias -log n of each row keeps the sum of weights near 1", heads_if_learned
    ),
)
def sigmoid(bias: float | None = None, *, learned: bool = False, heads: int | None = None) -> Normalizer:
    """sigmoid(z + b) per key, b = -log n of the row, or a fixed number; learned adds a trained number per head.

    Keys do not compete. The output scale differs from softmax's: add a norm after attention. The paper's bias is one
    constant: bias=-math.log(length).
    """
    return Normalizer(Sigmoid(bias, learned=learned, heads=heads), name="sigmoid")
