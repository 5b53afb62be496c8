"""A function that launches kernels, callable in eager mode and inside a graph.

A graph contains an operator of torch.library. In eager mode the operator's wrappers take longer than a short kernel
(0.3 ms of 1.3 ms for one call with backward), so the function is called directly, with an autograd.Function around it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


class KernelOperator:
    """Used like torch.library.custom_op: a decorator, then register_fake and register_autograd."""

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
            def forward(ctx: Any, *arguments: Any) -> Any:  # with a setup_context, apply would inspect its signature
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
