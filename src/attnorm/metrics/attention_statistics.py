"""attention_statistics(q, k, normalizer): numbers of every attention row, without values and without the matrix."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnorm.engines.inputs import validate_inputs
from attnorm.metrics.call import AttentionCall
from attnorm.metrics.rows import measure_rows
from attnorm.normalizers.contract import Mechanism, Normalizer
from attnorm.normalizers.registry import resolve


class AttentionStatistics(NamedTuple):
    """One number per row, each of shape (B, H, Lq); z are the logits of the n visible keys, w their weights.

    NaN where a number is not defined: in rows that see no key, and everywhere for a number that the map does not have.
    Entropy, effective keys and top masses are those of p = |w| / sum |w|.
    """

    n: Tensor  # visible keys
    max_logit: Tensor  # max z, with scale and soft cap, before the normalizer's own factor
    min_logit: Tensor  # min z
    logsumexp: Tensor  # log of what softmax divides by: its factor and its learned sink included; NaN for other maps
    entropy: Tensor  # -sum p log p, in nats
    effective_keys: Tensor  # 1 / sum p^2
    max_weight: Tensor  # max |w|
    sink_mass: Tensor  # weight of the first visible key, and of the learned sink where there is one
    row_sum: Tensor  # sum w
    jacobian_norm: Tensor  # largest singular value of dw/dz
    top_mass: Tensor  # (B, H, Lq, len(top_n)): sum of the N largest p for each N of top_n


_ROW_NUMBERS = [name for name in AttentionStatistics._fields if name not in ("n", "top_mass")]
_NAMES = {"entropy": "entropy_nats"}  # as the catalogue of metrics calls them


def attention_statistics(
    q: Tensor,
    k: Tensor,
    normalizer: str | Normalizer = "softmax",
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    top_n: Sequence[int] = (),
) -> AttentionStatistics:
    """Statistics of every row of attention with queries (B, H, Lq, D) and keys (B, Hkv, Lk, D), in float32 at least.

    mask, causal, scale: as in attnorm.attention. softcap: logits become softcap * tanh(logits / softcap). top_n: for
    which N the mass of the N heaviest keys is wanted. Memory grows with the rows, never with rows times keys. No
    gradient. On a CUDA device softmax and its rescalings run as one Triton
    kernel, in bfloat16 with a Jacobian norm exact to 4e-3.

    >>> statistics = attention_statistics(q, k, causal=True)
    >>> statistics.entropy.mean((0, 2))  # of each head
    """
    chosen = resolve(normalizer)
    if isinstance(chosen, Mechanism):
        raise TypeError(f"expected a row normalizer, got the mechanism {chosen.name!r}, which has no rows of logits.")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"expected softcap above 0, got {softcap!r}. Leave it out for no cap.")
    if any(N < 1 for N in top_n):
        raise ValueError(f"expected top_n of whole numbers from 1 up, got {tuple(top_n)}.")
    inputs = validate_inputs(q, k, k, mask=mask, causal=causal, scale=scale, positions=None)
    mask = inputs.mask
    if mask is not None and mask.shape[-2] > 1:  # in an AttentionCall such a mask has causality in it
        mask = inputs.visible(0, inputs.queries, inputs.keys)
    call = AttentionCall(
        layer=0,
        kind="decoder" if causal else "encoder",
        query_BHQD=inputs.q_BHQD.detach(),
        key_BGKD=inputs.k_BGKD.detach(),
        value_BGKE=inputs.k_BGKD.detach(),
        scale=inputs.scale,
        causal=causal,
        mask=mask,
        softcap=softcap,
    )
    wanted = [_NAMES.get(name, name) for name in _ROW_NUMBERS]
    (found,) = measure_rows(call, [chosen], torch.arange(inputs.queries), top_n, names=wanted, mass_rows=None).values()
    shape = q.shape[:-1]
    numbers = {name: found.values[_NAMES.get(name, name)].reshape(shape) for name in _ROW_NUMBERS}
    return AttentionStatistics(n=found.n.reshape(shape), **numbers, top_mass=found.top_mass.reshape(*shape, len(top_n)))
