"""ALiBi: every key loses `slope` per position of distance from the query.

Press, Smith & Lewis 2022, https://arxiv.org/abs/2108.12409. Each head has a slope of its own: 2^(-8 h / H) for head h
of H = 2, 4, 8, ... heads. The penalty limits how far a head looks, whatever the length, so that a row does not become
flatter with n beyond that distance.

Nearmax is kneemax with a fixed knee behind this penalty.

    p = kneemax(z - m |distance|),   knee 1/4,   m = 2^(-8 h / H) for head h of H

Its reach is Theorem 6 of docs/theory/kneemax.md; language models: docs/results/language-models.md.
"""

from typing import Any

import torch
from torch import Tensor

from attnorm.normalizers.block import Block
from attnorm.normalizers.composition import add_rule
from attnorm.normalizers.contract import LogitRule, Normalizer, per_head
from attnorm.normalizers.declaration import HEADS, LayerFacts, Options, Row, WarmStart, declare
from attnorm.normalizers.kneemax import Kneemax, kneemax_row
from attnorm.normalizers.registry import get
from attnorm.normalizers.softmax import softmax_row


class LinearBias(LogitRule):
    """z - slope |distance|, with the paper's slopes for this number of heads."""

    length = "distance"
    additive = True
    permutation_equivariant = False
    slopes: Tensor

    def __init__(self, heads: int | None = None) -> None:
        super().__init__()
        if heads is not None and heads < 1:
            raise ValueError(f"expected heads of at least 1, got {heads}. None gives all heads the same slope.")
        values = torch.tensor(slopes(heads or 1), dtype=torch.float32)
        self.register_buffer("slopes", values[0] if heads is None else values)

    def forward(self, block: Block) -> Tensor:
        slope = per_head(self.slopes, block.logits).to(block.logits.dtype)
        return block.logits - slope * block.positions.distance.abs()

    def kernel_rule(self) -> tuple[str, Tensor]:
        return "linear", self.slopes

    def gain(self, n: int) -> float | None:
        return 1.0


def slopes(heads: int) -> list[float]:
    """The slopes of the paper's code. Other than powers of two take every second slope of the next power of two."""
    power = 1 << (heads.bit_length() - 1)
    first = [2.0 ** (-8 * (head + 1) / power) for head in range(power)]
    between = [2.0 ** (-8 * (head + 1) / (2 * power)) for head in range(0, 2 * power, 2)]
    return first + between[: heads - power]


def penalized_row(row: Row, heads: int | None) -> Tensor:
    """Return the logits of one row minus the penalty, for references."""
    return row.z - slopes(heads or 1)[row.head if heads else 0] * row.distance.abs().to(row.z.dtype)


def _reference(row: Row, map: str = "softmax", heads: int | None = None) -> Tensor:
    z = penalized_row(row, heads)
    return softmax_row(z) if map == "softmax" else get(map)(z[None])[0]


def slope_per_head(layer: LayerFacts, given_options: Options) -> dict[str, Any]:
    """Return the option with which a layer starts: as many slopes as it has heads."""
    return {"heads": layer.heads}


@declare(
    reference=_reference,
    examples=[{}, {"heads": HEADS}, {"map": "sparsemax", "heads": HEADS}],
    warm_start=WarmStart("nothing to set: for models trained without positions, or with ALiBi", options=slope_per_head),
)
def alibi(map: str = "softmax", *, heads: int | None = None) -> Normalizer:
    """softmax(z - m |distance|), m = 2^(-8h/H), or another map; for models without other positions.

    Train from the start: attnorm lab train lm --architecture nope --normalizer alibi. The slopes m are fixed, one per
    head. map: another row normalizer, as in alibi:map=entmax15.
    """
    return add_rule(LinearBias(heads), map, name="alibi")


def _nearmax_reference(row: Row, knee: float = 0.25, heads: int | None = None) -> Tensor:
    return kneemax_row(penalized_row(row, heads), knee)


@declare(
    reference=_nearmax_reference,
    examples=[{}, {"heads": HEADS}, {"knee": 0.1, "heads": HEADS}],
    warm_start=WarmStart("nothing to set: for models that are trained with it", options=slope_per_head),
)
def nearmax(knee: float = 0.25, *, heads: int | None = None) -> Normalizer:
    """kneemax(z - m |distance|), m = 2^(-8h/H): sparse, softmax's gradient bound, reach constant in n.

    For language models that are trained with it and later read longer texts. With logits of spread D, keys farther than
    (D + 2.5)/m have weight exactly 0. In a model trained without the penalty it hides far keys.
    """
    return Normalizer(Kneemax(knee=knee), scale=[LinearBias(heads)], name="nearmax")
