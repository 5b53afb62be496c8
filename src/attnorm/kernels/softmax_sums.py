"""Sums of every row of softmax attention in one pass over the keys, without values and without the matrix of logits.

Two keys of a row are set apart: the first visible one (the sink) and the largest of the others. The remaining keys are
summed relative to the largest among themselves, the runner-up, so no sum underflows and nothing is ever subtracted.
metrics/fused_rows.py turns the sums into the statistics of a row.

Most tiles hold no key above the runner-up of any row once some hundred keys have been seen. Those only add to the sums.
"""

import triton
import triton.language as tl

from attnorm.kernels.maps import LOG2E
from attnorm.kernels.one_pass_tiles import capped, load_row, load_tile

# The columns of the result. Extremes are natural logits before the factor; the sums are over keys other than the first
# and the largest, e = exp(z - runner_up) with z = factor * logit.
COLUMNS = (
    "n",
    "sink",  # logit of the first visible key
    "largest",  # of the other keys
    "smallest",
    "level",  # the largest z of the other keys
    "runner_up",  # the second largest z of the other keys
    "first_power",  # sum e
    "tilt",  # sum e log e
    "second_power",  # sum e^2
    "third_power",
    "fourth_power",
)


@triton.jit
def _tile(
    start, q_tile, k, rows, factor, k_row, mask, mask_row, mask_column, queries, keys, offset, width, scale, cap,
    first, CAUSAL: tl.constexpr, MASKED: tl.constexpr, EDGE: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Logits in bits before the factor, which keys of the tile count, and the first visible key with its logit."""
    columns = start + tl.arange(0, KEYS)
    k_tile = load_tile(k, columns, keys, k_row, width, WIDTH, EDGE, FULL)
    s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale
    s, _slope = capped(s, cap, CAPPED)
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
def _fold(
    n, first, sink, largest, smallest, level, runner_up, s1, tilt, s2, s3, s4,
    start, stop, q_tile, k, rows, factor, k_row, mask, mask_row, mask_column, queries, keys, offset, width, scale, cap,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, EDGE: tl.constexpr, CAPPED: tl.constexpr, FACTORED: tl.constexpr,
    PRECISION: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """The state of a block of rows with the keys from start to stop added."""
    for at in range(start, stop, KEYS):
        s, seen, first, found_sink, count = _tile(
            at, q_tile, k, rows, factor, k_row, mask, mask_row, mask_column, queries, keys, offset, width, scale, cap,
            first, CAUSAL, MASKED, EDGE, CAPPED, PRECISION, KEYS, WIDTH, FULL,
        )  # fmt: skip
        if EDGE:
            n += count
            sink += found_sink
            tile_largest = tl.max(tl.where(seen, s, float("-inf")), 1)
            tile_smallest = tl.min(tl.where(seen, s, float("inf")), 1)
        else:
            tile_largest = tl.max(s, 1)
            tile_smallest = tl.min(s, 1)
        largest = tl.maximum(largest, tile_largest)
        smallest = tl.minimum(smallest, tile_smallest)
        z, peak = s, tile_largest
        if FACTORED:
            z = s * factor[:, None]
            peak = tl.where(factor < 0, tile_smallest, tile_largest)
            peak = tl.where(tl.abs(peak) == float("inf"), float("-inf"), peak * factor)
        if EDGE:
            z = tl.where(seen, z, float("-inf"))

        if tl.max((peak > runner_up).to(tl.int32), 0) > 0:
            promoted = peak > level
            is_peak = z == peak[:, None]
            second = tl.max(tl.where(is_peak, float("-inf"), z), 1)
            ties = tl.sum(is_peak.to(tl.float32), 1)
            second = tl.where(promoted, tl.where(ties > 1, peak, second), peak)
            new_runner_up = tl.maximum(tl.where(promoted, level, runner_up), second)
            base = tl.where(new_runner_up == float("-inf"), 0.0, new_runner_up)
            # The sums so far, relative to the new runner-up.
            drop = tl.where(runner_up == float("-inf"), 0.0, runner_up - base)
            shrink = tl.where(runner_up == float("-inf"), 0.0, tl.exp2(drop))
            tilt = shrink * (tilt + drop * s1)
            s1 = s1 * shrink
            s2 = s2 * shrink * shrink
            s3 = s3 * shrink * shrink * shrink
            s4 = s4 * shrink * shrink * shrink * shrink
            # The old leader joins the others, and so do all but one of the new leaders.
            demoted = promoted & (level > float("-inf"))
            drop = tl.where(demoted, level - base, 0.0)
            e = tl.where(demoted, tl.exp2(drop), 0.0)
            more = tl.where(promoted, ties - 1.0, 0.0)
            tilt += e * drop
            s1 += e + more
            s2 += e * e + more
            s3 += e * e * e + more
            s4 += e * e * e * e + more
            x = z - base[:, None]
            out = promoted[:, None] & is_peak
            if EDGE:
                out = out | (z == float("-inf"))
            x = tl.where(out, 0.0, x)
            e = tl.where(out, 0.0, tl.exp2(x))
            level = tl.where(promoted, peak, level)
            runner_up = new_runner_up
        else:
            base = tl.where(runner_up == float("-inf"), 0.0, runner_up)
            x = z - base[:, None]
            if EDGE:
                x = tl.where(seen, x, 0.0)
            e = tl.exp2(x)
            if EDGE:
                e = tl.where(seen, e, 0.0)
        square = e * e
        s1 += tl.sum(e, 1)
        tilt += tl.sum(e * x, 1)
        s2 += tl.sum(square, 1)
        s3 += tl.sum(square * e, 1)
        s4 += tl.sum(square * square, 1)
    return n, first, sink, largest, smallest, level, runner_up, s1, tilt, s2, s3, s4


@triton.jit
def _rows_of_program(
    q, k, mask, factor, row_queries, q_batch, q_head, q_row, k_batch, k_head, mask_batch, mask_head,
    heads, groups, rows_total, queries, width,
    FACTORED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """What a program reads: the keys and the mask of its head, its rows with their queries and factors."""
    blocks = tl.cdiv(rows_total, ROWS)
    program = tl.program_id(0)
    block = blocks - 1 - program % blocks  # the longest causal rows first, or they would run alone at the end
    batch_head = (program // blocks).to(tl.int64)
    batch, head = batch_head // heads, batch_head % heads
    k += batch * k_batch + head // groups * k_head
    mask += batch * mask_batch + head * mask_head
    at = block * ROWS + tl.arange(0, ROWS)
    inside = at < rows_total
    rows = tl.load(row_queries + at, mask=inside, other=queries)
    q_tile = load_tile(q + batch * q_batch + head * q_head, at, rows_total, q_row, width, WIDTH, True, FULL)
    row_factor = load_row(factor, batch_head * rows_total + at, inside, FACTORED, 1.0)
    return k, mask, at, inside, rows, q_tile, row_factor, batch_head, block


@triton.jit
def _key_range(
    row_queries, block, rows_total, keys, offset,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Keys up to `last` are seen by some row of the block, those from `low` to `high` by all; key 0 lies before low."""
    low, high, last = KEYS, keys // KEYS * KEYS, keys
    if CAUSAL:
        earliest = tl.load(row_queries + block * ROWS)
        latest = tl.load(row_queries + tl.minimum((block + 1) * ROWS, rows_total) - 1)
        high = tl.maximum(tl.minimum(earliest + offset + 1, keys), 0) // KEYS * KEYS
        last = tl.maximum(tl.minimum(latest + offset + 1, keys), 0)
    if MASKED:
        high = 0
    low = tl.minimum(low, last)
    high = tl.maximum(high, low)
    return low, high, last


@triton.jit
def softmax_sums(
    q, k, mask, factor, row_queries, out,
    q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch, mask_head, mask_row, mask_column,
    heads, groups, rows_total, queries, keys, offset, width, scale, cap,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, CAPPED: tl.constexpr, FACTORED: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """q: (B, H, R, D), the rows of the queries `row_queries` in ascending order; out: (COLUMNS, B, H, R)."""
    k, mask, at, inside, rows, q_tile, row_factor, batch_head, block = _rows_of_program(
        q, k, mask, factor, row_queries, q_batch, q_head, q_row, k_batch, k_head, mask_batch, mask_head,
        heads, groups, rows_total, queries, width, FACTORED, ROWS, WIDTH, FULL,
    )  # fmt: skip
    low, high, last = _key_range(row_queries, block, rows_total, keys, offset, CAUSAL, MASKED, ROWS, KEYS)
    n = tl.zeros([ROWS], tl.int32)
    first = tl.zeros([ROWS], tl.int32) + keys
    sink = tl.zeros([ROWS], tl.float32)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    smallest = tl.full([ROWS], float("inf"), tl.float32)
    level, runner_up = largest, largest
    s1, tilt, s2, s3, s4 = sink, sink, sink, sink, sink
    n, first, sink, largest, smallest, level, runner_up, s1, tilt, s2, s3, s4 = _fold(
        n, first, sink, largest, smallest, level, runner_up, s1, tilt, s2, s3, s4,
        0, low, q_tile, k, rows, row_factor, k_row, mask, mask_row, mask_column, queries, keys, offset, width, scale,
        cap, CAUSAL, MASKED, True, CAPPED, FACTORED, PRECISION, KEYS, WIDTH, FULL,
    )  # fmt: skip
    n, first, sink, largest, smallest, level, runner_up, s1, tilt, s2, s3, s4 = _fold(
        n, first, sink, largest, smallest, level, runner_up, s1, tilt, s2, s3, s4,
        low, high, q_tile, k, rows, row_factor, k_row, mask, mask_row, mask_column, queries, keys, offset, width, scale,
        cap, CAUSAL, MASKED, False, CAPPED, FACTORED, PRECISION, KEYS, WIDTH, FULL,
    )  # fmt: skip
    n, first, sink, largest, smallest, level, runner_up, s1, tilt, s2, s3, s4 = _fold(
        n, first, sink, largest, smallest, level, runner_up, s1, tilt, s2, s3, s4,
        high, last, q_tile, k, rows, row_factor, k_row, mask, mask_row, mask_column, queries, keys, offset, width,
        scale, cap, CAUSAL, MASKED, True, CAPPED, FACTORED, PRECISION, KEYS, WIDTH, FULL,
    )  # fmt: skip

    if not MASKED:
        n = n + keys
        if CAUSAL:
            n = tl.maximum(tl.minimum(rows + offset + 1, keys), 0)
    out += batch_head * rows_total + at
    column = tl.num_programs(0).to(tl.int64) // tl.cdiv(rows_total, ROWS) * rows_total
    natural = 1.0 / LOG2E
    tl.store(out, n.to(tl.float32), mask=inside)
    tl.store(out + column, sink * natural, mask=inside)
    tl.store(out + 2 * column, largest * natural, mask=inside)
    tl.store(out + 3 * column, smallest * natural, mask=inside)
    tl.store(out + 4 * column, level * natural, mask=inside)
    tl.store(out + 5 * column, runner_up * natural, mask=inside)
    tl.store(out + 6 * column, s1, mask=inside)
    tl.store(out + 7 * column, tilt * natural, mask=inside)
    tl.store(out + 8 * column, s2, mask=inside)
    tl.store(out + 9 * column, s3, mask=inside)
    tl.store(out + 10 * column, s4, mask=inside)


@triton.jit
def _fold_poles(
    poles, squares, first, start, stop, level, x, q_tile, k, rows, factor, k_row, mask, mask_row, mask_column,
    queries, keys, offset, width, scale, cap,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, EDGE: tl.constexpr, CAPPED: tl.constexpr, FACTORED: tl.constexpr,
    PRECISION: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    for at in range(start, stop, KEYS):
        z, seen, first, _sink, _count = _tile(
            at, q_tile, k, rows, factor, k_row, mask, mask_row, mask_column, queries, keys, offset, width, scale, cap,
            first, CAUSAL, MASKED, EDGE, CAPPED, PRECISION, KEYS, WIDTH, FULL,
        )  # fmt: skip
        if FACTORED:
            z = z * factor[:, None]
        e = tl.exp2(z - level[:, None])
        gap = x[:, None] - e
        keep = gap > 0  # the largest key lies above the root, unless the sink is larger
        if EDGE:
            keep = keep & seen
        ratio = tl.where(keep, e / tl.where(keep, gap, 1.0), 0.0)
        poles += tl.sum(ratio, 1)
        squares += tl.sum(ratio * ratio, 1)
    return poles, squares, first


@triton.jit
def pole_sums(
    q, k, mask, factor, row_queries, level, root, out,
    q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch, mask_head, mask_row, mask_column,
    heads, groups, rows_total, queries, keys, offset, width, scale, cap,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, CAPPED: tl.constexpr, FACTORED: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """sum e / (x - e) and sum (e / (x - e))^2 over the keys other than the first and those above the root x.

    e = exp(z - level). out: (2, B, H, R).
    """
    k, mask, at, inside, rows, q_tile, row_factor, batch_head, block = _rows_of_program(
        q, k, mask, factor, row_queries, q_batch, q_head, q_row, k_batch, k_head, mask_batch, mask_head,
        heads, groups, rows_total, queries, width, FACTORED, ROWS, WIDTH, FULL,
    )  # fmt: skip
    low, high, last = _key_range(row_queries, block, rows_total, keys, offset, CAUSAL, MASKED, ROWS, KEYS)
    row_level = tl.load(level + batch_head * rows_total + at, mask=inside, other=0.0) * LOG2E
    x = tl.load(root + batch_head * rows_total + at, mask=inside, other=0.0)
    poles = tl.zeros([ROWS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    first = tl.zeros([ROWS], tl.int32) + keys
    poles, squares, first = _fold_poles(
        poles, squares, first, 0, low, row_level, x, q_tile, k, rows, row_factor, k_row, mask, mask_row, mask_column,
        queries, keys, offset, width, scale, cap, CAUSAL, MASKED, True, CAPPED, FACTORED, PRECISION, KEYS, WIDTH, FULL,
    )  # fmt: skip
    poles, squares, first = _fold_poles(
        poles, squares, first, low, high, row_level, x, q_tile, k, rows, row_factor, k_row, mask, mask_row, mask_column,
        queries, keys, offset, width, scale, cap, CAUSAL, MASKED, False, CAPPED, FACTORED, PRECISION, KEYS, WIDTH, FULL,
    )  # fmt: skip
    poles, squares, first = _fold_poles(
        poles, squares, first, high, last, row_level, x, q_tile, k, rows, row_factor, k_row, mask, mask_row,
        mask_column, queries, keys, offset, width, scale, cap, CAUSAL, MASKED, True, CAPPED, FACTORED, PRECISION, KEYS,
        WIDTH, FULL,
    )  # fmt: skip
    out += batch_head * rows_total + at
    tl.store(out, poles, mask=inside)
    tl.store(out + tl.num_programs(0).to(tl.int64) // tl.cdiv(rows_total, ROWS) * rows_total, squares, mask=inside)
