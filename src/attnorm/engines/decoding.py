"""The engine for decoding (few queries, many keys) with maps that first need a number of the whole row; forward only.

These are threshold maps such as entmax, top-k, stick-breaking, sa_softmax, adaptive temperature and norm_softmax. The
logits of all rows are stored, which is cheap for few queries, so that keys and values are read once each
(kernels/decoding.py). Beyond 256 MiB of logits, sequences or key heads are processed one part after the other. Maps
without such a number are in engines/one_pass.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnorm.engines.execution import MIN_QUERIES, kernel_operator, runs_kernels
from attnorm.engines.inputs import Inputs, needs_gradient, row_factors, under_transform
from attnorm.engines.one_pass import (
    CommonFactor,
    LoweredNormalizer,
    common_factor,
    common_length,
    fits_decoding,
    lower,
    per_row,
    rule_numbers,
    sink_numbers,
)
from attnorm.kernels.launch import Form
from attnorm.normalizers.adaptive_temperature import EntropyRule
from attnorm.normalizers.contract import KernelForm, Normalizer, ThresholdForm
from attnorm.normalizers.norm_softmax import MIN_DEVIATION, UnitVariance
from attnorm.normalizers.stick_breaking import StickBreaking

# Of stored logits at a time; only those of a single key head may exceed it, by at most 1 KB per key.
MAX_LOGIT_BYTES = 2**28
LOGIT_BYTES = 8  # float32, and a place in the list of those that matter


class DecodingPlan(NamedTuple):
    """A normalizer in the terms of the kernels: its logits, and what is searched in a row (decoding.RowSearch)."""

    form: LoweredNormalizer
    kind: str
    numbers: tuple[float, ...] = ()
    steps: tuple[float, ...] = ()
    threshold: ThresholdForm | None = None


def applies(inputs: Inputs, normalizer: Normalizer) -> bool:
    """Whether the kernels compute this call exactly."""
    return plan_call(inputs, normalizer) is not None


def plan_call(inputs: Inputs, normalizer: Normalizer) -> DecodingPlan | None:
    """Return the plan of this call if the kernels compute it exactly, else None."""
    if inputs.queries >= MIN_QUERIES or not fits_decoding(inputs):
        return None
    if inputs.bias is not None or inputs.dropout > 0 or under_transform() or needs_gradient(inputs, normalizer):
        return None
    return plan(inputs, normalizer) if runs_kernels(inputs.q_BHQD, inputs.v_BGKE) else None


def plan(inputs: Inputs, normalizer: Normalizer) -> DecodingPlan | None:
    """Translate a normalizer to the terms of the kernels; None if they do not have it or it needs no search."""
    map_ = normalizer.map
    if type(map_) is StickBreaking:
        if inputs.positions is not None and not map_.attend_current:
            return None
        form = lower(normalizer, inputs, KernelForm("stick_breaking"))
        return None if form is None else DecodingPlan(form, "stick" if map_.attend_current else "stick_rest")
    if (threshold := map_.threshold_form()) is not None:
        form = lower(normalizer, inputs, KernelForm(threshold.map, counts_keys=threshold.parameter is not None))
        return None if form is None else DecodingPlan(form, threshold.map, threshold=threshold)
    form = lower(normalizer, inputs)
    if form is None:
        return None
    if form.map.ranged:
        return DecodingPlan(form, "range")
    rules = normalizer.rules
    last = rules[-1] if rules else None
    if isinstance(last, EntropyRule | UnitVariance):
        if form.window is not None:  # the statistic is that of all visible keys
            return None
        if isinstance(last, EntropyRule):
            return DecodingPlan(form, "entropy", last.coefficients, last.steps())
        return DecodingPlan(form, "variance", (MIN_DEVIATION, last.temperature))
    return None if form.top is None else DecodingPlan(form, "top")


def decode(inputs: Inputs, normalizer: Normalizer, found: DecodingPlan | None = None) -> Tensor:
    """Return the output (B, H, Q, E) of a normalizer for which `applies` is true. found: from `plan_call`."""
    found = found or plan(inputs, normalizer)
    assert found is not None
    form, n = found.form, common_length(inputs)
    known = None if n is None else common_factor(inputs, form, n)
    factor = known or CommonFactor(1.0, per_row(row_factors(inputs, normalizer), inputs.q_BHQD.shape[:3]))
    parameter = common_parameter = count = None
    if (threshold := found.threshold) is not None and threshold.parameter is not None:
        if n is not None and threshold.takes_numbers:
            common_parameter = float(threshold.parameter(float(n)))
        else:
            shape = inputs.q_BHQD.shape[:3]
            parameter = per_row(threshold.parameter(inputs.n().float().expand(*shape, 1)), shape)
    if (top := None if form.top is None else form.top.k) is not None and not isinstance(top, int):
        assert form.top is not None
        count = form.top.counts(inputs.n())[..., 0].to(torch.int32).expand(inputs.q_BHQD.shape[:3])
        top = inputs.keys
    output: Tensor = _decode(
        inputs.q_BHQD, inputs.k_BGKD, inputs.v_BGKE, inputs.full_mask, factor.tensor, factor.exponent,
        sink_numbers(inputs, form), *rule_numbers(inputs, form), parameter, common_parameter, count, form.rule,
        form.softcap, inputs.causal, form.window, inputs.scale * factor.number, factor.log2_base, factor.delta,
        found.kind, found.numbers, found.steps, top,
    )  # fmt: skip
    return output


@kernel_operator("attnorm::decode_from_logits")
def _decode(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None, exponent: Tensor | None,
    sink: Tensor | None, rule_parameters: Tensor | None, rule_parameter: float | None, parameter: Tensor | None,
    common_parameter: float | None, count: Tensor | None, rule: str, softcap: float | None, causal: bool,
    window: int | None, scale: float, log2_base: float, delta: float, kind: str, numbers: list[float],
    steps: list[float], top: int | None,
) -> Tensor:  # fmt: skip
    from attnorm.kernels.decoding import RowSearch, decode  # loads Triton

    form = Form("softmax", 1, 0.0, rule, softcap, causal, window, scale, log2_base, delta)
    search = RowSearch(kind, tuple(numbers), tuple(steps), top)
    sources = (
        q, k, v, mask, factor, exponent, sink, rule_parameter if rule_parameters is None else rule_parameters,
        common_parameter if parameter is None else parameter, count,
    )  # fmt: skip
    return _decode_in_pieces(partial(decode, form=form, search=search), sources)


def _decode_in_pieces(run: Callable[..., Tensor], sources: tuple[Any, ...]) -> Tensor:
    """Run the kernels, for one half of the sequences or key heads after the other if all logits need too much memory.

    sources: the first arguments of kernels.decoding.decode, q, k and v first.
    """
    (batch, heads, queries, _), (_, key_heads, keys, _) = sources[0].shape, sources[1].shape
    if LOGIT_BYTES * batch * heads * queries * keys <= MAX_LOGIT_BYTES or batch * key_heads == 1:
        return run(*sources)
    dim, units = (0, batch) if batch > 1 else (1, key_heads)

    def half_of(source: Any, upper: bool) -> Any:
        if not isinstance(source, Tensor) or source.dim() <= 1 - dim:  # the same for both halves
            return source
        own_dim = 0 if source.dim() == 1 else dim  # one number per head
        size = source.shape[own_dim]
        middle = size * (units // 2) // units
        return source.narrow(own_dim, middle, size - middle) if upper else source.narrow(own_dim, 0, middle)

    halves = [tuple(half_of(source, upper) for source in sources) for upper in (False, True)]
    return torch.cat([_decode_in_pieces(run, half) for half in halves], dim)


@_decode.register_fake
def _(q: Tensor, v: Tensor) -> Tensor:
    return q.new_empty(*q.shape[:-1], v.shape[-1])
