"""All benchmarks by name, run under one thread count."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch

from attnorm.bench.analyze import measure_analysis
from attnorm.bench.attention import compare_attention
from attnorm.bench.cuda import compare_cuda
from attnorm.bench.machine import this_machine
from attnorm.bench.memory import measure_footprints
from attnorm.bench.monitor import measure_monitor
from attnorm.bench.normalizers import compare_normalizers
from attnorm.bench.results import Benchmarks, Footprint, Growth, ModelRun, Ratio, Result

Suite = Literal["normalizers", "attention", "memory", "cuda", "analyze", "monitor", "all"]

ANALYZE_THREADS = 2  # default: the promises of analyze are made for it


def run_benchmarks(
    suite: Suite = "all",
    *,
    threads: int | None = None,
    quick: bool = False,
    model: Path | None = None,
    text: Path | None = None,
    progress: Callable[[str], None] = lambda finished: None,
) -> Benchmarks:
    """Run a suite. progress: called with the name of every finished comparison. quick: tiny sizes, as a test.

    model, text: for `analyze` only (see measure_analysis).
    """
    results: list[Result] = []
    notes: list[str] = []
    with _threads(ANALYZE_THREADS if threads is None and suite == "analyze" else threads):
        if suite in ("normalizers", "all"):
            results += _reported(compare_normalizers(quick=quick, notes=notes), progress)
        if suite in ("attention", "all"):
            results += _reported(compare_attention(quick=quick, notes=notes), progress)
        if suite in ("memory", "all"):
            results += _reported(measure_footprints(quick=quick, notes=notes), progress)
        if suite in ("cuda", "all"):
            results += _reported(compare_cuda(quick=quick, notes=notes), progress)
        if suite in ("analyze", "all"):
            results += _reported(measure_analysis(quick=quick, notes=notes, model=model, text=text), progress)
        if suite in ("monitor", "all"):
            results += _reported(measure_monitor(quick=quick), progress)
        machine = this_machine()
    return Benchmarks(
        machine=machine,
        quick=quick,
        ratios=tuple(result for result in results if isinstance(result, Ratio)),
        footprints=tuple(result for result in results if isinstance(result, Footprint)),
        runs=tuple(result for result in results if isinstance(result, ModelRun)),
        growth=tuple(result for result in results if isinstance(result, Growth)),
        notes=tuple(notes),
    )


def _reported(results: Iterable[Result], progress: Callable[[str], None]) -> Iterator[Result]:
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
