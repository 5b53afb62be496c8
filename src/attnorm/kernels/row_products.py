"""Products of the rows of a tensor (B, H, Q, D): with the rows of another tensor, or with one factor each."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnorm.kernels.blocks import load_tile, matrix_of_head, store_tile
from attnorm.kernels.launch import device_of, in_rows, padded

ROWS = 64  # of one program


def row_dots(a: Tensor, b: Tensor) -> Tensor:
    """Return the products <a, b> of the rows of two tensors, as (B, H, Q) in float32."""
    a, b = in_rows(a), in_rows(b)
    batch, heads, queries, width = a.shape
    dots = torch.empty((batch, heads, queries), dtype=torch.float32, device=a.device)
    with device_of(a):
        _row_dots[(triton.cdiv(queries, ROWS) * batch * heads,)](
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


def scaled_rows(a: Tensor, factor: Tensor, constant: float) -> Tensor:
    """Return each row of a times constant times its factor, (B, H, Q) in float32, rounded once to the dtype of a."""
    a, factor = in_rows(a), factor.contiguous()
    batch, heads, queries, width = a.shape
    scaled = torch.empty_like(a)  # keeps the strides of q, which is often a view of (B, Q, H, D)
    with device_of(a):
        _scaled_rows[(triton.cdiv(queries, ROWS) * batch * heads,)](
            a, factor, scaled, *a.stride()[:3], *scaled.stride()[:3], heads, queries, width, constant,
            ROWS=ROWS, WIDTH=padded(a), num_warps=4,
        )  # fmt: skip
    return scaled


@triton.jit
def _scaled_rows(
    a, factor, scaled, a_batch, a_head, a_row, scaled_batch, scaled_head, scaled_row, heads, queries, width, constant,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    batch, head, rows = _rows_of_program(heads, queries, ROWS)
    x = load_tile(matrix_of_head(a, batch, head, a_batch, a_head, a_row, queries, width), rows, WIDTH, True, False)
    factors = tl.load(factor + (batch * heads + head) * queries + rows, mask=rows < queries, other=0.0) * constant
    to = matrix_of_head(scaled, batch, head, scaled_batch, scaled_head, scaled_row, queries, width)
    store_tile(to, x.to(tl.float32) * factors[:, None], rows, WIDTH)


@triton.jit
def _rows_of_program(heads, queries, ROWS: tl.constexpr):
    """Return batch, head and row numbers of this program."""
    blocks = tl.cdiv(queries, ROWS)
    block, batch_head = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    return batch_head // heads, batch_head % heads, block * ROWS + tl.arange(0, ROWS)
