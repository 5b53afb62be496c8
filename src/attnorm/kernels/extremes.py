"""For each row, its smallest and its largest logit and their keys: one pass over the keys, without values.

Every column of a tile keeps its own extremes and the tiles they lie in, so that rows are searched once, at the end.
`sum_by_key` adds up the gradients of extremes: each goes to one key.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnorm.kernels.blocks import (
    Constants,
    block_of_keys,
    key_range,
    load_row,
    load_tile,
    matrix_of_head,
    plain_logits,
    queries_and_keys,
    seen_keys,
    store_tile,
)
from attnorm.kernels.launch import device_of, in_rows, padded
from attnorm.kernels.maps import LN2, LOG2E
from attnorm.kernels.one_pass import Form, OnePassLaunch


def extreme_logits(
    q: Tensor, k: Tensor, mask: Tensor | None, factor: Tensor | None, form: Form
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return smallest and largest logit of each row, (B, H, Q), 0 for rows without keys, and the first such keys."""
    low_key, high_key = (torch.empty(q.shape[:3], dtype=torch.int32, device=q.device) for _ in range(2))
    low, high = (torch.empty(q.shape[:3], dtype=torch.float32, device=q.device) for _ in range(2))
    search(extremes_kernel, q, k, mask, factor, (low_key, high_key, low, high), form, search_tile(q))
    return low, high, low_key, high_key


def sum_by_key(rows: Tensor, index: Tensor, keys: int, groups: int) -> Tensor:
    """Return for each key the sum of the rows (B, H, Q, D) with its index, over `groups` heads: (B, G, K, D)."""
    rows = in_rows(rows)
    batch, heads, queries, width = rows.shape
    sums = torch.empty((batch, heads // groups, keys, width), dtype=rows.dtype, device=rows.device)
    exact = torch.backends.cuda.matmul.fp32_precision != "tf32"
    with device_of(rows):
        sum_by_key_kernel[(triton.cdiv(keys, 64) * batch * (heads // groups),)](
            rows, index.contiguous(), sums, *rows.stride()[:3], *sums.stride()[:3], heads, groups, queries, keys, width,
            PRECISION="tf32x3" if exact else "tf32", ROWS=64, COLUMNS=64, WIDTH=padded(rows),
            num_warps=4 if width <= 128 else 8,
        )  # fmt: skip
    return sums


def search(
    kernel: Any, q: Tensor, k: Tensor, mask: Tensor | None, factor: Tensor | None, rows_of: tuple[Tensor, ...],
    form: Form, tile: tuple[int, int, int, int], rows_per_program: int | None = None, **more_constants: int,
) -> None:  # fmt: skip
    """Launch a kernel that reads queries and keys and writes numbers of rows."""
    call = OnePassLaunch.of(q, k, k, mask, factor, None, None, None, None, form)
    rows, columns, warps, stages = tile
    q_in, k_in, _, mask_in, factor_in, *_ = call.tensors
    names = ("CAPPED", "FACTORED", "CAUSAL", "WINDOWED", "MASKED", "PRECISION", "WIDTH", "FULL")
    with call.device:
        kernel[(triton.cdiv(q.shape[-2], rows_per_program or rows) * q.shape[0] * q.shape[1],)](
            q_in, k_in, mask_in, factor_in, *rows_of, *call.strides[:6], *call.strides[9:],
            *call.lengths, form.window or 0, q.shape[-1], form.scale * LOG2E.value, (form.softcap or 1.0) * LOG2E.value,
            **{name: call.constants[name] for name in names}, **more_constants, ROWS=rows, COLUMNS=columns,
            num_warps=warps, num_stages=stages,
        )  # fmt: skip


def search_tile(q: Tensor) -> tuple[int, int, int, int]:
    """For kernels that keep four numbers per logit in registers. The fastest of five on an H200 in bfloat16."""
    if q.dtype == torch.float32:
        return (32, 32, 4, 2) if padded(q) <= 64 else (32, 16, 4, 2)
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
