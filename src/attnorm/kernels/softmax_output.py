"""Softmax attention and the sums of its rows (softmax_sums.py) in one pass over keys and values.

The products of queries and keys, which both need, are computed once. Weights for the output are relative to the largest
logit so far; the sums keep their own references. The exponentials are therefore computed twice per key, but the
multiplication with the values can run while the sums are added.
"""

import triton
import triton.language as tl

from attnorm.kernels.blocks import Constants, keys_of_head, load_tile, matrix_of_head, store_tile
from attnorm.kernels.maps import LOG2E
from attnorm.kernels.one_pass import inverse_of
from attnorm.kernels.row_tiles import (
    CLASSES,
    by_class,
    neighbours,
    no_keys,
    rows_of_program,
    spans_of_rows,
    store_columns,
    tile_of_span,
)
from attnorm.kernels.softmax_sums import add_products, columns_of, no_sums, products_of_tile, winners_of


@triton.jit
def _fold(
    acc, total, peak, state, sums, span, given, v, unit, C: tl.constexpr, EDGE: tl.constexpr, LEVELS: tl.constexpr
):  # fmt: skip
    """Add some tiles to output, denominator (per class), largest logit in bits, and the state of the sums."""
    for tile in range(span.tiles):
        at = tile_of_span(span, tile, C)
        s, state = products_of_tile(at, given, state, C, EDGE)
        winners, second = winners_of(s, LEVELS)
        largest = tl.max(winners, 1)
        columns = at + tl.arange(0, C.COLUMNS)
        products = s
        if EDGE:  # the sink has a value as any other key, but is not among the products that the sums take
            here = (columns[None, :] == state.first[:, None]) & (columns < given.sight.keys)[None, :]
            products = tl.where(here, state.sink[:, None], s)
            largest = tl.maximum(largest, tl.max(tl.where(here, products, float("-inf")), 1))
            new_peak = tl.maximum(peak, tl.where(largest == float("-inf"), largest, largest * unit))
            reference = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            p = tl.where(products == float("-inf"), 0.0, tl.exp2(products * unit[:, None] - reference[:, None]))
        else:
            new_peak = tl.maximum(peak, largest * unit)
            reference = new_peak
            p = tl.exp2(products * unit[:, None] - reference[:, None])
        shrink = tl.exp2(peak - reference)
        peak = new_peak
        even, odd = neighbours(p)
        total = total * shrink[:, None] + tl.sum(by_class(even + odd), 1)
        v_tile = load_tile(v, columns, C.WIDTH, EDGE, C.FULL)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * shrink[:, None], input_precision=C.PRECISION)
        sums = add_products(sums, s, winners, second, unit, EDGE, LEVELS)
    return acc, total, peak, state, sums


@triton.jit
def softmax_output(
    q, k, mask, factor, row_queries, v, learned_sink, output, out,
    q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch, mask_head, mask_row, mask_column,
    heads, groups, rows_total, queries, keys, offset, width, scale, cap,
    v_batch, v_head, v_row, o_batch, o_head, o_row,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, CAPPED: tl.constexpr, FACTORED: tl.constexpr, SINK: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
    LEVELS: tl.constexpr,
):  # fmt: skip
    """Arguments of softmax_sums; v: (B, G, K, D); learned_sink: (H,) if SINK; output: (B, H, R, D)."""
    C: tl.constexpr = Constants(CAUSAL, False, MASKED, PRECISION, ROWS, KEYS, WIDTH, FULL, CAPPED=CAPPED)
    own, at, inside, given, unit, logit = rows_of_program(
        tl.program_id(0), q, k, mask, factor, row_queries, q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch,
        mask_head, mask_row, mask_column, heads, groups, rows_total, queries, keys, offset, width, scale, cap, C,
        FACTORED,
    )  # fmt: skip
    v = keys_of_head(v, own, groups, v_batch, v_head, v_row, keys, width)
    outer, inner, _high = spans_of_rows(row_queries, own.index, rows_total, given.sight, C)
    state, sums = no_keys(keys, ROWS), no_sums(ROWS)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    total = tl.zeros([ROWS, CLASSES], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    for whole in tl.static_range(2):
        acc, total, peak, state, sums = _fold(
            acc, total, peak, state, sums, inner if whole else outer, given, v, unit, C, not whole, LEVELS
        )
    row_total = tl.sum(total, 1)
    if SINK:  # it may exceed all logits by so much that the sum is infinite: then the output is 0
        reference = tl.where(peak == float("-inf"), 0.0, peak)
        row_total += tl.exp2(tl.load(learned_sink + own.head) * LOG2E - reference)
    rows_out = matrix_of_head(output, own.batch, own.head, o_batch, o_head, o_row, rows_total, width)
    store_tile(rows_out, acc * inverse_of(row_total)[:, None], at, WIDTH)
    values = columns_of(state, sums, given, unit, logit, C)
    column = tl.num_programs(0).to(tl.int64) // tl.cdiv(rows_total, ROWS) * rows_total
    store_columns(out + (own.batch_head * rows_total + at), column, inside, values)
