"""Device functions shared by all kernels: the block of a program, its tiles, visible keys, logits, ordered integers.

Runtime values are passed between device functions in named tuples (Matrix, Sight, Block, LogitRows). Compile-time
constants are in tuples of their own (Constants, MapConstants): in a tuple with runtime values, Triton would make
runtime values of them.
"""

from collections import namedtuple
from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnorm.kernels import launch
from attnorm.kernels.maps import LOG2E

LOWEST = tl.constexpr(-3.4028234663852886e38)  # finite float32


class Matrix(NamedTuple):
    """A (length, width) matrix of one head. Its rows are contiguous, at a distance of `stride` elements."""

    pointer: Any
    length: Any
    stride: Any
    width: Any


class Sight(NamedTuple):
    """Which queries of one head see which keys."""

    mask: Any
    mask_row: Any
    mask_column: Any
    queries: Any
    keys: Any
    offset: Any  # number of keys before the first query
    window: Any  # number of keys that a query sees, if WINDOWED


# Compile-time constants: which masks apply, the shapes of tiles (WIDTH: the width of q and k, padded to a power of 2;
# FULL: it needs no padding), and in the kernels of row statistics whether there is a softcap (CAPPED) and whether an
# output is computed too (OUTPUT).
Constants = namedtuple(
    "Constants",
    "CAUSAL WINDOWED MASKED PRECISION ROWS COLUMNS WIDTH FULL V_WIDTH V_FULL CAPPED OUTPUT",
    defaults=(None, None, None, None),
)


class Block(NamedTuple):
    """The block of queries or keys of a program, and its head."""

    index: Any
    batch_head: Any
    batch: Any
    head: Any


@triton.jit
def block_of_queries(queries, heads, ROWS: tl.constexpr):
    blocks = tl.cdiv(queries, ROWS)
    return block_from_last(tl.program_id(0), blocks, heads)


@triton.jit
def block_from_last(program, blocks, heads):
    """Return the block of a program, the last one of a head first.

    The last block has the longest causal rows. If it started last, it would run alone at the end.
    """
    index = blocks - 1 - program % blocks
    batch_head = (program // blocks).to(tl.int64)
    return Block(index, batch_head, batch_head // heads, batch_head % heads)


@triton.jit
def block_of_keys(keys, heads, groups, COLUMNS: tl.constexpr):
    """Return the block of keys of this program; its head is a key head, which `groups` query heads share."""
    blocks = tl.cdiv(keys, COLUMNS)
    program = tl.program_id(0)
    index = program % blocks  # the first keys are seen by most queries
    batch_head = (program // blocks).to(tl.int64)
    key_heads = heads // groups
    return Block(index, batch_head, batch_head // key_heads, batch_head % key_heads)


class KeyHeadRows(NamedTuple):
    """The rows of all queries of the heads that share one key head, for a program that has a part of its keys."""

    batch: Any
    key_head: Any
    head: Any
    query: Any
    inside: Any  # whether the row exists
    row_at: Any  # index of the row in (B, H, Q)


@triton.jit
def rows_of_key_head(splits, heads, groups, queries, ROWS: tl.constexpr):
    """Return the part of the keys that this program has, one of `splits`, and its rows."""
    program = tl.program_id(0)
    batch_head = (program // splits).to(tl.int64)
    key_heads = heads // groups
    batch, key_head = batch_head // key_heads, batch_head % key_heads
    place = tl.arange(0, ROWS)
    inside = place < groups * queries
    head = key_head * groups + place // queries
    query = tl.where(inside, place % queries, queries)
    return program % splits, KeyHeadRows(batch, key_head, head, query, inside, (batch * heads + head) * queries + query)


@triton.jit
def load_queries(q, own, q_batch, q_head, q_row, width, WIDTH: tl.constexpr):
    """Load the queries of the rows of a key head."""
    columns = tl.arange(0, WIDTH)
    at = q + own.batch * q_batch + own.head * q_head + own.query * q_row
    return tl.load(at[:, None] + columns[None, :], mask=own.inside[:, None] & (columns < width)[None, :], other=0.0)


@triton.jit
def matrix_of_head(pointer, batch, head, batch_stride, head_stride, stride, length, width):
    return Matrix(pointer + batch * batch_stride + head * head_stride, length, stride, width)


@triton.jit
def tile_of_head(
    pointer, own, batch_stride, head_stride, stride, length, width, rows, WIDTH: tl.constexpr, FULL: tl.constexpr
):  # fmt: skip
    """Load some rows of a matrix; rows behind its end are zeros."""
    matrix = matrix_of_head(pointer, own.batch, own.head, batch_stride, head_stride, stride, length, width)
    return load_tile(matrix, rows, WIDTH, True, FULL)


@triton.jit
def keys_of_head(pointer, own, groups, batch_stride, head_stride, stride, keys, width):
    """Return the keys, or the values, that a block of queries reads."""
    pointer += own.batch * batch_stride + own.head // groups * head_stride
    return Matrix(pointer, keys, stride, width)


@triton.jit
def sight_of_head(mask, batch, head, mask_batch, mask_head, mask_row, mask_column, queries, keys, offset, window):
    mask += batch * mask_batch + head * mask_head
    return Sight(mask, mask_row, mask_column, queries, keys, offset, window)


@triton.jit
def queries_keys_values(
    q, k, v, mask, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, mask_batch, mask_head,
    mask_row, mask_column, heads, groups, queries, keys, offset, window, width, v_width, C: tl.constexpr,
):  # fmt: skip
    """Return the block, its row indices, which of them exist, the tile of queries, keys, values and visibility."""
    own = block_of_queries(queries, heads, C.ROWS)
    k = keys_of_head(k, own, groups, k_batch, k_head, k_row, keys, width)
    v = keys_of_head(v, own, groups, v_batch, v_head, v_row, keys, v_width)
    sight = sight_of_head(
        mask, own.batch, own.head, mask_batch, mask_head, mask_row, mask_column, queries, keys, offset, window
    )
    rows = own.index * C.ROWS + tl.arange(0, C.ROWS)
    inside = rows < queries
    q_tile = tile_of_head(q, own, q_batch, q_head, q_row, queries, width, rows, C.WIDTH, C.FULL)
    return own, rows, inside, q_tile, k, v, sight


@triton.jit
def queries_and_keys(
    q, k, mask, q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch, mask_head, mask_row, mask_column,
    heads, groups, queries, keys, offset, window, width, C: tl.constexpr,
):  # fmt: skip
    """Return the same as `queries_keys_values`, without values."""
    own, rows, inside, q_tile, k, _v, sight = queries_keys_values(
        q, k, k, mask, q_batch, q_head, q_row, k_batch, k_head, k_row, k_batch, k_head, k_row, mask_batch, mask_head,
        mask_row, mask_column, heads, groups, queries, keys, offset, window, width, width, C,
    )  # fmt: skip
    return own, rows, inside, q_tile, k, sight


@triton.jit
def load_tile(matrix, rows, WIDTH: tl.constexpr, EDGE: tl.constexpr, FULL: tl.constexpr):
    """Load (rows, WIDTH) of a matrix, zeros outside it. EDGE: rows may lie outside; not FULL: columns may."""
    columns = tl.arange(0, WIDTH)
    at = matrix.pointer + rows[:, None].to(tl.int64) * matrix.stride + columns[None, :]
    return _load_inside(at, rows < matrix.length, columns < matrix.width, EDGE, FULL)


@triton.jit
def _load_inside(at, row_inside, column_inside, EDGE: tl.constexpr, FULL: tl.constexpr):
    if EDGE and FULL:
        return tl.load(at, mask=row_inside[:, None], other=0.0)
    if EDGE:
        return tl.load(at, mask=row_inside[:, None] & column_inside[None, :], other=0.0)
    if FULL:
        return tl.load(at)
    return tl.load(at, mask=column_inside[None, :], other=0.0)


@triton.jit
def load_tile_at(matrix, first, ROWS: tl.constexpr, WIDTH: tl.constexpr, EDGE: tl.constexpr, FULL: tl.constexpr):
    """Load ROWS rows of a matrix from `first` on. In a loop only one address changes, so it costs less arithmetic."""
    rows, columns = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    from_first = rows[:, None] * matrix.stride + columns[None, :]
    at = matrix.pointer + tl.cast(first, tl.int64) * matrix.stride + from_first
    return _load_inside(at, rows < matrix.length - first, columns < matrix.width, EDGE, FULL)


@triton.jit
def store_tile(matrix, values, rows, WIDTH: tl.constexpr):
    values = values.to(matrix.pointer.dtype.element_ty)
    columns = tl.arange(0, WIDTH)
    inside = (rows < matrix.length)[:, None] & (columns < matrix.width)[None, :]
    at = matrix.pointer + rows[:, None].to(tl.int64) * matrix.stride + columns[None, :]
    tl.store(at, values, mask=inside)


@triton.jit
def load_row(pointer, at, inside, HAS: tl.constexpr, other: tl.constexpr):
    if HAS:
        return tl.load(pointer + at, mask=inside, other=other)
    return tl.full(at.shape, other, tl.float32)


# Kinds of numbers: launch.number_kind.
NO_NUMBER = tl.constexpr(launch.NO_NUMBER)
ROW_NUMBERS = tl.constexpr(launch.ROW_NUMBERS)
HEAD_NUMBERS = tl.constexpr(launch.HEAD_NUMBERS)
ONE_TENSOR = tl.constexpr(launch.ONE_TENSOR)
ONE_NUMBER = tl.constexpr(launch.ONE_NUMBER)


@triton.jit
def load_number(source, row_at, head, inside, KIND: tl.constexpr, other: tl.constexpr):
    """Return a number of each row. KIND says what the source is: launch.number_kind."""
    if KIND == ROW_NUMBERS:
        return tl.load(source + row_at, mask=inside, other=other)
    if KIND == HEAD_NUMBERS:
        return tl.load(source + head, mask=inside, other=other).to(tl.float32)
    if KIND == ONE_TENSOR:
        return tl.zeros(row_at.shape, tl.float32) + tl.load(source).to(tl.float32)
    if KIND == ONE_NUMBER:
        return tl.zeros(row_at.shape, tl.float32) + source
    return tl.full(row_at.shape, other, tl.float32)


@triton.jit
def load_factor(factor, exponent, log2_base, delta, own, FACTORED: tl.constexpr, EXPONENT: tl.constexpr):
    """Return the factor of each row; with an exponent, delta + softplus(factor) base^(2 tanh(exponent)).

    FACTORED, EXPONENT: kinds of numbers. As operations of torch the power is five launches, which take longer than the
    attention of one query.
    """
    value = load_number(factor, own.row_at, own.head, own.inside, FACTORED, 1.0)
    if EXPONENT != NO_NUMBER:
        power = 2.0 * tanh(load_number(exponent, own.row_at, own.head, own.inside, EXPONENT, 0.0))
        value = delta + softplus(value) * tl.exp2(power * log2_base)
    return value


@triton.jit
def softplus(x):
    small = tl.exp(-tl.abs(x))
    one_more = 1.0 + small
    # log(1 + small) with the digits that 1 + small has lost
    rest = tl.where(one_more == 1.0, small, tl.log(one_more) * small / tl.where(one_more == 1.0, 1.0, one_more - 1.0))
    return tl.maximum(x, 0.0) + rest


@triton.jit
def tanh(x):
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def seen_keys(i, j, sight, C: tl.constexpr):
    """Return whether query i sees key j, for i and j that broadcast to a tile."""
    seen = (i < sight.queries) & (j < sight.keys)
    if C.CAUSAL:
        seen = seen & (j <= i + sight.offset)
    if C.WINDOWED:
        seen = seen & (j > i + sight.offset - sight.window)
    if C.MASKED:
        seen = unmasked(seen, i, j, sight)
    return seen


@triton.jit
def unmasked(seen, i, j, sight):
    """Return `seen` without the keys that the mask hides."""
    at = sight.mask + i.to(tl.int64) * sight.mask_row + j.to(tl.int64) * sight.mask_column
    return seen & (tl.load(at, mask=seen, other=0) != 0)


@triton.jit
def key_range(block, sight, C: tl.constexpr):
    """Return first, low, high and last: some queries of the block see keys first..last, all see keys low..high."""
    return key_range_of_rows(block * C.ROWS, tl.minimum((block + 1) * C.ROWS, sight.queries), sight, C)


@triton.jit
def key_range_of_rows(start, stop, sight, C: tl.constexpr):
    """Return the same for the queries from start to stop, or some of them.

    The borders are multiples of the tile, so that no tile crosses one.
    """
    keys, offset = sight.keys, sight.offset
    first, low, high, last = 0, 0, keys // C.COLUMNS * C.COLUMNS, keys
    if C.CAUSAL:
        last = tl.maximum(tl.minimum(stop + offset, keys), 0)
        high = tl.maximum(tl.minimum(start + offset + 1, keys), 0) // C.COLUMNS * C.COLUMNS
    if C.WINDOWED:
        first = tl.maximum(start + offset - sight.window + 1, 0) // C.COLUMNS * C.COLUMNS
        passed = tl.maximum(stop + offset - sight.window, 0)
        low = tl.cdiv(passed, C.COLUMNS) * C.COLUMNS
    if C.MASKED:
        low, high = first, first
    low = tl.maximum(tl.minimum(low, last), first)
    high = tl.maximum(high, low)
    return first, low, high, last


@triton.jit
def query_range(start, sight, C: tl.constexpr):
    """Return first, low, high and last: queries first..last see some keys of the block at `start`, low..high all."""
    queries, offset = sight.queries, sight.offset
    first, low, high, last = 0, 0, queries // C.ROWS * C.ROWS, queries
    if C.CAUSAL:
        first = tl.maximum(start - offset, 0) // C.ROWS * C.ROWS
        low = tl.cdiv(tl.maximum(start + C.COLUMNS - 1 - offset, 0), C.ROWS) * C.ROWS
    if C.WINDOWED:
        last = tl.minimum(tl.maximum(start + C.COLUMNS - 1 - offset + sight.window, 0), queries)
        high = tl.maximum(tl.minimum(start - offset + sight.window, queries), 0) // C.ROWS * C.ROWS
    if C.MASKED:
        low, high = last, last
    if start + C.COLUMNS > sight.keys:  # some are no keys at all
        low, high = last, last
    low = tl.maximum(tl.minimum(low, last), first)
    high = tl.maximum(high, low)
    return first, low, high, last


@triton.jit
def capped(s, cap, CAPPED: tl.constexpr):
    """Return cap tanh(s / cap) and its slope, for s and cap in bits."""
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
    """Numbers of each row of a block, or pointers to those of all rows."""

    factor: Any  # multiplies the logits
    shift: Any  # is added, in bits
    cutoff: Any  # logits below it are hidden


# Compile-time constants of a map and of the logits before it.
MapConstants = namedtuple(
    "MapConstants",
    "MAP SLOPES RULE P FAST REFERENCE NORMALISED RULED CAPPED FACTORED SHIFTED SELECTED PLAIN LIFT",
)


@triton.jit
def logit_rows(pointers, at, inside, M: tl.constexpr):
    factor = load_row(pointers.factor, at, inside, M.FACTORED, 1.0)
    shift = load_row(pointers.shift, at, inside, M.SHIFTED, 0.0) * LOG2E
    return LogitRows(factor, shift, load_row(pointers.cutoff, at, inside, M.SELECTED, float("-inf")))


@triton.jit
def factored(dot, s, factor, scale, CAPPED: tl.constexpr, FACTORED: tl.constexpr):
    """Return factor * s for the capped logits s of products; without a cap, one multiplication per logit."""
    if FACTORED and not CAPPED:
        return dot * (factor * scale)
    if FACTORED:
        return s * factor
    return s


@triton.jit
def logits(dot, i, j, offset, row, scale, cap, parameter, M: tl.constexpr, AXIS: tl.constexpr):
    """Return z of products in bits, the capped logits before it, and the slopes of cap and rule.

    AXIS: dimension of the keys.
    """
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
    """Return z in bits for a tile of keys, without shift and rule."""
    k_tile = load_tile(k, columns, C.WIDTH, EDGE, C.FULL)
    dot = tl.dot(q_tile, tl.trans(k_tile), input_precision=C.PRECISION)
    s, _slope = capped(dot * scale, cap, CAPPED)
    return factored(dot, s, factor[:, None], scale, CAPPED, FACTORED)


@triton.jit
def selected(z, cutoff):
    """Return the logits, -inf for those below the cutoff: softmax gives them weight 0 and slope 0."""
    return tl.where(z < cutoff, float("-inf"), z)


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
