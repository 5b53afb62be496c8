"""The engine on torch's FlexAttention, on CUDA, forward and backward.

FlexAttention computes softmax of a modified score, and its logsumexp. Other maps follow from both: a weight w(z) that
is not divided by a sum is softmax(log w(z)) times exp(logsumexp). A weight F(z) / G, with G another sum over the row,
is softmax(log F(z)) times exp(logsumexp_F - logsumexp_G). On a CPU the same functions run forward only, uncompiled and
slowly, for tests.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, flex_attention

from attnorm.engines.inputs import HALF, Inputs, row_factors, under_transform
from attnorm.normalizers.contract import Map, Normalizer, ScaleRule
from attnorm.normalizers.kernel import Kernel
from attnorm.normalizers.relu import Relu
from attnorm.normalizers.sa_softmax import SelfAdjusted
from attnorm.normalizers.scale_invariant import DistanceRule
from attnorm.normalizers.sigmoid import Sigmoid
from attnorm.normalizers.softmax import Softmax
from attnorm.normalizers.softpick import Softpick

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

MIN_WIDTH = 16  # of q, k and v, in FlexAttention's kernels


def applies(inputs: Inputs, normalizer: Normalizer) -> bool:
    """Whether FlexAttention computes this call exactly."""
    if normalizer.selections or normalizer.sink is not None or inputs.queries == 0:
        return False
    if not inputs.plain_logits or inputs.dropout > 0 or under_transform():
        return False
    if inputs.q_BHQD.is_cuda and inputs.q_BHQD.dtype == torch.float64:
        return False  # torch 2.11 does not compile its template for it
    if min(inputs.q_BHQD.shape[-1], inputs.v_BGKE.shape[-1]) < MIN_WIDTH:
        return False
    rules, map_ = normalizer.rules, normalizer.map
    if inputs.q_BHQD.dtype in HALF and _factors_need_grad(inputs, normalizer):
        return False
    if torch.is_grad_enabled() and any(p.requires_grad for p in map_.parameters()):
        return False
    if type(map_) is Softmax and rules and isinstance(rules[-1], DistanceRule):
        return inputs.positions is None and all(isinstance(rule, ScaleRule) for rule in rules[:-1])
    if not all(isinstance(rule, ScaleRule) for rule in rules):
        return False
    if type(map_) not in FORMS or (isinstance(map_, Kernel) and map_.function.log is None):
        return False
    return not isinstance(map_, SelfAdjusted) or map_.normalised


def _factors_need_grad(inputs: Inputs, normalizer: Normalizer) -> bool:
    """Whether a scale rule needs a gradient: a number inside a FlexAttention score does not get it reliably."""
    rules = [rule for rule in normalizer.rules if isinstance(rule, ScaleRule)]
    states = inputs.hidden_states
    learns = any(p.requires_grad for rule in rules for p in rule.parameters())
    return torch.is_grad_enabled() and len(rules) > 0 and (learns or (states is not None and states.requires_grad))


def flex(inputs: Inputs, normalizer: Normalizer) -> Tensor:
    """Return the output (B, H, Q, E) of a normalizer for which `applies` is true."""
    q, n, factor = inputs.q_BHQD, inputs.n(), row_factors(inputs, normalizer)
    if factor is not None and q.dtype not in HALF:
        q, factor = q * factor, None
    call = _FlexCall(inputs, q, n, factor)
    map_ = normalizer.map
    if isinstance(map_, Softmax):
        rule = normalizer.rules[-1]
        assert isinstance(rule, DistanceRule)
        return call.attend(_distance_score(rule, inputs.offset))[0].to(q.dtype)
    output = FORMS[type(map_)](call, map_)
    return torch.where(n > 0, output, 0.0).to(q.dtype)


class _FlexCall:
    """One attention call, and flex attention over it with any score.

    factor (B, H, Q, 1): multiplies the logits of each row in float32. Multiplied into q it would be rounded once more.
    """

    def __init__(self, inputs: Inputs, q: Tensor, n: Tensor, factor: Tensor | None) -> None:
        self.inputs, self.q, self.n, self.factor = inputs, q, n, factor
        self.mask = _block_mask(inputs)

    def attend(self, score: ScoreMod | None, values: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """softmax(score) @ values in float32, and the logsumexp (B, H, Q, 1) of the score."""
        run = _compiled_flex_attention() if self.q.is_cuda else flex_attention
        # FlexAttention's kernel for few queries cannot compile some group sizes; the general one takes them all.
        options = {"FORCE_USE_FLEX_ATTENTION": True} if self.q.is_cuda and self.inputs.queries < 128 else None
        # Beyond the recompile limit torch silently runs the unfused form. Each map and mask compiles to a kernel of its
        # own, and a number in a score function must stay a constant of its kernel.
        with torch._dynamo.config.patch(recompile_limit=1024, accumulated_recompile_limit=1024, specialize_float=True):
            output, aux = run(
                self.q,
                self.inputs.k_BGKD,
                self.inputs.v_BGKE if values is None else values,
                score_mod=self._with_factor(score),
                block_mask=self.mask,
                scale=self.inputs.scale,
                enable_gqa=self.inputs.groups > 1,
                return_aux=AuxRequest(lse=True),
                kernel_options=options,
            )
        return output.float() if output.dtype != torch.float64 else output, aux.lse[..., None]

    def _with_factor(self, score: ScoreMod | None) -> ScoreMod | None:
        if self.factor is None:
            return score
        per_row = self.row_values(self.factor)

        def factored(z: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            z = z * per_row[b, h, i]
            return z if score is None else score(z, b, h, i, j)

        return factored

    def row_values(self, rows: Tensor) -> Tensor:
        """Return one number per row, (B, H, Q), for use inside a score."""
        shape = (*self.q.shape[:2], self.inputs.queries)
        return rows[..., 0].expand(shape).contiguous()


@functools.cache
def _compiled_flex_attention() -> Any:
    return torch.compile(flex_attention)


def _block_mask(inputs: Inputs) -> BlockMask | None:
    if inputs.mask is None and (not inputs.causal or inputs.queries == 1):
        return None
    offset, mask = inputs.offset, inputs.mask
    if mask is None:
        return _causal_block_mask(inputs.queries, inputs.keys, inputs.q_BHQD.device)
    batches, heads, rows, keys = mask.shape

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        is_visible = mask[b if batches > 1 else 0, h if heads > 1 else 0, i if rows > 1 else 0, j if keys > 1 else 0]
        return is_visible & (j <= i + offset) if inputs.causal else is_visible

    return create_block_mask(
        visible,
        B=batches if batches > 1 else None,
        H=heads if heads > 1 else None,
        Q_LEN=inputs.queries,
        KV_LEN=inputs.keys,
        device=inputs.q_BHQD.device,
    )


@functools.lru_cache(maxsize=8)
def _causal_block_mask(queries: int, keys: int, device: torch.device) -> BlockMask:
    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return j <= i + (keys - queries)

    return create_block_mask(visible, B=None, H=None, Q_LEN=queries, KV_LEN=keys, device=device)


def _distance_score(rule: DistanceRule, offset: int) -> ScoreMod:
    def score(z: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        slope, shift = rule.coefficients((i + offset - j).to(z.dtype))
        return slope * z + shift

    return score


def _kernel(call: _FlexCall, map_: Kernel) -> Tensor:
    log = map_.function.log
    assert log is not None
    return call.attend(lambda z, b, h, i, j: log(z))[0]


def _sigmoid(call: _FlexCall, map_: Sigmoid) -> Tensor:
    per_row = call.row_values(map_.bias_of(call.n.expand(*call.q.shape[:3], 1)))

    def score(z: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.nn.functional.logsigmoid(z + per_row[b, h, i])

    output, log_sum = call.attend(score)
    return output * torch.exp(log_sum)


def _relu(call: _FlexCall, map_: Relu) -> Tensor:
    def score(z: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(z > 0, map_.power * torch.log(torch.where(z > 0, z, 1.0)), -torch.inf)

    output, log_sum = call.attend(score)
    return _multiply_by_sum(output, log_sum) / call.n.clamp(min=1)


def _softpick(call: _FlexCall, map_: Softpick) -> Tensor:
    def log_distance_from_one(z: Tensor) -> Tensor:
        """log |e^z - 1|."""
        return z.clamp(min=0) + torch.log(-torch.expm1(-z.abs().clamp(min=1e-30)))

    def above(z: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(z > 0, log_distance_from_one(z), -torch.inf)

    def either(z: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return log_distance_from_one(z)

    output, log_sum = call.attend(above)
    _, log_total = call.attend(either, call.inputs.v_BGKE[..., :MIN_WIDTH])
    eps = torch.full_like(log_total, map_.eps).log()
    return _multiply_by_sum(output, log_sum - torch.logaddexp(log_total, eps))


def _self_adjusted(call: _FlexCall, map_: SelfAdjusted) -> Tensor:
    low, high = (_logits_at(call, index) for index in _extreme_keys(call))
    low, high = low.clamp(max=0), high.clamp(min=0)
    # sum p (z - low) v is linear in low: compute it for a constant safely below, where the logarithm is smooth, and
    # correct for the difference, which also carries the gradient of the row's minimum.
    width = high - low
    below = (low - 0.25 * width - 1e-3).detach()
    per_row = call.row_values(below)

    def score(z: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return z + torch.log((z - per_row[b, h, i]).clamp(min=1e-6))

    plain, log_sum = call.attend(None)
    adjusted, log_adjusted = call.attend(score)
    log_ratio = torch.where(call.n > 0, log_adjusted - log_sum, -torch.inf)  # -inf less -inf in rows that see nothing
    total = _multiply_by_sum(adjusted, log_ratio) + (below - low) * plain
    return total / torch.where(width > 0, width, 1.0)


def _extreme_keys(call: _FlexCall, block_elements: int = 2**24) -> tuple[Tensor, Tensor]:
    """Return the visible keys with the smallest and the largest logit of each row, (B, H, Q) each, block by block."""
    inputs = call.inputs
    q, k = call.q.detach().float(), inputs.k_BGKD.detach().float()
    k = k.repeat_interleave(inputs.groups, dim=1)
    rows = max(1, block_elements // max(1, q.shape[0] * q.shape[1] * inputs.keys))
    lowest, highest = [], []
    for start, stop in inputs.steps(rows):
        z = (q[..., start:stop, :] * inputs.scale) @ k.transpose(-1, -2)
        if call.factor is not None:
            z = z * call.factor[..., start:stop, :]
        mask = inputs.visible(start, stop, inputs.keys)
        hidden = torch.zeros_like(z, dtype=torch.bool) if mask is None else ~mask
        lowest.append(z.masked_fill(hidden, torch.inf).argmin(-1))
        highest.append(z.masked_fill(hidden, -torch.inf).argmax(-1))
    return torch.cat(lowest, -1), torch.cat(highest, -1)


def _logits_at(call: _FlexCall, index: Tensor) -> Tensor:
    """Return the logit of each query with the key at its index, (B, H, Q, 1), with gradients."""
    inputs = call.inputs
    k = inputs.k_BGKD.repeat_interleave(inputs.groups, dim=1) if inputs.groups > 1 else inputs.k_BGKD
    selected_keys = k.gather(2, index[..., None].expand(*index.shape, k.shape[-1]))
    logit = (call.q.float() * selected_keys.float()).sum(-1, keepdim=True) * inputs.scale
    return logit if call.factor is None else logit * call.factor


def _multiply_by_sum(output: Tensor, log_sum: Tensor) -> Tensor:
    """Return output * exp(log_sum); 0 for rows without a key, whose log_sum is -inf."""
    empty = torch.isneginf(log_sum)
    return torch.where(empty, 0.0, output) * torch.exp(torch.where(empty, 0.0, log_sum))


FORMS: dict[type[Map], Callable[[_FlexCall, Any], Tensor]] = {
    Kernel: _kernel,
    Sigmoid: _sigmoid,
    Relu: _relu,
    Softpick: _softpick,
    SelfAdjusted: _self_adjusted,
}  # a subclass may compute something else
