"""Extremes of each row of logits: its smallest and largest with their keys, and its k-th largest; without values.

Smallest and largest: one pass over the keys. Every column of a tile keeps its own extremes and the tiles they lie in,
so that rows are searched once, at the end. `sum_by_key` adds up the gradients of extremes: each goes to one key.

The k-th largest: a number between it and the next smaller one; the keys above it are the top k. It lies halfway, since
other kernels round products differently. The first pass over the keys finds the extremes, the mean and the variance of
each row. Every further pass counts the logits at or above a probe t of each row, and finds the logits next to t on both
sides. So a bracket of two logits of the row shrinks around the k-th: no value is stored, and ties count as one. Probes
come from the normal distribution first, then from interpolation of the counts and of their logarithms in turn, and from
bisection of the bits if that takes long. Where a count is off by a few, the logits next to t lead to the k-th: every
column keeps its own.

For small k `kth_of_lists` of kernels/kth_logit_by_lists.py finds most rows in one pass. `kth_of_lost_rows` searches the
others in the same way.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnorm.arithmetic import ceil_div
from attnorm.kernels.blocks import (
    LOWEST,
    Constants,
    block_of_keys,
    block_of_queries,
    key_range,
    key_range_of_rows,
    keys_of_head,
    load_row,
    load_tile,
    matrix_of_head,
    number_of,
    ordered,
    plain_logits,
    queries_and_keys,
    seen_keys,
    sight_of_head,
    store_tile,
    tile_of_head,
)
from attnorm.kernels.kth_logit_by_lists import kth_of_lists
from attnorm.kernels.launch import Form, device_of, empty_numbers, float32_precision, in_rows, padded
from attnorm.kernels.maps import LN2
from attnorm.kernels.one_pass import OnePassLaunch


def extreme_logits(
    q: Tensor, k: Tensor, mask: Tensor | None, factor: Tensor | None, form: Form
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return smallest and largest logit of each row, (B, H, Q), 0 for rows without keys, and the first such keys."""
    low_key, high_key = (torch.empty(q.shape[:3], dtype=torch.int32, device=q.device) for _ in range(2))
    low, high = empty_numbers(q), empty_numbers(q)
    call = OnePassLaunch.of(q, k, k, mask, factor, None, None, None, None, form)
    search(extremes_kernel, call, (low_key, high_key, low, high), search_tile(q))
    return low, high, low_key, high_key


def sum_by_key(rows: Tensor, index: Tensor, keys: int, groups: int) -> Tensor:
    """Return for each key the sum of the rows (B, H, Q, D) with its index, over `groups` heads: (B, G, K, D)."""
    rows = in_rows(rows)
    batch, heads, queries, width = rows.shape
    sums = torch.empty((batch, heads // groups, keys, width), dtype=rows.dtype, device=rows.device)
    with device_of(rows):
        sum_by_key_kernel[(ceil_div(keys, 64) * batch * (heads // groups),)](
            rows, index.contiguous(), sums, *rows.stride()[:3], *sums.stride()[:3], heads, groups, queries, keys, width,
            PRECISION=float32_precision(), ROWS=64, COLUMNS=64, WIDTH=padded(rows),
            num_warps=4 if width <= 128 else 8,
        )  # fmt: skip
    return sums


def search(
    kernel: Any, call: OnePassLaunch, rows_of: tuple[Tensor, ...], tile: tuple[int, int, int, int],
    rows_per_program: int | None = None, **more_constants: int,
) -> None:  # fmt: skip
    """Launch a kernel that reads queries and keys and writes numbers of rows."""
    q, k, _, mask, factor, *_ = call.tensors
    *sizes, _, scale, cap = call.sizes
    call.launch(
        kernel, tile, q, k, mask, factor, *rows_of, *call.strides[:6], *call.strides[9:], *sizes, scale, cap,
        block=rows_per_program, **(call.constants_of(kernel) | more_constants),
    )  # fmt: skip


def search_tile(q: Tensor) -> tuple[int, int, int, int]:
    """For kernels that keep four numbers per logit in registers. The fastest of five on an H200 in bfloat16.

    Wide float32 as in `launch.tile_without_values`: at most 0.2 KB of registers per thread are spilled.
    """
    if q.dtype == torch.float32:
        return (32, 32, 4, 2) if padded(q) <= 64 else (32, 16, 4, 2) if padded(q) <= 128 else (16, 64, 8, 2)
    return (64, 32, 4, 4) if padded(q) <= 64 else (64, 64, 4, 2) if padded(q) <= 128 else (64, 32, 4, 2)


@triton.jit
def extremes_kernel(
    q, k, mask, factor, low_key, high_key, low_logit, high_logit,
    q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch, mask_head, mask_row, mask_column,
    heads, groups, queries, keys, offset, window, width, scale, cap,
    CAPPED: tl.constexpr, FACTORED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """(B, H, Q): the keys, and their logits in nats, 0 in a row that sees none."""
    C: tl.constexpr = Constants(CAUSAL, WINDOWED, MASKED, PRECISION, ROWS, COLUMNS, WIDTH, FULL)
    own, rows, inside, q_tile, k, sight = queries_and_keys(
        q, k, mask, q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch, mask_head, mask_row, mask_column,
        heads, groups, queries, keys, offset, window, width, C,
    )  # fmt: skip
    row_at = own.batch_head * queries + rows
    row_factor = load_row(factor, row_at, inside, FACTORED, 1.0)

    low = tl.full([ROWS, COLUMNS], float("inf"), tl.float32)
    high = tl.full([ROWS, COLUMNS], float("-inf"), tl.float32)
    low_at = tl.zeros([ROWS, COLUMNS], tl.int32)
    high_at = tl.zeros([ROWS, COLUMNS], tl.int32)
    borders = key_range(own.index, sight, C)
    for part in tl.static_range(0 if WINDOWED or MASKED else 1, 3):
        low, high, low_at, high_at = _fold(
            low, high, low_at, high_at, borders[part], borders[part + 1], q_tile, k, rows, row_factor, sight, scale,
            cap, CAPPED, FACTORED, C, part != 1,
        )  # fmt: skip
    least, most = tl.min(low, 1), tl.max(high, 1)
    tl.store(low_key + row_at, _first_key(low, least, low_at, keys, COLUMNS), mask=inside)
    tl.store(high_key + row_at, _first_key(high, most, high_at, keys, COLUMNS), mask=inside)
    tl.store(low_logit + row_at, tl.where(least < float("inf"), least * LN2, 0.0), mask=inside)
    tl.store(high_logit + row_at, tl.where(most > float("-inf"), most * LN2, 0.0), mask=inside)


@triton.jit
def _fold(
    low, high, low_at, high_at, start, stop, q_tile, k, rows, factor, sight, scale, cap,
    CAPPED: tl.constexpr, FACTORED: tl.constexpr, C: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    for at in range(start, stop, C.COLUMNS):
        columns = at + tl.arange(0, C.COLUMNS)
        z = plain_logits(q_tile, k, columns, factor, scale, cap, CAPPED, FACTORED, C, EDGE)
        smaller, larger = z < low, z > high
        if EDGE:
            seen = seen_keys(rows[:, None], columns[None, :], sight, C)
            smaller, larger = smaller & seen, larger & seen
        low, low_at = tl.where(smaller, z, low), tl.where(smaller, at, low_at)
        high, high_at = tl.where(larger, z, high), tl.where(larger, at, high_at)
    return low, high, low_at, high_at


@triton.jit
def _first_key(values, extreme, tile_at, keys, COLUMNS: tl.constexpr):
    """The first key of each row whose value is the extreme; 0 in a row that saw none."""
    key = tile_at + tl.arange(0, COLUMNS)[None, :]
    return tl.minimum(tl.min(tl.where(values == extreme[:, None], key, keys), 1), keys - 1)


@triton.jit
def sum_by_key_kernel(
    rows_in, index, sums, r_batch, r_head, r_row, s_batch, s_head, s_row, heads, groups, queries, keys, width,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """sums (B, G, K, D): the rows (B, H, Q, D) of all queries whose index (B, H, Q) is the key, in their order.

    A key that is the extreme of most rows, as a sink is, would hold up atomic sums and sums by sorting.
    """
    own = block_of_keys(keys, heads, groups, COLUMNS)
    start = own.index * COLUMNS
    columns = start + tl.arange(0, COLUMNS)
    found = tl.zeros([COLUMNS, WIDTH], tl.float32)
    for member in range(groups):
        head = own.head * groups + member
        for at in range(0, queries, ROWS):
            rows = at + tl.arange(0, ROWS)
            key = tl.load(index + (own.batch * heads + head) * queries + rows, mask=rows < queries, other=-1)
            if tl.max(((key >= start) & (key < start + COLUMNS)).to(tl.int32), 0) > 0:
                here = matrix_of_head(rows_in, own.batch, head, r_batch, r_head, r_row, queries, width)
                tile = load_tile(here, rows, WIDTH, True, False)
                match = (columns[:, None] == key[None, :]).to(tile.dtype)
                found = tl.dot(match, tile, found, input_precision=PRECISION)
    sums = matrix_of_head(sums, own.batch, own.head, s_batch, s_head, s_row, keys, width)
    store_tile(sums, found, columns, WIDTH)


EARLY = tl.constexpr(10)  # passes of interpolation; 64 rows of normal numbers need three or four
NEAR = tl.constexpr(16)  # places from the k-th at which the logits next to the probe lead to it
MAX_STEPS = tl.constexpr(48)  # a bisection takes 32

MOST_LISTED = 64  # with more of the k largest per lane, too many lanes would lose one
GATHERED = 512  # rows among which lost ones are gathered


def top_k_cutoff(
    q: Tensor, k: Tensor, mask: Tensor | None, factor: Tensor | None, count: Tensor, most: int, form: Form
) -> Tensor:
    """Return the number that the `count` largest logits of a row exceed, (B, H, Q), in bits; -inf: all are kept.

    most: the largest count of all rows. It chooses the kernel and may be too large.
    """
    cutoff = empty_numbers(q)
    call = OnePassLaunch.of(q, k, k, mask, factor, None, None, None, None, form)
    rows_of = count.contiguous(), cutoff
    tile = lists_tile(q) if most <= MOST_LISTED else None
    if tile is None:
        search(kth_largest, call, rows_of, search_tile(q))
        return cutoff
    largest, listed = torch.empty_like(cutoff), torch.empty(q.shape[:3], dtype=torch.int32, device=q.device)
    parts = max(1, tile[2] * 16 // tile[0])
    search(kth_of_lists, call, (*rows_of, largest), tile, PARTS=parts, FAST=q.is_cuda)
    numbers = (*rows_of, largest, listed)
    search(kth_of_lost_rows, call, numbers, lost_rows_tile(q), rows_per_program=GATHERED, CHUNK=GATHERED)
    return cutoff


def lists_tile(q: Tensor) -> tuple[int, int, int, int] | None:
    """For `kth_of_lists`, which has eight numbers of each lane, one for four columns, in registers.

    Compiled for sm_90 it takes 254 of them and spills none, so that two programs run on a multiprocessor. None: keys of
    width 256 or in float32 leave too little shared memory.
    """
    if q.is_cuda and (q.dtype == torch.float32 or padded(q) > 128):
        return None
    return 64, 128, 4, 3


def lost_rows_tile(q: Tensor) -> tuple[int, int, int, int]:
    """The fastest of seven (width 64) and of four (width 128) on an H200 in bfloat16."""
    return (16, 128, 4, 2) if padded(q) <= 64 else (32, 128, 8, 2) if padded(q) <= 128 else (32, 32, 4, 2)


@triton.jit
def _logits_of_tile(
    at, q_tile, k, rows, factor, sight, scale, cap,
    CAPPED: tl.constexpr, FACTORED: tl.constexpr, C: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Logits, NaN where a key is hidden: then every comparison is false."""
    columns = at + tl.arange(0, C.COLUMNS)
    z = plain_logits(q_tile, k, columns, factor, scale, cap, CAPPED, FACTORED, C, EDGE)
    if EDGE:
        z = tl.where(seen_keys(rows[:, None], columns[None, :], sight, C), z, float("nan"))
    return z


@triton.jit
def _survey(
    low, high, total, squares, count, start, stop, q_tile, k, rows, factor, sight, scale, cap,
    CAPPED: tl.constexpr, FACTORED: tl.constexpr, C: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Extremes, sums and squares of the visible logits, apart by column, and how many there are."""
    for at in range(start, stop, C.COLUMNS):
        z = _logits_of_tile(at, q_tile, k, rows, factor, sight, scale, cap, CAPPED, FACTORED, C, EDGE)
        known = z == z
        low = tl.where(z < low, z, low)
        high = tl.where(z > high, z, high)
        z = tl.where(known, z, 0.0)
        total += z
        squares += z * z
        count += tl.sum(known.to(tl.int32), 1)
    return low, high, total, squares, count


@triton.jit
def _count(
    cells, above, below, t, start, stop, q_tile, k, rows, factor, sight, scale, cap,
    CAPPED: tl.constexpr, FACTORED: tl.constexpr, C: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Count the logits at or above t; also return the smallest of them and the largest below t, per column."""
    for at in range(start, stop, C.COLUMNS):
        z = _logits_of_tile(at, q_tile, k, rows, factor, sight, scale, cap, CAPPED, FACTORED, C, EDGE)
        cells += (z >= t).to(tl.int32)
        above = tl.where((z >= t) & (z < above), z, above)
        below = tl.where((z < t) & (z > below), z, below)
    return cells, above, below


@triton.jit
def _normal_quantile(share):
    """The number that a share of a standard normal distribution exceeds, to 5e-4 (Abramowitz and Stegun 26.2.23)."""
    tail = tl.minimum(tl.maximum(tl.minimum(share, 1.0 - share), 1e-9), 0.5)
    x = tl.sqrt(-2.0 * tl.log(tail))
    top = 2.515517 + x * (0.802853 + x * 0.010328)
    bottom = 1.0 + x * (1.432788 + x * (0.189269 + x * 0.001308))
    size = x - top / bottom
    return tl.where(share > 0.5, -size, size)


@triton.jit
def _next(cells, start, places, sign: tl.constexpr):
    """The number that lies so many places behind the start in a row of signed cells, which have one per column.

    Each place costs a search of the cells, so it goes only as far as some row needs.
    """
    found = start
    for place in range(tl.max(places, 0)):
        cells_behind = tl.where(cells * sign > found[:, None], cells * sign, float("inf"))
        found = tl.where(place < places, tl.min(cells_behind, 1), found)
    return found


@triton.jit
def _narrow(
    t, lower, upper, most, found, settled, places, borders, q_tile, k, rows, factor, sight, scale, cap,
    CAPPED: tl.constexpr, FACTORED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Return the cutoff of each row, `found` where it is settled.

    The k-th logit lies between lower and upper. `most` logits, more than k, lie at or above lower. t: the first probe.
    """
    FIRST: tl.constexpr = 0 if C.WINDOWED or C.MASKED else 1
    zeros = tl.zeros([C.ROWS, C.COLUMNS], tl.float32)
    target = places.to(tl.float32)
    fewest = tl.zeros([C.ROWS], tl.float32)  # logits above upper, less than k
    steps = 0
    while (tl.max(tl.where(settled, 0, 1), 0) > 0) & (steps < MAX_STEPS):
        cells = tl.zeros([C.ROWS, C.COLUMNS], tl.int32)
        above, below = zeros + float("inf"), zeros - float("inf")
        for part in tl.static_range(FIRST, 3):
            cells, above, below = _count(
                cells, above, below, t[:, None], borders[part], borders[part + 1], q_tile, k, rows, factor, sight,
                scale, cap, CAPPED, FACTORED, C, part != 1,
            )  # fmt: skip
        reached = tl.sum(cells, 1)
        over, under = tl.min(above, 1), tl.max(below, 1)
        settled = settled | ((t == LOWEST) & (reached < places))  # all keys are kept
        hit = (settled == 0) & (reached >= places) & ((reached == places) | (over >= upper))
        halfway = over - 0.5 * (over - under)
        halfway = tl.where((halfway > under) | (under == float("-inf")), halfway, over)  # neighbors in float32
        found = tl.where(hit, halfway, found)
        settled = settled | hit
        many = (settled == 0) & (reached > places)
        few = (settled == 0) & (reached < places)
        lower, most = tl.where(many, over, lower), tl.where(many, reached.to(tl.float32), most)
        upper, fewest = tl.where(few, under, upper), tl.where(few, reached.to(tl.float32), fewest)
        if steps >= EARLY:
            bottom, top = ordered(lower, 32).to(tl.int64), ordered(upper, 32).to(tl.int64)
            t = number_of((bottom + (top - bottom + 1) // 2).to(tl.int32), 32)
        elif steps % 2 == 0:
            t = lower + (upper - lower) * ((most - target) / (most - fewest))
        else:
            gain = tl.log((most - 0.5) / target)
            t = lower + (upper - lower) * (gain / (gain - tl.log((fewest + 0.5) / target)))
        near = tl.abs(reached - places) <= NEAR
        back, forth = tl.where(many & near, reached - places, 0), tl.where(few & near, places - reached - 1, 0)
        t = tl.where(many & near, _next(above, over, back, 1.0), t)
        t = tl.where(few & near, -_next(below, -under, forth, -1.0), t)
        t = tl.where((t > lower) & (t < upper), t, upper)
        steps += 1
    return found


@triton.jit
def kth_largest(
    q, k, mask, factor, wanted, cutoff,
    q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch, mask_head, mask_row, mask_column,
    heads, groups, queries, keys, offset, window, width, scale, cap,
    CAPPED: tl.constexpr, FACTORED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """wanted (B, H, Q): k of each row. cutoff (B, H, Q), in bits: -inf where all keys are kept."""
    C: tl.constexpr = Constants(CAUSAL, WINDOWED, MASKED, PRECISION, ROWS, COLUMNS, WIDTH, FULL)
    own, rows, inside, q_tile, k, sight = queries_and_keys(
        q, k, mask, q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch, mask_head, mask_row, mask_column,
        heads, groups, queries, keys, offset, window, width, C,
    )  # fmt: skip
    row_at = own.batch_head * queries + rows
    row_factor = load_row(factor, row_at, inside, FACTORED, 1.0)
    places = tl.load(wanted + row_at, mask=inside, other=1)
    borders = key_range(own.index, sight, C)

    zeros, none = tl.zeros([ROWS, COLUMNS], tl.float32), tl.zeros([ROWS], tl.int32)
    low, high, total, squares, count = zeros + float("inf"), zeros - float("inf"), zeros, zeros, none
    for part in tl.static_range(0 if WINDOWED or MASKED else 1, 3):
        low, high, total, squares, count = _survey(
            low, high, total, squares, count, borders[part], borders[part + 1], q_tile, k, rows, row_factor, sight,
            scale, cap, CAPPED, FACTORED, C, part != 1,
        )  # fmt: skip
    lower, upper = tl.min(low, 1), tl.max(high, 1)
    most = tl.maximum(count, 1).to(tl.float32)
    mean = tl.sum(total, 1) / most
    deviation = tl.sqrt(tl.maximum(tl.sum(squares, 1) / most - mean * mean, 0.0))
    t = mean + deviation * _normal_quantile(places.to(tl.float32) / most)
    t = tl.where((t > lower) & (t < upper), t, upper)
    found = _narrow(
        t, lower, upper, most, tl.full([ROWS], float("-inf"), tl.float32), (count <= places) | (inside == 0), places,
        borders, q_tile, k, rows, row_factor, sight, scale, cap, CAPPED, FACTORED, C,
    )  # fmt: skip
    tl.store(cutoff + row_at, found, mask=inside)


@triton.jit
def kth_of_lost_rows(
    q, k, mask, factor, wanted, cutoff, largest, listed,
    q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch, mask_head, mask_row, mask_column,
    heads, groups, queries, keys, offset, window, width, scale, cap,
    CAPPED: tl.constexpr, FACTORED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Search the rows that `kth_of_lists` has lost, between the cutoff and the largest logit that it has left.

    A program gathers such rows from a chunk of CHUNK rows. listed (B, H, Q): memory for their indices.
    """
    C: tl.constexpr = Constants(CAUSAL, WINDOWED, MASKED, PRECISION, ROWS, COLUMNS, WIDTH, FULL)
    own = block_of_queries(queries, heads, CHUNK)
    at_head = own.batch_head * queries
    chunk = own.index * CHUNK + tl.arange(0, CHUNK)
    peak = tl.load(largest + at_head + chunk, mask=chunk < queries, other=float("nan"))
    lost = (peak == peak).to(tl.int32)
    listed += at_head + own.index * CHUNK
    tl.store(listed + tl.cumsum(lost, 0) - 1, chunk, mask=lost != 0)
    number = tl.sum(lost, 0)
    tl.debug_barrier()

    k = keys_of_head(k, own, groups, k_batch, k_head, k_row, keys, width)
    sight = sight_of_head(
        mask, own.batch, own.head, mask_batch, mask_head, mask_row, mask_column, queries, keys, offset, window
    )
    for start in range(0, number, ROWS):
        members = start + tl.arange(0, ROWS)
        inside = members < number
        rows = tl.load(listed + members, mask=inside, other=queries)
        last_row = tl.load(listed + tl.minimum(start + ROWS, number) - 1)
        borders = key_range_of_rows(tl.load(listed + start), last_row + 1, sight, C)
        q_tile = tile_of_head(q, own, q_batch, q_head, q_row, queries, width, rows, WIDTH, FULL)
        row_at = at_head + rows
        lower = tl.load(cutoff + row_at, mask=inside, other=0.0)
        places = tl.load(wanted + row_at, mask=inside, other=1)
        found = _narrow(
            tl.maximum(lower, LOWEST), lower, tl.load(largest + row_at, mask=inside, other=0.0),
            places.to(tl.float32), lower, inside == 0, places, borders, q_tile, k, rows,
            load_row(factor, row_at, inside, FACTORED, 1.0), sight, scale, cap, CAPPED, FACTORED, C,
        )  # fmt: skip
        tl.store(cutoff + row_at, found, mask=inside)
