"""Statistics of rows of weights, however they were made: not normalised, signed, sparse.

Entropy, effective keys, gap and masses are those of |w| / sum |w|, the largest weight is that of |w|; a row whose
weights are all 0 has none of them. As in softmax_rows.py the first visible key and the largest of the others are set
apart first.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from attnorm.metrics.heaviest import heaviest, masses
from attnorm.metrics.logits import LogitBlock


def weight_rows(
    weights: Tensor, block: LogitBlock, top_n: Sequence[int], *, rest_is_sink: bool = False
) -> dict[str, Tensor]:
    """Statistics (h r, 1), and "top_mass" (h r, len(top_n)), of weights (h, r, w) that are 0 at hidden keys.

    rest_is_sink: what a row lacks to 1 is the weight of a learned sink.
    """
    heads, count, width = weights.shape
    weights = weights.reshape(-1, width)
    n = block.n.expand(heads, count).reshape(-1, 1).to(weights.dtype)
    first = block.first_visible.expand(heads, count).reshape(-1, 1)
    row_sum = weights.sum(-1, keepdim=True)
    w = weights.abs()
    sink = w.gather(1, first)
    w.scatter_(1, first, 0.0)
    largest, where = w.max(-1, keepdim=True)
    w.scatter_(1, where, 0.0)
    others = w.sum(-1, keepdim=True)
    top = heaviest(w, max(top_n))

    rest = largest + others
    has_rest = rest > 0
    safe = torch.where(has_rest, rest, 1.0)
    p, p_largest = w.div_(safe), largest / safe
    entropy_rest = _entropy_terms(p).sum(-1, keepdim=True) + _entropy_terms(p_largest)
    squares_rest = torch.linalg.vector_norm(p, dim=-1, keepdim=True).square() + p_largest.square()

    total = sink + rest
    has_any = total > 0
    total = torch.where(has_any, total, 1.0)
    m, left = sink / total, rest / total
    entropy = _entropy_terms(m) + _entropy_terms(left) + left * entropy_rest
    winner, loser = torch.maximum(sink, largest), torch.minimum(sink, largest)
    gap = torch.log(winner) - torch.log(loser + others) + torch.log(n - 1)
    gap_rest = torch.log(largest) - torch.log(others) + torch.log(n - 2)

    def where_(condition: Tensor, value: Tensor) -> Tensor:
        return torch.where(condition, value, torch.nan)

    return {
        "entropy_nats": where_(has_any, entropy),
        "effective_keys": where_(has_any, 1 / (m.square() + left.square() * squares_rest)),
        "max_weight": where_(has_any, winner),
        "effective_gap": where_(has_any & (n > 1), gap),
        "row_sum": row_sum,
        "sink_mass": sink + (1 - row_sum) if rest_is_sink else where_(has_any, m),
        "entropy_nats_without_sink": where_(has_rest, entropy_rest),
        "effective_keys_without_sink": where_(has_rest, 1 / squares_rest),
        "max_weight_without_sink": where_(has_rest, p_largest),
        "effective_gap_without_sink": where_(has_rest & (n > 2), gap_rest),
        "top_mass": where_(has_any, masses(torch.cat([top, largest, sink], -1) / total, top_n)),
    }


def _entropy_terms(p: Tensor) -> Tensor:
    return -torch.xlogy(p, p)
