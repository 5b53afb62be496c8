"""Peak memory of one attention call: resident size at its highest minus resident size just before, in a fresh process.

The resident size counts everything a user would see in `top` - the output and the gradients (17 MB each at the promised
size), the blocks in flight, and whatever the allocator holds on to. It is measured by the system, not by torch.

An allocator may keep what was freed before the call, and would then hide what the call uses: torch's wheels for aarch64
bring mimalloc, which returns freed memory to the system about 0.1 s later, when it next serves a large request. So the
measurement starts once a block of memory, freed for this purpose, is back with the system; if it never comes back, or
if the kernel does not reset its high-water mark, the memory cannot be measured and a RuntimeError says why.
"""

import gc
import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from attnorm.attention import attention
from attnorm.bench.attention import WIDTH, blocked_normalizers
from attnorm.bench.results import Footprint
from attnorm.bench.subprocess_measure import run_and_read_json
from attnorm.normalizers.registry import get

MEGABYTE = 10**6
PROMISED_MB = 400.0
HEADS = 4
PROBE_BYTES = 64 * 2**20
PATIENCE_SECONDS = 10.0

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class MemoryUse:
    forward_mb: float
    backward_mb: float
    seconds: float


def measure_footprints(*, quick: bool = False, notes: list[str]) -> Iterator[Footprint]:
    """Every normalizer that runs in blocks of queries, causal."""
    if not _RESET.exists():
        notes.append("memory is not measured: it needs /proc/self/clear_refs, which only Linux has")
        return
    length = 1024 if quick else 16_384
    for name in ["entmax15"] if quick else blocked_normalizers():
        try:
            measured = in_fresh_process(name, length)
        except RuntimeError as error:
            notes.append(f"the memory of {name} was not measured: {error}")
            continue
        yield Footprint(
            what=name,
            setting=f"L = {length:,}, causal, {HEADS} heads, width {WIDTH}, float32",
            dense_mb=HEADS * length * length * 4 / MEGABYTE,
            target_mb=None if quick else PROMISED_MB,
            **asdict(measured),
        )


def in_fresh_process(name: str, length: int) -> MemoryUse:
    """The peak of `name` at this length, in a process that has done nothing else."""
    code = f"from attnorm.bench.memory import report; report({name!r}, {length}, {torch.get_num_threads()})"
    return MemoryUse(**run_and_read_json(code))


def report(name: str, length: int, threads: int) -> None:
    """What the fresh process runs: measures, and prints JSON."""
    torch.set_num_threads(threads)
    sys.stdout.write(json.dumps(asdict(measure(name, length))))


def measure(name: str, length: int) -> MemoryUse:
    normalizer = get(name)

    def run(queries: int, backward: bool) -> None:
        q, k, v = (t[..., :queries, :].requires_grad_(backward) for t in inputs)
        with torch.set_grad_enabled(backward):
            output = attention(q, k, v, normalizer, causal=True)
        if backward:
            torch.autograd.grad(output, (q, k, v), torch.ones_like(output))

    inputs = [torch.randn(1, HEADS, length, WIDTH, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    for backward in (False, True):
        run(min(64, length), backward)  # libraries load and thread pools start outside the measurement
    start = time.perf_counter()
    forward = peak_above(lambda: run(length, False))
    both = peak_above(lambda: run(length, True))
    return MemoryUse(forward / MEGABYTE, both / MEGABYTE, time.perf_counter() - start)


def peak_above(call: Callable[[], object]) -> int:
    """Bytes by which the resident size rose above its present value at the highest point of the call. Linux only."""
    gc.collect()
    return_freed_memory()
    _RESET.write_text("5")  # sets the high-water mark to the present resident size
    before = resident("VmHWM")
    if before - resident("VmRSS") > PROBE_BYTES // 2:
        raise RuntimeError(f"expected that writing 5 to {_RESET} resets VmHWM, but this kernel keeps the old value")
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
    """Bytes: VmRSS is what the process holds, VmHWM the most it held since the mark was set. Linux only."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", _STATUS.read_text(), flags=re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{_STATUS} has no {field}: expected the one that Linux writes")
    return int(found[1]) * 1024
