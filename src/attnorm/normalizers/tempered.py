"""Logits divided by a temperature T in front of any map, T fixed or learned.

The Jacobian of the whole is the map's divided by T: at most 1/(2T) behind softmax, where T of 1 is softmax itself.
"""

import math
from typing import Any

from torch import Tensor

from attnorm.normalizers.composition import add_rule
from attnorm.normalizers.contract import Normalizer
from attnorm.normalizers.declaration import HEADS, LayerFacts, Options, Row, WarmStart, declare
from attnorm.normalizers.registry import get
from attnorm.normalizers.softmax import Temperature, softmax_row


def _reference(row: Row, map: str = "softmax", temperature: float = 1.0, **_: Any) -> Tensor:
    z = row.z / row.value("scale.0.log_temperature", math.log(temperature)).exp().to(row.z.dtype)
    return softmax_row(z) if map == "softmax" else get(map)(z[None])[0]


def _start(layer: LayerFacts, given_options: Options) -> dict[str, Any]:
    return {"heads": layer.heads} if given_options.get("learned") else {}


@declare(
    reference=_reference,
    examples=[{}, {"map": "sparsemax", "temperature": 0.37}, {"temperature": 2.0, "learned": True, "heads": HEADS}],
    warm_start=WarmStart("the same", "T = 1 in front of softmax; as far as its map otherwise", options=_start),
)
def tempered(
    map: str = "softmax", *, temperature: float = 1.0, learned: bool = False, heads: int | None = None
) -> Normalizer:
    """softmax, or another map, of logits divided by a temperature, which may be learned."""
    return add_rule(Temperature(temperature, learned=learned, heads=heads), map, name="tempered")
