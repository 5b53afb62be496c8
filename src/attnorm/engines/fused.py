"""The engine for softmax with rescaled logits: torch's scaled_dot_product_attention (SDPA).

- A scale rule multiplies q.
- A sink is one more key with a zero value. It comes before all other keys, so that causal calls still need no mask.
  q gets one more coordinate that holds the sink's logit; there the sink's key is 1 and all other keys are 0.
- Adaptive temperature takes two passes: the entropy of a row is logsumexp(z) - <q, attention(q, K, K)> * scale.

If a mask has to be built, queries are processed in steps, so that it never exists for all rows at once.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from attnorm.arithmetic import round_up
from attnorm.engines.execution import MIN_QUERIES, runs_kernels
from attnorm.engines.inputs import (
    FLOAT16_HEADROOM,
    HALF,
    Inputs,
    in_dtype,
    in_forward_mode,
    needs_gradient,
    row_factors,
    under_transform,
    with_rounded_queries,
)
from attnorm.normalizers.adaptive_temperature import EntropyRule
from attnorm.normalizers.block import is_exporting
from attnorm.normalizers.contract import Normalizer, ScaleRule, Sink
from attnorm.normalizers.softmax import Softmax
from attnorm.text import count_words

# A smaller scale, 0 or a negative one is multiplied into q beforehand. SDPA hides future keys by -inf before it scales,
# so it would compute -inf times 0 or times a negative number; and the logit of a sink is divided by the scale.
MIN_SCALE = 1e-3
MAX_WIDTH = 128  # of cuDNN's kernels


def applies(inputs: Inputs, normalizer: Normalizer) -> bool:
    """Whether this call can run on SDPA with the same result."""
    if type(normalizer.map) is not Softmax or normalizer.selections or not inputs.plain_logits:
        return False
    if in_forward_mode():
        return False
    rules = normalizer.rules
    others = [rule for rule in rules if not isinstance(rule, ScaleRule)]
    if not others:
        return True
    if len(others) > 1 or others[0] is not rules[-1] or not isinstance(others[0], EntropyRule):
        return False
    # The entropy of SDPA carries no gradient, and ONNX has no logsumexp of SDPA.
    return normalizer.sink is None and not needs_gradient(inputs, normalizer) and not is_exporting()


def is_worth_rounding(inputs: Inputs, normalizer: Normalizer) -> bool:
    """Whether SDPA is the better choice though it rounds the queries: without a mask, for factors such as s log n.

    For a call without a sink for which `applies` and `rounds_q` are true.
    cuDNN takes 0.6 to 0.8 of the time of our kernel, which keeps the factor in float32. With q rounded once, as in
    q * s * log(n) written by hand, the error is 0.3 to 0.9 of that of the formula in the same dtype, where every step
    rounds. In float16 the gradient of the scaled q could overflow, by the headroom of `with_rounded_queries`.
    """
    return (
        _suits_cudnn(inputs)
        and not (inputs.q_BHQD.dtype == torch.float16 and needs_gradient(inputs, normalizer))
        and all(isinstance(rule, ScaleRule) and rule.may_round_queries for rule in normalizer.rules)
    )


def _suits_cudnn(inputs: Inputs) -> bool:
    """Whether cuDNN's kernels take the shapes of a call, with the scale as it is, and no mask is needed."""
    q, v = inputs.q_BHQD, inputs.v_BGKE
    return (
        inputs.mask is None
        and inputs.dropout == 0
        and inputs.queries >= MIN_QUERIES
        and (not inputs.causal or inputs.queries == inputs.keys)
        and inputs.scale >= MIN_SCALE
        and q.shape[-1] == v.shape[-1] <= MAX_WIDTH
        and q.shape[-1] % 8 == 0
    )


def gradients_apply(inputs: Inputs, normalizer: Normalizer) -> bool:
    """Whether SDPA's kernels compute the gradients of this call: softmax of plain logits in half precision."""
    plain = not normalizer.rules and normalizer.sink is None and applies(inputs, normalizer)
    return plain and inputs.q_BHQD.dtype in HALF and _suits_cudnn(inputs)


def rounds_q(inputs: Inputs, normalizer: Normalizer) -> bool:
    """Whether `fused` multiplies q by a factor in half precision, which rounds q once more.

    A factor that is a power of two would be exact. We do not look: the factors are on the GPU, and reading them would
    synchronize.
    """
    return inputs.q_BHQD.is_cuda and inputs.q_BHQD.dtype in HALF and _has_factors(inputs, normalizer)


def _has_factors(inputs: Inputs, normalizer: Normalizer) -> bool:
    return len(normalizer.rules) > 0 or inputs.scale < MIN_SCALE  # torch 2.11 does not trace bool() of a list


def fused(inputs: Inputs, normalizer: Normalizer) -> Tensor:
    """Return the output (B, H, Q, E) of a normalizer for which `applies` is true.

    In half precision, multiplying q by a factor rounds q once more. On a CPU, where half precision saves no time, the
    call therefore runs in float32. On CUDA, q is rounded once for all factors (`is_worth_rounding`).
    """
    dtype, small = inputs.q_BHQD.dtype, inputs.scale < MIN_SCALE
    if dtype in HALF and not inputs.q_BHQD.is_cuda and _has_factors(inputs, normalizer):
        q, k, v = (t.float() for t in (inputs.q_BHQD, inputs.k_BGKD, inputs.v_BGKE))
        return fused(replace(inputs, q_BHQD=q, k_BGKD=k, v_BGKE=v), normalizer).to(dtype)
    rules = normalizer.rules
    if not rules and not small:
        return _sdpa(inputs, normalizer.sink)
    if all(isinstance(rule, ScaleRule) for rule in rules) and _scales_in_one_kernel(inputs.q_BHQD):
        return _sdpa(_with_scaled_queries(inputs, normalizer), normalizer.sink)
    n, positions = inputs.n(), inputs.query_positions()
    # One rounding for all factors, and the gradients of learned ones sum in float32.
    q = in_dtype(inputs.q_BHQD, n.dtype)
    if small:
        q, inputs = q * inputs.scale, replace(inputs, scale=1.0)
    for rule in rules:
        if isinstance(rule, ScaleRule):
            q = rule.scaled(q, n, positions, inputs.hidden_states)
    if rules and isinstance(rules[-1], EntropyRule):
        q = q * rules[-1].beta(_softmax_entropy(with_rounded_queries(q, inputs)))
    return _sdpa(with_rounded_queries(q, inputs), normalizer.sink)


def _scales_in_one_kernel(q: Tensor) -> bool:
    return q.dtype in HALF and runs_kernels(q) and not under_transform() and not is_exporting()


def _with_scaled_queries(inputs: Inputs, normalizer: Normalizer) -> Inputs:
    """Return the call with the factors in q, rounded once as in `with_rounded_queries`, in one kernel."""
    from attnorm.engines import one_pass_operators  # registers operators of torch.library

    q = inputs.q_BHQD
    constant, scale = (inputs.scale, 1.0) if inputs.scale < MIN_SCALE else (1.0, inputs.scale)
    if q.dtype == torch.float16:
        constant, scale = constant / FLOAT16_HEADROOM, scale * FLOAT16_HEADROOM
    factor, slope, keys, shortest = _factors_for_kernel(inputs, normalizer)
    q = one_pass_operators.scaled_rows(q, factor, constant * slope, keys, inputs.causal, shortest)
    return replace(inputs, q_BHQD=q, scale=scale)


def _factors_for_kernel(inputs: Inputs, normalizer: Normalizer) -> tuple[Tensor | None, float, int | None, int]:
    """Return factors (B, H, Q), a number that multiplies them, and keys and shortest of `scaled_rows`.

    Without mask and positions the kernel counts the visible keys itself, for rules that have a `log_length`.
    """
    q, rules = inputs.q_BHQD, normalizer.rules
    rule = rules[0] if inputs.mask is None and inputs.positions is None and len(rules) == 1 else None
    if isinstance(rule, ScaleRule) and (log_length := rule.log_length()) is not None:
        slope, shortest = log_length
        if not isinstance(slope, Tensor):
            return None, slope, inputs.keys, shortest
        if slope.device == q.device and (slope.dim() == 0 or slope.shape[0] == q.shape[1]):
            per_head = in_dtype(slope if slope.dim() == 0 else slope[:, None], torch.float32)
            return per_head.expand(q.shape[:3]), 1.0, inputs.keys, shortest
    factor = row_factors(inputs, normalizer)
    return None if factor is None else factor[..., 0], 1.0, None, 1


def _sdpa(inputs: Inputs, sink: Sink | None) -> Tensor:
    q, k, v, width = inputs.q_BHQD, inputs.k_BGKD, inputs.v_BGKE, inputs.v_BGKE.shape[-1]
    if sink is not None:
        q, k, v = _prepend_sink_key(inputs, q, k, v, sink)
    if sink is not None or q.shape[-1] != v.shape[-1]:  # SDPA's fast kernels need one width, on CUDA a multiple of 8
        widest = max(q.shape[-1], v.shape[-1])
        widest = round_up(widest, 8) if q.is_cuda else widest
        q, k, v = (pad(t, (0, widest - t.shape[-1])) for t in (q, k, v))
    extra = 0 if sink is None else 1
    grouped = inputs.groups > 1
    drop = inputs.dropout
    if inputs.mask is None and (not inputs.causal or inputs.queries == inputs.keys or inputs.queries == 1):
        if inputs.causal and inputs.queries > 1:
            if extra:  # one more query, for the sink's own row: the causal mask stays aligned
                q = pad(q, (0, 0, extra, 0))
            out = scaled_dot_product_attention(
                q, k, v, dropout_p=drop, is_causal=True, scale=inputs.scale, enable_gqa=grouped
            )
            return out[..., extra:, :width] if extra or out.shape[-1] != width else out
        out = scaled_dot_product_attention(q, k, v, dropout_p=drop, scale=inputs.scale, enable_gqa=grouped)
        return out if out.shape[-1] == width else out[..., :width]

    def step(start: int, stop: int, q_step: Tensor) -> Tensor:
        mask, reach = _step_mask(inputs, start, stop, extra)
        return scaled_dot_product_attention(
            q_step, k[..., : reach + extra, :], v[..., : reach + extra, :],
            attn_mask=mask, dropout_p=drop, scale=inputs.scale, enable_gqa=grouped,
        )  # fmt: skip

    return _run_in_steps(inputs, q, step)[..., :width]


def _prepend_sink_key(inputs: Inputs, q: Tensor, k: Tensor, v: Tensor, sink: Sink) -> tuple[Tensor, Tensor, Tensor]:
    logit = sink.logit if sink.logit.dim() == 0 else sink.logit[:, None, None]
    if sink.logit.dim() == 1 and sink.logit.shape[0] != q.shape[1]:
        raise ValueError(
            f"the sink has logits for {count_words(sink.logit.shape[0], 'head')}, but q has "
            f"{count_words(q.shape[1], 'head')}. Build it with heads={q.shape[1]}."
        )
    # Two coordinates hold the logit, so that half precision keeps its digits. It must be finite: other keys multiply
    # it by 0.
    largest = torch.finfo(q.dtype).max / 4
    exact = (in_dtype(logit, torch.promote_types(q.dtype, logit.dtype)) / inputs.scale).clamp(-largest, largest)
    rounded = exact.to(q.dtype)
    columns = [part.to(q.dtype).expand(*q.shape[:-1], 1) for part in (rounded, exact - rounded.to(exact.dtype))]
    sink_key = pad(torch.zeros_like(k[..., :1, :]), (0, 2), value=1.0)
    return torch.cat([q, *columns], -1), torch.cat([sink_key, pad(k, (0, 2))], -2), pad(v, (0, 2, 1, 0))


def _step_mask(inputs: Inputs, start: int, stop: int, extra: int) -> tuple[Tensor | None, int]:
    reach = inputs.reach(stop)
    mask = inputs.visible(start, stop, reach)
    if mask is not None:
        mask = pad(mask, (extra, 0), value=True) if extra else mask
        mask = mask.expand(*mask.shape[:-2], stop - start, mask.shape[-1])
    return mask, reach


def _run_in_steps(inputs: Inputs, q: Tensor, step: Callable[[int, int, Tensor], Tensor]) -> Tensor:
    spans = list(_query_spans(inputs))
    if len(spans) == 1:
        return step(*spans[0], q)
    outputs = []
    for start, stop in spans:
        q_step = q[..., start:stop, :]
        if torch.is_grad_enabled() and (inputs.needs_grad or q.requires_grad):
            # Checkpointing frees the mask of every step, which autograd would keep otherwise.
            has_dropout = inputs.dropout > 0
            outputs.append(checkpoint(step, start, stop, q_step, use_reentrant=False, preserve_rng_state=has_dropout))
        else:
            outputs.append(step(start, stop, q_step))
    return torch.cat(outputs, dim=-2)


def _query_spans(inputs: Inputs) -> Iterator[tuple[int, int]]:
    rows = inputs.mask_rows()
    if inputs.causal and inputs.mask is None and inputs.queries > 1:
        rows = min(rows, 1024)  # smaller steps skip more future keys
    return inputs.steps(rows)


def _softmax_entropy(inputs: Inputs) -> Tensor:
    """Return the entropy of softmax over each row in nats, (B, H, Q, 1); 0 for rows that see no key."""
    q = inputs.q_BHQD
    half = q.dtype in HALF
    flash = half and q.is_cuda and inputs.mask is None  # takes half precision only; its logsumexp is float32
    working = torch.float32 if half and not flash else q.dtype
    q, k = q.to(working), inputs.k_BGKD.to(working)
    k = k.repeat_interleave(inputs.groups, dim=1) if inputs.groups > 1 else k
    q, k = q.contiguous(), k.contiguous()  # the operators below take the last stride to be 1 and do not check
    if inputs.mask is None and (not inputs.causal or inputs.queries == inputs.keys):
        mean_key, log_sum = attention_and_logsumexp(q, k, k, None, inputs.causal, inputs.scale)
    else:
        pieces = []
        for start, stop in _query_spans(inputs):
            mask, reach = _step_mask(inputs, start, stop, 0)
            additive = None if mask is None else torch.zeros_like(mask, dtype=working).masked_fill_(~mask, -math.inf)
            keys = k[..., :reach, :]
            pieces.append(attention_and_logsumexp(q[..., start:stop, :], keys, keys, additive, False, inputs.scale))
        mean_key, log_sum = (torch.cat(parts, dim=2) for parts in zip(*pieces, strict=True))
    mean_logit = inputs.scale * (q.to(log_sum.dtype) * mean_key.to(log_sum.dtype)).sum(-1, keepdim=True)
    entropy = log_sum[..., None] - mean_logit
    return torch.where(torch.isfinite(entropy), entropy, 0.0).clamp(min=0)


def attention_and_logsumexp(
    q: Tensor, k: Tensor, v: Tensor, additive_mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return softmax attention and the logsumexp of each row, which only torch's internal operators return."""
    if q.device.type == "cpu":
        out, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=additive_mask, scale=scale
        )
        return out, log_sum
    if additive_mask is None and q.dtype in (torch.float16, torch.bfloat16):
        out, log_sum, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)
        return out, log_sum
    bias = None if additive_mask is None else _align_rows(additive_mask).expand(*q.shape[:-1], k.shape[-2])
    out, log_sum, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q, k, v, bias, True, 0.0, causal, scale=scale
    )
    return out, log_sum[..., : q.shape[-2]]


def _align_rows(mask: Tensor) -> Tensor:
    """Return the mask with a row stride that is a multiple of 16, as the kernel requires."""
    width = mask.shape[-1]
    return pad(mask, (0, -width % 16))[..., :width]
