"""How engines and measurements use the hardware: Triton kernels, torch's threads on a CPU, no synchronization on a GPU.

A GPU runs asynchronously. Reading a number from it (`if bool(x.any())`, `.item()`, `.nonzero()`) waits until all queued
work is done and leaves the GPU idle afterwards: in training this costs more than a few unnecessary passes.

On a CPU, many small tensors are faster in one thread, and large work is divided: one part of the heads per thread.

Inside a compiled graph a Triton kernel is an operator of torch.library. In eager mode the wrappers of such an operator
take longer than a short kernel (0.3 ms of 1.3 ms for one call with backward). So eager code calls the function
directly, inside an autograd.Function.
"""

import importlib.util
import inspect
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from attnorm.engines.inputs import without_autocast
from attnorm.kernels.launch import holds


def runs_asynchronously(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the memory of a CPU or GPU is full. Of a CPU, torch raises a plain RuntimeError."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    )


def sent_to(device: torch.device, tensor: Tensor) -> Tensor:
    """Return the tensor on that device. A copy from pinned memory to a GPU does not wait for its queued work."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def sent_to_cpu(tensor: Tensor) -> Tensor:
    """Return the tensor on the CPU. Call the function that `arrival` returns before you read its values."""
    return tensor.to("cpu", non_blocking=tensor.is_cuda)


def arrival(device: torch.device) -> Callable[[], None]:
    """Return a function that waits until everything sent from the device so far has arrived."""
    if device.type != "cuda":
        return lambda: None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event.synchronize


MAX_THREADS = 16
Item = TypeVar("Item")
Result = TypeVar("Result")


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one torch thread. Small tensors are faster this way, and sums have a fixed order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def in_threads(measure: Callable[[range], None], parts: int, device: torch.device, *, whole: bool = False) -> None:
    """Call measure(range) for the parts 0 to `parts` - 1, divided among as many threads as torch uses.

    Each call runs with one torch thread; the number of torch threads is restored afterwards. whole: one call for all
    parts, in this thread.
    """
    threads = torch.get_num_threads()
    shares = 1 if whole or device.type != "cpu" else min(threads, parts)
    if shares == 1:
        with without_autocast(device):
            measure(range(parts))
        return

    inference = torch.is_inference_mode_enabled()  # a new thread does not inherit it

    def measure_share(share: int) -> None:
        torch.set_num_threads(1)
        with torch.inference_mode(inference), torch.no_grad(), without_autocast(device):
            measure(range(parts * share // shares, parts * (share + 1) // shares))

    try:
        with ThreadPoolExecutor(shares) as pool:
            for done in [pool.submit(measure_share, share) for share in range(shares)]:
                done.result()
    finally:
        torch.set_num_threads(threads)


def on_current_stream(work: Callable[[], Result], device: torch.device) -> Callable[[], Result]:
    """Return `work` for another thread, which runs it on the current stream of this thread."""
    if device.type != "cuda":
        return work
    stream = torch.cuda.current_stream(device)  # another thread does not inherit it

    def work_on_stream() -> Result:
        with torch.cuda.stream(stream):
            return work()

    return work_on_stream


def in_new_thread(work: Callable[[], Result], device: torch.device) -> Result:
    """Return work(), computed in a new thread on the current stream of this device."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(on_current_stream(work, device)).result()


def each_in_a_thread(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Return work(item) for all items, computed in threads. Meant for work that is a few torch operations."""
    if len(items) == 1:
        return [work(items[0])]
    with ThreadPoolExecutor(min(len(items), MAX_THREADS)) as pool:
        return list(pool.map(work, items))


LARGEST_WIDTH = {torch.float16: 256, torch.bfloat16: 256, torch.float32: 256}  # that shared memory holds
WIDE_FLOAT32 = 128  # wider heads in float32 need WIDE_FLOAT32_MEMORY
WIDE_FLOAT32_MEMORY = 196_608  # bytes of shared memory of a program: `launch.holds`
MIN_QUERIES = 16  # rows of the smallest tile; fewer queries, as in decoding, would leave most of it empty
HAS_TRITON = importlib.util.find_spec("triton") is not None


def runs_kernels(*tensors: Tensor) -> bool:
    """Whether kernels can run on these tensors, of one dtype on one device.

    On a CPU this is true in Triton's interpreter only, which is slow and meant for tests.
    """
    first, largest = tensors[0], LARGEST_WIDTH.get(tensors[0].dtype, 0)
    for t in tensors:  # any() of a generator takes twice as long, for every token and layer
        if t.shape[-1] > largest:
            return False
    if first.dtype == torch.bfloat16 and not first.is_cuda:
        return False  # Triton's interpreter reads bfloat16 as integers and returns wrong numbers
    if is_wide_float32(*tensors) and not holds(first.device, WIDE_FLOAT32_MEMORY):
        return False
    return runs_triton(first.device)


def is_wide_float32(*tensors: Tensor) -> bool:
    return tensors[0].dtype == torch.float32 and max(t.shape[-1] for t in tensors) > WIDE_FLOAT32


def runs_triton(device: torch.device) -> bool:
    return HAS_TRITON and bool(_runs_on(device))


@lru_cache
def _has_capability(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def _runs_on(device: torch.device) -> bool:
    if device.type == "cuda":
        return _has_capability(device)
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
        """Register a function that makes empty outputs for the compiler, from those arguments that it names."""
        signature, needed = inspect.signature(self.function), inspect.signature(shapes).parameters

        def fake(*arguments: Any, **named: Any) -> Any:
            given = signature.bind(*arguments, **named).arguments
            return shapes(**{name: given[name] for name in needed})

        self.operator.register_fake(fake)

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
