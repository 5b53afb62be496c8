"""attention_statistics(q, k, normalizer): numbers of every attention row, without values and without the matrix."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from attnorm.engines.inputs import Inputs, validate_inputs
from attnorm.metrics.compiled_statistics import compiled_output_and_statistics, compiled_statistics
from attnorm.metrics.fused_output import output_and_rows
from attnorm.metrics.inputs_as_call import call_of
from attnorm.metrics.logits import LogitBlock
from attnorm.metrics.normalized import MeasuredNormalizer
from attnorm.metrics.rows import OnWeights, measure_rows
from attnorm.normalizers.block import Positions
from attnorm.normalizers.contract import Mechanism, Normalizer
from attnorm.normalizers.registry import resolve_for_call
from attnorm.theory.selection import at_least_float32

_NAMES = {"entropy": "entropy_nats"}  # as the catalogue of metrics calls them


class AttentionStatistics(NamedTuple):
    """One number per row, each of shape (B, H, Lq); z are the logits of the n visible keys, w their weights.

    n: visible keys
    max_logit, min_logit: max z and min z, with scale and soft cap, before the normalizer's own factor
    logsumexp: log of what softmax divides by, its factor and its learned sink included; NaN for other maps
    entropy: -sum p log p in nats, of p = |w| / sum |w|
    effective_keys: 1 / sum p^2
    max_weight: max |w|
    sink_mass: p of the first visible key; with a learned sink its w and what the sink took, 1 - sum w
    row_sum: sum w
    jacobian_norm: largest singular value of dw/dz; for maps without a closed form (softpick, sa_softmax,
        stick_breaking, a rule that reads the row) in 8 rows of each head only, NaN in the others
    top_mass: (B, H, Lq, len(top_n)), the sum of the N largest p for each N of top_n

    NaN where a number is not defined: in rows that see no key, in rows whose weights are all 0 (all but n, logits and
    row_sum), and everywhere for a number that the map does not have.
    """

    n: Tensor
    max_logit: Tensor
    min_logit: Tensor
    logsumexp: Tensor
    entropy: Tensor
    effective_keys: Tensor
    max_weight: Tensor
    sink_mass: Tensor
    row_sum: Tensor
    jacobian_norm: Tensor
    top_mass: Tensor

    def reshaped(self, shape: Sequence[int]) -> "AttentionStatistics":
        """With rows of this shape, in the dimensions of the queries that they belong to."""
        return AttentionStatistics(*(t.reshape(*shape, *t.shape[3:]) for t in self))


_ROW_NUMBERS = [name for name in AttentionStatistics._fields if name not in ("n", "top_mass")]


def attention_statistics(
    q: Tensor,
    k: Tensor,
    normalizer: str | Normalizer = "softmax",
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    positions: Tensor | Positions | None = None,
    hidden_states: Tensor | None = None,
    softcap: float | None = None,
    top_n: Sequence[int] = (),
) -> AttentionStatistics:
    """Statistics of every row of attention with queries (B, H, Lq, D) and keys (B, Hkv, Lk, D), in float32 at least.

    mask, causal, scale, positions, hidden_states: as in attnorm.attention, which returns the same numbers with its
    output if you pass return_statistics=True. softcap: logits become softcap * tanh(logits / softcap). top_n: for which
    N the mass of the N heaviest keys is wanted. Memory grows with the rows, never with rows times keys. No gradient. On
    a CUDA device softmax, entmax, sparsemax, kneemax, sigmoid, relu and softpick, with any scale rules in front of
    them, run on Triton kernels, in bfloat16 with a Jacobian norm exact to 4e-3. Other normalizers run in blocks of
    logits. Under torch.compile the statistics are one operator of the graph.

    >>> statistics = attention_statistics(q, k, causal=True)
    >>> statistics.entropy.mean((0, 2))  # of each head
    """
    resolved = resolve_for_call(normalizer)
    if isinstance(resolved, Mechanism):
        raise TypeError(f"expected a row normalizer, got the mechanism {resolved.name!r}, which has no rows of logits.")
    if softcap is not None and not (isinstance(softcap, int | float) and 0 < softcap < math.inf):
        raise ValueError(f"expected a finite softcap above 0, got {softcap!r}. Leave it out for no cap.")
    if not isinstance(top_n, Sequence) or any(isinstance(N, float) or N < 1 for N in top_n):
        raise ValueError(f"expected top_n as a sequence of whole numbers from 1 up, got {top_n!r}.")
    inputs = validate_inputs(
        q, k, k, mask=mask, causal=causal, scale=scale, positions=positions, hidden_states=hidden_states
    )
    return statistics_of(replace(inputs, softcap=softcap), resolved, top_n).reshaped(q.shape[:-1])


def statistics_of(
    inputs: Inputs, normalizer: Normalizer, top_n: Sequence[int] = (), on_weights: OnWeights | None = None
) -> AttentionStatistics:
    """The same for validated inputs, (B, H, Q). on_weights: as in measure_rows."""
    row_names = [_NAMES.get(name, name) for name in _ROW_NUMBERS]
    if torch.compiler.is_compiling():
        return AttentionStatistics._make(compiled_statistics(inputs, normalizer, row_names, top_n))
    (rows,) = measure_rows(
        call_of(inputs), [normalizer], torch.arange(inputs.queries), top_n, names=row_names, mass_rows=None,
        on_weights=on_weights,
    ).values()  # fmt: skip
    numbers = {name: rows.values[_NAMES.get(name, name)] for name in _ROW_NUMBERS}
    return AttentionStatistics(n=rows.n, **numbers, top_mass=rows.top_mass)


def softmax_output_and_statistics(inputs: Inputs, normalizer: Normalizer) -> tuple[Tensor, AttentionStatistics]:
    """Output (B, H, Q, E) and statistics of a rescaled softmax from one pass, without gradient.

    For inputs to which fused_output applies.
    """
    row_names = [_NAMES.get(name, name) for name in _ROW_NUMBERS]
    if torch.compiler.is_compiling():
        output, n, *numbers = compiled_output_and_statistics(inputs, normalizer, row_names)
    else:
        output, rows = output_and_rows(call_of(inputs), MeasuredNormalizer(normalizer.name, normalizer), row_names)
        n, numbers = rows.n, [rows.values[name] for name in row_names]
    no_masses = numbers[0].new_empty((*n.shape, 0))
    return output, AttentionStatistics._make([n, *numbers, no_masses])


def output_and_statistics(inputs: Inputs, normalizer: Normalizer) -> tuple[Tensor, AttentionStatistics]:
    """Output (B, H, Q, E) and statistics of a map that is not softmax, from the same weights, without gradient."""
    groups = inputs.groups
    value = at_least_float32(inputs.v_BGKE)
    output = value.new_zeros((*inputs.q_BHQD.shape[:3], value.shape[-1]))

    def add(block: LogitBlock, weights: Tensor) -> None:
        stop = min(block.first_key + weights.shape[-1], inputs.keys)
        heads = torch.arange(block.heads.start, block.heads.stop, device=value.device) // groups
        visible_values = value[block.item, heads, block.first_key : stop]
        output[block.item, block.heads, block.queries] = weights[..., : stop - block.first_key] @ visible_values

    return output, statistics_of(inputs, normalizer, on_weights=add)
