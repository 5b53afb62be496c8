"""Sums of every row of attention by a threshold map (kernels/threshold_maps.py), and its output if asked for.

As in threshold.py, a first pass keeps leaders, whose threshold is that of all keys or slightly below it, and notes how
close each tile comes to the peaks of its rows. Passes of Newton's method follow where the leaders may have left out
much. The last pass sums weights, and multiplies them with values if asked for; it and all but the first leave out
tiles without a weight. statistics_from_sums.py turns the sums into the statistics of a row.

Two keys of a row are set apart: the first visible one (the sink) and the largest of the others. Sums over the remaining
keys are in units of the weight of that largest one.

The norm of the Jacobian is that of diag(u) - u u^T / sum u. Its first estimate takes the three largest u and the
moments of the others; each pass over the keys squares its error. See theory/rank_one_eigenvalues.py.
"""

from collections import namedtuple
from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnorm.kernels.blocks import Constants, keys_of_head, load_row, load_tile, matrix_of_head, store_tile
from attnorm.kernels.maps import LN2, log2
from attnorm.kernels.row_tiles import (
    CLASSES,
    by_class,
    extreme_logits,
    key_tile,
    neighbours,
    no_keys,
    pairs_of_tile,
    rational_step,
    root_of_moments,
    rows_of_program,
    sink_values,
    spans_of_rows,
    store_columns,
    tile_of_span,
    visible_keys,
)
from attnorm.kernels.threshold_maps import (
    ThresholdConstants,
    above_threshold,
    add_tile,
    below_peak,
    insert,
    list_tiles,
    lowest_weight,
    newton_step,
    no_leaders,
    threshold_of_leaders,
    weight_left_out,
    weight_of,
)


class ListedTiles(NamedTuple):
    """A list of `number` tiles that all rows see; behind room for all of those, a list of `edges` others."""

    listed: Any
    whole: Any  # where the tiles that all rows see end; the first tile is none of them
    number: Any
    edges: Any


class SolvedRows(NamedTuple):
    """Numbers of each row that convert its products to x: see threshold_maps.py."""

    size: Any  # of the map's unit in products
    peak: Any
    t: Any
    a: Any


class Output(NamedTuple):
    """Of each row: p v LIFT, u v and u of its keys but the sink, summed; the last two if CORRECTED."""

    p: Any
    u: Any
    sum_u: Any  # of each class


# What the last pass computes besides the sums; constants of kernels/threshold.py.
OutputConstants = namedtuple("OutputConstants", "OUTPUT TRAINS CORRECTED LIFT")


class WeightSums(NamedTuple):
    """Sums over the keys but the sink and those at the top, and the moments of u in units of its third largest."""

    others: Any
    e_log_e: Any
    squares: Any
    tops: Any  # how many are at the top
    m1: Any
    m2: Any
    m3: Any
    m4: Any


_ABOVE_POLE = tl.constexpr(1.0000003)  # float32 does not distinguish a root this close to a pole from the pole


@triton.jit
def threshold_sums(
    q, k, mask, factor, parameter, row_queries, v, output, mean_u, live, out, gaps, listed,
    q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch, mask_head, mask_row, mask_column,
    heads, groups, rows_total, queries, keys, offset, width, scale, cap, start_program, total, natural, slope,
    enough, tolerance, doubt, v_batch, v_head, v_row, o_batch, o_head, o_row,
    WEIGHTS: tl.constexpr, NEWTON: tl.constexpr, START: tl.constexpr, COUNTED: tl.constexpr, DEFORMED: tl.constexpr,
    PARAMETER: tl.constexpr, FAST: tl.constexpr, PASSES: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, CAPPED: tl.constexpr, FACTORED: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
    MAX_STEPS: tl.constexpr, EARLY: tl.constexpr, OUTPUT: tl.constexpr, TRAINS: tl.constexpr,
    CORRECTED: tl.constexpr, DECLINE: tl.constexpr, LIFT: tl.constexpr,
):  # fmt: skip
    """q: (B, H, R, D), the rows of the queries `row_queries` in ascending order; out: (columns, B, H, R).

    The columns of out are those of map_sums.py, the threshold relative to the largest logit, and that logit, both in
    the map's unit.
    factor, parameter: (B, H, R). gaps, listed: memory for one number per tile of each program.
    start_program: those before it have run. natural: the map's unit in bits. PASSES: that refine the Jacobian norm.

    OUTPUT: multiply with the values v (B, G, K, D) too; output: (B, H, R, D). TRAINS: also store mean_u and live, which
    the backward pass needs: see threshold.Saved. CORRECTED: remove what the sum of a row exceeds 1 by from its output
    and its threshold to first order, as in threshold.py.
    """
    T: tl.constexpr = ThresholdConstants(WEIGHTS, DEFORMED, FAST, True, NEWTON, COUNTED, MAX_STEPS, EARLY)
    V: tl.constexpr = OutputConstants(OUTPUT, TRAINS, CORRECTED, LIFT)
    C: tl.constexpr = Constants(CAUSAL, False, MASKED, PRECISION, ROWS, KEYS, WIDTH, FULL, CAPPED=CAPPED)
    own, at, inside, given, unit, logit = rows_of_program(
        start_program + tl.program_id(0), q, k, mask, factor, row_queries, q_batch, q_head, q_row, k_batch, k_head,
        k_row, mask_batch, mask_head, mask_row, mask_column, heads, groups, rows_total, queries, keys, offset, width,
        scale, cap, C, FACTORED,
    )  # fmt: skip
    outer, inner, high = spans_of_rows(row_queries, own.index, rows_total, given.sight, C)
    first_tile = tl.program_id(0).to(tl.int64) * tl.cdiv(keys, KEYS)
    gaps += first_tile
    listed += first_tile
    live += (own.batch_head * tl.cdiv(rows_total, ROWS) + own.index) * tl.cdiv(keys, KEYS)
    if OUTPUT:
        v = keys_of_head(v, own, groups, v_batch, v_head, v_row, keys, width)
    row_at = own.batch_head * rows_total + at
    a = load_row(parameter, row_at, inside, PARAMETER, 0.5)
    size = unit * natural

    state, leaders = no_keys(keys, ROWS), no_leaders(ROWS, KEYS // 2)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    for seen_whole in tl.static_range(2):
        state, leaders, top = _collect_leaders(
            state, leaders, top, inner if seen_whole else outer, gaps, size, given, C, not seen_whole
        )
    whole = high // KEYS
    some = tl.where(outer.tiles > 0, whole + outer.tiles - 1, 0)

    # Logits in the map's unit, relative to the largest of the row.
    first, sink = state.first, state.sink
    empty, has_sink = top == float("-inf"), first < keys
    broken = (tl.max(tl.where(leaders.one == leaders.one, 0, 1), 1) != 0) | (sink != sink)
    settled = (empty & (has_sink == 0)) | broken | (inside == 0)
    around = tl.where(empty, 0.0, top * size)
    peak = tl.where(has_sink, tl.where(empty, sink * size, tl.maximum(around, sink * size)), around)
    ahead = tl.where(empty, 0.0, peak - around)
    sink_y = tl.where(has_sink, sink * size - peak, float("-inf"))
    leaders = below_peak(leaders, size, peak)
    t, count, _u = threshold_of_leaders(leaders, sink_y, START(a), a, settled, tolerance, T, True)
    doubtful = (weight_left_out(leaders, t, a, settled, T) > doubt) & (some > 1)
    t = tl.where(broken, float("nan"), t)
    top_y, one_y, two_y, three_y = _largest(leaders, sink_y)
    steps, left = 0, tl.where(doubtful, enough + 1, 0.0)

    unused = tl.zeros([ROWS, CLASSES], tl.float32)
    sums = WeightSums(unused, unused, unused, unused, unused, unused, unused, unused)
    sink_p = tl.zeros([ROWS], tl.float32)
    top_p, third, spare, row_others, total_p = sink_p, sink_p, sink_p, sink_p, sink_p
    sink_u, row_u, step = sink_p, sink_p, sink_p
    number, edges = 0, 0
    result = _no_output(unused, ROWS, WIDTH, V)
    bound = enough
    attempts = 0
    while attempts < 2:
        steps = 0
        while (left > bound) & (steps < MAX_STEPS):
            number, edges = _list_row_tiles(gaps, listed, whole, some, t + ahead, empty, DEFORMED, a, around)
            tiles, row = ListedTiles(listed, whole, number, edges), SolvedRows(size, peak, t, a)
            sum_p, sum_u, sum_n = _measure(unused, tiles, first, given, row, C, T)
            one_p, one_u, ones = weight_of(sink_y, t, a, T)
            count = tl.sum(sum_n, 1) + ones
            # A step after a small excess nearly squares it: it is taken and checked by the sums of the last pass.
            t, left = newton_step(
                tl.sum(sum_p, 1) + one_p, tl.sum(sum_u, 1) + one_u, count, t, a, settled, steps < EARLY, T
            )
            steps += 1
        number, edges = _list_row_tiles(gaps, listed, whole, some, t + ahead, empty, DEFORMED, a, around)
        sink_p, _u, _n = weight_of(sink_y, t, a, T)
        top_p, _u, _n = weight_of(top_y, t, a, T)
        _p, third, _n = weight_of(three_y, t, a, T)
        inverse = tl.where(top_p > 0, 1.0 / tl.where(top_p > 0, top_p, 1.0), 0.0)
        third_inverse = tl.where(third > 1e-30, 1.0 / tl.where(third > 1e-30, third, 1.0), 0.0)
        tiles, row = ListedTiles(listed, whole, number, edges), SolvedRows(size, peak, t, a)
        result = _no_output(unused, ROWS, WIDTH, V)
        sums, result = _sum_units(
            unused, result, tiles, first, top, inverse, third_inverse, given, v, live, row, C, T, V
        )
        spare = tl.where(top_p > 0, tl.sum(sums.tops, 1) - 1.0, 0.0)  # of equal ones all but one count among the others
        row_others = tl.maximum(tl.sum(sums.others, 1) + spare, 0.0)
        total_p = sink_p + top_p * (1.0 + row_others)
        attempts += 1
        bad = tl.abs(total_p - 1.0)
        if CORRECTED:
            _p, sink_u, _n = weight_of(sink_y, t, a, T)
            row_u = tl.sum(result.sum_u, 1) + sink_u
            _excess, step = NEWTON(total_p, row_u, count, a, 1)
            step = tl.where(settled, 0.0, step)
            if COUNTED:  # u of every weight changes by the step: much for many small ones beside a large one
                bad = tl.maximum(bad, 0.1 * tl.abs(step) * count / tl.where(row_u > 0, row_u, 1.0))
        if tl.max(tl.where(settled, 0.0, bad), 0) <= tolerance:
            attempts += 2
        bound = 0.1 * tolerance
        left = bound + 1

    tiles, row = ListedTiles(listed, whole, number, edges), SolvedRows(size, peak, t, a)
    root = _jacobian_root(sums, tiles, first, sink_y, one_y, two_y, third, given, row, PASSES, C, T)
    gain = slope * tl.abs(load_row(factor, row_at, inside, FACTORED, 1.0))
    n = visible_keys(state.n, given, C)
    largest, least = extreme_logits(top, state.smallest, logit)
    scaled = tl.where(total_p > 0, 1.0 / tl.where(total_p > 0, total_p, 1.0), 0.0)
    if OUTPUT:
        sink_value = sink_values(v, first, C)
        sum_p, weighted = total_p, result.p * (1.0 / LIFT) + sink_p[:, None] * sink_value
        if CORRECTED:
            weighted_u = result.u + sink_u[:, None] * sink_value
            weighted -= (DECLINE * step)[:, None] * weighted_u
            sum_p -= DECLINE * step * row_u
            t += step
            if TRAINS:
                rows_out = matrix_of_head(mean_u, own.batch, own.head, o_batch, o_head, o_row, rows_total, width)
                store_tile(rows_out, weighted_u / tl.where(row_u == 0, 1.0, row_u)[:, None], at, WIDTH)
                tl.store(live + first // KEYS, (first * 0 + 1).to(tl.uint8), mask=has_sink & inside & (sink_p != 0))
        rows_out = matrix_of_head(output, own.batch, own.head, o_batch, o_head, o_row, rows_total, width)
        store_tile(rows_out, weighted / tl.where(sum_p == 0, 1.0, sum_p)[:, None], at, WIDTH)
    store_columns(
        out + row_at, tl.cast(total, tl.int64), inside,
        (
            n.to(tl.float32), sink * logit * LN2, tl.where(broken, float("nan"), largest), least,
            sink_p * scaled, top_p * scaled, row_others,
            tl.sum(sums.e_log_e, 1) * LN2, tl.maximum(tl.sum(sums.squares, 1) + spare, 0.0), gain * root, t,
            peak,
        ),
    )  # fmt: skip


@triton.jit
def _collect_leaders(state, leaders, peak, span, gaps, size, given, C: tl.constexpr, EDGE: tl.constexpr):
    """Leaders and peaks, of products, with some tiles of keys added."""
    for tile in range(span.tiles):
        at = tile_of_span(span, tile, C)
        even, odd, state = pairs_of_tile(at, given, state, C, EDGE)
        leaders, peak = add_tile(leaders, peak, even, odd, size, 0.0, gaps, at, C.COLUMNS, False)
    return state, leaders, peak


@triton.jit
def _list_row_tiles(gaps, listed, whole, some, floor, empty, DEFORMED: tl.constexpr, a, around):
    """List the tiles in which a row has a logit above its floor: how many of those seen whole, and of the others."""
    level = lowest_weight(floor, around, empty, a, DEFORMED)
    tl.debug_barrier()
    number = list_tiles(gaps, 1, some, 0, 1, listed, 0, 1, whole, level, 1, 1, 1)
    edges = list_tiles(gaps, 1, some, 0, 1, listed + whole - 1, 0, 0, tl.minimum(1, some), level, 1, 1, 1)
    edges = list_tiles(gaps, 1, some, 0, 1, listed + whole - 1, edges, whole, some, level, 1, 1, 1)
    tl.debug_barrier()
    return number, edges


@triton.jit
def _class_sums(x):
    even, odd = neighbours(x)
    return tl.sum(by_class(even + odd), 1)


@triton.jit
def _rise_of_tile(tile, first, given, row, C: tl.constexpr, T: tl.constexpr, EDGE: tl.constexpr):
    """x of a tile, 0 where a key does not count; its products, which keys count, and the first visible key."""
    s, seen, first, _sink, _count = key_tile(tile * C.COLUMNS, given, first, C, EDGE)
    x = above_threshold(s, row.size[:, None], row.peak[:, None], row.t[:, None], row.a[:, None], T.DEFORMED, True)
    if EDGE:
        x = tl.where(seen, x, 0.0)
    return x, s, seen, first


@triton.jit
def _fold_weights(
    sum_p, sum_u, count, listed, number, first, given, row, C: tl.constexpr, T: tl.constexpr, EDGE: tl.constexpr
):
    tile = tl.load(listed)
    for index in range(number):
        following = tl.load(listed + index + 1)
        x, _s, _seen, first = _rise_of_tile(tile, first, given, row, C, T, EDGE)
        p, u = T.WEIGHTS(x, row.a[:, None], T.FAST)
        sum_p += _class_sums(p)
        sum_u += _class_sums(u)
        if T.COUNTED:
            count += _class_sums(tl.where(x > 0, 1.0, 0.0))
        tile = following
    return sum_p, sum_u, count


@triton.jit
def _measure(zeros, tiles, first, given, row, C: tl.constexpr, T: tl.constexpr):
    """The sums of p and u, and the number of weights, of each class."""
    sum_p, sum_u, count = zeros, zeros, zeros
    sum_p, sum_u, count = _fold_weights(
        sum_p, sum_u, count, tiles.listed, tiles.number, first, given, row, C, T, False
    )  # fmt: skip
    return _fold_weights(
        sum_p, sum_u, count, tiles.listed + tiles.whole - 1, tiles.edges, first, given, row, C, T, True
    )


@triton.jit
def _no_output(unused, ROWS: tl.constexpr, WIDTH: tl.constexpr, V: tl.constexpr):
    p = tl.zeros([ROWS, WIDTH], tl.float32) if V.OUTPUT else unused
    return Output(p, p if V.CORRECTED else unused, unused)


@triton.jit
def _fold_units(
    sums, result, listed, number, first, top, inverse, third_inverse, given, values, live, row,
    C: tl.constexpr, T: tl.constexpr, V: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    tile = tl.load(listed)
    for index in range(number):
        following = tl.load(listed + index + 1)
        x, s, seen, first = _rise_of_tile(tile, first, given, row, C, T, EDGE)
        is_top = s == top[:, None]
        if EDGE:
            is_top = is_top & seen
        p, u = T.WEIGHTS(x, row.a[:, None], T.FAST)
        if V.OUTPUT:
            v_tile = load_tile(values, tile * C.COLUMNS + tl.arange(0, C.COLUMNS), C.WIDTH, EDGE, C.FULL)
            lifted = p * V.LIFT if V.LIFT != 1.0 else p
            p_v = tl.dot(lifted.to(v_tile.dtype), v_tile, result.p, input_precision=C.PRECISION)
            u_v, sum_u = result.u, result.sum_u
            if V.CORRECTED:
                u_v = tl.dot(u.to(v_tile.dtype), v_tile, u_v, input_precision=C.PRECISION)
                sum_u += _class_sums(u)
            if V.TRAINS:
                tl.store(live + tile, (tile * 0 + 1).to(tl.uint8), mask=tl.max(tl.where(p == 0, 0, 1)) != 0)
            result = Output(p_v, u_v, sum_u)
        e = tl.where(is_top, 0.0, p * inverse[:, None])
        others = sums.others + _class_sums(e)
        e_log_e = sums.e_log_e + _class_sums(e * log2(tl.where(e > 0, e, 1.0), T.FAST))
        squares = sums.squares + _class_sums(e * e)
        tops = sums.tops + _class_sums(is_top.to(tl.float32))
        v = tl.minimum(u * third_inverse[:, None], 1.0)
        square = v * v
        m1 = sums.m1 + _class_sums(v)
        m2 = sums.m2 + _class_sums(square)
        m3 = sums.m3 + _class_sums(square * v)
        m4 = sums.m4 + _class_sums(square * square)
        sums = WeightSums(others, e_log_e, squares, tops, m1, m2, m3, m4)
        tile = following
    return sums, result


@triton.jit
def _sum_units(
    zeros, result, tiles, first, top, inverse, third_inverse, given, values, live, row,
    C: tl.constexpr, T: tl.constexpr, V: tl.constexpr,
):  # fmt: skip
    """The WeightSums of each class: p in units of 1 / inverse, no u counted as more than 1 / third_inverse.

    And the Output; `live` is marked for tiles that hold a weight, if TRAINS.
    """
    sums = WeightSums(zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros)
    for edge in tl.static_range(2):
        listed, number = (tiles.listed + tiles.whole - 1, tiles.edges) if edge else (tiles.listed, tiles.number)
        sums, result = _fold_units(
            sums, result, listed, number, first, top, inverse, third_inverse, given, values, live, row, C, T, V, edge
        )
    return sums, result


@triton.jit
def _pole(u, second, x_root):
    """u / (x - u), with no u counted as more than the second largest."""
    u = tl.minimum(u, second)
    gap = x_root - u
    return tl.where(gap > 0, u / tl.where(gap > 0, gap, 1.0), 0.0)


@triton.jit
def _fold_poles(
    poles, squares, listed, number, first, second, x_root, given, row,
    C: tl.constexpr, T: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    tile = tl.load(listed)
    for index in range(number):
        following = tl.load(listed + index + 1)
        x, _s, _seen, first = _rise_of_tile(tile, first, given, row, C, T, EDGE)
        _p, u = T.WEIGHTS(x, row.a[:, None], T.FAST)
        ratio = _pole(u, second[:, None], x_root[:, None])
        poles += _class_sums(ratio)
        squares += _class_sums(ratio * ratio)
        tile = following
    return poles, squares


@triton.jit
def _sum_poles(zeros, tiles, first, second, x_root, given, row, C: tl.constexpr, T: tl.constexpr):
    """sum u / (x - u) and sum (u / (x - u))^2 of each class."""
    poles, squares = zeros, zeros
    poles, squares = _fold_poles(
        poles, squares, tiles.listed, tiles.number, first, second, x_root, given, row, C, T, False
    )  # fmt: skip
    return _fold_poles(
        poles, squares, tiles.listed + tiles.whole - 1, tiles.edges, first, second, x_root, given, row, C, T, True
    )


@triton.jit
def _jacobian_root(
    sums, tiles, first, sink_y, one_y, two_y, third, given, row, PASSES: tl.constexpr, C: tl.constexpr, T: tl.constexpr
):
    """The norm of diag(u) - u u^T / sum u, in float64. third: the third largest u."""
    _p, first_u, _n = weight_of(one_y, row.t, row.a, T)
    _p, second_u, _n = weight_of(two_y, row.t, row.a, T)
    _p, sink_u, _n = weight_of(sink_y, row.t, row.a, T)
    v = tl.where(third > 1e-30, tl.minimum(sink_u / tl.where(third > 1e-30, third, 1.0), 1.0), 0.0)
    c = tl.where(third > 1e-30, third, 0.0).to(tl.float64)
    k1, k2 = tl.sum(sums.m1, 1) + v - 3.0, tl.sum(sums.m2, 1) + v * v - 3.0
    k3, k4 = tl.sum(sums.m3, 1) + v * v * v - 3.0, tl.sum(sums.m4, 1) + v * v * v * v - 3.0
    first_w, second_w = first_u.to(tl.float64), second_u.to(tl.float64)
    root = root_of_moments(
        first_w, second_w, third.to(tl.float64),
        tl.maximum(k1, 0.0) * c, tl.maximum(k2, 0.0) * c * c, tl.maximum(k3, 0.0) * c * c * c,
        tl.maximum(k4, 0.0) * c * c * c * c, c * 0.0,
    )  # fmt: skip
    unused = tl.zeros_like(sums.m1)
    for _ in range(PASSES):
        x_root = tl.maximum(root.to(tl.float32), second_u * _ABOVE_POLE)
        poles, squares = _sum_poles(unused, tiles, first, second_u, x_root, given, row, C, T)
        sink_pole, extra = _pole(sink_u, second_u, x_root), _pole(second_u, second_u, x_root)  # extra: of the first
        value = (tl.sum(poles, 1) + sink_pole - extra).to(tl.float64)
        value_squares = (tl.sum(squares, 1) + sink_pole * sink_pole - extra * extra).to(tl.float64)
        x = x_root.to(tl.float64)
        d = x - second_w
        better = (second_w < first_w) & (second_w > 0) & (d > 0)
        d = tl.where(better, d, 1.0)
        d = rational_step(first_w, first_w - second_w, d, value, d / tl.where(better, x, 1.0) * (value + value_squares))
        root = tl.where(better & (d > 0) & (d <= first_w - second_w), second_w + d, root)
    return root.to(tl.float32)


@triton.jit
def _largest(leaders, sink_y):
    """The largest key but the sink, and the three largest of all."""
    one, candidate = insert(leaders.one, leaders.other)
    two, candidate = insert(leaders.two, candidate)
    top_y, two_y, three_y = tl.reduce((one, two, tl.maximum(leaders.three, candidate)), 1, _top_three)
    one_y, candidate_y = insert(top_y, sink_y)
    two_y, candidate_y = insert(two_y, candidate_y)
    return top_y, one_y, two_y, tl.maximum(three_y, candidate_y)


@triton.jit
def _top_three(one_a, two_a, three_a, one_b, two_b, three_b):
    """The three largest of two ordered triples."""
    three = tl.maximum(tl.minimum(one_a, two_b), tl.minimum(two_a, one_b))
    return (
        tl.maximum(one_a, one_b),
        tl.maximum(tl.minimum(one_a, one_b), tl.maximum(two_a, two_b)),
        tl.maximum(three, tl.maximum(three_a, three_b)),
    )
