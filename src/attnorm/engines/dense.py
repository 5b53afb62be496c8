"""Attention in the textbook form, to compare with: all logits, all weights, one product."""

import torch
from torch import Tensor

from attnorm.normalizers.contract import Normalizer


def dense(q: Tensor, k: Tensor, v: Tensor, normalizer: Normalizer, *, causal: bool) -> Tensor:
    logits = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    queries, keys = logits.shape[-2:]
    mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries) if causal else None
    weights: Tensor = normalizer(logits, mask)
    return weights @ v
