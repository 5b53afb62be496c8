"""How engines and measurements use the hardware: Triton kernels, torch's threads on a CPU, no synchronization on a GPU.

A GPU runs asynchronously. Reading a number from it (`if bool(x.any())`, `.item()`, `.nonzero()`) waits until all queued
work is done and leaves the GPU idle afterwards: in training this costs more than a few unnecessary passes.

On a CPU, many small tensors are faster in one thread, and large work is divided: one part of the heads per thread.

Inside a compiled graph a Triton kernel is an operator of torch.library. In eager mode the wrappers of such an operator
take longer than a short kernel (0.3 ms of 1.3 ms for one call with backward). So eager code calls the function
directly, inside an autograd.Function. Attention of one query takes less time than Python needs to choose an engine and
to translate a normalizer. So the launches of such a call are remembered (`KnownCalls`), for all calls with the same
layouts and options.
"""

import importlib.util
import inspect
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from types import NoneType
from typing import Any, Literal, NamedTuple, Never, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from attnorm.engines.inputs import Inputs, under_transform, without_autocast
from attnorm.kernels.launch import DecodePlan, PlannedRun, holds, layout_of, product_precision, recorded_runs
from attnorm.normalizers.contract import Normalizer, Properties
from attnorm.normalizers.softmax import Softmax


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
def torch_threads(count: int) -> Iterator[None]:
    """Use this number of torch threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one torch thread. Small tensors are faster this way, and sums have a fixed order."""
    with torch_threads(1):
        yield


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

    def refuse_gradient(self) -> None:
        """Raise an error where a gradient of this operator is asked for, which is itself a gradient."""

        def refuse(*_: Any) -> Never:
            raise RuntimeError(
                "expected one derivative of a kernel of attnorm, got a second one, which the kernels do not "
                "have. Use engine='blocked', or float64 for a mechanism such as gaussian, which has no option "
                "engine."
            )

        self.register_autograd(refuse)

    def __call__(self, *arguments: Any) -> Any:
        if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
            return self.operator(*arguments)
        return self.differentiable(*arguments) if torch.is_grad_enabled() else self.function(*arguments)


def kernel_operator(name: str) -> Callable[[Callable[..., Any]], KernelOperator]:
    return lambda function: KernelOperator(name, function)


class KnownCall(NamedTuple):
    """The launches of an attention call with few queries, for calls with the same key."""

    plan: DecodePlan
    # Behind q, k and v: a number, or where a tensor is found: index of the part, `_parameters` or `_buffers`, name.
    # Tensors are looked up in every call, so that kernels read their current values.
    numbers: tuple[float | tuple[int, str, str], ...]

    def run(self, inputs: Inputs, parts: Sequence[nn.Module]) -> Tensor:
        sources: list[Any] = [inputs.q_BHQD, inputs.k_BGKD, inputs.v_BGKE]
        for number in self.numbers:
            if isinstance(number, float):
                sources.append(number)
            else:
                part, kind, name = number
                sources.append(getattr(parts[part], kind)[name])
        return self.plan.run(sources)


class KnownCalls:
    """Remembers how calls with few queries ran, so that the next one of the same kind is only launched.

    The launches depend on the key of a call: layouts and options, and for every part of the normalizer its class, its
    attributes and the layouts of its parameters and buffers. Their values are no part of the key, so that the layers of
    a model share it.
    """

    LIMIT = 1024  # keys; a model needs one per kind of layer for every length of its cache
    _INTERNAL = frozenset(vars(nn.Module())) - {"training"}  # attributes that no part has of its own
    _IMMUTABLE = frozenset((bool, int, float, str, NoneType, Properties))

    def __init__(self) -> None:
        self._calls: dict[tuple[Any, ...], KnownCall | Literal[False]] = {}  # False: must be computed every time

    def forget(self) -> None:
        self._calls.clear()

    def attend(self, inputs: Inputs, normalizer: Normalizer, engine: str, compute: Callable[[], Tensor]) -> Tensor:
        """Return the output of a call for which `may_be_known`. compute: how to get it if it is not known."""
        parts = normalizer.parts
        by_sdpa = engine == "auto" and inputs.plain_logits and len(parts) == 1 and type(parts[0]) is Softmax
        key = None if by_sdpa or type(normalizer) is not Normalizer else self._key(inputs, parts, engine)
        if key is None:
            return compute()
        known = self._calls.get(key)  # one lookup: another thread may make all forgotten
        if known is not None:
            return known.run(inputs, parts) if known else compute()
        with recorded_runs() as runs:
            output = compute()
        if len(self._calls) >= self.LIMIT:
            self.forget()
        was_all = len(runs) == 1 and runs[0].output is output
        self._calls[key] = (was_all and self._known(inputs, parts, runs[0])) or False
        return output

    def _key(self, inputs: Inputs, parts: Sequence[nn.Module], engine: str) -> tuple[Any, ...] | None:
        """Return the key; None if a part is not ours, or if one of its attributes may change unseen."""
        q = inputs.q_BHQD
        key: list[Any] = [
            engine, inputs.causal, inputs.scale, inputs.softcap, product_precision(q.dtype), q.device, layout_of(q),
            layout_of(inputs.k_BGKD), layout_of(inputs.v_BGKE),
        ]  # fmt: skip
        for part in parts:
            if part._modules or not type(part).__module__.startswith("attnorm."):
                return None
            key.append(type(part))
            for name, value in part.__dict__.items():
                if name not in self._INTERNAL:
                    if type(value) not in self._IMMUTABLE and not self._holds_immutable(value):
                        return None
                    key += name, value
            for name, parameter in part._parameters.items():
                key += "parameter", name, layout_of(parameter)
            for name, buffer in part._buffers.items():
                key += "buffer", name, layout_of(buffer)
        return tuple(key)

    def _holds_immutable(self, value: object) -> bool:
        return type(value) is tuple and self._IMMUTABLE.issuperset(map(type, value))

    @staticmethod
    def _known(inputs: Inputs, parts: Sequence[nn.Module], run: PlannedRun) -> KnownCall | None:
        """Return how to repeat a run, if all that it reads are the inputs, numbers, and each tensor of a part once."""
        q, k, v, *numbers = run.sources
        if q is not inputs.q_BHQD or k is not inputs.k_BGKD or v is not inputs.v_BGKE:
            return None
        places = {
            (index, kind, name): tensor
            for index, part in enumerate(parts)
            for kind in ("_parameters", "_buffers")
            for name, tensor in getattr(part, kind).items()
            if tensor is not None
        }
        found: list[float | tuple[int, str, str]] = []
        for number in numbers:
            if isinstance(number, Tensor):
                own = [place for place, tensor in places.items() if tensor is number]
                if not own:  # computed from parameters
                    return None
                found.append(own[0])
            else:
                found.append(float(number))
        read = [place for place in found if isinstance(place, tuple)]
        return KnownCall(run.plan, tuple(found)) if sorted(read) == sorted(places) else None


def may_be_known(inputs: Inputs, engine: str) -> bool:
    """Whether this is a call of few queries on kernels, in eager mode, without gradients and anything seldom."""
    q = inputs.q_BHQD
    if not (q.is_cuda or engine == "triton"):  # on a CPU no other engine runs kernels, and Triton is not imported
        return False
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or q.shape[-2] >= MIN_QUERIES:
        return False
    if inputs.mask is not None or inputs.bias is not None or inputs.positions is not None or inputs.dropout > 0:
        return False
    if inputs.hidden_states is not None or not type(q) is type(inputs.k_BGKD) is type(inputs.v_BGKE) is Tensor:
        return False
    return runs_triton(q.device) and not is_in_torch_dispatch_mode() and not under_transform()


known_calls = KnownCalls()
