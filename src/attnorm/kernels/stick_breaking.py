"""Stick-breaking attention: a walk over the keys from the last to the first, with the matrix of weights on the chip.

A key takes the share sigmoid(z) of what is left of the stick and leaves 2^-cost of it, cost = log2(1 + e^z):

    log2 p_j = log2 sigmoid(z_j) - (costs of all later keys)

and a row carries one number: the cost so far. Below 2^-160 of the stick float32 has no weight any more: a block of
queries ends its walk as soon as all its rows are there. With REST the query's own key takes no share, costs nothing and
receives what is left at the end.
"""

import triton
import triton.language as tl

from attnorm.kernels.maps import log2
from attnorm.kernels.tiles import key_range, load_row, load_tile, seen_keys, store_tile

SPENT = tl.constexpr(160.0)  # bits: nothing is left
GROUP = tl.constexpr(8)  # tiles between two looks at what is left; a loop of fixed length keeps the loads ahead


@triton.jit
def taken_and_cost(
    dot, i, j, factor, mask, mask_row, mask_column, queries, keys, offset, window, scale,
    FAST: tl.constexpr, FACTORED: tl.constexpr, REST: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """log2 of the shares of a tile, -inf where a key takes none, and the costs, in bits.

    A cost is at most SPENT: beside larger ones the costs of other keys would lose their digits in sums.
    """
    z = dot * scale
    if FACTORED:
        z = z * factor
    tail = log2(1.0 + tl.exp2(-tl.abs(z)), FAST)
    taken = tl.minimum(z, 0.0, propagate_nan=tl.PropagateNan.ALL) - tail
    cost = tl.minimum(tl.maximum(z, 0.0) + tail, SPENT)
    if EDGE:
        seen = seen_keys(i, j, mask, mask_row, mask_column, queries, keys, offset, window, CAUSAL, WINDOWED, MASKED)
        if REST:
            seen = seen & (j != i + offset)
        taken = tl.where(seen, taken, float("-inf"))
        cost = tl.where(seen, cost, 0.0)
    return taken, cost


@triton.jit
def _times_ones(x, ones, PART: tl.constexpr):
    """x @ ones, for x in two parts of half precision each: a product costs far less than a scan across threads."""
    coarse = x.to(PART)
    fine = (x - coarse.to(tl.float32)).to(PART)
    return tl.dot(fine, ones, tl.dot(coarse, ones))


@triton.jit
def sum_after(x, PART: tl.constexpr):
    """For each column, the sum over the columns behind it."""
    if PART == tl.float32:  # noqa: SIM300
        return tl.cumsum(x, 1, reverse=True) - x
    at = tl.arange(0, x.shape[1])
    return _times_ones(x, (at[:, None] > at[None, :]).to(PART), PART)


@triton.jit
def sum_up_to(x, PART: tl.constexpr):
    """For each column, the sum over the columns up to it."""
    if PART == tl.float32:  # noqa: SIM300
        return tl.cumsum(x, 1)
    at = tl.arange(0, x.shape[1])
    return _times_ones(x, (at[:, None] <= at[None, :]).to(PART), PART)


@triton.jit
def weights_of(taken, cost, later, PART: tl.constexpr):
    """The weights of a tile, given the costs of all keys behind it."""
    return tl.exp2(taken - sum_after(cost, PART) - later)


@triton.jit
def own_key(
    v, rows, mask, mask_row, mask_column, queries, keys, offset, window, v_row, v_width,
    MASKED: tl.constexpr, V_WIDTH: tl.constexpr, V_FULL: tl.constexpr,
):  # fmt: skip
    """The values of the queries' own keys, and which of them are seen."""
    at = tl.where(rows + offset < 0, keys, rows + offset)
    seen = seen_keys(rows, at, mask, mask_row, mask_column, queries, keys, offset, window, False, False, MASKED)
    return load_tile(v, at, keys, v_row, v_width, V_WIDTH, True, V_FULL), seen


@triton.jit
def without_own_keys(first, low, high, own, REST: tl.constexpr, CAUSAL: tl.constexpr, COLUMNS: tl.constexpr):
    """The keys from low to high in whole tiles, less those that may be a query's own; `own` is the first query's."""
    if REST:
        if CAUSAL:
            high = tl.maximum(tl.minimum(high, tl.maximum(own, 0) // COLUMNS * COLUMNS), low)
        else:
            low, high = first, first
    return low, high


@triton.jit
def _fold(
    acc, spent, start, stop, q_tile, k, v, rows, factor,
    mask, k_row, v_row, mask_row, mask_column, queries, keys, offset, window, width, v_width, scale,
    FAST: tl.constexpr, FACTORED: tl.constexpr, REST: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    MASKED: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr, FULL: tl.constexpr, V_FULL: tl.constexpr, LIFT: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Output and cost of a block of queries, with the keys from stop down to start added."""
    tiles = tl.cdiv(stop - start, COLUMNS)
    while (tiles > 0) & (tl.min(spent, 0) < SPENT):
        group = tl.minimum(tiles, GROUP)
        for index in range(group):
            columns = start + (tiles - 1 - index) * COLUMNS + tl.arange(0, COLUMNS)
            k_tile = load_tile(k, columns, keys, k_row, width, WIDTH, EDGE, FULL)
            v_tile = load_tile(v, columns, keys, v_row, v_width, V_WIDTH, EDGE, V_FULL)
            dot = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            taken, cost = taken_and_cost(
                dot, rows[:, None], columns[None, :], factor[:, None], mask, mask_row, mask_column, queries, keys,
                offset, window, scale, FAST, FACTORED, REST, CAUSAL, WINDOWED, MASKED, EDGE,
            )  # fmt: skip
            p = weights_of(taken, cost, spent[:, None], PART) * LIFT
            spent += tl.sum(cost, 1)
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
        tiles -= group
    return acc, spent


@triton.jit
def forward(
    q, k, v, mask, factor, out, spent_out,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    mask_batch, mask_head, mask_row, mask_column, o_batch, o_head, o_row,
    heads, groups, queries, keys, offset, window, width, v_width, scale,
    FAST: tl.constexpr, FACTORED: tl.constexpr, REST: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr, FULL: tl.constexpr, V_FULL: tl.constexpr, LIFT: tl.constexpr, PART: tl.constexpr,
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

    acc = tl.zeros([ROWS, V_WIDTH], tl.float32)
    spent = tl.where(inside, 0.0, SPENT)
    first, low, high, last = key_range(block, queries, keys, offset, window, CAUSAL, WINDOWED, MASKED, ROWS, COLUMNS)
    low, high = without_own_keys(first, low, high, block * ROWS + offset, REST, CAUSAL, COLUMNS)
    acc, spent = _fold(
        acc, spent, high, last, q_tile, k, v, rows, row_factor, mask, k_row, v_row, mask_row, mask_column, queries,
        keys, offset, window, width, v_width, scale, FAST, FACTORED, REST, CAUSAL, WINDOWED, MASKED, True, PRECISION,
        COLUMNS, WIDTH, V_WIDTH, FULL, V_FULL, LIFT, PART,
    )  # fmt: skip
    if CAUSAL or not REST:  # otherwise empty, and Triton 3.6 cannot compile a loop that it knows to be empty
        acc, spent = _fold(
            acc, spent, low, high, q_tile, k, v, rows, row_factor, mask, k_row, v_row, mask_row, mask_column, queries,
            keys, offset, window, width, v_width, scale, FAST, FACTORED, REST, CAUSAL, WINDOWED, MASKED, False,
            PRECISION, COLUMNS, WIDTH, V_WIDTH, FULL, V_FULL, LIFT, PART,
        )  # fmt: skip
    if WINDOWED:
        acc, spent = _fold(
            acc, spent, first, low, q_tile, k, v, rows, row_factor, mask, k_row, v_row, mask_row, mask_column, queries,
            keys, offset, window, width, v_width, scale, FAST, FACTORED, REST, CAUSAL, WINDOWED, MASKED, True,
            PRECISION, COLUMNS, WIDTH, V_WIDTH, FULL, V_FULL, LIFT, PART,
        )  # fmt: skip
    acc = acc * (1.0 / LIFT)
    if REST:
        own, seen = own_key(
            v, rows, mask, mask_row, mask_column, queries, keys, offset, window, v_row, v_width, MASKED, V_WIDTH,
            V_FULL,
        )  # fmt: skip
        acc += tl.where(seen, tl.exp2(-spent), 0.0)[:, None] * own.to(tl.float32)
        tl.store(spent_out + row_at, spent, mask=inside)
    store_tile(
        out + batch * o_batch + head * o_head, acc.to(out.dtype.element_ty), rows, queries, o_row, v_width, V_WIDTH
    )
