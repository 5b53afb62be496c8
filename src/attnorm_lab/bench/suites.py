"""All benchmarks by name, run under one thread count."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Literal

from attnorm.engines.execution import torch_threads
from attnorm.machine import this_machine
from attnorm_lab.bench.analyze import measure_analysis, measure_sweep
from attnorm_lab.bench.attention import compare_attention, measure_footprints
from attnorm_lab.bench.cuda import (
    compare_cuda_attention,
    compare_cuda_decoding,
    measure_cuda_analysis,
    measure_first_calls,
)
from attnorm_lab.bench.linear import measure_linear
from attnorm_lab.bench.normalizers import compare_normalizers
from attnorm_lab.bench.results import Benchmarks, Result
from attnorm_lab.bench.training import compare_training, measure_monitor

Suite = Literal[
    "normalizers",
    "attention",
    "memory",
    "cuda",
    "cuda-attention",
    "cuda-decoding",
    "cuda-first-call",
    "cuda-analyze",
    "analyze",
    "monitor",
    "training",
    "linear",
    "sweep",
    "all",
]
ANALYZE_THREADS = 2  # default: the promises of analyze are made for it


def run_benchmarks(
    suite: Suite = "all",
    *,
    threads: int | None = None,
    quick: bool = False,
    model: Path | None = None,
    text: Path | None = None,
    finished: Callable[[Result], None] = lambda result: None,
) -> Benchmarks:
    """Run a suite; `cuda` is all whose names begin with `cuda-`. quick: tiny sizes, as a test.

    finished: called with every result at once, so that a run that is cut short leaves some.
    model, text: for `analyze` only (see measure_analysis).
    """
    results: list[Result] = []
    notes: list[str] = []
    suites: dict[Suite, Callable[[], Iterator[Result]]] = {
        "normalizers": partial(compare_normalizers, quick=quick, notes=notes),
        "attention": partial(compare_attention, quick=quick, notes=notes),
        "memory": partial(measure_footprints, quick=quick, notes=notes),
        "cuda-attention": partial(compare_cuda_attention, quick=quick, notes=notes),
        "cuda-decoding": partial(compare_cuda_decoding, quick=quick, notes=notes),
        "cuda-first-call": partial(measure_first_calls, quick=quick, notes=notes),
        "cuda-analyze": partial(measure_cuda_analysis, quick=quick, notes=notes),
        "analyze": partial(measure_analysis, quick=quick, notes=notes, model=model, text=text),
        "monitor": partial(measure_monitor, quick=quick),
        "training": partial(compare_training, quick=quick, notes=notes),
        "linear": partial(measure_linear, quick=quick),
        "sweep": partial(measure_sweep, quick=quick, notes=notes),
    }
    threads = ANALYZE_THREADS if threads is None and suite == "analyze" else threads
    if threads is not None and threads < 1:
        raise ValueError(f"threads: expected an integer of at least 1, got {threads}.")
    with nullcontext() if threads is None else torch_threads(threads):
        for name, run in suites.items():
            included = suite in (name, "all") or (suite == "cuda" and name.startswith("cuda-"))
            for result in run() if included else ():
                finished(result)
                results.append(result)
        machine = this_machine()
    return Benchmarks(machine=machine, quick=quick, results=tuple(results), notes=tuple(notes))
