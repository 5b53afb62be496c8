"""Order statistics without sorting: of lists of numbers divided into bins, and the k-th largest logit of each row.

Bins: a program has one list and one bin. An order statistic is found bit by bit: the integers that order floats as
their values do are counted against a candidate, once for each bit that the smallest and the largest of them do not
share. The numbers of a bin stay in the cache.

The k-th largest: a number between it and the next smaller logit, so that the keys above it are the top k; halfway,
since other kernels round products differently. The first pass over the keys finds the extremes, the mean and the
variance of each row. Every further pass counts the logits at or above a probe t of each row, and finds the logits next
to t on both sides. So a bracket of two logits of the row shrinks around the k-th: no value is stored, and ties count as
one. Probes come from the normal distribution first, then from interpolation of the counts and of their logarithms in
turn, and from bisection of the bits if that takes long. Where a count is off by a few, the logits next to t lead to the
k-th: every column keeps its own.
"""

import triton
import triton.language as tl

from attnorm.kernels.maps import no_rule
from attnorm.kernels.tiles import key_range, load_row, load_tile, logits, seen_keys

EARLY = tl.constexpr(10)  # passes of interpolation; 64 rows of normal numbers need three or four
NEAR = tl.constexpr(16)  # places from the k-th at which the logits next to the probe lead to it
MOST = tl.constexpr(48)  # a bisection takes 32


@triton.jit
def _turned(bits, BITS: tl.constexpr):
    """Negative floats are ordered the other way round than the integers of the same bits. Its own inverse."""
    if BITS == 64:
        turned = bits ^ ((bits >> 63) & 0x7FFFFFFFFFFFFFFF)
    else:
        turned = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return turned


@triton.jit
def ordered(values, BITS: tl.constexpr):
    """Integers in the order of the numbers."""
    if BITS == 64:
        bits = values.to(tl.int64, bitcast=True)
    else:
        bits = values.to(tl.int32, bitcast=True)
    return _turned(bits, BITS)


@triton.jit
def number_of(integers, BITS: tl.constexpr):
    """The numbers of such integers."""
    if BITS == 64:
        numbers = _turned(integers, BITS).to(tl.float64, bitcast=True)
    else:
        numbers = _turned(integers, BITS).to(tl.float32, bitcast=True)
    return numbers


@triton.jit
def _load(values, ids, at, stop, wanted):
    """Some numbers, and which of them belong to the bin: all members, and those that are not NaN."""
    inside = at < stop
    member = inside & (tl.load(ids + at, mask=inside, other=-1) == wanted)
    numbers = tl.load(values + at, mask=member, other=0.0)
    return numbers, member, member & (numbers == numbers)


@triton.jit
def bin_ranges(ids, begin, end, length, bins, BLOCK: tl.constexpr):
    """Where the numbers of each bin begin and end: ids (lists, length), begin and end (lists, bins)."""
    program = tl.program_id(0).to(tl.int64)
    ids += program // bins * length
    wanted = program % bins
    here = tl.arange(0, BLOCK)
    first = tl.zeros([BLOCK], tl.int32) + length
    last = tl.zeros([BLOCK], tl.int32)
    for start in range(0, length, BLOCK):
        at = start + here
        member = tl.load(ids + at, mask=at < length, other=-1) == wanted
        first = tl.where(member, tl.minimum(first, at), first)
        last = tl.where(member, at + 1, last)
    tl.store(begin + program, tl.min(first, 0))
    tl.store(end + program, tl.max(last, 0))


@triton.jit
def order_statistics(
    values, ids, begin, end, shares, members, counts, means, below, above,
    length, bins, lists_per_ids,
    ASKED: tl.constexpr, SHARES: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """values (lists, length); ids, the bin of every number, (lists modulo lists_per_ids, length), -1 for none.

    begin, end (ids, bins): where the bin's numbers lie. shares (SHARES,): which quantiles, ASKED of them. Results:
    members, counts, means (lists, bins); below and above (lists, bins, SHARES): the two numbers nearest to a quantile.
    """
    program = tl.program_id(0).to(tl.int64)
    of_list, wanted = program // bins, program % bins
    of_ids = of_list % lists_per_ids
    values += of_list * length
    ids += of_ids * length
    start = tl.load(begin + of_ids * bins + wanted)
    stop = tl.load(end + of_ids * bins + wanted)
    here = tl.arange(0, BLOCK)

    total = tl.zeros([BLOCK], tl.float64)
    present = tl.zeros([BLOCK], tl.int32)
    belonging = tl.zeros([BLOCK], tl.int32)
    integers = ordered(tl.load(values + here * 0), BITS)
    lowest = (tl.zeros_like(integers) + 1) << (BITS - 1)
    smallest, largest = ~lowest, lowest
    for first in range(start, stop, BLOCK):
        numbers, member, known = _load(values, ids, first + here, stop, wanted)
        integers = ordered(numbers, BITS)
        smallest = tl.where(known, tl.minimum(smallest, integers), smallest)
        largest = tl.where(known, tl.maximum(largest, integers), largest)
        total += tl.where(known, numbers, 0.0).to(tl.float64)
        present += known.to(tl.int32)
        belonging += member.to(tl.int32)
    count = tl.sum(present, 0)
    tl.store(members + program, tl.sum(belonging, 0))
    tl.store(counts + program, count)
    tl.store(means + program, tl.sum(total, 0) / count.to(tl.float64))

    if ASKED:
        which = tl.arange(0, SHARES)
        last = tl.maximum(count - 1, 0).to(tl.float64)
        rank = tl.floor(tl.load(shares + which) * last).to(tl.int32)
        one = ordered(tl.load(values + which * 0), BITS) * 0 + 1
        lowest = one << (BITS - 1)
        smallest, largest = tl.min(smallest, 0), tl.max(largest, 0)
        shared = tl.sum(((smallest ^ largest) >> tl.arange(0, BITS) == 0).to(tl.int32), 0)  # 0 if one is negative
        shared = tl.minimum(shared, BITS - 1)
        others = ((one << (BITS - 1 - shared)) - 1) * 2 + 1  # the bits that are not shared
        found = ((smallest ^ lowest) & ~others) ^ lowest
        for bit in range(shared, BITS):
            candidate = found + (one << (BITS - 1 - bit))
            smaller = tl.zeros([BLOCK, SHARES], tl.int32)
            for first in range(start, stop, BLOCK):
                numbers, _member, known = _load(values, ids, first + here, stop, wanted)
                smaller += (known[:, None] & (ordered(numbers, BITS)[:, None] < candidate[None, :])).to(tl.int32)
            found = tl.where(tl.sum(smaller, 0) <= rank, candidate, found)

        highest = ~lowest
        upto = tl.zeros([BLOCK, SHARES], tl.int32)
        following = tl.zeros([BLOCK, SHARES], one.dtype) + highest[None, :]
        for first in range(start, stop, BLOCK):
            numbers, _member, known = _load(values, ids, first + here, stop, wanted)
            keys = ordered(numbers, BITS)[:, None]
            upto += (known[:, None] & (keys <= found[None, :])).to(tl.int32)
            following = tl.where(known[:, None] & (keys > found[None, :]), tl.minimum(following, keys), following)
        following = tl.min(following, 0)
        following = tl.where((tl.sum(upto, 0) > rank + 1) | (rank + 1 >= count), found, following)
        tl.store(below + program * SHARES + which, number_of(found, BITS))
        tl.store(above + program * SHARES + which, number_of(following, BITS))


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
