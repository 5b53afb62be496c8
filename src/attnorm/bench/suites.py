"""All benchmarks by name, run under one thread count."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypeVar

import torch

from attnorm.bench.attention import compare_attention
from attnorm.bench.cuda import compare_cuda
from attnorm.bench.machine import this_machine
from attnorm.bench.memory import measure_footprints
from attnorm.bench.normalizers import compare_normalizers
from attnorm.report.benchmarks import Benchmarks, Footprint, Ratio

Suite = Literal["normalizers", "attention", "memory", "cuda", "all"]
Result = TypeVar("Result", Ratio, Footprint)


def run_benchmarks(
    suite: Suite = "all",
    *,
    threads: int | None = None,
    quick: bool = False,
    progress: Callable[[str], None] = lambda finished: None,
) -> Benchmarks:
    """`progress` hears the name of every comparison when it is done; `quick` proves that it runs, not how fast."""
    ratios: list[Ratio] = []
    footprints: list[Footprint] = []
    notes: list[str] = []
    with _threads(threads):
        if suite in ("normalizers", "all"):
            ratios += _heard(compare_normalizers(quick=quick, notes=notes), progress)
        if suite in ("attention", "all"):
            ratios += _heard(compare_attention(quick=quick, notes=notes), progress)
        if suite in ("memory", "all"):
            footprints += _heard(measure_footprints(quick=quick, notes=notes), progress)
        if suite in ("cuda", "all"):
            ratios += _heard(compare_cuda(quick=quick, notes=notes), progress)
        machine = this_machine()
    return Benchmarks(
        machine=machine, quick=quick, ratios=tuple(ratios), footprints=tuple(footprints), notes=tuple(notes)
    )


def _heard(results: Iterator[Result], progress: Callable[[str], None]) -> Iterator[Result]:
    for result in results:
        progress(result.what)
        yield result


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if count is not None:
        if count < 1:
            raise ValueError(f"threads must be at least 1, got {count}")
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
