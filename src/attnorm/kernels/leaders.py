"""A few large logits of each row (the leaders), from which the threshold of the row is found without all keys.

A tile is split into pairs of columns. For each pair, over all tiles, we keep the five largest of the better logits and
the largest of the worse ones. The threshold of these keys alone is at or slightly below that of all keys.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnorm.kernels.threshold_tiles import above_threshold, newton_step


class Leaders(NamedTuple):
    """Six arrays (rows, pairs): products while they are collected, later logits relative to the peak of the row."""

    one: Any
    two: Any
    three: Any
    four: Any
    five: Any
    other: Any


@triton.jit
def no_leaders(ROWS: tl.constexpr, PAIRS: tl.constexpr):
    none = tl.full([ROWS, PAIRS], float("-inf"), tl.float32)
    return Leaders(none, none, none, none, none, none)


@triton.jit
def insert(leader, candidate):
    """Return the larger, which keeps this rank, and the smaller, which is compared with the next rank."""
    return tl.maximum(leader, candidate), tl.minimum(leader, candidate)


@triton.jit
def add_tile(leaders, peak, left, right, size, gaps, at, COLUMNS: tl.constexpr):
    """Update leaders and peaks with a tile of pairs; store in `gaps` how close the tile comes to the peaks."""
    better = tl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL)
    other = tl.maximum(leaders.other, tl.minimum(left, right))
    largest = tl.max(better, 1)
    peak = tl.maximum(peak, largest)
    gap = tl.where(largest == float("-inf"), float("-inf"), (largest - peak) * size)
    tl.store(gaps + at // COLUMNS, tl.max(gap, 0))
    loser = tl.minimum(leaders.one, better)
    one = tl.maximum(leaders.one, better, propagate_nan=tl.PropagateNan.ALL)
    two, loser = insert(leaders.two, loser)
    three, loser = insert(leaders.three, loser)
    four, loser = insert(leaders.four, loser)
    return Leaders(one, two, three, four, tl.maximum(leaders.five, loser), other), peak


@triton.jit
def _below(leader, size, peak):
    return tl.where(leader == float("-inf"), float("-inf"), leader * size[:, None]) - peak[:, None]


@triton.jit
def below_peak(leaders, size, peak):
    return Leaders(
        _below(leaders.one, size, peak),
        _below(leaders.two, size, peak),
        _below(leaders.three, size, peak),
        _below(leaders.four, size, peak),
        _below(leaders.five, size, peak),
        _below(leaders.other, size, peak),
    )


@triton.jit
def weight_of(y, t, a, T: tl.constexpr):
    """Return p, u, and 1.0 where there is a weight, for logits relative to the peak."""
    x = above_threshold(y, 1.0, 0.0, t, a, T.DEFORMED, True)
    p, u = T.WEIGHTS(x, a, T.FAST)
    return p, u, tl.where(x > 0, 1.0, 0.0)


@triton.jit
def _add(cell_p, cell_u, cells, y, t, a, T: tl.constexpr, COUNTED: tl.constexpr):
    p, u, some = weight_of(y, t[:, None], a[:, None], T)
    if COUNTED:
        cells += some
    return cell_p + p, cell_u + u, cells


@triton.jit
def threshold_of_leaders(leaders, sink, t, a, settled, tolerance, T: tl.constexpr, SINK: tl.constexpr):
    """Solve for the threshold of the leaders, from a start t at or below it; also return the weight count, if COUNTED.

    The best key of each pair comes first, then all leaders: a subset of keys has a lower threshold than all of them, so
    the first result is a valid start for the second. sink: one more key of each row, if SINK.
    """
    count = tl.zeros_like(t)
    zeros = tl.zeros_like(leaders.one)
    for together in tl.static_range(2):
        steps = 0
        left = tolerance + 1
        while (left > tolerance) & (steps < T.MAX_STEPS):
            sum_p, sum_u, cells = _add(zeros, zeros, zeros, leaders.one, t, a, T, T.COUNTED)
            if together:
                for rank in tl.static_range(1, 6):
                    sum_p, sum_u, cells = _add(sum_p, sum_u, cells, leaders[rank], t, a, T, T.COUNTED)
            if SINK:
                sink_p, sink_u, sinks = weight_of(sink, t, a, T)
            if T.COUNTED:
                count = tl.sum(cells, 1) + sinks if SINK else tl.sum(cells, 1)
            P = tl.sum(sum_p, 1) + sink_p if SINK else tl.sum(sum_p, 1)
            U = tl.sum(sum_u, 1) + sink_u if SINK else tl.sum(sum_u, 1)
            t, left = newton_step(P, U, count, t, a, settled, steps < T.EARLY, T)
            steps += 1
    return t, count


@triton.jit
def weight_left_out(leaders, t, a, settled, T: tl.constexpr):
    """Estimate the weight of all keys that are not among the leaders.

    They are about as large as the fifth leader. The worse key of a pair rarely has a weight, so it counts a quarter.
    """
    zeros = tl.zeros_like(leaders.one)
    weight, _u, _n = _add(zeros, zeros, zeros, leaders.other, t, a, T, False)
    weight, _u, _n = _add(0.25 * weight, zeros, zeros, leaders.five, t, a, T, False)
    left_out = tl.where(settled, 0.0, tl.sum(weight, 1))
    if T.DEFORMED:  # below alpha = 1.4 many more weights follow; a Newton pass costs less than the last pass repeated
        left_out = tl.where(a < 0.4, 4.0 * left_out, left_out)
    return tl.max(left_out, 0)
