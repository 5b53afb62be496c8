"""Check whether Triton kernels can run, and call them in eager mode and inside a compiled graph.

Inside a graph a kernel is an operator of torch.library. In eager mode the wrappers of such an operator take longer than
a short kernel (0.3 ms of 1.3 ms for one call with backward). So eager code calls the function directly, inside an
autograd.Function.
"""

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

LARGEST_WIDTH = {torch.float16: 256, torch.bfloat16: 256, torch.float32: 128}  # that shared memory holds
MIN_QUERIES = 16  # rows of the smallest tile; fewer queries, as in decoding, would leave most of it empty
HAS_TRITON = importlib.util.find_spec("triton") is not None


def runs_kernels(*tensors: Tensor) -> bool:
    """Whether kernels can run on these tensors, of one dtype on one device.

    On a CPU this is true in Triton's interpreter only, which is slow and meant for tests.
    """
    first = tensors[0]
    if not HAS_TRITON or max(t.shape[-1] for t in tensors) > LARGEST_WIDTH.get(first.dtype, 0):
        return False
    if first.dtype == torch.bfloat16 and not first.is_cuda:
        return False  # Triton's interpreter reads bfloat16 as integers and returns wrong numbers
    return runs_triton(first.device)


def runs_triton(device: torch.device) -> bool:
    return HAS_TRITON and bool(_runs_on(device))


def _runs_on(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
    import triton

    return bool(triton.knobs.runtime.interpret)


# The effect of torch.compiler.assume_constant_result, without importing the compiler, which takes seconds.
_runs_on._dynamo_marked_constant = True  # type: ignore[attr-defined]


class KernelOperator:
    """A kernel that eager code calls directly and compiled code as an operator.

    Use it like torch.library.custom_op: as a decorator (`kernel_operator`), then register_fake and register_autograd.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.function = self.differentiable = function
        self.operator = torch.library.custom_op(name, function, mutates_args=())

    def register_fake(self, shapes: Callable[..., Any]) -> None:
        self.operator.register_fake(shapes)

    def register_autograd(
        self, gradients: Callable[..., Any], *, setup_context: Callable[..., None] | None = None
    ) -> None:
        self.operator.register_autograd(gradients, setup_context=setup_context)
        function = self.function

        class Differentiable(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *arguments: Any) -> Any:  # a separate setup_context would make apply() slower
                output = function(*arguments)
                if setup_context is not None:
                    setup_context(ctx, arguments, output)
                return output

            @staticmethod
            def backward(ctx: Any, *grads: Any) -> Any:
                return gradients(ctx, *grads)

        self.differentiable = Differentiable.apply

    def __call__(self, *arguments: Any) -> Any:
        if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
            return self.operator(*arguments)
        return self.differentiable(*arguments) if torch.is_grad_enabled() else self.function(*arguments)


def kernel_operator(name: str) -> Callable[[Callable[..., Any]], KernelOperator]:
    return lambda function: KernelOperator(name, function)
