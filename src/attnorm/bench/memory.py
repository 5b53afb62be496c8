"""Benchmark the peak memory of one attention call above that before it, in a new process."""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

from attnorm.attention import attention
from attnorm.bench.attention import WIDTH, blocked_normalizers
from attnorm.bench.results import Footprint
from attnorm.bench.subprocess_measure import MEGABYTE, RESET, peak_above, run_and_read_json
from attnorm.normalizers.registry import get

PROMISED_MB = 400.0
HEADS = 4


@dataclass(frozen=True)
class MemoryUse:
    forward_mb: float
    backward_mb: float
    seconds: float


def measure_footprints(*, quick: bool = False, notes: list[str]) -> Iterator[Footprint]:
    """Yield the footprint of every normalizer that runs in blocks of queries, causal."""
    if not RESET.exists():
        notes.append("memory is not measured: it needs /proc/self/clear_refs, which only Linux has")
        return
    length = 1024 if quick else 16_384
    for name in ["entmax15"] if quick else blocked_normalizers():
        try:
            measured = in_new_process(name, length)
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


def in_new_process(name: str, length: int) -> MemoryUse:
    """Measure `name` at this length in a new process."""
    code = f"from attnorm.bench.memory import report; report({name!r}, {length}, {torch.get_num_threads()})"
    return MemoryUse(**run_and_read_json(code))


def report(name: str, length: int, threads: int) -> None:
    """Run in the new process: measure, and print JSON."""
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
