"""Compute the number of a whole row that a map needs before its first weight, from stored logits of a few rows.

One program per row finds the largest logit and a number of the row: the factor of a map like softmax (`soften_rows`),
or the threshold of entmax and its relatives (`find_thresholds`). For stick-breaking one program per part of a row sums
what its keys cost (`sum_costs`). decoding.py stores the logits before, and weighs the values after.

A search first lists the few logits that can matter: those within reach of a threshold, or above a bound of the k-th
largest.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnorm.kernels.blocks import LOWEST, load_number, number_of, ordered
from attnorm.kernels.maps import LN2
from attnorm.kernels.one_pass import parts_in
from attnorm.kernels.stick_breaking import shares
from attnorm.kernels.threshold_maps import ThresholdConstants, newton_step, weight_of

ENTROPY, VARIANCE, RANGE = 1, 2, 3  # statistics of a row
_ENTROPY, _VARIANCE, _RANGE = tl.constexpr(ENTROPY), tl.constexpr(VARIANCE), tl.constexpr(RANGE)  # for the kernels
ALIGNED = tl.constexpr(16)  # numbers to which rows of stored logits are padded, so that loads are wide


class Workspace(NamedTuple):
    """Pointers to the numbers between the steps, in float32."""

    parts: Any  # (rows, splits, E), sums of weighted values
    logits: Any  # (rows, pitch), in bits
    found: Any  # (rows, pitch), those that a search lists; the logits if it lists none
    sums: Any  # (rows, splits), denominators, or costs of stick-breaking
    references: Any  # (rows, splits)
    state: Any  # (3, rows)
    pitch: Any  # keys of a row, rounded up so that every row is aligned


@triton.jit
def workspace(work, row_count, keys, splits, LISTS: tl.constexpr, V_SIZE: tl.constexpr):
    """Return the places of everything; LISTS: how many rows of K numbers each row has."""
    rows = row_count.to(tl.int64)
    pitch = tl.cdiv(keys, ALIGNED) * ALIGNED
    parts, sums, references = parts_in(work, row_count, splits, LISTS * pitch, V_SIZE)
    logits = work + rows * splits * V_SIZE
    found = logits + (LISTS - 1) * rows * pitch
    return Workspace(parts, logits, found, sums, references, references + rows * splits, pitch)


@triton.jit
def soften_rows(
    work, count, keys, begin, splits, top,
    STATISTIC: tl.constexpr, NUMBERS: tl.constexpr, STEPS: tl.constexpr, SELECTED: tl.constexpr,
    COUNTED: tl.constexpr, CHUNK: tl.constexpr, LISTED: tl.constexpr, LISTS: tl.constexpr, V_SIZE: tl.constexpr,
):  # fmt: skip
    """Write the state of a row of a map like softmax: its largest logit, and

    a factor and the lowest logit with a weight; for sa_softmax, 1 / width of the range and its lower end.
    """
    row = tl.program_id(0).to(tl.int64)
    row_count = tl.num_programs(0)
    places = workspace(work, row_count, keys, splits, LISTS, V_SIZE)
    logits = places.logits + row * places.pitch
    lanes = tl.full([CHUNK], float("-inf"), tl.float32)
    lowest = tl.full([CHUNK], float("inf"), tl.float32)
    sums = tl.zeros([CHUNK], tl.float32)
    numbers = tl.zeros([CHUNK], tl.float32)
    for at in range(begin, keys, CHUNK):
        z = load_logits(logits, at, keys, CHUNK)
        lanes = tl.maximum(lanes, z)
        if STATISTIC == _RANGE:
            lowest = tl.minimum(lowest, tl.where(z == float("-inf"), float("inf"), z))
        if STATISTIC == _VARIANCE:
            sums += tl.where(z == float("-inf"), 0.0, z)
            numbers += tl.where(z == float("-inf"), 0.0, 1.0)
    peak = tl.max(lanes, 0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    factor = 1.0
    cutoff = LOWEST
    if STATISTIC == _ENTROPY:
        factor = _beta(_entropy(logits, peak, begin, keys, CHUNK), NUMBERS, STEPS)
    if STATISTIC == _VARIANCE:
        variance = _variance(logits, tl.sum(sums, 0), tl.sum(numbers, 0), begin, keys, CHUNK)
        floor: tl.constexpr = NUMBERS[0]
        temperature: tl.constexpr = NUMBERS[1]
        factor = 1.0 / (tl.sqrt(variance / (floor * floor) + 1.0) * (floor * temperature))
    if STATISTIC == _RANGE:
        low = tl.minimum(tl.min(lowest, 0), 0.0)
        width = tl.maximum(peak, 0.0) - low
        factor = tl.where(width > 0, 1.0 / tl.where(width > 0, width, 1.0), 1.0)
        cutoff = low
    if SELECTED:
        kept = tl.load(count + row) if COUNTED else top
        bound = _kth_largest(lanes, 0, tl.full([], LOWEST, tl.float32), peak, kept, 2 * kept, 0)
        found = places.found + row * places.pitch
        number = _list_logits(logits, found, bound, 0.0, 1.0, begin, keys, CHUNK)
        cutoff = _kth_largest(found, number, bound, peak, kept, kept, LISTED)
    tl.store(places.state + row, peak)
    tl.store(places.state + row_count + row, factor)
    tl.store(places.state + 2 * row_count + row, cutoff)


@triton.jit
def load_logits(logits, at, keys, CHUNK: tl.constexpr):
    columns = at + tl.arange(0, CHUNK)
    return tl.load(logits + columns, mask=columns < keys, other=float("-inf"))


@triton.jit
def _entropy(logits, peak, begin, keys, CHUNK: tl.constexpr):
    """Return the entropy of softmax in nats; 0 for a row without keys."""
    sums = tl.zeros([CHUNK], tl.float32)
    products = tl.zeros([CHUNK], tl.float32)
    for at in range(begin, keys, CHUNK):
        y = load_logits(logits, at, keys, CHUNK) - peak
        p = tl.exp2(y)
        sums += p
        products += tl.where(p == 0, 0.0, p * y)
    total = tl.sum(sums, 0)
    total = tl.where(total == 0, 1.0, total)
    return tl.maximum(tl.log2(total) - tl.sum(products, 0) / total, 0.0) * LN2


@triton.jit
def _beta(entropy, COEFFICIENTS: tl.constexpr, STEPS: tl.constexpr):
    """Return the factor of a row: the polynomial of its entropy, at least 1 or what the steps say.

    STEPS: pairs of an entropy and the least factor of rows above it; rows below the first one have the factor 1.
    """
    value = entropy * 0.0
    for power in tl.static_range(len(COEFFICIENTS)):
        value = value * entropy + COEFFICIENTS[power]
    least = entropy * 0.0 + 1.0
    for step in tl.static_range(len(STEPS) // 2):
        least = tl.where(entropy > STEPS[2 * step], tl.maximum(least, STEPS[2 * step + 1]), least)
    return tl.where(entropy > STEPS[0], tl.maximum(value, least), 1.0)


@triton.jit
def _variance(logits, total, count, begin, keys, CHUNK: tl.constexpr):
    """Return the variance of the visible logits, in nats squared."""
    count = tl.maximum(count, 1.0)
    mean = total / count
    squares = tl.zeros([CHUNK], tl.float32)
    for at in range(begin, keys, CHUNK):
        z = load_logits(logits, at, keys, CHUNK)
        difference = tl.where(z == float("-inf"), 0.0, z - mean)
        squares += difference * difference
    return tl.sum(squares, 0) / count * (LN2 * LN2)


@triton.jit
def _list_logits(logits, found, bound, peak, unit, begin, keys, CHUNK: tl.constexpr):
    """Write (z - peak) * unit to `found` where it is at least the bound; return their number."""
    number = tl.zeros([], tl.int32)
    for at in range(begin, keys, CHUNK):
        y = (load_logits(logits, at, keys, CHUNK) - peak) * unit
        kept = tl.where(y >= bound, 1, 0)
        tl.store(found + number + tl.cumsum(kept, 0) - 1, y, mask=kept != 0)
        number += tl.sum(kept, 0)
    tl.debug_barrier()  # other threads read what is listed
    return number


@triton.jit
def _kth_largest(values, number, bound, peak, k, most, LISTED: tl.constexpr):
    """Return a number from the bound to the peak that at least k values reach, and at most `most` except for ties.

    Return the bound if fewer than k reach any higher number. values: an array, or with LISTED a pointer to a list of
    this `number` of values. The bits are found by bisection.
    """
    low = ordered(bound, 32).to(tl.int64)
    high = ordered(peak, 32).to(tl.int64) + 1
    reached = most + 1
    while (high - low > 1) & (reached > most):
        middle = (low + high) >> 1
        level = number_of(middle.to(tl.int32), 32)
        if LISTED == 0:
            above = tl.sum(tl.where(values >= level, 1, 0), 0)
        else:
            above = tl.zeros([], tl.int32)
            for at in range(0, number, LISTED):
                above += tl.sum(tl.where(load_logits(values, at, number, LISTED) >= level, 1, 0), 0)
        enough = above >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        reached = tl.where(enough, above, reached)
    return number_of(low.to(tl.int32), 32)


@triton.jit
def find_thresholds(
    work, parameter, heads, queries, keys, begin, splits, tolerance,
    UNIT: tl.constexpr, WEIGHTS: tl.constexpr, NEWTON: tl.constexpr, START: tl.constexpr, DEFORMED: tl.constexpr,
    COUNTED: tl.constexpr, PARAMETER: tl.constexpr, FAST: tl.constexpr, CHUNK: tl.constexpr, LISTED: tl.constexpr,
    MAX_STEPS: tl.constexpr, EARLY: tl.constexpr, LISTS: tl.constexpr, V_SIZE: tl.constexpr,
):  # fmt: skip
    """Write the state of a row of a threshold map: its largest logit in bits, and its threshold relative to that.

    PARAMETER: kind of number.
    """
    T: tl.constexpr = ThresholdConstants(WEIGHTS, DEFORMED, FAST, True, NEWTON, COUNTED, MAX_STEPS, EARLY)
    row = tl.program_id(0).to(tl.int64)
    places = workspace(work, tl.num_programs(0), keys, splits, LISTS, V_SIZE)
    logits = places.logits + row * places.pitch
    found = places.found + row * places.pitch
    lanes = tl.full([CHUNK], float("-inf"), tl.float32)
    for at in range(begin, keys, CHUNK):
        lanes = tl.maximum(lanes, load_logits(logits, at, keys, CHUNK))
    peak = tl.max(lanes, 0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    one = tl.zeros([1], tl.int64)
    a = load_number(parameter, row + one, row // queries % heads + one, one == 0, PARAMETER, 0.5)
    t = START(a)
    reach = t - 1.0 / a if DEFORMED else t  # keys below it have no weight: the threshold is not below its start
    number = _list_logits(logits, found, tl.sum(reach, 0), peak, UNIT, begin, keys, CHUNK)
    settled = one + number == 0
    left = tolerance + 1.0
    steps = 0
    while (left > tolerance) & (steps < MAX_STEPS):
        cell_p = tl.zeros([1, LISTED], tl.float32)
        cell_u = tl.zeros([1, LISTED], tl.float32)
        cells = tl.zeros([1, LISTED], tl.float32)
        for at in range(0, number, LISTED):
            y = load_logits(found, at, number, LISTED)[None, :]
            p, u, some = weight_of(y, t[:, None], a[:, None], T)
            cell_p += p
            cell_u += u
            cells += some
        t, left = newton_step(tl.sum(cell_p, 1), tl.sum(cell_u, 1), tl.sum(cells, 1), t, a, settled, steps < EARLY, T)
        steps += 1
    tl.store(places.state + row, peak)
    tl.store(places.state + tl.num_programs(0) + row + one, t)


@triton.jit
def sum_costs(
    work, queries, keys, begin, span, splits, REST: tl.constexpr, FAST: tl.constexpr, LISTED: tl.constexpr,
    LISTS: tl.constexpr, V_SIZE: tl.constexpr,
):  # fmt: skip
    """Write what the keys of one part of a row cost of the stick, in bits, where other maps have denominators."""
    program = tl.program_id(0).to(tl.int64)
    row, split = program // splits, program % splits
    places = workspace(work, tl.num_programs(0) // splits, keys, splits, LISTS, V_SIZE)
    logits = places.logits + row * places.pitch
    start = begin + split * span
    stop = tl.minimum(start + span, keys)
    costs = tl.zeros([LISTED], tl.float32)
    for at in range(start, stop, LISTED):
        z = load_logits(logits, at, stop, LISTED)
        if REST:
            z = tl.where(at + tl.arange(0, LISTED) == row % queries + keys - queries, float("-inf"), z)
        _taken, cost = shares(z, FAST)
        costs += cost
    tl.store(places.sums + program, tl.sum(costs, 0))
