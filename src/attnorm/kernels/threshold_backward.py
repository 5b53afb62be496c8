"""Gradients of the threshold kernels.

Weights are computed again from the peak and the threshold of each row. With dp_j = <dO, v_j> the gradient of a logit is
slope u (dp - delta), where delta, the mean of dp under u, is <dO, mean of the values under u>: a second output of the
forward pass. Both kernels visit only tiles that hold a weight. No two programs add to the same number: results are
deterministic.
"""

import triton
import triton.language as tl

from attnorm.kernels.tiles import (
    key_range,
    list_tiles,
    load_row,
    load_tile,
    query_range,
    rise,
    seen_keys,
    store_tile,
    tilted,
)


@triton.jit
def _by_alpha(x, u, a):
    """How p changes with alpha at a fixed threshold, times -a^2: u (1 - x + x log x), a series near x = 1."""
    e = x - 1.0
    series = e * e * (0.5 - e * (1.0 / 6.0 - e * (1.0 / 12.0 - e * 0.05)))
    logarithm = tl.log(tl.where(x > 0, x, 1.0)) * x - e
    return u * tl.where(tl.abs(e) < 0.05, series, logarithm)


@triton.jit
def _fold_queries(
    grad_q, grad_factor, grad_parameter, listed, number, q_tile, grad_tile, k, v, rows, factor, peak, t, a, delta,
    middle, mask, k_row, v_row, mask_row, mask_column, queries, keys, offset, tilt, width, v_width,
    WEIGHTS: tl.constexpr, DEFORMED: tl.constexpr, EXACT: tl.constexpr, FAST: tl.constexpr, FACTORED: tl.constexpr,
    LEARNED: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, TILTED: tl.constexpr, EDGE: tl.constexpr,
    PRECISION: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, FULL: tl.constexpr,
    V_FULL: tl.constexpr,
):  # fmt: skip
    tile = tl.load(listed)
    for index in range(number):
        following = tl.load(listed + index + 1)
        columns = tile * COLUMNS + tl.arange(0, COLUMNS)
        k_tile = load_tile(k, columns, keys, k_row, width, WIDTH, EDGE, FULL)
        v_tile = load_tile(v, columns, keys, v_row, v_width, V_WIDTH, EDGE, V_FULL)
        dot = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        dot = tilted(dot, tilt, rows[:, None], columns[None, :], offset, TILTED)
        dp = tl.dot(grad_tile, tl.trans(v_tile), input_precision=PRECISION)
        x = rise(dot, factor, peak, t, a, DEFORMED, EXACT)
        if EDGE:
            i, j = rows[:, None], columns[None, :]
            seen = seen_keys(i, j, mask, mask_row, mask_column, queries, keys, offset, 0, CAUSAL, False, MASKED)
            x = tl.where(seen, x, 0.0)
        _p, u = WEIGHTS(x, a, FAST)
        ds = u * (dp - delta)
        if FACTORED:
            grad_factor += tl.sum(ds * (dot - middle), 1)
        if LEARNED:
            grad_parameter += tl.sum(_by_alpha(x, u, a) * (dp - delta), 1)
        grad_q = tl.dot(ds.to(k_tile.dtype), k_tile, grad_q, input_precision=PRECISION)
        tile = following
    return grad_q, grad_factor, grad_parameter


@triton.jit
def backward_queries(
    q, k, v, mask, row_factor, parameter, tilts, threshold, delta, grad, live, listed, grad_q, grad_factor,
    grad_parameter, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, mask_batch, mask_head,
    mask_row, mask_column, o_batch, o_head, o_row, gq_batch, gq_head, gq_row, heads, groups, queries, keys, offset,
    width, v_width, unit, slope, WEIGHTS: tl.constexpr, DEFORMED: tl.constexpr, PARAMETER: tl.constexpr,
    LEARNED: tl.constexpr, EXACT: tl.constexpr, FAST: tl.constexpr, LIFT: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, FACTORED: tl.constexpr, TILTED: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, FULL: tl.constexpr, V_FULL: tl.constexpr,
    LIVE_ROWS: tl.constexpr, LIVE_COLUMNS: tl.constexpr,
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
    row_at = batch_head * queries + rows
    q_tile = load_tile(q + batch * q_batch + head * q_head, rows, queries, q_row, width, WIDTH, True, FULL)
    grad_tile = load_tile(grad + batch * o_batch + head * o_head, rows, queries, o_row, v_width, V_WIDTH, True, V_FULL)
    own = load_row(row_factor, row_at, inside, FACTORED, 1.0)
    a = load_row(parameter, row_at, inside, PARAMETER, 0.5)
    tilt = tl.load(tilts + head) if TILTED else 0.0
    peak = tl.load(threshold + 2 * row_at, mask=inside, other=0.0)
    t = tl.load(threshold + 2 * row_at + 1, mask=inside, other=0.0)
    mean = tl.load(delta + row_at, mask=inside, other=0.0)

    _first, _low, high, last = key_range(block, queries, keys, offset, 0, CAUSAL, False, MASKED, ROWS, COLUMNS)
    whole, some = high // COLUMNS, tl.cdiv(last, COLUMNS)
    JOIN: tl.constexpr = COLUMNS // LIVE_COLUMNS if COLUMNS > LIVE_COLUMNS else 1
    SPLIT: tl.constexpr = LIVE_COLUMNS // COLUMNS if LIVE_COLUMNS > COLUMNS else 1
    ACROSS: tl.constexpr = ROWS // LIVE_ROWS if ROWS > LIVE_ROWS else 1
    flags, row_blocks = tl.cdiv(keys, LIVE_COLUMNS), tl.cdiv(queries, LIVE_ROWS)
    above = block * ROWS // LIVE_ROWS
    live += (batch_head * row_blocks + above) * flags
    listed += (batch_head * blocks + block) * tl.cdiv(keys, COLUMNS)
    number = list_tiles(live, 1, flags, flags, row_blocks - above, listed, 0, 0, whole, 0, SPLIT, JOIN, ACROSS)
    edges = list_tiles(
        live, 1, flags, flags, row_blocks - above, listed + whole, 0, whole, some, 0, SPLIT, JOIN, ACROSS
    )
    tl.debug_barrier()

    found = tl.zeros([ROWS, WIDTH], tl.float32)
    found_factor = tl.zeros([ROWS], tl.float32)
    found_parameter = tl.zeros([ROWS], tl.float32)
    factor_of = (own * unit)[:, None]
    # The gradients ds of a row sum to 0 but for the rounding of delta, which products far from 0 would multiply.
    middle = tl.where(own == 0, 0.0, peak / tl.where(own == 0, 1.0, own * unit))[:, None]
    found, found_factor, found_parameter = _fold_queries(
        found, found_factor, found_parameter, listed, number, q_tile, grad_tile, k, v, rows, factor_of, peak[:, None],
        t[:, None], a[:, None], mean[:, None], middle, mask, k_row, v_row, mask_row, mask_column, queries, keys, offset,
        tilt, width, v_width, WEIGHTS, DEFORMED, EXACT, FAST, FACTORED, LEARNED, CAUSAL, MASKED, TILTED, False,
        PRECISION, COLUMNS, WIDTH, V_WIDTH, FULL, V_FULL,
    )  # fmt: skip
    found, found_factor, found_parameter = _fold_queries(
        found, found_factor, found_parameter, listed + whole, edges, q_tile, grad_tile, k, v, rows, factor_of,
        peak[:, None], t[:, None], a[:, None], mean[:, None], middle, mask, k_row, v_row, mask_row, mask_column,
        queries, keys, offset, tilt, width, v_width, WEIGHTS, DEFORMED, EXACT, FAST, FACTORED, LEARNED, CAUSAL, MASKED,
        TILTED, True, PRECISION, COLUMNS, WIDTH, V_WIDTH, FULL, V_FULL,
    )  # fmt: skip
    if FACTORED:
        tl.store(grad_factor + row_at, found_factor * slope, mask=inside)
    if LEARNED:
        tl.store(grad_parameter + row_at, -found_parameter / (a * a), mask=inside)
    found = (found * (own * slope)[:, None]).to(grad_q.dtype.element_ty)
    store_tile(grad_q + batch * gq_batch + head * gq_head, found, rows, queries, gq_row, width, WIDTH)


@triton.jit
def _fold_keys(
    grad_k, grad_v, listed, number, k_tile, v_tile, q, grad, columns, at_row, row_factor, parameter, threshold, delta,
    mask, q_row, o_row, mask_row, mask_column, queries, keys, offset, tilt, width, v_width, unit,
    WEIGHTS: tl.constexpr, DEFORMED: tl.constexpr, PARAMETER: tl.constexpr, EXACT: tl.constexpr, FAST: tl.constexpr,
    LIFT: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, FACTORED: tl.constexpr, TILTED: tl.constexpr,
    EDGE: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    FULL: tl.constexpr, V_FULL: tl.constexpr,
):  # fmt: skip
    """Tiles lie with the keys as rows here."""
    tile = tl.load(listed)
    for index in range(number):
        following = tl.load(listed + index + 1)
        rows = tile * ROWS + tl.arange(0, ROWS)
        inside = rows < queries
        q_tile = load_tile(q, rows, queries, q_row, width, WIDTH, EDGE, FULL)
        grad_tile = load_tile(grad, rows, queries, o_row, v_width, V_WIDTH, EDGE, V_FULL)
        row_at = at_row + rows
        own = load_row(row_factor, row_at, inside, FACTORED, 1.0)
        a = load_row(parameter, row_at, inside, PARAMETER, 0.5)
        peak = tl.load(threshold + 2 * row_at, mask=inside, other=0.0)
        t = tl.load(threshold + 2 * row_at + 1, mask=inside, other=0.0)
        mean = tl.load(delta + row_at, mask=inside, other=0.0)
        dot = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
        dot = tilted(dot, tilt, rows[None, :], columns[:, None], offset, TILTED)
        dp = tl.dot(v_tile, tl.trans(grad_tile), input_precision=PRECISION)
        x = rise(dot, (own * unit)[None, :], peak[None, :], t[None, :], a[None, :], DEFORMED, EXACT)
        if EDGE:
            i, j = rows[None, :], columns[:, None]
            seen = seen_keys(i, j, mask, mask_row, mask_column, queries, keys, offset, 0, CAUSAL, False, MASKED)
            x = tl.where(seen, x, 0.0)
        p, u = WEIGHTS(x, a[None, :], FAST)
        if LIFT != 1.0:
            p = p * LIFT
        grad_v = tl.dot(p.to(grad_tile.dtype), grad_tile, grad_v, input_precision=PRECISION)
        ds = u * (dp - mean[None, :])
        if FACTORED:
            ds = ds * own[None, :]
        grad_k = tl.dot(ds.to(q_tile.dtype), q_tile, grad_k, input_precision=PRECISION)
        tile = following
    return grad_k, grad_v


@triton.jit
def backward_keys(
    q, k, v, mask, row_factor, parameter, tilts, threshold, delta, grad, live, listed, grad_k, grad_v,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    mask_batch, mask_head, mask_row, mask_column, o_batch, o_head, o_row,
    gk_batch, gk_head, gk_row, gv_batch, gv_head, gv_row,
    heads, groups, queries, keys, offset, width, v_width, unit, slope,
    WEIGHTS: tl.constexpr, DEFORMED: tl.constexpr, PARAMETER: tl.constexpr,
    EXACT: tl.constexpr, FAST: tl.constexpr, LIFT: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, FACTORED: tl.constexpr, TILTED: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    FULL: tl.constexpr, V_FULL: tl.constexpr, LIVE_ROWS: tl.constexpr, LIVE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """One block of keys of one key head, for all query heads that share it."""
    blocks = tl.cdiv(keys, COLUMNS)
    program = tl.program_id(0)
    block = program % blocks  # the first keys are seen by most queries
    batch_head = (program // blocks).to(tl.int64)
    key_heads = heads // groups
    batch, key_head = batch_head // key_heads, batch_head % key_heads
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    k_tile = load_tile(k + batch * k_batch + key_head * k_head, columns, keys, k_row, width, WIDTH, True, FULL)
    v_tile = load_tile(v + batch * v_batch + key_head * v_head, columns, keys, v_row, v_width, V_WIDTH, True, V_FULL)
    first, low, high, last = query_range(
        block * COLUMNS, queries, keys, offset, 0, CAUSAL, False, MASKED, ROWS, COLUMNS
    )
    JOIN: tl.constexpr = ROWS // LIVE_ROWS if ROWS > LIVE_ROWS else 1
    SPLIT: tl.constexpr = LIVE_ROWS // ROWS if LIVE_ROWS > ROWS else 1
    ACROSS: tl.constexpr = COLUMNS // LIVE_COLUMNS if COLUMNS > LIVE_COLUMNS else 1
    flags, row_blocks = tl.cdiv(keys, LIVE_COLUMNS), tl.cdiv(queries, LIVE_ROWS)
    across = block * COLUMNS // LIVE_COLUMNS
    listed += (batch_head * blocks + block) * tl.cdiv(queries, ROWS)

    found_k = tl.zeros([COLUMNS, WIDTH], tl.float32)
    found_v = tl.zeros([COLUMNS, V_WIDTH], tl.float32)
    for member in range(groups):
        head = key_head * groups + member
        at_head = batch * heads + head
        marks = live + at_head * row_blocks * flags + across
        tl.debug_barrier()
        number = list_tiles(
            marks, flags, row_blocks, 1, flags - across, listed, 0, low // ROWS, high // ROWS, 0, SPLIT, JOIN, ACROSS
        )
        edges = list_tiles(
            marks, flags, row_blocks, 1, flags - across, listed + number, 0, first // ROWS, low // ROWS, 0,
            SPLIT, JOIN, ACROSS,
        )  # fmt: skip
        edges = list_tiles(
            marks, flags, row_blocks, 1, flags - across, listed + number, edges, high // ROWS, tl.cdiv(last, ROWS), 0,
            SPLIT, JOIN, ACROSS,
        )  # fmt: skip
        tl.debug_barrier()
        q_here = q + batch * q_batch + head * q_head
        grad_here = grad + batch * o_batch + head * o_head
        mask_here = mask + batch * mask_batch + head * mask_head
        tilt = tl.load(tilts + head) if TILTED else 0.0
        found_k, found_v = _fold_keys(
            found_k, found_v, listed, number, k_tile, v_tile, q_here, grad_here, columns, at_head * queries,
            row_factor, parameter, threshold, delta, mask_here, q_row, o_row, mask_row, mask_column, queries, keys,
            offset, tilt, width, v_width, unit, WEIGHTS, DEFORMED, PARAMETER, EXACT, FAST, LIFT, CAUSAL, MASKED,
            FACTORED, TILTED, False, PRECISION, ROWS, WIDTH, V_WIDTH, FULL, V_FULL,
        )  # fmt: skip
        found_k, found_v = _fold_keys(
            found_k, found_v, listed + number, edges, k_tile, v_tile, q_here, grad_here, columns, at_head * queries,
            row_factor, parameter, threshold, delta, mask_here, q_row, o_row, mask_row, mask_column, queries, keys,
            offset, tilt, width, v_width, unit, WEIGHTS, DEFORMED, PARAMETER, EXACT, FAST, LIFT, CAUSAL, MASKED,
            FACTORED, TILTED, True, PRECISION, ROWS, WIDTH, V_WIDTH, FULL, V_FULL,
        )  # fmt: skip
    found_k = (found_k * slope).to(grad_k.dtype.element_ty)
    found_v = (found_v * (1.0 / LIFT)).to(grad_v.dtype.element_ty)
    store_tile(grad_k + batch * gk_batch + key_head * gk_head, found_k, columns, keys, gk_row, width, WIDTH)
    store_tile(grad_v + batch * gv_batch + key_head * gv_head, found_v, columns, keys, gv_row, v_width, V_WIDTH)
