"""Newton's iteration for the inverses of many small matrices: one program per matrix, all steps in one launch.

As operations of torch, 20 steps of matrices of 50 x 50 are 60 launches, which take longer than the rest of SOFT.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnorm.kernels.launch import device_of, padded


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


def newton_inverse(a: Tensor, steps: int, ridge: float) -> Tensor:
    """Return (a + ridge)^-1 of symmetric matrices (..., m, m) in float32, m at most 64, after `steps` steps."""
    a = a.contiguous()
    inverse = torch.empty_like(a)
    exact = torch.backends.cuda.matmul.fp32_precision != "tf32"
    with device_of(a):
        _newton_inverse[(a.shape[:-2].numel(),)](
            a, inverse, a.shape[-1], steps, ridge, PRECISION="tf32x3" if exact else "tf32", SIZE=padded(a), num_warps=4
        )
    return inverse
