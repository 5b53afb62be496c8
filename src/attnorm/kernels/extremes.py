"""For each row, its smallest and its largest logit and their keys: one pass over the keys, without values.

Every column of a tile keeps its own extremes and the tiles they lie in, so that rows are searched once, at the end.
"""

import triton
import triton.language as tl

from attnorm.kernels.blocks import (
    Constants,
    block_of_keys,
    key_range,
    load_row,
    load_tile,
    matrix_of_head,
    queries_and_keys,
    seen_keys,
    store_tile,
)
from attnorm.kernels.maps import LN2
from attnorm.kernels.tiles import plain_logits


@triton.jit
def _fold(
    low, high, low_at, high_at, start, stop, q_tile, k, rows, factor, sight, scale, cap,
    CAPPED: tl.constexpr, FACTORED: tl.constexpr, C: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    for at in range(start, stop, C.COLUMNS):
        columns = at + tl.arange(0, C.COLUMNS)
        z = plain_logits(q_tile, k, columns, factor, scale, cap, CAPPED, FACTORED, C, EDGE)
        smaller, larger = z < low, z > high
        if EDGE:
            seen = seen_keys(rows[:, None], columns[None, :], sight, C)
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
    C: tl.constexpr = Constants(CAUSAL, WINDOWED, MASKED, PRECISION, ROWS, COLUMNS, WIDTH, FULL)
    own, rows, inside, q_tile, k, sight = queries_and_keys(
        q, k, mask, q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch, mask_head, mask_row, mask_column,
        heads, groups, queries, keys, offset, window, width, C,
    )  # fmt: skip
    row_at = own.batch_head * queries + rows
    row_factor = load_row(factor, row_at, inside, FACTORED, 1.0)

    low = tl.full([ROWS, COLUMNS], float("inf"), tl.float32)
    high = tl.full([ROWS, COLUMNS], float("-inf"), tl.float32)
    low_at = tl.zeros([ROWS, COLUMNS], tl.int32)
    high_at = tl.zeros([ROWS, COLUMNS], tl.int32)
    borders = key_range(own.index, sight, C)
    for part in tl.static_range(0 if WINDOWED or MASKED else 1, 3):
        low, high, low_at, high_at = _fold(
            low, high, low_at, high_at, borders[part], borders[part + 1], q_tile, k, rows, row_factor, sight, scale,
            cap, CAPPED, FACTORED, C, part != 1,
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
    own = block_of_keys(keys, heads, groups, COLUMNS)
    start = own.index * COLUMNS
    columns = start + tl.arange(0, COLUMNS)
    found = tl.zeros([COLUMNS, WIDTH], tl.float32)
    for member in range(groups):
        head = own.head * groups + member
        for at in range(0, queries, ROWS):
            rows = at + tl.arange(0, ROWS)
            key = tl.load(index + (own.batch * heads + head) * queries + rows, mask=rows < queries, other=-1)
            if tl.max(((key >= start) & (key < start + COLUMNS)).to(tl.int32), 0) > 0:
                here = matrix_of_head(rows_in, own.batch, head, r_batch, r_head, r_row, queries, width)
                tile = load_tile(here, rows, WIDTH, True, False)
                match = (columns[:, None] == key[None, :]).to(tile.dtype)
                found = tl.dot(match, tile, found, input_precision=PRECISION)
    sums = matrix_of_head(sums, own.batch, own.head, s_batch, s_head, s_row, keys, width)
    store_tile(sums, found, columns, WIDTH)
