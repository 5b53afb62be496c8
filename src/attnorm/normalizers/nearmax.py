"""Nearmax: kneemax with a fixed knee behind ALiBi's penalty on the distance.

    p = kneemax(z - m |distance|),   knee 1/4,   m = 2^(-8 h / H) for head h of H

With logits of spread D, keys farther than (D + 2.5) / m from the query get the weight 0, exactly. So no more keys than
that share the weight of a row. The Jacobian norm is at most 1/2, as kneemax's. Theorem 6 of docs/theory/kneemax.md;
language models that were trained with it: docs/results/language-models.md.
"""

from torch import Tensor

from attnorm.normalizers.alibi import LinearBias, penalized_row, slope_per_head
from attnorm.normalizers.contract import Normalizer
from attnorm.normalizers.declaration import HEADS, Row, WarmStart, declare
from attnorm.normalizers.kneemax import Kneemax, kneemax_row


def _reference(row: Row, knee: float = 0.25, heads: int | None = None) -> Tensor:
    return kneemax_row(penalized_row(row, heads), knee)


@declare(
    reference=_reference,
    examples=[{}, {"heads": HEADS}, {"knee": 0.1, "heads": HEADS}],
    warm_start=WarmStart("far", "nothing to set: for models that are trained with it", options=slope_per_head),
)
def nearmax(knee: float = 0.25, *, heads: int | None = None) -> Normalizer:
    """Kneemax with a penalty on the distance: sparse, softmax's gradient bound, a reach that does not grow with n."""
    return Normalizer(Kneemax(knee=knee), scale=[LinearBias(heads)], name="nearmax")
