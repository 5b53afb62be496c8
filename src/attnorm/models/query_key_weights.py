"""Which weights of an attention module make the queries and the keys of each head, to scale them in place.

Two matrices, or one for queries, keys and values: in blocks (GPT-2, Phi-3) or head by head (GPT-NeoX). Layouts are not
trusted by name: the norms that a layout gives are compared with the queries and keys of a call, which a rotation to
positions does not change. Latent attention (DeepSeek, Kimi) has a part without positions in every head, and a rotated
key that all heads share.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from attnorm.metrics.call import AttentionCall
from attnorm.models.query_key_origin import FUSED, NAMES, projects_to

MORE_FUSED = (*FUSED, "query_key_value", "qkv", "Wqkv", "in_proj")


@dataclass(frozen=True)
class HeadRows:
    """The outputs of a projection that belong to each head, (heads, width), and the share of gamma that scales them."""

    projection: nn.Linear | Conv1D
    rows: Tensor
    power: float = 0.5

    def scale_(self, gamma: Tensor) -> None:
        """Multiply weights and bias of every head by its gamma^power."""
        weight, bias = self.projection.weight, self.projection.bias
        assert isinstance(weight, Tensor)
        outputs = weight.shape[1 if isinstance(self.projection, Conv1D) else 0]
        factors = torch.ones(outputs, dtype=torch.float32, device=weight.device)
        factors[self.rows.to(weight.device)] = (gamma.to(weight.device, torch.float32) ** self.power)[:, None]
        factors = factors.to(torch.promote_types(weight.dtype, torch.float32))
        shaped = factors if isinstance(self.projection, Conv1D) else factors[:, None]
        weight.copy_(weight * shaped)
        if isinstance(bias, Tensor):
            bias.copy_(bias * factors)

    def matrix(self) -> tuple[Tensor, Tensor | None]:
        """Weights (heads, width, inputs) and bias (heads, width) in float32."""
        weight, bias = self.projection.weight.detach().float(), self.projection.bias
        assert isinstance(weight, Tensor)
        weight = weight.T if isinstance(self.projection, Conv1D) else weight
        return weight[self.rows], bias.detach().float()[self.rows] if isinstance(bias, Tensor) else None


@dataclass(frozen=True)
class QueryKeyWeights:
    """The parts of all query heads H and of all key heads G."""

    query: tuple[HeadRows, ...]
    key: tuple[HeadRows, ...]

    @torch.no_grad()
    def scale_(self, gamma_H: Tensor) -> Tensor:
        """Multiply the logits of each head by its gamma, and return the gammas used.

        Query heads that share a key head share the smallest gamma among them, as in Megatron.
        """
        heads, groups = gamma_H.shape[0], self.key[0].rows.shape[0]
        gamma_G = gamma_H.reshape(groups, heads // groups).amin(1)
        used_H = gamma_G.repeat_interleave(heads // groups)
        for parts, gamma in ((self.query, used_H), (self.key, gamma_G)):
            for part in parts:
                part.scale_(gamma)
        return used_H


def query_key_weights(module: nn.Module, call: AttentionCall) -> QueryKeyWeights | None:
    """The weights of an attention module, checked on one of its calls; None where they are not known.

    So for modules that normalize q and k after the projection: there no factor of a projection reaches the logits.
    """
    latent = _latent(module)
    if latent is not None:
        return latent
    return next((found for found in _candidates(module, call) if _makes(found, call)), None)


def _candidates(module: nn.Module, call: AttentionCall) -> Iterator[QueryKeyWeights]:
    heads, groups, width = call.query_BHQD.shape[1], call.key_BGKD.shape[1], call.query_BHQD.shape[-1]
    for names in NAMES:
        query, key = (getattr(module, name, None) for name in names)
        if isinstance(query, nn.Linear | Conv1D) and isinstance(key, nn.Linear | Conv1D):
            parts = HeadRows(query, _rows(heads, width)), HeadRows(key, _rows(groups, width))
            yield QueryKeyWeights(parts[:1], parts[1:])
    for name in MORE_FUSED:
        fused = getattr(module, name, None)
        if isinstance(fused, nn.Linear | Conv1D):
            yield _fused(fused, _rows(heads, width), heads * width + _rows(groups, width))
            per_group = heads // groups
            size = (per_group + 1) * width + call.value_BGKE.shape[-1]
            start = torch.arange(groups)[:, None] * size  # queries of a group, then its key, then its value
            query = (start[:, :, None] + _rows(per_group, width)).reshape(heads, width)
            yield _fused(fused, query, start + per_group * width + torch.arange(width))


def _fused(projection: nn.Linear | Conv1D, query_rows: Tensor, key_rows: Tensor) -> QueryKeyWeights:
    return QueryKeyWeights((HeadRows(projection, query_rows),), (HeadRows(projection, key_rows),))


def _rows(heads: int, width: int) -> Tensor:
    return torch.arange(heads * width).reshape(heads, width)


def _makes(weights: QueryKeyWeights, call: AttentionCall) -> bool:
    if call.inputs_BKC is None:
        return False
    keys = call.inputs_BKC[0]
    states = [(weights.key[0], keys, call.key_BGKD[0])]
    if call.kind != "cross":  # there the queries come from another sequence
        states.append((weights.query[0], keys[-call.query_BHQD.shape[2] :], call.query_BHQD[0]))
    for part, x, there in states:
        outputs = part.projection.weight.numel() // x.shape[-1]
        if int(part.rows.max()) >= outputs or not projects_to(*part.matrix(), x.detach(), there.detach()):
            return False
    return True


def _latent(module: nn.Module) -> QueryKeyWeights | None:
    """DeepSeek's attention. As in Kimi K2, the shared rotated key keeps its weights; its queries take all of gamma."""
    query = getattr(module, "q_b_proj", None) or getattr(module, "q_proj", None)
    key, nope, rope = (getattr(module, name, None) for name in ("kv_b_proj", "qk_nope_head_dim", "qk_rope_head_dim"))
    if not (isinstance(query, nn.Linear) and isinstance(key, nn.Linear) and nope and rope):
        return None
    width = nope + rope
    heads = query.weight.shape[0] // width
    rows, keys = _rows(heads, width), _rows(heads, key.weight.shape[0] // heads)
    parts = HeadRows(query, rows[:, :nope]), HeadRows(query, rows[:, nope:], 1.0)
    return QueryKeyWeights(parts, (HeadRows(key, keys[:, :nope]),))
