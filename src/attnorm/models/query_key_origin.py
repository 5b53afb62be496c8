"""Find how an attention module computes queries and keys: projections, weights per head, states before rotation.

Projections (`projections`): the matrices that compute queries and keys from the layer input, if a model has them as
plain weights.

Rotation (RoPE, https://arxiv.org/abs/2104.09864): attention modules of transformers call the function
`apply_rotary_pos_emb` of their own file. Inside `before_rotation` that function also stores its arguments. We do not
invert the rotation, so every way of pairing coordinates is supported.

A rotation does not change the norms of q and k. Therefore both results are checked by norms, and are None if these
differ.

Weights of each head (`query_key_weights`), to scale them in place: two matrices, or one for queries, keys and values,
in blocks (GPT-2, Phi-3) or head by head (GPT-NeoX). The layout is identified by these norms, not by names. Latent
attention (DeepSeek, Kimi) has a part without positions in every head, and a rotated key that all heads share.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from attnorm.metrics.call import AttentionCall
from attnorm.models.dispatch import attention_sites
from attnorm.models.private_names import ROTARY_FUNCTION, rotary_files
from attnorm.models.threads import only_in_this_thread

NAMES = (("q_proj", "k_proj"), ("query", "key"), ("q_lin", "k_lin"))
FUSED = ("c_attn", "qkv_proj")  # queries, then keys, then values
SAME_NORM = 2e-2  # relative difference of norms after a projection; half precision rounds by less
SAME_ROTATED_NORM = 1e-2  # after a rotation, which rounds once
_lock = threading.RLock()
MORE_FUSED = (*FUSED, "query_key_value", "qkv", "Wqkv", "in_proj")


@dataclass(frozen=True)
class Projections:
    """W_Q (H, e, D), W_K (G, e, D) and their biases (H, e), (G, e)."""

    query_weight: Tensor
    key_weight: Tensor
    query_bias: Tensor | None
    key_bias: Tensor | None


def projections(module: nn.Module, call: AttentionCall) -> Projections | None:
    """Return the projections of an attention module, checked on one of its calls; None if there are further steps.

    The call must have its layer input. The check compares norms, which a rotation does not change; it fails for modules
    that normalize q and k after the projection.
    """
    if call.inputs_BKC is None:
        return None
    matrices = _matrices(module)
    if matrices is None:
        return None
    heads, groups, width = call.query_BHQD.shape[1], call.key_BGKD.shape[1], call.query_BHQD.shape[-1]
    (query_weight, query_bias), (key_weight, key_bias) = matrices
    if query_weight.shape[0] < heads * width or key_weight.shape[0] < groups * width:
        return None
    candidate = Projections(
        query_weight[: heads * width].unflatten(0, (heads, width)),
        key_weight[: groups * width].unflatten(0, (groups, width)),
        None if query_bias is None else query_bias[: heads * width].unflatten(0, (heads, width)),
        None if key_bias is None else key_bias[: groups * width].unflatten(0, (groups, width)),
    )
    x = call.inputs_BKC[0, -call.query_BHQD.shape[2] :].float()
    same = projects_to(candidate.query_weight, candidate.query_bias, x, call.query_BHQD[0])
    return (
        candidate
        if same and projects_to(candidate.key_weight, candidate.key_bias, call.inputs_BKC[0], call.key_BGKD[0])
        else None
    )


def _matrices(module: nn.Module) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]] | None:
    for query, key in NAMES:
        parts = [getattr(module, name, None) for name in (query, key)]
        if all(isinstance(part, nn.Linear) for part in parts):
            return _weight_and_bias(parts[0]), _weight_and_bias(parts[1])  # type: ignore[arg-type]
    fused = next((part for name in FUSED if isinstance(part := getattr(module, name, None), nn.Module)), None)
    if fused is None or not isinstance(getattr(fused, "weight", None), Tensor):
        return None
    weight, bias = _weight_and_bias(fused)
    third = weight.shape[0] // 3
    if weight.shape[0] % 3:  # keys at another number of heads: where they start depends on the model
        return None
    rest = None if bias is None else bias[third:]
    return (weight[:third], None if bias is None else bias[:third]), (weight[third:], rest)


def _weight_and_bias(part: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return weight (out, in) and bias; GPT-2's Conv1D stores the transposed matrix."""
    weight, bias = part.weight.detach().float(), part.bias  # type: ignore[operator]
    assert isinstance(weight, Tensor)
    weight = weight if isinstance(part, nn.Linear) else weight.T
    return weight, bias.detach().float() if isinstance(bias, Tensor) else None


def projects_to(weight: Tensor, bias: Tensor | None, x: Tensor, there: Tensor) -> bool:
    """Whether W x + b, weight (heads, width, inputs) and x (length, inputs), has the norms of the states `there`."""
    projected = torch.einsum("hed,ld->hle", weight, x.float())
    projected = projected if bias is None else projected + bias[:, None]
    a, b = (torch.linalg.vector_norm(t.float(), dim=-1) for t in (projected, there))
    return bool(a.shape == b.shape and ((a - b).abs() <= SAME_NORM * b.clamp(min=1e-3)).all())


class BeforeRotation:
    """The queries and keys before the most recent rotation."""

    def __init__(self) -> None:
        self._kept: tuple[Tensor, Tensor] | None = None

    def keep(self, query: Tensor, key: Tensor) -> None:
        self._kept = query, key

    def of(self, call: AttentionCall) -> AttentionCall | None:
        """Return the call with queries and keys before the rotation; None if not rotated, or changed afterwards.

        Use it during the call: the next layer replaces the stored states.
        """
        kept, self._kept = self._kept, None
        if kept is None or kept[0].shape != call.query_BHQD.shape or kept[1].shape != call.key_BGKD.shape:
            return None
        if not (_same_norms(kept[0], call.query_BHQD) and _same_norms(kept[1], call.key_BGKD)):
            return None
        return replace(call, query_BHQD=kept[0], key_BGKD=kept[1])


@contextmanager
def before_rotation(model: nn.Module) -> Iterator[BeforeRotation]:
    """Within the with statement, store what the attention modules rotate, one layer at a time."""
    before = BeforeRotation()
    with _lock:
        originals = rotary_files([*attention_sites(model)])
        for file, original in originals.items():
            setattr(file, ROTARY_FUNCTION, _record_before_rotation(original, before))
        try:
            yield before
        finally:
            for file, original in originals.items():
                setattr(file, ROTARY_FUNCTION, original)


def _record_before_rotation(original: Any, before: BeforeRotation) -> Any:
    keep = only_in_this_thread(before.keep)

    @wraps(original)
    def rotate(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Any:
        keep(q, k)
        return original(q, k, *args, **kwargs)

    return rotate


def _same_norms(first: Tensor, second: Tensor) -> bool:
    a, b = (torch.linalg.vector_norm(t.float(), dim=-1) for t in (first, second))
    return bool(((a - b).abs() <= SAME_ROTATED_NORM * b.clamp(min=1e-6)).all())


@dataclass(frozen=True)
class HeadRows:
    """The rows of a projection that belong to each head, (heads, width), and the power of gamma that scales them."""

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
        """Return weights (heads, width, inputs) and bias (heads, width) in float32."""
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
    """Return the weights of an attention module, checked on one of its calls; None if they are unknown.

    They are None for modules that normalize q and k after the projection: scaling a projection has no effect there.
    """
    latent = _latent(module)
    if latent is not None:
        return latent
    return next((weights for weights in _candidates(module, call) if _produces_states(weights, call)), None)


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


def _produces_states(weights: QueryKeyWeights, call: AttentionCall) -> bool:
    if call.inputs_BKC is None:
        return False
    keys = call.inputs_BKC[0]
    states = [(weights.key[0], keys, call.key_BGKD[0])]
    if call.kind != "cross":  # there the queries come from another sequence
        states.append((weights.query[0], keys[-call.query_BHQD.shape[2] :], call.query_BHQD[0]))
    for part, x, target in states:
        outputs = part.projection.weight.numel() // x.shape[-1]
        if int(part.rows.max()) >= outputs or not projects_to(*part.matrix(), x.detach(), target.detach()):
            return False
    return True


def _latent(module: nn.Module) -> QueryKeyWeights | None:
    """Return the weights of DeepSeek's attention. As in Kimi K2, gamma scales the queries of the shared rotated key."""
    query = getattr(module, "q_b_proj", None) or getattr(module, "q_proj", None)
    key, nope, rope = (getattr(module, name, None) for name in ("kv_b_proj", "qk_nope_head_dim", "qk_rope_head_dim"))
    if not (isinstance(query, nn.Linear) and isinstance(key, nn.Linear) and nope and rope):
        return None
    width = nope + rope
    heads = query.weight.shape[0] // width
    rows, keys = _rows(heads, width), _rows(heads, key.weight.shape[0] // heads)
    parts = HeadRows(query, rows[:, :nope]), HeadRows(query, rows[:, nope:], 1.0)
    return QueryKeyWeights(parts, (HeadRows(key, keys[:, :nope]),))
