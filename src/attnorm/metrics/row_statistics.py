"""Statistics of rows: of softmax straight from its logits, of any other map from its weights.

Two keys of each row are set apart before anything is summed: the first visible one (the sink) and the largest of the
others. For softmax what is left is summed relative to that largest one (`row_sums`, block by block); then both are put
back in closed form (`softmax_statistics`, once for all rows). So the numbers without the sink come first and those with
it follow, and nothing is ever subtracted: they keep their digits as the largest weight or the sink's tends to 1.

Weights may be signed, sparse, or not normalised (`weight_rows`): entropy, effective keys, gap and masses are those of
|w| / sum |w|, the largest weight is that of |w|; a row whose weights are all 0 has none of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from attnorm.engines.device_sync import runs_asynchronously
from attnorm.metrics.logits import GROUP, LOW, LogitBlock, LogitWorkspace, too_few_to_wait
from attnorm.theory.rank_one_eigenvalues import rank_one_root

# exp of more would overflow when it is squared, in float32 and float64; a sink so large has all of the weight.
LARGEST_EXPONENT = {torch.float32: 40.0, torch.float64: 300.0}
# Below this a sum of exponentials may have lost its digits to underflow.
SMALLEST_SUM = 1e-30


def heaviest(rows: Tensor, count: int, *, scratch: Tensor | None = None) -> Tensor:
    """The `count` largest of each row (rows, L), largest first; fewer where L is smaller. `scratch` is overwritten."""
    count = min(count, rows.shape[-1])
    if runs_asynchronously(rows):
        return rows.topk(count, dim=-1).values
    # numpy selects with vector instructions: ten times as fast as torch's topk.
    part = torch.empty_like(rows) if scratch is None else scratch
    numbers = part.copy_(rows).numpy()
    numbers.partition(numbers.shape[-1] - count, axis=-1)
    return torch.from_numpy(np.sort(numbers[:, -count:], axis=-1)[:, ::-1].copy())


def masses(weights: Tensor, top_n: Sequence[int]) -> Tensor:
    """Sums of the N largest weights of each row, one for each N: (rows, len(top_n))."""
    ordered = heaviest(weights, weights.shape[-1])
    sums = ordered.cumsum(-1)
    return torch.stack([sums[:, min(N, sums.shape[-1]) - 1] for N in top_n], -1)


@dataclass(frozen=True)
class SetApart:
    """Each row's first visible key and the extremes of the others, all (rows, 1); LOW and inf where there are none."""

    first: Tensor  # column
    sink: Tensor  # logit of the first visible key
    where: Tensor  # column of the largest of the others
    largest: Tensor
    smallest: Tensor


def set_apart(rows: Tensor, block: LogitBlock) -> SetApart:
    """What to set apart of the rows (h r, w)."""
    heads, count, width = block.logits.shape
    first = block.first_visible.expand(heads, count).reshape(-1, 1)
    sink = rows.gather(1, first)
    rows.scatter_(1, first, LOW)
    tail = rows[:, block.common :]
    smallest = tail.masked_fill(tail == LOW, torch.inf).amin(-1, keepdim=True) if tail.shape[-1] else None
    if block.common > 1 or smallest is None:
        before = rows[:, 1 : max(block.common, 2)].amin(-1, keepdim=True)
        smallest = before if smallest is None else torch.minimum(smallest, before)
    groups = width // GROUP
    largest, group = rows.view(-1, GROUP, groups).amax(1).max(-1, keepdim=True)
    members = group + groups * torch.arange(GROUP, device=rows.device)
    index = rows.gather(1, members).argmax(-1, keepdim=True)
    rows.scatter_(1, first, sink)
    return SetApart(first, sink, members.gather(1, index), largest, smallest)


class RowSums(NamedTuple):
    """What a row adds up to, in units of its largest key but the first visible one: e = exp(z - level).

    `others` are the keys but these two. For a row of one key, which has no such largest one, the level is that key's.
    """

    level: Tensor
    sink: Tensor  # log e of the first visible key
    learned: Tensor  # log e of the learned sink, -inf if there is none
    log_others: Tensor  # log sum e
    e_log_e: Tensor  # sum e log e
    squares: Tensor  # sum e^2
    root: Tensor  # norm of the Jacobian times the sum of all e, the learned sink's included

    @classmethod
    def joined(cls, columns: Tensor) -> "RowSums":
        return cls(*columns[..., : len(cls._fields)].unbind(-1))


def row_sums(
    rows: Tensor,
    block: LogitBlock,
    apart: SetApart,
    top_n: Sequence[int],
    workspace: LogitWorkspace,
    learned_sink: Tensor | None = None,
) -> Tensor:
    """The fields of RowSums, then the sums of the N - 1 heaviest others for each N and of the N - 2, as columns.

    The logits (h r, w) are overwritten. learned_sink (h,): one more logit of each head that takes weight.
    """
    heads, count, _ = block.logits.shape
    rest = (block.n > 1).expand(heads, count).reshape(-1, 1)
    level = torch.where(rest, apart.largest, apart.sink)
    z = rows.scatter_(1, apart.first, LOW).scatter_(1, apart.where, LOW).sub_(level)
    e = torch.exp(z, out=workspace.array(*z.shape))
    others = e.sum(-1, keepdim=True)
    log_others = torch.log(others)
    small = others < SMALLEST_SUM
    if too_few_to_wait(block.queries):
        log_others = torch.where(small, torch.logsumexp(z, -1, keepdim=True), log_others)
    elif bool(small.any()):
        some = small.squeeze(-1).nonzero().squeeze(-1)
        log_others[some] = torch.logsumexp(z[some], -1, keepdim=True)
    e_log_e = z.mul_(e).sum(-1, keepdim=True)
    norm = torch.linalg.vector_norm(e, dim=-1, keepdim=True)
    top = heaviest(e, max(top_n), scratch=z)

    sink = apart.sink - level
    learned = None
    if learned_sink is not None:
        learned = learned_sink.to(z)[:, None].expand(heads, count).reshape(-1, 1) - level
    root = _jacobian_root(e, z, apart.first, rest, top[:, :1], sink, learned)
    sums = torch.cat([torch.zeros_like(sink), top.cumsum(-1)], -1)
    heavy = [min(max(N - less, 0), top.shape[-1]) for less in (1, 2) for N in top_n]
    learned = torch.full_like(sink, -torch.inf) if learned is None else learned
    columns = [level, sink, learned, log_others, e_log_e, norm.square(), root, *(sums[:, N : N + 1] for N in heavy)]
    return torch.cat(columns, -1)


def _jacobian_root(
    e: Tensor,
    scratch: Tensor,
    first: Tensor,
    rest: Tensor,
    next_largest: Tensor,
    sink: Tensor,
    learned: Tensor | None,
) -> Tensor:
    """The norm of diag(e) - e e^T / (sum of all) over the keys."""
    # Two sinks may both be large and yet of different size: that takes the wider range.
    dtype = e.dtype if learned is None else torch.float64
    sink_e = torch.exp(sink.to(dtype).clamp(max=LARGEST_EXPONENT[dtype]))
    at_zero = None if learned is None else torch.exp(learned.to(dtype).clamp(max=LARGEST_EXPONENT[dtype]))
    largest = rest.to(dtype)
    smaller = torch.minimum(sink_e, largest)
    e.scatter_(1, first, smaller.to(e.dtype))
    second = torch.maximum(smaller, next_largest)
    root = rank_one_root(torch.maximum(sink_e, largest), second, e, at_zero, scratch)
    return root.to(e.dtype)


def softmax_statistics(columns: Tensor, n: Tensor, top_n: Sequence[int]) -> tuple[dict[str, Tensor], Tensor]:
    """Statistics (...) and masses of the heaviest keys (..., len(top_n)) from the columns (..., c) of `row_sums`."""
    sums = RowSums.joined(columns)
    alone = n <= 1
    n = n.to(columns.dtype)
    others = torch.exp(sums.log_others)
    # Without the sink: m, the sink's share of the keys' weight, is not yet there.
    total = 1 + others
    log_total = torch.log1p(others)
    entropy_rest = log_total - sums.e_log_e / total
    log_total = log_total.masked_fill(alone, -torch.inf)
    squares_rest = (1 + sums.squares) / total.square()
    largest_rest = 1 / total
    # With it.
    odds = sums.sink - log_total
    m, left = torch.sigmoid(odds), torch.sigmoid(-odds)
    entropy = m * softplus(-odds) + left * (softplus(odds) + entropy_rest)
    gap = torch.where(sums.sink >= 0, odds, -torch.logaddexp(sums.sink, sums.log_others)) + torch.log(n - 1)
    # With a learned sink, which is no key.
    log_keys = torch.logaddexp(sums.sink, log_total)
    key_share = torch.sigmoid(log_keys - sums.learned)
    values = {
        "entropy_nats": entropy.masked_fill(alone, 0.0),
        "effective_keys": (1 / (m.square() + left.square() * squares_rest)).masked_fill(alone, 1.0),
        "max_weight": key_share * torch.maximum(m, left * largest_rest).masked_fill(alone, 1.0),
        "effective_gap": gap.masked_fill(alone, torch.nan),
        "row_sum": key_share,
        "sink_mass": key_share * m + torch.sigmoid(sums.learned - log_keys),
        "entropy_nats_without_sink": entropy_rest.masked_fill(alone, torch.nan),
        "effective_keys_without_sink": (1 / squares_rest).masked_fill(alone, torch.nan),
        "max_weight_without_sink": largest_rest.masked_fill(alone, torch.nan),
        "effective_gap_without_sink": (torch.log(n - 2) - sums.log_others).masked_fill(n <= 2, torch.nan),
        "jacobian_norm": _jacobian_norm(sums, log_keys),
        "logsumexp": sums.level + torch.logaddexp(log_keys, sums.learned),
    }
    return values, _masses(columns[..., len(RowSums._fields) :], alone, m, left * largest_rest, top_n)


def _jacobian_norm(sums: RowSums, log_keys: Tensor) -> Tensor:
    log_all = torch.logaddexp(log_keys, sums.learned).double()
    return (sums.root * torch.exp(-log_all)).to(log_keys.dtype)


def _masses(heavy: Tensor, alone: Tensor, sink: Tensor, largest: Tensor, top_n: Sequence[int]) -> Tensor:
    """The N heaviest are the largest with N - 1 others, or the sink with N - 1 of them, whichever is more."""
    largest, sink = largest.masked_fill(alone, 0.0).unsqueeze(-1), sink.unsqueeze(-1)
    without, beside_sink = (largest * (1 + part) for part in (heavy[..., : len(top_n)], heavy[..., len(top_n) :]))
    for index, N in enumerate(top_n):
        if N == 1:
            beside_sink[..., index].zero_()
    return torch.maximum(without, sink + beside_sink).clamp(max=1)


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
