"""Samples of attention calls, kept until the forward pass ends, and their measurement on the device.

A sample is some of the last rows of one sequence of the batch; where a Triton kernel measures them, all rows of that
sequence. Means are taken over the longest rows, those of entropy and sink mass also over all, as is the largest logit.
Copies, not views: a view would keep a whole layer's activations alive, which gradient checkpointing frees. Parameters
are copied too: FSDP frees them as soon as the layer has run.

Samples give one number per layer and metric, and only one small tensor is transferred. Layers of the same shape are
measured as the heads of one call: on a GPU thirty small layers take thirty times as long as one, whatever their size.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from attnorm.engines.execution import sent_to
from attnorm.engines.inputs import without_autocast
from attnorm.metrics import fused_maps, fused_rows
from attnorm.metrics.call import GROUP, AttentionCall, logit_blocks, stack_calls
from attnorm.metrics.nested_sets import NestedSets
from attnorm.metrics.normalized import (
    MODEL,
    MeasuredNormalizer,
    as_normalizer,
    resolve_normalizers,
    rows_block,
    with_own_tensors,
)
from attnorm.metrics.rows import measure_rows
from attnorm.metrics.sampling import evenly_spaced, length_bins, one_sequence
from attnorm.metrics.separability import separability_and_null
from attnorm.normalizers.contract import Mechanism, Normalizer, ScaleRule
from attnorm.normalizers.softmax import Softmax
from attnorm.theory.selection import at_least_float32, top_n_indices

BROKEN = "broken_rows"
OF_FEW = ("separability", "separability_null")
SEPARABILITY_ROWS = 8  # of the sampled rows: it costs several times as much as all the rest
DRAWS = 3  # the row itself, with two nearly equal weights exchanged, and permuted


@dataclass(frozen=True)
class Sample:
    """The sampled rows of one attention call.

    Samples of the same group may be measured as the heads of a single call; with group None, it is measured alone.
    """

    call: AttentionCall
    rows: Tensor  # of the call's queries
    longest_from: int  # the longest rows begin at this place of `rows`
    group: tuple[object, ...] | None

    @property
    def size(self) -> int:
        """Size in bytes."""
        tensors = (self.call.query_BHQD, self.call.key_BGKD, self.call.value_BGKE)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Sampler:
    """Takes the samples of one forward pass."""

    def __init__(self, tokens: Mapping[str, Tensor], rows: int) -> None:
        """tokens: by kind of attention, which queries are no padding, (B, Q); without a kind, all are tokens."""
        self._tokens = {kind: mask.cpu() for kind, mask in tokens.items()}
        self._count = rows
        self._rows: dict[tuple[object, ...], tuple[int, Tensor, int]] = {}
        self._seen: dict[tuple[object, ...], tuple[object, Tensor | None]] = {}
        self._masks: list[Tensor | None] = []

    @torch.no_grad()
    def take(self, call: AttentionCall) -> Sample:
        scales_softmax = _scales_softmax(call)
        all_rows = takes_all_rows(call, scales_softmax)
        item, rows, longest_from = self._item_and_rows(call, all_rows)
        sequence = replace(one_sequence(call, item), inputs_BKC=None)
        if (
            not scales_softmax
            or sequence.bias is not None
            or (sequence.mask is not None and sequence.mask.shape[1] > 1)
        ):
            return Sample(_copy_call(sequence), rows, longest_from, None)
        mask = sequence.mask if all_rows else self._visible(call, sequence, item, rows)
        per_group = call.query_BHQD.shape[1] // call.key_BGKD.shape[1]
        shapes = (len(rows), per_group, *call.key_BGKD.shape[2:], call.value_BGKE.shape[3])
        settings = (call.scale, call.softcap, call.sinks_H is None, call.normalizer is None, call.causal)
        shared = call.mask if all_rows else mask
        self._masks.append(shared)  # or another mask might get its id
        about = (call.kind, call.query_BHQD.shape[2], call.query_BHQD.device, call.query_BHQD.dtype)
        group = (*about, *shapes, *settings, id(shared))
        if all_rows:
            return Sample(_copy_call(sequence), rows, longest_from, group)
        sampled = replace(sequence, query_BHQD=sequence.query_BHQD[:, :, rows], mask=mask, causal=False)
        return Sample(_copy_call(sampled), torch.arange(len(rows), device=rows.device), longest_from, group)

    def _item_and_rows(self, call: AttentionCall, all_rows: bool) -> tuple[int, Tensor, int]:
        """Return the sequence with the most tokens, its rows to measure, and where the longest of these begin.

        The longest are the last bin of n, as in analysis. Without a kernel only some of these are measured.
        """
        batch, queries, device = call.query_BHQD.shape[0], call.query_BHQD.shape[2], call.query_BHQD.device
        device = torch.device("cpu") if all_rows else device  # the kernel's launch needs them there
        key = (call.kind, batch, queries, device, all_rows)
        if key not in self._rows:
            tokens = self._tokens.get(call.kind)
            if tokens is None or tokens.shape != (batch, queries):
                item, present = 0, torch.arange(queries, device=device)
            else:
                item = int(tokens.sum(-1).argmax())
                present = tokens[item].nonzero().squeeze(-1).to(device)
            longest_from = 0
            if call.kind == "decoder" and len(present):
                longest_from = length_bins(len(present))[0][0] - 1
            if all_rows:
                self._rows[key] = item, present, longest_from
            else:
                self._rows[key] = item, evenly_spaced(present[longest_from:], self._count), 0
        return self._rows[key]

    def _visible(self, call: AttentionCall, sequence: AttentionCall, item: int, rows: Tensor) -> Tensor | None:
        """Return which keys these rows see, (1, 1, R, K); computed once for all layers that share a mask."""
        queries, keys = call.query_BHQD.shape[2], call.key_BGKD.shape[2]
        key = (call.kind, id(call.mask), call.causal, item, queries, keys, rows.device)
        if key not in self._seen:
            mask = sequence.mask
            # A mask per query is complete, as in metrics.call.
            causal = call.causal and (mask is None or mask.shape[-2] == 1 or queries == keys)
            if mask is not None and mask.shape[-2] > 1:
                mask = mask[:, :, rows]
            if causal:
                reach = (rows + (keys - queries))[:, None]
                earlier = (torch.arange(keys, device=rows.device) <= reach)[None, None]
                mask = earlier if mask is None else mask & earlier
            if mask is not None:
                mask = mask.expand(1, 1, len(rows), keys)
            self._seen[key] = call.mask, mask
        return self._seen[key][1]


def takes_all_rows(call: AttentionCall, scales_softmax: bool) -> bool:
    """Whether a Triton kernel measures the call: softmax, a rescaling, or a map of metrics.fused_maps, on a GPU."""
    if not (call.query_BHQD.is_cuda and fused_rows.applies(call)) or isinstance(call.normalizer, Mechanism):
        return False
    return scales_softmax or fused_maps.kernel_form(call.normalizer) is not None


def _copy_call(call: AttentionCall) -> AttentionCall:
    return replace(
        call,
        normalizer=None if call.normalizer is None else with_own_tensors(call.normalizer),
        sinks_H=None if call.sinks_H is None else call.sinks_H.detach().clone(),
        query_BHQD=call.query_BHQD.detach().clone(),
        key_BGKD=call.key_BGKD.detach().clone(),
        value_BGKE=call.value_BGKE.detach().clone(),
    )


def _scales_softmax(call: AttentionCall) -> bool:
    """Softmax of logits times a factor of the head and n only: rows can be measured without the others."""
    normalizer = call.normalizer
    if isinstance(normalizer, Mechanism):
        return False
    return normalizer is None or (normalizer.sink is None and MeasuredNormalizer("", normalizer).scaled_softmax)


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
    "largest_logit": Reported("largest_logit", "max"),
    "logit_spread": Reported("logit_spread", "min"),
    "separability": Reported("separability", "min"),
    "separability_null": Reported("separability_null", "min"),
    "jacobian_norm": Reported("jacobian_norm", "max"),
    "sink_mass": Reported("sink_mass", "max"),
    "entropy_all_rows": Reported("entropy_nats", "min"),
    "entropy_ratio_all_rows": Reported("entropy_ratio", "max"),
    "sink_mass_all_rows": Reported("sink_mass", "max"),
}
LARGEST = "largest_logit"  # over all rows that are measured, short ones too
MEANS_OF_ALL = ("entropy_all_rows", "entropy_ratio_all_rows", "sink_mass_all_rows")
OF_LONGEST = tuple(name for name in REPORTED if name not in (*OF_FEW, LARGEST, *MEANS_OF_ALL))
STATISTICS = tuple(REPORTED[name].source for name in OF_LONGEST)


@torch.no_grad()
def measure(samples: Sequence[Sample], top_n: int) -> Iterator[tuple[Sample, Tensor]]:
    """Yield each sample with its numbers, (len(REPORTED) + 1, H).

    These are the means of each head over the longest rows or over all, and its share of broken rows.
    """
    groups: dict[object, list[Sample]] = {}
    for number, sample in enumerate(samples):
        groups.setdefault(number if sample.group is None else sample.group, []).append(sample)
    for members in groups.values():
        call = members[0].call if len(members) == 1 else _stack_layers([member.call for member in members])
        numbers = _measure_call(call, members[0].rows, members[0].longest_from, top_n)
        heads = [member.call.query_BHQD.shape[1] for member in members]
        yield from zip(members, numbers.split(heads, dim=1), strict=True)


def _measure_call(call: AttentionCall, rows: Tensor, longest_from: int, top_n: int) -> Tensor:
    statistics = measure_rows(call, [None], rows, (), names=STATISTICS)[MODEL]
    n, broken = statistics.n[0], statistics.broken[0]
    # As in analysis: rows of very different n are not averaged into one number.
    long = n > (n.amax(-1, keepdim=True) / 2**0.5).floor()
    long[:, :longest_from].fill_(False)  # in a sliding window, rows before them see as many keys
    few = evenly_spaced(torch.arange(longest_from, len(rows), device=rows.device), SEPARABILITY_ROWS)
    at_few = sent_to(n.device, few)
    names = (*OF_LONGEST, *MEANS_OF_ALL)
    # Both means from one tensor: a second one would launch several more kernels.
    values = torch.stack([statistics.values[REPORTED[name].source][0] for name in names]).double()
    values[: len(OF_LONGEST)].masked_fill_(~long, torch.nan)
    means = dict(zip(names, values.nanmean(-1), strict=True))
    separability = _separability(call, rows[few], top_n).double().masked_fill(~long[:, at_few], torch.nan)
    means |= dict(zip(OF_FEW, separability.nanmean(-1), strict=True))
    means[LARGEST] = _largest(statistics.values["max_logit"][0])
    share_broken = (broken & long).sum(-1) / long.sum(-1).clamp(min=1)
    return torch.stack([*(means[name] for name in REPORTED), share_broken])


def _largest(values: Tensor) -> Tensor:
    """Return the largest of each head's rows (H, R), NaN where no row has a number."""
    largest = values.double().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).amax(-1)
    return largest.masked_fill(largest == -torch.inf, torch.nan)


def _separability(call: AttentionCall, rows: Tensor, top_n: int) -> Tensor:
    """Return separability of the rows' N heaviest keys, and of the same weights permuted, (2, H, R)."""
    (measured,) = resolve_normalizers(call, [None])
    normalizer = as_normalizer(measured, call)
    values = at_least_float32(call.value_BGKE[0])
    beyond = -values.shape[-2] % GROUP  # as blocks are padded
    values = pad(values, (0, 0, 0, beyond)) if beyond else values
    scores = random_scores(len(rows), values.shape[-2], values.device)
    parts = []
    with without_autocast(values.device):
        for block in logit_blocks(call, rows, all_heads=True, copies=DRAWS):
            # A softmax's logits are its weights' logarithms: what underflows keeps its order.
            logs = None
            if measured.scaled_softmax:
                factor = measured.factor(call, block)
                logs = block.logits if factor is None else block.logits * factor
            if logs is None or normalizer.sink is not None:
                weights = normalizer.weights(rows_block(call, block))[0]
            else:
                weights = torch.softmax(logs.masked_fill(~block.visible, -torch.inf), dim=-1)
            keys = slice(block.first_key, block.first_key + weights.shape[-1])
            x = values[:, keys].to(weights.dtype)
            parts.append(_row_and_null(weights, block.visible, x, scores[block.rows, keys], top_n, logs))
    return torch.cat(parts, -1)


def _stack_layers(calls: Sequence[AttentionCall]) -> AttentionCall:
    """One call with the heads of all calls."""

    normalizers = [call.normalizer for call in calls if isinstance(call.normalizer, Normalizer)]
    heads, keys = [call.query_BHQD.shape[1] for call in calls], calls[0].key_BGKD.shape[2]
    normalizer = Normalizer(Softmax(), scale=[_EachItsOwn(normalizers, heads, keys)]) if normalizers else None
    return replace(stack_calls(calls), normalizer=normalizer)


class _EachItsOwn(ScaleRule):
    """The factors of several normalizers, each for its own heads.

    They are computed once, for every n up to the number of keys: a few small kernels per layer take longer than that.
    """

    def __init__(self, normalizers: Iterable[Normalizer], heads: Sequence[int], keys: int) -> None:
        super().__init__()
        self.normalizers = nn.ModuleList(normalizers)
        self.heads, self.keys = heads, keys
        self._table: Tensor | None = None  # (H, keys + 1)

    def factor(self, n: Tensor, positions: Tensor | None, hidden_states: Tensor | None) -> Tensor:
        if self._table is None or self._table.dtype != n.dtype:
            self._table = self._factors(torch.arange(self.keys + 1, dtype=n.dtype, device=n.device)[:, None])
        heads = len(self._table)
        index = n.long().squeeze(-1)
        index = index.expand(*index.shape[:-2], heads, index.shape[-1])
        return self._table.expand(*index.shape[:-1], -1).gather(-1, index).unsqueeze(-1)

    def _factors(self, n: Tensor) -> Tensor:
        """Return the factors for rows of n keys (N, 1): (H, N)."""
        factors = []
        for normalizer, heads in zip(self.normalizers, self.heads, strict=True):
            assert isinstance(normalizer, Normalizer)
            rules = [rule for rule in normalizer.rules if isinstance(rule, ScaleRule)]
            factor = reduce(
                torch.mul, [rule.factor(n, None, None).to(n.dtype) for rule in rules] or [torch.ones_like(n)]
            )
            factors.append(factor.expand(heads, *n.shape))
        return torch.cat(factors).squeeze(-1)


@lru_cache(maxsize=8)
def random_scores(rows: int, keys: int, device: torch.device) -> Tensor:
    """A random number for each key of each row, the same at every step."""
    generator = torch.Generator().manual_seed(0)
    return sent_to(device, torch.rand(rows, keys, generator=generator, dtype=torch.float64, device="cpu"))


def _row_and_null(
    weights: Tensor, visible: Tensor, x: Tensor, scores: Tensor, top_n: int, log_weights: Tensor | None = None
) -> Tensor:
    """Return separability of rows and of their weights, permuted once: (2, h, r), NaN as in metrics.separability.

    weights (h, r, w), visible (1 or h, r, w), x (g, w, E). scores (r, w): the k-th heaviest weight goes to the key
    with the k-th smallest one. log_weights (h, r, w): log a_i up to a constant per row, if weights >= 0 may underflow.
    """
    heads, rows, keys = weights.shape
    if keys <= top_n:
        return weights.new_full((2, heads, rows), torch.nan)
    shuffled = scores.expand(visible.shape).masked_fill(~visible, torch.inf).argsort(-1)
    grouped = (len(x), -1, keys)
    key_by_rank = shuffled.reshape(1 if len(shuffled) == 1 else len(x), 1, -1, rows, keys)
    weights, visible = (t.expand(heads, rows, keys).reshape(grouped) for t in (weights, visible))
    if log_weights is not None:
        log_weights = log_weights.reshape(grouped).masked_fill(~visible, -torch.inf)
    x = torch.where(visible.any(-2).unsqueeze(-1), x, 0.0)  # keys that no row sees may hold anything
    ranked = top_n_indices(weights if log_weights is None else log_weights, keys, visible)
    sets = NestedSets(weights, x, visible, ranked[..., :top_n], (top_n,), log_weights)
    shares = separability_and_null(sets, ranked, key_by_rank, sphere=False)
    return shares[..., 0, 0].transpose(0, 1).reshape(2, heads, rows)
