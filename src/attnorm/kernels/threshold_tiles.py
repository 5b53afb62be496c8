"""Device functions of the threshold kernels on one tile: logits above the threshold, and lists of tiles with weights.

x is the amount by which a logit, in the map's unit, exceeds the threshold of its row (kernels/threshold_maps.py).
"""

from collections import namedtuple

import triton
import triton.language as tl

from attnorm.kernels.blocks import seen_keys
from attnorm.kernels.threshold_maps import positive

CHUNK = tl.constexpr(128)


# Compile-time constants of a threshold map. EXACT: see `above_threshold`.
ThresholdConstants = namedtuple(
    "ThresholdConstants",
    "WEIGHTS DEFORMED FAST EXACT NEWTON COUNTED MAX_STEPS EARLY",
    defaults=(None, None, None, None),
)


@triton.jit
def line(factor, peak, t, a, DEFORMED: tl.constexpr):
    """Return slope and intercept of x as a linear function of a product <q, k>."""
    if DEFORMED:
        return factor * a, 1.0 - (peak + t) * a
    else:
        return factor, -(peak + t)


@triton.jit
def above_threshold(dot, factor, peak, t, a, DEFORMED: tl.constexpr, EXACT: tl.constexpr):
    """Return x of products, for factor, peak, t and a that broadcast to them.

    EXACT subtracts the peak before the threshold t: far from 0, float32 has too few digits for their sum. In bfloat16
    this error does not matter, and one fused instruction is enough.
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
def seen_above_threshold(dot, i, j, factor, peak, t, a, sight, C: tl.constexpr, T: tl.constexpr, EDGE: tl.constexpr):
    """Return x of products, and 0 where query i does not see key j."""
    x = above_threshold(dot, factor, peak, t, a, T.DEFORMED, T.EXACT)
    if EDGE:
        x = tl.where(seen_keys(i, j, sight, C), x, 0.0)
    return x


@triton.jit
def newton_step(P, U, count, t, a, settled, early, T: tl.constexpr):
    """Return t after one Newton step, and the largest excess of the rows that the step changes.

    A step too small to change t is ignored: further steps would not help this row.
    """
    excess, step = T.NEWTON(P, U, count, a, early)
    step = tl.where(settled, 0.0, step)
    left = tl.max(tl.where(t + step != t, tl.abs(excess), 0.0), 0)
    return t + step, left


@triton.jit
def minus_penalty(dot, penalty, i, j, offset, PENALISED: tl.constexpr):
    """Subtract the penalty times the distance of key j from query i from products."""
    if PENALISED:
        dot = dot - penalty * tl.abs((i + offset - j).to(tl.float32))
    return dot


@triton.jit
def lowest_weight(floor, peak, empty, a, DEFORMED: tl.constexpr):
    """Return how far below the peaks of its rows the logits of a tile with a weight can lie."""
    floor = floor - 1.0 / a if DEFORMED else floor
    floor = floor - 1e-6 * (1.0 + tl.abs(peak))  # allowance for rounding errors
    return tl.min(tl.where(empty, float("inf"), tl.where(floor == floor, floor, float("-inf"))), 0)


@triton.jit
def list_tiles(
    flags, stride, total, other_stride, others, found, count, first, last, level,
    SPLIT: tl.constexpr, JOIN: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """Append the tiles between first and last that have a flag above `level` to the list `found`; return its length.

    Along the tiles there are `total` flags: one flag covers SPLIT tiles, or one tile covers JOIN flags. Across them a
    tile covers OTHERS flags, of which `others` exist.
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
