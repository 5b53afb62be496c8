"""Samples to one number per layer and metric, on the device; what leaves it is a single small tensor.

Layers of the same shape are measured as the heads of one call: on a GPU thirty small layers take thirty times as long
as one, whatever their size.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from attnorm.engines.inputs import without_autocast
from attnorm.metrics.call import AttentionCall
from attnorm.metrics.logits import logit_blocks
from attnorm.metrics.normalized import MODEL, as_normalizer, measured, rows_block
from attnorm.metrics.null import deal
from attnorm.metrics.rows import measure_rows
from attnorm.metrics.sampling import spread
from attnorm.monitor.sample import Sample
from attnorm.normalizers.contract import Normalizer, ScaleRule
from attnorm.normalizers.softmax import Softmax
from attnorm.theory.geometry import separability
from attnorm.theory.selection import SelectedRows, at_least_float32, top_n_indices


@dataclass(frozen=True)
class Reported:
    """A number as it is logged: the mean over heads, and that of the worst head."""

    source: str  # its name in metrics.catalogue, or in the top-N numbers
    worst: Literal["min", "max"]


REPORTED: dict[str, Reported] = {
    "entropy": Reported("entropy_nats", "min"),
    "entropy_ratio": Reported("entropy_ratio", "max"),
    "effective_keys": Reported("effective_keys", "max"),
    "max_logit": Reported("max_logit", "max"),
    "logit_spread": Reported("logit_spread", "min"),
    "separability": Reported("separability", "min"),
    "separability_null": Reported("separability_null", "min"),
    "jacobian_norm": Reported("jacobian_norm", "max"),
    "sink_mass": Reported("sink_mass", "max"),
}
BROKEN = "broken_rows"
SEPARABILITY_ROWS = 8  # of the sampled rows: it costs several times as much as all the rest


@torch.no_grad()
def measure(samples: Sequence[Sample], top_n: int) -> Iterator[tuple[Sample, Tensor]]:
    """Of each sample (len(REPORTED) + 1, H): the heads' means over the longest rows, and their share of broken ones."""
    groups: dict[object, list[Sample]] = {}
    for number, sample in enumerate(samples):
        groups.setdefault(number if sample.group is None else sample.group, []).append(sample)
    for members in groups.values():
        call = members[0].call if len(members) == 1 else _side_by_side([member.call for member in members])
        numbers = _numbers(call, members[0].rows, top_n)
        heads = [member.call.query_BHQD.shape[1] for member in members]
        yield from zip(members, numbers.split(heads, dim=1), strict=True)


def _numbers(call: AttentionCall, rows: Tensor, top_n: int) -> Tensor:
    found = measure_rows(call, [None], rows, (top_n,))[MODEL]
    n, broken = (t[0].expand(call.query_BHQD.shape[1], -1) for t in (found.n, found.broken))
    # As in analysis: rows of very different n are not averaged into one number.
    long = n > (n.amax(-1, keepdim=True) / 2**0.5).floor()
    values = {name: value[0] for name, value in found.values.items()}
    values |= dict(zip(("separability", "separability_null"), _separability(call, rows, top_n), strict=True))
    means = [torch.where(long, values[metric.source].double(), torch.nan).nanmean(-1) for metric in REPORTED.values()]
    return torch.stack([*means, (broken & long).sum(-1) / long.sum(-1).clamp(min=1)])


def _separability(call: AttentionCall, rows: Tensor, top_n: int) -> Tensor:
    """(2, H, R): of the rows' N heaviest keys, and with their weights dealt out anew; NaN on all but a few rows."""
    (one,) = measured(call, [None])
    normalizer = as_normalizer(one, call)
    values = at_least_float32(call.value_BGKE)
    found = values.new_full((2, call.query_BHQD.shape[1], len(rows)), torch.nan)
    few = spread(torch.arange(len(rows)), SEPARABILITY_ROWS)
    generator = torch.Generator().manual_seed(0)
    with without_autocast(values.device):
        for block in logit_blocks(call, rows[few].to(values.device), all_heads=True):
            weights = normalizer.weights(rows_block(call, block))[0]
            x = values[0, :, block.first_key : block.first_key + weights.shape[-1]]
            x = pad(x, (0, 0, 0, weights.shape[-1] - x.shape[-2])).to(weights.dtype)
            dealt = deal(block.visible, 1, generator)[0].expand(weights.shape)
            shares = _told_apart(weights, block.visible.expand(weights.shape), x, dealt, top_n)
            found[:, :, few[block.rows]] = torch.where(weights.isfinite().all(-1), shares, torch.nan)
    return found


def _told_apart(weights: Tensor, visible: Tensor, x: Tensor, dealt: Tensor, top_n: int) -> Tensor:
    """(2, h, r) from weights, visibility and new keys (h, r, w), and vectors (g, w, E); NaN where n <= N."""
    shape, groups = weights.shape[:2], (len(x), -1, weights.shape[-1])
    weights, visible, dealt = (t.reshape(groups) for t in (weights, visible, dealt))
    x = torch.where(visible.any(-2).unsqueeze(-1), x, 0.0)  # what no row sees may be anything
    heaviest = top_n_indices(weights, top_n, visible)
    rows = SelectedRows(weights, x, visible, heaviest, False)
    permuted = torch.zeros_like(weights).scatter_(-1, dealt, weights)
    chance = SelectedRows(permuted, x, visible, dealt.gather(-1, heaviest), False)
    return torch.stack([separability(rows), separability(chance)]).reshape(2, *shape)


def _side_by_side(calls: Sequence[AttentionCall]) -> AttentionCall:
    """One call that has the heads of all of them."""

    def joined(part: Callable[[AttentionCall], Tensor]) -> Tensor:
        return torch.cat([part(call) for call in calls], dim=1)

    first = calls[0]
    sinks = [call.sinks_H for call in calls if call.sinks_H is not None]
    normalizers = [call.normalizer for call in calls if isinstance(call.normalizer, Normalizer)]
    heads = [call.query_BHQD.shape[1] for call in calls]
    return replace(
        first,
        query_BHQD=joined(lambda call: call.query_BHQD),
        key_BGKD=joined(lambda call: call.key_BGKD),
        value_BGKE=joined(lambda call: call.value_BGKE),
        sinks_H=torch.cat(sinks) if sinks else None,
        normalizer=Normalizer(Softmax(), scale=[_EachItsOwn(normalizers, heads)]) if normalizers else None,
    )


class _EachItsOwn(ScaleRule):
    """The factors of several normalizers, each for its own heads."""

    def __init__(self, normalizers: Iterable[Normalizer], heads: Sequence[int]) -> None:
        super().__init__()
        self.normalizers = nn.ModuleList(normalizers)
        self.heads = heads

    def factor(self, n: Tensor, positions: Tensor | None, hidden_states: Tensor | None) -> Tensor:
        factors = []
        for normalizer, heads in zip(self.normalizers, self.heads, strict=True):
            assert isinstance(normalizer, Normalizer)
            own = torch.ones_like(n)
            for rule in normalizer.rules:
                assert isinstance(rule, ScaleRule)
                own = own * rule.factor(n, None, None).to(n.dtype)
            factors.append(own.expand(*own.shape[:-3], heads, *own.shape[-2:]))
        return torch.cat(factors, dim=-3)
