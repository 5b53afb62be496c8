"""Time two calls in alternation, so that changes of the machine's speed affect both, and describe the machine."""

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

Call = Callable[[], object]

MIN_SECONDS = 0.01  # shorter calls are repeated within one sample


@dataclass(frozen=True)
class Timed:
    ours_ms: float
    theirs_ms: float
    speedup: float  # median over the rounds of theirs / ours


def time_alternating(ours: Call, theirs: Call, *, rounds: int) -> Timed:
    """Return the medians of both over the rounds, after one warm-up call of each; the order alternates.

    A single round times one call of each, as a test that it runs.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    for call in (ours, theirs):
        call()
    calls = [(call, _loops(call) if rounds > 1 else 1) for call in (ours, theirs)]
    pairs: list[tuple[float, float]] = []
    for number in range(rounds):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        seconds = {which: _seconds(*calls[which]) for which in order}
        pairs.append((seconds[0], seconds[1]))
    return Timed(
        1e3 * median(ours for ours, _ in pairs),
        1e3 * median(theirs for _, theirs in pairs),
        median(theirs / ours for ours, theirs in pairs),
    )


def time_alone(call: Call, *, rounds: int) -> float:
    """Return the median of the rounds in milliseconds, for a call that has been warmed up."""
    loops = _loops(call) if rounds > 1 else 1
    return 1e3 * median(_seconds(call, loops) for _ in range(rounds))


def _loops(call: Call) -> int:
    """Return how often to repeat the call within one sample."""
    return max(1, min(1000, round(MIN_SECONDS / max(_seconds(call, 1), 1e-6))))


def _seconds(call: Call, loops: int) -> float:
    start = time.perf_counter()
    for _ in range(loops):
        call()
    return (time.perf_counter() - start) / loops


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
