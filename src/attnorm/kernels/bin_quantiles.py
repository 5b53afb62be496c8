"""Mean and quantiles of lists of numbers divided into bins, without sorting.

A program has one list and one bin, and keeps the numbers in registers as integers of the same order. For each quantile
it searches an integer between the two numbers next to it. Each step counts the numbers below a candidate: 8 to 15 steps
if few of them are equal. The search ends when the count is right, or when all that are in doubt are equal.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnorm.kernels.blocks import number_of, ordered

EARLY = tl.constexpr(14)  # steps of interpolation, then bisection; a long bin needs eight to 15


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
def bin_quantiles(
    values, ids, begin, end, shares, members, counts, means, below, above,
    length, bins, lists_per_ids, asked,
    BITS: tl.constexpr, OVER: tl.constexpr, SIZE: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """values (lists, length); ids, the bin of every number, (lists modulo lists_per_ids, length), -1 for none.

    begin, end (ids, bins): where the bin's numbers lie. Bins of more than OVER and, unless LONG, at most SIZE numbers
    are summarized, other bins not. shares (asked,): which quantiles. Results: members, counts, means (lists, bins);
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
        first_quantile = program.to(tl.int64) * asked
        for place in range(asked):
            rank = tl.floor(tl.load(shares + place) * last.to(tl.float64)).to(tl.int32)
            border, below_border = _border(rank, sums, keys, of_bin, BITS, SIZE, LONG)
            under, over = _beside(border, keys, of_bin, BITS, SIZE, LONG)
            over = tl.where((below_border > rank + 1) | (rank >= last), under, over)
            tl.store(below + first_quantile + place, number_of(under, BITS))
            tl.store(above + first_quantile + place, number_of(over, BITS))
