"""Sums of every row of attention by a map of kernels/maps.py, in one pass over the keys, without values.

For maps whose weights rise with the logit and are at least 0, and whose reference is NONE or AT_LEAST_ZERO. Two keys of
a row are set apart: the first visible one (the sink) and the largest of the others. The remaining keys are summed in
units of the weight of that largest one, so no square underflows or overflows and nothing is ever subtracted.
statistics_from_sums.py turns the sums into statistics.

Every class of keys (see row_tiles.py) has its own largest key and sums, which are joined at the end.
"""

from collections import namedtuple
from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnorm.kernels.blocks import Constants, load_row
from attnorm.kernels.maps import LN2, log2
from attnorm.kernels.one_pass import inverse_of, reference_of
from attnorm.kernels.row_tiles import (
    CLASSES,
    by_class,
    extreme_logits,
    halves,
    larger,
    no_keys,
    pairs_of_tile,
    rows_of_program,
    smaller,
    spans_of_rows,
    store_columns,
    tile_of_span,
    visible_keys,
)

# The columns of the result. The sums are over keys other than the first and the largest, e = weight / largest weight.
COLUMNS = (
    "n",
    "sink",  # logit of the first visible key, before the factor
    "largest",  # of the other keys
    "smallest",
    "sink_weight",
    "largest_weight",  # of the other keys
    "others",  # sum e
    "e_log_e",  # sum e log e
    "squares",  # sum e^2
    "jacobian_norm",  # NaN for a map with a denominator
)


# What is known of a map when the kernel is compiled.
RisingMap = namedtuple("RisingMap", "WEIGHTS SLOPES P FAST REFERENCE NORMALISED")


@triton.jit
def _level(leader, unit, shift, M: tl.constexpr):
    """Reference, numerator and denominator of products `leader` that may be -inf; 0 there."""
    none = leader == float("-inf")
    z = tl.where(none, 0.0, leader) * unit + shift
    reference = reference_of(z, M.REFERENCE, False)
    if M.REFERENCE == 0:
        reference = reference * 0.0
    a, b = M.WEIGHTS(z, reference, M.P, M.FAST)
    return tl.where(none, 0.0, reference), tl.where(none, 0.0, a), tl.where(none, 0.0, b)


@triton.jit
def _ratio(before, top, drop):
    """The unit before in units of now, and its logarithm in bits; 0 where there was none. drop: of the reference."""
    some = (before > 0) & (top > 0)
    ratio = tl.where(some, before / tl.where(some, top, 1.0) * tl.exp2(drop), 0.0)
    return ratio, tl.where(ratio > 0, tl.log2(tl.where(ratio > 0, ratio, 1.0)), 0.0)


class Sums(NamedTuple):
    """Sums of each class."""

    others: Any
    e_log_e: Any
    squares: Any
    total: Any  # of the denominator
    steepest: Any  # slope


@triton.jit
def _add(lost, unit, shift, reference, inverse, sums, M: tl.constexpr, EDGE: tl.constexpr):
    """Add keys to the sums of each class."""
    lost = by_class(lost)
    others, e_log_e, squares, total, steepest = sums
    z = lost * unit[:, None, None] + shift[:, None, None]
    if M.NORMALISED:
        a, b = M.WEIGHTS(z, reference[:, None, :], M.P, M.FAST)
        if EDGE:
            hidden = lost == float("-inf")  # times a factor of 0 it would be NaN
            a, b = tl.where(hidden, 0.0, a), tl.where(hidden, 0.0, b)
        total += tl.sum(b, 1)
    else:
        a, slope, _b = M.SLOPES(z, reference[:, None, :], M.P, M.FAST)
        if EDGE:
            hidden = lost == float("-inf")
            a, slope = tl.where(hidden, 0.0, a), tl.where(hidden, 0.0, slope)
        steepest = tl.maximum(steepest, tl.max(slope, 1))
    e = a * inverse[:, None, :]
    others += tl.sum(e, 1)
    e_log_e += tl.sum(e * log2(tl.where(e > 0, e, 1.0), M.FAST), 1)
    squares += tl.sum(e * e, 1)
    return Sums(others, e_log_e, squares, total, steepest)


@triton.jit
def _fold(
    state, leader, reference, top, sums, span, given, unit, shift,
    C: tl.constexpr, M: tl.constexpr, EDGE: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """The state of a block of rows with some tiles of keys added."""
    for tile in range(span.tiles):
        even, odd, state = pairs_of_tile(tile_of_span(span, tile, C), given, state, C, EDGE)

        # A knock-out: the winner of each class is its largest key, and every other key loses once.
        winners = larger(even, odd)
        for _ in tl.static_range(LEVELS):
            left, right = halves(winners)
            winners = larger(left, right)
        demoted = smaller(leader, winners)
        leader = larger(leader, winners)

        old_reference, old_top = reference, top
        reference, top, _b = _level(leader, unit[:, None], shift[:, None], M)
        drop = old_reference - reference
        ratio, bits = _ratio(old_top, top, drop)
        e_log_e = ratio * (sums.e_log_e + bits * sums.others)
        others = sums.others * ratio
        squares = sums.squares * ratio * ratio
        total = sums.total
        if M.NORMALISED:
            total = total * tl.exp2(drop)
        sums = Sums(others, e_log_e, squares, total, sums.steepest)
        inverse = tl.where(top > 0, 1.0 / tl.where(top > 0, top, 1.0), 0.0)

        sums = _add(demoted, unit, shift, reference, inverse, sums, M, True)
        sums = _add(smaller(even, odd), unit, shift, reference, inverse, sums, M, EDGE)
        winners = larger(even, odd)
        for _ in tl.static_range(LEVELS):
            left, right = halves(winners)
            sums = _add(smaller(left, right), unit, shift, reference, inverse, sums, M, EDGE)
            winners = larger(left, right)
    return state, leader, reference, top, sums


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
    M: tl.constexpr = RisingMap(WEIGHTS, SLOPES, P, FAST, REFERENCE, NORMALISED)
    C: tl.constexpr = Constants(CAUSAL, False, MASKED, PRECISION, ROWS, KEYS, WIDTH, FULL, CAPPED=CAPPED)
    own, at, inside, given, unit, logit = rows_of_program(
        tl.program_id(0), q, k, mask, factor, row_queries, q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch,
        mask_head, mask_row, mask_column, heads, groups, rows_total, queries, keys, offset, width, scale, cap, C,
        FACTORED,
    )  # fmt: skip
    outer, inner, _high = spans_of_rows(row_queries, own.index, rows_total, given.sight, C)
    row_at = own.batch_head * rows_total + at
    shift = load_row(row_shift, row_at, inside, SHIFTED, 0.0) / LN2
    state = no_keys(keys, ROWS)
    leader = tl.full([ROWS, CLASSES], float("-inf"), tl.float32)
    zeros = tl.zeros([ROWS, CLASSES], tl.float32)
    reference, top, sums = zeros, zeros, Sums(zeros, zeros, zeros, zeros, zeros)
    for whole in tl.static_range(2):
        state, leader, reference, top, sums = _fold(
            state, leader, reference, top, sums, inner if whole else outer, given, unit, shift, C, M, not whole, LEVELS
        )

    # The classes as one row, in units of the weight of its largest key.
    peak = tl.reduce(leader, 1, larger)
    row_reference, row_top, _b = _level(peak, unit, shift, M)
    drop = reference - row_reference[:, None]
    ratio, bits = _ratio(top, row_top[:, None], drop)
    is_peak = leader == peak[:, None]
    peaks = tl.sum(is_peak.to(tl.float32), 1)  # equal ones count among the others, all but one
    spare = tl.where((peaks > 0) & (row_top > 0), peaks - 1.0, 0.0)
    alone = tl.where(is_peak, 0.0, ratio)
    row_others = tl.sum(ratio * sums.others + alone, 1) + spare
    row_e_log_e = tl.sum(ratio * (sums.e_log_e + bits * sums.others) + alone * bits, 1)
    row_squares = tl.sum(ratio * ratio * sums.squares + alone * alone, 1) + spare

    # The sink, and what all are divided by.
    has_sink, sink = state.first < keys, state.sink
    sink_reference, sink_top, sink_b = _level(tl.where(has_sink, sink, float("-inf")), unit, shift, M)
    norm = tl.full([ROWS], float("nan"), tl.float32)
    if NORMALISED:
        common = tl.maximum(sink_reference, row_reference)
        _r, _a, leader_b = _level(leader, unit[:, None], shift[:, None], M)
        total = tl.sum((sums.total + leader_b) * tl.exp2(reference - common[:, None]), 1)
        total += sink_b * tl.exp2(sink_reference - common) + floor * tl.exp2(-common)
        inverse = inverse_of(total)
        sink_top = sink_top * tl.exp2(sink_reference - common) * inverse
        row_top = row_top * tl.exp2(row_reference - common) * inverse
    else:
        none = leader == float("-inf")
        z = tl.where(none, 0.0, leader) * unit[:, None] + shift[:, None]
        _a, slope, _b = SLOPES(z, z * 0.0, P, FAST)
        steepest = tl.maximum(sums.steepest, tl.where(none, 0.0, slope))
        _a, slope, _b = SLOPES(sink * unit + shift, sink * 0.0, P, FAST)
        gain = tl.abs(load_row(factor, row_at, inside, FACTORED, 1.0))
        norm = gain * tl.maximum(tl.max(steepest, 1), tl.where(has_sink, slope, 0.0))

    n = visible_keys(state.n, given, C)
    largest, least = extreme_logits(peak, state.smallest, logit)
    column = tl.num_programs(0).to(tl.int64) // tl.cdiv(rows_total, ROWS) * rows_total
    store_columns(
        out + row_at, column, inside,
        (
            n.to(tl.float32), sink * logit * LN2, largest, least, sink_top, row_top, row_others, row_e_log_e * LN2,
            row_squares, norm,
        ),
    )  # fmt: skip
