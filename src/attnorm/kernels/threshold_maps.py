"""The threshold maps of the Triton kernels: a few device functions and one row of the table MAPS for each.

A weight p(x) depends on how far a logit lies above the threshold t of its row, and t makes the row sum to 1. With s the
logit in the map's unit and y = s - (largest s of the row):

    x = [y - t]_+, or [1 + a (y - t)]_+ for a deformed map
    weights(x, a)              -> p and u: dp/dt = -decline * u, and the gradient of p by its logit is slope * u
    newton(P, U, C, a, early)  -> P - 1, and the step of t. P and U are the sums of p and u, C counts the weights
    start(a)                   -> a threshold at or below the solution

a is the parameter of each row: the knee of kneemax, alpha - 1 of entmax. FAST allows approximate instructions.

Below the table are the device functions that all threshold kernels share: logits above the threshold, lists of tiles
that hold a weight, and leaders. Leaders are a few large logits of each row, from which its threshold is found without
all keys. A tile is split into pairs of columns. For each pair, over all tiles, we keep the five largest of the better
logits and the largest of the worse ones. The threshold of these keys alone is at or slightly below that of all keys.
"""

from collections import namedtuple
from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnorm.kernels.blocks import seen_keys


@triton.jit
def positive(x):
    """max(x, 0), and NaN where x is NaN."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _minus_one(a):
    return a * 0.0 - 1.0


@triton.jit
def sparsemax_weights(x, a, FAST: tl.constexpr):
    return x, tl.where(x == 0, 0.0, 1.0)


@triton.jit
def convex_newton(P, U, C, a, early):
    """Newton's step for a sum that is convex in t: from the left, it never passes the solution."""
    return P - 1.0, (P - 1.0) / tl.where(U > 0, U, 1.0)


@triton.jit
def entmax15_weights(x, a, FAST: tl.constexpr):
    return x * x, x


@triton.jit
def entmax15_newton(P, U, C, a, early):
    """Solve P - 2 U e + C e^2 = 1 for the step e. It is exact if no key loses its weight.

    Otherwise it may pass the solution; the next step returns to the left of it. Late steps are Newton's for the norm of
    x, which never passes the solution.
    """
    excess = P - 1.0
    root = tl.sqrt(tl.maximum(U * U - C * excess, 0.0))
    size = tl.where(U > 0, U, 1.0)
    step = excess / (size + root)
    careful = (P - tl.sqrt(P)) / size
    return excess, tl.where((excess > 0) & (early == 0), careful, step)


@triton.jit
def kneemax_start(a):
    """Return the threshold at which the key at the peak alone has the weight 1."""
    return -tl.where(a <= 1.0, 1.0 + a, 2.0 * tl.sqrt(a))


@triton.jit
def kneemax_weights(x, a, FAST: tl.constexpr):
    w = tl.minimum(x, 2.0 * a, propagate_nan=tl.PropagateNan.ALL)
    u = w * (0.5 / a)
    return u * (x - 0.5 * w), u


@triton.jit
def entmax_start(a):
    return a * 0.0


@triton.jit
def _power(x, exponent, FAST: tl.constexpr):
    """x^exponent for x >= 0. FAST: three approximate GPU instructions, which flush numbers below 1e-38 to 0."""
    if FAST:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1; mul.ftz.f32 $0, $0, $2; ex2.approx.ftz.f32 $0, $0;",
            "=&f,f,f", [x, exponent], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.exp2(tl.log2(x) * exponent)


@triton.jit
def entmax_weights(x, a, FAST: tl.constexpr):
    """x^(1/a) and x^(1/a - 1)."""
    u = _power(x, (1.0 - a) / a, FAST)
    return u * x, u


@triton.jit
def entmax_newton(P, U, C, a, early):
    """Newton's step for (P^a - 1) / a, a norm of the x: convex and nearly linear."""
    shrunk = tl.exp2(-a * tl.log2(tl.where(P > 0, P, 1.0)))
    return P - 1.0, P * (1.0 - shrunk) / (a * tl.where(U > 0, U, 1.0))


class ThresholdMap(NamedTuple):
    """Device functions and constants of a map; the module docstring defines them."""

    weights: Any
    newton: Any
    start: Any
    unit: float = 1.0  # factor from logits to s
    decline: float = 1.0
    slope: float = 1.0
    deformed: bool = False
    counted: bool = False  # whether newton reads C
    parameter: bool = False  # whether a is read


MAPS: dict[str, ThresholdMap] = {
    "sparsemax": ThresholdMap(sparsemax_weights, convex_newton, _minus_one),
    "entmax15": ThresholdMap(entmax15_weights, entmax15_newton, _minus_one, unit=0.5, decline=2.0, counted=True),
    "entmax": ThresholdMap(entmax_weights, entmax_newton, entmax_start, deformed=True, parameter=True),
    "kneemax": ThresholdMap(kneemax_weights, convex_newton, kneemax_start, unit=0.5, slope=0.5, parameter=True),
}

CHUNK = tl.constexpr(128)

# Compile-time constants of a threshold map. EXACT: see `above_threshold`.
ThresholdConstants = namedtuple(
    "ThresholdConstants",
    "WEIGHTS DEFORMED FAST EXACT NEWTON COUNTED MAX_STEPS EARLY",
    defaults=(None, None, None, None),
)


@triton.jit
def line(factor, peak, t, a, DEFORMED: tl.constexpr):
    """Return slope and shift: x of a product is slope * product - shift. peak: None if t includes it."""
    t = t if peak is None else peak + t
    if DEFORMED:
        return factor * a, t * a - 1.0
    else:
        return factor, t


@triton.jit
def above_threshold(dot, factor, peak, t, a, DEFORMED: tl.constexpr, EXACT: tl.constexpr):
    """Return x of products, for factor, peak, t and a that broadcast to them.

    EXACT subtracts the peak before the threshold t: far from 0, float32 has too few digits for their sum. In bfloat16
    this error does not matter, and one fused instruction is enough.
    """
    if EXACT:
        y = dot * factor - peak - t
        if DEFORMED:
            y = 1.0 + y * a
        return positive(y)
    else:
        slope, shift = line(factor, peak, t, a, DEFORMED)
        return positive(dot * slope - shift)


@triton.jit
def seen_above_threshold(dot, i, j, factor, peak, t, a, sight, C: tl.constexpr, T: tl.constexpr, EDGE: tl.constexpr):
    """Return x of products, and 0 where query i does not see key j."""
    x = above_threshold(dot, factor, peak, t, a, T.DEFORMED, T.EXACT)
    if EDGE:
        x = tl.where(seen_keys(i, j, sight, C), x, 0.0)
    return x


@triton.jit
def newton_step(P, U, count, t, a, settled, early, T: tl.constexpr):
    """Return t after one Newton step, and the largest excess of the rows that the step changes.

    A step too small to change t is ignored: further steps would not help this row.
    """
    excess, step = T.NEWTON(P, U, count, a, early)
    step = tl.where(settled, 0.0, step)
    left = tl.max(tl.where(t + step != t, tl.abs(excess), 0.0), 0)
    return t + step, left


@triton.jit
def minus_penalty(dot, penalty, i, j, offset, PENALIZED: tl.constexpr):
    """Subtract the penalty times the distance of key j from query i from products."""
    if PENALIZED:
        dot = dot - penalty * tl.abs((i + offset - j).to(tl.float32))
    return dot


@triton.jit
def lowest_weight(floor, peak, empty, a, DEFORMED: tl.constexpr):
    """Return how far below the peaks of its rows the logits of a tile with a weight can lie."""
    floor = floor - 1.0 / a if DEFORMED else floor
    floor = floor - 1e-6 * (1.0 + tl.abs(peak))  # allowance for rounding errors
    return tl.min(tl.where(empty, float("inf"), tl.where(floor == floor, floor, float("-inf"))), 0)


@triton.jit
def list_tiles(
    flags, stride, total, other_stride, others, found, count, first, last, level,
    SPLIT: tl.constexpr, JOIN: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """Append the tiles between first and last that have a flag above `level` to the list `found`; return its length.

    Along the tiles there are `total` flags: one flag covers SPLIT tiles, or one tile covers JOIN flags. Across them a
    tile covers OTHERS flags, of which `others` exist.
    """
    length = tl.zeros([], tl.int32) + count
    for at in range(first, last, CHUNK):
        tiles = at + tl.arange(0, CHUNK)
        live = tl.zeros([CHUNK], tl.int32)
        for part in tl.static_range(JOIN):
            index = tiles * JOIN // SPLIT + part
            for across in tl.static_range(OTHERS):
                inside = (tiles < last) & (index < total) & (tiles * 0 + across < others)
                flag = tl.load(flags + index * stride + across * other_stride, mask=inside, other=level)
                live = live | tl.where(flag <= level, 0, 1)  # NaN is live
        tl.store(found + length + tl.cumsum(live, 0) - 1, tiles, mask=live != 0)
        length += tl.sum(live, 0)
    return length


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
def add_tile(leaders, peak, left, right, size, level, gaps, at, COLUMNS: tl.constexpr, SKIPS: tl.constexpr):
    """Update leaders and peaks with a tile of pairs; store in `gaps` how close the tile comes to the peaks.

    SKIPS: a tile whose logits stay below `level` in all rows holds no weight, so it is not compared with the leaders.
    """
    better = tl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL)
    largest = tl.max(better, 1)
    peak = tl.maximum(peak, largest)
    gap = tl.where(largest == float("-inf"), float("-inf"), (largest - peak) * size)
    closest = tl.max(gap, 0)
    tl.store(gaps + at // COLUMNS, closest)
    if SKIPS:
        if (closest <= level) == 0:  # NaN is compared
            leaders = _add_pairs(leaders, better, tl.minimum(left, right))
    else:
        leaders = _add_pairs(leaders, better, tl.minimum(left, right))
    return leaders, peak


@triton.jit
def _add_pairs(leaders, better, worse):
    loser = tl.minimum(leaders.one, better)
    one = tl.maximum(leaders.one, better, propagate_nan=tl.PropagateNan.ALL)
    two, loser = insert(leaders.two, loser)
    three, loser = insert(leaders.three, loser)
    four, loser = insert(leaders.four, loser)
    five = tl.maximum(leaders.five, loser)
    return Leaders(one, two, three, four, five, tl.maximum(leaders.other, worse))


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
    """Solve for the threshold of the leaders, from a start t at or below it.

    Also return the weight count, if COUNTED, and the sum of u before the last step.

    The best key of each pair comes first, then all leaders: a subset of keys has a lower threshold than all of them, so
    the first result is a valid start for the second. sink: one more key of each row, if SINK.
    """
    count = tl.zeros_like(t)
    zeros = tl.zeros_like(leaders.one)
    U = tl.zeros_like(t)
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
    return t, count, U


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
