"""Softmax, p_j = exp(z_j / T) / sum exp(z / T).

Its Jacobian (diag(p) - p p^T) / T has norm at most 1/(2T), attained at p = (1/2, 1/2, 0, ...):
Nair 2025, https://arxiv.org/abs/2510.23012. A weight is at most 1 / (1 + (n-1) e^(-spread/T)).
"""

import math
from typing import Any

import torch
from torch import Tensor

from attnorm.normalizers.block import Block
from attnorm.normalizers.contract import KernelForm, Map, Normalizer, Properties, ScaleRule, set_per_head
from attnorm.normalizers.declaration import HEADS, Row, WarmStart, declare, heads_if_learned


class Softmax(Map):
    properties = Properties(row_sum="one")
    jacobian = "threshold"

    def forward(self, block: Block) -> Tensor:
        return block.hide(torch.softmax(block.filled_low(), dim=-1))

    def lipschitz(self, n: int) -> float | None:
        return 0.5 if n > 1 else 0.0

    def slopes(self, block: Block, weights: Tensor) -> Tensor:
        return weights

    def kernel_form(self) -> KernelForm:
        return KernelForm("softmax")


class Temperature(ScaleRule):
    """logits / T, one T for all heads or one per head, fixed or learned (as log T, so that T stays positive)."""

    log_temperature: Tensor

    def __init__(self, temperature: float = 1.0, *, learned: bool = False, heads: int | None = None) -> None:
        super().__init__()
        if not temperature > 0 or math.isinf(temperature):
            raise ValueError(f"temperature must be a positive number, got {temperature}")
        if heads is not None and not learned:
            raise ValueError(
                f"expected learned=True with heads={heads}, got learned=False. A fixed temperature is shared by all "
                "heads: remove heads, or learn the temperature."
            )
        set_per_head(self, "log_temperature", math.log(temperature), heads, learned=learned)

    def factor(self, n: Tensor, positions: Tensor | None, hidden_states: Tensor | None) -> Tensor:
        factor = torch.exp(-self.log_temperature.to(n.dtype))
        return factor if factor.dim() == 0 else factor[:, None, None]

    def common_factor(self, n: int) -> tuple[float, Tensor | None]:
        return 1.0, torch.exp(-self.log_temperature.float())


def softmax_row(z: Tensor) -> Tensor:
    """Compute softmax of one row by the plain formula, for references."""
    shifted = torch.exp(z - z.max().detach())
    return shifted / shifted.sum()


def softmax_over(z: Tensor, kept: Tensor) -> Tensor:
    """Return softmax over the kept keys, and 0 for the others."""
    if not kept.any():
        return torch.zeros_like(z)
    return torch.zeros_like(z).index_put((kept.nonzero()[:, 0],), softmax_row(z[kept]))


def tempered(row: Row, temperature: float) -> Tensor:
    """The logits of a row, the largest at 0, over its temperature."""
    return (row.z - row.z.max().detach()) / torch.exp(row.value("scale.0.log_temperature", math.log(temperature)))


def _reference(row: Row, temperature: float = 1.0, **_: Any) -> Tensor:
    return softmax_row(tempered(row, temperature))


@declare(
    reference=_reference,
    examples=[{}, {"temperature": 0.37}, {"temperature": 0.5, "learned": True, "heads": HEADS}],
    warm_start=WarmStart("T = 1; learned=True starts there", heads_if_learned, safe=True),
)
def softmax(temperature: float = 1.0, *, learned: bool = False, heads: int | None = None) -> Normalizer:
    """exp(z / T) over its sum; T fixed, or learned per head.

    No key can get half of a row of more than 1 + e^(spread/T) keys.
    """
    plain = temperature == 1.0 and not learned and heads is None
    scale = [] if plain else [Temperature(temperature, learned=learned, heads=heads)]
    return Normalizer(Softmax(), scale=scale, name="softmax")
