"""A call's weights and output the slow way: every array in full, float64, straight from the definitions."""

import torch
from torch import Tensor

from attnorm.metrics.call import AttentionCall


def visible(call: AttentionCall) -> Tensor:
    """(B, H, Q, K)"""
    batch, heads, queries, _ = call.query_BHQD.shape
    keys = call.key_BGKD.shape[2]
    seen = torch.ones(batch, heads, queries, keys, dtype=torch.bool)
    if call.causal:
        seen = seen.tril(keys - queries)
    return seen if call.mask is None else seen & call.mask


def weights(call: AttentionCall) -> Tensor:
    """(B, H, Q, K); rows without a visible key are zero, and a learned sink has its share taken away."""
    heads = call.query_BHQD.shape[1]
    key = call.key_BGKD.double().repeat_interleave(heads // call.key_BGKD.shape[1], 1)
    logits = call.query_BHQD.double() @ key.mT * call.scale
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    if call.bias is not None:
        logits = logits + call.bias
    logits = logits.masked_fill(~visible(call), -torch.inf)
    if call.sinks_H is not None:
        sinks = call.sinks_H.double()[None, :, None, None].expand(*logits.shape[:-1], 1)
        return torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]
    return logits.softmax(-1).nan_to_num(0.0)


def output(call: AttentionCall) -> Tensor:
    """(B, Q, H, E), as transformers' kernels return it."""
    heads = call.query_BHQD.shape[1]
    value = call.value_BGKE.double().repeat_interleave(heads // call.value_BGKE.shape[1], 1)
    return (weights(call) @ value).transpose(1, 2)
