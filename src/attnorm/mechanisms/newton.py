"""Inverse of SOFT's small kernel matrices by Newton's iteration V <- 2V - V A V, with its derivative.

On a GPU one kernel computes all steps; elsewhere, and for more landmarks than it takes, torch does.
"""

from typing import Any

import torch
from torch import Tensor

from attnorm.engines.inputs import under_transform
from attnorm.engines.triton_support import kernel_operator, runs_triton
from attnorm.normalizers.block import is_exporting

RIDGE = 0.01
NEWTON_STEPS = 20
LARGEST_IN_KERNEL = 64  # rows of a matrix that the registers of a program hold


def newton_inverse(a: Tensor, steps: int = NEWTON_STEPS) -> Tensor:
    """(A + ridge)^-1 of a kernel matrix A, to rounding for up to a few hundred landmarks."""
    inverse: Tensor = _NewtonInverse.apply(a, steps)  # type: ignore[no-untyped-call]
    return inverse


class _NewtonInverse(torch.autograd.Function):
    """Inverse of symmetric A + ridge; its backward is the derivative of the inverse, not of the iteration."""

    @staticmethod
    def forward(a: Tensor, steps: int) -> Tensor:
        if _runs_kernel(a):
            on_gpu: Tensor = _newton_inverse_kernel(a, steps)
            return on_gpu
        unit = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
        regular = a + RIDGE * unit
        # The authors start from a multiple of A. From a multiple of I the same steps reach the inverse even where
        # landmarks crowd or coincide, and only at the inverse is backward the derivative of forward.
        inverse = unit / regular.abs().sum(-1).amax(-1)[..., None, None]
        for _ in range(steps):  # written with the residual, which keeps the digits of 2V - V A V
            inverse = inverse + inverse @ (unit - regular @ inverse)
        return inverse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (inverse,) = ctx.saved_tensors
        transposed: Tensor = inverse.transpose(-1, -2)
        return -transposed @ grads[0] @ transposed, None


def _runs_kernel(a: Tensor) -> bool:
    """On a GPU alone: Triton's interpreter takes far longer than torch on a CPU."""
    return a.is_cuda and fits_kernel(a)


def fits_kernel(a: Tensor) -> bool:
    small = a.dtype == torch.float32 and a.shape[-1] <= LARGEST_IN_KERNEL
    return small and a.numel() > 0 and not is_exporting() and not under_transform() and runs_triton(a.device)


@kernel_operator("attnorm::newton_inverse")
def _newton_inverse_kernel(a: Tensor, steps: int) -> Tensor:
    from attnorm.kernels import newton  # loads Triton

    return newton.newton_inverse(a, steps, RIDGE)


@_newton_inverse_kernel.register_fake
def _(a: Tensor, steps: int) -> Tensor:
    return torch.empty_like(a, memory_format=torch.contiguous_format)
