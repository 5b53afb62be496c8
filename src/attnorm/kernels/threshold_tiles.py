"""Tiles of threshold kernels: how far logits lie above the threshold of their row, and lists of tiles with a weight."""

from collections import namedtuple

import triton
import triton.language as tl

from attnorm.kernels.blocks import seen_keys
from attnorm.kernels.threshold_maps import positive

CHUNK = tl.constexpr(128)


# What is known of a threshold map when a kernel is compiled; EXACT: see rise.
ThresholdConstants = namedtuple(
    "ThresholdConstants",
    "WEIGHTS DEFORMED FAST EXACT NEWTON COUNTED MAX_STEPS EARLY",
    defaults=(None, None, None, None),
)


@triton.jit
def line(factor, peak, t, a, DEFORMED: tl.constexpr):
    """Slope and intercept of x as a function of a product <q, k>."""
    if DEFORMED:
        return factor * a, 1.0 - (peak + t) * a
    else:
        return factor, -(peak + t)


@triton.jit
def rise(dot, factor, peak, t, a, DEFORMED: tl.constexpr, EXACT: tl.constexpr):
    """x of products, for factor, peak, t and a that broadcast to them.

    EXACT subtracts the peak first: a threshold far from 0 has few digits behind the point. Half precision has fewer
    still, and takes one instruction.
    """
    if EXACT:
        y = dot * factor - peak - t
        if DEFORMED:
            y = 1.0 + y * a
        return positive(y)
    else:
        slope, intercept = line(factor, peak, t, a, DEFORMED)
        return positive(tl.fma(dot, slope, intercept))


@triton.jit
def seen_rise(dot, i, j, factor, peak, t, a, sight, C: tl.constexpr, T: tl.constexpr, EDGE: tl.constexpr):
    """x of products, 0 where query i does not see key j."""
    x = rise(dot, factor, peak, t, a, T.DEFORMED, T.EXACT)
    if EDGE:
        x = tl.where(seen_keys(i, j, sight, C), x, 0.0)
    return x


@triton.jit
def newton_step(P, U, count, t, a, settled, early, T: tl.constexpr):
    """t after a step of Newton's method, and the largest excess of a row that it moves.

    Where t has no digits left to move by, no step will help.
    """
    excess, step = T.NEWTON(P, U, count, a, early)
    step = tl.where(settled, 0.0, step)
    left = tl.max(tl.where(t + step != t, tl.abs(excess), 0.0), 0)
    return t + step, left


@triton.jit
def tilted(dot, tilt, i, j, offset, TILTED: tl.constexpr):
    """Products minus tilt times the distance of key j from query i."""
    if TILTED:
        dot = dot - tilt * tl.abs((i + offset - j).to(tl.float32))
    return dot


@triton.jit
def lowest_weight(floor, peak, empty, a, DEFORMED: tl.constexpr):
    """How far below the peaks of its rows a tile may lie that holds a weight."""
    floor = floor - 1.0 / a if DEFORMED else floor
    floor = floor - 1e-6 * (1.0 + tl.abs(peak))  # of rounding
    return tl.min(tl.where(empty, float("inf"), tl.where(floor == floor, floor, float("-inf"))), 0)


@triton.jit
def list_tiles(
    flags, stride, total, other_stride, others, found, count, first, last, level,
    SPLIT: tl.constexpr, JOIN: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """Append those tiles from first to last that have a flag above level to the list `found`; return its length.

    A flag covers SPLIT tiles, or a tile JOIN flags, of `total`; and OTHERS flags across, of which `others` exist.
    """
    length = tl.zeros([], tl.int32) + count
    for at in range(first, last, CHUNK):
        tiles = at + tl.arange(0, CHUNK)
        live = tl.zeros([CHUNK], tl.int32)
        for part in tl.static_range(JOIN):
            index = tiles * JOIN // SPLIT + part
            for across in tl.static_range(OTHERS):
                inside = (tiles < last) & (index < total) & (tiles * 0 + across < others)
                flag = tl.load(flags + index * stride + across * other_stride, mask=inside, other=level)
                live = live | tl.where(flag <= level, 0, 1)  # NaN is live
        tl.store(found + length + tl.cumsum(live, 0) - 1, tiles, mask=live != 0)
        length += tl.sum(live, 0)
    return length
