"""Sums of every row of attention by a map of kernels/maps.py, and its output if asked for, in one pass over the keys.

For maps whose weights rise with the logit and are at least 0, and whose reference is NONE or AT_LEAST_ZERO. Two keys of
a row are set apart: the first visible one (the sink) and the largest of the others. The remaining keys are summed in
units of the weight of that largest one, so no square underflows or overflows and nothing is ever subtracted.
statistics_from_sums.py turns the sums into statistics.

Every class of keys (see row_tiles.py) has its own largest key and sums, which are joined at the end. A weight is
computed once, for the sums and for its product with a value; the value of the sink is added at the end.
"""

from collections import namedtuple
from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnorm.kernels.blocks import Constants, keys_of_head, load_row, load_tile, matrix_of_head, store_tile
from attnorm.kernels.maps import LN2, log2
from attnorm.kernels.one_pass import inverse_of, reference_of
from attnorm.kernels.row_tiles import (
    CLASSES,
    RowState,
    by_class,
    extreme_logits,
    halves,
    key_tile,
    larger,
    neighbours,
    no_keys,
    rows_of_program,
    sink_values,
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
RisingMap = namedtuple("RisingMap", "WEIGHTS SLOPES P FAST REFERENCE NORMALISED LIFT OUTPUT")


class Sums(NamedTuple):
    """Of each class: its largest weight, and sums over its other keys in units of that weight."""

    leader: Any
    others: Any
    e_log_e: Any
    squares: Any
    total: Any  # of the denominator, over all keys of the class
    steepest: Any  # slope
    largest: Any  # product


class Output(NamedTuple):
    """Of each row: log2 of the unit of its weights, and the sum of weights times values if OUTPUT."""

    reference: Any
    acc: Any


@triton.jit
def _ratio(before, top):
    """The unit before in units of now, and its logarithm in bits; 0 where there was none."""
    some = (before > 0) & (top > 0)
    ratio = tl.where(some, before / tl.where(some, top, 1.0), 0.0)
    return ratio, tl.where(ratio > 0, tl.log2(tl.where(ratio > 0, ratio, 1.0)), 0.0)


@triton.jit
def _add(lost, inverse, others, e_log_e, squares, FAST: tl.constexpr):
    """Add weights to the sums of each class."""
    e = by_class(lost) * inverse[:, None, :]
    others += tl.sum(e, 1)
    e_log_e += tl.sum(e * log2(tl.where(e > 0, e, 1.0), FAST), 1)
    squares += tl.sum(e * e, 1)
    return others, e_log_e, squares


@triton.jit
def _class_sums(x):
    even, odd = neighbours(x)
    return tl.sum(by_class(even + odd), 1)


@triton.jit
def _class_largest(x):
    even, odd = neighbours(x)
    return tl.max(by_class(larger(even, odd)), 1)


@triton.jit
def _reference_of_products(largest, unit, shift, M: tl.constexpr):
    """The reference of rows with these largest products, -inf where there is none."""
    return reference_of(tl.where(largest == float("-inf"), largest, largest * unit + shift), M.REFERENCE, True)


@triton.jit
def _fold(
    state, sums, output, span, given, v, unit, shift,
    C: tl.constexpr, M: tl.constexpr, EDGE: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """The state of a block of rows with some tiles of keys added."""
    for tile in range(span.tiles):
        at = tile_of_span(span, tile, C)
        s, seen, first, sink, count = key_tile(at, given, state.first, C, EDGE)
        leader, others, e_log_e, squares, total, steepest, largest = sums
        reference, acc = output
        low, high = s, s
        if EDGE:
            low, high = tl.where(seen, s, float("inf")), tl.where(seen, s, float("-inf"))
        even, odd = neighbours(low)
        smallest = smaller(state.smallest, tl.min(by_class(smaller(even, odd)), 1))
        largest = larger(largest, _class_largest(high))
        state = RowState(state.n + count, first, state.sink + sink, smallest)

        # Weights relative to 2^reference, which may rise with the largest logit of the row.
        z = s * unit[:, None] + shift[:, None]
        if M.REFERENCE != 0:
            before = reference
            reference = _reference_of_products(tl.max(largest, 1), unit, shift, M)
            shrink = tl.exp2(before - reference)
            leader, total = leader * shrink[:, None], total * shrink[:, None]
            if M.OUTPUT:
                acc = acc * shrink[:, None]
        if M.NORMALISED:
            a, b = M.WEIGHTS(z, reference[:, None], M.P, M.FAST)
            if EDGE:
                b = tl.where(seen, b, 0.0)
            total += _class_sums(b)
        else:
            a, slope, _b = M.SLOPES(z, reference[:, None], M.P, M.FAST)
            if EDGE:
                slope = tl.where(seen, slope, 0.0)
            steepest = tl.maximum(steepest, _class_largest(slope))
        if EDGE:
            a = tl.where(seen, a, 0.0)
        if M.OUTPUT:
            v_tile = load_tile(v, at + tl.arange(0, C.COLUMNS), C.WIDTH, EDGE, C.FULL)
            p = a * M.LIFT if M.REFERENCE == 0 else a
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=C.PRECISION)

        # A knock-out: the winner of each class is its largest weight, and every other key loses once.
        even, odd = neighbours(a)
        winners = larger(even, odd)
        for _ in tl.static_range(LEVELS):
            left, right = halves(winners)
            winners = larger(left, right)
        demoted = smaller(leader, winners)
        top = larger(leader, winners)
        ratio, bits = _ratio(leader, top)
        e_log_e = ratio * (e_log_e + bits * others)
        others = others * ratio
        squares = squares * ratio * ratio
        inverse = 1.0 / tl.where(top > 0, top, float("inf"))
        others, e_log_e, squares = _add(demoted, inverse, others, e_log_e, squares, M.FAST)
        others, e_log_e, squares = _add(smaller(even, odd), inverse, others, e_log_e, squares, M.FAST)
        winners = larger(even, odd)
        for _ in tl.static_range(LEVELS):
            left, right = halves(winners)
            others, e_log_e, squares = _add(smaller(left, right), inverse, others, e_log_e, squares, M.FAST)
            winners = larger(left, right)
        sums = Sums(top, others, e_log_e, squares, total, steepest, largest)
        output = Output(reference, acc)
    return state, sums, output


@triton.jit
def map_sums(
    q, k, mask, factor, row_shift, row_queries, v, output, reference_out, out,
    q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch, mask_head, mask_row, mask_column,
    heads, groups, rows_total, queries, keys, offset, width, scale, cap, floor,
    v_batch, v_head, v_row, o_batch, o_head, o_row,
    WEIGHTS: tl.constexpr, SLOPES: tl.constexpr, P: tl.constexpr, FAST: tl.constexpr, REFERENCE: tl.constexpr,
    NORMALISED: tl.constexpr, LIFT: tl.constexpr, SHIFTED: tl.constexpr, OUTPUT: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, CAPPED: tl.constexpr, FACTORED: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """q: (B, H, R, D), the rows of the queries `row_queries` in ascending order; out: (COLUMNS, B, H, R).

    factor, row_shift: (B, H, R), of natural logits. floor: added to the denominator. OUTPUT: multiply with the values
    v (B, G, K, D) too; output: (B, H, R, D); reference_out: (B, H, R), log2 of what a row of a normalised map is
    divided by, for the backward pass.
    """
    M: tl.constexpr = RisingMap(WEIGHTS, SLOPES, P, FAST, REFERENCE, NORMALISED, LIFT, OUTPUT)
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
    zeros = tl.zeros([ROWS, CLASSES], tl.float32)
    sums = Sums(zeros, zeros, zeros, zeros, zeros, zeros, zeros + float("-inf"))
    no_unit = tl.zeros([ROWS], tl.float32)
    result = Output(no_unit, no_unit)
    if OUTPUT:
        v = keys_of_head(v, own, groups, v_batch, v_head, v_row, keys, width)
        result = Output(no_unit, tl.zeros([ROWS, WIDTH], tl.float32))
    for whole in tl.static_range(2):
        state, sums, result = _fold(
            state, sums, result, inner if whole else outer, given, v, unit, shift, C, M, not whole, LEVELS
        )

    # The classes as one row, in units of its largest weight.
    top = tl.reduce(sums.leader, 1, larger)
    ratio, bits = _ratio(sums.leader, top[:, None])
    is_top = sums.leader == top[:, None]
    tops = tl.sum(is_top.to(tl.float32), 1)  # equal ones count among the others, all but one
    spare = tl.where(top > 0, tops - 1.0, 0.0)
    alone = tl.where(is_top, 0.0, ratio)
    row_others = tl.sum(ratio * sums.others + alone, 1) + spare
    row_e_log_e = tl.sum(ratio * (sums.e_log_e + bits * sums.others) + alone * bits, 1)
    row_squares = tl.sum(ratio * ratio * sums.squares + alone * alone, 1) + spare

    # The sink, and what all are divided by.
    has_sink, sink = state.first < keys, state.sink
    sink_z = sink * unit + shift
    sink_reference, acc_unit, sink_unit = no_unit, no_unit + 1.0 / LIFT, no_unit + 1.0
    norm = tl.full([ROWS], float("nan"), tl.float32)
    if REFERENCE != 0:
        sink_reference = _reference_of_products(tl.where(has_sink, sink, float("-inf")), unit, shift, M)
    sink_a, sink_b = WEIGHTS(sink_z, sink_reference, P, FAST)
    sink_a, sink_b = tl.where(has_sink, sink_a, 0.0), tl.where(has_sink, sink_b, 0.0)
    if NORMALISED:
        common = tl.maximum(sink_reference, result.reference)
        shrink, sink_shrink = tl.exp2(result.reference - common), tl.exp2(sink_reference - common)
        total = tl.sum(sums.total, 1) * shrink + sink_b * sink_shrink + floor * tl.exp2(-common)
        inverse = inverse_of(total)
        acc_unit, sink_unit = shrink * inverse, sink_shrink * inverse
        top = top * acc_unit
        if OUTPUT:
            tl.store(reference_out + row_at, common + tl.log2(tl.where(total > 0, total, 1.0)), mask=inside)
    else:
        _a, slope, _b = SLOPES(sink_z, sink_reference, P, FAST)
        gain = tl.abs(load_row(factor, row_at, inside, FACTORED, 1.0))
        norm = gain * tl.maximum(tl.max(sums.steepest, 1), tl.where(has_sink, slope, 0.0))
    sink_a = sink_a * sink_unit
    if OUTPUT:
        acc = result.acc * acc_unit[:, None] + sink_a[:, None] * sink_values(v, state.first, C)
        rows_out = matrix_of_head(output, own.batch, own.head, o_batch, o_head, o_row, rows_total, width)
        store_tile(rows_out, acc, at, WIDTH)

    n = visible_keys(state.n, given, C)
    largest, least = extreme_logits(tl.reduce(sums.largest, 1, larger), state.smallest, logit)
    column = tl.num_programs(0).to(tl.int64) // tl.cdiv(rows_total, ROWS) * rows_total
    store_columns(
        out + row_at, column, inside,
        (
            n.to(tl.float32), sink * logit * LN2, largest, least, sink_a, top, row_others, row_e_log_e * LN2,
            row_squares, norm,
        ),
    )  # fmt: skip
