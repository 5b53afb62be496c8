"""The machine of a measurement."""

import os
import platform
from pathlib import Path

import torch

from attnorm.bench.results import Machine


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
