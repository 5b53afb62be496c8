"""What a program of an attention kernel reads: matrices of its head, its block of queries or keys, who sees whom.

Values of a launch travel through the device functions in tuples (Matrix, Sight, Block); what is known when a kernel is
compiled, in another one (Constants). Triton would make values of constants in a tuple of values.
"""

from collections import namedtuple
from typing import Any, NamedTuple

import triton
import triton.language as tl


class Matrix(NamedTuple):
    """(length, width) numbers of one head; rows are contiguous and `stride` apart."""

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
    offset: Any  # keys before the first query
    window: Any  # keys that a query sees, if WINDOWED


# What is known when a kernel is compiled: who sees whom, the shapes of tiles (WIDTH of q and k is a power of 2; FULL:
# they are as wide), and in kernels of row statistics whether logits are capped.
Constants = namedtuple(
    "Constants",
    "CAUSAL WINDOWED MASKED PRECISION ROWS COLUMNS WIDTH FULL V_WIDTH V_FULL CAPPED",
    defaults=(None, None, None),
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
    """A head's longest causal rows come first, or they would run alone at the end."""
    index = blocks - 1 - program % blocks
    batch_head = (program // blocks).to(tl.int64)
    return Block(index, batch_head, batch_head // heads, batch_head % heads)


@triton.jit
def block_of_keys(keys, heads, groups, COLUMNS: tl.constexpr):
    """Its head is one of k, which `groups` heads of q share."""
    blocks = tl.cdiv(keys, COLUMNS)
    program = tl.program_id(0)
    index = program % blocks  # the first keys are seen by most queries
    batch_head = (program // blocks).to(tl.int64)
    key_heads = heads // groups
    return Block(index, batch_head, batch_head // key_heads, batch_head % key_heads)


@triton.jit
def matrix_of_head(pointer, batch, head, batch_stride, head_stride, stride, length, width):
    return Matrix(pointer + batch * batch_stride + head * head_stride, length, stride, width)


@triton.jit
def tile_of_head(
    pointer, own, batch_stride, head_stride, stride, length, width, rows, WIDTH: tl.constexpr, FULL: tl.constexpr
):  # fmt: skip
    """Some rows of a matrix, at the end of which some may not exist."""
    matrix = matrix_of_head(pointer, own.batch, own.head, batch_stride, head_stride, stride, length, width)
    return load_tile(matrix, rows, WIDTH, True, FULL)


@triton.jit
def keys_of_head(pointer, own, groups, batch_stride, head_stride, stride, keys, width):
    """The keys or values that a block of queries reads."""
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
    """What a kernel reads: a block of queries, their indices and which of them exist, and the keys and values."""
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
    """What a kernel without values reads."""
    own, rows, inside, q_tile, k, _v, sight = queries_keys_values(
        q, k, k, mask, q_batch, q_head, q_row, k_batch, k_head, k_row, k_batch, k_head, k_row, mask_batch, mask_head,
        mask_row, mask_column, heads, groups, queries, keys, offset, window, width, width, C,
    )  # fmt: skip
    return own, rows, inside, q_tile, k, sight


@triton.jit
def load_tile(matrix, rows, WIDTH: tl.constexpr, EDGE: tl.constexpr, FULL: tl.constexpr):
    """(rows, WIDTH) of a matrix, with zeros around it; checks only what can be outside."""
    columns = tl.arange(0, WIDTH)
    at = matrix.pointer + rows[:, None].to(tl.int64) * matrix.stride + columns[None, :]
    if EDGE and FULL:
        return tl.load(at, mask=(rows < matrix.length)[:, None], other=0.0)
    if EDGE:
        return tl.load(at, mask=(rows < matrix.length)[:, None] & (columns < matrix.width)[None, :], other=0.0)
    if FULL:
        return tl.load(at)
    return tl.load(at, mask=(columns < matrix.width)[None, :], other=0.0)


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


@triton.jit
def seen_keys(i, j, sight, C: tl.constexpr):
    """Which key j a query i sees, for i and j that broadcast to a tile."""
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
    """Which of the keys that may be seen the mask leaves."""
    at = sight.mask + i.to(tl.int64) * sight.mask_row + j.to(tl.int64) * sight.mask_column
    return seen & (tl.load(at, mask=seen, other=0) != 0)


@triton.jit
def key_range(block, sight, C: tl.constexpr):
    """For a block of queries: the keys from `first` to `last` that some may see, `low` to `high` those that all see.

    In whole tiles, so that every tile lies on one side of each border.
    """
    queries, keys, offset = sight.queries, sight.keys, sight.offset
    first, low, high, last = 0, 0, keys // C.COLUMNS * C.COLUMNS, keys
    if C.CAUSAL:
        last = tl.maximum(tl.minimum(tl.minimum((block + 1) * C.ROWS, queries) + offset, keys), 0)
        high = tl.maximum(tl.minimum(block * C.ROWS + offset + 1, keys), 0) // C.COLUMNS * C.COLUMNS
    if C.WINDOWED:
        first = tl.maximum(block * C.ROWS + offset - sight.window + 1, 0) // C.COLUMNS * C.COLUMNS
        passed = tl.maximum(tl.minimum((block + 1) * C.ROWS, queries) + offset - sight.window, 0)
        low = tl.cdiv(passed, C.COLUMNS) * C.COLUMNS
    if C.MASKED:
        low, high = first, first
    low = tl.maximum(tl.minimum(low, last), first)
    high = tl.maximum(high, low)
    return first, low, high, last


@triton.jit
def query_range(start, sight, C: tl.constexpr):
    """For the keys from start: the queries from `first` to `last` that see some of them, `low` to `high` see all."""
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
