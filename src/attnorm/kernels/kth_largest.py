"""The k-th largest logit of each row: a number between it and the next smaller one; the keys above it are the top k.

It lies halfway, since other kernels round products differently. The first pass over the keys finds the extremes, the
mean and the variance of each row. Every further pass counts the logits at or above a probe t of each row, and finds the
logits next to t on both sides. So a bracket of two logits of the row shrinks around the k-th: no value is stored, and
ties count as one. Probes come from the normal distribution first, then from interpolation of the counts and of their
logarithms in turn, and from bisection of the bits if that takes long. Where a count is off by a few, the logits next to
t lead to the k-th: every column keeps its own.
"""

import triton
import triton.language as tl

from attnorm.kernels.maps import no_rule
from attnorm.kernels.order_statistics import number_of, ordered
from attnorm.kernels.tiles import key_range, load_row, load_tile, logits, seen_keys

EARLY = tl.constexpr(10)  # passes of interpolation; 64 rows of normal numbers need three or four
NEAR = tl.constexpr(16)  # places from the k-th at which the logits next to the probe lead to it
MOST = tl.constexpr(48)  # a bisection takes 32


@triton.jit
def _logits_of_tile(
    at, q_tile, k, rows, factor, mask, k_row, mask_row, mask_column, queries, keys, offset, window, width, scale, cap,
    CAPPED: tl.constexpr, FACTORED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr,
    EDGE: tl.constexpr, PRECISION: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Logits, NaN where a key is hidden: then every comparison is false."""
    columns = at + tl.arange(0, COLUMNS)
    k_tile = load_tile(k, columns, keys, k_row, width, WIDTH, EDGE, FULL)
    dot = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
    i, j = rows[:, None], columns[None, :]
    z = logits(
        dot * scale, i, j, offset, factor[:, None], 0.0, cap, 0.0, no_rule, False, False, CAPPED, FACTORED, False
    )
    if EDGE:
        seen = seen_keys(i, j, mask, mask_row, mask_column, queries, keys, offset, window, CAUSAL, WINDOWED, MASKED)
        z = tl.where(seen, z, float("nan"))
    return z


@triton.jit
def _survey(
    low, high, total, squares, count, start, stop, q_tile, k, rows, factor, mask, k_row, mask_row, mask_column,
    queries, keys, offset, window, width, scale, cap,
    CAPPED: tl.constexpr, FACTORED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr,
    EDGE: tl.constexpr, PRECISION: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Extremes, sums and squares of the visible logits, apart by column, and how many there are."""
    for at in range(start, stop, COLUMNS):
        z = _logits_of_tile(
            at, q_tile, k, rows, factor, mask, k_row, mask_row, mask_column, queries, keys, offset, window, width,
            scale, cap, CAPPED, FACTORED, CAUSAL, WINDOWED, MASKED, EDGE, PRECISION, COLUMNS, WIDTH, FULL,
        )  # fmt: skip
        known = z == z
        low = tl.where(z < low, z, low)
        high = tl.where(z > high, z, high)
        z = tl.where(known, z, 0.0)
        total += z
        squares += z * z
        count += tl.sum(known.to(tl.int32), 1)
    return low, high, total, squares, count


@triton.jit
def _count(
    cells, above, below, t, start, stop, q_tile, k, rows, factor, mask, k_row, mask_row, mask_column, queries, keys,
    offset, window, width, scale, cap,
    CAPPED: tl.constexpr, FACTORED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr,
    EDGE: tl.constexpr, PRECISION: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """How many logits lie at or above t, the least of them, and the largest below t, apart by column."""
    for at in range(start, stop, COLUMNS):
        z = _logits_of_tile(
            at, q_tile, k, rows, factor, mask, k_row, mask_row, mask_column, queries, keys, offset, window, width,
            scale, cap, CAPPED, FACTORED, CAUSAL, WINDOWED, MASKED, EDGE, PRECISION, COLUMNS, WIDTH, FULL,
        )  # fmt: skip
        cells += (z >= t).to(tl.int32)
        above = tl.where((z >= t) & (z < above), z, above)
        below = tl.where((z < t) & (z > below), z, below)
    return cells, above, below


@triton.jit
def _normal_quantile(share):
    """The number that a share of a standard normal distribution exceeds, to 5e-4 (Abramowitz and Stegun 26.2.23)."""
    tail = tl.minimum(tl.maximum(tl.minimum(share, 1.0 - share), 1e-9), 0.5)
    x = tl.sqrt(-2.0 * tl.log(tail))
    top = 2.515517 + x * (0.802853 + x * 0.010328)
    bottom = 1.0 + x * (1.432788 + x * (0.189269 + x * 0.001308))
    size = x - top / bottom
    return tl.where(share > 0.5, -size, size)


@triton.jit
def _next(cells, start, places, sign: tl.constexpr):
    """The number that lies so many places behind the start in a row of signed cells, which have one per column."""
    found = start
    for place in range(NEAR):
        cells_behind = tl.where(cells * sign > found[:, None], cells * sign, float("inf"))
        found = tl.where(place < places, tl.min(cells_behind, 1), found)
    return found


@triton.jit
def kth_largest(
    q, k, mask, factor, wanted, least,
    q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch, mask_head, mask_row, mask_column,
    heads, groups, queries, keys, offset, window, width, scale, cap,
    CAPPED: tl.constexpr, FACTORED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """wanted (B, H, Q): k of each row. least (B, H, Q), in bits: -inf where all keys are kept."""
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
    places = tl.load(wanted + row_at, mask=inside, other=1)
    first, begin, end, last = key_range(block, queries, keys, offset, window, CAUSAL, WINDOWED, MASKED, ROWS, COLUMNS)

    zeros = tl.zeros([ROWS, COLUMNS], tl.float32)
    none = tl.zeros([ROWS], tl.int32)
    low, high, total, squares, count = zeros + float("inf"), zeros - float("inf"), zeros, zeros, none
    if WINDOWED or MASKED:
        low, high, total, squares, count = _survey(
            low, high, total, squares, count, first, begin, q_tile, k, rows, row_factor, mask, k_row, mask_row,
            mask_column, queries, keys, offset, window, width, scale, cap, CAPPED, FACTORED, CAUSAL, WINDOWED, MASKED,
            True, PRECISION, COLUMNS, WIDTH, FULL,
        )  # fmt: skip
    low, high, total, squares, count = _survey(
        low, high, total, squares, count, begin, end, q_tile, k, rows, row_factor, mask, k_row, mask_row,
        mask_column, queries, keys, offset, window, width, scale, cap, CAPPED, FACTORED, CAUSAL, WINDOWED, MASKED,
        False, PRECISION, COLUMNS, WIDTH, FULL,
    )  # fmt: skip
    low, high, total, squares, count = _survey(
        low, high, total, squares, count, end, last, q_tile, k, rows, row_factor, mask, k_row, mask_row,
        mask_column, queries, keys, offset, window, width, scale, cap, CAPPED, FACTORED, CAUSAL, WINDOWED, MASKED,
        True, PRECISION, COLUMNS, WIDTH, FULL,
    )  # fmt: skip

    # The k-th logit lies between lower and upper, two logits of the row. `most` logits, more than k, lie at or above
    # lower, and `fewest`, less than k, above upper.
    lower, upper = tl.min(low, 1), tl.max(high, 1)
    most, fewest = tl.maximum(count, 1).to(tl.float32), tl.zeros([ROWS], tl.float32)
    target = places.to(tl.float32)
    settled = (count <= places) | (inside == 0)
    found = tl.full([ROWS], float("-inf"), tl.float32)
    mean = tl.sum(total, 1) / most
    deviation = tl.sqrt(tl.maximum(tl.sum(squares, 1) / most - mean * mean, 0.0))
    t = mean + deviation * _normal_quantile(target / most)
    t = tl.where((t > lower) & (t < upper), t, upper)
    steps = 0
    while (tl.max(tl.where(settled, 0, 1), 0) > 0) & (steps < MOST):
        cells = tl.zeros([ROWS, COLUMNS], tl.int32)
        above, below = zeros + float("inf"), zeros - float("inf")
        if WINDOWED or MASKED:
            cells, above, below = _count(
                cells, above, below, t[:, None], first, begin, q_tile, k, rows, row_factor, mask, k_row, mask_row,
                mask_column, queries, keys, offset, window, width, scale, cap, CAPPED, FACTORED, CAUSAL, WINDOWED,
                MASKED, True, PRECISION, COLUMNS, WIDTH, FULL,
            )  # fmt: skip
        cells, above, below = _count(
            cells, above, below, t[:, None], begin, end, q_tile, k, rows, row_factor, mask, k_row, mask_row,
            mask_column, queries, keys, offset, window, width, scale, cap, CAPPED, FACTORED, CAUSAL, WINDOWED,
            MASKED, False, PRECISION, COLUMNS, WIDTH, FULL,
        )  # fmt: skip
        cells, above, below = _count(
            cells, above, below, t[:, None], end, last, q_tile, k, rows, row_factor, mask, k_row, mask_row,
            mask_column, queries, keys, offset, window, width, scale, cap, CAPPED, FACTORED, CAUSAL, WINDOWED,
            MASKED, True, PRECISION, COLUMNS, WIDTH, FULL,
        )  # fmt: skip
        reached = tl.sum(cells, 1)
        over, under = tl.min(above, 1), tl.max(below, 1)
        hit = (settled == 0) & (reached >= places) & ((reached == places) | (over >= upper))
        halfway = over - 0.5 * (over - under)
        halfway = tl.where((halfway > under) | (under == float("-inf")), halfway, over)  # neighbours in float32
        found = tl.where(hit, halfway, found)
        settled = settled | hit
        many = (settled == 0) & (reached > places)
        few = (settled == 0) & (reached < places)
        lower, most = tl.where(many, over, lower), tl.where(many, reached.to(tl.float32), most)
        upper, fewest = tl.where(few, under, upper), tl.where(few, reached.to(tl.float32), fewest)
        if steps >= EARLY:
            bottom, top = ordered(lower, 32).to(tl.int64), ordered(upper, 32).to(tl.int64)
            t = number_of((bottom + (top - bottom + 1) // 2).to(tl.int32), 32)
        elif steps % 2 == 0:
            t = lower + (upper - lower) * ((most - target) / (most - fewest))
        else:
            gain = tl.log((most - 0.5) / target)
            t = lower + (upper - lower) * (gain / (gain - tl.log((fewest + 0.5) / target)))
        near = tl.abs(reached - places) <= NEAR
        t = tl.where(many & near, _next(above, over, reached - places, 1.0), t)
        t = tl.where(few & near, -_next(below, -under, places - reached - 1, -1.0), t)
        t = tl.where((t > lower) & (t < upper), t, upper)
        steps += 1
    tl.store(least + row_at, found, mask=inside)
