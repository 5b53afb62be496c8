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
from attnorm.kernels.maps import INVERTIBLE, LN2, NO_REFERENCE, times_log2
from attnorm.kernels.one_pass import inverse_of, reference_of
from attnorm.kernels.row_tiles import (
    CLASSES,
    RowState,
    by_class,
    extreme_logits,
    halves,
    key_tile,
    larger,
    matrix_of_poles,
    neighbors,
    no_keys,
    pick_root,
    pick_row,
    pick_secular,
    rows_of_program,
    share_of,
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
    "jacobian_norm",  # NaN for a map with a denominator: softpick_norms
)
JACOBIAN_NORM = tl.constexpr(COLUMNS.index("jacobian_norm"))


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
    e_log_e += tl.sum(times_log2(e, FAST), 1)
    squares += tl.sum(e * e, 1)
    return others, e_log_e, squares


@triton.jit
def _class_sums(x):
    even, odd = neighbors(x)
    return tl.sum(by_class(even + odd), 1)


@triton.jit
def _class_largest(x):
    even, odd = neighbors(x)
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
        even, odd = neighbors(low)
        smallest = smaller(state.smallest, tl.min(by_class(smaller(even, odd)), 1))
        largest = larger(largest, _class_largest(high))
        state = RowState(state.n + count, first, state.sink + sink, smallest)

        # Weights relative to 2^reference, which may rise with the largest logit of the row.
        z = s * unit[:, None] + shift[:, None]
        if M.REFERENCE != NO_REFERENCE:
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
            p = a * M.LIFT if M.REFERENCE == NO_REFERENCE else a
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=C.PRECISION)

        # A knock-out: the winner of each class is its largest weight, and every other key loses once.
        even, odd = neighbors(a)
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
        inverse = 1.0 / tl.where(top > INVERTIBLE, top, float("inf"))
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
    C: tl.constexpr = Constants(CAUSAL, False, MASKED, PRECISION, ROWS, KEYS, WIDTH, FULL, CAPPED=CAPPED, OUTPUT=OUTPUT)
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
    if REFERENCE != NO_REFERENCE:
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


@triton.jit
def _fold_two_largest(one, two, span, given, C: tl.constexpr, EDGE: tl.constexpr, LEVELS: tl.constexpr):
    """The largest product and the second largest one of each class, with some tiles of keys added."""
    for tile in range(span.tiles):
        nothing = tl.zeros([C.ROWS], tl.int32) - 1  # no key is set apart
        s, seen, _first, _sink, _count = key_tile(tile_of_span(span, tile, C), given, nothing, C, EDGE)
        if EDGE:
            s = tl.where(seen, s, float("-inf"))
        even, odd = neighbors(s)
        two = tl.maximum(two, tl.max(by_class(smaller(even, odd)), 1))
        winners = larger(even, odd)
        for _ in tl.static_range(LEVELS):
            left, right = halves(winners)
            two = tl.maximum(two, tl.max(by_class(smaller(left, right)), 1))
            winners = larger(left, right)
        two = tl.maximum(two, smaller(one, winners))
        one = larger(one, winners)
    return one, two


@triton.jit
def _slopes_of_tile(at, given, unit, base, second, shift, C: tl.constexpr, EDGE: tl.constexpr):
    """Of the keys of a tile: slopes in units of the second key's and their shares, and e and u of the positive keys.

    The first key counts as a second one.
    """
    s, seen, _first, _sink, _count = key_tile(at, given, tl.zeros([C.ROWS], tl.int32) - 1, C, EDGE)
    z = s * unit[:, None]
    y = tl.exp2(tl.minimum((s - base[:, None]) * unit[:, None], 0.0))
    share = share_of(z)
    positive, negative = z > 0, z < 0
    if EDGE:
        positive, negative = positive & seen, negative & seen
    y_positive = tl.where(positive, y, 0.0)
    e = y_positive * y_positive
    u = tl.minimum(y_positive * share, second[:, None]) - shift[:, None] * e
    return y, share, negative, e, u


@triton.jit
def _fold_moments(sums, span, given, unit, base, second, shift, C: tl.constexpr, EDGE: tl.constexpr):
    for tile in range(span.tiles):
        at = tile_of_span(span, tile, C)
        y, share, negative, e, u = _slopes_of_tile(at, given, unit, base, second, shift, C, EDGE)
        ee, eu, uu = e * e, e * u, u * u
        sums = (
            sums[0] + _class_sums(e), sums[1] + _class_sums(u),
            sums[2] + _class_sums(ee), sums[3] + _class_sums(eu), sums[4] + _class_sums(uu),
            sums[5] + _class_sums(e * ee), sums[6] + _class_sums(e * eu), sums[7] + _class_sums(e * uu),
            sums[8] + _class_sums(tl.where(negative, y * y, 0.0)),
            sums[9] + _class_sums(tl.where(negative, share, 0.0)),
        )  # fmt: skip
    return sums


@triton.jit
def _fold_pick_poles(sums, span, given, unit, base, second, shift, d, C: tl.constexpr, EDGE: tl.constexpr):
    for tile in range(span.tiles):
        at = tile_of_span(span, tile, C)
        y, _part, _negative, e, u = _slopes_of_tile(at, given, unit, base, second, shift, C, EDGE)
        inverse = 1.0 / (d[:, None] + (1.0 - y) * (1.0 + y))
        ee, eu, uu = e * e * inverse, e * u * inverse, u * u * inverse
        sums = (
            sums[0] + _class_sums(ee), sums[1] + _class_sums(eu), sums[2] + _class_sums(uu),
            sums[3] + _class_sums(ee * inverse), sums[4] + _class_sums(eu * inverse),
            sums[5] + _class_sums(uu * inverse),
        )  # fmt: skip
    return sums


@triton.jit
def softpick_norms(
    q, k, mask, factor, row_queries, out,
    q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch, mask_head, mask_row, mask_column,
    heads, groups, rows_total, queries, keys, offset, width, scale, cap, floor,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, CAPPED: tl.constexpr, FACTORED: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
    LEVELS: tl.constexpr, PASSES: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """The norm of the Jacobian of softpick: theory.rank_two_singular_values._softpick.

    out: as map_sums left it; the column of the norm is written. One pass over the keys for the two largest, one for
    moments, and PASSES for the poles.
    """
    C: tl.constexpr = Constants(CAUSAL, False, MASKED, PRECISION, ROWS, KEYS, WIDTH, FULL, CAPPED=CAPPED)
    own, at, inside, given, unit, _logit = rows_of_program(
        tl.program_id(0), q, k, mask, factor, row_queries, q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch,
        mask_head, mask_row, mask_column, heads, groups, rows_total, queries, keys, offset, width, scale, cap, C,
        FACTORED,
    )  # fmt: skip
    outer, inner, _high = spans_of_rows(row_queries, own.index, rows_total, given.sight, C)
    column = tl.num_programs(0).to(tl.int64) // tl.cdiv(rows_total, ROWS) * rows_total
    row_at = own.batch_head * rows_total + at
    one = tl.full([ROWS, CLASSES], float("-inf"), tl.float32)
    two = one
    for whole in tl.static_range(2):
        one, two = _fold_two_largest(one, two, inner if whole else outer, given, C, not whole, LEVELS)
    first = tl.max(one, 1)
    is_first = one == first[:, None]
    base = tl.maximum(tl.max(tl.where(is_first, float("-inf"), one), 1), tl.max(two, 1))
    base = tl.where(tl.sum(is_first.to(tl.int32), 1) > 1, first, base)
    base = tl.maximum(base, 0.0)  # 0: there is no second positive key
    z1, z2 = tl.maximum(first, 0.0) * unit, base * unit
    second = share_of(z2)
    shift = tl.where(z1 - z2 < 1.0, second, 0.0)

    zeros = tl.zeros([ROWS, CLASSES], tl.float32)
    sums = (zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros)
    for whole in tl.static_range(2):
        sums = _fold_moments(sums, inner if whole else outer, given, unit, base, second, shift, C, not whole)
    # The first key and the second one are no others: e = 1, u = u2.
    tops = tl.where(z2 > 0, 2.0, tl.where(z1 > 0, 1.0, 0.0))
    u2 = second - shift
    e, u = tl.maximum(tl.sum(sums[0], 1) - tops, 0.0), tl.sum(sums[1], 1) - tops * u2
    ee, eu, uu = _without(sums[2], sums[3], sums[4], tops, u2)
    see, seu, suu = _without(sums[5], sums[6], sums[7], tops, u2)
    row, low, high = pick_row(z1, z2, second, shift, tl.sum(sums[8], 1), tl.sum(sums[9], 1) + floor, e, u, ee, eu, uu)
    norm_alone = row.g2 * tl.sqrt(tl.maximum(low, 0.0))
    unused = row.g1 * 0.0
    poles = matrix_of_poles(ee, eu, uu, see, seu, suu, unused, unused + 1.0, unused, True)
    d = pick_root(poles, row, low, high, STEPS)
    for _ in range(PASSES):
        at_d = d.to(tl.float32)
        d = at_d.to(tl.float64)
        pole_sums = (zeros, zeros, zeros, zeros, zeros, zeros)
        for whole in tl.static_range(2):
            pole_sums = _fold_pick_poles(
                pole_sums, inner if whole else outer, given, unit, base, second, shift, at_d, C, not whole
            )
        ee, eu, uu = _without(pole_sums[0], pole_sums[1], pole_sums[2], tops / at_d, u2)
        see, seu, suu = _without(pole_sums[3], pole_sums[4], pole_sums[5], tops / (at_d * at_d), u2)
        above = pick_secular(d, row, ee, eu, uu) > 0
        low, high = tl.where(above, low, d), tl.where(above, d, high)
        poles = matrix_of_poles(ee, eu, uu, see, seu, suu, 1.0 / (1.0 + d), 1.0 / d, d, False)
        d = pick_root(poles, row, low, high, STEPS)
    gain = tl.abs(load_row(factor, row_at, inside, FACTORED, 1.0))
    norm = tl.where(z2 > 0, row.g2 * tl.sqrt(1.0 + d), tl.where(z1 > 0, norm_alone, 0.0))
    tl.store(out + JACOBIAN_NORM * column + row_at, (gain * norm).to(tl.float32), mask=inside)


@triton.jit
def _without(ee, eu, uu, tops, u2):
    """The sums of the classes without those of keys with e = 1 and u = u2."""
    ee = tl.maximum(tl.sum(ee, 1) - tops, 0.0).to(tl.float64)
    uu = tl.maximum(tl.sum(uu, 1) - tops * u2 * u2, 0.0).to(tl.float64)
    return ee, (tl.sum(eu, 1) - tops * u2).to(tl.float64), uu
