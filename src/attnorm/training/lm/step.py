"""One update of the weights: loss, gradients, clipping, AdamW. On a GPU from the fourth step on as a CUDA graph.

At a thousand tokens a GPU computes faster than Python starts its kernels. A graph records them once and starts them all
with one call. It holds addresses, not values: inputs are copied to where the recorded step read them, and gradients
stay where it wrote them.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import masking_utils

from attnorm.training.device import Processes
from attnorm.training.lm.attention import Attention, compile_blocks, is_traceable
from attnorm.training.lm.evaluate import predicted_loss, window_loss
from attnorm.training.lm.model import LMSettings
from attnorm.training.run import LARGEST_GRADIENT, make_optimizer

if TYPE_CHECKING:
    from accelerate import Accelerator

STEPS_BEFORE = 3  # steps without capture: they compile kernels, which a capture cannot do


class TrainingStep:
    """One update per call. Call it inside `in_training` and `whole_windows`."""

    def __init__(
        self,
        model: Any,
        settings: LMSettings,
        accelerator: "Accelerator",
        *,
        compiled: bool = False,
        attention: Attention = "engine",
        processes: Processes | None = None,
    ) -> None:
        self.model, self.accelerator, self.compiled, self.attention = model, accelerator, compiled, attention
        self.dtype = settings.dtype
        self.processes = processes or Processes()
        self.optimizer = accelerator.prepare(make_optimizer(model, settings))
        loss: Callable[..., Any] = predicted_loss
        if compiled:
            loss = torch.compile(predicted_loss, dynamic=False)
            compile_blocks(model, settings)
        self.loss = self.processes.parallel(WindowLoss(model, loss))
        self._captured: CapturedStep | None = None
        self._steps = 0

    def __call__(self, windows: torch.Tensor, rate: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Change the weights; return the loss and the norm of the gradient before clipping, on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self._steps == STEPS_BEFORE and self._can_be_captured():
            self._captured = capture(self._gradients, windows)
            if self._captured is None:
                self.optimizer.zero_grad()
        self._steps += 1
        loss = self._gradients(windows) if self._captured is None else self._captured(windows)
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), LARGEST_GRADIENT)
        self.optimizer.step()
        if self._captured is None:
            self.optimizer.zero_grad()
        return loss, norm

    def _gradients(self, windows: torch.Tensor) -> torch.Tensor:
        with self.accelerator.autocast():
            loss = self.loss(windows)
        self.accelerator.backward(loss)
        detached: torch.Tensor = loss.detach()
        return detached

    def _can_be_captured(self) -> bool:
        """Whether a step is nothing but kernels: compiled blocks, attention that is part of them, one process."""
        on_gpu = self.accelerator.device.type == "cuda" and self.processes.count == 1
        return on_gpu and self.compiled and self.attention == "engine" and is_traceable(self.model, self.dtype)


class WindowLoss(torch.nn.Module):
    """The model and its loss as one module, so that torch can average gradients over processes."""

    def __init__(self, model: Any, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, windows: torch.Tensor) -> Any:
        return window_loss(self.model, windows, self.loss)


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


@contextmanager
def whole_windows() -> Iterator[None]:
    """Let models of transformers take every sequence as one text without padding, whose mask is causal.

    Otherwise they wait for the GPU in every step, to find out whether several texts are packed into one sequence. And
    while a graph is captured they would build the mask as a tensor.
    """
    with (
        patch.object(masking_utils, "find_packed_sequence_indices", lambda position_ids: None),
        patch.object(masking_utils, "is_tracing", lambda tensor=None: False),
    ):
        yield
