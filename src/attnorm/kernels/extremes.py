"""For each row, its smallest and its largest logit and their keys: one pass over the keys, without values.

Every column of a tile keeps its own extremes and the tiles they lie in, so that rows are searched once, at the end.
"""

import triton
import triton.language as tl

from attnorm.kernels.maps import no_rule
from attnorm.kernels.tiles import key_range, load_row, load_tile, logits, seen_keys, store_tile

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _fold(
    low, high, low_at, high_at, start, stop, q_tile, k, rows, factor,
    mask, k_row, mask_row, mask_column, queries, keys, offset, window, width, scale, cap,
    CAPPED: tl.constexpr, FACTORED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr,
    EDGE: tl.constexpr, PRECISION: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    for at in range(start, stop, COLUMNS):
        columns = at + tl.arange(0, COLUMNS)
        k_tile = load_tile(k, columns, keys, k_row, width, WIDTH, EDGE, FULL)
        dot = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        i, j = rows[:, None], columns[None, :]
        z = logits(
            dot * scale, i, j, offset, factor[:, None], 0.0, cap, 0.0, no_rule, False, False, CAPPED, FACTORED, False
        )
        smaller, larger = z < low, z > high
        if EDGE:
            seen = seen_keys(i, j, mask, mask_row, mask_column, queries, keys, offset, window, CAUSAL, WINDOWED, MASKED)
            smaller, larger = smaller & seen, larger & seen
        low, low_at = tl.where(smaller, z, low), tl.where(smaller, at, low_at)
        high, high_at = tl.where(larger, z, high), tl.where(larger, at, high_at)
    return low, high, low_at, high_at


@triton.jit
def _first_key(values, extreme, tile_at, keys, COLUMNS: tl.constexpr):
    """The first key of each row whose value is the extreme; 0 in a row that saw none."""
    key = tile_at + tl.arange(0, COLUMNS)[None, :]
    return tl.minimum(tl.min(tl.where(values == extreme[:, None], key, keys), 1), keys - 1)


@triton.jit
def extreme_logits(
    q, k, mask, factor, low_key, high_key, low_logit, high_logit,
    q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch, mask_head, mask_row, mask_column,
    heads, groups, queries, keys, offset, window, width, scale, cap,
    CAPPED: tl.constexpr, FACTORED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """(B, H, Q): the keys, and their logits in nats, 0 in a row that sees none."""
    blocks = tl.cdiv(queries, ROWS)
    program = tl.program_id(0)
    block = blocks - 1 - program % blocks  # the longest causal rows first
    batch_head = (program // blocks).to(tl.int64)
    batch, head = batch_head // heads, batch_head % heads
    k += batch * k_batch + head // groups * k_head
    mask += batch * mask_batch + head * mask_head
    rows = block * ROWS + tl.arange(0, ROWS)
    inside = rows < queries
    q_tile = load_tile(q + batch * q_batch + head * q_head, rows, queries, q_row, width, WIDTH, True, FULL)
    row_at = batch_head * queries + rows
    row_factor = load_row(factor, row_at, inside, FACTORED, 1.0)

    low = tl.full([ROWS, COLUMNS], float("inf"), tl.float32)
    high = tl.full([ROWS, COLUMNS], float("-inf"), tl.float32)
    low_at = tl.zeros([ROWS, COLUMNS], tl.int32)
    high_at = tl.zeros([ROWS, COLUMNS], tl.int32)
    first, begin, end, last = key_range(block, queries, keys, offset, window, CAUSAL, WINDOWED, MASKED, ROWS, COLUMNS)
    if WINDOWED or MASKED:
        low, high, low_at, high_at = _fold(
            low, high, low_at, high_at, first, begin, q_tile, k, rows, row_factor, mask, k_row, mask_row, mask_column,
            queries, keys, offset, window, width, scale, cap, CAPPED, FACTORED, CAUSAL, WINDOWED, MASKED, True,
            PRECISION, COLUMNS, WIDTH, FULL,
        )  # fmt: skip
    low, high, low_at, high_at = _fold(
        low, high, low_at, high_at, begin, end, q_tile, k, rows, row_factor, mask, k_row, mask_row, mask_column,
        queries, keys, offset, window, width, scale, cap, CAPPED, FACTORED, CAUSAL, WINDOWED, MASKED, False,
        PRECISION, COLUMNS, WIDTH, FULL,
    )  # fmt: skip
    low, high, low_at, high_at = _fold(
        low, high, low_at, high_at, end, last, q_tile, k, rows, row_factor, mask, k_row, mask_row, mask_column,
        queries, keys, offset, window, width, scale, cap, CAPPED, FACTORED, CAUSAL, WINDOWED, MASKED, True,
        PRECISION, COLUMNS, WIDTH, FULL,
    )  # fmt: skip
    least, most = tl.min(low, 1), tl.max(high, 1)
    tl.store(low_key + row_at, _first_key(low, least, low_at, keys, COLUMNS), mask=inside)
    tl.store(high_key + row_at, _first_key(high, most, high_at, keys, COLUMNS), mask=inside)
    tl.store(low_logit + row_at, tl.where(least < float("inf"), least * LN2, 0.0), mask=inside)
    tl.store(high_logit + row_at, tl.where(most > float("-inf"), most * LN2, 0.0), mask=inside)


@triton.jit
def sum_by_key(
    rows_in, index, sums, r_batch, r_head, r_row, s_batch, s_head, s_row, heads, groups, queries, keys, width,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """sums (B, G, K, D): the rows (B, H, Q, D) of all queries whose index (B, H, Q) is the key, in their order.

    A key that is the extreme of most rows, as a sink is, would hold up atomic sums and sums by sorting.
    """
    tiles = tl.cdiv(keys, COLUMNS)
    start = tl.program_id(0) % tiles * COLUMNS
    batch_head = (tl.program_id(0) // tiles).to(tl.int64)
    key_heads = heads // groups
    batch, key_head = batch_head // key_heads, batch_head % key_heads
    columns = start + tl.arange(0, COLUMNS)
    found = tl.zeros([COLUMNS, WIDTH], tl.float32)
    for member in range(groups):
        head = key_head * groups + member
        for at in range(0, queries, ROWS):
            rows = at + tl.arange(0, ROWS)
            key = tl.load(index + (batch * heads + head) * queries + rows, mask=rows < queries, other=-1)
            if tl.max(((key >= start) & (key < start + COLUMNS)).to(tl.int32), 0) > 0:
                here = rows_in + batch * r_batch + head * r_head
                tile = load_tile(here, rows, queries, r_row, width, WIDTH, True, False)
                match = (columns[:, None] == key[None, :]).to(tile.dtype)
                found = tl.dot(match, tile, found, input_precision=PRECISION)
    found = found.to(sums.dtype.element_ty)
    store_tile(sums + batch * s_batch + key_head * s_head, found, columns, keys, s_row, width, WIDTH)
