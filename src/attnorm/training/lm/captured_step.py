"""Forward and backward pass of a training step as one CUDA graph.

At a thousand tokens a GPU computes faster than Python starts its kernels. A graph records them once and starts them
all with one call. It holds addresses, not values: inputs are copied to where the recorded step read them, and
gradients stay where it wrote them.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import masking_utils

STEPS_BEFORE = 3  # steps without capture: they compile kernels, which a capture cannot do


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
