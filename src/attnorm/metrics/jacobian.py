"""The exact norm of d weights / d logits of a row, for every map whose Jacobian has a structure to exploit.

Threshold maps (softmax, entmax, kneemax): diagonal minus rank one. F/sum F: diagonal plus rank two. Maps of
each key by itself: diagonal. Scale rules whose factor does not depend on the logits multiply the norm; a selection
leaves the map of the keys it keeps. All others use power iteration, on a few rows only; the other rows get NaN.
The norm is that of the gradient that training sees: hard attention has softmax's.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from attnorm.metrics.normalized import RowsBlock
from attnorm.normalizers.block import Block
from attnorm.normalizers.contract import Map, Normalizer, ScaleRule, per_head
from attnorm.normalizers.entmax import Entmax
from attnorm.normalizers.hard import Hard
from attnorm.normalizers.kernel import Kernel
from attnorm.normalizers.kneemax import Kneemax
from attnorm.normalizers.relu import Relu
from attnorm.normalizers.sigmoid import Sigmoid
from attnorm.normalizers.softmax import Softmax
from attnorm.theory.linearization import power_iteration_norm
from attnorm.theory.rank_one_eigenvalues import rank_one_eigenvalue, rank_two_singular_value

KEY_BY_KEY = (Sigmoid, Relu)
THRESHOLD = (Softmax, Hard, Entmax, Kneemax)
POWER_ROWS = 8  # of each head, the last among them, where it takes power iteration


def has_closed_form(normalizer: Normalizer) -> bool:
    """Whether the norm is computed for every row; else by power iteration for a few."""
    map_ = type(normalizer.map)
    structured = map_ in THRESHOLD or map_ in KEY_BY_KEY or (map_ is Kernel and normalizer.sink is None)
    return structured and all(isinstance(rule, ScaleRule) for rule in normalizer.rules)


def jacobian_norm(normalizer: Normalizer, block: RowsBlock, weights: Tensor) -> Tensor | None:
    """The norm of each row, (..., h, r); None where this map has no closed form."""
    if not has_closed_form(normalizer):
        return None
    map_ = normalizer.map
    prepared = normalizer.prepare(block)
    if type(map_) in THRESHOLD:
        norm = _threshold(normalizer, prepared, weights)
    elif isinstance(map_, Kernel):
        norm = _kernel(map_, prepared, weights)
    else:
        norm = _key_by_key(map_, prepared)
    gain = _gain(normalizer, block)
    return norm if gain is None else norm * gain.squeeze(-1)


def sampled_norm(normalizer: Normalizer, block: RowsBlock) -> Tensor:
    """The norm by power iteration in float64, for rows (..., h, r) of any map; NaN where it has no gradient."""
    precise = replace(block, logits=block.logits.double())
    generator = torch.Generator(block.logits.device).manual_seed(0)

    def row_map(logits: Tensor) -> Tensor:
        return normalizer.weights(precise.with_logits(precise.hide(logits))).to(logits.dtype)

    try:
        return power_iteration_norm(row_map, precise.logits, mask=block.mask, generator=generator)
    except (ValueError, RuntimeError):
        return block.logits.new_full(block.logits.shape[:-1], math.nan)


def _gain(normalizer: Normalizer, block: RowsBlock) -> Tensor | None:
    gain = None
    for rule in normalizer.rules:
        assert isinstance(rule, ScaleRule)
        factor = rule.factor(block.n, None, block.hidden_states).abs()
        gain = factor if gain is None else gain * factor
    return gain


def _threshold(normalizer: Normalizer, prepared: Block, weights: Tensor) -> Tensor:
    """u = phi'(phi^-1(p)) of every key and of the sink, if there is one."""
    map_ = normalizer.map
    if isinstance(map_, Hard):
        weights = prepared.hide(torch.softmax(prepared.filled_low(), -1))
    slopes = _slopes(map_, weights, prepared)
    if normalizer.sink is None:
        return rank_one_eigenvalue(slopes)
    left = (1 - weights.sum(-1, keepdim=True)).clamp(min=0)
    return rank_one_eigenvalue(slopes, _slopes(map_, left, prepared))


def _slopes(map_: Map, weights: Tensor, prepared: Block) -> Tensor:
    if isinstance(map_, Kneemax):  # J = (diag(u) - u u^T / sum u) / 2
        return 0.5 * (weights / map_.knees(prepared.n)).clamp(max=1).sqrt()
    if isinstance(map_, Entmax):
        power = 2 - (map_.alpha if map_.theta is None else 1 + per_head(torch.sigmoid(map_.theta), weights))
        return torch.where(weights > 0, torch.where(weights > 0, weights, 1.0) ** power, 0.0)
    return weights


def _kernel(map_: Kernel, prepared: Block, weights: Tensor) -> Tensor:
    function = map_.function
    if function.log is None:
        total = prepared.hide(function.value(prepared.logits)).sum(-1, keepdim=True)
        slopes = function.derivative(prepared.logits) / torch.where(total > 0, total, 1.0)
    else:  # F'/sum F = (log F)' p, which does not overflow
        slopes = _slope_of_each(function.log, prepared.logits) * weights
    return rank_two_singular_value(weights, prepared.hide(slopes))


def _key_by_key(map_: Map, prepared: Block) -> Tensor:
    slopes = _slope_of_each(lambda logits: map_(prepared.with_logits(logits)), prepared.logits)
    return prepared.hide(slopes).abs().amax(-1)


def _slope_of_each(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """The derivative of a function of each number alone."""
    with torch.inference_mode(False), torch.enable_grad():
        point = at.clone().requires_grad_()
        (slopes,) = torch.autograd.grad(function(point).sum(), point)
    return slopes
