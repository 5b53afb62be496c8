"""Threshold maps: p_j = phi(y_j - t) with phi increasing and 0 below a point, and t such that the row sums to 1.

t is found by Newton steps on a convex, decreasing function of t that is 0 at the solution. Started from the left,
where the row sums to more than 1, every step stays on the left, so the iteration needs no bracket. A valid start is
the solution for any subset of the keys; we take the largest key of each of a few groups, so that two or three passes
over the whole row remain. Each step is taken from the row itself, not added up in t: keys near the threshold, which
decide the result, are then the ones that keep all their digits.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Newton(NamedTuple):
    """A row at its present threshold: its weights, how far they are from done, and the slope of that."""

    weights: Tensor
    excess: Tensor
    slope: Tensor


Evaluate = Callable[[Tensor], Newton]

GROUPS = 32
# Compiled code takes a fixed number of steps. Rows built against Newton (layers of keys, each about half as large
# again as the last, that drop out one per step) need 24 for 1e-6 at 10^5 keys; ordinary rows need 10.
FIXED_STEPS = 24
MOST_STEPS = 100


def solve_threshold(y: Tensor, evaluate: Evaluate) -> Tensor:
    """The weights at the threshold. y (..., n), which is overwritten, must sum to 1 or more under phi as it comes."""
    if torch.compiler.is_compiling():
        for _ in range(FIXED_STEPS):
            y = y - _step(evaluate(y))
        return evaluate(y).weights
    leaders = _group_leaders(y)
    if leaders is not None:
        y.sub_(_solve_leaders(leaders, evaluate))
    enough = 4 * torch.finfo(y.dtype).eps
    for _ in range(MOST_STEPS):
        now = evaluate(y)
        if _done(now, enough):
            break
        y.sub_(_step(now))
    return now.weights


def _group_leaders(y: Tensor) -> Tensor | None:
    size = y.shape[-1] // GROUPS
    if size < 4:
        return None
    whole = size * GROUPS
    leaders = y[..., :whole].unflatten(-1, (size, GROUPS)).amax(-2)
    return torch.cat([leaders, y[..., whole:]], dim=-1)


def _solve_leaders(leaders: Tensor, evaluate: Evaluate) -> Tensor:
    """Their threshold, roughly: it is only a start for the whole row."""
    enough = torch.finfo(leaders.dtype).eps ** 0.5
    t = torch.zeros_like(leaders[..., :1])
    for _ in range(MOST_STEPS):
        now = evaluate(leaders - t)
        if _done(now, enough):
            break
        t = t + _step(now)
    return t


def _step(now: Newton) -> Tensor:
    return (now.excess / now.slope).clamp(min=0)


def _done(now: Newton, enough: float) -> bool:
    """The excess itself must be small: a small step alone does not prove that the next would be smaller."""
    return now.excess.numel() == 0 or bool(now.excess.max() <= enough)
