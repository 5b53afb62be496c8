"""The matrices that make queries and keys out of a layer's input, head by head, where a model keeps them plainly."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from attnorm.metrics.call import AttentionCall

NAMES = (("q_proj", "k_proj"), ("query", "key"), ("q_lin", "k_lin"))
FUSED = ("c_attn", "qkv_proj")  # queries, then keys, then values
SAME_LENGTH = 2e-2  # relative; half precision rounds by less


@dataclass(frozen=True)
class Projections:
    """W_Q (H, e, D), W_K (G, e, D) and their biases (H, e), (G, e)."""

    query_weight: Tensor
    key_weight: Tensor
    query_bias: Tensor | None
    key_bias: Tensor | None


def projections(module: nn.Module, call: AttentionCall) -> Projections | None:
    """Those of an attention module, checked on one of its calls; None where q and k are not made by them alone.

    The call must have its layer input. Rotations change no length of q and k, so lengths are what is compared: a module
    that normalises them after the projection, or is built in another way, is not mistaken for a plain one.
    """
    if call.inputs_BKC is None:
        return None
    found = _matrices(module)
    if found is None:
        return None
    heads, groups, width = call.query_BHQD.shape[1], call.key_BGKD.shape[1], call.query_BHQD.shape[-1]
    (query_weight, query_bias), (key_weight, key_bias) = found
    if query_weight.shape[0] < heads * width or key_weight.shape[0] < groups * width:
        return None
    made = Projections(
        query_weight[: heads * width].unflatten(0, (heads, width)),
        key_weight[: groups * width].unflatten(0, (groups, width)),
        None if query_bias is None else query_bias[: heads * width].unflatten(0, (heads, width)),
        None if key_bias is None else key_bias[: groups * width].unflatten(0, (groups, width)),
    )
    x = call.inputs_BKC[0, -call.query_BHQD.shape[2] :].float()
    same = _as_long(made.query_weight, made.query_bias, x, call.query_BHQD[0])
    return made if same and _as_long(made.key_weight, made.key_bias, call.inputs_BKC[0], call.key_BGKD[0]) else None


def _matrices(module: nn.Module) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]] | None:
    for query, key in NAMES:
        parts = [getattr(module, name, None) for name in (query, key)]
        if all(isinstance(part, nn.Linear) for part in parts):
            return _of(parts[0]), _of(parts[1])  # type: ignore[arg-type]
    fused = next((part for name in FUSED if isinstance(part := getattr(module, name, None), nn.Module)), None)
    if fused is None or not isinstance(getattr(fused, "weight", None), Tensor):
        return None
    weight, bias = _of(fused)
    third = weight.shape[0] // 3
    if weight.shape[0] % 3:  # keys at another number of heads: where they start depends on the model
        return None
    rest = None if bias is None else bias[third:]
    return (weight[:third], None if bias is None else bias[:third]), (weight[third:], rest)


def _of(part: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight (out, in) and bias; GPT-2's Conv1D holds the transposed matrix."""
    weight, bias = part.weight.detach().float(), part.bias  # type: ignore[operator]
    assert isinstance(weight, Tensor)
    weight = weight if isinstance(part, nn.Linear) else weight.T
    return weight, bias.detach().float() if isinstance(bias, Tensor) else None


def _as_long(weight: Tensor, bias: Tensor | None, x: Tensor, there: Tensor) -> bool:
    made = torch.einsum("hed,ld->hle", weight, x.float())
    made = made if bias is None else made + bias[:, None]
    a, b = (torch.linalg.vector_norm(t.float(), dim=-1) for t in (made, there))
    return bool(a.shape == b.shape and ((a - b).abs() <= SAME_LENGTH * b.clamp(min=1e-3)).all())
