"""Mean and variance of the visible logits of each row, and the gradient of the variance: passes without values.

Tiles of keys are merged as Chan, Golub & LeVeque 1983 merge samples, so that a large mean takes no digits from the
variance V. Its gradient by a logit s is 2 (s - mean) / n times that of V: the mean itself carries none, since the
s - mean sum to 0.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnorm.kernels.launch import Launch, in_rows, padded
from attnorm.kernels.tiles import key_range, load_row, load_tile, query_range, seen_keys, store_tile


@triton.jit
def _fold(
    count, mean, squares, start, stop, q_tile, k, rows,
    mask, k_row, mask_row, mask_column, queries, keys, offset, width, scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Number, mean and squared deviations of the logits of a block of queries, with the keys from start to stop."""
    for at in range(start, stop, COLUMNS):
        columns = at + tl.arange(0, COLUMNS)
        k_tile = load_tile(k, columns, keys, k_row, width, WIDTH, EDGE, FULL)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale
        if EDGE:
            i, j = rows[:, None], columns[None, :]
            seen = seen_keys(i, j, mask, mask_row, mask_column, queries, keys, offset, 0, CAUSAL, False, MASKED)
            more = tl.sum(tl.where(seen, 1.0, 0.0), 1)
            here = tl.sum(tl.where(seen, s, 0.0), 1) / tl.maximum(more, 1.0)
            away = tl.where(seen, s - here[:, None], 0.0)
        else:
            more = tl.full(count.shape, COLUMNS, tl.float32)
            here = tl.sum(s, 1) / COLUMNS
            away = s - here[:, None]
        step = here - mean
        share = more / tl.maximum(count + more, 1.0)
        squares += tl.sum(away * away, 1) + step * step * count * share
        mean += step * share
        count += more
    return count, mean, squares


@triton.jit
def row_variance(
    q, k, mask, variance, mean, count,
    q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch, mask_head, mask_row, mask_column,
    heads, groups, queries, keys, offset, width, scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """(B, H, Q): variance and mean, both 0 in rows that see nothing, and the number of visible keys."""
    blocks = tl.cdiv(queries, ROWS)
    program = tl.program_id(0)
    block = blocks - 1 - program % blocks  # the longest causal rows first
    batch_head = (program // blocks).to(tl.int64)
    batch, head = batch_head // heads, batch_head % heads
    k += batch * k_batch + head // groups * k_head
    mask += batch * mask_batch + head * mask_head
    rows = block * ROWS + tl.arange(0, ROWS)
    inside = rows < queries
    q_tile = load_tile(q + batch * q_batch + head * q_head, rows, queries, q_row, width, WIDTH, True, FULL)
    found_count = tl.zeros([ROWS], tl.float32)
    found_mean = tl.zeros([ROWS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    _first, low, high, last = key_range(block, queries, keys, offset, 0, CAUSAL, False, MASKED, ROWS, COLUMNS)
    found_count, found_mean, squares = _fold(
        found_count, found_mean, squares, low, high, q_tile, k, rows, mask, k_row, mask_row, mask_column, queries,
        keys, offset, width, scale, CAUSAL, MASKED, False, PRECISION, COLUMNS, WIDTH, FULL,
    )  # fmt: skip
    found_count, found_mean, squares = _fold(
        found_count, found_mean, squares, high, last, q_tile, k, rows, mask, k_row, mask_row, mask_column, queries,
        keys, offset, width, scale, CAUSAL, MASKED, True, PRECISION, COLUMNS, WIDTH, FULL,
    )  # fmt: skip
    row_at = batch_head * queries + rows
    tl.store(variance + row_at, squares / tl.maximum(found_count, 1.0), mask=inside)
    tl.store(mean + row_at, found_mean, mask=inside)
    tl.store(count + row_at, found_count, mask=inside)


@triton.jit
def _fold_queries(
    found, start, stop, q_tile, k, rows, mean, mask, k_row, mask_row, mask_column, queries, keys, offset, width, scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    for at in range(start, stop, COLUMNS):
        columns = at + tl.arange(0, COLUMNS)
        k_tile = load_tile(k, columns, keys, k_row, width, WIDTH, EDGE, FULL)
        away = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale - mean[:, None]
        if EDGE:
            i, j = rows[:, None], columns[None, :]
            seen = seen_keys(i, j, mask, mask_row, mask_column, queries, keys, offset, 0, CAUSAL, False, MASKED)
            away = tl.where(seen, away, 0.0)
        found = tl.dot(away.to(k_tile.dtype), k_tile, found, input_precision=PRECISION)
    return found


@triton.jit
def backward_queries(
    q, k, mask, mean, slope, grad_q,
    q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch, mask_head, mask_row, mask_column,
    heads, groups, queries, keys, offset, width, scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """slope: (B, H, Q), the gradient of a logit over its distance from the mean. grad_q: contiguous."""
    blocks = tl.cdiv(queries, ROWS)
    program = tl.program_id(0)
    block = blocks - 1 - program % blocks
    batch_head = (program // blocks).to(tl.int64)
    batch, head = batch_head // heads, batch_head % heads
    k += batch * k_batch + head // groups * k_head
    mask += batch * mask_batch + head * mask_head
    rows = block * ROWS + tl.arange(0, ROWS)
    inside = rows < queries
    q_tile = load_tile(q + batch * q_batch + head * q_head, rows, queries, q_row, width, WIDTH, True, FULL)
    row_at = batch_head * queries + rows
    row_mean = load_row(mean, row_at, inside, True, 0.0)
    found = tl.zeros([ROWS, WIDTH], tl.float32)
    _first, low, high, last = key_range(block, queries, keys, offset, 0, CAUSAL, False, MASKED, ROWS, COLUMNS)
    found = _fold_queries(
        found, low, high, q_tile, k, rows, row_mean, mask, k_row, mask_row, mask_column, queries, keys, offset, width,
        scale, CAUSAL, MASKED, False, PRECISION, COLUMNS, WIDTH, FULL,
    )  # fmt: skip
    found = _fold_queries(
        found, high, last, q_tile, k, rows, row_mean, mask, k_row, mask_row, mask_column, queries, keys, offset, width,
        scale, CAUSAL, MASKED, True, PRECISION, COLUMNS, WIDTH, FULL,
    )  # fmt: skip
    found = found * (load_row(slope, row_at, inside, True, 0.0) * scale)[:, None]
    grad_q += batch_head * queries * width
    store_tile(grad_q, found.to(grad_q.dtype.element_ty), rows, queries, width, width, WIDTH)


@triton.jit
def _fold_keys(
    found, start, stop, k_tile, q, columns, at_row, mean, slope, mask, q_row, mask_row, mask_column, queries, keys,
    offset, width, scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Tiles lie with the keys as rows here."""
    for at in range(start, stop, ROWS):
        rows = at + tl.arange(0, ROWS)
        inside = rows < queries
        q_tile = load_tile(q, rows, queries, q_row, width, WIDTH, EDGE, FULL)
        row_mean = load_row(mean, at_row + rows, inside, True, 0.0)
        row_slope = load_row(slope, at_row + rows, inside, True, 0.0)
        s = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION) * scale
        ds = (s - row_mean[None, :]) * row_slope[None, :]
        if EDGE:
            i, j = rows[None, :], columns[:, None]
            seen = seen_keys(i, j, mask, mask_row, mask_column, queries, keys, offset, 0, CAUSAL, False, MASKED)
            ds = tl.where(seen, ds, 0.0)
        found = tl.dot(ds.to(q_tile.dtype), q_tile, found, input_precision=PRECISION)
    return found


@triton.jit
def backward_keys(
    q, k, mask, mean, slope, lift, grad_k,
    q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch, mask_head, mask_row, mask_column,
    heads, groups, queries, keys, offset, width, scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """slope: over its largest size, lift (1,), so that half precision can hold it. grad_k: contiguous."""
    blocks = tl.cdiv(keys, COLUMNS)
    program = tl.program_id(0)
    block = program % blocks  # the first keys are seen by most queries
    batch_head = (program // blocks).to(tl.int64)
    key_heads = heads // groups
    batch, key_head = batch_head // key_heads, batch_head % key_heads
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    k_tile = load_tile(k + batch * k_batch + key_head * k_head, columns, keys, k_row, width, WIDTH, True, FULL)
    found = tl.zeros([COLUMNS, WIDTH], tl.float32)
    first, low, high, last = query_range(
        block * COLUMNS, queries, keys, offset, 0, CAUSAL, False, MASKED, ROWS, COLUMNS
    )
    for member in range(groups):
        head = key_head * groups + member
        at_row = (batch * heads + head) * queries
        q_here = q + batch * q_batch + head * q_head
        mask_here = mask + batch * mask_batch + head * mask_head
        found = _fold_keys(
            found, first, low, k_tile, q_here, columns, at_row, mean, slope, mask_here, q_row, mask_row, mask_column,
            queries, keys, offset, width, scale, CAUSAL, MASKED, True, PRECISION, ROWS, WIDTH, FULL,
        )  # fmt: skip
        found = _fold_keys(
            found, low, high, k_tile, q_here, columns, at_row, mean, slope, mask_here, q_row, mask_row, mask_column,
            queries, keys, offset, width, scale, CAUSAL, MASKED, False, PRECISION, ROWS, WIDTH, FULL,
        )  # fmt: skip
        found = _fold_keys(
            found, high, last, k_tile, q_here, columns, at_row, mean, slope, mask_here, q_row, mask_row, mask_column,
            queries, keys, offset, width, scale, CAUSAL, MASKED, True, PRECISION, ROWS, WIDTH, FULL,
        )  # fmt: skip
    found = found * (tl.load(lift) * scale)
    grad_k += batch_head * keys * width
    store_tile(grad_k, found.to(grad_k.dtype.element_ty), columns, keys, width, width, WIDTH)


def variance_of_rows(
    q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Variance and mean of the logits of each row, and the number of visible keys, (B, H, Q) in float32."""
    call = _call(q, k, mask, causal)
    found = call.rows(True), call.rows(True), call.rows(True)
    _launch(row_variance, call, scale, *found)
    return found


def gradients(
    slope: Tensor, q: Tensor, k: Tensor, mask: Tensor | None, mean: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Gradients of q and k, for the gradient of every logit over its distance from the mean of its row, (B, H, Q)."""
    call = _call(q, k, mask, causal)
    grad_q, grad_k = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k))
    mean, slope = mean.contiguous(), slope.contiguous()
    lift = slope.abs().amax().clamp(min=torch.finfo(torch.float32).tiny).reshape(1)
    _launch(backward_queries, call, scale, mean, slope, grad_q)
    _launch(backward_keys, call, scale, mean, slope / lift, lift, grad_k)
    return grad_q, grad_k


def _call(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool) -> Launch:
    q, k = in_rows(q), in_rows(k)
    return Launch(q, k, k, mask, None, causal)


def _launch(kernel: Any, call: Launch, scale: float, *rows_of: Tensor) -> None:
    q, k, _, mask, _ = call.tensors
    rows, columns, warps, stages = _tile(q)
    over, per_program = (k, columns) if kernel is backward_keys else (q, rows)  # what the programs share
    names = ("CAUSAL", "MASKED", "PRECISION", "WIDTH")
    with call.device:
        kernel[(triton.cdiv(over.shape[-2], per_program) * over.shape[0] * over.shape[1],)](
            q, k, mask, *rows_of, *call.strides[:6], *call.strides[9:], *call.lengths, q.shape[-1], scale,
            **{name: call.shared_constants[name] for name in names}, ROWS=rows, COLUMNS=columns,
            FULL=padded(q) == q.shape[-1], num_warps=warps, num_stages=stages,
        )  # fmt: skip


def _tile(q: Tensor) -> tuple[int, int, int, int]:
    """Rows, columns, warps, stages: those of the entropy's kernels, which have the same shape."""
    if q.dtype == torch.float32:
        return (64, 32, 4, 2) if padded(q) <= 64 else (32, 32, 4, 2)
    return (64, 64, 4, 3) if padded(q) <= 64 else (64, 64, 4, 2) if padded(q) <= 128 else (64, 32, 4, 2)
