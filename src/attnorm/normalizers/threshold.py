"""Solve threshold maps: p_j = phi(y_j - t), phi increasing and 0 below a point, t such that the row sums to 1.

The method is Newton's, on a convex, decreasing function of t that is 0 at the solution. It starts from the left, where
the row sums to more than 1. Then every step stays on the left, so no bracket is needed.

Start: the keys are divided into groups, and the largest key of each group is its leader. The threshold of a subset of
keys lies left of the threshold of all keys, so the threshold of the leaders is a valid start (`_move_to_threshold`,
which treats many leaders in the same way). A group whose leader has weight 0 there has no weight at all. If few groups
are left, only their keys are read again (`_weigh_by_groups`).

Steps: most rows need two or three steps, some need many. Finished rows are skipped (`_newton_steps`). Each step is
subtracted from the row itself and not collected in t, so that keys near the threshold, which decide the result, keep
all their digits.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from attnorm.normalizers.block import is_exporting


class Newton(NamedTuple):
    """The excess of each row over its solution at the current threshold, (..., 1), and the slope of the excess."""

    excess: Tensor
    slope: Tensor


# Two functions define a map. Their arguments: rows (..., n), shifted so that the threshold is at 0; the parameter of
# each row (..., 1), or None; a buffer of the rows' size for intermediate results, or None (allocating one takes longer
# than a pass over it). `Evaluate` may clip the rows at 0. `Weights` may overwrite them, and its weights need not sum to
# 1.
Evaluate = Callable[[Tensor, Tensor | None, Tensor | None], Newton]
Weights = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]

GROUP, LARGE_GROUP = 8, 16  # keys per group
MANY_KEYS = 4096  # longer rows have large groups, which saves one level of leaders
MIN_GROUPS = 32
MIN_GROUPS_PER_ACTIVE = 3  # groups are gathered only if at most one in this many holds weight
# Compiled code and tensors without numbers (meta, fake) take a fixed number of steps. The worst rows (layers of keys,
# each about half as large again as the last, that drop out one per step) need 24 for 1e-6 at 10^5 keys; ordinary rows
# need 10.
FIXED_STEPS = 24
STEPS_AFTER_LEADERS = 12
MAX_STEPS = 100


def solve_threshold(y: Tensor, evaluate: Evaluate, weights: Weights, parameter: Tensor | None = None) -> Tensor:
    """Return the weights of the rows y (..., n), which are overwritten. At t = 0 each row must sum to at least 1."""
    if torch.compiler.is_compiling() or y.is_meta or is_fake(y):
        p = weights(_solve_in_fixed_steps(y, evaluate, parameter), parameter, None)
        return p / p.sum(-1, keepdim=True)
    rows = y.reshape(-1, y.shape[-1])
    if parameter is not None:
        parameter = parameter.expand(*y.shape[:-1], 1).reshape(-1, 1)
    if len(rows):
        _weigh_by_groups(rows, evaluate, weights, parameter)
    return rows.reshape(y.shape)


def _solve_in_fixed_steps(y: Tensor, evaluate: Evaluate, parameter: Tensor | None) -> Tensor:
    steps = FIXED_STEPS
    grouped = None if is_exporting() else _split_in_groups(y)[0]  # in an exported graph the length may vary
    if grouped is not None and grouped.shape[-1] >= MIN_GROUPS:
        leaders = first_leaders = grouped.amax(-2)
        for _ in range(FIXED_STEPS):
            leaders = leaders - newton_step(*evaluate(leaders, parameter, None))
        # The largest key shows how far the leaders moved; others may have been clipped at 0.
        y = y - (first_leaders.amax(-1, keepdim=True) - leaders.amax(-1, keepdim=True))
        steps = STEPS_AFTER_LEADERS
    for _ in range(steps):
        y = y - newton_step(*evaluate(y, parameter, None))
    return y


def _weigh_by_groups(y: Tensor, evaluate: Evaluate, weights: Weights, parameter: Tensor | None) -> None:
    """Turn the rows y (rows, n) into their weights, in place, reading only the groups that can hold weight."""
    grouped, rest = _split_in_groups(y)
    size, groups = grouped.shape[-2:]
    if groups < MIN_GROUPS:
        _weigh_all_keys(y, evaluate, weights, parameter)
        return
    leaders = grouped.amax(-2)
    start = _move_to_threshold(leaders, evaluate, parameter, _coarse_tolerance(y))
    leader_weights = weights(leaders, parameter, None)
    active = max(1, int((leader_weights > 0).sum(-1).max()))  # most groups of a row that can hold weight
    if MIN_GROUPS_PER_ACTIVE * active > groups:
        _weigh_all_keys(y.sub_(start), evaluate, weights, parameter)
        return
    active_groups = leader_weights.topk(active, sorted=False).indices[:, None].expand(-1, size, -1)
    part = torch.cat([grouped.gather(-1, active_groups).flatten(1), rest], -1).sub_(start)
    _weigh_all_keys(part, evaluate, weights, parameter)
    y.copy_(0 * part.sum(-1, keepdim=True))  # 0, but NaN for a row with a NaN
    picked, others = part.split([size * active, rest.shape[-1]], -1)
    grouped.scatter_(-1, active_groups, picked.unflatten(-1, (size, active)))
    rest.copy_(others)


def _weigh_all_keys(y: Tensor, evaluate: Evaluate, weights: Weights, parameter: Tensor | None) -> None:
    """Turn the rows y (rows, n) into their weights, in place, by Newton steps over all keys."""
    buffer = torch.empty_like(y)
    _newton_steps(y, evaluate, parameter, 4 * torch.finfo(y.dtype).eps, buffer)
    p = weights(y, parameter, buffer)
    torch.div(p, p.sum(-1, keepdim=True), out=y)


def _move_to_threshold(y: Tensor, evaluate: Evaluate, parameter: Tensor | None, tolerance: float) -> Tensor:
    """Shift the rows y (rows, n) in place so that their thresholds are at 0; return the shifts (rows, 1)."""
    buffer = torch.empty_like(y)
    grouped, _ = _split_in_groups(y)
    if grouped.shape[-1] < MIN_GROUPS:
        return _newton_steps(y, evaluate, parameter, tolerance, buffer)
    start = _move_to_threshold(grouped.amax(-2), evaluate, parameter, _coarse_tolerance(y))
    y.sub_(start)
    return _newton_steps(y, evaluate, parameter, tolerance, buffer).add_(start)


def _newton_steps(y: Tensor, evaluate: Evaluate, parameter: Tensor | None, tolerance: float, buffer: Tensor) -> Tensor:
    """Shift the rows y (rows, n) in place by Newton steps until their excess is small; return the shifts (rows, 1).

    A row is finished when its excess is small. A small step would not prove that the next one is smaller. A finished
    row also takes the step of its last evaluation. Otherwise the final division would remove the rest of the excess,
    and it changes weights in proportion to themselves instead of their slopes, which costs two digits.
    """
    moved = y.new_zeros(len(y), 1)
    rows = torch.arange(len(y), device=y.device)
    unfinished = torch.ones(len(y), 1, dtype=torch.bool, device=y.device)
    part = y
    for _ in range(MAX_STEPS):
        excess, slope = evaluate(part, parameter, buffer[: len(part)])
        # No step for a finished row: its result must not depend on how long other rows take.
        step = torch.where(unfinished, newton_step(excess, slope), 0.0)
        part.sub_(step)
        moved.index_add_(0, rows, step)
        unfinished = unfinished & (excess > tolerance)
        left = int(unfinished.sum())
        if 2 * left < len(part):
            if part is not y:
                y.index_copy_(0, rows, part)
            if left == 0:
                return moved
            unfinished_rows = unfinished.squeeze(-1).nonzero().squeeze(-1)
            rows, part, unfinished = (t.index_select(0, unfinished_rows) for t in (rows, part, unfinished))
            parameter = None if parameter is None else parameter.index_select(0, unfinished_rows)
    if part is not y:
        y.index_copy_(0, rows, part)
    return moved


def newton_step(excess: Tensor, slope: Tensor) -> Tensor:
    """Return Newton's step; 0 for rows that sum to 1 or less, whose slope may be 0."""
    return torch.where(excess > 0, excess / slope, 0.0)


def _split_in_groups(y: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of the rows y (..., n): groups of keys (..., size, groups), and the last keys that fill no group."""
    size = GROUP if y.shape[-1] <= MANY_KEYS else LARGE_GROUP
    groups = y.shape[-1] // size
    return y[..., : size * groups].unflatten(-1, (size, groups)), y[..., size * groups :]


def _coarse_tolerance(y: Tensor) -> float:
    """Return the tolerance for a start: half the digits of the dtype."""
    return float(torch.finfo(y.dtype).eps ** 0.5)
