"""Passes of threshold_sums.py over the tiles that hold a weight: sums over the keys of each row, without the sink."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnorm.kernels.maps import log2
from attnorm.kernels.row_tiles import by_class, key_tile, neighbours
from attnorm.kernels.threshold_tiles import above_threshold, list_tiles, lowest_weight


class ListedTiles(NamedTuple):
    """A list of `number` tiles that all rows see; behind room for all of those, a list of `edges` others."""

    listed: Any
    whole: Any  # where the tiles that all rows see end; the first tile is none of them
    number: Any
    edges: Any


class SolvedRows(NamedTuple):
    """Numbers of each row that convert its products to x: see threshold_maps.py."""

    size: Any  # of the map's unit in products
    peak: Any
    t: Any
    a: Any


class WeightSums(NamedTuple):
    """Sums over the keys but the sink and those at the top, and the moments of u in units of its third largest."""

    others: Any
    e_log_e: Any
    squares: Any
    tops: Any  # how many are at the top
    m1: Any
    m2: Any
    m3: Any
    m4: Any


@triton.jit
def list_row_tiles(gaps, listed, whole, some, floor, empty, DEFORMED: tl.constexpr, a, around):
    """List the tiles in which a row has a logit above its floor: how many of those seen whole, and of the others."""
    level = lowest_weight(floor, around, empty, a, DEFORMED)
    tl.debug_barrier()
    number = list_tiles(gaps, 1, some, 0, 1, listed, 0, 1, whole, level, 1, 1, 1)
    edges = list_tiles(gaps, 1, some, 0, 1, listed + whole - 1, 0, 0, tl.minimum(1, some), level, 1, 1, 1)
    edges = list_tiles(gaps, 1, some, 0, 1, listed + whole - 1, edges, whole, some, level, 1, 1, 1)
    tl.debug_barrier()
    return number, edges


@triton.jit
def _class_sums(x):
    even, odd = neighbours(x)
    return tl.sum(by_class(even + odd), 1)


@triton.jit
def _rise_of_tile(tile, first, given, row, C: tl.constexpr, T: tl.constexpr, EDGE: tl.constexpr):
    """x of a tile, 0 where a key does not count; its products, which keys count, and the first visible key."""
    s, seen, first, _sink, _count = key_tile(tile * C.COLUMNS, given, first, C, EDGE)
    x = above_threshold(s, row.size[:, None], row.peak[:, None], row.t[:, None], row.a[:, None], T.DEFORMED, True)
    if EDGE:
        x = tl.where(seen, x, 0.0)
    return x, s, seen, first


@triton.jit
def _sum_weights(
    sum_p, sum_u, count, listed, number, first, given, row, C: tl.constexpr, T: tl.constexpr, EDGE: tl.constexpr
):
    tile = tl.load(listed)
    for index in range(number):
        following = tl.load(listed + index + 1)
        x, _s, _seen, first = _rise_of_tile(tile, first, given, row, C, T, EDGE)
        p, u = T.WEIGHTS(x, row.a[:, None], T.FAST)
        sum_p += _class_sums(p)
        sum_u += _class_sums(u)
        if T.COUNTED:
            count += _class_sums(tl.where(x > 0, 1.0, 0.0))
        tile = following
    return sum_p, sum_u, count


@triton.jit
def measure(zeros, tiles, first, given, row, C: tl.constexpr, T: tl.constexpr):
    """The sums of p and u, and the number of weights, of each class."""
    sum_p, sum_u, count = zeros, zeros, zeros
    sum_p, sum_u, count = _sum_weights(
        sum_p, sum_u, count, tiles.listed, tiles.number, first, given, row, C, T, False
    )  # fmt: skip
    return _sum_weights(sum_p, sum_u, count, tiles.listed + tiles.whole - 1, tiles.edges, first, given, row, C, T, True)


@triton.jit
def _fold(
    sums, listed, number, first, top, inverse, third_inverse, given, row,
    C: tl.constexpr, T: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    tile = tl.load(listed)
    for index in range(number):
        following = tl.load(listed + index + 1)
        x, s, seen, first = _rise_of_tile(tile, first, given, row, C, T, EDGE)
        is_top = s == top[:, None]
        if EDGE:
            is_top = is_top & seen
        p, u = T.WEIGHTS(x, row.a[:, None], T.FAST)
        e = tl.where(is_top, 0.0, p * inverse[:, None])
        others = sums.others + _class_sums(e)
        e_log_e = sums.e_log_e + _class_sums(e * log2(tl.where(e > 0, e, 1.0), T.FAST))
        squares = sums.squares + _class_sums(e * e)
        tops = sums.tops + _class_sums(is_top.to(tl.float32))
        v = tl.minimum(u * third_inverse[:, None], 1.0)
        square = v * v
        m1 = sums.m1 + _class_sums(v)
        m2 = sums.m2 + _class_sums(square)
        m3 = sums.m3 + _class_sums(square * v)
        m4 = sums.m4 + _class_sums(square * square)
        sums = WeightSums(others, e_log_e, squares, tops, m1, m2, m3, m4)
        tile = following
    return sums


@triton.jit
def sum_weights(zeros, tiles, first, top, inverse, third_inverse, given, row, C: tl.constexpr, T: tl.constexpr):
    """The WeightSums of each class: p in units of 1 / inverse, no u counted as more than 1 / third_inverse."""
    sums = WeightSums(zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros)
    sums = _fold(
        sums, tiles.listed, tiles.number, first, top, inverse, third_inverse, given, row, C, T, False
    )  # fmt: skip
    return _fold(
        sums, tiles.listed + tiles.whole - 1, tiles.edges, first, top, inverse, third_inverse, given, row, C, T, True
    )


@triton.jit
def pole(u, second, x_root):
    """u / (x - u), with no u counted as more than the second largest."""
    u = tl.minimum(u, second)
    gap = x_root - u
    return tl.where(gap > 0, u / tl.where(gap > 0, gap, 1.0), 0.0)


@triton.jit
def _poles(
    poles, squares, listed, number, first, second, x_root, given, row,
    C: tl.constexpr, T: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    tile = tl.load(listed)
    for index in range(number):
        following = tl.load(listed + index + 1)
        x, _s, _seen, first = _rise_of_tile(tile, first, given, row, C, T, EDGE)
        _p, u = T.WEIGHTS(x, row.a[:, None], T.FAST)
        ratio = pole(u, second[:, None], x_root[:, None])
        poles += _class_sums(ratio)
        squares += _class_sums(ratio * ratio)
        tile = following
    return poles, squares


@triton.jit
def sum_poles(zeros, tiles, first, second, x_root, given, row, C: tl.constexpr, T: tl.constexpr):
    """sum u / (x - u) and sum (u / (x - u))^2 of each class."""
    poles, squares = zeros, zeros
    poles, squares = _poles(
        poles, squares, tiles.listed, tiles.number, first, second, x_root, given, row, C, T, False
    )  # fmt: skip
    return _poles(
        poles, squares, tiles.listed + tiles.whole - 1, tiles.edges, first, second, x_root, given, row, C, T, True
    )
