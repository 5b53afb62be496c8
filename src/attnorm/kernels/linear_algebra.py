"""Small computations beside attention, each in one launch: products of rows, factors, inverses of small matrices."""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnorm.arithmetic import ceil_div
from attnorm.kernels.blocks import load_tile, matrix_of_head, softplus, store_tile, tanh
from attnorm.kernels.launch import device_of, empty_rows, float32_precision, in_rows, padded

ROWS = 64  # of one program
POWERS = 1024  # of one program
LN2 = tl.constexpr(math.log(2))


def row_dots(a: Tensor, b: Tensor) -> Tensor:
    """Return the products <a, b> of the rows of two tensors, as (B, H, Q) in float32."""
    a, b = in_rows(a), in_rows(b)
    batch, heads, queries, width = a.shape
    dots = torch.empty((batch, heads, queries), dtype=torch.float32, device=a.device)
    with device_of(a):
        _row_dots[(ceil_div(queries, ROWS) * batch * heads,)](
            a, b, dots, *a.stride()[:3], *b.stride()[:3], heads, queries, width,
            ROWS=ROWS, WIDTH=padded(a), num_warps=4,
        )  # fmt: skip
    return dots


@triton.jit
def _row_dots(
    a, b, dots, a_batch, a_head, a_row, b_batch, b_head, b_row, heads, queries, width,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    batch, head, rows = _rows_of_program(heads, queries, ROWS)
    x = load_tile(matrix_of_head(a, batch, head, a_batch, a_head, a_row, queries, width), rows, WIDTH, True, False)
    y = load_tile(matrix_of_head(b, batch, head, b_batch, b_head, b_row, queries, width), rows, WIDTH, True, False)
    sums = tl.sum(x.to(tl.float32) * y.to(tl.float32), 1)
    tl.store(dots + (batch * heads + head) * queries + rows, sums, mask=rows < queries)


def scaled_rows(
    a: Tensor, factor: Tensor | None, constant: float, keys: int | None, causal: bool, shortest: int,
    other: Tensor | None = None, dots: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return each row of a times constant times its factor, (B, H, Q) in float32, rounded once to the dtype of a.

    keys: None, or the number of keys, for one more factor log(max(n, shortest)), n being the visible keys of the row.
    dots (B, H, Q): for the products of the rows of a and of the other tensor, times all of this but the factor.
    """
    a = in_rows(a)
    b = a if other is None else in_rows(other)
    batch, heads, queries, width = a.shape
    scaled = empty_rows(a)
    with device_of(a):
        _scaled_rows[(ceil_div(queries, ROWS) * batch * heads,)](
            a, b, a if factor is None else factor, scaled, scaled if dots is None else dots, *a.stride()[:3],
            *b.stride()[:3], *((0, 0, 0) if factor is None else factor.stride()), *scaled.stride()[:3], heads, queries,
            width, constant, 0 if keys is None else keys, shortest, FACTORED=factor is not None, LOG=keys is not None,
            CAUSAL=causal, DOTS=dots is not None, ROWS=ROWS, WIDTH=padded(a), num_warps=4,
        )  # fmt: skip
    return scaled


@triton.jit
def _scaled_rows(
    a, b, factor, scaled, dots, a_batch, a_head, a_row, b_batch, b_head, b_row, f_batch, f_head, f_row, scaled_batch,
    scaled_head, scaled_row, heads, queries, width, constant, keys, shortest,
    FACTORED: tl.constexpr, LOG: tl.constexpr, CAUSAL: tl.constexpr, DOTS: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """factor (B, H, Q): of any strides, since it is often the same for all sequences of a batch."""
    batch, head, rows = _rows_of_program(heads, queries, ROWS)
    x = load_tile(matrix_of_head(a, batch, head, a_batch, a_head, a_row, queries, width), rows, WIDTH, True, False)
    x = x.to(tl.float32)
    known = tl.full([ROWS], 1.0, tl.float32) * constant
    if LOG:
        n = rows + (keys - queries + 1) if CAUSAL else rows * 0 + keys
        known = known * tl.log(tl.maximum(n, shortest).to(tl.float32))
    factors = known
    if FACTORED:
        at = factor + batch * f_batch + head * f_head + rows.to(tl.int64) * f_row
        factors = known * tl.load(at, mask=rows < queries, other=0.0)
    to = matrix_of_head(scaled, batch, head, scaled_batch, scaled_head, scaled_row, queries, width)
    store_tile(to, x * factors[:, None], rows, WIDTH)
    if DOTS:
        y = load_tile(matrix_of_head(b, batch, head, b_batch, b_head, b_row, queries, width), rows, WIDTH, True, False)
        sums = tl.sum(x * y.to(tl.float32), 1) * known
        tl.store(dots + (batch * heads + head) * queries + rows, sums, mask=rows < queries)


def length_powers(b: Tensor, c: Tensor, delta: float, rows: Sequence[int], keys: int, causal: bool) -> Tensor:
    """Return delta + softplus(b) log(n + 1)^(2 tanh(c)) of all rows (B, H, Q) in float32, n being their visible keys.

    b and c: one number each, or one per head. In one launch: as operations of torch these are twelve.
    """
    factor = torch.empty(rows, dtype=torch.float32, device=b.device)
    heads, queries = rows[1:]
    with device_of(b):
        _length_powers[(ceil_div(factor.numel(), POWERS),)](
            b, c, factor, factor.numel(), heads, queries, keys, delta, CAUSAL=causal, PER_HEAD=b.dim() > 0, SIZE=POWERS
        )
    return factor


def length_powers_backward(grad: Tensor, b: Tensor, c: Tensor, keys: int, causal: bool) -> tuple[Tensor, Tensor]:
    """Return the gradients of b and c, from that of the factors (B, H, Q)."""
    batch, heads, queries = grad.shape
    found = torch.empty((2, heads), dtype=torch.float32, device=grad.device)
    with device_of(grad):
        _length_powers_backward[(heads,)](
            grad.contiguous(),
            b,
            c,
            found,
            batch,
            heads,
            queries,
            keys,
            CAUSAL=causal,
            PER_HEAD=b.dim() > 0,
            SIZE=POWERS,
        )
    grad_b, grad_c = (found if b.dim() > 0 else found.sum(1)).to(b.dtype).unbind()
    return grad_b, grad_c


@triton.jit
def _power_of_length(y, query, queries, keys, CAUSAL: tl.constexpr):
    """Return log(n + 1)^(2 tanh(y)), and log2 of log(n + 1)."""
    n = query + (keys - queries + 1) if CAUSAL else query * 0 + keys
    logarithm = tl.log2(tl.log(tl.maximum(n, 1).to(tl.float32) + 1.0))
    return tl.exp2(2.0 * tanh(y) * logarithm), logarithm


@triton.jit
def _length_powers(
    b, c, factor, count, heads, queries, keys, delta,
    CAUSAL: tl.constexpr, PER_HEAD: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = index < count
    head = index // queries % heads if PER_HEAD else index * 0
    x = tl.load(b + head, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(c + head, mask=inside, other=0.0).to(tl.float32)
    power, _logarithm = _power_of_length(y, index % queries, queries, keys, CAUSAL)
    tl.store(factor + index, delta + softplus(x) * power, mask=inside)


@triton.jit
def _length_powers_backward(
    grad, b, c, found, batch, heads, queries, keys, CAUSAL: tl.constexpr, PER_HEAD: tl.constexpr, SIZE: tl.constexpr
):
    """One program per head: sums over its rows of all sequences."""
    head = tl.program_id(0)
    x = tl.load(b + (head if PER_HEAD else 0)).to(tl.float32)
    y = tl.load(c + (head if PER_HEAD else 0)).to(tl.float32)
    by_b = tl.zeros([SIZE], tl.float32)
    by_c = tl.zeros([SIZE], tl.float32)
    for first in range(0, batch * queries, SIZE):
        index = first + tl.arange(0, SIZE)
        query = index % queries
        at = ((index // queries).to(tl.int64) * heads + head) * queries + query
        power, logarithm = _power_of_length(y, query, queries, keys, CAUSAL)
        term = tl.load(grad + at, mask=index < batch * queries, other=0.0) * power
        by_b += term
        by_c += term * logarithm
    saturated = tanh(y)
    slope = 2.0 * LN2 * (1.0 - saturated * saturated)
    tl.store(found + head, tl.sum(by_b, 0) / (1.0 + tl.exp(-x)))
    tl.store(found + heads + head, tl.sum(by_c, 0) * softplus(x) * slope)


@triton.jit
def _rows_of_program(heads, queries, ROWS: tl.constexpr):
    """Return batch, head and row numbers of this program."""
    blocks = tl.cdiv(queries, ROWS)
    block, batch_head = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    return batch_head // heads, batch_head % heads, block * ROWS + tl.arange(0, ROWS)


def newton_inverse(a: Tensor, steps: int, ridge: float) -> Tensor:
    """Return (a + ridge)^-1 of symmetric matrices (..., m, m) in float32, m at most 64, after `steps` steps of Newton.

    One program per matrix, all steps in one launch. As operations of torch, 20 steps of matrices of 50 x 50 are 60
    launches, which take longer than the rest of SOFT.
    """
    a = a.contiguous()
    inverse = torch.empty_like(a)
    with device_of(a):
        _newton_inverse[(a.shape[:-2].numel(),)](
            a, inverse, a.shape[-1], steps, ridge, PRECISION=float32_precision(), SIZE=padded(a), num_warps=4
        )
    return inverse


@triton.jit
def _newton_inverse(a, inverse, size, steps, ridge, PRECISION: tl.constexpr, SIZE: tl.constexpr):
    matrix = tl.program_id(0).to(tl.int64) * size * size
    index = tl.arange(0, SIZE)
    i, j = index[:, None], index[None, :]
    inside = (i < size) & (j < size)
    unit = tl.where(i == j, 1.0, 0.0)
    regular = tl.load(a + matrix + i * size + j, mask=inside, other=0.0) + ridge * unit
    largest = tl.max(tl.sum(tl.where(inside, tl.abs(regular), 0.0), 1), 0)
    found = unit / largest
    for _ in range(steps):  # written with the residual, which keeps the digits of 2V - V A V
        residual = unit - tl.dot(regular, found, input_precision=PRECISION)
        found = tl.dot(found, residual, found, input_precision=PRECISION)
    tl.store(inverse + matrix + i * size + j, found, mask=inside)
