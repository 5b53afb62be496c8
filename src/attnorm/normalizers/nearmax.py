"""Nearmax: kneemax with a fixed knee, of logits minus a penalty on the distance.

    p = kneemax(z - m |distance|),   knee 1/4,   m = 2^(-8 h / H) for head h of H, as in ALiBi

The penalty lets a head look only so far, whatever the length: with logits of spread D, keys farther than (D + 2.5) / m
from the query get the weight 0, exactly. So no more keys than that share the weight of a row, and it does not become
flatter with n. The Jacobian norm is at most 1/2, as kneemax's. Theorem 6 of docs/theory/kneemax.md; language models
that were trained with it: docs/results/language-models.md.
"""

from typing import Any

from torch import Tensor

from attnorm.normalizers.alibi import LinearBias, slopes
from attnorm.normalizers.contract import Normalizer
from attnorm.normalizers.declaration import HEADS, LayerFacts, Options, Row, WarmStart, declare
from attnorm.normalizers.kneemax import Kneemax, kneemax_row


def _reference(row: Row, knee: float = 0.25, heads: int | None = None) -> Tensor:
    slope = slopes(heads or 1)[row.head if heads else 0]
    return kneemax_row(row.z - slope * row.distance.abs().to(row.z.dtype), knee)


def _start(layer: LayerFacts, given_options: Options) -> dict[str, Any]:
    return {"heads": layer.heads}


@declare(
    reference=_reference,
    examples=[{}, {"heads": HEADS}, {"knee": 0.1, "heads": HEADS}],
    warm_start=WarmStart("far", "nothing to set: for models that are trained with it", options=_start),
)
def nearmax(knee: float = 0.25, *, heads: int | None = None) -> Normalizer:
    """Kneemax with a penalty on the distance: sparse, softmax's gradient bound, a reach that does not grow with n."""
    return Normalizer(Kneemax(knee=knee), scale=[LinearBias(heads)], name="nearmax")
