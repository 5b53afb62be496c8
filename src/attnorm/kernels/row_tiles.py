"""What the kernels of row statistics share: the rows of a program, and one tile of keys after the other.

The first visible key of a row, the sink, is set apart. Tiles that some row may not see whole come first, then those
that all rows see.

The keys of a tile are dealt into classes per row, one for each thread that holds a part of the row in the layout of the
tensor cores: sums and extremes of a class need no other thread. Classes are counted in pairs of neighbours.
"""

import triton
import triton.language as tl

from attnorm.kernels.tiles import capped, load_row, load_tile


@triton.jit
def key_tile(
    start, q_tile, k, rows, k_row, mask, mask_row, mask_column, queries, keys, offset, width, scale, cap,
    first, CAUSAL: tl.constexpr, MASKED: tl.constexpr, EDGE: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Products, or capped logits in bits; which keys of the tile count, and the first visible key with its product."""
    columns = start + tl.arange(0, KEYS)
    k_tile = load_tile(k, columns, keys, k_row, width, WIDTH, EDGE, FULL)
    s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
    if CAPPED:
        s, _slope = capped(s * scale, cap, CAPPED)
    i, j = rows[:, None], columns[None, :]
    seen = (i < queries) & (j < keys)
    sink = tl.zeros_like(first).to(tl.float32)
    count = tl.zeros_like(first)
    if EDGE:
        if CAUSAL:
            seen = seen & (j <= i + offset)
        if MASKED:
            at = mask + i.to(tl.int64) * mask_row + j.to(tl.int64) * mask_column
            seen = seen & (tl.load(at, mask=seen, other=0) != 0)
            count = tl.sum(seen.to(tl.int32), 1)
        found = tl.min(tl.where(seen, j, keys), 1)
        new = (first == keys) & (found < keys)
        sink = tl.sum(tl.where(new[:, None] & (j == found[:, None]), s, 0.0), 1)
        first = tl.where(new, found, first)
        seen = seen & (j != first[:, None])
    return s, seen, first, sink, count


@triton.jit
def halves(x):
    """The left and the right half of the columns."""
    return tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@triton.jit
def neighbours(x):
    """The even and the odd columns."""
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def by_class(x, CLASSES: tl.constexpr):
    return tl.reshape(x, [x.shape[0], x.shape[1] // CLASSES, CLASSES])


@triton.jit
def rows_of_program(
    program, q, k, mask, factor, row_queries, q_batch, q_head, q_row, k_batch, k_head, mask_batch, mask_head,
    heads, groups, rows_total, queries, width, scale,
    CAPPED: tl.constexpr, FACTORED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """What a program reads: the keys and the mask of its head, its rows with their queries.

    unit: what turns the products of a row into its logits z in bits. Where it is negative, q changes its sign instead.
    logit: what turns the products that remain into logits in bits before the factor.
    """
    blocks = tl.cdiv(rows_total, ROWS)
    block = blocks - 1 - program % blocks  # the longest causal rows first, or they would run alone at the end
    batch_head = (program // blocks).to(tl.int64)
    batch, head = batch_head // heads, batch_head % heads
    k += batch * k_batch + head // groups * k_head
    mask += batch * mask_batch + head * mask_head
    at = block * ROWS + tl.arange(0, ROWS)
    inside = at < rows_total
    rows = tl.load(row_queries + at, mask=inside, other=queries)
    q_tile = load_tile(q + batch * q_batch + head * q_head, at, rows_total, q_row, width, WIDTH, True, FULL)
    logit = tl.full([ROWS], 1.0, tl.float32)
    if not CAPPED:
        logit = logit * scale
    unit = logit * load_row(factor, batch_head * rows_total + at, inside, FACTORED, 1.0)
    turned = unit < 0
    q_tile = tl.where(turned[:, None], -q_tile, q_tile)
    return k, mask, at, inside, rows, q_tile, tl.abs(unit), tl.where(turned, -logit, logit), batch_head, block


@triton.jit
def tiles_of_rows(
    row_queries, block, rows_total, keys, offset,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Tiles with keys that some row of the block may not see, tiles that all rows see, and where the latter end.

    The first tile, which has the sink, counts among the former. It comes first, then those that all see follow.
    """
    high, last = keys // KEYS * KEYS, keys
    if CAUSAL:
        earliest = tl.load(row_queries + block * ROWS)
        latest = tl.load(row_queries + tl.minimum((block + 1) * ROWS, rows_total) - 1)
        high = tl.maximum(tl.minimum(earliest + offset + 1, keys), 0) // KEYS * KEYS
        last = tl.maximum(tl.minimum(latest + offset + 1, keys), 0)
    if MASKED:
        high = 0
    high = tl.maximum(high, KEYS)
    some = (last > 0).to(tl.int32)
    return some + tl.cdiv(tl.maximum(last - high, 0), KEYS), high // KEYS - 1, high
