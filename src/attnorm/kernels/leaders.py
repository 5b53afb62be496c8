"""The leaders of each row, and their threshold: that of all keys or slightly below it.

Of each pair of columns in a tile, the five largest of the better logits over all tiles, and the largest of the others.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnorm.kernels.threshold_tiles import newton_step, rise


class Leaders(NamedTuple):
    """(rows, pairs) numbers each: products first, then how far they lie below the peak of their row."""

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
    """The larger of both, and the other, which competes for the next place."""
    return tl.maximum(leader, candidate), tl.minimum(leader, candidate)


@triton.jit
def add_tile(leaders, peak, left, right, size, gaps, at, COLUMNS: tl.constexpr):
    """Leaders and peaks with a tile of pairs added; notes how close the tile comes to the peaks."""
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
    """p, u, and whether there is a weight, of numbers below the peak."""
    x = rise(y, 1.0, 0.0, t, a, T.DEFORMED, True)
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
    """The threshold from a start t at or below it, and the number of weights, if COUNTED.

    Some keys alone have a lower threshold than all of them: first the best of each pair, then all leaders.
    sink: one more key of each row, if SINK.
    """
    count = tl.zeros_like(t)
    zeros = tl.zeros_like(leaders.one)
    for together in tl.static_range(2):
        steps = 0
        left = tolerance + 1
        while (left > tolerance) & (steps < T.MAX_STEPS):
            sum_p, sum_u, cells = _add(zeros, zeros, zeros, leaders.one, t, a, T, T.COUNTED)
            if together:
                for place in tl.static_range(1, 6):
                    sum_p, sum_u, cells = _add(sum_p, sum_u, cells, leaders[place], t, a, T, T.COUNTED)
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
    """What the leaders have left out is of the size of the last ones. Both keys of a pair rarely count."""
    zeros = tl.zeros_like(leaders.one)
    weight, _u, _n = _add(zeros, zeros, zeros, leaders.other, t, a, T, False)
    weight, _u, _n = _add(0.25 * weight, zeros, zeros, leaders.five, t, a, T, False)
    left_out = tl.where(settled, 0.0, tl.sum(weight, 1))
    if T.DEFORMED:  # below alpha = 1.4 many more weights follow; a Newton pass costs less than the last pass repeated
        left_out = tl.where(a < 0.4, 4.0 * left_out, left_out)
    return tl.max(left_out, 0)
