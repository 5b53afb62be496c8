"""The machine that a measurement ran on."""

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine of the measurements."""

    processor: str
    cores: int
    threads: int
    torch: str
    python: str
    system: str

    def __str__(self) -> str:
        return (
            f"{self.processor}, {self.cores} cores, {self.threads} thread{'s' * (self.threads != 1)}, "
            f"torch {self.torch}, Python {self.python}, {self.system}"
        )


def this_machine() -> Machine:
    return Machine(
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        python=platform.python_version(),
        system=platform.system(),
    )


def _processor() -> str:
    """Return the name of the processor, if the system reports it."""
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
