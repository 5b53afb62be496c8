"""Stick-breaking attention: a walk over the keys from the last to the first, with the matrix of weights on the chip.

A key takes the share sigmoid(z) of what is left of the stick and leaves 2^-cost of it, cost = log2(1 + e^z):

    log2 p_j = log2 sigmoid(z_j) - (costs of all later keys)

and a row carries one number: the cost so far. Below 2^-160 of the stick float32 has no weight any more: a block of
queries ends its walk as soon as all its rows are there. With REST the query's own key takes no share, costs nothing and
receives what is left at the end.

stick_breaking_backward.py has the gradients.
"""

from collections import namedtuple
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnorm.arithmetic import ceil_div
from attnorm.kernels.blocks import (
    Constants,
    key_range,
    load_row,
    load_tile,
    matrix_of_head,
    queries_keys_values,
    seen_keys,
    store_tile,
    unmasked,
)
from attnorm.kernels.launch import Launch, empty_numbers, empty_rows, in_rows, padded
from attnorm.kernels.maps import LOG2E, log2

SPENT = tl.constexpr(160.0)  # bits: nothing is left
GROUP = tl.constexpr(8)  # tiles between two looks at what is left; a loop of fixed length keeps the loads ahead

# What is known of a call when a kernel is compiled, beyond blocks.Constants.
StickConstants = namedtuple("StickConstants", "FAST FACTORED REST LIFT PART KEEPS")

NOTHING_LEFT = tl.constexpr(1024.0)  # bits, for the tiles that a block of queries does not reach
MAX_KEPT_TILES = 32  # of keys; the costs behind them take 4 bytes per tile and row


@dataclass(frozen=True)
class Stick:
    """Settings of a stick-breaking call besides its tensors."""

    rest: bool  # the query's own key receives what is left
    causal: bool
    window: int | None
    scale: float


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None, stick: Stick, trains: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, and what every row has spent in bits, (B, H, Q), empty unless its own key receives the rest.

    If the backward pass follows (`trains`) and there are few keys, also the costs behind every tile of keys and the
    first tile that each block of queries reaches, which are empty otherwise.
    """
    call = StickLaunch.of(q, k, v, mask, factor, stick)
    out = empty_rows(q, v.shape[-1])
    spent = empty_numbers(q, stick.rest)
    later_shape, live_shape = kept_shapes(q, k, v, trains)
    later = torch.empty(later_shape, dtype=torch.float32, device=q.device)
    live = torch.empty(live_shape, dtype=torch.int32, device=q.device)
    call.launch(
        forward_kernel, forward_tile(q, v), *call.tensors, out, spent, later, live, *call.strides, *out.stride()[:3],
        *call.sizes, **call.constants, KEEPS=later.numel() > 0,
    )  # fmt: skip
    return out, spent, later, live


def kept_shapes(q: Tensor, k: Tensor, v: Tensor, trains: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the costs behind tiles, (B H, tiles, rows), and of the first tiles, (B H, blocks)."""
    rows, columns, *_ = forward_tile(q, v)
    heads, tiles, blocks = q.shape[0] * q.shape[1], ceil_div(k.shape[2], columns), ceil_div(q.shape[2], rows)
    if not trains or (rows, columns) != backward_tile(q, v)[:2] or tiles > MAX_KEPT_TILES:
        return (0,), (0,)
    return (heads, tiles, blocks * rows), (heads, blocks)


@dataclass(frozen=True)
class StickLaunch(Launch):
    stick: Stick

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None, stick: Stick
    ) -> "StickLaunch":
        factor = None if factor is None else factor.contiguous()
        return cls(in_rows(q), in_rows(k), in_rows(v), mask, factor, stick.causal, stick)

    @property
    def sizes(self) -> tuple[int | float, ...]:
        stick = self.stick
        return (*self.lengths, stick.window or 0, self.q.shape[-1], self.v.shape[-1], stick.scale * LOG2E.value)

    @cached_property
    def constants(self) -> dict[str, Any]:
        return {
            **super().constants,
            "REST": self.stick.rest, "WINDOWED": self.stick.window is not None,
            "PART": part_of(self.q.dtype, self.q.is_cuda),
            "LIFT": 1024.0 if self.q.dtype == torch.float16 else 1.0,  # float16 loses digits below 6e-5
        }  # fmt: skip


def part_of(dtype: torch.dtype, on_gpu: bool) -> tl.dtype:
    """The dtype of the parts that are summed inside a tile. Triton's interpreter has no bfloat16."""
    if dtype == torch.float32:
        return tl.float32
    return tl.bfloat16 if on_gpu else tl.float16


def forward_tile(q: Tensor, v: Tensor) -> tuple[int, int, int, int]:
    """Rows, columns, warps, stages: the fastest of four or more on an H200 in bfloat16, to width 128.

    Those of wider heads and of float32 spill least of all that were compiled for it.
    """
    width = max(padded(q), padded(v))
    if q.dtype == torch.float32:
        return (64, 32, 4, 2) if width <= 64 else (32, 16, 4, 2) if width <= 128 else (16, 32, 8, 2)
    return (64, 64, 4, 3) if width <= 64 else (64, 64, 4, 2) if width <= 128 else (64, 32, 4, 2)


def backward_tile(q: Tensor, v: Tensor) -> tuple[int, int, int, int]:
    """Chosen as in the forward pass; the same for both kernels, which share the tiles of keys and blocks of queries.

    Wide float32: compiled for sm_90, they spill 0.7 and 1.1 to 2.1 KB of registers per thread. Forward has the same
    rows and columns, so that what it keeps is used.
    """
    width = max(padded(q), padded(v))
    if q.dtype == torch.float32:
        return (32, 32, 4, 2) if width <= 64 else (16, 32, 4, 2) if width <= 128 else (16, 32, 8, 1)
    return (64, 64, 4, 2) if width <= 64 else (64, 32, 4, 2) if width <= 128 else (32, 32, 8, 2)


@triton.jit
def forward_kernel(
    q, k, v, mask, factor, out, spent_out, later, live_out,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    mask_batch, mask_head, mask_row, mask_column, o_batch, o_head, o_row,
    heads, groups, queries, keys, offset, window, width, v_width, scale,
    FAST: tl.constexpr, FACTORED: tl.constexpr, REST: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr, FULL: tl.constexpr, V_FULL: tl.constexpr, LIFT: tl.constexpr, PART: tl.constexpr,
    KEEPS: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = Constants(CAUSAL, WINDOWED, MASKED, PRECISION, ROWS, COLUMNS, WIDTH, FULL, V_WIDTH, V_FULL)
    S: tl.constexpr = StickConstants(FAST, FACTORED, REST, LIFT, PART, KEEPS)
    own, rows, inside, q_tile, k, v, sight = queries_keys_values(
        q, k, v, mask, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, mask_batch, mask_head,
        mask_row, mask_column, heads, groups, queries, keys, offset, window, width, v_width, C,
    )  # fmt: skip
    row_at = own.batch_head * queries + rows
    row_factor = load_row(factor, row_at, inside, FACTORED, 1.0)

    acc = tl.zeros([ROWS, V_WIDTH], tl.float32)
    spent = tl.where(inside, 0.0, SPENT)
    borders = stick_range(own.index, sight, C, REST)
    blocks = tl.cdiv(queries, ROWS)
    later += own.batch_head * tl.cdiv(keys, COLUMNS) * blocks * ROWS + rows
    live = tl.cdiv(borders[3], COLUMNS)
    for part in tl.static_range(2, -1, -1):
        # The keys that all see may be none, and Triton 3.6 cannot compile a loop that it knows to be empty.
        if part == 2 or (WINDOWED if part == 0 else CAUSAL or not REST):
            acc, spent, live = _fold(
                acc, spent, live, borders[part], borders[part + 1], q_tile, k, v, rows, row_factor, later,
                blocks * ROWS, sight, scale, C, S, part != 1,
            )  # fmt: skip
    if KEEPS:
        tl.store(live_out + own.batch_head * blocks + own.index, live)
        for tile in range(borders[0] // COLUMNS, live):
            tl.store(later + blocks * ROWS * tile, tl.full([ROWS], NOTHING_LEFT, tl.float32))
    acc = acc * (1.0 / LIFT)
    if REST:
        values, seen = own_key(v, rows, sight, C)
        acc += tl.where(seen, tl.exp2(-spent), 0.0)[:, None] * values.to(tl.float32)
        tl.store(spent_out + row_at, spent, mask=inside)
    out = matrix_of_head(out, own.batch, own.head, o_batch, o_head, o_row, queries, v_width)
    store_tile(out, acc, rows, V_WIDTH)


@triton.jit
def _fold(
    acc, spent, live, start, stop, q_tile, k, v, rows, factor, later, stride, sight, scale,
    C: tl.constexpr, S: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Output and cost of a block of queries, with the keys from stop down to start added, and the first tile reached.

    If KEEPS, the costs behind each tile are stored in `later`.
    """
    tiles = tl.cdiv(stop - start, C.COLUMNS)
    while (tiles > 0) & (tl.min(spent, 0) < SPENT):
        group = tl.minimum(tiles, GROUP)
        for index in range(group):
            tile = start // C.COLUMNS + tiles - 1 - index
            if S.KEEPS:
                tl.store(later + stride * tile, spent)
            columns = tile * C.COLUMNS + tl.arange(0, C.COLUMNS)
            k_tile = load_tile(k, columns, C.WIDTH, EDGE, C.FULL)
            v_tile = load_tile(v, columns, C.V_WIDTH, EDGE, C.V_FULL)
            dot = tl.dot(q_tile, tl.trans(k_tile), input_precision=C.PRECISION)
            taken, cost = taken_and_cost(dot, rows[:, None], columns[None, :], factor, sight, scale, C, S, EDGE)
            p = weights_of(taken, cost, spent[:, None], S.PART) * S.LIFT
            spent += tl.sum(cost, 1)
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=C.PRECISION)
        tiles -= group
        live = start // C.COLUMNS + tiles
    return acc, spent, live


@triton.jit
def stick_range(block, sight, C: tl.constexpr, REST: tl.constexpr):
    """key_range, where the keys from low to high are less those that may be a query's own."""
    first, low, high, last = key_range(block, sight, C)
    if REST:
        if C.CAUSAL:
            own = block * C.ROWS + sight.offset  # of the first query
            high = tl.maximum(tl.minimum(high, tl.maximum(own, 0) // C.COLUMNS * C.COLUMNS), low)
        else:
            low, high = first, first
    return first, low, high, last


@triton.jit
def taken_and_cost(dot, i, j, factor, sight, scale, C: tl.constexpr, S: tl.constexpr, EDGE: tl.constexpr):
    """log2 of the shares of a tile, -inf where a key takes none, and the costs, in bits."""
    z = dot * scale
    if S.FACTORED:
        z = z * factor[:, None]
    taken, cost = shares(z, S.FAST)
    if EDGE:
        seen = seen_keys(i, j, sight, C)
        if S.REST:
            seen = seen & (j != i + sight.offset)
        taken = tl.where(seen, taken, float("-inf"))
        cost = tl.where(seen, cost, 0.0)
    return taken, cost


@triton.jit
def shares(z, FAST: tl.constexpr):
    """log2 of the shares that keys with logits z take, in bits, and their costs.

    A cost is at most SPENT: beside larger ones the costs of other keys would lose their digits in sums.
    """
    tail = log2(1.0 + tl.exp2(-tl.abs(z)), FAST)
    taken = tl.minimum(z, 0.0, propagate_nan=tl.PropagateNan.ALL) - tail
    return taken, tl.minimum(tl.maximum(z, 0.0) + tail, SPENT)


@triton.jit
def weights_of(taken, cost, later, PART: tl.constexpr):
    """The weights of a tile, given the costs of all keys behind it."""
    return tl.exp2(taken - sum_after(cost, PART) - later)


@triton.jit
def sum_after(x, PART: tl.constexpr):
    """Return for each column the sum over the columns after it."""
    if PART == tl.float32:  # noqa: SIM300
        return tl.cumsum(x, 1, reverse=True) - x
    at = tl.arange(0, x.shape[1])
    return _times_ones(x, (at[:, None] > at[None, :]).to(PART), PART)


@triton.jit
def sum_up_to(x, PART: tl.constexpr):
    """Return for each column the sum over the columns up to it."""
    if PART == tl.float32:  # noqa: SIM300
        return tl.cumsum(x, 1)
    at = tl.arange(0, x.shape[1])
    return _times_ones(x, (at[:, None] <= at[None, :]).to(PART), PART)


@triton.jit
def _times_ones(x, ones, PART: tl.constexpr):
    """x @ ones, for x in two parts of half precision each: a product costs far less than a scan across threads."""
    coarse = x.to(PART)
    fine = (x - coarse.to(tl.float32)).to(PART)
    return tl.dot(fine, ones, tl.dot(coarse, ones))


@triton.jit
def own_key(v, rows, sight, C: tl.constexpr):
    """The values of the queries' own keys, and which of them are seen."""
    at = tl.where(rows + sight.offset < 0, sight.keys, rows + sight.offset)
    seen = (rows < sight.queries) & (at < sight.keys)
    if C.MASKED:
        seen = unmasked(seen, rows, at, sight)
    return load_tile(v, at, C.V_WIDTH, True, C.V_FULL), seen
