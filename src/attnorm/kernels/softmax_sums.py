"""Sums of every row of softmax attention in one pass over the keys, without the matrix of logits.

Two keys of a row are set apart: the first visible one (the sink) and the largest of the others. The remaining keys are
summed relative to the largest among themselves, the runner-up, so no sum underflows and nothing is ever subtracted.
statistics_from_sums.py turns the sums into the statistics of a row.

Weights depend on differences of logits. In float32 products are subtracted before they are scaled: at a logit of 10,000
the rounding of a scaled product would change weights by 1e-3. In half precision one operation does both.

Every class of keys (see row_tiles.py) has its own largest key, runner-up and sums, which are joined at the end: no
thread waits for another one within a tile.

`softmax_sums` reads queries and keys; `softmax_output` reads values too and writes the output of attention as well;
`pole_sums` refines the norm of the Jacobian.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnorm.kernels.blocks import Constants, keys_of_head, load_tile, matrix_of_head, store_tile
from attnorm.kernels.maps import LN2, LOG2E
from attnorm.kernels.one_pass import inverse_of
from attnorm.kernels.row_tiles import (
    CLASSES,
    RowState,
    by_class,
    halves,
    key_tile,
    larger,
    neighbors,
    no_keys,
    rows_of_program,
    smaller,
    spans_of_rows,
    store_columns,
    tile_of_span,
    visible_keys,
)

# The columns of the result. Extremes are natural logits before the factor; the sums are over keys other than the first
# and the largest, e = exp(z - runner_up) with z = factor * logit.
COLUMNS = (
    "n",
    "sink",  # logit of the first visible key
    "largest",  # of the other keys
    "smallest",
    "level",  # the largest z of the other keys
    "sink_above",  # z of the first visible key minus the level
    "drop",  # the second largest z of the other keys minus the level
    "first_power",  # sum e
    "e_log_e",  # sum e log e
    "second_power",  # sum e^2
    "third_power",
    "fourth_power",
)


class Sums(NamedTuple):
    """Sums over the keys of each class so far, relative to its runner-up, and the two products that are set apart."""

    leader: Any
    runner_up: Any
    s1: Any
    e_log_e: Any
    s2: Any
    s3: Any
    s4: Any
    s1_lost: Any  # by rounding, in float32
    e_log_e_lost: Any
    s2_lost: Any


@triton.jit
def softmax_sums(
    q, k, mask, factor, row_queries, out,
    q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch, mask_head, mask_row, mask_column,
    heads, groups, rows_total, queries, keys, offset, width, scale, cap,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, CAPPED: tl.constexpr, FACTORED: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """q: (B, H, R, D), the rows of the queries `row_queries` in ascending order; out: (COLUMNS, B, H, R)."""
    C: tl.constexpr = Constants(CAUSAL, False, MASKED, PRECISION, ROWS, KEYS, WIDTH, FULL, CAPPED=CAPPED)
    own, at, inside, given, unit, logit = rows_of_program(
        tl.program_id(0), q, k, mask, factor, row_queries, q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch,
        mask_head, mask_row, mask_column, heads, groups, rows_total, queries, keys, offset, width, scale, cap, C,
        FACTORED,
    )  # fmt: skip
    outer, inner, _high = spans_of_rows(row_queries, own.index, rows_total, given.sight, C)
    state, sums = no_keys(keys, ROWS), _no_sums(ROWS)
    for whole in tl.static_range(2):
        state, sums = _fold(state, sums, inner if whole else outer, given, unit, C, not whole, LEVELS)
    values = _columns_of(state, _join_classes(sums, unit), given, unit, logit, C)
    column = tl.num_programs(0).to(tl.int64) // tl.cdiv(rows_total, ROWS) * rows_total
    store_columns(out + (own.batch_head * rows_total + at), column, inside, values)


@triton.jit
def _no_sums(ROWS: tl.constexpr):
    leader = tl.full([ROWS, CLASSES], float("-inf"), tl.float32)
    s1 = tl.zeros([ROWS, CLASSES], tl.float32)
    return Sums(leader, leader, s1, s1, s1, s1, s1, s1, s1, s1)


@triton.jit
def _fold(state, sums, span, given, unit, C: tl.constexpr, EDGE: tl.constexpr, LEVELS: tl.constexpr):
    """The state of a block of rows with some tiles of keys added."""
    for tile in range(span.tiles):
        s, state = _products_of_tile(tile_of_span(span, tile, C), given, state, C, EDGE)
        winners, second = _winners_of(s, LEVELS)
        sums = _add_products(sums, s, winners, second, unit, C, EDGE, LEVELS)
    return state, sums


@triton.jit
def _products_of_tile(at, given, state, C: tl.constexpr, EDGE: tl.constexpr):
    """The products of a tile, -inf where they do not count, and the state with the tile added."""
    s, seen, first, found_sink, count = key_tile(at, given, state.first, C, EDGE)
    n, sink = state.n, state.sink
    if EDGE:
        n += count
        sink += found_sink
        lows = tl.where(seen, s, float("inf"))
        s = tl.where(seen, s, float("-inf"))
    else:
        lows = s
    even, odd = neighbors(lows)
    return s, RowState(n, first, sink, smaller(state.smallest, tl.min(by_class(smaller(even, odd)), 1)))


@triton.jit
def _winners_of(s, LEVELS: tl.constexpr):
    """A knock-out: the winner of each class is its largest key, and every other key loses once. And the second."""
    even, odd = neighbors(s)
    second = tl.max(by_class(smaller(even, odd)), 1)
    winners = larger(even, odd)
    for _ in tl.static_range(LEVELS):
        left, right = halves(winners)
        second = tl.maximum(second, tl.max(by_class(smaller(left, right)), 1))
        winners = larger(left, right)
    return winners, second


@triton.jit
def _base_of(reference, unit, C: tl.constexpr):
    """What `_above` subtracts, for logits relative to that of the reference, a product."""
    if C.PRECISION == "tf32":
        reference = reference * unit
    return reference


@triton.jit
def _above(products, base, unit, C: tl.constexpr):
    """Logits in bits relative to a base."""
    if C.PRECISION == "tf32":
        above = products * unit - base
    else:
        above = (products - base) * unit
    return above


@triton.jit
def _add_products(sums, s, winners, second, unit, C: tl.constexpr, EDGE: tl.constexpr, LEVELS: tl.constexpr):
    """The sums with a tile of products added, whose winners and seconds are known."""
    leader, runner_up, s1, e_log_e, s2, s3, s4, s1_lost, e_log_e_lost, s2_lost = sums
    demoted = smaller(leader, winners)
    new_runner_up = tl.maximum(tl.maximum(runner_up, second), demoted)
    reference = tl.where(new_runner_up == float("-inf"), 0.0, new_runner_up) if EDGE else new_runner_up
    drop = (runner_up - reference) * unit[:, None]
    fall = (demoted - reference) * unit[:, None]
    shrink, e = tl.exp2(drop), tl.exp2(fall)
    if EDGE:
        none, first_one = runner_up == float("-inf"), demoted == float("-inf")
        drop, shrink = tl.where(none, 0.0, drop), tl.where(none, 0.0, shrink)
        fall, e = tl.where(first_one, 0.0, fall), tl.where(first_one, 0.0, e)
    square, e_square = shrink * shrink, e * e
    e_log_e = shrink * (e_log_e + drop * s1)
    s1, s2, s3, s4 = s1 * shrink, s2 * square, s3 * square * shrink, s4 * square * square
    EXACT: tl.constexpr = C.PRECISION != "tf32"
    if EXACT:
        before = s1, e_log_e, s2
        e_log_e_lost = shrink * (e_log_e_lost + drop * s1_lost)
        s1_lost, s2_lost = s1_lost * shrink, s2_lost * square
        s1, e_log_e, s2 = e, e * fall, e_square
    else:
        s1, e_log_e, s2 = s1 + e, e_log_e + e * fall, s2 + e_square
    s3, s4 = s3 + e_square * e, s4 + e_square * e_square
    leader = larger(leader, winners)

    base = _base_of(reference, unit[:, None], C)
    even, odd = neighbors(s)
    s1, e_log_e, s2, s3, s4 = _powers(smaller(even, odd), unit, base, s1, e_log_e, s2, s3, s4, C, EDGE)
    winners = larger(even, odd)
    for _ in tl.static_range(LEVELS):
        left, right = halves(winners)
        s1, e_log_e, s2, s3, s4 = _powers(smaller(left, right), unit, base, s1, e_log_e, s2, s3, s4, C, EDGE)
        winners = larger(left, right)
    if EXACT:
        s1, s1_lost = _add(before[0], s1, s1_lost)
        e_log_e, e_log_e_lost = _add(before[1], e_log_e, e_log_e_lost)
        s2, s2_lost = _add(before[2], s2, s2_lost)
    return Sums(leader, new_runner_up, s1, e_log_e, s2, s3, s4, s1_lost, e_log_e_lost, s2_lost)


@triton.jit
def _add(total, more, lost):
    """The sum of all three and what its rounding loses, as Kahan (1965): a flat row has thousands of equal terms."""
    more += lost
    new = total + more
    return new, more - (new - total)


@triton.jit
def _powers(lost, unit, base, s1, e_log_e, s2, s3, s4, C: tl.constexpr, EDGE: tl.constexpr):
    """Add the sums of e = 2^x to those of each class, with x the logits of the keys that lost, above the base."""
    lost = by_class(lost)
    x = _above(lost, base[:, None, :], unit[:, None, None], C)
    if EDGE:
        hidden = lost == float("-inf")  # times a factor of 0 it would be NaN
        x = tl.where(hidden, 0.0, x)
        e = tl.where(hidden, 0.0, tl.exp2(x))
    else:
        e = tl.exp2(x)
    square = e * e
    s1 += tl.sum(e, 1)
    e_log_e += tl.sum(e * x, 1)
    s2 += tl.sum(square, 1)
    s3 += tl.sum(square * e, 1)
    s4 += tl.sum(square * square, 1)
    return s1, e_log_e, s2, s3, s4


@triton.jit
def _join_classes(sums, unit):
    """The sums of all classes as one. The runner-up is in bits, relative to the leader, a product."""
    leader = tl.max(sums.leader, 1)
    leaders, runners_up = _below(sums.leader, leader, unit), _below(sums.runner_up, leader, unit)
    _, runner_up, s1, e_log_e, s2, s3, s4 = tl.reduce(
        (leaders, runners_up, sums.s1, sums.e_log_e, sums.s2, sums.s3, sums.s4), 1, _join
    )
    return Sums(leader, runner_up, s1, e_log_e, s2, s3, s4, sums.s1_lost, sums.e_log_e_lost, sums.s2_lost)


@triton.jit
def _below(products, leader, unit):
    """Products of classes in bits, relative to the leader of the row; -inf stays -inf also with a factor of 0."""
    missing = products == float("-inf")
    return tl.where(missing, products, (products - leader[:, None]) * unit[:, None])


@triton.jit
def _columns_of(state, sums, given, unit, logit, C: tl.constexpr):
    """The values of COLUMNS from the sums of all classes."""
    leader = sums.leader
    extremes = leader * logit, tl.min(state.smallest, 1) * logit
    empty = leader == float("-inf")
    largest = tl.where(empty, float("-inf"), tl.maximum(extremes[0], extremes[1]))
    least = tl.where(empty, float("inf"), tl.minimum(extremes[0], extremes[1]))
    level = tl.where(empty, leader, leader * unit)
    sink_above = tl.where(empty, 0.0, (state.sink - leader) * unit)
    return (
        visible_keys(state.n, given, C).to(tl.float32), state.sink * logit * LN2, largest * LN2, least * LN2,
        level * LN2, sink_above * LN2, sums.runner_up * LN2, sums.s1, sums.e_log_e * LN2, sums.s2, sums.s3, sums.s4,
    )  # fmt: skip


@triton.jit
def _join(
    leader_a, runner_up_a, s1_a, tilt_a, s2_a, s3_a, s4_a,
    leader_b, runner_up_b, s1_b, tilt_b, s2_b, s3_b, s4_b,
):  # fmt: skip
    """The sums of two classes as those of one. Leaders and runners-up are in bits."""
    demoted = smaller(leader_a, leader_b)
    runner_up = tl.maximum(tl.maximum(runner_up_a, runner_up_b), demoted)
    base = tl.where(runner_up == float("-inf"), 0.0, runner_up)
    drop_a = tl.where(runner_up_a == float("-inf"), 0.0, runner_up_a - base)
    drop_b = tl.where(runner_up_b == float("-inf"), 0.0, runner_up_b - base)
    a, b = tl.exp2(drop_a), tl.exp2(drop_b)  # sums without a runner-up are 0
    fall = tl.where(demoted == float("-inf"), 0.0, demoted - base)
    e = tl.where(demoted == float("-inf"), 0.0, tl.exp2(fall))
    return (
        larger(leader_a, leader_b),
        runner_up,
        a * s1_a + b * s1_b + e,
        a * (tilt_a + drop_a * s1_a) + b * (tilt_b + drop_b * s1_b) + e * fall,
        a * a * s2_a + b * b * s2_b + e * e,
        a * a * a * s3_a + b * b * b * s3_b + e * e * e,
        a * a * a * a * s4_a + b * b * b * b * s4_b + e * e * e * e,
    )


@triton.jit
def softmax_output(
    q, k, mask, factor, row_queries, v, learned_sink, output, reference_out, out,
    q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch, mask_head, mask_row, mask_column,
    heads, groups, rows_total, queries, keys, offset, width, scale, cap,
    v_batch, v_head, v_row, o_batch, o_head, o_row,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, CAPPED: tl.constexpr, FACTORED: tl.constexpr, SINK: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """Arguments of softmax_sums; v: (B, G, K, D); learned_sink: (H,) if SINK; output: (B, H, R, D).

    reference_out: (B, H, R), log2 of what a row is divided by, for the backward pass; 0 for rows that see nothing.
    The products of queries and keys are computed once. Weights for the output are relative to the largest logit so far;
    the sums keep their own references. The exponentials are therefore computed twice per key, but the multiplication
    with the values can run while the sums are added, which give the denominator too.
    """
    C: tl.constexpr = Constants(CAUSAL, False, MASKED, PRECISION, ROWS, KEYS, WIDTH, FULL, CAPPED=CAPPED, OUTPUT=True)
    own, at, inside, given, unit, logit = rows_of_program(
        tl.program_id(0), q, k, mask, factor, row_queries, q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch,
        mask_head, mask_row, mask_column, heads, groups, rows_total, queries, keys, offset, width, scale, cap, C,
        FACTORED,
    )  # fmt: skip
    v = keys_of_head(v, own, groups, v_batch, v_head, v_row, keys, width)
    outer, inner, _high = spans_of_rows(row_queries, own.index, rows_total, given.sight, C)
    state, sums = no_keys(keys, ROWS), _no_sums(ROWS)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    for whole in tl.static_range(2):
        acc, peak, state, sums = _fold_output(
            acc, peak, state, sums, inner if whole else outer, given, v, unit, C, not whole, LEVELS
        )
    joined = _join_classes(sums, unit)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    row_total, reference = _total_weight(state, joined, peak, unit, given, C), peak * unit
    if SINK:  # it may exceed all logits by far, and all may exceed it
        sink = tl.load(learned_sink + own.head) * LOG2E
        common = tl.maximum(reference, sink)
        shrink = tl.exp2(reference - common)
        acc, row_total, reference = acc * shrink[:, None], row_total * shrink + tl.exp2(sink - common), common
    tl.store(
        reference_out + own.batch_head * rows_total + at,
        reference + tl.log2(tl.where(row_total > 0, row_total, 1.0)), mask=inside,
    )  # fmt: skip
    rows_out = matrix_of_head(output, own.batch, own.head, o_batch, o_head, o_row, rows_total, width)
    store_tile(rows_out, acc * inverse_of(row_total)[:, None], at, WIDTH)
    values = _columns_of(state, joined, given, unit, logit, C)
    column = tl.num_programs(0).to(tl.int64) // tl.cdiv(rows_total, ROWS) * rows_total
    store_columns(out + (own.batch_head * rows_total + at), column, inside, values)


@triton.jit
def _total_weight(state, sums, peak, unit, given, C: tl.constexpr):
    """The weight of all keys relative to that of the peak: the first one, the largest of the others, and the rest."""
    sink = tl.where(visible_keys(state.n, given, C) > 0, tl.exp2((state.sink - peak) * unit), 0.0)
    leader = tl.where(sums.leader == float("-inf"), 0.0, tl.exp2((sums.leader - peak) * unit))
    return sink + leader * (1.0 + sums.s1 * tl.exp2(sums.runner_up))


@triton.jit
def _fold_output(
    acc, peak, state, sums, span, given, v, unit, C: tl.constexpr, EDGE: tl.constexpr, LEVELS: tl.constexpr
):  # fmt: skip
    """Add some tiles to output, largest product, and the state of the sums."""
    for tile in range(span.tiles):
        at = tile_of_span(span, tile, C)
        s, state = _products_of_tile(at, given, state, C, EDGE)
        winners, second = _winners_of(s, LEVELS)
        largest = tl.max(winners, 1)
        columns = at + tl.arange(0, C.COLUMNS)
        products = s
        if EDGE:  # the sink has a value as any other key, but is not among the products that the sums take
            here = (columns[None, :] == state.first[:, None]) & (columns < given.sight.keys)[None, :]
            products = tl.where(here, state.sink[:, None], s)
            new_peak = tl.maximum(peak, tl.maximum(largest, tl.max(tl.where(here, products, float("-inf")), 1)))
            reference = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        else:
            new_peak = tl.maximum(peak, largest)
            reference = new_peak
        base = _base_of(reference, unit, C)
        p = tl.exp2(_above(products, base[:, None], unit[:, None], C))
        shrink = tl.exp2((peak - reference) * unit)
        if EDGE:  # with a factor of 0 these are NaN
            p = tl.where(products == float("-inf"), 0.0, p)
            shrink = tl.where(peak == float("-inf"), 0.0, shrink)
        peak = new_peak
        v_tile = load_tile(v, columns, C.WIDTH, EDGE, C.FULL)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * shrink[:, None], input_precision=C.PRECISION)
        sums = _add_products(sums, s, winners, second, unit, C, EDGE, LEVELS)
    return acc, peak, state, sums


@triton.jit
def pole_sums(
    q, k, mask, factor, row_queries, level, root, out,
    q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch, mask_head, mask_row, mask_column,
    heads, groups, rows_total, queries, keys, offset, width, scale, cap,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, CAPPED: tl.constexpr, FACTORED: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """sum e / (x - e) and sum (e / (x - e))^2 over the keys other than the first and those above the root x.

    e = exp(z - level). out: (2, B, H, R).
    """
    C: tl.constexpr = Constants(CAUSAL, False, MASKED, PRECISION, ROWS, KEYS, WIDTH, FULL, CAPPED=CAPPED)
    own, at, inside, given, unit, _logit = rows_of_program(
        tl.program_id(0), q, k, mask, factor, row_queries, q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch,
        mask_head, mask_row, mask_column, heads, groups, rows_total, queries, keys, offset, width, scale, cap, C,
        FACTORED,
    )  # fmt: skip
    outer, inner, _high = spans_of_rows(row_queries, own.index, rows_total, given.sight, C)
    row_level = tl.load(level + own.batch_head * rows_total + at, mask=inside, other=0.0) * LOG2E
    x = tl.load(root + own.batch_head * rows_total + at, mask=inside, other=0.0).to(tl.float32)
    poles = tl.zeros([ROWS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    first = tl.zeros([ROWS], tl.int32) + keys
    for whole in tl.static_range(2):
        poles, squares, first = _fold_poles(
            poles, squares, first, inner if whole else outer, row_level, x, given, unit, C, not whole
        )
    column = tl.num_programs(0).to(tl.int64) // tl.cdiv(rows_total, ROWS) * rows_total
    store_columns(out + (own.batch_head * rows_total + at), column, inside, (poles, squares))


@triton.jit
def _fold_poles(poles, squares, first, span, level, x, given, unit, C: tl.constexpr, EDGE: tl.constexpr):
    for tile in range(span.tiles):
        s, seen, first, _sink, _count = key_tile(tile_of_span(span, tile, C), given, first, C, EDGE)
        e = tl.exp2(s * unit[:, None] - level[:, None])
        gap = x[:, None] - e
        keep = gap > 0  # the largest key lies above the root, unless the sink is larger
        if EDGE:
            keep = keep & seen
        ratio = tl.where(keep, e / tl.where(keep, gap, 1.0), 0.0)
        poles += tl.sum(ratio, 1)
        squares += tl.sum(ratio * ratio, 1)
    return poles, squares, first
