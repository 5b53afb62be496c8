"""Measure samples on the device, one number per layer and metric; only one small tensor is transferred.

Layers of the same shape are measured as the heads of one call: on a GPU thirty small layers take thirty times as long
as one, whatever their size.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from attnorm.engines.device_sync import sent_to
from attnorm.engines.inputs import without_autocast
from attnorm.metrics.call import AttentionCall, stacked
from attnorm.metrics.logits import GROUP, logit_blocks
from attnorm.metrics.normalized import MODEL, as_normalizer, resolve_normalizers, rows_block
from attnorm.metrics.rows import measure_rows
from attnorm.metrics.sampling import spread
from attnorm.monitor.sample import Sample
from attnorm.monitor.separability_null import random_scores, separability_and_null
from attnorm.normalizers.contract import Normalizer, ScaleRule
from attnorm.normalizers.softmax import Softmax
from attnorm.theory.selection import at_least_float32


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
OF_FEW = ("separability", "separability_null")
OF_ROWS = tuple(metric.source for metric in REPORTED.values() if metric.source not in OF_FEW)
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
    found = measure_rows(call, [None], rows, (), names=OF_ROWS)[MODEL]
    n, broken = found.n[0], found.broken[0]
    # As in analysis: rows of very different n are not averaged into one number.
    long = n > (n.amax(-1, keepdim=True) / 2**0.5).floor()
    few = spread(torch.arange(len(rows), device=rows.device), SEPARABILITY_ROWS)
    at_few = sent_to(n.device, few)
    means = dict(zip(OF_ROWS, _means(torch.stack([found.values[name][0] for name in OF_ROWS]), long), strict=True))
    means |= dict(zip(OF_FEW, _means(_separability(call, rows[few], top_n), long[:, at_few]), strict=True))
    share_broken = (broken & long).sum(-1) / long.sum(-1).clamp(min=1)
    return torch.stack([*(means[metric.source] for metric in REPORTED.values()), share_broken])


def _means(values: Tensor, long: Tensor) -> Tensor:
    return values.double().masked_fill(~long, torch.nan).nanmean(-1)


def _separability(call: AttentionCall, rows: Tensor, top_n: int) -> Tensor:
    """(2, H, R): of the rows' N heaviest keys, and of the same weights permuted."""
    (one,) = resolve_normalizers(call, [None])
    normalizer = as_normalizer(one, call)
    values = at_least_float32(call.value_BGKE[0])
    beyond = -values.shape[-2] % GROUP  # as blocks are padded
    values = pad(values, (0, 0, 0, beyond)) if beyond else values
    scores = random_scores(len(rows), values.shape[-2], values.device)
    found = []
    with without_autocast(values.device):
        for block in logit_blocks(call, rows, all_heads=True):
            weights = normalizer.weights(rows_block(call, block))[0]
            # A softmax's logits are its weights' logarithms: what underflows keeps its order.
            logs = None
            if one.scaled_softmax:
                factor = one.factor(call, block)
                logs = (block.logits if factor is None else block.logits * factor).to(weights.dtype)
            keys = slice(block.first_key, block.first_key + weights.shape[-1])
            x = values[:, keys].to(weights.dtype)
            found.append(separability_and_null(weights, block.visible, x, scores[block.rows, keys], top_n, logs))
    return torch.cat(found, -1)


def _side_by_side(calls: Sequence[AttentionCall]) -> AttentionCall:
    """One call with the heads of all calls."""

    normalizers = [call.normalizer for call in calls if isinstance(call.normalizer, Normalizer)]
    heads = [call.query_BHQD.shape[1] for call in calls]
    normalizer = Normalizer(Softmax(), scale=[_EachItsOwn(normalizers, heads)]) if normalizers else None
    return replace(stacked(calls), normalizer=normalizer)


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
            rules = [rule for rule in normalizer.rules if isinstance(rule, ScaleRule)]
            own = reduce(torch.mul, [rule.factor(n, None, None).to(n.dtype) for rule in rules] or [torch.ones_like(n)])
            every = (*n.shape[:-3], heads, *n.shape[-2:])
            factors.append(own.expand(torch.broadcast_shapes(own.shape, every)))
        return torch.cat(factors, dim=-3)
