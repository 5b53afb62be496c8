"""All benchmarks by name, run under one thread count."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from attnorm.bench.analyze import measure_analysis, measure_sweep
from attnorm.bench.attention import compare_attention, measure_footprints
from attnorm.bench.cuda import compare_cuda, measure_cuda_analysis
from attnorm.bench.linear import measure_linear
from attnorm.bench.normalizers import compare_normalizers
from attnorm.bench.results import (
    ApproximationError,
    Benchmarks,
    CostCurve,
    Footprint,
    Growth,
    ModelRun,
    Ratio,
    Result,
    SweepCost,
)
from attnorm.bench.timing import this_machine
from attnorm.bench.training import compare_training, measure_monitor

Suite = Literal[
    "normalizers",
    "attention",
    "memory",
    "cuda",
    "cuda-analyze",
    "analyze",
    "monitor",
    "training",
    "linear",
    "sweep",
    "all",
]
_INCLUDED: dict[Suite, Suite] = {"cuda": "cuda-analyze"}

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
    """Run a suite. quick: tiny sizes, as a test.

    progress: called with the name of every finished comparison and, if it is a ratio, its speed.
    model, text: for `analyze` only (see measure_analysis).
    """
    results: list[Result] = []
    notes: list[str] = []
    suites: dict[Suite, Callable[[], Iterator[Result]]] = {
        "normalizers": partial(compare_normalizers, quick=quick, notes=notes),
        "attention": partial(compare_attention, quick=quick, notes=notes),
        "memory": partial(measure_footprints, quick=quick, notes=notes),
        "cuda": partial(compare_cuda, quick=quick, notes=notes),
        "cuda-analyze": partial(measure_cuda_analysis, quick=quick, notes=notes),
        "analyze": partial(measure_analysis, quick=quick, notes=notes, model=model, text=text),
        "monitor": partial(measure_monitor, quick=quick),
        "training": partial(compare_training, quick=quick, notes=notes),
        "linear": partial(measure_linear, quick=quick),
        "sweep": partial(measure_sweep, quick=quick, notes=notes),
    }
    with _threads(ANALYZE_THREADS if threads is None and suite == "analyze" else threads):
        for name, run in suites.items():
            for result in run() if suite in (name, "all") or name == _INCLUDED.get(suite) else ():
                progress(f"{result.what}: {result.speedup:.2f}x" if isinstance(result, Ratio) else result.what)
                results.append(result)
        machine = this_machine()
    return Benchmarks(
        machine=machine,
        quick=quick,
        ratios=tuple(result for result in results if isinstance(result, Ratio)),
        footprints=tuple(result for result in results if isinstance(result, Footprint)),
        runs=tuple(result for result in results if isinstance(result, ModelRun)),
        growth=tuple(result for result in results if isinstance(result, Growth)),
        costs=tuple(result for result in results if isinstance(result, CostCurve)),
        errors=tuple(result for result in results if isinstance(result, ApproximationError)),
        sweeps=tuple(result for result in results if isinstance(result, SweepCost)),
        notes=tuple(notes),
    )


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
