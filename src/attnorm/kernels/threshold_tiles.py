"""Tiles of the threshold kernels: the rows above their thresholds, and lists of the tiles that hold a weight."""

import triton
import triton.language as tl

from attnorm.kernels.threshold_maps import positive

CHUNK = tl.constexpr(128)


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
def tilted(dot, tilt, i, j, offset, TILTED: tl.constexpr):
    """Products minus tilt times the distance of key j from query i."""
    if TILTED:
        dot = dot - tilt * tl.abs((i + offset - j).to(tl.float32))
    return dot


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
