"""The hardware of a training run: device, precision, versions, memory, and several processes that train one model.

accelerate keeps device and precision once per process and reads what is not given from the environment. Here several
models are trained in one process, and settings of `accelerate config` or a launcher must not change their weights. So
each training gets its own accelerate state, hides the variables that accelerate reads, and restores both afterwards.

Several processes are started by torchrun or `accelerate launch`. Every process takes its share of each batch, and
torch's DistributedDataParallel averages the gradients. Process 0 alone reads and writes the folder of the run. Without
a launcher there is one process and no communication.
"""

import gc
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import distributed, nn

from attnorm.models.private_names import accelerate_states
from attnorm.provenance import package_versions

if TYPE_CHECKING:
    from accelerate import Accelerator

PRECISIONS = {"float32": "no", "bfloat16": "bf16"}
PROCESSES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")  # as accelerate counts them
LAUNCHED = (*PROCESSES, "LOCAL_RANK")


def check_accelerate(*, several: bool = False) -> None:
    """Check that training is possible, before anything is read or written.

    several: whether torchrun or `accelerate launch` may have started several processes.

    Raises:
        ImportError: accelerate is not installed.
        ValueError: This is one of several processes that cannot share the work.
    """
    if find_spec("accelerate") is None:
        raise ImportError("training needs accelerate, which is not installed. Run: pip install 'attnorm[lab]'")
    launched = several and "RANK" in os.environ
    for name in PROCESSES:
        if os.environ.get(name, "1") not in ("0", "1") and not (launched and name == "WORLD_SIZE"):
            instead = "with torchrun or `accelerate launch`" if several else "without a launcher"
            raise ValueError(
                f"expected {'a launcher of torch' if several else 'one process'}, got one of several: {name} is "
                f"{os.environ[name]}. Start it {instead}, or with --num_processes 1. To use several GPUs for several "
                "runs, use `attnorm lab sweep`."
            )


@contextmanager
def accelerated(device: torch.device, dtype: str, *, several: bool = False) -> "Iterator[Accelerator]":
    """Yield an Accelerator for this device and precision, with accelerate's global state saved and restored.

    It knows of this process alone; several processes are connected by `Processes`.

    Raises:
        ImportError, ValueError: As `check_accelerate`.
    """
    check_accelerate(several=several)
    from accelerate import Accelerator

    states = accelerate_states()
    before = [dict(state) for state in states]
    names = [name for name in os.environ if name.startswith("ACCELERATE_") or name in LAUNCHED]
    hidden = {name: os.environ.pop(name) for name in names}
    try:
        for state in states:
            state.clear()
        os.environ["ACCELERATE_TORCH_DEVICE"] = str(device)  # the only way to name one GPU of several
        yield Accelerator(mixed_precision=PRECISIONS[dtype])
    finally:
        for state, old in zip(states, before, strict=True):
            state.clear()
            state.update(old)
        del os.environ["ACCELERATE_TORCH_DEVICE"]
        os.environ.update(hidden)


def chosen_device(name: str | None, local_rank: int = 0) -> torch.device:
    """Return the device with this name (default: a GPU if there is one).

    local_rank: which GPU "cuda" is, if a launcher started one process for each.

    Raises:
        ValueError: Not a device, or not one of this machine.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and local_rank:
        name = f"cuda:{local_rank}"
    try:
        device = torch.device(name)
    except RuntimeError:  # torch's message lists every device type
        raise ValueError(
            f"cannot use device {name!r}: expected cpu, cuda or an index such as cuda:1. Use cpu."
        ) from None
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        why = str(error).splitlines()[0].partition(". ")[0]
        raise ValueError(f"cannot use device {name!r}: {why}. Use cpu.") from None
    return device


def device_name(device: torch.device) -> str:
    """Return the model of a GPU, or the type of another device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def training_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide the weights."""
    return {"python": platform.python_version(), **package_versions("torch", "transformers", "tokenizers")}


def machine(device: torch.device) -> dict[str, Any]:
    """Return the entries about device and versions for the record of a training run."""
    return {"device": device_name(device), "versions": training_versions()}


def free_memory() -> None:
    """Free the memory of unused models for other processes on the same GPU."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


class MemoryPeak:
    """Peak memory: since the last `restart` on a GPU; of the whole process on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.restart()

    def restart(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def bytes(self) -> int | None:
        """Return the peak, or None if it is unknown."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        if self._device.type == "cpu" and sys.platform != "win32":
            import resource

            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return peak if sys.platform == "darwin" else 1024 * peak
        return None


Answer = TypeVar("Answer")
PATIENCE = timedelta(days=1)  # others wait while process 0 encodes texts and evaluates


class OtherProcessFailed(SystemExit):
    """Raised in every process but the first if the first one failed: it prints the error."""


@dataclass(frozen=True)
class Processes:
    """Rank and number of the processes that train one model."""

    rank: int = 0
    count: int = 1
    local_rank: int = 0

    @classmethod
    def launched(cls) -> "Processes":
        """Read rank and number of processes from the launcher's environment; one process without a launcher."""
        count = int(os.environ.get("WORLD_SIZE", "1"))
        if count < 2:
            return cls()
        return cls(int(os.environ.get("RANK", "0")), count, int(os.environ.get("LOCAL_RANK", "0")))

    @property
    def first(self) -> bool:
        return self.rank == 0

    @contextmanager
    def connected(self, device: torch.device) -> Iterator[None]:
        """Connect the processes: NCCL between GPUs, gloo between CPUs."""
        if self.count == 1 or distributed.is_initialized():
            yield
            return
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        distributed.init_process_group(backend, rank=self.rank, world_size=self.count, timeout=PATIENCE)
        try:
            yield
        finally:
            # A module of `parallel` that is freed after its group ends the group's threads while it holds the
            # interpreter's lock, for which one of them may wait: a deadlock. The module is part of a reference cycle.
            gc.collect()
            distributed.destroy_process_group()

    def by_first(self, work: Callable[[], Answer]) -> Answer:
        """Run `work` in process 0 and return its result in all processes.

        Raises:
            OtherProcessFailed: In the others, if it failed.
        """
        if self.count == 1:
            return work()
        answers: list[Any] = [None, False]
        if not self.first:
            distributed.broadcast_object_list(answers, 0, device=torch.device("cpu"))
            if not answers[1]:
                raise OtherProcessFailed(1)
            answer: Answer = answers[0]
            return answer
        try:
            answers = [work(), True]
        finally:
            distributed.broadcast_object_list(answers, 0, device=torch.device("cpu"))
        answer = answers[0]
        return answer

    def any(self, here: bool) -> bool:
        """Return whether `here` is true in any process, so that all of them stop after the same step."""
        if self.count == 1:
            return here
        flag = torch.tensor(float(here))
        distributed.all_reduce(flag, distributed.ReduceOp.MAX)
        return bool(flag)

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """Return the mean over the processes."""
        if self.count == 1:
            return value
        total = value.detach().clone()
        distributed.all_reduce(total)
        return total / self.count

    def share(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the rows of a batch that this process computes."""
        return batch[self.rank :: self.count] if self.count > 1 else batch

    def parallel(self, module: nn.Module) -> nn.Module:
        """Return the module with gradients averaged over the processes."""
        if self.count == 1:
            return module
        return nn.parallel.DistributedDataParallel(module)
