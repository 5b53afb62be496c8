"""Threshold maps: p_j = phi(y_j - t) with phi increasing and 0 below a point, and t such that the row sums to 1.

t is found by Newton steps on a convex, decreasing function of t that is 0 at the solution. Started from the left,
where the row sums to more than 1, every step stays on the left, so the iteration needs no bracket. The solution for a
subset of the keys lies left of that for all, so we start from the largest key of every group, and they from theirs.
What is 0 there stays 0: where few groups are left, only their keys are read again, the rest are zeros. Most rows
then need two or three steps and a few need many: finished rows are skipped. Each step is taken from the row
itself, not added up in t: keys near the threshold, which decide the result, keep all their digits.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from attnorm.normalizers.block import is_exporting


class Newton(NamedTuple):
    """How far rows are from done at their present thresholds, (..., 1), and the slope of that."""

    excess: Tensor
    slope: Tensor


# Both from rows (..., n) and, where the map has one, the parameter of each row (..., 1). The last argument is memory of
# the rows' size to work in (a fresh allocation costs more than a pass), or None. Evaluate may clip the rows at 0;
# Weights may overwrite them, and gives the weights up to a factor.
Evaluate = Callable[[Tensor, Tensor | None, Tensor | None], Newton]
Weights = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]

GROUP, LARGE_GROUP = 8, 16
MANY_KEYS = 4096  # beyond which groups are large: one level of leaders less
MIN_GROUPS = 32
FEW = 3  # groups are picked out where at most one in so many holds weight
# Compiled code takes a fixed number of steps. Rows built against Newton (layers of keys, each about half as large
# again as the last, that drop out one per step) need 24 for 1e-6 at 10^5 keys; ordinary rows need 10.
FIXED_STEPS = 24
STEPS_AFTER_LEADERS = 12
MAX_STEPS = 100


def solve_threshold(y: Tensor, evaluate: Evaluate, weights: Weights, parameter: Tensor | None = None) -> Tensor:
    """The weights at the threshold. y (..., n), which is overwritten, must sum to 1 or more under phi as it comes."""
    if torch.compiler.is_compiling():
        p = weights(_solve_in_fixed_steps(y, evaluate, parameter), parameter, None)
        return p / p.sum(-1, keepdim=True)
    rows = y.reshape(-1, y.shape[-1])
    if parameter is not None:
        parameter = parameter.expand(*y.shape[:-1], 1).reshape(-1, 1)
    if len(rows):
        _weigh(rows, evaluate, weights, parameter)
    return rows.reshape(y.shape)


def _solve_in_fixed_steps(y: Tensor, evaluate: Evaluate, parameter: Tensor | None) -> Tensor:
    steps = FIXED_STEPS
    grouped = None if is_exporting() else _in_groups(y)[0]  # an exported length may vary
    if grouped is not None and grouped.shape[-1] >= MIN_GROUPS:
        leaders = first = grouped.amax(-2)
        for _ in range(FIXED_STEPS):
            leaders = leaders - newton_step(*evaluate(leaders, parameter, None))
        # How far they moved, read off the largest key of the row: others may have been clipped at 0.
        y = y - (first.amax(-1, keepdim=True) - leaders.amax(-1, keepdim=True))
        steps = STEPS_AFTER_LEADERS
    for _ in range(steps):
        y = y - newton_step(*evaluate(y, parameter, None))
    return y


def _weigh(y: Tensor, evaluate: Evaluate, weights: Weights, parameter: Tensor | None) -> None:
    """Turn the rows y (rows, n) into their weights, in place."""
    grouped, rest = _in_groups(y)
    size, groups = grouped.shape[-2:]
    if groups < MIN_GROUPS:
        _weigh_all(y, evaluate, weights, parameter)
        return
    leaders = grouped.amax(-2)
    start = _solve(leaders, evaluate, parameter, _half_the_digits(y))
    led = weights(leaders, parameter, None)
    holding = max(1, int((led > 0).sum(-1).max()))
    if FEW * holding > groups:
        _weigh_all(y.sub_(start), evaluate, weights, parameter)
        return
    where = led.topk(holding, sorted=False).indices[:, None].expand(-1, size, -1)
    part = torch.cat([grouped.gather(-1, where).flatten(1), rest], -1).sub_(start)
    _weigh_all(part, evaluate, weights, parameter)
    y.copy_(0 * part.sum(-1, keepdim=True))  # 0, but NaN for a row with a NaN
    picked, others = part.split([size * holding, rest.shape[-1]], -1)
    grouped.scatter_(-1, where, picked.unflatten(-1, (size, holding)))
    rest.copy_(others)


def _weigh_all(y: Tensor, evaluate: Evaluate, weights: Weights, parameter: Tensor | None) -> None:
    """As `_weigh`, by Newton steps from where the rows are."""
    room = torch.empty_like(y)
    _newton(y, evaluate, parameter, 4 * torch.finfo(y.dtype).eps, room)
    p = weights(y, parameter, room)
    torch.div(p, p.sum(-1, keepdim=True), out=y)


def _solve(y: Tensor, evaluate: Evaluate, parameter: Tensor | None, enough: float) -> Tensor:
    """Move the rows y (rows, n) to their thresholds, in place; return how far."""
    room = torch.empty_like(y)
    grouped, _ = _in_groups(y)
    if grouped.shape[-1] < MIN_GROUPS:
        return _newton(y, evaluate, parameter, enough, room)
    start = _solve(grouped.amax(-2), evaluate, parameter, _half_the_digits(y))
    y.sub_(start)
    return _newton(y, evaluate, parameter, enough, room).add_(start)


def _newton(y: Tensor, evaluate: Evaluate, parameter: Tensor | None, enough: float, room: Tensor) -> Tensor:
    """A row is done when its excess is small: a small step alone does not prove that the next would be smaller.

    A row takes the step of its last evaluation too. Otherwise an excess of a few units in the last place is left for
    the final division, which moves weights in proportion to themselves and not to their slopes: two digits of a unit.
    """
    moved = y.new_zeros(len(y), 1)
    rows = torch.arange(len(y), device=y.device)
    unfinished = torch.ones(len(y), 1, dtype=torch.bool, device=y.device)
    part = y
    for _ in range(MAX_STEPS):
        excess, slope = evaluate(part, parameter, room[: len(part)])
        # None for a row that is done: its result must not depend on how long other rows take.
        step = torch.where(unfinished, newton_step(excess, slope), 0.0)
        part.sub_(step)
        moved.index_add_(0, rows, step)
        unfinished = unfinished & (excess > enough)
        left = int(unfinished.sum())
        if 2 * left < len(part):
            if part is not y:
                y.index_copy_(0, rows, part)
            if left == 0:
                return moved
            chosen = unfinished.squeeze(-1).nonzero().squeeze(-1)
            rows, part, unfinished = (t.index_select(0, chosen) for t in (rows, part, unfinished))
            parameter = None if parameter is None else parameter.index_select(0, chosen)
    if part is not y:
        y.index_copy_(0, rows, part)
    return moved


def newton_step(excess: Tensor, slope: Tensor) -> Tensor:
    """Newton's step; 0 where the row sums to 1 or less, where the slope may be 0."""
    return torch.where(excess > 0, excess / slope, 0.0)


def _in_groups(y: Tensor) -> tuple[Tensor, Tensor]:
    """Views of the rows y (..., n): (..., size, groups), and the few keys that fill no group."""
    size = GROUP if y.shape[-1] <= MANY_KEYS else LARGE_GROUP
    groups = y.shape[-1] // size
    return y[..., : size * groups].unflatten(-1, (size, groups)), y[..., size * groups :]


def _half_the_digits(y: Tensor) -> float:
    return float(torch.finfo(y.dtype).eps ** 0.5)
