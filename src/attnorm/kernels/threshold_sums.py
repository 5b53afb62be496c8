"""Sums of every row of attention by a threshold map (kernels/threshold_maps.py).

As in threshold.py, a first pass keeps leaders, whose threshold is that of all keys or slightly below it, and notes how
close each tile comes to the peaks of its rows. Passes of Newton's method follow where the leaders may have left out
much. The last pass sums weights; it and all but the first leave out tiles without a weight. statistics_from_sums.py
turns the sums into the statistics of a row.

Beside an output the thresholds are known from attention (KNOWN): the first pass keeps the largest keys alone, and
nothing is searched. One kernel for output and sums was slower, since their registers do not fit together.

Two keys of a row are set apart: the first visible one (the sink) and the largest of the others. Sums over the remaining
keys are in units of the weight of that largest one.

The norm of the Jacobian is that of diag(u) - u u^T / sum u. Its first estimate takes the three largest u and the
moments of the others; each pass over the keys squares its error. See theory/rank_one_eigenvalues.py.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnorm.kernels.blocks import Constants, load_row
from attnorm.kernels.maps import INVERTIBLE, LN2, times_log2
from attnorm.kernels.row_tiles import (
    CLASSES,
    by_class,
    extreme_logits,
    key_tile,
    neighbors,
    no_keys,
    pairs_of_tile,
    rational_step,
    root_of_moments,
    rows_of_program,
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
    q, k, mask, factor, parameter, row_queries, known, out, gaps, listed,
    q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch, mask_head, mask_row, mask_column,
    heads, groups, rows_total, queries, keys, offset, width, scale, cap, start_program, total, natural, slope,
    enough, tolerance, doubt,
    WEIGHTS: tl.constexpr, NEWTON: tl.constexpr, START: tl.constexpr, COUNTED: tl.constexpr, DEFORMED: tl.constexpr,
    PARAMETER: tl.constexpr, EXACT: tl.constexpr, FAST: tl.constexpr, PASSES: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, CAPPED: tl.constexpr, FACTORED: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
    MAX_STEPS: tl.constexpr, EARLY: tl.constexpr, KNOWN: tl.constexpr,
):  # fmt: skip
    """q: (B, H, R, D), the rows of the queries `row_queries` in ascending order; out: (columns, B, H, R).

    The columns of out are those of map_sums.py, and the threshold relative to the largest logit, in the map's unit.
    factor, parameter: (B, H, R). gaps, listed: memory for one number per tile of each program.
    start_program: those before it have run. natural: the map's unit in bits. PASSES: that refine the Jacobian norm.

    known: (B, H, R), thresholds relative to the largest logit, if KNOWN. Entmax takes a step of Newton's method from
    them, since attention in half precision leaves it a larger error.
    """
    T: tl.constexpr = ThresholdConstants(WEIGHTS, DEFORMED, FAST, EXACT, NEWTON, COUNTED, MAX_STEPS, EARLY)
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
    if KNOWN:
        t = tl.load(known + row_at, mask=inside, other=0.0)
        count = tl.zeros_like(t)
        doubtful = (some > 0) & DEFORMED
    else:
        t, count, _u = threshold_of_leaders(leaders, sink_y, START(a), a, settled, tolerance, T, True)
        doubtful = (weight_left_out(leaders, t, a, settled, T) > doubt) & (some > 1)
    t = tl.where(broken, float("nan"), t)
    top_y, one_y, two_y, three_y = _largest(leaders, sink_y)
    steps, left = 0, tl.where(doubtful, enough + 1, 0.0)

    unused = tl.zeros([ROWS, CLASSES], tl.float32)
    sums = WeightSums(unused, unused, unused, unused, unused, unused, unused, unused)
    sink_p = tl.zeros([ROWS], tl.float32)
    top_p, third, spare, row_others, total_p = sink_p, sink_p, sink_p, sink_p, sink_p
    number, edges = 0, 0
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
        inverse = 1.0 / tl.where(top_p > INVERTIBLE, top_p, float("inf"))
        third_inverse = tl.where(third > 1e-30, 1.0 / tl.where(third > 1e-30, third, 1.0), 0.0)
        tiles, row = ListedTiles(listed, whole, number, edges), SolvedRows(size, peak, t, a)
        sums = _sum_units(unused, tiles, first, top, inverse, third_inverse, given, row, C, T)
        spare = tl.where(top_p > 0, tl.sum(sums.tops, 1) - 1.0, 0.0)  # of equal ones all but one count among the others
        row_others = tl.maximum(tl.sum(sums.others, 1) + spare, 0.0)
        total_p = sink_p + top_p * (1.0 + row_others)
        attempts += 1
        bad = tl.abs(total_p - 1.0)
        if COUNTED and not KNOWN:  # u of every weight changes by the step: much for many small ones beside a large one
            row_u = _sum_of_u(sums, sink_y, one_y, two_y, third, t, a, T)
            _excess, step = NEWTON(total_p, row_u, count, a, 1)
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
    store_columns(
        out + row_at, tl.cast(total, tl.int64), inside,
        (
            n.to(tl.float32), sink * logit * LN2, tl.where(broken, float("nan"), largest), least,
            sink_p * scaled, top_p * scaled, row_others,
            tl.sum(sums.e_log_e, 1) * LN2, tl.maximum(tl.sum(sums.squares, 1) + spare, 0.0), gain * root, t,
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
    even, odd = neighbors(x)
    return tl.sum(by_class(even + odd), 1)


@triton.jit
def _sums_in_turn(x):
    """The same, one key after the other: a product and its sum are one instruction.

    Not as one tensor of keys sorted by class: beside a mask its layout scatters a class over threads that are not
    neighbors, and Triton 3.6 adds up the wrong ones (mended by its pull request 9219).
    """
    even, odd = neighbors(x)
    return tl.sum(by_class(even), 1) + tl.sum(by_class(odd), 1)


@triton.jit
def _rise_of_tile(tile, first, given, row, C: tl.constexpr, T: tl.constexpr, EDGE: tl.constexpr):
    """x of a tile, 0 where a key does not count; its products, which keys count, and the first visible key."""
    s, seen, first, _sink, _count = key_tile(tile * C.COLUMNS, given, first, C, EDGE)
    x = above_threshold(s, row.size[:, None], row.peak[:, None], row.t[:, None], row.a[:, None], T.DEFORMED, T.EXACT)
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
def _fold_units(
    sums, listed, number, first, top, inverse, third_inverse, given, row,
    C: tl.constexpr, T: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    tile = tl.load(listed)
    for index in range(number):
        following = tl.load(listed + index + 1)
        x, s, seen, first = _rise_of_tile(tile, first, given, row, C, T, EDGE)
        is_top = s == top[:, None]
        if EDGE:
            is_top = is_top & seen
        is_top = is_top.to(tl.float32)
        p, u = T.WEIGHTS(x, row.a[:, None], T.FAST)
        e = p * inverse[:, None]
        e = e - e * is_top
        others = sums.others + _sums_in_turn(e)
        e_log_e = sums.e_log_e + _sums_in_turn(times_log2(e, T.FAST))
        squares = sums.squares + _sums_in_turn(e * e)
        tops = sums.tops + _sums_in_turn(is_top)
        v = tl.minimum(u * third_inverse[:, None], 1.0)
        square = v * v
        m1 = sums.m1 + _sums_in_turn(v)
        m2 = sums.m2 + _sums_in_turn(square)
        m3 = sums.m3 + _sums_in_turn(square * v)
        m4 = sums.m4 + _sums_in_turn(square * square)
        sums = WeightSums(others, e_log_e, squares, tops, m1, m2, m3, m4)
        tile = following
    return sums


@triton.jit
def _sum_units(zeros, tiles, first, top, inverse, third_inverse, given, row, C: tl.constexpr, T: tl.constexpr):
    """The WeightSums of each class: p in units of 1 / inverse, no u counted as more than 1 / third_inverse."""
    sums = WeightSums(zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros)
    for edge in tl.static_range(2):
        listed, number = (tiles.listed + tiles.whole - 1, tiles.edges) if edge else (tiles.listed, tiles.number)
        sums = _fold_units(sums, listed, number, first, top, inverse, third_inverse, given, row, C, T, edge)
    return sums


@triton.jit
def _sum_of_u(sums, sink_y, one_y, two_y, third, t, a, T: tl.constexpr):
    """The sum of all u: m1 counts none as more than the third, which two exceed."""
    _p, sink_u, _n = weight_of(sink_y, t, a, T)
    _p, one_u, _n = weight_of(one_y, t, a, T)
    _p, two_u, _n = weight_of(two_y, t, a, T)
    return third * tl.sum(sums.m1, 1) + tl.minimum(sink_u, third) + (one_u - third) + (two_u - third)


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
        better = (second_w < first_w) & (second_w > 1e-30) & (d > 0)  # of smaller u float32 has no pole
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
