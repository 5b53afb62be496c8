"""`Processes`: several processes that train one model, started by torchrun or `accelerate launch`.

Every process takes its share of each batch, and torch's DistributedDataParallel averages the gradients. Process 0 alone
reads and writes the folder of the run. Without a launcher there is one process and no communication.
"""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed, nn

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
