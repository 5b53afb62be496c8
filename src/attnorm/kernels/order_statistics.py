"""Order statistics of lists of numbers divided into bins, without sorting.

A program has one list and one bin. An order statistic is found bit by bit: the integers that order floats as their
values do are counted against a candidate, once for each bit that the smallest and the largest of them do not share. The
numbers of a bin stay in the cache.
"""

import triton
import triton.language as tl


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
