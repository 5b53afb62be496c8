"""The mechanisms by their formulas: whole arrays of pairs, explicit loops, torch's own inverse."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from attnorm.normalizers.softmax import softmax_row as softmax


def gaussian(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float | None = None) -> Tensor:
    """sum over visible keys of exp(-scale ||q_i - k_j||^2 / 2) v_j; key heads as many as query heads."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    distance = (q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)
    return (torch.exp(-scale * distance / 2) * visible) @ v


def linear(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, feature_map: Callable[[Tensor], Tensor]) -> Tensor:
    """The quadratic formula: sum_j f(q_i).f(k_j) v_j / sum_j f(q_i).f(k_j)."""
    weights = (feature_map(q)[..., :, None, :] * feature_map(k)[..., None, :, :]).sum(-1) * visible
    total = weights.sum(-1, keepdim=True)
    return weights / torch.where(total > 0, total, 1.0) @ v


def selective(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float | None = None) -> Tensor:
    """Row after row, the penalty of every key growing by what head 0 selected in the rows before."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    batch, heads, queries, _ = q.shape
    keys = k.shape[2]
    outputs = []
    for b in range(batch):
        penalty = [torch.zeros((), dtype=q.dtype)] * keys
        rows = []
        for i in range(queries):
            z = scale * (q[b, :, i] @ k[b].transpose(-1, -2))[torch.arange(heads), torch.arange(heads)]
            current = torch.stack(penalty)
            row = []
            for h in range(heads):
                at = visible[b, h, i].nonzero()[:, 0]
                row.append(softmax((z[h] - current)[at]) @ v[b, h, at] if len(at) else torch.zeros_like(v[b, h, 0]))
            rows.append(torch.stack(row))
            of_first_head = visible[b, 0, i].nonzero()[:, 0].tolist()
            for j in of_first_head[1:]:
                if j != keys - queries + i:
                    penalty[j] = penalty[j] + z[0, j].relu()
        outputs.append(torch.stack(rows, dim=1))
    return torch.stack(outputs)


def differential(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, vectors: Tensor, depth: int, head_norm: bool = True
) -> Tensor:
    """Two softmax maps for each pair of query heads, as many key heads; one value head per pair."""
    start = 0.8 - 0.6 * math.exp(-0.3 * depth)
    share = math.e ** (vectors[0] @ vectors[1]) - math.e ** (vectors[2] @ vectors[3]) + start
    z = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
    exponentials = torch.exp(z) * visible
    total = exponentials.sum(-1, keepdim=True)
    maps = exponentials / torch.where(total > 0, total, 1.0)
    output = torch.stack(
        [(maps[:, 2 * h] - share * maps[:, 2 * h + 1]) @ v[:, h] for h in range(q.shape[1] // 2)], dim=1
    )
    if not head_norm:
        return output
    return output / torch.sqrt(output.square().mean(-1, keepdim=True) + 1e-5) * (1 - start)


def soft(q: Tensor, k: Tensor, v: Tensor, landmarks: Tensor, visible: Tensor, normalised: bool) -> Tensor:
    """P_q (A + 0.01)^-1 P_k^T V over the visible keys (B, H, L, 1), by torch's own inverse."""

    def kernel(x: Tensor, y: Tensor) -> Tensor:
        return torch.exp(-(x[..., :, None, :] - y[..., None, :, :]).square().sum(-1) / (2 * math.sqrt(q.shape[-1])))

    among = kernel(landmarks, landmarks)
    inverse = torch.linalg.inv(among + 0.01 * torch.eye(among.shape[-1], dtype=q.dtype))
    if normalised:
        degree = torch.diag_embed(among.sum(-1) ** -0.5)
        inverse = degree @ inverse @ degree
    return kernel(q, landmarks) @ inverse @ (kernel(k, landmarks) * visible).transpose(-1, -2) @ v
