"""Sums of every row of attention by a map of kernels/maps.py, in one pass over the keys, without values.

For maps whose weights rise with the logit and are at least 0, and whose reference is NONE or AT_LEAST_ZERO. Two keys of
a row are set apart: the first visible one (the sink) and the largest of the others. The remaining keys are summed in
units of the weight of that largest one, so no square underflows or overflows and nothing is ever subtracted.
weight_statistics.py turns the sums into statistics.

Every class of keys (see row_tiles.py) has its own largest key and sums, which are joined at the end.
"""

import triton
import triton.language as tl

from attnorm.kernels.maps import LN2, log2
from attnorm.kernels.one_pass import reference_of
from attnorm.kernels.row_tiles import (
    by_class,
    halves,
    key_tile,
    larger,
    neighbours,
    rows_of_program,
    smaller,
    tiles_of_rows,
)
from attnorm.kernels.tiles import load_row

# The columns of the result. The sums are over keys other than the first and the largest, e = weight / largest weight.
COLUMNS = (
    "n",
    "sink",  # logit of the first visible key, before the factor
    "largest",  # of the other keys
    "smallest",
    "sink_weight",
    "largest_weight",  # of the other keys
    "others",  # sum e
    "tilt",  # sum e log e
    "squares",  # sum e^2
    "jacobian_norm",  # NaN for a map with a denominator
)


@triton.jit
def _level(leader, unit, shift, WEIGHTS: tl.constexpr, P: tl.constexpr, FAST: tl.constexpr, REFERENCE: tl.constexpr):
    """Reference, numerator and denominator of products `leader` that may be -inf; 0 there."""
    none = leader == float("-inf")
    z = tl.where(none, 0.0, leader) * unit + shift
    reference = reference_of(z, REFERENCE, False)
    if REFERENCE == 0:
        reference = reference * 0.0
    a, b = WEIGHTS(z, reference, P, FAST)
    return tl.where(none, 0.0, reference), tl.where(none, 0.0, a), tl.where(none, 0.0, b)


@triton.jit
def _ratio(before, top, drop):
    """The unit before in units of now, and its logarithm in bits; 0 where there was none. drop: of the reference."""
    some = (before > 0) & (top > 0)
    ratio = tl.where(some, before / tl.where(some, top, 1.0) * tl.exp2(drop), 0.0)
    return ratio, tl.where(ratio > 0, tl.log2(tl.where(ratio > 0, ratio, 1.0)), 0.0)


@triton.jit
def _add(
    lost, unit, shift, reference, inverse, others, tilt, squares, total, steepest,
    WEIGHTS: tl.constexpr, SLOPES: tl.constexpr, P: tl.constexpr, FAST: tl.constexpr, NORMALISED: tl.constexpr,
    EDGE: tl.constexpr,
):  # fmt: skip
    """Add keys (rows, m, classes) to the sums of each class."""
    z = lost * unit[:, None, None] + shift[:, None, None]
    if NORMALISED:
        a, b = WEIGHTS(z, reference[:, None, :], P, FAST)
        if EDGE:
            hidden = lost == float("-inf")  # times a factor of 0 it would be NaN
            a, b = tl.where(hidden, 0.0, a), tl.where(hidden, 0.0, b)
        total += tl.sum(b, 1)
    else:
        a, slope, _b = SLOPES(z, reference[:, None, :], P, FAST)
        if EDGE:
            hidden = lost == float("-inf")
            a, slope = tl.where(hidden, 0.0, a), tl.where(hidden, 0.0, slope)
        steepest = tl.maximum(steepest, tl.max(slope, 1))
    e = a * inverse[:, None, :]
    others += tl.sum(e, 1)
    tilt += tl.sum(e * log2(tl.where(e > 0, e, 1.0), FAST), 1)
    squares += tl.sum(e * e, 1)
    return others, tilt, squares, total, steepest


@triton.jit
def _fold(
    n, first, sink, smallest, leader, reference, top, others, tilt, squares, total, steepest,
    start, tiles, jump, q_tile, k, rows, unit, shift, k_row, mask, mask_row, mask_column, queries, keys, offset, width,
    scale, cap,
    WEIGHTS: tl.constexpr, SLOPES: tl.constexpr, P: tl.constexpr, FAST: tl.constexpr, REFERENCE: tl.constexpr,
    NORMALISED: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, EDGE: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
    CLASSES: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """The state of a block of rows with some tiles of keys added; jump: keys skipped after the first tile."""
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

        # A knock-out: the winner of each class is its largest key, and every other key loses once.
        winners = larger(even, odd)
        for _ in tl.static_range(LEVELS):
            left, right = halves(winners)
            winners = larger(left, right)
        demoted = smaller(leader, winners)
        leader = larger(leader, winners)

        old_reference, old_top = reference, top
        reference, top, _b = _level(leader, unit[:, None], shift[:, None], WEIGHTS, P, FAST, REFERENCE)
        drop = old_reference - reference
        ratio, bits = _ratio(old_top, top, drop)
        tilt = ratio * (tilt + bits * others)
        others = others * ratio
        squares = squares * ratio * ratio
        if NORMALISED:
            total = total * tl.exp2(drop)
        inverse = tl.where(top > 0, 1.0 / tl.where(top > 0, top, 1.0), 0.0)

        others, tilt, squares, total, steepest = _add(
            by_class(demoted, CLASSES), unit, shift, reference, inverse, others, tilt, squares, total, steepest,
            WEIGHTS, SLOPES, P, FAST, NORMALISED, True,
        )  # fmt: skip
        others, tilt, squares, total, steepest = _add(
            by_class(smaller(even, odd), CLASSES), unit, shift, reference, inverse, others, tilt, squares, total,
            steepest, WEIGHTS, SLOPES, P, FAST, NORMALISED, EDGE,
        )  # fmt: skip
        winners = larger(even, odd)
        for _ in tl.static_range(LEVELS):
            left, right = halves(winners)
            others, tilt, squares, total, steepest = _add(
                by_class(smaller(left, right), CLASSES), unit, shift, reference, inverse, others, tilt, squares, total,
                steepest, WEIGHTS, SLOPES, P, FAST, NORMALISED, EDGE,
            )  # fmt: skip
            winners = larger(left, right)
    return n, first, sink, smallest, leader, reference, top, others, tilt, squares, total, steepest


@triton.jit
def map_sums(
    q, k, mask, factor, row_shift, row_queries, out,
    q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch, mask_head, mask_row, mask_column,
    heads, groups, rows_total, queries, keys, offset, width, scale, cap, floor,
    WEIGHTS: tl.constexpr, SLOPES: tl.constexpr, P: tl.constexpr, FAST: tl.constexpr, REFERENCE: tl.constexpr,
    NORMALISED: tl.constexpr, SHIFTED: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, CAPPED: tl.constexpr, FACTORED: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """q: (B, H, R, D), the rows of the queries `row_queries` in ascending order; out: (COLUMNS, B, H, R).

    factor, row_shift: (B, H, R), of natural logits. floor: added to the denominator.
    """
    CLASSES: tl.constexpr = 4
    k, mask, at, inside, rows, q_tile, unit, logit, batch_head, block = rows_of_program(
        tl.program_id(0), q, k, mask, factor, row_queries, q_batch, q_head, q_row, k_batch, k_head, mask_batch,
        mask_head, heads, groups, rows_total, queries, width, scale, CAPPED, FACTORED, ROWS, WIDTH, FULL,
    )  # fmt: skip
    outer_tiles, inner_tiles, high = tiles_of_rows(
        row_queries, block, rows_total, keys, offset, CAUSAL, MASKED, ROWS, KEYS
    )
    row_at = batch_head * rows_total + at
    shift = load_row(row_shift, row_at, inside, SHIFTED, 0.0) / LN2
    n = tl.zeros([ROWS], tl.int32)
    first = tl.zeros([ROWS], tl.int32) + keys
    sink = tl.zeros([ROWS], tl.float32)
    leader = tl.full([ROWS, CLASSES], float("-inf"), tl.float32)
    smallest = tl.full([ROWS, CLASSES], float("inf"), tl.float32)
    zeros = tl.zeros([ROWS, CLASSES], tl.float32)
    reference, top, others, tilt, squares, total, steepest = zeros, zeros, zeros, zeros, zeros, zeros, zeros
    for inner in tl.static_range(2):
        start, tiles, jump = 0, outer_tiles, high - KEYS
        if inner:
            start, tiles, jump = KEYS, inner_tiles, 0
        n, first, sink, smallest, leader, reference, top, others, tilt, squares, total, steepest = _fold(
            n, first, sink, smallest, leader, reference, top, others, tilt, squares, total, steepest,
            start, tiles, jump, q_tile, k, rows, unit, shift, k_row, mask, mask_row, mask_column, queries, keys, offset,
            width, scale, cap, WEIGHTS, SLOPES, P, FAST, REFERENCE, NORMALISED, CAUSAL, MASKED, not inner, CAPPED,
            PRECISION, KEYS, WIDTH, FULL, CLASSES, LEVELS,
        )  # fmt: skip

    # The classes as one row, in units of the weight of its largest key.
    peak = tl.reduce(leader, 1, larger)
    row_reference, row_top, _b = _level(peak, unit, shift, WEIGHTS, P, FAST, REFERENCE)
    drop = reference - row_reference[:, None]
    ratio, bits = _ratio(top, row_top[:, None], drop)
    is_peak = leader == peak[:, None]
    peaks = tl.sum(is_peak.to(tl.float32), 1)  # equal ones count among the others, all but one
    spare = tl.where((peaks > 0) & (row_top > 0), peaks - 1.0, 0.0)
    own = tl.where(is_peak, 0.0, ratio)
    row_others = tl.sum(ratio * others + own, 1) + spare
    row_tilt = tl.sum(ratio * (tilt + bits * others) + own * bits, 1)
    row_squares = tl.sum(ratio * ratio * squares + own * own, 1) + spare

    # The sink, and what all are divided by.
    has_sink = first < keys
    alone = tl.where(has_sink, sink, float("-inf"))
    sink_reference, sink_top, sink_b = _level(alone, unit, shift, WEIGHTS, P, FAST, REFERENCE)
    norm = tl.full([ROWS], float("nan"), tl.float32)
    if NORMALISED:
        common = tl.maximum(sink_reference, row_reference)
        _r, _a, leader_b = _level(leader, unit[:, None], shift[:, None], WEIGHTS, P, FAST, REFERENCE)
        total = tl.sum((total + leader_b) * tl.exp2(reference - common[:, None]), 1)
        total += sink_b * tl.exp2(sink_reference - common) + floor * tl.exp2(-common)
        inverse = tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), tl.where(total == 0, 0.0, float("nan")))
        sink_top = sink_top * tl.exp2(sink_reference - common) * inverse
        row_top = row_top * tl.exp2(row_reference - common) * inverse
    else:
        none = leader == float("-inf")
        z = tl.where(none, 0.0, leader) * unit[:, None] + shift[:, None]
        _a, slope, _b = SLOPES(z, z * 0.0, P, FAST)
        steepest = tl.maximum(steepest, tl.where(none, 0.0, slope))
        _a, slope, _b = SLOPES(sink * unit + shift, sink * 0.0, P, FAST)
        gain = tl.abs(load_row(factor, row_at, inside, FACTORED, 1.0))
        norm = gain * tl.maximum(tl.max(steepest, 1), tl.where(has_sink, slope, 0.0))

    if not MASKED:
        n = n + keys
        if CAUSAL:
            n = tl.maximum(tl.minimum(rows + offset + 1, keys), 0)
    extremes = peak * logit, tl.min(smallest, 1) * logit
    largest, least = larger(extremes[0], extremes[1]), smaller(extremes[0], extremes[1])
    empty = peak == float("-inf")
    largest = tl.where(empty, float("-inf"), largest)
    least = tl.where(empty, float("inf"), least)
    out += row_at
    column = tl.num_programs(0).to(tl.int64) // tl.cdiv(rows_total, ROWS) * rows_total
    tl.store(out, n.to(tl.float32), mask=inside)
    tl.store(out + column, sink * logit * LN2, mask=inside)
    tl.store(out + 2 * column, largest * LN2, mask=inside)
    tl.store(out + 3 * column, least * LN2, mask=inside)
    tl.store(out + 4 * column, sink_top, mask=inside)
    tl.store(out + 5 * column, row_top, mask=inside)
    tl.store(out + 6 * column, row_others, mask=inside)
    tl.store(out + 7 * column, row_tilt * LN2, mask=inside)
    tl.store(out + 8 * column, row_squares, mask=inside)
    tl.store(out + 9 * column, norm, mask=inside)
