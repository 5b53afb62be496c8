"""One update of the weights: loss, gradients, clipping, AdamW. On a GPU from the fourth step on as a CUDA graph.

At a thousand tokens a GPU computes faster than Python starts its kernels. A graph records them once and starts them all
with one call. It holds addresses, not values: inputs are copied to where the recorded step read them, and gradients
stay where it wrote them.
"""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

STEPS_BEFORE = 3  # steps without capture: they compile kernels, which a capture cannot do


class WeightUpdate:
    """One update per call. A subclass computes the loss with all gradients, and says whether that can be captured."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self.captured: CapturedStep | None = None
        self._calls = 0

    def __call__(self, rate: float, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Change the weights; return the loss and the norm of the gradient before clipping, on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self._calls == STEPS_BEFORE and self._can_be_captured():
            with self._capturing():
                self.captured = capture(self._gradients, *inputs)
            if self.captured is None:
                self.optimizer.zero_grad()
        self._calls += 1
        loss = (self._gradients if self.captured is None else self.captured)(*inputs)
        norm = self._clip()
        self.optimizer.step()
        if self.captured is None:
            self.optimizer.zero_grad()
        return loss, norm

    def _gradients(self, *inputs: Tensor) -> Tensor:
        """Set the gradients of all parameters; return the loss."""
        raise NotImplementedError

    def _clip(self) -> Tensor:
        """Clip the gradients; return their norm before."""
        raise NotImplementedError

    def _can_be_captured(self) -> bool:
        raise NotImplementedError

    def _capturing(self) -> AbstractContextManager[None]:
        """Return a context for the capture."""
        return nullcontext()


class CapturedStep:
    """Call it like the captured step. Do not set the gradients to None afterwards; every call overwrites them.

    Measure peak memory in earlier steps: torch does not count what a graph uses when it runs again.
    """

    def __init__(self, step: Callable[..., Tensor], *inputs: Tensor) -> None:
        """Capture a step. step: computes the loss of the inputs and all gradients, which must be None before."""
        self._inputs = [tensor.clone() for tensor in inputs]
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._loss = step(*self._inputs)

    def __call__(self, *inputs: Tensor) -> Tensor:
        for captured, tensor in zip(self._inputs, inputs, strict=True):
            if tensor.shape != captured.shape:  # copy_ would repeat a single window
                raise ValueError(
                    f"expected an input of the captured shape {tuple(captured.shape)}, got {tuple(tensor.shape)}. "
                    "Make a new step for another shape."
                )
            captured.copy_(tensor, non_blocking=True)
        self._graph.replay()
        return self._loss.clone()


def capture(step: Callable[..., Tensor], *inputs: Tensor) -> CapturedStep | None:
    """Return the captured step; None, with a warning, if it cannot be captured. Some gradients may be set then."""
    try:
        return CapturedStep(step, *inputs)
    except RuntimeError as error:  # e.g. a normalizer of the user's waits for the GPU, which a graph cannot contain
        reason = str(error).partition("\n")[0]
        warnings.warn(f"training continues without a CUDA graph and is slower: {reason}", stacklevel=3)
        return None
