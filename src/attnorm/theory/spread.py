"""The logit spread of a head, and the bound that its weight matrices put on it.

Proposition 3.1 of Velickovic et al. 2024, https://arxiv.org/abs/2410.01104: sharpness needs large weights. Shapes: H
query heads, K key heads (H a multiple of K), head size e, inputs y (..., Q, D) of the queries and x (..., L, C) of
the keys, W_Q (..., H, e, D), W_K (..., K, e, C). Proofs: docs/theory/dispersion.md.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnorm.theory.dispersion import observed_range
from attnorm.theory.selection import at_least_float32


def logit_spread(logits: Float[Tensor, "*rows L"], mask: Bool[Tensor, "..."] | None = None) -> Float[Tensor, "*rows"]:
    """Largest minus smallest visible logit; NaN where a row sees no key."""
    low, high = observed_range(at_least_float32(logits), mask)
    return high - low


def proposition31_bound(
    query_weight: Float[Tensor, "... H e D"],
    key_weight: Float[Tensor, "... K e C"],
    query_inputs: Float[Tensor, "... Q D"],
    key_inputs: Float[Tensor, "... L C"],
    *,
    query_bias: Float[Tensor, "... H e"] | None = None,
    key_bias: Float[Tensor, "... K e"] | None = None,
    scaling: float = 1.0,
    mask: Bool[Tensor, "..."] | None = None,
) -> Float[Tensor, "... H Q"]:
    """Spread <= 2 |scaling| smax(W_Q) smax(W_K) ||y|| max_i ||x_i||, per head and query, over the keys it may see.

    A bias counts as one more column of its matrix and one more coordinate, 1, of its inputs. Rotations of q and k
    (RoPE) change no norm, so the bound stays. It says nothing about heads that normalise q and k (QK-norm) or add to
    the logits a term that depends on the key (ALiBi).
    """
    query_weight, query_inputs = _append_bias(query_weight, query_bias, query_inputs)
    key_weight, key_inputs = _append_bias(key_weight, key_bias, key_inputs)
    key_size = _for_each_head(_largest_singular(key_weight), query_weight.shape[-3], dim=-1)
    return _bound(_largest_singular(query_weight) * key_size, query_inputs, key_inputs, scaling, mask)


def proposition31_tight(
    query_weight: Float[Tensor, "... H e D"],
    key_weight: Float[Tensor, "... K e C"],
    query_inputs: Float[Tensor, "... Q D"],
    key_inputs: Float[Tensor, "... L C"],
    *,
    query_bias: Float[Tensor, "... H e"] | None = None,
    scaling: float = 1.0,
    mask: Bool[Tensor, "..."] | None = None,
) -> Float[Tensor, "... H Q"]:
    """Spread <= 2 |scaling| smax(W_Q^T W_K) ||y|| max_i ||x_i - c||, c = 0 or the mean input, whichever gives less.

    Never above the printed bound, but only for heads that do not rotate q and k. A key bias, and a shift of all key
    inputs, move the logits of a row alike: neither can widen its spread.
    """
    query_weight, query_inputs = _append_bias(query_weight, query_bias, query_inputs)
    # With the QR factorisation W_Q^T = U R, W_Q^T W_K = U (R W_K) has the singular values of the small R W_K.
    product = torch.linalg.qr(query_weight.mT).R @ _for_each_head(key_weight, query_weight.shape[-3], dim=-3)
    seen_keys = torch.ones_like(key_inputs[..., 0], dtype=torch.bool) if mask is None else mask.any(-2)
    key_inputs = torch.where(seen_keys.unsqueeze(-1), key_inputs, 0.0)
    centre = key_inputs.sum(-2, keepdim=True) / seen_keys.sum(-1).clamp(min=1)[..., None, None]
    size = _largest_singular(product)
    return torch.minimum(
        _bound(size, query_inputs, key_inputs, scaling, mask),
        _bound(size, query_inputs, key_inputs - centre, scaling, mask),
    )


def _bound(size: Tensor, query_inputs: Tensor, key_inputs: Tensor, scaling: float, mask: Tensor | None) -> Tensor:
    """2 |scaling| size ||y|| max ||x_i|| over the keys that each query sees."""
    norms = torch.linalg.vector_norm(key_inputs, dim=-1).unsqueeze(-2)
    norms = norms.expand(*norms.shape[:-2], query_inputs.shape[-2], norms.shape[-1])
    reach: Tensor = torch.linalg.vector_norm(query_inputs, dim=-1) * observed_range(norms, mask)[1]
    return 2 * abs(scaling) * size.unsqueeze(-1) * reach.unsqueeze(-2)


def _append_bias(weight: Tensor, bias: Tensor | None, inputs: Tensor) -> tuple[Tensor, Tensor]:
    if bias is None:
        return weight, inputs
    return torch.cat([weight, bias.unsqueeze(-1)], -1), torch.cat([inputs, torch.ones_like(inputs[..., :1])], -1)


def _largest_singular(matrix: Tensor) -> Tensor:
    singular_values: Tensor = torch.linalg.svdvals(matrix)
    return singular_values[..., 0]


def _for_each_head(per_key_head: Tensor, heads: int, dim: int) -> Tensor:
    groups = per_key_head.shape[dim]
    if heads % groups:
        raise ValueError(f"{heads} query heads cannot share {groups} key heads; expected a multiple of {groups}")
    return per_key_head.repeat_interleave(heads // groups, dim)
