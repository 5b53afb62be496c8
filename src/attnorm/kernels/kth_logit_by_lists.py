"""The k-th largest logit of each row in one pass over the keys, for small k: each lane keeps its eight largest.

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
    LOWEST,
    Constants,
    capped,
    factored,
    key_range,
    load_row,
    load_tile,
    number_of,
    ordered,
    queries_and_keys,
    seen_keys,
)

EARLY = tl.constexpr(14)  # steps of interpolation, then bisection; 64 rows of normal logits need five to eight
MAX_STEPS = tl.constexpr(48)  # a bisection takes 32


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
    """Four arrays (rows, lanes) of a tile of products. Neighbors fall into different lanes.

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
