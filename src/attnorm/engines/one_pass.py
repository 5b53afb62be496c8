"""The engine on the one-pass Triton kernels: maps whose weights need at most one sum per row, such as softmax or relu.

`lower` translates a normalizer to what the kernels know: a map and a rule by name (kernels/maps.py), and a factor and a
shift per row, which stay in float32. engines/one_pass_operators.py calls the kernels. With fewer than 16 queries, as in
decoding, the keys are split over programs (kernels/one_pass.py), forward only.

Some normalizers need a number of each row first, from another kernel:

    adaptive temperature  the entropy; its beta becomes a factor                        engines/one_pass_operators.py
    norm_softmax          mean and variance; 1 / deviation becomes a factor, through    engines/one_pass_operators.py
                          which the gradient reaches q and k
    sa_softmax            the extreme logits; the smallest becomes the shift of the     kernels/extremes.py
                          row, and the output is divided by the range
    top-k                 a number between the k-th logit and the next one (cutoff);    kernels/extremes.py
                          then softmax over the keys above it
"""

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from attnorm.engines import one_pass_operators
from attnorm.engines.execution import MIN_QUERIES, is_wide_float32, runs_kernels
from attnorm.engines.inputs import Inputs, head_numbers, needs_gradient, row_factors, under_transform
from attnorm.kernels.launch import holds
from attnorm.normalizers.adaptive_temperature import EntropyRule
from attnorm.normalizers.asentmax import AdaptiveLengthScale
from attnorm.normalizers.contract import KernelForm, LogitRule, Normalizer, ScaleRule, Sink
from attnorm.normalizers.norm_softmax import UnitVariance
from attnorm.normalizers.softcap import Softcap
from attnorm.normalizers.topk import TopK

POWERS = (1, 2, 3, 4)  # exponents of relu and of the polynomial kernel that the kernels have
MIN_KEYS = 256  # in decoding; fewer keys are not worth splitting
MAX_ROWS = 128  # in decoding: queries of all heads that share one key head
WIDE_FLOAT32_ROWS = 16  # the same for wide heads in float32: 32 spill 1.3 KB of registers, 128 exceed the shared memory
MANY_ROWS_MEMORY = 172_032  # bytes of shared memory for 128 rows of width 128 in float32; every GPU holds 16 KB of rows
SEARCHED = (EntropyRule, UnitVariance, TopK)  # need a number of the row first


class LoweredNormalizer(NamedTuple):
    """A normalizer in the terms of the kernels."""

    map: KernelForm
    rule: str = "none"
    parameter: float | Tensor = 0.0  # of the rule: one number, or one per head
    window: int | None = None
    softcap: float | None = None  # of the model, or of the first rule
    top: TopK | None = None  # applied after the window
    scales: tuple[ScaleRule, ...] = ()  # factors of rows
    sink: Sink | None = None


def applies(inputs: Inputs, normalizer: Normalizer) -> bool:
    """Whether the kernels compute this call exactly."""
    return lower_for_call(inputs, normalizer) is not None


def lower_for_call(inputs: Inputs, normalizer: Normalizer) -> LoweredNormalizer | None:
    """Return the normalizer in the terms of the kernels if they compute this call exactly, else None."""
    if inputs.bias is not None or inputs.dropout > 0 or inputs.queries == 0:
        return None
    map_ = normalizer.map.kernel_form()
    if map_ is None or (inputs.queries < MIN_QUERIES and (map_.ranged or not _can_decode(inputs, normalizer))):
        return None
    form = lower(normalizer, inputs, map_)
    return form if form and runs_kernels(inputs.q_BHQD, inputs.v_BGKE) and not under_transform() else None


def _can_decode(inputs: Inputs, normalizer: Normalizer) -> bool:
    """Whether a call with few queries can split its keys over programs: no gradients, and no search kernel first."""
    for part in (*normalizer.rules, *normalizer.selections):
        if isinstance(part, SEARCHED):
            return False
    return inputs.keys >= MIN_KEYS and fits_decoding(inputs) and not needs_gradient(inputs, normalizer)


def fits_decoding(inputs: Inputs) -> bool:
    """Whether a tile holds the queries of all heads that share one key head."""
    q, rows = inputs.q_BHQD, inputs.groups * inputs.queries
    if rows <= WIDE_FLOAT32_ROWS:
        return True
    if rows > MAX_ROWS or is_wide_float32(q, inputs.v_BGKE):
        return False
    row_bytes = max(q.shape[-1], inputs.v_BGKE.shape[-1]) * q.element_size()
    most = MAX_ROWS if row_bytes <= 128 else MAX_ROWS // 2 if row_bytes <= 256 else MAX_ROWS // 4
    return rows <= most or holds(q.device, MANY_ROWS_MEMORY)


def lower(normalizer: Normalizer, inputs: Inputs, map_: KernelForm | None = None) -> LoweredNormalizer | None:
    """Translate a normalizer to the terms of the kernels; None if they do not have it.

    map_: the form of its map (default: the one in the one-pass kernels).
    """
    map_, sink, selections = map_ or normalizer.map.kernel_form(), normalizer.sink, normalizer.selections
    if map_ is None or map_.power not in POWERS or (sink is not None and map_.map != "softmax"):
        return None
    if (map_.counts_keys and selections) or (inputs.q_BHQD.dtype == torch.float16 and not map_.float16):
        return None
    cap, rules = _split_leading_softcap(inputs, normalizer.rules)
    rule = _lower_rules(rules, inputs, map_, capped=cap is not None, sunk=sink is not None) if rules else NO_RULE
    if rule is None:
        return None
    window: int | None = None
    top: TopK | None = None
    for selection in selections:
        if isinstance(selection, TopK):
            is_last = selection is selections[-1]
            k_is_known = isinstance(selection.k, int) or window is None  # inside a window, n is not known here
            if not is_last or map_.map != "softmax" or rule[0] != "none" or not k_is_known:
                return None
            top = selection
            continue
        if selection.kernel_window is None or not inputs.causal or inputs.positions is not None:
            return None
        window = min(selection.kernel_window, window or selection.kernel_window)
    scales = tuple([rule for rule in rules if isinstance(rule, ScaleRule)])
    return LoweredNormalizer(map_, *rule, window, cap, top, scales, sink)


NO_RULE: tuple[str, float | Tensor] = ("none", 0.0)


def _split_leading_softcap(inputs: Inputs, rules: list[LogitRule]) -> tuple[float | None, list[LogitRule]]:
    """Return the cap of the model or of a first softcap rule, and the other rules.

    The kernels apply one softcap, before all rules.
    """
    if rules and isinstance(rules[0], Softcap) and inputs.softcap is None:
        return rules[0].cap, rules[1:]
    return inputs.softcap, rules


def _lower_rules(
    rules: list[LogitRule], inputs: Inputs, map_: KernelForm, *, capped: bool, sunk: bool
) -> tuple[str, float | Tensor] | None:
    """Return name and parameter of the rule that the kernels apply; None if they cannot apply all of these."""
    last = rules[-1]
    if not all(isinstance(rule, ScaleRule) for rule in rules[:-1]):
        return None
    if map_.ranged and not isinstance(last, ScaleRule):
        return None
    if (named := last.kernel_rule()) is not None:
        # The kernels apply the rule after the factor and the shift of a row, but those of a map belong after its rules.
        takes = inputs.positions is None and map_.row_factor is None and map_.row_shift is None
        return named if takes else None
    if isinstance(last, EntropyRule | UnitVariance):
        return NO_RULE if map_.map == "softmax" and not sunk and not capped else None
    return NO_RULE if isinstance(last, ScaleRule) else None


def one_pass(inputs: Inputs, normalizer: Normalizer, form: LoweredNormalizer | None = None) -> Tensor:
    """Return the output (B, H, Q, E) of a normalizer for which `applies` is true. form: from `lower_for_call`."""
    form = form or lower(normalizer, inputs)
    assert form is not None
    if inputs.queries < MIN_QUERIES:
        return _decode(inputs, normalizer, form)
    factor, shift = row_factor_and_shift(inputs, normalizer, form.map)
    if normalizer.rules and isinstance(normalizer.rules[-1], EntropyRule):
        return _attend_with_entropy_rule(inputs, normalizer.rules[-1], factor, form)
    if normalizer.rules and isinstance(normalizer.rules[-1], UnitVariance):
        return _attend_with_unit_variance(inputs, normalizer.rules[-1], factor, form)
    sink = sink_logits(inputs, normalizer.sink)
    if form.map.ranged:
        low, high = _logit_range(inputs, factor, form)
        width = high - low
        output = _launch(inputs, factor, -low, sink, form, precise=True)
        return output / torch.where(width > 0, width, 1.0)[..., None]
    return _launch(inputs, factor, shift, sink, form, _top_k_cutoff(inputs, factor, form))


def sink_logits(inputs: Inputs, sink: Sink | None) -> Tensor | None:
    """Return the logits of the sink, (H,) in float32; None without a sink."""
    return None if sink is None else head_numbers(sink.logit, inputs, "the sink has logits")


def rule_parameters(inputs: Inputs, form: LoweredNormalizer) -> Tensor | None:
    """Return the parameters of the rule, (H,) in float32; None without a rule."""
    if form.rule == "none":
        return None
    if isinstance(form.parameter, Tensor):
        return head_numbers(form.parameter, inputs)
    heads, device = inputs.q_BHQD.shape[1], inputs.q_BHQD.device
    return torch.full((heads,), form.parameter, dtype=torch.float32, device=device)


def _attend_with_entropy_rule(
    inputs: Inputs, rule: EntropyRule, factor: Tensor | None, form: LoweredNormalizer
) -> Tensor:
    """Return the output of adaptive temperature: softmax with the factor beta(entropy) per row.

    The entropy is that of softmax over all visible keys, before any selection.
    """
    soft_factor = None if factor is None else factor.detach()
    entropy, reference = one_pass_operators.row_entropy(
        inputs.q_BHQD.detach(), inputs.k_BGKD.detach(), inputs.full_mask, soft_factor, inputs.causal, inputs.scale
    )
    beta = rule.beta(entropy)
    sharpened_factor = beta if factor is None else factor * beta
    cutoff = _top_k_cutoff(inputs, sharpened_factor, form)
    if not (inputs.needs_grad or sharpened_factor.requires_grad):
        return _launch(inputs, sharpened_factor, None, None, form, cutoff)
    slope = rule.slope(entropy) if soft_factor is None else rule.slope(entropy) * soft_factor
    output: Tensor = one_pass_operators.sharpened_attention(
        inputs.q_BHQD, inputs.k_BGKD, inputs.v_BGKE, inputs.full_mask, sharpened_factor, cutoff, factor, entropy,
        reference, slope, inputs.causal, form.window, inputs.scale,
    )[0]  # fmt: skip
    return output


def _attend_with_unit_variance(
    inputs: Inputs, rule: UnitVariance, factor: Tensor | None, form: LoweredNormalizer
) -> Tensor:
    """Return the output of norm_softmax: softmax of logits divided by the deviation of each row, before any selection.

    Subtracting the mean as well changes no weight, but keeps digits: the gradient of the factor is then a sum over
    distances from the mean.
    """
    inputs = replace(inputs, k_BGKD=_subtract_common_key(inputs.k_BGKD))
    variance, mean, count = one_pass_operators.row_variance(
        inputs.q_BHQD, inputs.k_BGKD, inputs.full_mask, inputs.causal, inputs.scale
    )
    if factor is None:
        sharpened_factor = rule.factor(variance)
    else:
        sharpened_factor = factor * rule.factor(factor * factor * variance)
    # A single key has no gradient; a factor of 1e6 would only amplify rounding errors.
    sharpened_factor = torch.where(count > 1, sharpened_factor, 0.0)
    if form.top is not None:
        cutoff = _top_k_cutoff(inputs, sharpened_factor, form)
        return _launch(inputs, sharpened_factor, None, None, form, cutoff)
    return _launch(inputs, sharpened_factor, -sharpened_factor * mean, None, form)


def _subtract_common_key(k: Tensor) -> Tensor:
    """Return the keys minus their mean, in channels where the mean exceeds the deviation.

    This adds the same number to all logits of a row. The logit gradients of a row sum to 0 except for rounding errors.
    The gradient of q contains these errors times the component that all keys share, so we remove that component. In
    other channels the subtraction would only round once more. SageAttention does the same before it quantizes keys
    (Zhang et al. 2024, https://arxiv.org/abs/2410.02367).
    """
    variance, mean = torch.var_mean(k.detach().float(), -2, correction=0, keepdim=True)
    common = torch.where(mean.square() > variance, mean, 0.0)  # 0 where a key is not finite, too
    return k - common.to(k.dtype)


def _logit_range(inputs: Inputs, factor: Tensor | None, form: LoweredNormalizer) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest logit of each row, (B, H, Q); the range always includes 0."""
    low, high, *_ = one_pass_operators.extreme_logits(
        inputs.q_BHQD, inputs.k_BGKD, inputs.full_mask, factor, form.softcap, inputs.causal, form.window, inputs.scale
    )
    return low.clamp(max=0), high.clamp(min=0)


def _top_k_cutoff(inputs: Inputs, factor: Tensor | None, form: LoweredNormalizer) -> Tensor | None:
    """Return the number that a logit must exceed to be among the top k of its row, (B, H, Q); None: all keys count."""
    if (top := form.top) is None:
        return None
    q, k = inputs.q_BHQD.detach(), inputs.k_BGKD.detach()
    if isinstance(top.k, int):
        count = torch.full(q.shape[:3], top.k, dtype=torch.int32, device=q.device)
    else:
        count = top.counts(inputs.n())[..., 0].to(torch.int32).expand(q.shape[:3])
    fixed = None if factor is None else factor.detach()
    return one_pass_operators.top_k_cutoff(  # type: ignore[no-any-return]
        q, k, inputs.full_mask, fixed, count, top.most(inputs.keys), form.softcap, inputs.causal, form.window,
        inputs.scale,
    )  # fmt: skip


def row_factor_and_shift(
    inputs: Inputs, normalizer: Normalizer, form: KernelForm
) -> tuple[Tensor | None, Tensor | None]:
    """Return the factor and the shift of each row, (B, H, Q) in float32; None for a factor of 1 and a shift of 0."""
    shape = inputs.q_BHQD.shape[:3]
    factor = row_factors(inputs, normalizer)
    if form.row_factor is not None:
        map_factor = form.row_factor(inputs.n())
        factor = map_factor if factor is None else factor * map_factor
    shift = None if form.row_shift is None else form.row_shift(inputs.n().expand(*shape, 1))
    return per_row(factor, shape), per_row(shift, shape)


def per_row(numbers: Tensor | None, shape: torch.Size) -> Tensor | None:
    """Expand numbers that broadcast to (B, H, Q, 1) to all rows, (B, H, Q) in float32."""
    return None if numbers is None else numbers.float().expand(*shape, 1)[..., 0]


def _launch(
    inputs: Inputs, factor: Tensor | None, shift: Tensor | None, sink: Tensor | None, form: LoweredNormalizer,
    cutoff: Tensor | None = None, *, precise: bool = False,
) -> Tensor:  # fmt: skip
    map_ = form.map
    output: Tensor = one_pass_operators.forward(
        inputs.q_BHQD, inputs.k_BGKD, inputs.v_BGKE, inputs.full_mask, factor, shift, sink, cutoff,
        rule_parameters(inputs, form), map_.map, map_.power, map_.floor, form.rule, form.softcap, inputs.causal,
        form.window, inputs.scale, precise,
    )[0]  # fmt: skip
    return output


def _decode(inputs: Inputs, normalizer: Normalizer, form: LoweredNormalizer) -> Tensor:
    map_, n = form.map, common_length(inputs)
    known = None if n is None else common_factor(inputs, form, n)
    shift = common_shift = None
    if n is None or known is None or not (map_.takes_numbers or map_.row_factor is map_.row_shift is None):
        tensor, shift = row_factor_and_shift(inputs, normalizer, map_)
        factor, scale = CommonFactor(tensor=tensor), inputs.scale
    else:
        factor, scale = known, inputs.scale * known.number
        if map_.row_factor is not None:
            scale *= map_.row_factor(float(n))
        if map_.row_shift is not None:
            common_shift = float(map_.row_shift(float(n)))
    output: Tensor = one_pass_operators.decode(
        inputs.q_BHQD, inputs.k_BGKD, inputs.v_BGKE, inputs.full_mask, factor.tensor, factor.exponent, shift,
        common_shift, sink_numbers(inputs, form), *rule_numbers(inputs, form), map_.map, map_.power, map_.floor,
        form.rule, form.softcap, inputs.causal, form.window, scale, factor.log2_base, factor.delta,
    )  # fmt: skip
    return output


def common_length(inputs: Inputs) -> int | None:
    """Return the number of visible keys if all rows have the same; None if a mask or the compiler hides it."""
    if inputs.mask is not None or (inputs.causal and inputs.queries > 1) or torch.compiler.is_compiling():
        return None
    return inputs.keys


class CommonFactor(NamedTuple):
    """The factor of all rows: the number times the tensor, or with an exponent times a power (blocks.load_factor)."""

    number: float = 1.0
    tensor: Tensor | None = None
    exponent: Tensor | None = None
    log2_base: float = 0.0
    delta: float = 0.0


ONE = CommonFactor()


def common_factor(inputs: Inputs, form: LoweredNormalizer, n: int) -> CommonFactor | None:
    """Return the factor of all rows, from tensors of one element or one per head; None if that is not possible.

    Decoding pays for every operation of torch, so that the number moves into the scale and the kernel reads the
    tensors as they are.
    """
    product = ONE
    for rule in form.scales:
        known = None if form.softcap is not None or inputs.positions is not None else _known_factor(rule, n)
        if known is None:
            return None
        tensors = [tensor for tensor in (known.tensor, known.exponent) if tensor is not None]
        if tensors and (product.tensor is not None or not all(_has_number_of_heads(inputs, t) for t in tensors)):
            return None
        product = (known if tensors else product)._replace(number=product.number * known.number)
    return product


def _known_factor(rule: ScaleRule, n: int) -> CommonFactor | None:
    if isinstance(rule, AdaptiveLengthScale):
        if rule.from_hidden is not None:
            return None
        return CommonFactor(1.0, rule.raw_beta, rule.raw_gamma, math.log2(math.log(n + 1)), float(rule.delta))
    known = rule.common_factor(n)
    return None if known is None else CommonFactor(*known)


def _has_number_of_heads(inputs: Inputs, numbers: Tensor) -> bool:
    """Whether a kernel can read these numbers: one, or one per head."""
    q = inputs.q_BHQD
    return numbers.device == q.device and (
        numbers.dim() == 0 or (numbers.dim() == 1 and numbers.shape[0] == q.shape[1] and numbers.stride(0) == 1)
    )


def sink_numbers(inputs: Inputs, form: LoweredNormalizer) -> Tensor | None:
    """Return the logits of the sink as the kernels of decoding take them: as they are, if possible."""
    if form.sink is not None and _has_number_of_heads(inputs, form.sink.logit):
        return form.sink.logit
    return sink_logits(inputs, form.sink)


def rule_numbers(inputs: Inputs, form: LoweredNormalizer) -> tuple[Tensor | None, float | None]:
    """The same for the parameters of the rule: a tensor or a number."""
    if form.rule == "none":
        return None, None
    if not isinstance(form.parameter, Tensor):
        return None, float(form.parameter)
    as_it_is = _has_number_of_heads(inputs, form.parameter)
    return form.parameter if as_it_is else head_numbers(form.parameter, inputs), None
