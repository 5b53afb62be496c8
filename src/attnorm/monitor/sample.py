"""Samples of attention calls, kept until the forward pass ends: some of the last rows of one sequence of the batch.

Where the Triton kernel measures them, the whole sequence is kept, and all of its longest rows are measured.

Copies, not views: a view would keep a whole layer's activations alive, which gradient checkpointing frees. Parameters
are copied too: FSDP frees them as soon as the layer has run.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from attnorm.metrics import fused_rows
from attnorm.metrics.call import AttentionCall
from attnorm.metrics.normalized import MeasuredNormalizer
from attnorm.metrics.sampling import length_bins, one_sequence, spread
from attnorm.normalizers.contract import Mechanism

Part = TypeVar("Part", bound=nn.Module)


@dataclass(frozen=True)
class Sample:
    """Some rows of a call.

    Samples of one group may be measured as the heads of a single call. None: this one is measured alone.
    """

    call: AttentionCall
    rows: Tensor  # of the call's queries
    group: tuple[object, ...] | None

    @property
    def size(self) -> int:
        """Bytes."""
        tensors = (self.call.query_BHQD, self.call.key_BGKD, self.call.value_BGKE)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Sampler:
    """Takes the samples of one forward pass."""

    def __init__(self, tokens: Mapping[str, Tensor], rows: int) -> None:
        """tokens: by kind of attention, which queries are no padding, (B, Q); without a kind, all are tokens."""
        self._tokens = {kind: mask.cpu() for kind, mask in tokens.items()}
        self._count = rows
        self._rows: dict[tuple[object, ...], tuple[int, Tensor]] = {}
        self._seen: dict[tuple[object, ...], tuple[object, Tensor | None]] = {}
        self._masks: list[Tensor | None] = []

    @torch.no_grad()
    def take(self, call: AttentionCall) -> Sample:
        item, rows = self._item_and_rows(call)
        one = replace(one_sequence(call, item), inputs_BKC=None)
        if not _scales_softmax(call) or one.bias is not None or (one.mask is not None and one.mask.shape[1] > 1):
            return Sample(_copied(one), rows, None)
        all_rows = takes_all_rows(one)
        mask = one.mask if all_rows else self._visible(call, one, item, rows)
        per_group = call.query_BHQD.shape[1] // call.key_BGKD.shape[1]
        shapes = (len(rows), per_group, *call.key_BGKD.shape[2:], call.value_BGKE.shape[3])
        settings = (call.scale, call.softcap, call.sinks_H is None, call.normalizer is None, call.causal)
        shared = call.mask if all_rows else mask
        self._masks.append(shared)  # or another mask might get its id
        about = (call.kind, call.query_BHQD.shape[2], call.query_BHQD.device, call.query_BHQD.dtype)
        group = (*about, *shapes, *settings, id(shared))
        if all_rows:
            return Sample(_copied(one), rows, group)
        sampled = replace(one, query_BHQD=one.query_BHQD[:, :, rows], mask=mask, causal=False)
        return Sample(_copied(sampled), torch.arange(len(rows), device=rows.device), group)

    def _item_and_rows(self, call: AttentionCall) -> tuple[int, Tensor]:
        """The sequence with the most tokens, and rows spread over its longest bin of n, as in analysis."""
        batch, queries, device = call.query_BHQD.shape[0], call.query_BHQD.shape[2], call.query_BHQD.device
        device = torch.device("cpu") if takes_all_rows(call) else device  # the kernel's launch needs them there
        key = (call.kind, batch, queries, device, takes_all_rows(call))
        if key not in self._rows:
            tokens = self._tokens.get(call.kind)
            if tokens is None or tokens.shape != (batch, queries):
                item, present = 0, torch.arange(queries, device=device)
            else:
                item = int(tokens.sum(-1).argmax())
                present = tokens[item].nonzero().squeeze(-1).to(device)
            if call.kind == "decoder" and len(present):
                present = present[length_bins(len(present))[0][0] - 1 :]
            self._rows[key] = item, present if takes_all_rows(call) else spread(present, self._count)
        return self._rows[key]

    def _visible(self, call: AttentionCall, one: AttentionCall, item: int, rows: Tensor) -> Tensor | None:
        """What these rows see, (1, 1, R, K); made once for all layers that share a mask."""
        queries, keys = call.query_BHQD.shape[2], call.key_BGKD.shape[2]
        key = (call.kind, id(call.mask), call.causal, item, queries, keys, rows.device)
        if key not in self._seen:
            mask = one.mask
            # A mask per query is complete, as in metrics.logits.
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


def takes_all_rows(call: AttentionCall) -> bool:
    """Whether the kernel of metrics.fused_rows measures the call: softmax or a rescaling of it, on a GPU."""
    return call.query_BHQD.is_cuda and _scales_softmax(call) and fused_rows.applies(call)


def _copied(call: AttentionCall) -> AttentionCall:
    return replace(
        call,
        normalizer=None if call.normalizer is None else _with_own_tensors(call.normalizer),
        sinks_H=None if call.sinks_H is None else call.sinks_H.detach().clone(),
        query_BHQD=call.query_BHQD.detach().clone(),
        key_BGKD=call.key_BGKD.detach().clone(),
        value_BGKE=call.value_BGKE.detach().clone(),
    )


def _with_own_tensors(module: Part) -> Part:
    """Like copy.deepcopy, but only for tensors: ten times as fast, and it works for parametrized modules."""
    twin = type(module).__new__(type(module))
    vars(twin).update(
        vars(module),
        _parameters=_copies(module._parameters),
        _buffers=_copies(module._buffers),
        _modules={name: part if part is None else _with_own_tensors(part) for name, part in module._modules.items()},
    )
    return twin


def _copies(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: None if tensor is None else tensor.detach().clone() for name, tensor in tensors.items()}


def _scales_softmax(call: AttentionCall) -> bool:
    """Softmax of logits times a factor of the head and n only: rows can be measured without the others."""
    normalizer = call.normalizer
    if isinstance(normalizer, Mechanism):
        return False
    return normalizer is None or (normalizer.sink is None and MeasuredNormalizer("", normalizer).scaled_softmax)
