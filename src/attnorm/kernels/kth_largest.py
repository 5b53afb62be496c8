"""The k-th largest logit of each row: a number between it and the next smaller one; the keys above it are the top k.

It lies halfway, since other kernels round products differently. The first pass over the keys finds the extremes, the
mean and the variance of each row. Every further pass counts the logits at or above a probe t of each row, and finds the
logits next to t on both sides. So a bracket of two logits of the row shrinks around the k-th: no value is stored, and
ties count as one. Probes come from the normal distribution first, then from interpolation of the counts and of their
logarithms in turn, and from bisection of the bits if that takes long. Where a count is off by a few, the logits next to
t lead to the k-th: every column keeps its own.

For small k kernels/top_lists.py finds most rows in one pass. `kth_of_lost_rows` searches the others in the same way.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnorm.kernels.blocks import (
    Constants,
    block_of_queries,
    key_range,
    key_range_of_rows,
    keys_of_head,
    load_row,
    plain_logits,
    queries_and_keys,
    seen_keys,
    sight_of_head,
    tile_of_head,
)
from attnorm.kernels.extremes import search, search_tile
from attnorm.kernels.launch import padded
from attnorm.kernels.one_pass import Form
from attnorm.kernels.order_statistics import number_of, ordered
from attnorm.kernels.top_lists import LOWEST, kth_of_lists

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
    cutoff = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    rows_of = count.contiguous(), cutoff
    tile = lists_tile(q) if most <= MOST_LISTED else None
    if tile is None:
        search(kth_largest, q, k, mask, factor, rows_of, form, search_tile(q))
        return cutoff
    largest, listed = torch.empty_like(cutoff), torch.empty(q.shape[:3], dtype=torch.int32, device=q.device)
    search(
        kth_of_lists, q, k, mask, factor, (*rows_of, largest), form, tile,
        PARTS=max(1, tile[2] * 16 // tile[0]), FAST=q.is_cuda,
    )  # fmt: skip
    search(
        kth_of_lost_rows, q, k, mask, factor, (*rows_of, largest, listed), form, lost_rows_tile(q),
        rows_per_program=GATHERED, CHUNK=GATHERED,
    )  # fmt: skip
    return cutoff


def lists_tile(q: Tensor) -> tuple[int, int, int, int] | None:
    """For kernels/top_lists.py, which has eight numbers of each lane, one for four columns, in registers.

    Compiled for sm_90 it takes 254 of them and spills none, so that two programs run on a multiprocessor. None: keys of
    width 256 or in float32 leave too little shared memory.
    """
    if q.is_cuda and (q.dtype == torch.float32 or padded(q) > 128):
        return None
    return 64, 128, 4, 3


def lost_rows_tile(q: Tensor) -> tuple[int, int, int, int]:
    return 32, 64 if padded(q) <= 128 else 32, 4, 2


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
    """The number that lies so many places behind the start in a row of signed cells, which have one per column."""
    found = start
    for place in range(NEAR):
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
        halfway = tl.where((halfway > under) | (under == float("-inf")), halfway, over)  # neighbours in float32
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
        t = tl.where(many & near, _next(above, over, reached - places, 1.0), t)
        t = tl.where(few & near, -_next(below, -under, places - reached - 1, -1.0), t)
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
