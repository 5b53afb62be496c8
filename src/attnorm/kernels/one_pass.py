"""Attention by any map of kernels/maps.py in one pass over the keys: the matrix of weights never leaves the chip.

Forward folds tiles of logits into the output and the denominator of each row. The logits of a row are

    z = rule(factor * cap(scale <q, k>) + shift),   cap(s) = c tanh(s / c)

where all but the scale are optional. Keys whose logit lies below the `least` of their row are hidden. LIFT multiplies
weights before their product with values, since float16 loses digits below 6e-5, where the weights of long rows lie.
"""

import triton
import triton.language as tl

from attnorm.kernels.maps import LOG2E
from attnorm.kernels.tiles import key_range, load_row, load_tile, logits, seen_keys, selected, store_tile


@triton.jit
def reference_of(peak, REFERENCE: tl.constexpr, MAY_BE_EMPTY: tl.constexpr):
    """The r of maps.Reference for the largest logits so far; 0 for rows that have seen no key."""
    if MAY_BE_EMPTY:
        peak = tl.where(peak == float("-inf"), 0.0, peak)
    if REFERENCE == 2:
        peak = tl.maximum(peak, 0.0)
    if REFERENCE == 3:
        peak = tl.minimum(peak, 0.0)
    return peak


@triton.jit
def fold(
    acc, total, peak, start, stop, q_tile, k, v, rows, factor, shift, least,
    mask, k_row, v_row, mask_row, mask_column, queries, keys, offset, window, width, v_width, scale, cap, parameter,
    MAP: tl.constexpr, RULE: tl.constexpr, P: tl.constexpr, FAST: tl.constexpr, REFERENCE: tl.constexpr,
    NORMALISED: tl.constexpr, RULED: tl.constexpr, CAPPED: tl.constexpr, FACTORED: tl.constexpr,
    SHIFTED: tl.constexpr, SELECTED: tl.constexpr, PLAIN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, FULL: tl.constexpr, V_FULL: tl.constexpr,
    LIFT: tl.constexpr,
):  # fmt: skip
    """Output, denominator and peak of a block of queries, with the keys from start to stop added."""
    for at in range(start, stop, COLUMNS):
        columns = at + tl.arange(0, COLUMNS)
        k_tile = load_tile(k, columns, keys, k_row, width, WIDTH, EDGE, FULL)
        dot = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        i, j = rows[:, None], columns[None, :]
        z = logits(
            dot * scale, i, j, offset, factor[:, None], shift[:, None], cap, parameter,
            RULE, FAST, RULED, CAPPED, FACTORED, SHIFTED,
        )  # fmt: skip
        if EDGE:
            seen = seen_keys(i, j, mask, mask_row, mask_column, queries, keys, offset, window, CAUSAL, WINDOWED, MASKED)
        if REFERENCE != 0:
            if EDGE:
                largest = tl.max(tl.where(seen, z, float("-inf")), 1)
            elif PLAIN:  # one product per row instead of one per key
                largest = tl.max(dot, 1) * scale
            else:
                largest = tl.max(z, 1)
            largest = tl.maximum(peak, largest)
            shrink = tl.exp2(reference_of(peak, REFERENCE, False) - reference_of(largest, REFERENCE, EDGE))
            acc = acc * shrink[:, None]
            total = total * shrink
            peak = largest
        reference = reference_of(peak, REFERENCE, EDGE)
        if SELECTED:  # behind the peak, which is kept: a tile without any other kept key has one all the same
            z = selected(z, least[:, None])
        a, b = MAP(z, reference[:, None], P, FAST)
        if EDGE:
            a = tl.where(seen, a, 0.0)
            b = tl.where(seen, b, 0.0)
        if NORMALISED:
            total = total + tl.sum(b, 1)
        if REFERENCE == 0:
            a = a * LIFT
        v_tile = load_tile(v, columns, keys, v_row, v_width, V_WIDTH, EDGE, V_FULL)
        acc = tl.dot(a.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
    return acc, total, peak


@triton.jit
def forward(
    q, k, v, mask, factor, shift, least, parameters, sink, out, reference_out, inverse_out,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    mask_batch, mask_head, mask_row, mask_column, o_batch, o_head, o_row,
    heads, groups, queries, keys, offset, window, width, v_width, scale, cap, floor,
    MAP: tl.constexpr, SLOPES: tl.constexpr, RULE: tl.constexpr, P: tl.constexpr, FAST: tl.constexpr,
    REFERENCE: tl.constexpr, NORMALISED: tl.constexpr, RULED: tl.constexpr,
    CAPPED: tl.constexpr, FACTORED: tl.constexpr, SHIFTED: tl.constexpr, SELECTED: tl.constexpr,
    SINK: tl.constexpr, PLAIN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    FULL: tl.constexpr, V_FULL: tl.constexpr, LIFT: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(queries, ROWS)
    program = tl.program_id(0)
    block = blocks - 1 - program % blocks  # the longest causal rows first, or they would run alone at the end
    batch_head = (program // blocks).to(tl.int64)
    batch, head = batch_head // heads, batch_head % heads
    k += batch * k_batch + head // groups * k_head
    v += batch * v_batch + head // groups * v_head
    mask += batch * mask_batch + head * mask_head
    rows = block * ROWS + tl.arange(0, ROWS)
    inside = rows < queries
    q_tile = load_tile(q + batch * q_batch + head * q_head, rows, queries, q_row, width, WIDTH, True, FULL)
    row_at = batch_head * queries + rows
    row_factor = load_row(factor, row_at, inside, FACTORED, 1.0)
    row_shift = load_row(shift, row_at, inside, SHIFTED, 0.0) * LOG2E
    row_least = load_row(least, row_at, inside, SELECTED, float("-inf"))
    parameter = tl.load(parameters + head) if RULED else 0.0

    acc = tl.zeros([ROWS, V_WIDTH], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    if SINK:
        peak = tl.zeros([ROWS], tl.float32) + tl.load(sink + head) * LOG2E
        total = total + 1.0
    first, low, high, last = key_range(block, queries, keys, offset, window, CAUSAL, WINDOWED, MASKED, ROWS, COLUMNS)
    if WINDOWED or MASKED:
        acc, total, peak = fold(
            acc, total, peak, first, low, q_tile, k, v, rows, row_factor, row_shift, row_least,
            mask, k_row, v_row, mask_row, mask_column, queries, keys, offset, window, width, v_width, scale, cap,
            parameter, MAP, RULE, P, FAST, REFERENCE, NORMALISED, RULED, CAPPED, FACTORED, SHIFTED, SELECTED, PLAIN,
            CAUSAL, WINDOWED, MASKED, True, PRECISION, COLUMNS, WIDTH, V_WIDTH, FULL, V_FULL, LIFT,
        )  # fmt: skip
    acc, total, peak = fold(
        acc, total, peak, low, high, q_tile, k, v, rows, row_factor, row_shift, row_least,
        mask, k_row, v_row, mask_row, mask_column, queries, keys, offset, window, width, v_width, scale, cap, parameter,
        MAP, RULE, P, FAST, REFERENCE, NORMALISED, RULED, CAPPED, FACTORED, SHIFTED, SELECTED, PLAIN,
        CAUSAL, WINDOWED, MASKED, False, PRECISION, COLUMNS, WIDTH, V_WIDTH, FULL, V_FULL, LIFT,
    )  # fmt: skip
    acc, total, peak = fold(
        acc, total, peak, high, last, q_tile, k, v, rows, row_factor, row_shift, row_least,
        mask, k_row, v_row, mask_row, mask_column, queries, keys, offset, window, width, v_width, scale, cap, parameter,
        MAP, RULE, P, FAST, REFERENCE, NORMALISED, RULED, CAPPED, FACTORED, SHIFTED, SELECTED, PLAIN,
        CAUSAL, WINDOWED, MASKED, True, PRECISION, COLUMNS, WIDTH, V_WIDTH, FULL, V_FULL, LIFT,
    )  # fmt: skip

    reference = reference_of(peak, REFERENCE, True)
    if REFERENCE == 2:  # no other map has a floor, and 2^-reference may overflow there
        total = total + floor * tl.exp2(-reference)
    if NORMALISED:
        inverse = tl.where(total > 0, 1.0 / tl.where(total > 0, total, 1.0), tl.where(total == 0, 0.0, float("nan")))
        acc = acc * inverse[:, None]
        if REFERENCE != 0:
            tl.store(reference_out + row_at, reference + tl.log2(tl.where(total > 0, total, 1.0)), mask=inside)
        else:
            tl.store(inverse_out + row_at, inverse, mask=inside)
    if REFERENCE == 0:
        acc = acc * (1.0 / LIFT)
    store_tile(
        out + batch * o_batch + head * o_head, acc.to(out.dtype.element_ty), rows, queries, o_row, v_width, V_WIDTH
    )
