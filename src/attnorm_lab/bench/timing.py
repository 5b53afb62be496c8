"""Measure time and memory: two calls in alternation, a process that does nothing else, and the machine itself.

Alternation lets changes of the machine's speed affect both calls. The memory is the resident size, which counts
everything that `top` shows: outputs, gradients, blocks in flight, and whatever the allocator keeps. It is measured by
the operating system, not by torch.

An allocator may keep what was freed before the call, and would then hide what the call uses: glibc keeps small blocks
until malloc_trim is called, and torch's wheels for aarch64 include mimalloc, which returns freed memory to the
system about 0.1 s later, when it next serves a large request. So the measurement starts once a block of memory, freed
for this purpose, is back with the system. If it never comes back, or if the kernel does not reset its high-water mark,
the memory cannot be measured and a RuntimeError gives the reason.
"""

import ctypes
import gc
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch

from attnorm_lab.bench.results import Numbers, Result

Call = Callable[[], object]

MIN_SECONDS = 0.01  # shorter calls are repeated within one sample


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A run of benchmarks."""

    quick: bool = False  # tiny sizes and one round, as a test; nothing is judged
    notes: list[str] = field(default_factory=list)  # what could not be measured
    model: Path | None = None  # for analyze: a folder of SmolLM2
    text: Path | None = None  # for analyze: the text to measure it on

    def attempt(self, what: str, measure: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
        """Return what is measured; nothing, and a note, if that fails."""
        try:
            return measure(*arguments)
        except (ImportError, OSError, RuntimeError) as error:
            self.notes.append(f"{what} was not measured: {error}")
            return {}

    def result(
        self, table: str, what: str, numbers: Numbers, promised: Mapping[str, float | None] | None = None,
        against: str = "",
    ) -> Result:  # fmt: skip
        """Return a result with the promises that are made; None is no promise."""
        limits = {} if self.quick else {name: limit for name, limit in (promised or {}).items() if limit is not None}
        return Result(table=table, what=what, against=against, numbers=numbers, promised=limits)

    def compare(
        self, table: str, what: str, ours: Call, rivals: Mapping[str, tuple[Call, float | None]], *, rounds: int,
        calls: int = 1, numbers: Numbers | None = None,
    ) -> Iterator[Result]:  # fmt: skip
        """Time ours in alternation with all rivals, name -> call and the promised speedup.

        calls: how many are in every timed call; the milliseconds are of one. numbers: further columns.
        """
        timed = time_alternating(ours, *(call for call, _ in rivals.values()), rounds=1 if self.quick else rounds)
        for (against, (_, least)), found in zip(rivals.items(), timed, strict=True):
            per_call = {name: found[name] / calls for name in ("ours_ms", "theirs_ms")}
            yield self.result(table, what, {**found, **per_call, **(numbers or {})}, {"speedup": least}, against)


def time_alternating(ours: Call, *rivals: Call, rounds: int) -> list[dict[str, float]]:
    """Return, for each rival, medians over the rounds and the median of paired ratios, after one warm-up call of each.

    The order alternates; the rivals share the calls of ours. A single round times one call of each, as a test that it
    runs.
    """
    if rounds < 1:
        raise ValueError(f"rounds: expected an integer of at least 1, got {rounds}.")
    calls = [ours, *rivals]
    for call in calls:
        call()
    loops = [_loops(call) if rounds > 1 else 1 for call in calls]
    samples: list[list[float]] = [[] for _ in calls]
    for number in range(rounds):
        order = range(len(calls))
        for which in order if number % 2 == 0 else reversed(order):
            samples[which].append(_seconds(calls[which], loops[which]))
    own = samples[0]
    return [
        {
            "ours_ms": 1e3 * median(own),
            "theirs_ms": 1e3 * median(theirs),
            "speedup": median(b / a for a, b in zip(own, theirs, strict=True)),
        }
        for theirs in samples[1:]
    ]


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


MEGABYTE = 10**6
PROBE_BYTES = 64 * 2**20
PATIENCE_SECONDS = 10.0
STATUS = Path("/proc/self/status")
RESET = Path("/proc/self/clear_refs")


def in_new_process(function: Callable[..., dict[str, Any]], *arguments: object) -> dict[str, Any]:
    """Call a function of a module in a new Python process with as many threads; arguments and result are plain values.

    It may raise what run_and_read_json raises.
    """
    name, threads = function.__name__, torch.get_num_threads()
    return run_and_read_json(
        f"import json, sys, torch; from {function.__module__} import {name}; torch.set_num_threads({threads}); "
        f"sys.stdout.write(json.dumps({name}(*{arguments!r})))"
    )


def run_and_read_json(code: str) -> dict[str, Any]:
    """Run code in a new Python process and return the JSON object that it prints.

    Raises:
        RuntimeError: It failed; the message is the last line of its stderr.
    """
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if run.returncode != 0:
        raise RuntimeError((run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1])
    printed: dict[str, Any] = json.loads(run.stdout)
    return printed


def peak_above(call: Callable[[], object]) -> int:
    """Return by how many bytes the call raised the resident size at its highest point. Linux only."""
    gc.collect()
    return_freed_memory()
    RESET.write_text("5")  # sets the high-water mark to the present resident size
    before = resident("VmHWM")
    if before - resident("VmRSS") > PROBE_BYTES // 2:
        raise RuntimeError(f"expected that writing 5 to {RESET} resets VmHWM, but this kernel keeps the old value")
    call()
    return resident("VmHWM") - before


def return_freed_memory() -> None:
    """Wait until the allocator has returned freed memory to the system, shown by a block that is freed here."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda kept: None)  # glibc's
    trim(0)
    probe = torch.ones(PROBE_BYTES // 4)
    with_probe = resident("VmRSS")
    del probe
    trim(0)
    deadline = time.monotonic() + PATIENCE_SECONDS
    while with_probe - resident("VmRSS") < PROBE_BYTES * 3 // 4:
        if time.monotonic() > deadline:
            raise RuntimeError("expected freed memory back within 10 s, but the allocator keeps it; use the system's")
        time.sleep(0.02)
        torch.empty(PROBE_BYTES // 2, dtype=torch.uint8)  # never touched: only a large request makes mimalloc purge
        trim(0)


def resident(field: str) -> int:
    """Return bytes: VmRSS is the resident size, VmHWM its maximum since the mark was reset. Linux only."""
    match = re.search(rf"^{field}:\s+(\d+) kB$", STATUS.read_text(), flags=re.MULTILINE)
    if match is None:
        raise RuntimeError(f"expected {field} in {STATUS}, which Linux writes; got none")
    return int(match[1]) * 1024
