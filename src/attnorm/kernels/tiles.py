"""Tiles of attention: some queries, the rows, against some keys, the columns."""

import triton
import triton.language as tl


@triton.jit
def block_and_head(length, BLOCK: tl.constexpr):
    """Which block of a length, and which head of all batches, a program has. (A second axis of programs is short.)"""
    program = tl.program_id(0)
    blocks = tl.cdiv(length, BLOCK)
    return program % blocks, (program // blocks).to(tl.int64)


@triton.jit
def load_rows(pointer, rows, length, stride, width, WIDTH: tl.constexpr):
    """(rows, WIDTH) of a matrix (length, width), with zeros around it."""
    columns = tl.arange(0, WIDTH)
    inside = (rows < length)[:, None] & (columns < width)[None, :]
    return tl.load(pointer + rows[:, None].to(tl.int64) * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def store_rows(pointer, values, rows, length, stride, width, WIDTH: tl.constexpr):
    columns = tl.arange(0, WIDTH)
    inside = (rows < length)[:, None] & (columns < width)[None, :]
    tl.store(pointer + rows[:, None].to(tl.int64) * stride + columns[None, :], values, mask=inside)


@triton.jit
def scores(
    products, rows, columns, mask, mask_row, mask_column, queries, keys, offset, factor,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """s of a tile, -inf where a query does not see a key. Tiles that are not at an edge are seen whole.

    factor: one number, or a column with one per row, in float32: q is not rounded a second time.
    """
    s = products * factor
    if EDGE:
        seen = (rows < queries)[:, None] & (columns < keys)[None, :]
        if CAUSAL:
            seen = seen & (columns[None, :] <= rows[:, None] + offset)
        if MASKED:
            at = mask + rows[:, None].to(tl.int64) * mask_row + columns[None, :].to(tl.int64) * mask_column
            seen = seen & (tl.load(at, mask=seen, other=0) != 0)
        s = tl.where(seen, s, float("-inf"))
    return s


@triton.jit
def scores_from(
    start, q, k, rows, mask, k_row, mask_row, mask_column, queries, keys, offset, width, factor,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """s of the tile whose first key is `start`."""
    columns = start + tl.arange(0, COLUMNS)
    k_tile = load_rows(k, columns, keys, k_row, width, WIDTH)
    products = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION)
    return scores(
        products, rows, columns, mask, mask_row, mask_column, queries, keys, offset, factor, CAUSAL, MASKED, EDGE
    )


@triton.jit
def keys_of(
    block, queries, keys, offset,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """For a block of queries: the leading keys, in whole tiles, that all of them see, and those that some may see."""
    whole, some = keys, keys
    if CAUSAL:
        whole = tl.maximum(tl.minimum(block * ROWS + offset + 1, keys), 0)
        some = tl.maximum(tl.minimum(tl.minimum((block + 1) * ROWS, queries) + offset, keys), 0)
    if MASKED:
        whole = 0
    return whole // COLUMNS * COLUMNS, some
