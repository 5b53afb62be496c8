"""Order statistics without sorting: of lists of numbers divided into bins, and the k-th largest logit of each row.

Bins: a program has one list and one bin, and keeps the numbers in registers as integers of the same order. For each
quantile it searches an integer between the two numbers next to it. Each step counts the numbers below a candidate: 8 to
15 steps if few of them are equal. The search ends when the count is right, or when all that are in doubt are equal.

Rows, `kth_of_lists`: one pass over the keys, for small k, where each lane keeps its eight largest logits.
A tile of keys is dealt into lanes, four keys for each. The four are sorted and merged into the sorted list of the lane,
with nine or ten minima and maxima per logit and no exchange between threads. Then the k-th largest number of all lists
of a row is searched in registers. It is the k-th largest logit, unless a lane has lost one of the k largest. That can
be seen: the smallest number of its list is then not below the one found. Such rows are left to `kth_of_lost_rows` of
kernels/extremes.py. With k = 64 and random logits they are 1 to 2 % of all rows with 32 lanes, 0.02 % with 64.

All comparisons are of products <q, k>: the logits are an increasing function of them, if q changes its sign in rows
with a negative factor.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnorm.kernels.blocks import (
    Constants,
    capped,
    factored,
    key_range,
    load_row,
    load_tile,
    queries_and_keys,
    seen_keys,
)

EARLY = tl.constexpr(14)  # steps of interpolation; 64 rows of normal logits need five to eight, a long bin eight to 15
MAX_STEPS = tl.constexpr(48)  # a bisection takes 32
LOWEST = tl.constexpr(-3.4028234663852886e38)


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


class Bin(NamedTuple):
    """The numbers of a list from start to stop whose id is the wanted one."""

    numbers: Any
    ids: Any
    start: Any
    stop: Any
    wanted: Any


class BinSums(NamedTuple):
    """Of a bin: members, those with a number, their sum, the smallest and the largest as integers."""

    members: Any
    known: Any
    total: Any
    smallest: Any
    largest: Any


@triton.jit
def _load(of_bin, first, BITS: tl.constexpr, SIZE: tl.constexpr):
    """SIZE numbers, their integers, which of them belong to the bin, and which of these are not NaN.

    Instead of a number that is left out: the highest integer, which no number has.
    """
    at = first + tl.arange(0, SIZE)
    inside = at < of_bin.stop
    member = tl.load(of_bin.ids + at, mask=inside, other=-1) == of_bin.wanted
    numbers = tl.load(of_bin.numbers + at, mask=inside, other=0.0)
    known = member & (numbers == numbers)
    return numbers, tl.where(known, ordered(numbers, BITS), 2 ** (BITS - 1) - 1), member, known


@triton.jit
def _measure(of_bin, first, BITS: tl.constexpr, SIZE: tl.constexpr):
    """The integers of SIZE numbers of a bin, and the sums of these numbers."""
    numbers, keys, member, known = _load(of_bin, first, BITS, SIZE)
    return keys, BinSums(
        tl.sum(member.to(tl.int32), 0),
        tl.sum(known.to(tl.int32), 0),
        tl.sum(tl.where(known, numbers, 0.0).to(tl.float64), 0),
        tl.min(keys, 0),
        tl.max(tl.where(known, keys, -(2 ** (BITS - 1))), 0),
    )


@triton.jit
def _both(one, other):
    """The sums of two parts of a bin."""
    return BinSums(
        one.members + other.members,
        one.known + other.known,
        one.total + other.total,
        tl.minimum(one.smallest, other.smallest),
        tl.maximum(one.largest, other.largest),
    )


@triton.jit
def _count_below(t, keys, of_bin, BITS: tl.constexpr, SIZE: tl.constexpr, LONG: tl.constexpr):
    """How many numbers of the bin are below t. keys: the first SIZE of them; if LONG, the others are read."""
    below = (keys < t).to(tl.int32)
    if LONG:
        for first in range(of_bin.start + SIZE, of_bin.stop, SIZE):
            _numbers, others, _member, _known = _load(of_bin, first, BITS, SIZE)
            below += (others < t).to(tl.int32)
    return tl.sum(below, 0)


@triton.jit
def _beside(t, keys, of_bin, BITS: tl.constexpr, SIZE: tl.constexpr, LONG: tl.constexpr):
    """The largest number of the bin below t, and the smallest of the others."""
    under = tl.where(keys < t, keys, -(2 ** (BITS - 1)))
    over = tl.where(keys < t, 2 ** (BITS - 1) - 1, keys)
    if LONG:
        for first in range(of_bin.start + SIZE, of_bin.stop, SIZE):
            _numbers, others, _member, _known = _load(of_bin, first, BITS, SIZE)
            under = tl.where(others < t, tl.maximum(under, others), under)
            over = tl.where(others < t, over, tl.minimum(over, others))
    return tl.max(under, 0), tl.min(over, 0)


@triton.jit
def _inside(low, high, share, bisect):
    """An integer between two others, at this share of their distance or in the middle."""
    middle = (low & high) + ((low ^ high) >> 1)  # their sum can be too large for an integer
    half = (high >> 1) - (low >> 1)
    part = (half.to(tl.float32) * share).to(half.dtype)
    at_share = tl.minimum(tl.maximum(low + part + part, low + 1), high - 1)
    return tl.where(bisect, middle, at_share)


@triton.jit
def _border(rank, sums, keys, of_bin, BITS: tl.constexpr, SIZE: tl.constexpr, LONG: tl.constexpr):
    """An integer above the number of this rank (from 0) and not above the next larger one; how many are below it.

    These are rank + 1, or more if numbers equal the one of this rank. low and high enclose the integer. A secant
    through the counts there gives the next candidate; an end that stays twice counts half (the Illinois method).
    """
    low, high, below_high = sums.smallest, sums.largest + 1, sums.known
    lack, excess = rank + 0.5, sums.known - rank - 0.5  # by how much the counts at low and high miss the rank
    steps, last_side = 0, 0
    while (below_high > rank + 1) & (low + 1 < high):
        t = _inside(low, high, lack / (lack + excess), steps >= EARLY)
        below = _count_below(t, keys, of_bin, BITS, SIZE, LONG)
        many = below > rank
        side = tl.where(many, 1, -1)
        weight = tl.where(side == last_side, 0.5, 1.0)
        lack = tl.where(many, lack * weight, rank + 0.5 - below)
        excess = tl.where(many, below - rank - 0.5, excess * weight)
        low, high = tl.where(many, low, t), tl.where(many, t, high)
        below_high = tl.where(many, below, below_high)
        steps, last_side = steps + 1, side
    return high, below_high


@triton.jit
def bin_ranges(ids, begin, end, length, bins, BLOCK: tl.constexpr):
    """Find where the numbers of each bin begin and end: ids (lists, length), begin and end (lists, bins)."""
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


@triton.jit(do_not_specialize=["length", "bins", "lists_per_ids", "asked"])
def order_statistics(
    values, ids, begin, end, shares, members, counts, means, below, above,
    length, bins, lists_per_ids, asked,
    BITS: tl.constexpr, OVER: tl.constexpr, SIZE: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """values (lists, length); ids, the bin of every number, (lists modulo lists_per_ids, length), -1 for none.

    begin, end (ids, bins): where the bin's numbers lie. Bins of more than OVER and, unless LONG, at most SIZE numbers
    are summarised, other bins not. shares (asked,): which quantiles. Results: members, counts, means (lists, bins);
    below and above (lists, bins, asked): the two numbers nearest to a quantile.
    """
    program = tl.program_id(0)
    of_list, wanted = (program // bins).to(tl.int64), program % bins
    of_ids = (program // bins % lists_per_ids).to(tl.int64)
    start = tl.load(begin + of_ids * bins + wanted)
    stop = tl.load(end + of_ids * bins + wanted)
    extent = tl.maximum(stop - start, 0)
    if (extent > OVER) & (LONG | (extent <= SIZE)):
        of_bin = Bin(values + of_list * length, ids + of_ids * length, start, stop, wanted)
        keys, sums = _measure(of_bin, start, BITS, SIZE)
        if LONG:
            for first in range(start + SIZE, stop, SIZE):
                _keys, more = _measure(of_bin, first, BITS, SIZE)
                sums = _both(sums, more)
        tl.store(members + program, sums.members)
        tl.store(counts + program, sums.known)
        tl.store(means + program, sums.total / sums.known.to(tl.float64))

        last = tl.maximum(sums.known - 1, 0)
        for place in range(asked):
            rank = tl.floor(tl.load(shares + place) * last.to(tl.float64)).to(tl.int32)
            border, below_border = _border(rank, sums, keys, of_bin, BITS, SIZE, LONG)
            under, over = _beside(border, keys, of_bin, BITS, SIZE, LONG)
            over = tl.where((below_border > rank + 1) | (rank >= last), under, over)
            tl.store(below + program * asked + place, number_of(under, BITS))
            tl.store(above + program * asked + place, number_of(over, BITS))


class TopLists(NamedTuple):
    """The eight largest products of each lane, (rows, lanes) each, the largest first."""

    one: Any
    two: Any
    three: Any
    four: Any
    five: Any
    six: Any
    seven: Any
    eight: Any


@triton.jit
def _pair(a, b, FAST: tl.constexpr):
    """The larger and the smaller of two numbers. FAST: as two GPU instructions that LLVM does not rearrange.

    LLVM would regroup the maxima of maxima, which made 720 instructions of 608.
    """
    if FAST:
        return tl.inline_asm_elementwise(
            "max.f32 $0, $2, $3; min.f32 $1, $2, $3;",
            "=&f,=&f,f,f", [a, b], dtype=(tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.maximum(a, b), tl.minimum(a, b)


@triton.jit
def _sort_four(a, b, c, d, FAST: tl.constexpr):
    a, b = _pair(a, b, FAST)
    c, d = _pair(c, d, FAST)
    a, c = _pair(a, c, FAST)
    b, d = _pair(b, d, FAST)
    b, c = _pair(b, c, FAST)
    return a, b, c, d


@triton.jit
def _sort_bitonic_four(a, b, c, d, FAST: tl.constexpr):
    """Sort four numbers that rise and then fall, or the other way round, also if rotated."""
    a, c = _pair(a, c, FAST)
    b, d = _pair(b, d, FAST)
    a, b = _pair(a, b, FAST)
    c, d = _pair(c, d, FAST)
    return a, b, c, d


@triton.jit
def _quarters(x, PARTS: tl.constexpr):
    """Four arrays (rows, lanes) of a tile of products. Neighbours fall into different lanes.

    PARTS: of the columns, each for other warps, so that each thread has numbers of all quarters of a part and none
    moves.
    """
    x = tl.permute(tl.reshape(x, [x.shape[0], PARTS, 4, x.shape[1] // (4 * PARTS)]), (0, 1, 3, 2))
    x = tl.reshape(x, [x.shape[0], x.shape[1] * x.shape[2], 2, 2])
    even, odd = tl.split(x)
    a, b = tl.split(even)
    c, d = tl.split(odd)
    return a, b, c, d


@triton.jit
def _merge(lists, a, b, c, d, FAST: tl.constexpr):
    """The eight largest of each list and of four more numbers."""
    a, b, c, d = _sort_four(a, b, c, d, FAST)
    one, five = _pair(lists.one, tl.maximum(lists.five, d), FAST)
    two, six = _pair(lists.two, tl.maximum(lists.six, c), FAST)
    three, seven = _pair(lists.three, tl.maximum(lists.seven, b), FAST)
    four, eight = _pair(lists.four, tl.maximum(lists.eight, a), FAST)
    one, two, three, four = _sort_bitonic_four(one, two, three, four, FAST)
    five, six, seven, eight = _sort_bitonic_four(five, six, seven, eight, FAST)
    return TopLists(one, two, three, four, five, six, seven, eight)


@triton.jit
def _collect(
    lists, start, stop, q_tile, k, rows, sight, PARTS: tl.constexpr, FAST: tl.constexpr, C: tl.constexpr,
    EDGE: tl.constexpr,
):  # fmt: skip
    for at in range(start, stop, C.COLUMNS):
        columns = at + tl.arange(0, C.COLUMNS)
        k_tile = load_tile(k, columns, C.WIDTH, EDGE, C.FULL)
        dot = tl.dot(q_tile, tl.trans(k_tile), input_precision=C.PRECISION)
        if EDGE:
            dot = tl.where(seen_keys(rows[:, None], columns[None, :], sight, C), dot, float("-inf"))
        a, b, c, d = _quarters(dot, PARTS)
        lists = _merge(lists, a, b, c, d, FAST)
    return lists


@triton.jit
def _count(lists, t):
    """How many numbers of each row are at least t."""
    t = t[:, None]
    count = tl.where(lists.one >= t, 1.0, 0.0)
    for rank in tl.static_range(1, 8):
        count = tl.where(lists[rank] >= t, count + 1.0, count)
    return tl.sum(count, 1)


@triton.jit
def _between(lower, upper):
    """The number in the middle of all floats from lower to upper, and how many steps of one float apart they are."""
    bottom, top = ordered(lower, 32).to(tl.int64), ordered(upper, 32).to(tl.int64)
    return number_of((bottom + (top - bottom) // 2).to(tl.int32), 32), top - bottom


@triton.jit
def _search(lists, target, settled, LANES: tl.constexpr):
    """A number t of each row, and how many numbers more than `target` reach it: -1, 0 or 1.

    If equal numbers prevent that, t is the number that they equal and the other one is 0.
    """
    first = lists.one
    known = first > float("-inf")
    lanes = tl.maximum(tl.sum(known.to(tl.float32), 1), 1.0)
    mean = tl.sum(tl.where(known, first, 0.0), 1) / lanes
    distance = tl.where(known, first - mean[:, None], 0.0)
    # The largest of many numbers with an exponential tail have a Gumbel distribution: counts fall by half every `half`.
    half = 0.54 * tl.sqrt(tl.sum(distance * distance, 1) / lanes)
    t = mean - half * (0.833 + tl.log2(target / LANES))
    lower, upper = tl.full(t.shape, float("-inf"), tl.float32), tl.full(t.shape, float("inf"), tl.float32)
    excess, lack, too_many = target * 0.0, target * 0.0, target * 0.0  # log2 of count / target at lower and at upper
    steps = 0
    while (tl.max(tl.where(settled, 0, 1), 0) > 0) & (steps < MAX_STEPS):
        reached = _count(lists, t)
        near = (settled == 0) & (tl.abs(reached - target) <= 1.0)
        too_many = tl.where(near, reached - target, too_many)
        settled = settled | near
        many, few = (settled == 0) & (reached > target), (settled == 0) & (reached < target)
        size = tl.log2(tl.maximum(reached, 0.5) / target)
        lower, excess = tl.where(many, t, lower), tl.where(many, size, excess)
        upper, lack = tl.where(few, t, upper), tl.where(few, size, lack)
        one_sided = (lower == float("-inf")) | (upper == float("inf"))
        following = tl.where(one_sided, t + half * size, lower + (upper - lower) * (excess / (excess - lack)))
        middle, distance_left = _between(lower, upper)
        following = tl.where((following > lower) & (following < upper) & (steps < EARLY), following, middle)
        equal = (settled == 0) & (distance_left <= 1)
        t = tl.where(equal, lower, tl.where(settled, t, following))
        settled = settled | equal
        steps += 1
    return t, too_many


@triton.jit
def _next_to(lists, t):
    """The smallest number of each row that is at least t, the largest below t, and how many are at least t."""
    above = tl.full(lists.one.shape, float("inf"), tl.float32)
    below = tl.full(lists.one.shape, float("-inf"), tl.float32)
    count = tl.zeros_like(above)
    for rank in tl.static_range(8):  # each list is sorted: the last one that is chosen is the nearest
        smaller = lists[rank] < t[:, None]
        above = tl.where(smaller, above, lists[rank])
        count = tl.where(smaller, count, count + 1.0)
        below = tl.where(lists[7 - rank] < t[:, None], lists[7 - rank], below)
    return tl.min(above, 1), tl.max(below, 1), tl.sum(count, 1)


@triton.jit
def _kth(lists, target, settled, LANES: tl.constexpr):
    """The largest number of each row that at least `target` numbers reach, the next smaller one, and whether in doubt.

    Where in doubt, the second number is not found.
    """
    t, too_many = _search(lists, target, settled, LANES)
    over, under, _count_there = _next_to(lists, t)
    t = tl.where(too_many < 0, under, tl.where(too_many > 0, number_of(ordered(over, 32) + 1, 32), t))
    smallest = over
    over, under, count = _next_to(lists, t)
    tied = (settled == 0) & (count < target)  # the last two of one too many are equal
    return tl.where(tied, smallest, over), under, tied


@triton.jit
def _visible(rows, sight, C: tl.constexpr):
    """How many keys each row sees, without a mask."""
    last = rows * 0 + sight.keys
    if C.CAUSAL:
        last = tl.maximum(tl.minimum(rows + sight.offset + 1, sight.keys), 0)
    if C.WINDOWED:
        last -= tl.maximum(rows + sight.offset - sight.window + 1, 0)
    return last


@triton.jit
def _logit(product, turned, factor, scale, cap, CAPPED: tl.constexpr, FACTORED: tl.constexpr):
    """Logits in bits of products of the turned queries."""
    dot = tl.where(turned, -product, product)
    s, _slope = capped(dot * scale, cap, CAPPED)
    z = factored(dot, s, factor, scale, CAPPED, FACTORED)
    return tl.where(product == float("-inf"), float("-inf"), z)


@triton.jit
def kth_of_lists(
    q, k, mask, factor, wanted, cutoff, largest,
    q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch, mask_head, mask_row, mask_column,
    heads, groups, queries, keys, offset, window, width, scale, cap,
    CAPPED: tl.constexpr, FACTORED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
    PARTS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """wanted, cutoff: see `kth_largest`. largest (B, H, Q): NaN where the cutoff is final.

    Elsewhere it is the largest logit of the row, and the cutoff is a logit that at least k reach, or -inf.
    """
    C: tl.constexpr = Constants(CAUSAL, WINDOWED, MASKED, PRECISION, ROWS, COLUMNS, WIDTH, FULL)
    own, rows, inside, q_tile, k, sight = queries_and_keys(
        q, k, mask, q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch, mask_head, mask_row, mask_column,
        heads, groups, queries, keys, offset, window, width, C,
    )  # fmt: skip
    row_at = own.batch_head * queries + rows
    row_factor = load_row(factor, row_at, inside, FACTORED, 1.0)
    target = tl.load(wanted + row_at, mask=inside, other=1).to(tl.float32)
    turned = row_factor * scale < 0
    q_tile = tl.where(turned[:, None], -q_tile, q_tile)
    borders = key_range(own.index, sight, C)

    LANES: tl.constexpr = COLUMNS // 4
    none = tl.full([ROWS, LANES], float("-inf"), tl.float32)
    lists = TopLists(none, none, none, none, none, none, none, none)
    for part in tl.static_range(0 if WINDOWED or MASKED else 1, 3):
        lists = _collect(lists, borders[part], borders[part + 1], q_tile, k, rows, sight, PARTS, FAST, C, part != 1)

    if MASKED:
        few = _count(lists, target * 0.0 + LOWEST) <= target
    else:
        few = _visible(rows, sight, C) <= target
    over, under, tied = _kth(lists, target, few | (inside == 0), LANES)
    over = tl.where(few, float("-inf"), over)
    last = tl.max(lists.eight, 1)
    lost = ((last >= over) & (last > float("-inf"))) | tied
    if not MASKED:
        lost = lost & (few == 0)
    z_over = _logit(over, turned, row_factor, scale, cap, CAPPED, FACTORED)
    z_under = _logit(under, turned, row_factor, scale, cap, CAPPED, FACTORED)
    halfway = z_over - 0.5 * (z_over - z_under)
    halfway = tl.where((halfway > z_under) & (halfway <= z_over) & (z_under > float("-inf")), halfway, z_over)
    peak = _logit(tl.max(lists.one, 1), turned, row_factor, scale, cap, CAPPED, FACTORED)
    tl.store(cutoff + row_at, tl.where(lost, z_over, halfway), mask=inside)
    tl.store(largest + row_at, tl.where(lost, peak, float("nan")), mask=inside)
