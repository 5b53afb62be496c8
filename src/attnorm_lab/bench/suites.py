"""All benchmarks by name, run under one thread count."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
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
from attnorm_lab.bench.timing import Bench
from attnorm_lab.bench.training import compare_training, measure_monitor

Suite = Literal[
    "normalizers", "attention", "memory", "cuda", "cuda-attention", "cuda-decoding", "cuda-first-call", "cuda-analyze",
    "analyze", "monitor", "training", "linear", "sweep", "all",
]  # fmt: skip
SUITES: dict[Suite, Callable[[Bench], Iterator[Result]]] = {
    "normalizers": compare_normalizers,
    "attention": compare_attention,
    "memory": measure_footprints,
    "cuda-attention": compare_cuda_attention,
    "cuda-decoding": compare_cuda_decoding,
    "cuda-first-call": measure_first_calls,
    "cuda-analyze": measure_cuda_analysis,
    "analyze": measure_analysis,
    "monitor": measure_monitor,
    "training": compare_training,
    "linear": measure_linear,
    "sweep": measure_sweep,
}
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
    """Run a suite; `cuda` is all whose names begin with `cuda-`. quick: tiny sizes, as a test; nothing is judged.

    finished: called with every result at once, so that a run that is cut short leaves some.
    model, text: for `analyze` only (see measure_analysis).
    """
    bench = Bench(quick=quick, model=model, text=text)
    results: list[Result] = []
    threads = ANALYZE_THREADS if threads is None and suite == "analyze" else threads
    if threads is not None and threads < 1:
        raise ValueError(f"threads: expected an integer of at least 1, got {threads}.")
    with nullcontext() if threads is None else torch_threads(threads):
        for name, run in SUITES.items():
            if suite in (name, "all") or (suite == "cuda" and name.startswith("cuda-")):
                for result in run(bench):
                    finished(result)
                    results.append(result)
        machine = this_machine()
    return Benchmarks(machine=machine, quick=quick, results=tuple(results), notes=tuple(bench.notes))
