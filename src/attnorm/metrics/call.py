"""`AttentionCall`: one attention call of a model, as the metrics receive it; calls of several layers stacked to one.

A call contains everything that decides its logits, weights and output. Shape letters: see engines/inputs.py. (The
engines use their own record, `Inputs`: it belongs to a call that attnorm computes, this one to a call that a model
makes. `call_of` converts validated inputs to a call.)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from attnorm.engines.inputs import Inputs
from attnorm.normalizers.block import Positions
from attnorm.normalizers.contract import Mechanism, Normalizer

Kind = Literal["decoder", "encoder", "cross"]


@dataclass(frozen=True)
class AttentionCall:
    """Queries and keys after position encoding, with the model's own numbers of heads; no array of size Q x K."""

    layer: int  # index among the layers of its kind
    kind: Kind  # causal self-attention, bidirectional self-attention, or attention to an encoder
    query_BHQD: Tensor
    key_BGKD: Tensor
    value_BGKE: Tensor
    scale: float
    causal: bool  # aligned bottom-right: the last query sees every key
    # Boolean, True = may attend, broadcastable to (B, H, Q, K). A mask with one row per query includes causality.
    mask: Tensor | None = None
    softcap: float | None = None  # logits become softcap * tanh(logits / softcap)
    sinks_H: Tensor | None = None  # one learned logit per head that takes mass and gives no output
    bias: Tensor | None = None  # added to the logits (T5's relative positions), broadcastable to (B, H, Q, K)
    dropout: float = 0.0  # probability that the model drops a weight in training
    normalizer: Normalizer | Mechanism | None = None  # normalizer of a patched layer; None: softmax
    inputs_BKC: Tensor | None = None  # layer input that the keys are projected from, if requested
    positions: Positions | None = None  # (1 or B, Q) and (1 or B, K); None: the last query is at the last key


def can_be_stacked(call: AttentionCall) -> bool:
    """Whether calls of several layers can be measured as one: on a GPU, if only q, k, v and sinks differ."""
    alone = call.bias is not None or call.normalizer is not None or call.inputs_BKC is not None
    alone = alone or call.positions is not None
    mask_per_head = call.mask is not None and call.mask.dim() > 2 and call.mask.shape[-3] > 1
    return saves_time(call) and not alone and not mask_per_head


def saves_time(call: AttentionCall) -> bool:
    return call.query_BHQD.is_cuda


def has_parameters_per_head(normalizer: nn.Module) -> bool:
    """Whether a normalizer has parameters per head, so that it cannot be applied to stacked layers."""
    return any(tensor.numel() > 1 for tensor in (*normalizer.parameters(), *normalizer.buffers()))


def same_shape(a: AttentionCall, b: AttentionCall) -> bool:
    def about(call: AttentionCall) -> tuple[object, ...]:
        tensors = (call.query_BHQD, call.key_BGKD, call.value_BGKE)
        shapes = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        return call.kind, call.scale, call.causal, call.softcap, call.dropout, call.sinks_H is None, shapes

    return a.mask is b.mask and about(a) == about(b)


def call_bytes(call: AttentionCall) -> int:
    """Return the size of queries, keys and values in bytes."""
    return sum(tensor.nbytes for tensor in (call.query_BHQD, call.key_BGKD, call.value_BGKE))


def without_data(call: AttentionCall) -> AttentionCall:
    """Return the call with shapes and settings only; tensors are on the meta device or None."""
    shapes = {name: getattr(call, name).to("meta") for name in ("query_BHQD", "key_BGKD", "value_BGKE")}
    return replace(call, **shapes, mask=None, sinks_H=None, bias=None, normalizer=None, inputs_BKC=None)


def stack_calls(calls: Sequence[AttentionCall]) -> AttentionCall:
    """Join calls of the same shape to one call: head h of call i becomes head i H + h."""
    first = calls[0]
    if len(calls) == 1:
        return first
    query, key, value = (
        torch.cat([getattr(call, name) for call in calls], 1) for name in ("query_BHQD", "key_BGKD", "value_BGKE")
    )
    sinks = None if first.sinks_H is None else torch.cat([call.sinks_H for call in calls if call.sinks_H is not None])
    return replace(first, query_BHQD=query, key_BGKD=key, value_BGKE=value, sinks_H=sinks)


def mask_of(inputs: Inputs) -> Tensor | None:
    """Return the mask as an AttentionCall has it: one with a row for each query has causality in it."""
    rows = inputs.mask is not None and inputs.mask.shape[-2] > 1
    return inputs.visible(0, inputs.queries, inputs.keys) if rows else inputs.mask


def call_of(inputs: Inputs) -> AttentionCall:
    return AttentionCall(
        layer=0,
        kind="decoder" if inputs.causal else "encoder",
        query_BHQD=inputs.q_BHQD.detach(),
        key_BGKD=inputs.k_BGKD.detach(),
        value_BGKE=inputs.v_BGKE.detach(),
        scale=inputs.scale,
        causal=inputs.causal,
        mask=mask_of(inputs),
        softcap=inputs.softcap,
        positions=positions_of(inputs),
        inputs_BKC=states_of(inputs),
    )


def states_of(inputs: Inputs) -> Tensor | None:
    """Return the hidden states of the queries, which are the last keys; those of earlier keys are not read."""
    before = inputs.keys - inputs.queries
    return None if inputs.hidden_states is None or before < 0 else pad(inputs.hidden_states, (0, 0, before, 0))


def positions_of(inputs: Inputs) -> Positions | None:
    """Return positions of the queries and keys, (1 or B, Q) and (1 or B, K)."""
    if inputs.positions is None:
        return None
    positions = Positions.of(inputs.positions, inputs.weights_shape, inputs.q_BHQD.device)
    query, key = (t.reshape(-1, t.shape[-1]) for t in (positions.query, positions.key))
    return Positions(query, key)
