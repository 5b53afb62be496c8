"""Sums of every row of attention by a threshold map (kernels/threshold_maps.py), without values.

As in threshold.py, a first pass keeps leaders, whose threshold is that of all keys or slightly below it, and notes how
close each tile comes to the peaks of its rows. Passes of Newton's method follow where the leaders may have left out
much. The last pass sums weights; it and all but the first leave out tiles without a weight. weight_statistics.py turns
the sums into the statistics of a row.

Two keys of a row are set apart: the first visible one (the sink) and the largest of the others. Sums over the remaining
keys are in units of the weight of that largest one.

The norm of the Jacobian is that of diag(u) - u u^T / sum u. Its first estimate takes the three largest u and the
moments of the others; each pass over the keys squares its error. See theory/rank_one_eigenvalues.py.
"""

import triton
import triton.language as tl

from attnorm.kernels.maps import LN2, log2
from attnorm.kernels.row_tiles import (
    by_class,
    key_tile,
    larger,
    neighbours,
    rows_of_program,
    smaller,
    tiles_of_rows,
)
from attnorm.kernels.softmax_statistics import rational_step, root_of_moments
from attnorm.kernels.threshold_tiles import list_tiles, rise
from attnorm.kernels.tiles import load_row

# The columns of the result: those of map_sums.py and the threshold, relative to the largest logit in the map's unit.
MORE_COLUMNS = ("threshold",)
_ABOVE_POLE = tl.constexpr(1.0000003)  # a root this close to a pole is not told apart from it in float32


@triton.jit
def _insert(leader, candidate):
    """The larger of both, and the other, which competes for the next place."""
    return tl.maximum(leader, candidate), tl.minimum(leader, candidate)


@triton.jit
def _lead(
    n, first, sink, smallest, one, two, three, four, five, other, peak, start, tiles, jump, gaps,
    q_tile, k, rows, size, k_row, mask, mask_row, mask_column, queries, keys, offset, width, scale, cap,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, EDGE: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """Of each pair of columns the five largest of the better products over all tiles, and the largest of the others."""
    for tile in range(tiles):
        at = start + tile * KEYS + tl.where(tile > 0, jump, 0)
        s, seen, first, found_sink, count = key_tile(
            at, q_tile, k, rows, k_row, mask, mask_row, mask_column, queries, keys, offset, width, scale, cap,
            first, CAUSAL, MASKED, EDGE, CAPPED, PRECISION, KEYS, WIDTH, FULL,
        )  # fmt: skip
        if EDGE:
            n += count
            sink += found_sink
            low_even, low_odd = neighbours(tl.where(seen, s, float("inf")))
            even, odd = neighbours(tl.where(seen, s, float("-inf")))
            lows = smaller(low_even, low_odd)
        else:
            even, odd = neighbours(s)
            lows = smaller(even, odd)
        smallest = smaller(smallest, tl.min(by_class(lows, CLASSES), 1))
        better = larger(even, odd)
        other = tl.maximum(other, tl.minimum(even, odd))
        largest = tl.max(better, 1)
        peak = tl.maximum(peak, largest)
        gap = tl.where(largest == float("-inf"), float("-inf"), (largest - peak) * size)
        tl.store(gaps + at // KEYS, tl.max(gap, 0))
        loser = tl.minimum(one, better)
        one = larger(one, better)
        two, loser = _insert(two, loser)
        three, loser = _insert(three, loser)
        four, loser = _insert(four, loser)
        five = tl.maximum(five, loser)
    return n, first, sink, smallest, one, two, three, four, five, other, peak


@triton.jit
def _below_peak(leaders, size, peak):
    return tl.where(leaders == float("-inf"), float("-inf"), leaders * size[:, None]) - peak[:, None]


@triton.jit
def _add(cell_p, cell_u, cells, y, t, a, WEIGHTS: tl.constexpr, DEFORMED: tl.constexpr, FAST: tl.constexpr):
    x = rise(y, 1.0, 0.0, t[:, None], a[:, None], DEFORMED, True)
    p, u = WEIGHTS(x, a[:, None], FAST)
    return cell_p + p, cell_u + u, cells + tl.where(x > 0, 1.0, 0.0)


@triton.jit
def _top_three(one_a, two_a, three_a, one_b, two_b, three_b):
    """The three largest of two ordered triples."""
    three = tl.maximum(tl.minimum(one_a, two_b), tl.minimum(two_a, one_b))
    return (
        tl.maximum(one_a, one_b),
        tl.maximum(tl.minimum(one_a, one_b), tl.maximum(two_a, two_b)),
        tl.maximum(three, tl.maximum(three_a, three_b)),
    )


@triton.jit
def _at(y, t, a, WEIGHTS: tl.constexpr, DEFORMED: tl.constexpr, FAST: tl.constexpr):
    """p, u, and whether there is a weight, of one key of each row."""
    x = rise(y, 1.0, 0.0, t, a, DEFORMED, True)
    p, u = WEIGHTS(x, a, FAST)
    return p, u, tl.where(x > 0, 1.0, 0.0)


@triton.jit
def _class_sums(x, CLASSES: tl.constexpr):
    even, odd = neighbours(x)
    return tl.sum(by_class(even + odd, CLASSES), 1)


@triton.jit
def _measure(
    sum_p, sum_u, count, listed, number, first, q_tile, k, rows, size, peak, t, a, k_row, mask, mask_row, mask_column,
    queries, keys, offset, width, scale, cap,
    WEIGHTS: tl.constexpr, COUNTED: tl.constexpr, DEFORMED: tl.constexpr, FAST: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, EDGE: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """The sums of p and u, and the number of weights, of each class over the listed tiles, without the sink."""
    tile = tl.load(listed)
    for index in range(number):
        following = tl.load(listed + index + 1)
        s, seen, first, _sink, _count = key_tile(
            tile * KEYS, q_tile, k, rows, k_row, mask, mask_row, mask_column, queries, keys, offset, width, scale, cap,
            first, CAUSAL, MASKED, EDGE, CAPPED, PRECISION, KEYS, WIDTH, FULL,
        )  # fmt: skip
        x = rise(s, size[:, None], peak[:, None], t[:, None], a[:, None], DEFORMED, True)
        if EDGE:
            x = tl.where(seen, x, 0.0)
        p, u = WEIGHTS(x, a[:, None], FAST)
        sum_p += _class_sums(p, CLASSES)
        sum_u += _class_sums(u, CLASSES)
        if COUNTED:
            count += _class_sums(tl.where(x > 0, 1.0, 0.0), CLASSES)
        tile = following
    return sum_p, sum_u, count


@triton.jit
def _fold(
    others, tilt, squares, tops, m1, m2, m3, m4, listed, number, first, top, inverse, third_inverse,
    q_tile, k, rows, size, peak, t, a, k_row, mask, mask_row, mask_column,
    queries, keys, offset, width, scale, cap,
    WEIGHTS: tl.constexpr, DEFORMED: tl.constexpr, FAST: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, EDGE: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """Over the listed tiles: sums of the keys but the sink and those at the top, how many are at the top, and the
    moments of u in units of its third largest, with no u counted as more than that."""
    tile = tl.load(listed)
    for index in range(number):
        following = tl.load(listed + index + 1)
        s, seen, first, _sink, _count = key_tile(
            tile * KEYS, q_tile, k, rows, k_row, mask, mask_row, mask_column, queries, keys, offset, width, scale, cap,
            first, CAUSAL, MASKED, EDGE, CAPPED, PRECISION, KEYS, WIDTH, FULL,
        )  # fmt: skip
        x = rise(s, size[:, None], peak[:, None], t[:, None], a[:, None], DEFORMED, True)
        is_top = s == top[:, None]
        if EDGE:
            x = tl.where(seen, x, 0.0)
            is_top = is_top & seen
        p, u = WEIGHTS(x, a[:, None], FAST)
        e = tl.where(is_top, 0.0, p * inverse[:, None])
        others += _class_sums(e, CLASSES)
        tilt += _class_sums(e * log2(tl.where(e > 0, e, 1.0), FAST), CLASSES)
        squares += _class_sums(e * e, CLASSES)
        tops += _class_sums(is_top.to(tl.float32), CLASSES)
        v = tl.minimum(u * third_inverse[:, None], 1.0)
        square = v * v
        m1 += _class_sums(v, CLASSES)
        m2 += _class_sums(square, CLASSES)
        m3 += _class_sums(square * v, CLASSES)
        m4 += _class_sums(square * square, CLASSES)
        tile = following
    return others, tilt, squares, tops, m1, m2, m3, m4


@triton.jit
def _poles(
    poles, squares, listed, number, first, second, x_root, q_tile, k, rows, size, peak, t, a, k_row, mask, mask_row,
    mask_column, queries, keys, offset, width, scale, cap,
    WEIGHTS: tl.constexpr, DEFORMED: tl.constexpr, FAST: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, EDGE: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr, CLASSES: tl.constexpr,
):  # fmt: skip
    """sum u / (x - u) and sum (u / (x - u))^2 over the listed tiles, with no u counted as more than the second."""
    tile = tl.load(listed)
    for index in range(number):
        following = tl.load(listed + index + 1)
        s, seen, first, _sink, _count = key_tile(
            tile * KEYS, q_tile, k, rows, k_row, mask, mask_row, mask_column, queries, keys, offset, width, scale, cap,
            first, CAUSAL, MASKED, EDGE, CAPPED, PRECISION, KEYS, WIDTH, FULL,
        )  # fmt: skip
        x = rise(s, size[:, None], peak[:, None], t[:, None], a[:, None], DEFORMED, True)
        if EDGE:
            x = tl.where(seen, x, 0.0)
        _p, u = WEIGHTS(x, a[:, None], FAST)
        ratio = _pole(u, second[:, None], x_root[:, None])
        poles += _class_sums(ratio, CLASSES)
        squares += _class_sums(ratio * ratio, CLASSES)
        tile = following
    return poles, squares


@triton.jit
def _pole(u, second, x_root):
    u = tl.minimum(u, second)
    gap = x_root - u
    return tl.where(gap > 0, u / tl.where(gap > 0, gap, 1.0), 0.0)


@triton.jit
def _list(gaps, listed, whole, some, floor, row, DEFORMED: tl.constexpr, a, around):
    """List the tiles in which a row has a logit above its floor: how many of those seen whole, and of the others."""
    floor = floor - 1.0 / a if DEFORMED else floor
    floor = floor - 1e-6 * (1.0 + tl.abs(around))  # of rounding
    level = tl.min(tl.where(row, tl.where(floor == floor, floor, float("-inf")), float("inf")), 0)
    tl.debug_barrier()
    number = list_tiles(gaps, 1, some, 0, 1, listed, 0, 1, whole, level, 1, 1, 1)
    edges = list_tiles(gaps, 1, some, 0, 1, listed + whole - 1, 0, 0, tl.minimum(1, some), level, 1, 1, 1)
    edges = list_tiles(gaps, 1, some, 0, 1, listed + whole - 1, edges, whole, some, level, 1, 1, 1)
    tl.debug_barrier()
    return number, edges


@triton.jit
def threshold_sums(
    q, k, mask, factor, parameter, row_queries, out, gaps, listed,
    q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch, mask_head, mask_row, mask_column,
    heads, groups, rows_total, queries, keys, offset, width, scale, cap, start_program, total, natural, slope,
    enough, tolerance, doubt,
    WEIGHTS: tl.constexpr, NEWTON: tl.constexpr, START: tl.constexpr, COUNTED: tl.constexpr, DEFORMED: tl.constexpr,
    PARAMETER: tl.constexpr, FAST: tl.constexpr, PASSES: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, CAPPED: tl.constexpr, FACTORED: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
    MOST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """q: (B, H, R, D), the rows of the queries `row_queries` in ascending order; out: (columns, B, H, R).

    factor, parameter: (B, H, R). gaps, listed: room for a number per tile of each program that runs.
    start_program: those before it have run. natural: the map's unit in bits. PASSES: that refine the Jacobian norm.
    """
    CLASSES: tl.constexpr = 4
    k, mask, at, inside, rows, q_tile, unit, logit, batch_head, block = rows_of_program(
        start_program + tl.program_id(0), q, k, mask, factor, row_queries, q_batch, q_head, q_row, k_batch, k_head,
        mask_batch, mask_head, heads, groups, rows_total, queries, width, scale, CAPPED, FACTORED, ROWS, WIDTH, FULL,
    )  # fmt: skip
    outer_tiles, inner_tiles, high = tiles_of_rows(
        row_queries, block, rows_total, keys, offset, CAUSAL, MASKED, ROWS, KEYS
    )
    own = tl.program_id(0).to(tl.int64) * tl.cdiv(keys, KEYS)
    gaps += own
    listed += own
    row_at = batch_head * rows_total + at
    a = load_row(parameter, row_at, inside, PARAMETER, 0.5)
    size = unit * natural

    n = tl.zeros([ROWS], tl.int32)
    first = tl.zeros([ROWS], tl.int32) + keys
    sink = tl.zeros([ROWS], tl.float32)
    smallest = tl.full([ROWS, CLASSES], float("inf"), tl.float32)
    none = tl.full([ROWS, KEYS // 2], float("-inf"), tl.float32)
    one, two, three, four, five, other = none, none, none, none, none, none
    top = tl.full([ROWS], float("-inf"), tl.float32)
    for inner in tl.static_range(2):
        start, tiles, jump = 0, outer_tiles, high - KEYS
        if inner:
            start, tiles, jump = KEYS, inner_tiles, 0
        n, first, sink, smallest, one, two, three, four, five, other, top = _lead(
            n, first, sink, smallest, one, two, three, four, five, other, top, start, tiles, jump, gaps,
            q_tile, k, rows, size, k_row, mask, mask_row, mask_column, queries, keys, offset, width, scale, cap,
            CAUSAL, MASKED, not inner, CAPPED, PRECISION, KEYS, WIDTH, FULL, CLASSES,
        )  # fmt: skip
    whole = high // KEYS
    some = tl.where(outer_tiles > 0, whole + outer_tiles - 1, 0)

    # Logits in the map's unit, relative to the largest of the row.
    empty, has_sink = top == float("-inf"), first < keys
    broken = (tl.max(tl.where(one == one, 0, 1), 1) != 0) | (sink != sink)
    settled = (empty & (has_sink == 0)) | broken | (inside == 0)
    around = tl.where(empty, 0.0, top * size)
    peak = tl.where(has_sink, tl.where(empty, sink * size, tl.maximum(around, sink * size)), around)
    ahead = tl.where(empty, 0.0, peak - around)
    sink_y = tl.where(has_sink, sink * size - peak, float("-inf"))
    one, two, three = _below_peak(one, size, peak), _below_peak(two, size, peak), _below_peak(three, size, peak)
    four, five, other = _below_peak(four, size, peak), _below_peak(five, size, peak), _below_peak(other, size, peak)

    # Some keys alone have a lower threshold than all of them: first the best of each pair, then all leaders.
    t = START(a)
    zeros = tl.zeros([ROWS, KEYS // 2], tl.float32)
    for together in tl.static_range(2):
        steps = 0
        left = tolerance + 1
        while (left > tolerance) & (steps < MOST):
            lead_p, lead_u, leads = _add(zeros, zeros, zeros, one, t, a, WEIGHTS, DEFORMED, FAST)
            if together:
                lead_p, lead_u, leads = _add(lead_p, lead_u, leads, two, t, a, WEIGHTS, DEFORMED, FAST)
                lead_p, lead_u, leads = _add(lead_p, lead_u, leads, three, t, a, WEIGHTS, DEFORMED, FAST)
                lead_p, lead_u, leads = _add(lead_p, lead_u, leads, four, t, a, WEIGHTS, DEFORMED, FAST)
                lead_p, lead_u, leads = _add(lead_p, lead_u, leads, five, t, a, WEIGHTS, DEFORMED, FAST)
                lead_p, lead_u, leads = _add(lead_p, lead_u, leads, other, t, a, WEIGHTS, DEFORMED, FAST)
            sink_p, sink_u, sinks = _at(sink_y, t, a, WEIGHTS, DEFORMED, FAST)
            excess, step = NEWTON(
                tl.sum(lead_p, 1) + sink_p, tl.sum(lead_u, 1) + sink_u, tl.sum(leads, 1) + sinks, a, steps < EARLY
            )
            step = tl.where(settled, 0.0, step)
            left = tl.max(tl.where(t + step != t, tl.abs(excess), 0.0), 0)
            t += step
            steps += 1
    # What the leaders have left out is of the size of the last ones. Both keys of a pair rarely count.
    lead_p, _leads_u, _leads = _add(zeros, zeros, zeros, other, t, a, WEIGHTS, DEFORMED, FAST)
    lead_p, _leads_u, _leads = _add(0.25 * lead_p, zeros, zeros, five, t, a, WEIGHTS, DEFORMED, FAST)
    left_out = tl.where(settled, 0.0, tl.sum(lead_p, 1))
    if DEFORMED:  # below alpha = 1.4 many more weights follow
        left_out = tl.where(a < 0.4, 4.0 * left_out, left_out)
    doubtful = (tl.max(left_out, 0) > doubt) & (some > 1)
    t = tl.where(broken, float("nan"), t)

    # The largest of the other keys, and the three largest of all.
    one, candidate = _insert(one, other)
    two, candidate = _insert(two, candidate)
    top_y, two_y, three_y = tl.reduce((one, two, tl.maximum(three, candidate)), 1, _top_three)
    one_y, candidate_y = _insert(top_y, sink_y)
    two_y, candidate_y = _insert(two_y, candidate_y)
    three_y = tl.maximum(three_y, candidate_y)

    unused = tl.zeros([ROWS, CLASSES], tl.float32)
    others, tilt, squares, tops, m1, m2, m3, m4 = unused, unused, unused, unused, unused, unused, unused, unused
    sink_p = tl.zeros([ROWS], tl.float32)
    top_p, third, spare, row_others, total_p = sink_p, sink_p, sink_p, sink_p, sink_p
    number, edges = 0, 0
    bound = enough
    left = tl.where(doubtful, enough + 1, 0.0)
    attempts = 0
    while attempts < 2:
        steps = 0
        while (left > bound) & (steps < MOST):
            number, edges = _list(gaps, listed, whole, some, t + ahead, empty == 0, DEFORMED, a, around)
            sum_p, sum_u, sum_n = unused, unused, unused
            sum_p, sum_u, sum_n = _measure(
                sum_p, sum_u, sum_n, listed, number, first, q_tile, k, rows, size, peak, t, a, k_row, mask, mask_row,
                mask_column, queries, keys, offset, width, scale, cap, WEIGHTS, COUNTED, DEFORMED, FAST, CAUSAL, MASKED,
                False, CAPPED, PRECISION, KEYS, WIDTH, FULL, CLASSES,
            )  # fmt: skip
            sum_p, sum_u, sum_n = _measure(
                sum_p, sum_u, sum_n, listed + whole - 1, edges, first, q_tile, k, rows, size, peak, t, a, k_row, mask,
                mask_row, mask_column, queries, keys, offset, width, scale, cap, WEIGHTS, COUNTED, DEFORMED, FAST,
                CAUSAL, MASKED, True, CAPPED, PRECISION, KEYS, WIDTH, FULL, CLASSES,
            )  # fmt: skip
            one_p, one_u, ones = _at(sink_y, t, a, WEIGHTS, DEFORMED, FAST)
            excess, move = NEWTON(
                tl.sum(sum_p, 1) + one_p, tl.sum(sum_u, 1) + one_u, tl.sum(sum_n, 1) + ones, a, steps < EARLY
            )
            move = tl.where(settled, 0.0, move)
            # A step after a small excess nearly squares it: it is taken and checked by the sums of the last pass.
            # Where t has no digits left to move by, no step will help.
            left = tl.max(tl.where(t + move != t, tl.abs(excess), 0.0), 0)
            t += move
            steps += 1
        number, edges = _list(gaps, listed, whole, some, t + ahead, empty == 0, DEFORMED, a, around)
        sink_p, sink_u, _n = _at(sink_y, t, a, WEIGHTS, DEFORMED, FAST)
        top_p, _u, _n = _at(top_y, t, a, WEIGHTS, DEFORMED, FAST)
        _p, third, _n = _at(three_y, t, a, WEIGHTS, DEFORMED, FAST)
        inverse = tl.where(top_p > 0, 1.0 / tl.where(top_p > 0, top_p, 1.0), 0.0)
        third_inverse = tl.where(third > 1e-30, 1.0 / tl.where(third > 1e-30, third, 1.0), 0.0)
        others, tilt, squares, tops, m1, m2, m3, m4 = unused, unused, unused, unused, unused, unused, unused, unused
        others, tilt, squares, tops, m1, m2, m3, m4 = _fold(
            others, tilt, squares, tops, m1, m2, m3, m4, listed, number, first, top, inverse, third_inverse,
            q_tile, k, rows, size, peak, t, a, k_row, mask, mask_row, mask_column, queries, keys, offset, width, scale,
            cap, WEIGHTS, DEFORMED, FAST, CAUSAL, MASKED, False, CAPPED, PRECISION, KEYS, WIDTH, FULL, CLASSES,
        )  # fmt: skip
        others, tilt, squares, tops, m1, m2, m3, m4 = _fold(
            others, tilt, squares, tops, m1, m2, m3, m4, listed + whole - 1, edges, first, top, inverse, third_inverse,
            q_tile, k, rows, size, peak, t, a, k_row, mask, mask_row, mask_column, queries, keys, offset, width, scale,
            cap, WEIGHTS, DEFORMED, FAST, CAUSAL, MASKED, True, CAPPED, PRECISION, KEYS, WIDTH, FULL, CLASSES,
        )  # fmt: skip
        spare = tl.where(top_p > 0, tl.sum(tops, 1) - 1.0, 0.0)  # of equal ones all but one count among the others
        row_others = tl.maximum(tl.sum(others, 1) + spare, 0.0)
        total_p = sink_p + top_p * (1.0 + row_others)
        attempts += 1
        if tl.max(tl.where(settled, 0.0, tl.abs(total_p - 1.0)), 0) <= tolerance:
            attempts += 2
        bound = 0.1 * tolerance
        left = bound + 1

    # The norm of the Jacobian, in float64.
    _p, first_u, _n = _at(one_y, t, a, WEIGHTS, DEFORMED, FAST)
    _p, second_u, _n = _at(two_y, t, a, WEIGHTS, DEFORMED, FAST)
    _p, sink_u, _n = _at(sink_y, t, a, WEIGHTS, DEFORMED, FAST)
    v = tl.where(third > 1e-30, tl.minimum(sink_u / tl.where(third > 1e-30, third, 1.0), 1.0), 0.0)
    c = tl.where(third > 1e-30, third, 0.0).to(tl.float64)
    k1, k2 = tl.sum(m1, 1) + v - 3.0, tl.sum(m2, 1) + v * v - 3.0
    k3, k4 = tl.sum(m3, 1) + v * v * v - 3.0, tl.sum(m4, 1) + v * v * v * v - 3.0
    first_w, second_w = first_u.to(tl.float64), second_u.to(tl.float64)
    root = root_of_moments(
        first_w, second_w, third.to(tl.float64),
        tl.maximum(k1, 0.0) * c, tl.maximum(k2, 0.0) * c * c, tl.maximum(k3, 0.0) * c * c * c,
        tl.maximum(k4, 0.0) * c * c * c * c, c * 0.0,
    )  # fmt: skip
    for _ in range(PASSES):
        x_root = tl.maximum(root.to(tl.float32), second_u * _ABOVE_POLE)
        poles, pole_squares = unused, unused
        poles, pole_squares = _poles(
            poles, pole_squares, listed, number, first, second_u, x_root, q_tile, k, rows, size, peak, t, a, k_row,
            mask, mask_row, mask_column, queries, keys, offset, width, scale, cap, WEIGHTS, DEFORMED, FAST, CAUSAL,
            MASKED, False, CAPPED, PRECISION, KEYS, WIDTH, FULL, CLASSES,
        )  # fmt: skip
        poles, pole_squares = _poles(
            poles, pole_squares, listed + whole - 1, edges, first, second_u, x_root, q_tile, k, rows, size, peak, t, a,
            k_row, mask, mask_row, mask_column, queries, keys, offset, width, scale, cap, WEIGHTS, DEFORMED, FAST,
            CAUSAL, MASKED, True, CAPPED, PRECISION, KEYS, WIDTH, FULL, CLASSES,
        )  # fmt: skip
        sink_pole, extra = _pole(sink_u, second_u, x_root), _pole(second_u, second_u, x_root)  # extra: of the first
        value = (tl.sum(poles, 1) + sink_pole - extra).to(tl.float64)
        value_squares = (tl.sum(pole_squares, 1) + sink_pole * sink_pole - extra * extra).to(tl.float64)
        x = x_root.to(tl.float64)
        d = x - second_w
        better = (second_w < first_w) & (second_w > 0) & (d > 0)
        d = tl.where(better, d, 1.0)
        d = rational_step(first_w, first_w - second_w, d, value, d / tl.where(better, x, 1.0) * (value + value_squares))
        root = tl.where(better & (d > 0) & (d <= first_w - second_w), second_w + d, root)
    gain = slope * tl.abs(load_row(factor, row_at, inside, FACTORED, 1.0))

    if not MASKED:
        n = n + keys
        if CAUSAL:
            n = tl.maximum(tl.minimum(rows + offset + 1, keys), 0)
    extremes = top * logit, tl.min(smallest, 1) * logit
    largest, least = larger(extremes[0], extremes[1]), smaller(extremes[0], extremes[1])
    largest = tl.where(empty, float("-inf"), largest)
    least = tl.where(empty, float("inf"), least)
    scaled = tl.where(total_p > 0, 1.0 / tl.where(total_p > 0, total_p, 1.0), 0.0)
    out += row_at
    column = tl.cast(total, tl.int64)
    tl.store(out, n.to(tl.float32), mask=inside)
    tl.store(out + column, sink * logit * LN2, mask=inside)
    tl.store(out + 2 * column, tl.where(broken, float("nan"), largest * LN2), mask=inside)
    tl.store(out + 3 * column, least * LN2, mask=inside)
    tl.store(out + 4 * column, sink_p * scaled, mask=inside)
    tl.store(out + 5 * column, top_p * scaled, mask=inside)
    tl.store(out + 6 * column, row_others, mask=inside)
    tl.store(out + 7 * column, tl.sum(tilt, 1) * LN2, mask=inside)
    tl.store(out + 8 * column, tl.maximum(tl.sum(squares, 1) + spare, 0.0), mask=inside)
    tl.store(out + 9 * column, gain * root.to(tl.float32), mask=inside)
    tl.store(out + 10 * column, t, mask=inside)
