"""Threshold maps: p_j = phi(y_j - t) with phi increasing and 0 below a point, and t such that the row sums to 1.

t is found by Newton steps on a convex, decreasing function of t that is 0 at the solution. Started from the left,
where the row sums to more than 1, every step stays on the left, so the iteration needs no bracket. The solution for a
subset of the keys lies left of that for all, so we start from the largest key of every eight, and they from theirs.
Most rows then need two or three steps and a few need many: rows that are done are left behind. Each step is taken from
the row itself, not added up in t: keys near the threshold, which decide the result, keep all their digits.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Newton(NamedTuple):
    """How far rows are from done at their present thresholds, (..., 1), and the slope of that."""

    excess: Tensor
    slope: Tensor


# Both from rows (..., n), which they may clip at 0, and, where the map has one, the parameter of each row (..., 1).
Evaluate = Callable[[Tensor, Tensor | None], Newton]
Weights = Callable[[Tensor, Tensor | None], Tensor]

GROUP = 8
LEAST_GROUPS = 32
# Compiled code takes a fixed number of steps. Rows built against Newton (layers of keys, each about half as large
# again as the last, that drop out one per step) need 24 for 1e-6 at 10^5 keys; ordinary rows need 10.
FIXED_STEPS = 24
STEPS_AFTER_LEADERS = 12
MOST_STEPS = 100


def solve_threshold(y: Tensor, evaluate: Evaluate, weights: Weights, parameter: Tensor | None = None) -> Tensor:
    """The weights at the threshold. y (..., n), which is overwritten, must sum to 1 or more under phi as it comes."""
    if torch.compiler.is_compiling():
        return weights(_solve_in_fixed_steps(y, evaluate, parameter), parameter)
    shape = y.shape
    y = y.reshape(-1, shape[-1])
    if parameter is not None:
        parameter = parameter.expand(*shape[:-1], 1).reshape(-1, 1)
    _solve(y, evaluate, parameter, 4 * torch.finfo(y.dtype).eps)
    return weights(y, parameter).reshape(shape)


def _solve_in_fixed_steps(y: Tensor, evaluate: Evaluate, parameter: Tensor | None) -> Tensor:
    steps = FIXED_STEPS
    groups = y.shape[-1] // GROUP
    if groups >= LEAST_GROUPS:
        leaders = first = y[..., : groups * GROUP].unflatten(-1, (GROUP, groups)).amax(-2)
        for _ in range(FIXED_STEPS):
            leaders = leaders - _step(*evaluate(leaders, parameter), 0.0)
        # How far they moved, read off the largest key of the row: others may have been clipped at 0.
        y = y - (first.amax(-1, keepdim=True) - leaders.amax(-1, keepdim=True))
        steps = STEPS_AFTER_LEADERS
    for _ in range(steps):
        y = y - _step(*evaluate(y, parameter), 0.0)
    return y


def _solve(y: Tensor, evaluate: Evaluate, parameter: Tensor | None, enough: float) -> Tensor:
    """Moves the rows y (rows, n) to their thresholds, in place; returns how far."""
    groups = y.shape[-1] // GROUP
    if groups < LEAST_GROUPS:
        return _newton(y, evaluate, parameter, enough)
    leaders = y[:, : groups * GROUP].unflatten(-1, (GROUP, groups)).amax(-2)
    start = _solve(leaders, evaluate, parameter, torch.finfo(y.dtype).eps ** 0.5)
    y.sub_(start)
    return _newton(y, evaluate, parameter, enough).add_(start)


def _newton(y: Tensor, evaluate: Evaluate, parameter: Tensor | None, enough: float) -> Tensor:
    """A row is done when its excess is small: a small step alone does not prove that the next would be smaller."""
    moved = y.new_zeros(len(y), 1)
    rows = torch.arange(len(y), device=y.device)
    part = y
    for _ in range(MOST_STEPS):
        excess, slope = evaluate(part, parameter)
        todo = excess.squeeze(-1) > enough
        left = int(todo.sum())
        if 2 * left < len(part) or left == 0:
            if part is not y:
                y.index_copy_(0, rows, part)
            if left == 0:
                return moved
            chosen = todo.nonzero().squeeze(-1)
            rows, part, excess, slope = (t.index_select(0, chosen) for t in (rows, part, excess, slope))
            parameter = None if parameter is None else parameter.index_select(0, chosen)
        step = _step(excess, slope, enough)
        part.sub_(step)
        moved.index_add_(0, rows, step)
    if part is not y:
        y.index_copy_(0, rows, part)
    return moved


def _step(excess: Tensor, slope: Tensor, enough: float) -> Tensor:
    """None for a row that is done: its result must not depend on how long other rows take, and its slope may be 0."""
    return torch.where(excess > enough, excess / slope, 0.0)
