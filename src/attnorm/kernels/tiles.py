"""Tiles of the attention kernels: some queries against some keys, their logits, and which of them see each other.

For threshold maps also the rows above their thresholds, and lists of the tiles that hold a weight.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnorm.kernels import blocks
from attnorm.kernels.maps import LOG2E


@triton.jit
def load_tile(pointer, rows, length, stride, width, WIDTH: tl.constexpr, EDGE: tl.constexpr, FULL_WIDTH: tl.constexpr):
    """(rows, WIDTH) of a matrix (length, width), with zeros around it; checks only what can be outside."""
    columns = tl.arange(0, WIDTH)
    at = pointer + rows[:, None].to(tl.int64) * stride + columns[None, :]
    if EDGE and FULL_WIDTH:
        return tl.load(at, mask=(rows < length)[:, None], other=0.0)
    if EDGE:
        return tl.load(at, mask=(rows < length)[:, None] & (columns < width)[None, :], other=0.0)
    if FULL_WIDTH:
        return tl.load(at)
    return tl.load(at, mask=(columns < width)[None, :], other=0.0)


@triton.jit
def store_tile(pointer, values, rows, length, stride, width, WIDTH: tl.constexpr):
    columns = tl.arange(0, WIDTH)
    inside = (rows < length)[:, None] & (columns < width)[None, :]
    tl.store(pointer + rows[:, None].to(tl.int64) * stride + columns[None, :], values, mask=inside)


@triton.jit
def load_row(pointer, at, inside, HAS: tl.constexpr, other: tl.constexpr):
    if HAS:
        return tl.load(pointer + at, mask=inside, other=other)
    return tl.full(at.shape, other, tl.float32)


@triton.jit
def seen_keys(
    i, j, mask, mask_row, mask_column, queries, keys, offset, window,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Which key j a query i sees, for i and j that broadcast to a tile."""
    seen = (i < queries) & (j < keys)
    if CAUSAL:
        seen = seen & (j <= i + offset)
    if WINDOWED:
        seen = seen & (j > i + offset - window)
    if MASKED:
        at = mask + i.to(tl.int64) * mask_row + j.to(tl.int64) * mask_column
        seen = seen & (tl.load(at, mask=seen, other=0) != 0)
    return seen


@triton.jit
def capped(s, cap, CAPPED: tl.constexpr):
    """cap tanh(s / cap) for s and cap in bits; its slope."""
    slope = 1.0
    if CAPPED:
        x = s / cap
        square = x * x
        series = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0))))
        e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
        size = (1.0 - e) / (1.0 + e)
        tanh = tl.where(square < 0.01, series, tl.where(s < 0, -size, size))  # 1 - e has few digits near 0
        s = cap * tanh
        slope = 1.0 - tanh * tanh
    return s, slope


class LogitRows(NamedTuple):
    """Numbers of each row, or pointers to those of all rows."""

    factor: Any  # multiplies the logits
    shift: Any  # is added, in bits
    least: Any  # logits below it are hidden


class MapConstants(NamedTuple):
    """What is known of a map and the logits in front of it when a kernel is compiled."""

    MAP: Any
    SLOPES: Any
    RULE: Any
    P: Any
    FAST: Any
    REFERENCE: Any
    NORMALISED: Any
    RULED: Any
    CAPPED: Any
    FACTORED: Any
    SHIFTED: Any
    SELECTED: Any
    PLAIN: Any
    LIFT: Any


@triton.jit
def logit_rows(pointers, at, inside, M: tl.constexpr):
    factor = blocks.load_row(pointers.factor, at, inside, M.FACTORED, 1.0)
    shift = blocks.load_row(pointers.shift, at, inside, M.SHIFTED, 0.0) * LOG2E
    return LogitRows(factor, shift, blocks.load_row(pointers.least, at, inside, M.SELECTED, float("-inf")))


@triton.jit
def factored(dot, s, factor, scale, CAPPED: tl.constexpr, FACTORED: tl.constexpr):
    """factor * s for the capped logits s of products; without a cap one multiplication per logit, not two."""
    if FACTORED and not CAPPED:
        return dot * (factor * scale)
    if FACTORED:
        return s * factor
    return s


@triton.jit
def logits(dot, i, j, offset, row, scale, cap, parameter, M: tl.constexpr, AXIS: tl.constexpr):
    """z in bits of products, the capped logits in front of it, and the slopes of cap and rule; AXIS: of the keys."""
    s, cap_slope = capped(dot * scale, cap, M.CAPPED)
    z = factored(dot, s, tl.expand_dims(row.factor, AXIS), scale, M.CAPPED, M.FACTORED)
    if M.SHIFTED:
        z = z + tl.expand_dims(row.shift, AXIS)
    rule_slope = 1.0
    if M.RULED:
        z, rule_slope = M.RULE(z, tl.abs((i + offset - j).to(tl.float32)), parameter, M.FAST)
    return z, s, cap_slope, rule_slope


@triton.jit
def plain_logits(
    q_tile, k, columns, factor, scale, cap,
    CAPPED: tl.constexpr, FACTORED: tl.constexpr, C: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """z in bits of a tile of keys, without shift and rule."""
    k_tile = blocks.load_tile(k, columns, C.WIDTH, EDGE, C.FULL)
    dot = tl.dot(q_tile, tl.trans(k_tile), input_precision=C.PRECISION)
    s, _slope = capped(dot * scale, cap, CAPPED)
    return factored(dot, s, factor[:, None], scale, CAPPED, FACTORED)


@triton.jit
def selected(z, least):
    """Logits, -inf where they lie below the least that is kept: softmax gives them the weight and the slope 0."""
    return tl.where(z < least, float("-inf"), z)


@triton.jit
def key_range(
    block, queries, keys, offset, window,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """For a block of queries: the keys from `first` to `last` that some may see, `low` to `high` those that all see.

    In whole tiles, so that every tile lies on one side of each border.
    """
    first, low, high, last = 0, 0, keys // COLUMNS * COLUMNS, keys
    if CAUSAL:
        last = tl.maximum(tl.minimum(tl.minimum((block + 1) * ROWS, queries) + offset, keys), 0)
        high = tl.maximum(tl.minimum(block * ROWS + offset + 1, keys), 0) // COLUMNS * COLUMNS
    if WINDOWED:
        first = tl.maximum(block * ROWS + offset - window + 1, 0) // COLUMNS * COLUMNS
        low = tl.cdiv(tl.maximum(tl.minimum((block + 1) * ROWS, queries) + offset - window, 0), COLUMNS) * COLUMNS
    if MASKED:
        low, high = first, first
    low = tl.maximum(tl.minimum(low, last), first)
    high = tl.maximum(high, low)
    return first, low, high, last


@triton.jit
def query_range(
    start, queries, keys, offset, window,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """For the keys from start: the queries from `first` to `last` that see some of them, `low` to `high` see all."""
    first, low, high, last = 0, 0, queries // ROWS * ROWS, queries
    if CAUSAL:
        first = tl.maximum(start - offset, 0) // ROWS * ROWS
        low = tl.cdiv(tl.maximum(start + COLUMNS - 1 - offset, 0), ROWS) * ROWS
    if WINDOWED:
        last = tl.minimum(tl.maximum(start + COLUMNS - 1 - offset + window, 0), queries)
        high = tl.maximum(tl.minimum(start - offset + window, queries), 0) // ROWS * ROWS
    if MASKED:
        low, high = last, last
    if start + COLUMNS > keys:  # some are no keys at all
        low, high = last, last
    low = tl.maximum(tl.minimum(low, last), first)
    high = tl.maximum(high, low)
    return first, low, high, last
