"""Measure a process that does nothing else: run code in a new Python process, and its peak resident memory.

The resident size counts everything that `top` shows: outputs, gradients, blocks in flight, and whatever the allocator
keeps. It is measured by the operating system, not by torch.

An allocator may keep what was freed before the call, and would then hide what the call uses: torch's wheels for aarch64
include mimalloc, which returns freed memory to the system about 0.1 s later, when it next serves a large request. So
the measurement starts once a block of memory, freed for this purpose, is back with the system. If it never comes back,
or if the kernel does not reset its high-water mark, the memory cannot be measured and a RuntimeError gives the reason.
"""

import gc
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

MEGABYTE = 10**6
PROBE_BYTES = 64 * 2**20
PATIENCE_SECONDS = 10.0
STATUS = Path("/proc/self/status")
RESET = Path("/proc/self/clear_refs")


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
    probe = torch.ones(PROBE_BYTES // 4)
    with_probe = resident("VmRSS")
    del probe
    deadline = time.monotonic() + PATIENCE_SECONDS
    while with_probe - resident("VmRSS") < PROBE_BYTES * 3 // 4:
        if time.monotonic() > deadline:
            raise RuntimeError("expected freed memory back within 10 s, but the allocator keeps it; use the system's")
        time.sleep(0.02)
        torch.empty(PROBE_BYTES // 2, dtype=torch.uint8)  # never touched: only a large request makes mimalloc purge


def resident(field: str) -> int:
    """Return bytes: VmRSS is the resident size, VmHWM its maximum since the mark was reset. Linux only."""
    match = re.search(rf"^{field}:\s+(\d+) kB$", STATUS.read_text(), flags=re.MULTILINE)
    if match is None:
        raise RuntimeError(f"expected {field} in {STATUS}, which Linux writes; got none")
    return int(match[1]) * 1024
