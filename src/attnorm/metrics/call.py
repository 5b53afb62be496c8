"""One attention call of a model, as it is measured, and several calls of one shape as one with the heads of all.

A call has everything that decides its logits, weights and outputs. Shape letters: see engines/inputs.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from attnorm.normalizers.block import Positions
from attnorm.normalizers.contract import Mechanism, Normalizer

Kind = Literal["decoder", "encoder", "cross"]


@dataclass(frozen=True)
class AttentionCall:
    """Queries and keys after position encoding, at the model's own head counts; nothing of size Q x K is made here."""

    layer: int  # counted within its kind
    kind: Kind  # causal self-attention, bidirectional self-attention, attention to an encoder
    query_BHQD: Tensor
    key_BGKD: Tensor
    value_BGKE: Tensor
    scale: float
    causal: bool  # aligned bottom-right: the last query sees every key
    # Boolean, True = may attend, broadcastable to (B, H, Q, K); one with a row for each query has causality in it.
    mask: Tensor | None = None
    softcap: float | None = None  # logits become softcap * tanh(logits / softcap)
    sinks_H: Tensor | None = None  # one learned logit per head that takes mass and gives no output
    bias: Tensor | None = None  # added to the logits (T5's relative positions), broadcastable to (B, H, Q, K)
    dropout: float = 0.0  # share of the weights that the model drops in training
    normalizer: Normalizer | Mechanism | None = None  # what a patched layer runs instead of softmax
    inputs_BKC: Tensor | None = None  # the layer input behind the keys, if requested
    positions: Positions | None = None  # (1 or B, Q) and (1 or B, K); None: counted, the last query at the last key


def can_be_stacked(call: AttentionCall) -> bool:
    """On a GPU, where it saves time, and if nothing but queries, keys, values and sinks differs between layers."""
    alone = call.bias is not None or call.normalizer is not None or call.inputs_BKC is not None
    alone = alone or call.positions is not None
    mask_per_head = call.mask is not None and call.mask.dim() > 2 and call.mask.shape[-3] > 1
    return saves_time(call) and not alone and not mask_per_head


def saves_time(call: AttentionCall) -> bool:
    return call.query_BHQD.is_cuda


def reads_heads(normalizer: nn.Module) -> bool:
    """Whether a normalizer has parameters for each head, so that it fits one layer alone."""
    return any(tensor.numel() > 1 for tensor in (*normalizer.parameters(), *normalizer.buffers()))


def same_shape(a: AttentionCall, b: AttentionCall) -> bool:
    def about(call: AttentionCall) -> tuple[object, ...]:
        tensors = (call.query_BHQD, call.key_BGKD, call.value_BGKE)
        shapes = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        return call.kind, call.scale, call.causal, call.softcap, call.dropout, call.sinks_H is None, shapes

    return a.mask is b.mask and about(a) == about(b)


def size(call: AttentionCall) -> int:
    """Bytes of queries, keys and values."""
    return sum(tensor.nbytes for tensor in (call.query_BHQD, call.key_BGKD, call.value_BGKE))


def outline(call: AttentionCall) -> AttentionCall:
    """The call's settings and shapes, without tensor data."""
    shapes = {name: getattr(call, name).to("meta") for name in ("query_BHQD", "key_BGKD", "value_BGKE")}
    return replace(call, **shapes, mask=None, sinks_H=None, bias=None, normalizer=None, inputs_BKC=None)


def stacked(calls: Sequence[AttentionCall]) -> AttentionCall:
    """Head h of call i becomes head i H + h."""
    first = calls[0]
    if len(calls) == 1:
        return first
    query, key, value = (
        torch.cat([getattr(call, name) for call in calls], 1) for name in ("query_BHQD", "key_BGKD", "value_BGKE")
    )
    sinks = None if first.sinks_H is None else torch.cat([call.sinks_H for call in calls if call.sinks_H is not None])
    return replace(first, query_BHQD=query, key_BGKD=key, value_BGKE=value, sinks_H=sinks)
