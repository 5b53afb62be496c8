"""The product <a, b> of every two rows, in one launch: of an output and its gradient, of a query and its mean key."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnorm.kernels.blocks import load_tile, matrix_of_head
from attnorm.kernels.launch import device_of, in_rows, padded

ROWS = 64


@triton.jit
def _row_dots(
    a, b, found, a_batch, a_head, a_row, b_batch, b_head, b_row, heads, queries, width,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(queries, ROWS)
    block, batch_head = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    batch, head = batch_head // heads, batch_head % heads
    rows = block * ROWS + tl.arange(0, ROWS)
    x = load_tile(matrix_of_head(a, batch, head, a_batch, a_head, a_row, queries, width), rows, WIDTH, True, False)
    y = load_tile(matrix_of_head(b, batch, head, b_batch, b_head, b_row, queries, width), rows, WIDTH, True, False)
    tl.store(found + batch_head * queries + rows, tl.sum(x.to(tl.float32) * y.to(tl.float32), 1), mask=rows < queries)


def row_dots(a: Tensor, b: Tensor) -> Tensor:
    """Return the dot products of the rows of two tensors (B, H, Q, D), as (B, H, Q) in float32."""
    a, b = in_rows(a), in_rows(b)
    batch, heads, queries, width = a.shape
    found = torch.empty((batch, heads, queries), dtype=torch.float32, device=a.device)
    with device_of(a):
        _row_dots[(triton.cdiv(queries, ROWS) * batch * heads,)](
            a, b, found, *a.stride()[:3], *b.stride()[:3], heads, queries, width,
            ROWS=ROWS, WIDTH=padded(a), num_warps=4,
        )  # fmt: skip
    return found
