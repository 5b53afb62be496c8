"""Attention on the one-pass Triton kernels: every map whose weight needs one number per row, forward and backward.

A normalizer is lowered to a map and a rule by name (kernels/maps.py), and a factor and a shift per row, which stay in
float32. engines/one_pass_operators.py calls the kernels.

Adaptive temperature finds the entropy of each row first, then its beta is a factor (engines/sharpened_operators.py).

NormSoftmax finds the mean and the variance of each row first, then 1 / deviation is a factor, through which the
gradient reaches q and k (engines/variance_operators.py).

Self-adjusted softmax is a search for the extreme logits of each row, then one call. Logits count from the smallest one,
which is the shift of the row and carries its gradient; the output is divided by the row's range.

Few queries, as in decoding, run with the keys split over programs (kernels/decode.py), forward only.

Top-k is a search for a number between the k-th logit of each row and the next, then softmax over the keys above it.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnorm.engines import one_pass_operators, sharpened_operators, variance_operators
from attnorm.engines.inputs import Inputs, head_numbers, row_factors, transformed
from attnorm.engines.triton_support import MIN_QUERIES, runs_kernels
from attnorm.normalizers.adaptive_temperature import EntropyRule
from attnorm.normalizers.contract import KernelForm, LogitRule, Normalizer, ScaleRule
from attnorm.normalizers.norm_softmax import UnitVariance
from attnorm.normalizers.softcap import Softcap
from attnorm.normalizers.topk import TopK

POWERS = (1, 2, 3, 4)  # of relu and of the polynomial kernel, multiplied out
MIN_KEYS = 256  # in decoding; with fewer there is nothing to split
MAX_ROWS = 128  # in decoding: queries of all heads that share a key head
_LN2 = 0.6931471805599453


@dataclass(frozen=True)
class Lowered:
    """A normalizer as the kernels know it."""

    map: KernelForm
    rule: str = "none"
    parameter: float | Tensor = 0.0  # of the rule; a tensor has one number, or one per head
    window: int | None = None
    softcap: float | None = None  # the model's own, or that of a rule
    top: TopK | None = None  # behind the window


def applies(inputs: Inputs, normalizer: Normalizer) -> bool:
    """Whether this call can run on the kernels with the same result."""
    if inputs.bias is not None or inputs.dropout > 0 or inputs.queries == 0:
        return False
    if not runs_kernels(inputs.q_BHQD, inputs.v_BGKE) or transformed():
        return False
    form = lowered(normalizer, inputs)
    if form is None or inputs.queries >= MIN_QUERIES:
        return form is not None
    return _decodes(inputs, normalizer, form)


def _decodes(inputs: Inputs, normalizer: Normalizer, form: Lowered) -> bool:
    """Whether a call of few queries can run with its keys split over programs: without gradients, without a search."""
    learns = inputs.needs_grad or (torch.is_grad_enabled() and any(p.requires_grad for p in normalizer.parameters()))
    return (
        inputs.keys >= MIN_KEYS
        and inputs.groups * inputs.queries <= MAX_ROWS
        and not (learns or form.map.ranged or form.top is not None)
        and not any(isinstance(rule, UnitVariance) for rule in normalizer.rules)
    )


def lowered(normalizer: Normalizer, inputs: Inputs) -> Lowered | None:
    """The kernels' form of a normalizer, None where there is none."""
    map_ = normalizer.map.kernel_form()
    if map_ is None or map_.power not in POWERS or (normalizer.sink is not None and map_.map != "softmax"):
        return None
    if (map_.counts_keys and normalizer.selections) or (inputs.q_BHQD.dtype == torch.float16 and not map_.float16):
        return None
    cap, rules = _own_softcap(inputs, normalizer)
    if map_.ranged and not all(isinstance(rule, ScaleRule) for rule in rules):
        return None
    form = Lowered(map_, softcap=inputs.softcap if cap is None else cap)
    last = rules[-1] if rules else None
    if not all(isinstance(rule, ScaleRule) for rule in rules[:-1]):
        return None
    if last is not None and (rule := last.kernel_rule()) is not None:
        # The kernels apply the rule behind the factor and the shift of a row; those of a map come after its rules.
        if inputs.positions is not None or map_.row_factor is not None or map_.row_shift is not None:
            return None
        form = replace(form, rule=rule[0], parameter=rule[1])
    elif isinstance(last, EntropyRule | UnitVariance):
        if map_.map != "softmax" or normalizer.sink is not None or form.softcap is not None:
            return None
    elif last is not None and not isinstance(last, ScaleRule):
        return None
    for selection in normalizer.selections:
        window = selection.kernel_window
        if isinstance(selection, TopK):
            counts_all = isinstance(selection.k, int) or form.window is None  # of a window the engine has no n
            if (
                selection is not normalizer.selections[-1]
                or map_.map != "softmax"
                or form.rule != "none"
                or not counts_all
            ):
                return None
            form = replace(form, top=selection)
            continue
        if window is None or not inputs.causal or inputs.positions is not None:
            return None
        form = replace(form, window=min(window, form.window or window))
    return form


def _own_softcap(inputs: Inputs, normalizer: Normalizer) -> tuple[float | None, list[LogitRule]]:
    """The cap of a softcap that comes before all other rules, and those others: the kernels have one for models."""
    rules = normalizer.rules
    if rules and isinstance(rules[0], Softcap) and inputs.softcap is None:
        return rules[0].cap, rules[1:]
    return None, rules


def one_pass(inputs: Inputs, normalizer: Normalizer) -> Tensor:
    """Output (B, H, Q, E) of a normalizer for which `applies` is true."""
    form = lowered(normalizer, inputs)
    assert form is not None
    factor, shift = _row_numbers(inputs, normalizer, form.map)
    if normalizer.rules and isinstance(normalizer.rules[-1], EntropyRule):
        return _sharpened(inputs, normalizer.rules[-1], factor, form)
    if normalizer.rules and isinstance(normalizer.rules[-1], UnitVariance):
        return _to_unit_variance(inputs, normalizer.rules[-1], factor, form)
    sink = None
    if normalizer.sink is not None:
        logit, heads = normalizer.sink.logit, inputs.q_BHQD.shape[1]
        if logit.dim() == 1 and logit.shape[0] != heads:
            raise ValueError(f"the sink has logits for {logit.shape[0]} heads, but q has {heads} heads")
        sink = logit.to(inputs.q_BHQD.device, torch.float32).expand(heads).contiguous()
    if form.map.ranged:
        low, high = _range(inputs, factor, form)
        width = high - low
        output = _call(inputs, inputs.v_BGKE, factor, -low, sink, form, precise=True)[0]
        return output / torch.where(width > 0, width, 1.0)[..., None]
    least = None if form.top is None else _least(inputs, factor, form, form.top)
    return _call(inputs, inputs.v_BGKE, factor, shift, sink, form, least)[0]


def _sharpened(inputs: Inputs, rule: EntropyRule, factor: Tensor | None, form: Lowered) -> Tensor:
    """Output of softmax whose factor is beta of the entropy of each row before any selection."""
    mask = None if inputs.mask is None else inputs.mask.expand(inputs.weights_shape)
    soft = None if factor is None else factor.detach()
    reference = None  # few queries have no gradient
    if inputs.queries < MIN_QUERIES:
        entropy = _entropy_of_few(inputs, soft)
    else:
        entropy, reference = sharpened_operators.row_entropy(
            inputs.q_BHQD.detach(), inputs.k_BGKD.detach(), mask, soft, inputs.causal, inputs.scale
        )
    beta = rule.beta(entropy)
    sharp = beta if factor is None else factor * beta
    least = None if form.top is None else _least(inputs, sharp, form, form.top)
    if not (inputs.needs_grad or sharp.requires_grad):
        return _call(inputs, inputs.v_BGKE, sharp, None, None, form, least)[0]
    assert reference is not None
    slope = rule.slope(entropy) if soft is None else rule.slope(entropy) * soft
    output: Tensor = sharpened_operators.sharpened_attention(
        inputs.q_BHQD, inputs.k_BGKD, inputs.v_BGKE, mask, sharp, least, factor, entropy, reference, slope,
        inputs.causal, form.window, inputs.scale,
    )[0]  # fmt: skip
    return output


def _to_unit_variance(inputs: Inputs, rule: UnitVariance, factor: Tensor | None, form: Lowered) -> Tensor:
    """Output of softmax of logits over the deviation of each row before any selection.

    The mean changes no weight. As a shift it keeps digits: the gradient of the factor is then a sum over distances from
    the mean.
    """
    inputs = replace(inputs, k_BGKD=_without_common_key(inputs.k_BGKD))
    mask = None if inputs.mask is None else inputs.mask.expand(inputs.weights_shape)
    variance, mean, count = variance_operators.row_variance(
        inputs.q_BHQD, inputs.k_BGKD, mask, inputs.causal, inputs.scale
    )
    if factor is None:
        sharp = rule.factor(variance)
    else:
        sharp = factor * rule.factor(factor * factor * variance)
    sharp = torch.where(count > 1, sharp, 0.0)  # a single key has no gradient, and a factor of 1e6 would show rounding
    if form.top is not None:
        return _call(inputs, inputs.v_BGKE, sharp, None, None, form, _least(inputs, sharp, form, form.top))[0]
    return _call(inputs, inputs.v_BGKE, sharp, -sharp * mean, None, form)[0]


def _without_common_key(k: Tensor) -> Tensor:
    """Keys minus their mean, in channels where it exceeds their deviation.

    This adds the same number to all logits of a row. The logit gradients of a row sum to 0 but for rounding errors, and
    the gradient of q would have these errors times the component that all keys share. In other channels the difference
    would only be rounded once more. SageAttention subtracts the mean before it quantizes keys (Zhang et al. 2024,
    https://arxiv.org/abs/2410.02367).
    """
    variance, mean = torch.var_mean(k.detach().float(), -2, correction=0, keepdim=True)
    common = torch.where(mean.square() > variance, mean, 0.0)  # 0 where a key is not finite, too
    return k - common.to(k.dtype)


def _entropy_of_few(inputs: Inputs, factor: Tensor | None) -> Tensor:
    """Entropy in nats of softmax over each row of a call of few queries, (B, H, Q); 0 for rows that see nothing.

    It is log D - <q, attention(q, K, K)> * scale.
    """
    mean_key, log_denominator = _call(
        inputs, inputs.k_BGKD, factor, None, None, Lowered(KernelForm("softmax")), precise=True
    )
    mean = inputs.scale * one_pass_operators.row_dots(inputs.q_BHQD, mean_key)
    entropy = log_denominator * _LN2 - (mean if factor is None else mean * factor)
    return torch.where(inputs.n()[..., 0] > 0, entropy, 0.0).clamp(min=0)


def _range(inputs: Inputs, factor: Tensor | None, form: Lowered) -> tuple[Tensor, Tensor]:
    """The smallest and the largest logit of each row, (B, H, Q), 0 included."""
    mask = None if inputs.mask is None else inputs.mask.expand(inputs.weights_shape)
    low, high, *_ = one_pass_operators.extreme_logits(
        inputs.q_BHQD, inputs.k_BGKD, mask, factor, form.softcap, inputs.causal, form.window, inputs.scale
    )
    return low.clamp(max=0), high.clamp(min=0)


def _least(inputs: Inputs, factor: Tensor | None, form: Lowered, top: TopK) -> Tensor:
    """What a logit must exceed to be among the top k of its row, (B, H, Q)."""
    q, k = inputs.q_BHQD.detach(), inputs.k_BGKD.detach()
    if isinstance(top.k, int):
        count = torch.full((1, 1, 1), top.k, dtype=torch.int32, device=q.device)
    else:
        count = top.counts(inputs.n())[..., 0].to(torch.int32)
    mask = None if inputs.mask is None else inputs.mask.expand(inputs.weights_shape)
    fixed = None if factor is None else factor.detach()
    return one_pass_operators.least_of_top(  # type: ignore[no-any-return]
        q, k, mask, fixed, count.expand(q.shape[:3]), form.softcap, inputs.causal, form.window, inputs.scale
    )


def _row_numbers(inputs: Inputs, normalizer: Normalizer, form: KernelForm) -> tuple[Tensor | None, Tensor | None]:
    """The factor and the shift of each row, (B, H, Q) in float32, None where it is 1 or 0."""
    shape = inputs.q_BHQD.shape[:3]
    factor = row_factors(inputs, normalizer)
    if form.row_factor is not None:
        own = form.row_factor(inputs.n())
        factor = own if factor is None else factor * own
    shift = None if form.row_shift is None else form.row_shift(inputs.n())
    return _per_row(factor, shape), _per_row(shift, shape)


def _per_row(numbers: Tensor | None, shape: torch.Size) -> Tensor | None:
    return None if numbers is None else numbers.float()[..., 0].expand(shape)


def _call(
    inputs: Inputs, values: Tensor, factor: Tensor | None, shift: Tensor | None, sink: Tensor | None, form: Lowered,
    least: Tensor | None = None, *, precise: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output, and log2 of each row's denominator."""
    mask = None if inputs.mask is None else inputs.mask.expand(inputs.weights_shape)
    map_ = form.map
    parameters = None
    if form.rule != "none":
        heads, device, given = inputs.q_BHQD.shape[1], inputs.q_BHQD.device, form.parameter
        if isinstance(given, Tensor):
            parameters = head_numbers(given, inputs)
        else:
            parameters = torch.full((heads,), given, dtype=torch.float32, device=device)
    if inputs.queries < MIN_QUERIES:
        decoded: tuple[Tensor, Tensor] = one_pass_operators.decode(
            inputs.q_BHQD, inputs.k_BGKD, values, mask, factor, shift, sink, parameters, map_.map, map_.power,
            map_.floor, form.rule, form.softcap, inputs.causal, form.window, inputs.scale, precise,
        )  # fmt: skip
        return decoded
    output, reference, _ = one_pass_operators.forward(
        inputs.q_BHQD, inputs.k_BGKD, values, mask, factor, shift, sink, least, parameters, map_.map, map_.power,
        map_.floor, form.rule, form.softcap, inputs.causal, form.window, inputs.scale, precise,
    )  # fmt: skip
    return output, reference
