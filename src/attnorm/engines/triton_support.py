"""Whether Triton kernels can run on some tensors: the device, the dtype and the widths."""

import importlib.util

import torch
from torch import Tensor

LARGEST_WIDTH = {torch.float16: 256, torch.bfloat16: 256, torch.float32: 128}  # what fits into the memory on the chip
FEWEST_QUERIES = 16  # the smallest tile; with fewer, as in decoding, most of it would be empty
HAS_TRITON = importlib.util.find_spec("triton") is not None


def runs_kernels(*tensors: Tensor) -> bool:
    """For tensors of one dtype on one device. On a CPU only in Triton's interpreter, slowly: for tests."""
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


# What torch.compiler.assume_constant_result does, without loading the compiler, which takes seconds.
_runs_on._dynamo_marked_constant = True  # type: ignore[attr-defined]
