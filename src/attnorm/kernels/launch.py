"""Arguments of every attention kernel: tensors with contiguous rows, their strides and sizes, the device.

`holds` and `fitting` choose tiles for the shared memory of a GPU. `PreparedKernels` launches kernels many times with
little Python, for calls that are shorter than Triton's launcher.
"""

import inspect
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnorm.arithmetic import ceil_div

NOTHING = nullcontext()  # has no state, so that all launches share it
FARTHEST_ROWS = 2**24  # elements: 128 rows of a tile stay below 2^31
Tile = tuple[int, int, int, int]  # rows, columns, warps, stages

# Bytes of shared memory that a program may have on RTX cards (sm_86, sm_89, sm_120); 166,912 on an A100, 232,448 on an
# H200. Every tile fits here, compiled by Triton 3.6 for sm_89, unless its function calls `fitting`.
SMALLEST_MEMORY = 101_376


class Form(NamedTuple):
    """Everything that a one-pass kernel needs besides tensors: map and rule by name, and their constants."""

    map: str
    power: int = 1  # of relu and polynomial; the variant of self_adjusted
    floor: float = 0.0  # added to the denominator of a scaled map, in natural units
    rule: str = "none"
    softcap: float | None = None
    causal: bool = False
    window: int | None = None  # a query sees this many keys, itself the last
    scale: float = 1.0
    log2_base: float = 0.0  # of a factor with an exponent, as delta: blocks.load_factor
    delta: float = 0.0


@dataclass(frozen=True)
class Launch:
    """Arguments of one launch: q (B, H, Q, D), k and v (B, G, K, D or E), and a boolean mask (B, H, Q, K) or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    factor: Tensor | None  # (B, H, Q) in float32, contiguous: multiplies the logits of each row
    causal: bool  # bottom-right: the last query sees every key

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """q, k, v, mask, factor. If one is None, q is passed instead: the kernel does not read it."""
        mask = self.q if self.mask is None else self.mask.view(torch.uint8)
        return self.q, self.k, self.v, mask, self.q if self.factor is None else self.factor

    @property
    def strides(self) -> tuple[int, ...]:
        mask = (0, 0, 0, 0) if self.mask is None else self.mask.stride()
        return (*self.q.stride()[:3], *self.k.stride()[:3], *self.v.stride()[:3], *mask)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Heads, query heads per key head, queries, keys, keys before the first query."""
        heads, queries, keys = self.q.shape[1], self.q.shape[2], self.k.shape[2]
        return heads, heads // self.k.shape[1], queries, keys, keys - queries

    @property
    def constants(self) -> dict[str, Any]:
        width, v_width = padded(self.q), padded(self.v)
        return {
            "CAUSAL": self.causal, "MASKED": self.mask is not None, "FACTORED": self.factor is not None,
            "PRECISION": float32_precision(), "FAST": self.q.is_cuda and self.q.dtype != torch.float32,
            "WIDTH": width, "V_WIDTH": v_width,
            "FULL": width == self.q.shape[-1], "V_FULL": v_width == self.v.shape[-1],
        }  # fmt: skip

    @classmethod
    def without_values(cls, q: Tensor, k: Tensor, mask: Tensor | None, factor: Tensor | None, causal: bool) -> "Launch":
        q, k = in_rows(q), in_rows(k)
        return cls(q, k, k, mask, None if factor is None else factor.contiguous(), causal)

    def launch(
        self, kernel: Any, tile: Tile, *arguments: Any, over_keys: bool = False, block: int | None = None,
        **constants: Any,
    ) -> None:  # fmt: skip
        """Launch a kernel with one program per block of queries, or of keys (over_keys).

        block: queries or keys of a program (default: those of the tile).
        """
        rows, columns, warps, stages = tile
        over, size = (self.k, columns) if over_keys else (self.q, rows)
        with device_of(self.q):
            kernel[(ceil_div(over.shape[2], block or size) * over.shape[0] * over.shape[1],)](
                *arguments, **constants, ROWS=rows, COLUMNS=columns, num_warps=warps, num_stages=stages
            )

    def constants_of(self, kernel: Any) -> dict[str, Any]:
        """Return those of the constants that the kernel takes."""
        return {name: value for name, value in self.constants.items() if name in kernel.arg_names}

    def run(self, kernel: Any, scale: float, *numbers: Tensor | int, over_keys: bool = False) -> None:
        """Launch a kernel that reads no values."""
        q, k, _, mask, *_ = self.tensors
        self.launch(
            kernel, tile_without_values(q, over_keys), q, k, mask, *numbers, *self.strides[:6], *self.strides[9:],
            *self.lengths, q.shape[-1], scale, over_keys=over_keys, **self.constants_of(kernel),
        )  # fmt: skip


class KernelConstants(NamedTuple):
    """A Triton kernel and its compile-time constants, which are its last parameters, in any order."""

    kernel: Any
    constants: Mapping[str, object]
    warps: int
    stages: int = 3


class PreparedKernels:
    """Triton kernels that a call launches one after the other, from one list of arguments that they share by name.

    Triton compiles a kernel for each kind of arguments, and takes 20 us per launch to find the kind of about 40 of
    them. Here the compiled kernels are kept with the kind of all arguments (`kinds_of`).
    """

    def __init__(self, names: Sequence[str], *kernels: KernelConstants, absent: Collection[str] = ()) -> None:
        """names: of the arguments, which are sources (tensors, or floats in their place) and then numbers.

        absent: names of sources that are not given. A kernel gets the first source in their place and does not read it.
        """
        given = [name for name in names if name not in absent]
        places = {name: 0 if name in absent else given.index(name) for name in names}
        self.kernels = kernels
        self.arguments, self.constants = [], []
        for kernel, constants, _, _ in kernels:
            first_constant = len(kernel.arg_names) - len(constants)
            self.arguments.append(itemgetter(*(places[name] for name in kernel.arg_names[:first_constant])))
            self.constants.append([constants[name] for name in kernel.arg_names[first_constant:]])
        self._compiled: dict[tuple[object, ...], list[CompiledKernel]] = {}

    def find(self, device: int, sources: Sequence[Any], numbers: Sequence[float]) -> "list[CompiledKernel] | None":
        """Return the compiled kernels of such a launch; None if there was no launch of its kind yet."""
        return self._compiled.get((device, *kinds_of(sources, numbers)))

    def launch_by_triton(
        self, device: int, programs: Sequence[int], sources: Sequence[Any], numbers: Sequence[float]
    ) -> None:
        """Launch and keep the compiled kernels, which Triton returns but in its interpreter."""
        values = (*sources, *numbers)
        found = [
            CompiledKernel.of(
                one.kernel[grid,](*arguments(values), **one.constants, num_warps=one.warps, num_stages=one.stages)
            )
            for grid, one, arguments in zip(programs, self.kernels, self.arguments, strict=True)
        ]
        if None not in found:
            self._compiled[(device, *kinds_of(sources, numbers))] = [one for one in found if one is not None]


KnownLaunch = tuple[Callable[..., object], int, int, object, Callable[..., tuple[Any, ...]], list[object]]


class LaunchPlan:
    """Launches that agree in all numbers and in the layouts of all sources (`layout_of`), and differ in addresses.

    The kernels are launched as torch.compile launches them, with addresses in place of tensors, which the launcher
    would look up. While a profiler has hooks in Triton, and if Triton's launcher is not the one that we know, Triton
    launches the kernels.
    """

    def __init__(
        self, kernels: PreparedKernels, device: int, programs: Sequence[int], numbers: tuple[float, ...]
    ) -> None:
        """device: of the sources, which is -1 for a CPU. programs: of each kernel."""
        from triton import knobs  # engines import this file where Triton is not installed
        from triton.runtime import driver

        self._driver, self._hooks = driver, knobs.runtime
        self._kernels, self._device, self._programs, self._numbers = kernels, device, programs, numbers
        self._aligned: list[KnownLaunch] | None = None  # for sources that all lie at multiples of 16 bytes

    def launch(self, sources: Sequence[Any]) -> None:
        """Launch the kernels on the current device. sources: in the order of the names of `PreparedKernels`."""
        addresses, bits = [], 0
        for source in sources:
            if isinstance(source, Tensor):
                address = source.data_ptr()
                bits |= address
                addresses.append(address)
            else:
                addresses.append(source)
        launches = self._aligned if bits & 15 == 0 else None
        if launches is None:
            launches = self._find(sources)
            self._aligned = launches if bits & 15 == 0 else self._aligned
        if launches is None or self._has_hooks():
            self._kernels.launch_by_triton(self._device, self._programs, sources, self._numbers)
            return
        stream, values = self._driver.active.get_current_stream(self._device), (*addresses, *self._numbers)
        for run, grid, function, metadata, arguments, constants in launches:
            run(grid, 1, 1, stream, function, metadata, None, None, None, *arguments(values), *constants)

    def _find(self, sources: Sequence[Any]) -> "list[KnownLaunch] | None":
        kernels, compiled = self._kernels, self._kernels.find(self._device, sources, self._numbers)
        if compiled is None:
            return None
        return [
            (one.run, grid, one.function, one.metadata, arguments, constants)
            for one, grid, arguments, constants in zip(
                compiled, self._programs, kernels.arguments, kernels.constants, strict=True
            )
        ]

    def _has_hooks(self) -> bool:
        enter, leave = self._hooks.launch_enter_hook, self._hooks.launch_exit_hook
        # A chain of hooks may be empty; anything else but None is a hook.
        return bool(
            (enter is not None and getattr(enter, "calls", 1)) or (leave is not None and getattr(leave, "calls", 1))
        )


class DecodePlan(NamedTuple):
    """What the layouts of its tensors determine of a call with few queries: it runs for others of these layouts."""

    output: tuple[int, ...]  # shape
    work: int  # numbers between the kernels
    launches: LaunchPlan
    copies: bool  # whether a tensor has another layout than the kernels read

    def run(self, sources: Sequence[Tensor | float]) -> Tensor:
        """Return the output. sources: q, k, v, and the others that are given."""
        q: Any = sources[0]
        out = torch.empty(self.output, dtype=q.dtype, device=q.device)
        work = torch.empty(self.work, dtype=torch.float32, device=q.device)
        with device_of(q):
            self.launches.launch([*sources, work, out])
        return out


class PlannedRun(NamedTuple):
    plan: DecodePlan
    sources: list[Tensor | float]
    output: Tensor


class _Recording(threading.local):
    runs: list[PlannedRun] | None = None


_recording = _Recording()


@contextmanager
def recorded_runs() -> Iterator[list[PlannedRun]]:
    """Collect the plans that run in this thread, with their tensors."""
    before, _recording.runs = _recording.runs, []
    try:
        yield _recording.runs
    finally:
        _recording.runs = before


def record_run(run: PlannedRun) -> None:
    if _recording.runs is not None:
        _recording.runs.append(run)


# Parameters of Triton's launcher, in 3.6 and in 3.9. Both take the same arguments.
LAUNCHERS = (
    "gridX gridY gridZ stream function args",
    "gridX gridY gridZ stream function kernel_metadata launch_metadata launch_enter_hook launch_exit_hook args",
)


class CompiledKernel(NamedTuple):
    """What is needed to launch a kernel that Triton has compiled and loaded on a device."""

    run: Callable[..., object]
    function: int
    metadata: object
    kernel: object  # Triton unloads the function when nothing refers to the kernel

    @classmethod
    def of(cls, made: Any) -> "CompiledKernel | None":
        """Return it from the result of Triton's launch: None in the interpreter, and if we do not know the launcher."""
        if not all(hasattr(made, name) for name in ("run", "function", "packed_metadata")):
            return None
        known = " ".join(inspect.signature(made.run).parameters) in LAUNCHERS
        return cls(made.run, made.function, made.packed_metadata, made) if known else None


def kinds_of(sources: Sequence[Any], numbers: Sequence[float]) -> tuple[tuple[object, ...], tuple[object, ...]]:
    """Return what Triton compiles a kernel for: equal for two launches on a device only if they share a kernel.

    These are dtype and alignment of a tensor, and whether an integer is 1, a multiple of 16 or longer than 32 bits
    (compared with Triton in tests/attention/test_prepared_kernels.py).
    """
    of_sources = [
        (source.dtype, source.data_ptr() & 15 == 0) if isinstance(source, Tensor) else type(source)
        for source in sources
    ]
    # One expression for the usual integers: a call of a function per number would take three times as long.
    of_numbers = [
        (2 if a == 1 else a & 15 == 0) if type(a) is int and 0 <= a < 2**31 else _kind_of_number(a) for a in numbers
    ]
    return tuple(of_sources), tuple(of_numbers)


def _kind_of_number(a: float) -> object:
    return (a & 15 == 0, a >= -(2**31), a < 2**31, a < 2**63) if type(a) is int else type(a)


class Layout(NamedTuple):
    """Everything that a plan may depend on of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: int  # -1 is a CPU


LayoutFields = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, int]
GivenLayout = LayoutFields | type[float] | None


def layout_of(source: Tensor | float | None) -> GivenLayout:
    """Return the fields of Layout for a tensor, float for a number; plain tuples take half the time of named ones."""
    if isinstance(source, Tensor):
        return source.shape, source.stride(), source.dtype, source.get_device()
    return None if source is None else float


NO_NUMBER, ROW_NUMBERS, HEAD_NUMBERS, ONE_TENSOR, ONE_NUMBER = range(5)  # for blocks.load_number


def number_kind(layout: GivenLayout) -> int:
    """Return where a kernel finds the numbers of its rows: in a tensor (B, H, Q), (H,) or (), or in an argument."""
    if layout is None:
        return NO_NUMBER
    if not isinstance(layout, tuple):
        return ONE_NUMBER
    return {3: ROW_NUMBERS, 1: HEAD_NUMBERS, 0: ONE_TENSOR}[len(layout[0])]


def device_of(t: Tensor) -> AbstractContextManager[object]:
    """Make the tensor's device the current one, where Triton launches kernels."""
    if not t.is_cuda or t.get_device() == torch.cuda.current_device():  # torch.cuda.device takes as long as a launch
        return NOTHING
    return torch.cuda.device(t.device)


def in_rows(t: Tensor) -> Tensor:
    """Return the tensor with contiguous rows, as the kernels expect; saved tensors may have other strides.

    Kernels compute places within a tile in 32 bits, so rows may not be too far apart.
    """
    return t if are_rows(t.stride()) else t.contiguous()


def are_rows(strides: Sequence[int]) -> bool:
    return strides[-1] == 1 and strides[-2] < FARTHEST_ROWS


def empty_rows(t: Tensor, width: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Return an uninitialized tensor (B, H, L, width) like t with contiguous rows.

    If the heads of a position lie next to each other in t, as in models, they do so in the result: then a model copies
    neither the output nor a gradient.
    """
    batch, heads, length = t.shape[:3]
    width, dtype = t.shape[-1] if width is None else width, t.dtype if dtype is None else dtype
    if t.stride(1) < t.stride(2):
        return torch.empty((batch, length, heads, width), dtype=dtype, device=t.device).transpose(1, 2)
    return torch.empty((batch, heads, length, width), dtype=dtype, device=t.device)


def empty_numbers(q: Tensor, used: bool = True) -> Tensor:
    """Return an uninitialized float32 tensor (B, H, Q), or an empty one if it is not used."""
    return torch.empty(q.shape[:3] if used else (0,), dtype=torch.float32, device=q.device)


def float32_precision() -> str:
    """Return how kernels multiply float32: exactly enough, unless torch may use TF32.

    "bf16x6" adds six products of parts in bfloat16. On an H200 its error is half of that of float32's own products
    ("ieee"), which take four times as long.
    """
    if torch.backends.cuda.matmul.fp32_precision == "tf32":
        return "tf32"
    from triton import knobs  # engines import this file where Triton is not installed

    return "ieee" if knobs.runtime.interpret else "bf16x6"


def product_precision(dtype: torch.dtype) -> str:
    """The same for products of this dtype: one answer for half precision, without the time to read a setting."""
    return float32_precision() if dtype == torch.float32 else "tf32"


def padded(t: Tensor) -> int:
    """Return the width of t in a tile."""
    return padded_to(t.shape[-1])


def padded_to(width: int) -> int:
    """Return the next power of two, at least 16."""
    return max(16, 1 << (width - 1).bit_length())


def holds(device: torch.device, needs: int) -> bool:
    """Whether a program may have so many bytes of shared memory."""
    return needs <= SMALLEST_MEMORY or device.type != "cuda" or needs <= _shared_memory(device)


@lru_cache
def _shared_memory(device: torch.device) -> int:
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)


# The effect of torch.compiler.assume_constant_result, without importing the compiler, which takes seconds.
holds._dynamo_marked_constant = True  # type: ignore[attr-defined]


def fitting(q: Tensor, tile: Tile, needs: int, smaller: Tile) -> Tile:
    """Return the tile, the fastest on an H200, or the smaller one where a program may not have the bytes it needs.

    needs: compiled for sm_89. The smaller tile takes at most SMALLEST_MEMORY there.
    """
    return tile if holds(q.device, needs) else smaller


def tile_without_values(q: Tensor, over_keys: bool) -> tuple[int, int, int, int]:
    """Return rows, columns, warps and stages: the fastest of eight for the entropy kernel, bfloat16 on an H200.

    In float32, wider than 128, every kernel owns 16 rows or keys with 8 warps. For a product of float32 a warp holds
    three parts of 16 rows of width 256 in 192 registers, and parts of the other factor: with 32 rows, ptxas for sm_90
    spills 1 to 23 KB of registers per thread. Of the other side there are 64, so that no two warps compute the same
    product, or 32 where 64 spill twice as much. Compiled and not timed.
    """
    if q.dtype == torch.float32 and padded(q) > 128:
        return (64, 16, 8, 2) if over_keys else (16, 64, 8, 2)
    if q.dtype == torch.float32:
        return (64, 32, 4, 2) if padded(q) <= 64 else (32, 32, 4, 2)
    return (64, 64, 4, 3) if padded(q) <= 64 else (64, 64, 4, 2) if padded(q) <= 128 else (64, 32, 4, 2)
