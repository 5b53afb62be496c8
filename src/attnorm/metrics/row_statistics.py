"""Statistics of rows: for softmax from its logits, for any other map from its weights.

Softmax: two keys of each row are separated first (`split_rows`): the first visible key, which is the sink, and the
largest of the others. `row_sums` sums the remaining keys relative to this largest one, block by block.
`softmax_statistics` adds both keys again in closed form, once for all rows: first the numbers without the sink, then
those with it. Nothing is subtracted, so all numbers keep their digits if the largest weight or the sink tends to 1.

Other maps (`weight_rows`): weights may be signed, sparse, or not normalised. Entropy, effective keys, gap and masses
are those of |w| / sum |w|. A row whose weights are all 0 has none of these numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from attnorm.engines.execution import runs_asynchronously
from attnorm.metrics.call import GROUP, LOW, LogitBlock, LogitWorkspace, too_few_to_wait
from attnorm.theory.rank_one_eigenvalues import rank_one_root

# The square of exp overflows above this, in float32 and float64. A sink as large as that has all of the weight.
LARGEST_EXPONENT = {torch.float32: 40.0, torch.float64: 300.0}
# Keys that are this far below both sinks add less than a rounding error. e^60 times a million keys fits into float32.
FAR = 60.0
# Below this a sum of exponentials may have lost its digits to underflow.
SMALLEST_SUM = 1e-30
LISTED = 16  # entries per list of `largest_numbers`: divides the columns of a block of logits


def largest_numbers(rows: Tensor, count: int) -> Tensor:
    """Return the `count` largest entries of each row (..., L), largest first.

    torch's topk reads its input about six times on a GPU. So a row is divided into lists of LISTED entries. The `count`
    lists with the largest maxima contain the `count` largest entries, and topk reads only the maxima and these lists.
    """
    length = rows.shape[-1]
    count = min(count, length)
    if length % LISTED or length < 4 * LISTED * count:
        return rows.topk(count, dim=-1).values
    lists = rows.view(*rows.shape[:-1], LISTED, -1)  # a column is a list, so that neighboring threads read neighbors
    chosen = lists.amax(-2).topk(count, dim=-1, sorted=False).indices
    entries = lists.gather(-1, chosen.unsqueeze(-2).expand(*lists.shape[:-1], -1))
    return entries.flatten(-2).topk(count, dim=-1).values


def heaviest(rows: Tensor, count: int, *, scratch: Tensor | None = None) -> Tensor:
    """Return the `count` largest entries of each row (rows, L), largest first. scratch: buffer of the same shape."""
    count = min(count, rows.shape[-1])
    if runs_asynchronously(rows):
        return largest_numbers(rows, count)
    # numpy selects with vector instructions: ten times as fast as torch's topk.
    part = torch.empty_like(rows) if scratch is None else scratch
    numbers = part.copy_(rows).numpy()
    numbers.partition(numbers.shape[-1] - count, axis=-1)
    return torch.from_numpy(np.sort(numbers[:, -count:], axis=-1)[:, ::-1].copy())


def sums_of_first(numbers: Tensor, top_n: Sequence[int]) -> Tensor:
    """Return the sum of the first N numbers of each row (..., L), or of all, for each N: (..., len(top_n))."""
    sums = numbers.cumsum(-1)
    return torch.stack([sums[..., min(N, sums.shape[-1]) - 1] for N in top_n], -1)


def masses(weights: Tensor, top_n: Sequence[int]) -> Tensor:
    """Return the sum of the N largest weights of each row for each N, (rows, len(top_n))."""
    return sums_of_first(heaviest(weights, weights.shape[-1]), top_n)


@dataclass(frozen=True)
class SplitRows:
    """The first visible key of each row and the extremes of the other keys, (rows, 1) each.

    Without other keys, the largest is LOW and the smallest is inf.
    """

    first: Tensor  # column of the first visible key
    sink: Tensor  # its logit
    where: Tensor  # column of the largest of the others
    largest: Tensor
    smallest: Tensor


def split_rows(rows: Tensor, block: LogitBlock) -> SplitRows:
    """Find the keys to separate in the rows (h r, w)."""
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
    return SplitRows(first, sink, members.gather(1, index), largest, smallest)


class RowSums(NamedTuple):
    """Sums over a row of e = exp(z - level). The level is the largest logit, without the first visible key.

    `others` are all keys except the first visible one and this largest one. In a row of one key, the level is its
    logit.
    """

    level: Tensor
    sink: Tensor  # log e of the first visible key
    learned: Tensor  # log e of the learned sink, -inf if there is none
    log_others: Tensor  # log sum e
    e_log_e: Tensor  # sum e log e
    squares: Tensor  # sum e^2
    root: Tensor  # norm of the Jacobian times the sum of all e, the learned sink's included, over e^shared_height

    @classmethod
    def from_columns(cls, columns: Tensor) -> "RowSums":
        return cls(*columns[..., : len(cls._fields)].unbind(-1))


def row_sums(
    rows: Tensor,
    block: LogitBlock,
    split: SplitRows,
    top_n: Sequence[int],
    workspace: LogitWorkspace,
    learned_sink: Tensor | None = None,
) -> Tensor:
    """Return columns: the fields of RowSums, then for each N the sums of the N - 1, and of the N - 2, heaviest others.

    Overwrites the logits (h r, w). learned_sink (h,): one more logit of each head that takes weight.
    """
    heads, count, _ = block.logits.shape
    rest = (block.n > 1).expand(heads, count).reshape(-1, 1)
    level = torch.where(rest, split.largest, split.sink)
    z = rows.scatter_(1, split.first, LOW).scatter_(1, split.where, LOW).sub_(level)
    e = torch.exp(z, out=workspace.array(*z.shape))
    others = e.sum(-1, keepdim=True)
    log_others = torch.log(others)
    small = others < SMALLEST_SUM
    if too_few_to_wait(block.queries):
        log_others = torch.where(small, torch.logsumexp(z, -1, keepdim=True), log_others)
    elif bool(small.any()):
        small_rows = small.squeeze(-1).nonzero().squeeze(-1)
        log_others[small_rows] = torch.logsumexp(z[small_rows], -1, keepdim=True)
    e_log_e = z.mul_(e).sum(-1, keepdim=True)
    norm = torch.linalg.vector_norm(e, dim=-1, keepdim=True)
    top = heaviest(e, max(top_n), scratch=z)

    sink = split.sink - level
    learned = None
    if learned_sink is not None:
        learned = learned_sink.to(z)[:, None].expand(heads, count).reshape(-1, 1) - level
    root = _jacobian_root(e, z, split.first, rest, top[:, :1], sink, learned)
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
    """Return the norm of diag(e) - e e^T / (sum of all e) over the keys, for e divided by e^shared_height."""
    dtype = e.dtype
    height, at_zero = torch.zeros_like(sink), None
    if learned is not None:
        dtype = torch.float64  # two sinks of different size need its range
        height = shared_height(sink, learned)
        at_zero = torch.exp((learned - height).to(dtype).clamp(max=LARGEST_EXPONENT[dtype]))
        e.mul_(torch.exp(-height))
        next_largest = next_largest * torch.exp(-height)
    sink_e = torch.exp((sink - height).to(dtype).clamp(max=LARGEST_EXPONENT[dtype]))
    largest = rest.to(dtype) * torch.exp(-height)
    smaller = torch.minimum(sink_e, largest).to(e.dtype)
    e.scatter_(1, first, smaller)
    second = torch.maximum(smaller, next_largest).to(dtype)
    root = rank_one_root(torch.maximum(sink_e, largest), second, e, at_zero, scratch)
    return root.to(e.dtype)


def shared_height(sink: Tensor, learned: Tensor) -> Tensor:
    """Return how far both sinks are above the other keys, if these are negligible; otherwise 0."""
    height = torch.minimum(sink, learned)
    return torch.where(height > FAR, height, 0.0)


def softmax_statistics(columns: Tensor, n: Tensor, top_n: Sequence[int]) -> tuple[dict[str, Tensor], Tensor]:
    """Return statistics (...) and masses of the heaviest keys (..., len(top_n)) from the columns of `row_sums`."""
    sums = RowSums.from_columns(columns)
    alone = n <= 1
    n = n.to(columns.dtype)
    others = torch.exp(sums.log_others)
    # Without the sink.
    total = 1 + others
    log_total = torch.log1p(others)
    entropy_rest = log_total - sums.e_log_e / total
    log_total = log_total.masked_fill(alone, -torch.inf)
    squares_rest = (1 + sums.squares) / total.square()
    largest_rest = 1 / total
    # With the sink: m is its share of the weight of all keys.
    odds = sums.sink - log_total
    m, left = torch.sigmoid(odds), torch.sigmoid(-odds)
    entropy = m * softplus(-odds) + left * (softplus(odds) + entropy_rest)
    gap = torch.where(sums.sink >= 0, odds, -torch.logaddexp(sums.sink, sums.log_others)) + torch.log(n - 1)
    # With a learned sink, which is not a key.
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
    return values, _top_masses(columns[..., len(RowSums._fields) :], alone, m, left * largest_rest, top_n)


def _jacobian_norm(sums: RowSums, log_keys: Tensor) -> Tensor:
    height = shared_height(sums.sink, sums.learned).double()
    log_all = torch.logaddexp(log_keys - height, sums.learned - height)
    return (sums.root * torch.exp(-log_all)).to(log_keys.dtype)


def _top_masses(heavy: Tensor, alone: Tensor, sink: Tensor, largest: Tensor, top_n: Sequence[int]) -> Tensor:
    """Return the mass of the N heaviest keys: the largest key and N - 1 others, or the sink and N - 1 of these."""
    largest, sink = largest.masked_fill(alone, 0.0).unsqueeze(-1), sink.unsqueeze(-1)
    without, beside_sink = (largest * (1 + part) for part in (heavy[..., : len(top_n)], heavy[..., len(top_n) :]))
    for index, N in enumerate(top_n):
        if N == 1:
            beside_sink[..., index].zero_()
    return torch.maximum(without, sink + beside_sink).clamp(max=1)


def weight_rows(
    weights: Tensor, block: LogitBlock, top_n: Sequence[int], *, rest_is_sink: bool = False
) -> dict[str, Tensor]:
    """Return statistics (h r, 1), and "top_mass" (h r, len(top_n)), of weights (h, r, w) that are 0 at hidden keys.

    rest_is_sink: whether 1 minus the sum of a row is the weight of a learned sink.
    """
    heads, count, width = weights.shape
    weights = weights.reshape(-1, width)
    n = block.n.expand(heads, count).reshape(-1, 1).to(weights.dtype)
    first = block.first_visible.expand(heads, count).reshape(-1, 1)
    row_sum = weights.sum(-1, keepdim=True)
    w = weights.abs()
    sink = w.gather(1, first)
    w.scatter_(1, first, 0.0)
    largest, largest_column = w.max(-1, keepdim=True)
    w.scatter_(1, largest_column, 0.0)
    others = w.sum(-1, keepdim=True)
    top = heaviest(w, max(top_n))

    rest = largest + others
    has_rest = rest > 0
    safe = torch.where(has_rest, rest, 1.0)
    p, p_largest = w.div_(safe), largest / safe
    entropy_rest = _entropy_terms(p).sum(-1, keepdim=True) + _entropy_terms(p_largest)
    squares_rest = p.square_().sum(-1, keepdim=True) + p_largest.square()  # vector_norm is less exact for many keys

    total = sink + rest
    has_any = total > 0
    total = torch.where(has_any, total, 1.0)
    m, left = sink / total, rest / total
    entropy = _entropy_terms(m) + _entropy_terms(left) + left * entropy_rest
    winner, loser = torch.maximum(sink, largest), torch.minimum(sink, largest)
    gap = torch.log(winner) - torch.log(loser + others) + torch.log(n - 1)
    gap_rest = torch.log(largest) - torch.log(others) + torch.log(n - 2)

    def nan_unless(condition: Tensor, value: Tensor) -> Tensor:
        return torch.where(condition, value, torch.nan)

    return {
        "entropy_nats": nan_unless(has_any, entropy),
        "effective_keys": nan_unless(has_any, 1 / (m.square() + left.square() * squares_rest)),
        "max_weight": nan_unless(has_any, winner),
        "effective_gap": nan_unless(has_any & (n > 1), gap),
        "row_sum": row_sum,
        "sink_mass": sink + (1 - row_sum) if rest_is_sink else nan_unless(has_any, m),
        "entropy_nats_without_sink": nan_unless(has_rest, entropy_rest),
        "effective_keys_without_sink": nan_unless(has_rest, 1 / squares_rest),
        "max_weight_without_sink": nan_unless(has_rest, p_largest),
        "effective_gap_without_sink": nan_unless(has_rest & (n > 2), gap_rest),
        "top_mass": nan_unless(has_any, masses(torch.cat([top, largest, sink], -1) / total, top_n)),
    }


def _entropy_terms(p: Tensor) -> Tensor:
    return -torch.xlogy(p, p)


def requested_numbers(values: Mapping[str, Tensor], names: Sequence[str], place: str) -> dict[str, Tensor]:
    """Return the numbers of these names. place: where to add a metric that is in the catalogue and not computed yet."""
    for name in names:
        if name not in values:
            raise NotImplementedError(
                f"expected the metric {name!r} in {place}, got none. Add it there: CONTRIBUTING.md, Add a metric."
            )
    return {name: values[name] for name in names}
