"""Gradients of stick-breaking attention.

With dp_j = <dO, v_j>, w = p dp and W_j the sum of w over the keys up to j, the gradient of a logit is

    w_j - sigmoid(z_j) W_j

since a key takes its share from all keys before it. What the query's own key receives with REST counts as a key before
all others.

One kernel walks the keys of a block of queries twice: from the last to the first for the costs, then back for W and the
gradient of q. It keeps the costs behind and the W before every tile for the kernel of k and v. Those numbers take
memory of queries x tiles, so that the queries are taken in chunks. No two programs add to the same number: results are
deterministic.
"""

import triton
import triton.language as tl

from attnorm.kernels.stick_breaking import (
    GROUP,
    SPENT,
    own_key,
    sum_up_to,
    taken_and_cost,
    weights_of,
    without_own_keys,
)
from attnorm.kernels.tiles import key_range, load_row, load_tile, query_range, store_tile

CHUNK = tl.constexpr(128)


@triton.jit
def _spend(
    spent, live, start, stop, q_tile, k, rows, factor, later, stride,
    mask, k_row, mask_row, mask_column, queries, keys, offset, window, width, scale,
    FAST: tl.constexpr, FACTORED: tl.constexpr, REST: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    MASKED: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    FULL: tl.constexpr,
):  # fmt: skip
    """The cost with the keys from stop down to start added, and the first tile that was reached."""
    tiles = tl.cdiv(stop - start, COLUMNS)
    while (tiles > 0) & (tl.min(spent, 0) < SPENT):
        group = tl.minimum(tiles, GROUP)
        for index in range(group):
            tile = start // COLUMNS + tiles - 1 - index
            tl.store(later + stride.to(tl.int64) * tile, spent)
            columns = tile * COLUMNS + tl.arange(0, COLUMNS)
            k_tile = load_tile(k, columns, keys, k_row, width, WIDTH, EDGE, FULL)
            dot = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            _taken, cost = taken_and_cost(
                dot, rows[:, None], columns[None, :], factor[:, None], mask, mask_row, mask_column, queries, keys,
                offset, window, scale, FAST, FACTORED, REST, CAUSAL, WINDOWED, MASKED, EDGE,
            )  # fmt: skip
            spent += tl.sum(cost, 1)
        tiles -= group
        live = start // COLUMNS + tiles
    return spent, live


@triton.jit
def _fold_queries(
    grad_q, grad_factor, before, start, stop, q_tile, grad_tile, k, v, rows, factor, later, earlier, stride,
    mask, k_row, v_row, mask_row, mask_column, queries, keys, offset, window, width, v_width, scale,
    FAST: tl.constexpr, FACTORED: tl.constexpr, REST: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    MASKED: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr, FULL: tl.constexpr, V_FULL: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    for at in range(start, stop, COLUMNS):
        columns = at + tl.arange(0, COLUMNS)
        k_tile = load_tile(k, columns, keys, k_row, width, WIDTH, EDGE, FULL)
        v_tile = load_tile(v, columns, keys, v_row, v_width, V_WIDTH, EDGE, V_FULL)
        place = stride.to(tl.int64) * (at // COLUMNS)
        behind = tl.load(later + place)
        tl.store(earlier + place, before)
        dot = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        dp = tl.dot(grad_tile, tl.trans(v_tile), input_precision=PRECISION)
        taken, cost = taken_and_cost(
            dot, rows[:, None], columns[None, :], factor[:, None], mask, mask_row, mask_column, queries, keys, offset,
            window, scale, FAST, FACTORED, REST, CAUSAL, WINDOWED, MASKED, EDGE,
        )  # fmt: skip
        w = weights_of(taken, cost, behind[:, None], PART) * dp
        dz = w - tl.exp2(taken) * (sum_up_to(w, PART) + before[:, None])
        before += tl.sum(w, 1)
        if FACTORED:
            grad_factor += tl.sum(dz * dot, 1)
        grad_q = tl.dot(dz.to(k_tile.dtype), k_tile, grad_q, input_precision=PRECISION)
    return grad_q, grad_factor, before


@triton.jit
def backward_queries(
    q, k, v, mask, factor, grad, later, earlier, live_out, grad_q, grad_factor,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    mask_batch, mask_head, mask_row, mask_column, o_batch, o_head, o_row, gq_batch, gq_head, gq_row,
    heads, groups, queries, keys, offset, window, width, v_width, scale, plain_scale, begin, chunk,
    FAST: tl.constexpr, FACTORED: tl.constexpr, REST: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr, FULL: tl.constexpr, V_FULL: tl.constexpr, LIFT: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """The queries from begin to begin + chunk, both multiples of ROWS. later, earlier: (B, H, key tiles, chunk)."""
    blocks = chunk // ROWS
    program = tl.program_id(0)
    own = blocks - 1 - program % blocks
    block = begin // ROWS + own
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
    place = batch_head * tl.cdiv(keys, COLUMNS) * chunk + own * ROWS + tl.arange(0, ROWS)
    later += place
    earlier += place

    first, low, high, last = key_range(block, queries, keys, offset, window, CAUSAL, WINDOWED, MASKED, ROWS, COLUMNS)
    low, high = without_own_keys(first, low, high, block * ROWS + offset, REST, CAUSAL, COLUMNS)
    spent = tl.where(inside, 0.0, SPENT)
    live = tl.cdiv(last, COLUMNS)
    spent, live = _spend(
        spent, live, high, last, q_tile, k, rows, row_factor, later, chunk, mask, k_row, mask_row, mask_column, queries,
        keys, offset, window, width, scale, FAST, FACTORED, REST, CAUSAL, WINDOWED, MASKED, True, PRECISION, COLUMNS,
        WIDTH, FULL,
    )  # fmt: skip
    if CAUSAL or not REST:
        spent, live = _spend(
            spent, live, low, high, q_tile, k, rows, row_factor, later, chunk, mask, k_row, mask_row, mask_column,
            queries, keys, offset, window, width, scale, FAST, FACTORED, REST, CAUSAL, WINDOWED, MASKED, False,
            PRECISION, COLUMNS, WIDTH, FULL,
        )  # fmt: skip
    if WINDOWED:
        spent, live = _spend(
            spent, live, first, low, q_tile, k, rows, row_factor, later, chunk, mask, k_row, mask_row, mask_column,
            queries, keys, offset, window, width, scale, FAST, FACTORED, REST, CAUSAL, WINDOWED, MASKED, True,
            PRECISION, COLUMNS, WIDTH, FULL,
        )  # fmt: skip
    tl.store(live_out + batch_head * blocks + own, live)
    tl.debug_barrier()  # the same program reads what it stored

    before = tl.zeros([ROWS], tl.float32)
    if REST:
        values, seen = own_key(
            v, rows, mask, mask_row, mask_column, queries, keys, offset, window, v_row, v_width, MASKED, V_WIDTH,
            V_FULL,
        )  # fmt: skip
        dp = tl.sum(grad_tile.to(tl.float32) * values.to(tl.float32), 1)
        before = tl.where(seen, tl.exp2(-spent), 0.0) * dp
    found = tl.zeros([ROWS, WIDTH], tl.float32)
    found_factor = tl.zeros([ROWS], tl.float32)
    reached = live * COLUMNS
    if WINDOWED:
        found, found_factor, before = _fold_queries(
            found, found_factor, before, tl.maximum(first, reached), low, q_tile, grad_tile, k, v, rows, row_factor,
            later, earlier, chunk, mask, k_row, v_row, mask_row, mask_column, queries, keys, offset, window, width,
            v_width, scale, FAST, FACTORED, REST, CAUSAL, WINDOWED, MASKED, True, PRECISION, COLUMNS, WIDTH, V_WIDTH,
            FULL, V_FULL, PART,
        )  # fmt: skip
    found, found_factor, before = _fold_queries(
        found, found_factor, before, tl.maximum(low, reached), high, q_tile, grad_tile, k, v, rows, row_factor, later,
        earlier, chunk, mask, k_row, v_row, mask_row, mask_column, queries, keys, offset, window, width, v_width,
        scale, FAST, FACTORED, REST, CAUSAL, WINDOWED, MASKED, False, PRECISION, COLUMNS, WIDTH, V_WIDTH, FULL, V_FULL,
        PART,
    )  # fmt: skip
    found, found_factor, before = _fold_queries(
        found, found_factor, before, tl.maximum(high, reached), last, q_tile, grad_tile, k, v, rows, row_factor, later,
        earlier, chunk, mask, k_row, v_row, mask_row, mask_column, queries, keys, offset, window, width, v_width,
        scale, FAST, FACTORED, REST, CAUSAL, WINDOWED, MASKED, True, PRECISION, COLUMNS, WIDTH, V_WIDTH, FULL, V_FULL,
        PART,
    )  # fmt: skip
    found = (found * (row_factor * plain_scale)[:, None]).to(grad_q.dtype.element_ty)
    store_tile(grad_q + batch * gq_batch + head * gq_head, found, rows, queries, gq_row, width, WIDTH)
    if FACTORED:
        tl.store(grad_factor + row_at, found_factor * plain_scale, mask=inside)


@triton.jit
def _fold_keys(
    grad_k, grad_v, start, stop, k_tile, v_tile, q, grad, columns, at_row, factor, spent, later, earlier, begin,
    mask, q_row, o_row, mask_row, mask_column, queries, keys, offset, window, width, v_width, scale,
    FAST: tl.constexpr, FACTORED: tl.constexpr, REST: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    MASKED: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr, FULL: tl.constexpr, V_FULL: tl.constexpr, LIFT: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    for at in range(start, stop, ROWS):
        rows = at + tl.arange(0, ROWS)
        inside = rows < queries
        q_tile = load_tile(q, rows, queries, q_row, width, WIDTH, EDGE, FULL)
        grad_tile = load_tile(grad, rows, queries, o_row, v_width, V_WIDTH, EDGE, V_FULL)
        row_factor = load_row(factor, at_row + rows, inside, FACTORED, 1.0)
        behind = tl.load(later + (rows - begin))
        before = tl.load(earlier + (rows - begin))
        dot = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        dp = tl.dot(grad_tile, tl.trans(v_tile), input_precision=PRECISION)
        i, j = rows[:, None], columns[None, :]
        taken, cost = taken_and_cost(
            dot, i, j, row_factor[:, None], mask, mask_row, mask_column, queries, keys, offset, window, scale, FAST,
            FACTORED, REST, CAUSAL, WINDOWED, MASKED, EDGE,
        )  # fmt: skip
        p = weights_of(taken, cost, behind[:, None], PART)
        w = p * dp
        dz = w - tl.exp2(taken) * (sum_up_to(w, PART) + before[:, None])
        if FACTORED:
            dz = dz * row_factor[:, None]
        if REST and EDGE:
            rest = tl.exp2(-load_row(spent, at_row + rows, inside, True, 0.0))
            at_mask = mask + rows.to(tl.int64) * mask_row + (rows + offset).to(tl.int64) * mask_column
            own = inside & (rows + offset >= 0)
            if MASKED:
                own = own & (tl.load(at_mask, mask=own & (rows + offset < keys), other=0) != 0)
            p = tl.where((j == i + offset) & own[:, None], rest[:, None], p)
        grad_v = tl.dot(tl.trans((p * LIFT).to(grad_tile.dtype)), grad_tile, grad_v, input_precision=PRECISION)
        grad_k = tl.dot(tl.trans(dz.to(q_tile.dtype)), q_tile, grad_k, input_precision=PRECISION)
    return grad_k, grad_v


@triton.jit
def _last_live(live, tile, blocks):
    """One more than the last block of queries of the chunk that reached a tile of keys."""
    last = tl.zeros([CHUNK], tl.int32)
    for at in range(0, blocks, CHUNK):
        block = at + tl.arange(0, CHUNK)
        reached = tl.load(live + block, mask=block < blocks, other=tile + 1) <= tile
        last = tl.maximum(last, tl.where(reached, block + 1, 0))
    return tl.max(last, 0)


@triton.jit
def backward_keys(
    q, k, v, mask, factor, grad, spent, later, earlier, live, grad_k, grad_v,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    mask_batch, mask_head, mask_row, mask_column, o_batch, o_head, o_row,
    gk_batch, gk_head, gk_row, gv_batch, gv_head, gv_row,
    heads, groups, queries, keys, offset, window, width, v_width, scale, plain_scale, begin, chunk,
    FAST: tl.constexpr, FACTORED: tl.constexpr, REST: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr, FULL: tl.constexpr, V_FULL: tl.constexpr, LIFT: tl.constexpr, PART: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """A tile of keys of one key head, for the queries of a chunk in all heads that share it; ADD: to what is there."""
    tiles = tl.cdiv(keys, COLUMNS)
    program = tl.program_id(0)
    tile = program % tiles  # the first keys are seen by most queries
    batch_head = (program // tiles).to(tl.int64)
    key_heads = heads // groups
    batch, key_head = batch_head // key_heads, batch_head % key_heads
    columns = tile * COLUMNS + tl.arange(0, COLUMNS)
    k_tile = load_tile(k + batch * k_batch + key_head * k_head, columns, keys, k_row, width, WIDTH, True, FULL)
    v_tile = load_tile(v + batch * v_batch + key_head * v_head, columns, keys, v_row, v_width, V_WIDTH, True, V_FULL)
    found_k = tl.zeros([COLUMNS, WIDTH], tl.float32)
    found_v = tl.zeros([COLUMNS, V_WIDTH], tl.float32)
    first, low, high, last = query_range(
        tile * COLUMNS, queries, keys, offset, window, CAUSAL, WINDOWED, MASKED, ROWS, COLUMNS
    )
    if REST:
        if CAUSAL:
            low = tl.maximum(low, tl.cdiv(tl.maximum((tile + 1) * COLUMNS - offset, 0), ROWS) * ROWS)
            low = tl.minimum(low, last)
            high = tl.maximum(high, low)
        else:
            low, high = last, last
    end = tl.minimum(begin + chunk, queries)
    for member in range(groups):
        head = key_head * groups + member
        at_head = batch * heads + head
        reached = tl.minimum(begin + _last_live(live + at_head * (chunk // ROWS), tile, chunk // ROWS) * ROWS, end)
        q_here = q + batch * q_batch + head * q_head
        grad_here = grad + batch * o_batch + head * o_head
        mask_here = mask + batch * mask_batch + head * mask_head
        later_here = later + (at_head * tiles + tile) * chunk
        earlier_here = earlier + (at_head * tiles + tile) * chunk
        found_k, found_v = _fold_keys(
            found_k, found_v, tl.maximum(first, begin), tl.minimum(low, reached), k_tile, v_tile, q_here, grad_here,
            columns, at_head * queries, factor, spent, later_here, earlier_here, begin, mask_here, q_row, o_row,
            mask_row, mask_column, queries, keys, offset, window, width, v_width, scale, FAST, FACTORED, REST, CAUSAL,
            WINDOWED, MASKED, True, PRECISION, ROWS, WIDTH, V_WIDTH, FULL, V_FULL, LIFT, PART,
        )  # fmt: skip
        found_k, found_v = _fold_keys(
            found_k, found_v, tl.maximum(low, begin), tl.minimum(high, reached), k_tile, v_tile, q_here, grad_here,
            columns, at_head * queries, factor, spent, later_here, earlier_here, begin, mask_here, q_row, o_row,
            mask_row, mask_column, queries, keys, offset, window, width, v_width, scale, FAST, FACTORED, REST, CAUSAL,
            WINDOWED, MASKED, False, PRECISION, ROWS, WIDTH, V_WIDTH, FULL, V_FULL, LIFT, PART,
        )  # fmt: skip
        found_k, found_v = _fold_keys(
            found_k, found_v, tl.maximum(high, begin), tl.minimum(last, reached), k_tile, v_tile, q_here, grad_here,
            columns, at_head * queries, factor, spent, later_here, earlier_here, begin, mask_here, q_row, o_row,
            mask_row, mask_column, queries, keys, offset, window, width, v_width, scale, FAST, FACTORED, REST, CAUSAL,
            WINDOWED, MASKED, True, PRECISION, ROWS, WIDTH, V_WIDTH, FULL, V_FULL, LIFT, PART,
        )  # fmt: skip
    grad_k += batch * gk_batch + key_head * gk_head
    grad_v += batch * gv_batch + key_head * gv_head
    found_k = found_k * plain_scale
    found_v = found_v * (1.0 / LIFT)
    if ADD:
        found_k += load_tile(grad_k, columns, keys, gk_row, width, WIDTH, True, FULL)
        found_v += load_tile(grad_v, columns, keys, gv_row, v_width, V_WIDTH, True, V_FULL)
    store_tile(grad_k, found_k.to(grad_k.dtype.element_ty), columns, keys, gk_row, width, WIDTH)
    store_tile(grad_v, found_v.to(grad_v.dtype.element_ty), columns, keys, gv_row, v_width, V_WIDTH)
