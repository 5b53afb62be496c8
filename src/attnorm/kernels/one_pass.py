"""Attention by any map of kernels/maps.py in one pass over the keys: the matrix of weights never leaves the chip.

Forward folds tiles of logits into a row's output and denominator. Backward computes tiles again: with w = a / D,
dp_j = <dO, v_j> and delta = <dO, O> the gradient of a logit is (a'(z_j) dp_j - b'(z_j) delta) / D. One kernel sums it over
keys into the gradient of q (and of a row's factor and shift), one over queries into those of k and v, so that no two
programs add to the same number: results do not depend on their order.

Logits of a row: z = rule(factor * cap(scale <q, k>) + shift), where cap(s) = c tanh(s / c); all but the scale are optional.
"""

import triton
import triton.language as tl

from attnorm.kernels.maps import LN2, LOG2E

# LIFT: weights are multiplied by it for products with values and gradients, since float16 loses digits below 6e-5, where
# the weights of long rows lie.


@triton.jit
def load_tile(pointer, rows, length, stride, width, WIDTH: tl.constexpr, EDGE: tl.constexpr, FULL_WIDTH: tl.constexpr):
    """(rows, WIDTH) of a matrix (length, width), with zeros around it; checks only what can be outside."""
    columns = tl.arange(0, WIDTH)
    at = pointer + rows[:, None].to(tl.int64) * stride + columns[None, :]
    if EDGE and FULL_WIDTH:
        return tl.load(at, mask=(rows < length)[:, None], other=0.0)
    if EDGE:
        return tl.load(at, mask=(rows < length)[:, None] & (columns < width)[None, :], other=0.0)
    if FULL_WIDTH:
        return tl.load(at)
    return tl.load(at, mask=(columns < width)[None, :], other=0.0)


@triton.jit
def store_tile(pointer, values, rows, length, stride, width, WIDTH: tl.constexpr):
    columns = tl.arange(0, WIDTH)
    inside = (rows < length)[:, None] & (columns < width)[None, :]
    tl.store(pointer + rows[:, None].to(tl.int64) * stride + columns[None, :], values, mask=inside)


@triton.jit
def load_row(pointer, at, inside, HAS: tl.constexpr, other: tl.constexpr):
    if HAS:
        return tl.load(pointer + at, mask=inside, other=other)
    return tl.full(at.shape, other, tl.float32)


@triton.jit
def seen_keys(
    i, j, mask, mask_row, mask_column, queries, keys, offset, window,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Which key j a query i sees, for i and j that broadcast to a tile."""
    seen = (i < queries) & (j < keys)
    if CAUSAL:
        seen = seen & (j <= i + offset)
    if WINDOWED:
        seen = seen & (j > i + offset - window)
    if MASKED:
        at = mask + i.to(tl.int64) * mask_row + j.to(tl.int64) * mask_column
        seen = seen & (tl.load(at, mask=seen, other=0) != 0)
    return seen


@triton.jit
def capped(s, cap, CAPPED: tl.constexpr):
    """cap tanh(s / cap) for s and cap in bits; its slope."""
    slope = 1.0
    if CAPPED:
        x = s / cap
        square = x * x
        series = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0))))
        e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
        size = (1.0 - e) / (1.0 + e)
        tanh = tl.where(square < 0.01, series, tl.where(s < 0, -size, size))  # 1 - e has few digits near 0
        s = cap * tanh
        slope = 1.0 - tanh * tanh
    return s, slope


@triton.jit
def logits(
    s, i, j, offset, factor, shift, cap, parameter,
    RULE: tl.constexpr, RULED: tl.constexpr, CAPPED: tl.constexpr, FACTORED: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """z in bits of scaled products s in bits. factor, shift and the query i are per row."""
    z, _slope = capped(s, cap, CAPPED)
    if FACTORED:
        z = z * factor
    if SHIFTED:
        z = z + shift
    if RULED:
        z, _slope = RULE(z, tl.abs((i + offset - j).to(tl.float32)), parameter)
    return z


@triton.jit
def key_range(
    block, queries, keys, offset, window,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """For a block of queries: the keys from `first` to `last` that some may see, `low` to `high` those that all see.

    In whole tiles, so that every tile lies on one side of each border.
    """
    first, low, high, last = 0, 0, keys // COLUMNS * COLUMNS, keys
    if CAUSAL:
        last = tl.maximum(tl.minimum(tl.minimum((block + 1) * ROWS, queries) + offset, keys), 0)
        high = tl.maximum(tl.minimum(block * ROWS + offset + 1, keys), 0) // COLUMNS * COLUMNS
    if WINDOWED:
        first = tl.maximum(block * ROWS + offset - window + 1, 0) // COLUMNS * COLUMNS
        low = tl.cdiv(tl.maximum(tl.minimum((block + 1) * ROWS, queries) + offset - window, 0), COLUMNS) * COLUMNS
    if MASKED:
        low, high = first, first
    low = tl.maximum(tl.minimum(low, last), first)
    high = tl.maximum(high, low)
    return first, low, high, last


@triton.jit
def _reference(peak, REFERENCE: tl.constexpr, MAY_BE_EMPTY: tl.constexpr):
    """The r of maps.Reference for the largest logits so far; 0 for rows that have seen no key."""
    if MAY_BE_EMPTY:
        peak = tl.where(peak == float("-inf"), 0.0, peak)
    if REFERENCE == 2:
        peak = tl.maximum(peak, 0.0)
    if REFERENCE == 3:
        peak = tl.minimum(peak, 0.0)
    return peak


@triton.jit
def _fold(
    acc, total, peak, start, stop, q_tile, k, v, rows, factor, shift,
    mask, k_row, v_row, mask_row, mask_column, queries, keys, offset, window, width, v_width, scale, cap, parameter,
    MAP: tl.constexpr, RULE: tl.constexpr, P: tl.constexpr, REFERENCE: tl.constexpr, NORMALISED: tl.constexpr,
    RULED: tl.constexpr, CAPPED: tl.constexpr, FACTORED: tl.constexpr, SHIFTED: tl.constexpr, PLAIN: tl.constexpr,
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
            RULE, RULED, CAPPED, FACTORED, SHIFTED,
        )  # fmt: skip
        if EDGE:
            seen = seen_keys(
                i, j, mask, mask_row, mask_column, queries, keys, offset, window, CAUSAL, WINDOWED, MASKED
            )
        if REFERENCE != 0:
            if EDGE:
                largest = tl.max(tl.where(seen, z, float("-inf")), 1)
            elif PLAIN:  # one product per row instead of one per key
                largest = tl.max(dot, 1) * scale
            else:
                largest = tl.max(z, 1)
            largest = tl.maximum(peak, largest)
            shrink = tl.exp2(_reference(peak, REFERENCE, False) - _reference(largest, REFERENCE, EDGE))
            acc = acc * shrink[:, None]
            total = total * shrink
            peak = largest
        reference = _reference(peak, REFERENCE, EDGE)
        a, b = MAP(z, reference[:, None], P)
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
    q, k, v, mask, factor, shift, sink, out, reference_out, inverse_out,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    mask_batch, mask_head, mask_row, mask_column, o_batch, o_head, o_row,
    heads, groups, queries, keys, offset, window, width, v_width, scale, cap, parameter, floor,
    MAP: tl.constexpr, SLOPES: tl.constexpr, RULE: tl.constexpr, P: tl.constexpr,
    REFERENCE: tl.constexpr, NORMALISED: tl.constexpr, RULED: tl.constexpr,
    CAPPED: tl.constexpr, FACTORED: tl.constexpr, SHIFTED: tl.constexpr, SINK: tl.constexpr, PLAIN: tl.constexpr,
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

    acc = tl.zeros([ROWS, V_WIDTH], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    if SINK:
        peak = tl.zeros([ROWS], tl.float32) + tl.load(sink + head) * LOG2E
        total = total + 1.0
    first, low, high, last = key_range(block, queries, keys, offset, window, CAUSAL, WINDOWED, MASKED, ROWS, COLUMNS)
    if WINDOWED or MASKED:
        acc, total, peak = _fold(
            acc, total, peak, first, low, q_tile, k, v, rows, row_factor, row_shift,
            mask, k_row, v_row, mask_row, mask_column, queries, keys, offset, window, width, v_width, scale, cap,
            parameter, MAP, RULE, P, REFERENCE, NORMALISED, RULED, CAPPED, FACTORED, SHIFTED, PLAIN,
            CAUSAL, WINDOWED, MASKED, True, PRECISION, COLUMNS, WIDTH, V_WIDTH, FULL, V_FULL, LIFT,
        )  # fmt: skip
    acc, total, peak = _fold(
        acc, total, peak, low, high, q_tile, k, v, rows, row_factor, row_shift,
        mask, k_row, v_row, mask_row, mask_column, queries, keys, offset, window, width, v_width, scale, cap, parameter,
        MAP, RULE, P, REFERENCE, NORMALISED, RULED, CAPPED, FACTORED, SHIFTED, PLAIN,
        CAUSAL, WINDOWED, MASKED, False, PRECISION, COLUMNS, WIDTH, V_WIDTH, FULL, V_FULL, LIFT,
    )  # fmt: skip
    acc, total, peak = _fold(
        acc, total, peak, high, last, q_tile, k, v, rows, row_factor, row_shift,
        mask, k_row, v_row, mask_row, mask_column, queries, keys, offset, window, width, v_width, scale, cap, parameter,
        MAP, RULE, P, REFERENCE, NORMALISED, RULED, CAPPED, FACTORED, SHIFTED, PLAIN,
        CAUSAL, WINDOWED, MASKED, True, PRECISION, COLUMNS, WIDTH, V_WIDTH, FULL, V_FULL, LIFT,
    )  # fmt: skip

    reference = _reference(peak, REFERENCE, True)
    if REFERENCE != 0:
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


@triton.jit
def row_dots(
    grad, out, found, g_batch, g_head, g_row, o_batch, o_head, o_row, heads, queries, width,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """<dO, O> of every row."""
    blocks = tl.cdiv(queries, ROWS)
    block, batch_head = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    batch, head = batch_head // heads, batch_head % heads
    rows = block * ROWS + tl.arange(0, ROWS)
    a = load_tile(grad + batch * g_batch + head * g_head, rows, queries, g_row, width, WIDTH, True, False)
    b = load_tile(out + batch * o_batch + head * o_head, rows, queries, o_row, width, WIDTH, True, False)
    tl.store(
        found + batch_head * queries + rows, tl.sum(a.to(tl.float32) * b.to(tl.float32), 1), mask=rows < queries
    )


@triton.jit
def _logit_gradient(
    dot, dp, i, j, factor, shift, reference, inverse, delta, offset, scale, cap, parameter,
    SLOPES: tl.constexpr, RULE: tl.constexpr, P: tl.constexpr, REFERENCE: tl.constexpr,
    NORMALISED: tl.constexpr, RULED: tl.constexpr, CAPPED: tl.constexpr, FACTORED: tl.constexpr,
    SHIFTED: tl.constexpr,
):  # fmt: skip
    """Weights of a tile, the gradients of its logits after factor and shift, and of its products; s capped, in bits."""
    s, cap_slope = capped(dot * scale, cap, CAPPED)
    z = s
    if FACTORED:
        z = z * factor
    if SHIFTED:
        z = z + shift
    rule_slope = 1.0
    if RULED:
        z, rule_slope = RULE(z, tl.abs((i + offset - j).to(tl.float32)), parameter)
    w, slope_a, slope_b = SLOPES(z, reference, P)
    if NORMALISED:
        dz = slope_a * dp - slope_b * delta
        if REFERENCE == 0:
            dz = dz * inverse
            w = w * inverse
    else:
        dz = slope_a * dp
    if RULED:
        dz = dz * rule_slope
    ds = dz
    if FACTORED:
        ds = ds * factor
    if CAPPED:
        ds = ds * cap_slope
    return w, dz, ds, s


@triton.jit
def _fold_queries(
    grad_q, grad_factor, grad_shift, start, stop, q_tile, grad_tile, k, v, rows, factor, shift, reference, inverse,
    delta, mask, k_row, v_row, mask_row, mask_column, queries, keys, offset, window, width, v_width, scale, cap,
    parameter,
    SLOPES: tl.constexpr, RULE: tl.constexpr, P: tl.constexpr, REFERENCE: tl.constexpr,
    NORMALISED: tl.constexpr, RULED: tl.constexpr, CAPPED: tl.constexpr, FACTORED: tl.constexpr,
    SHIFTED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr, EDGE: tl.constexpr,
    PRECISION: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, FULL: tl.constexpr,
    V_FULL: tl.constexpr,
):  # fmt: skip
    for at in range(start, stop, COLUMNS):
        columns = at + tl.arange(0, COLUMNS)
        k_tile = load_tile(k, columns, keys, k_row, width, WIDTH, EDGE, FULL)
        v_tile = load_tile(v, columns, keys, v_row, v_width, V_WIDTH, EDGE, V_FULL)
        dot = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        dp = tl.dot(grad_tile, tl.trans(v_tile), input_precision=PRECISION)
        i, j = rows[:, None], columns[None, :]
        _w, dz, ds, s = _logit_gradient(
            dot, dp, i, j, factor[:, None], shift[:, None], reference[:, None], inverse[:, None], delta[:, None],
            offset, scale, cap, parameter, SLOPES, RULE, P, REFERENCE, NORMALISED, RULED, CAPPED,
            FACTORED, SHIFTED,
        )  # fmt: skip
        if EDGE:
            seen = seen_keys(
                i, j, mask, mask_row, mask_column, queries, keys, offset, window, CAUSAL, WINDOWED, MASKED
            )
            ds = tl.where(seen, ds, 0.0)
            dz = tl.where(seen, dz, 0.0)
            s = tl.where(seen, s, 0.0)
        if FACTORED:
            grad_factor += tl.sum(dz * s, 1)
        if SHIFTED:
            grad_shift += tl.sum(dz, 1)
        grad_q = tl.dot(ds.to(k_tile.dtype), k_tile, grad_q, input_precision=PRECISION)
    return grad_q, grad_factor, grad_shift


@triton.jit
def backward_queries(
    q, k, v, mask, factor, shift, reference, inverse, delta, grad, grad_q, grad_factor, grad_shift,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    mask_batch, mask_head, mask_row, mask_column, o_batch, o_head, o_row, gq_batch, gq_head, gq_row,
    heads, groups, queries, keys, offset, window, width, v_width, scale, cap, parameter, plain_scale,
    MAP: tl.constexpr, SLOPES: tl.constexpr, RULE: tl.constexpr, P: tl.constexpr,
    REFERENCE: tl.constexpr, NORMALISED: tl.constexpr, RULED: tl.constexpr,
    CAPPED: tl.constexpr, FACTORED: tl.constexpr, SHIFTED: tl.constexpr, SINK: tl.constexpr, PLAIN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    FULL: tl.constexpr, V_FULL: tl.constexpr, LIFT: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(queries, ROWS)
    program = tl.program_id(0)
    block = blocks - 1 - program % blocks
    batch_head = (program // blocks).to(tl.int64)
    batch, head = batch_head // heads, batch_head % heads
    k += batch * k_batch + head // groups * k_head
    v += batch * v_batch + head // groups * v_head
    mask += batch * mask_batch + head * mask_head
    rows = block * ROWS + tl.arange(0, ROWS)
    inside = rows < queries
    q_tile = load_tile(q + batch * q_batch + head * q_head, rows, queries, q_row, width, WIDTH, True, FULL)
    grad_tile = load_tile(grad + batch * o_batch + head * o_head, rows, queries, o_row, v_width, V_WIDTH, True, V_FULL)
    row_at = batch_head * queries + rows
    row_factor = load_row(factor, row_at, inside, FACTORED, 1.0)
    row_shift = load_row(shift, row_at, inside, SHIFTED, 0.0) * LOG2E
    row_reference = load_row(reference, row_at, inside, REFERENCE != 0, 0.0)
    row_inverse = load_row(inverse, row_at, inside, NORMALISED and REFERENCE == 0, 1.0)
    row_delta = load_row(delta, row_at, inside, NORMALISED, 0.0)

    found = tl.zeros([ROWS, WIDTH], tl.float32)
    found_factor = tl.zeros([ROWS], tl.float32)
    found_shift = tl.zeros([ROWS], tl.float32)
    first, low, high, last = key_range(block, queries, keys, offset, window, CAUSAL, WINDOWED, MASKED, ROWS, COLUMNS)
    if WINDOWED or MASKED:
        found, found_factor, found_shift = _fold_queries(
            found, found_factor, found_shift, first, low, q_tile, grad_tile, k, v, rows, row_factor, row_shift,
            row_reference, row_inverse, row_delta, mask, k_row, v_row, mask_row, mask_column, queries, keys, offset,
            window, width, v_width, scale, cap, parameter, SLOPES, RULE, P, REFERENCE, NORMALISED,
            RULED, CAPPED, FACTORED, SHIFTED, CAUSAL, WINDOWED, MASKED, True, PRECISION, COLUMNS, WIDTH, V_WIDTH,
            FULL, V_FULL,
        )  # fmt: skip
    found, found_factor, found_shift = _fold_queries(
        found, found_factor, found_shift, low, high, q_tile, grad_tile, k, v, rows, row_factor, row_shift,
        row_reference, row_inverse, row_delta, mask, k_row, v_row, mask_row, mask_column, queries, keys, offset,
        window, width, v_width, scale, cap, parameter, SLOPES, RULE, P, REFERENCE, NORMALISED,
        RULED, CAPPED, FACTORED, SHIFTED, CAUSAL, WINDOWED, MASKED, False, PRECISION, COLUMNS, WIDTH, V_WIDTH,
        FULL, V_FULL,
    )  # fmt: skip
    found, found_factor, found_shift = _fold_queries(
        found, found_factor, found_shift, high, last, q_tile, grad_tile, k, v, rows, row_factor, row_shift,
        row_reference, row_inverse, row_delta, mask, k_row, v_row, mask_row, mask_column, queries, keys, offset,
        window, width, v_width, scale, cap, parameter, SLOPES, RULE, P, REFERENCE, NORMALISED,
        RULED, CAPPED, FACTORED, SHIFTED, CAUSAL, WINDOWED, MASKED, True, PRECISION, COLUMNS, WIDTH, V_WIDTH,
        FULL, V_FULL,
    )  # fmt: skip
    found = (found * plain_scale).to(grad_q.dtype.element_ty)
    store_tile(grad_q + batch * gq_batch + head * gq_head, found, rows, queries, gq_row, width, WIDTH)
    if FACTORED:
        tl.store(grad_factor + row_at, found_factor * LN2, mask=inside)
    if SHIFTED:
        tl.store(grad_shift + row_at, found_shift, mask=inside)


@triton.jit
def query_range(
    start, queries, keys, offset, window,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """For the keys from start: the queries from `first` to `last` that see some of them, `low` to `high` see all."""
    first, low, high, last = 0, 0, queries // ROWS * ROWS, queries
    if CAUSAL:
        first = tl.maximum(start - offset, 0) // ROWS * ROWS
        low = tl.cdiv(tl.maximum(start + COLUMNS - 1 - offset, 0), ROWS) * ROWS
    if WINDOWED:
        last = tl.minimum(tl.maximum(start + COLUMNS - 1 - offset + window, 0), queries)
        high = tl.maximum(tl.minimum(start - offset + window, queries), 0) // ROWS * ROWS
    if MASKED:
        low, high = last, last
    if start + COLUMNS > keys:  # some are no keys at all
        low, high = last, last
    low = tl.maximum(tl.minimum(low, last), first)
    high = tl.maximum(high, low)
    return first, low, high, last


@triton.jit
def _fold_keys(
    grad_k, grad_v, start, stop, k_tile, v_tile, q, grad, columns, at_row, factor, shift, reference, inverse, delta,
    mask, q_row, o_row, mask_row, mask_column, queries, keys, offset, window, width, v_width, scale, cap, parameter,
    SLOPES: tl.constexpr, RULE: tl.constexpr, P: tl.constexpr, REFERENCE: tl.constexpr,
    NORMALISED: tl.constexpr, RULED: tl.constexpr, CAPPED: tl.constexpr, FACTORED: tl.constexpr,
    SHIFTED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr, EDGE: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, FULL: tl.constexpr,
    V_FULL: tl.constexpr, LIFT: tl.constexpr,
):  # fmt: skip
    """Tiles lie with the keys as rows here."""
    for at in range(start, stop, ROWS):
        rows = at + tl.arange(0, ROWS)
        inside = rows < queries
        q_tile = load_tile(q, rows, queries, q_row, width, WIDTH, EDGE, FULL)
        grad_tile = load_tile(grad, rows, queries, o_row, v_width, V_WIDTH, EDGE, V_FULL)
        row_at = at_row + rows
        row_factor = load_row(factor, row_at, inside, FACTORED, 1.0)
        row_shift = load_row(shift, row_at, inside, SHIFTED, 0.0) * LOG2E
        row_reference = load_row(reference, row_at, inside, REFERENCE != 0, 0.0)
        row_inverse = load_row(inverse, row_at, inside, NORMALISED and REFERENCE == 0, 1.0)
        row_delta = load_row(delta, row_at, inside, NORMALISED, 0.0)
        dot = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
        dp = tl.dot(v_tile, tl.trans(grad_tile), input_precision=PRECISION)
        i, j = rows[None, :], columns[:, None]
        w, _dz, ds, _s = _logit_gradient(
            dot, dp, i, j, row_factor[None, :], row_shift[None, :], row_reference[None, :], row_inverse[None, :],
            row_delta[None, :], offset, scale, cap, parameter, SLOPES, RULE, P, REFERENCE, NORMALISED,
            RULED, CAPPED, FACTORED, SHIFTED,
        )  # fmt: skip
        if EDGE:
            seen = seen_keys(
                i, j, mask, mask_row, mask_column, queries, keys, offset, window, CAUSAL, WINDOWED, MASKED
            )
            ds = tl.where(seen, ds, 0.0)
            w = tl.where(seen, w, 0.0)
        grad_v = tl.dot((w * LIFT).to(grad_tile.dtype), grad_tile, grad_v, input_precision=PRECISION)
        grad_k = tl.dot(ds.to(q_tile.dtype), q_tile, grad_k, input_precision=PRECISION)
    return grad_k, grad_v


@triton.jit
def backward_keys(
    q, k, v, mask, factor, shift, reference, inverse, delta, grad, grad_k, grad_v,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    mask_batch, mask_head, mask_row, mask_column, o_batch, o_head, o_row,
    gk_batch, gk_head, gk_row, gv_batch, gv_head, gv_row,
    heads, groups, queries, keys, offset, window, width, v_width, scale, cap, parameter, plain_scale,
    MAP: tl.constexpr, SLOPES: tl.constexpr, RULE: tl.constexpr, P: tl.constexpr,
    REFERENCE: tl.constexpr, NORMALISED: tl.constexpr, RULED: tl.constexpr,
    CAPPED: tl.constexpr, FACTORED: tl.constexpr, SHIFTED: tl.constexpr, SINK: tl.constexpr, PLAIN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    FULL: tl.constexpr, V_FULL: tl.constexpr, LIFT: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(keys, COLUMNS)
    program = tl.program_id(0)
    block = program % blocks  # the first keys are seen by most queries
    batch_head = (program // blocks).to(tl.int64)
    key_heads = heads // groups
    batch, key_head = batch_head // key_heads, batch_head % key_heads
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    k_tile = load_tile(k + batch * k_batch + key_head * k_head, columns, keys, k_row, width, WIDTH, True, FULL)
    v_tile = load_tile(v + batch * v_batch + key_head * v_head, columns, keys, v_row, v_width, V_WIDTH, True, V_FULL)
    found_k = tl.zeros([COLUMNS, WIDTH], tl.float32)
    found_v = tl.zeros([COLUMNS, V_WIDTH], tl.float32)
    first, low, high, last = query_range(
        block * COLUMNS, queries, keys, offset, window, CAUSAL, WINDOWED, MASKED, ROWS, COLUMNS
    )
    for member in range(groups):
        head = key_head * groups + member
        at_row = (batch * heads + head) * queries
        q_here = q + batch * q_batch + head * q_head
        grad_here = grad + batch * o_batch + head * o_head
        mask_here = mask + batch * mask_batch + head * mask_head
        found_k, found_v = _fold_keys(
            found_k, found_v, first, low, k_tile, v_tile, q_here, grad_here, columns, at_row, factor, shift,
            reference, inverse, delta, mask_here, q_row, o_row, mask_row, mask_column, queries, keys, offset, window,
            width, v_width, scale, cap, parameter, SLOPES, RULE, P, REFERENCE, NORMALISED, RULED,
            CAPPED, FACTORED, SHIFTED, CAUSAL, WINDOWED, MASKED, True, PRECISION, ROWS, WIDTH, V_WIDTH, FULL, V_FULL, LIFT,
        )  # fmt: skip
        found_k, found_v = _fold_keys(
            found_k, found_v, low, high, k_tile, v_tile, q_here, grad_here, columns, at_row, factor, shift,
            reference, inverse, delta, mask_here, q_row, o_row, mask_row, mask_column, queries, keys, offset, window,
            width, v_width, scale, cap, parameter, SLOPES, RULE, P, REFERENCE, NORMALISED, RULED,
            CAPPED, FACTORED, SHIFTED, CAUSAL, WINDOWED, MASKED, False, PRECISION, ROWS, WIDTH, V_WIDTH, FULL, V_FULL, LIFT,
        )  # fmt: skip
        found_k, found_v = _fold_keys(
            found_k, found_v, high, last, k_tile, v_tile, q_here, grad_here, columns, at_row, factor, shift,
            reference, inverse, delta, mask_here, q_row, o_row, mask_row, mask_column, queries, keys, offset, window,
            width, v_width, scale, cap, parameter, SLOPES, RULE, P, REFERENCE, NORMALISED, RULED,
            CAPPED, FACTORED, SHIFTED, CAUSAL, WINDOWED, MASKED, True, PRECISION, ROWS, WIDTH, V_WIDTH, FULL, V_FULL, LIFT,
        )  # fmt: skip
    found_k = (found_k * plain_scale).to(grad_k.dtype.element_ty)
    found_v = (found_v * (1.0 / LIFT)).to(grad_v.dtype.element_ty)
    store_tile(grad_k + batch * gk_batch + key_head * gk_head, found_k, columns, keys, gk_row, width, WIDTH)
    store_tile(grad_v + batch * gv_batch + key_head * gv_head, found_v, columns, keys, gv_row, v_width, V_WIDTH)
