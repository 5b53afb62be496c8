"""Benchmark analyze(): one run against the forward pass alone and `output_attentions=True`, and many in a sweep.

One run: time, memory and its growth with the length. A sweep: 64 small items with two workers, in local processes and
on Ray. Ideal are the seconds that the items take inside their workers, divided by the number of workers; they include
loading the model. The wall time also has the start of Ray and of the workers, scheduling, and the merged table and
page.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch

from attnorm.bench.model_passes import Cost, Shape, Way, cost, cost_in_new_process, pass_of, random_model, tokens
from attnorm.bench.results import Growth, GrowthPoint, ModelRun, Ratio, SweepCost
from attnorm.bench.timing import MEGABYTE, run_and_read_json, time_alternating

CORE, FULL, EAGER = 1 / 4, 1 / 2, 4.0  # promised speedups: over the plain pass (core, full), over eager
MEMORY = 1.5  # promised: at most this many times the plain pass
EXPONENT = 1.1  # promised: memory grows at most with this power of the length; an attention matrix has 2
WHOLE_SECONDS = 60.0  # promised: SmolLM2 at the first of its lengths
LENGTHS = (1024, 2048, 4096, 8192, 16_384)
MODEL_LENGTHS = (1024, 8192)
FOLDER = "ATTNORM_SMOLLM2"

WORDS: dict[Way, str] = {
    "plain": "plain forward pass, torch SDPA",
    "core": "analyze, core and gradient, all rows",
    "full": "analyze, everything, rows=64",
    "eager": "output_attentions=True and the core numbers",
}


def measure_analysis(
    *, quick: bool = False, notes: list[str], model: Path | None = None, text: Path | None = None
) -> Iterator[Ratio | ModelRun | Growth]:
    """Yield the measurements. model: a folder of SmolLM2 (default: $ATTNORM_SMOLLM2). text: default of analyze()."""
    shape = Shape(64, layers=2, heads=2) if quick else Shape(4096)
    yield from _against_plain(shape, quick)
    yield from _in_own_processes(shape, quick, notes)
    named = model or (Path(os.environ[FOLDER]) if os.environ.get(FOLDER) else None)
    if named is None:
        notes.append(f"no pretrained model was measured: give a folder of SmolLM2 with --model or ${FOLDER}")
        return
    for length in (16,) if quick else MODEL_LENGTHS:
        try:
            yield _whole_run(named, text, length, None if quick or length > MODEL_LENGTHS[0] else WHOLE_SECONDS)
        except RuntimeError as error:
            notes.append(f"{named.name} at {length:,} tokens was not measured: {error}")


def _against_plain(shape: Shape, quick: bool) -> Iterator[Ratio]:
    model, ids = random_model(shape), tokens(shape.length)
    ways: list[tuple[Way, float]] = [("core", CORE), ("full", FULL)]
    for way, target in ways:
        timed = time_alternating(pass_of(way, model, ids), pass_of("plain", model, ids), rounds=1 if quick else 5)
        yield Ratio(
            topic=_topic(shape), what=WORDS[way], against=WORDS["plain"], target=None if quick else target,
            **asdict(timed),
        )  # fmt: skip


def _topic(shape: Shape) -> str:
    return f"Measuring a model, GPT-2 with random weights, {shape}, L = {shape.length:,}"


def _in_own_processes(shape: Shape, quick: bool, notes: list[str]) -> Iterator[Ratio | ModelRun | Growth]:
    """Measure all ways at one length, then the plain pass and the core at every length."""
    measure: Callable[[Way, Shape], Cost] = partial(cost, least_seconds=0) if quick else cost_in_new_process
    known: dict[tuple[Way, int], Cost] = {}
    for length, ways in _schedule(shape, quick):
        for way in ways:
            try:
                known[way, length] = measure(way, replace(shape, length=length))
            except (RuntimeError, OSError) as error:
                notes.append(f"{WORDS[way]}, at {length:,} tokens was not measured: {error}")
        if length == shape.length:
            costs = {way: known[way, length] for way in ways if (way, length) in known}
            yield from _runs(costs, shape, quick)
    points = [
        GrowthPoint(
            length=length, seconds=core.seconds, plain_seconds=plain.seconds, extra_mb=core.extra_mb,
            plain_extra_mb=plain.extra_mb,
        )
        for length in sorted({length for _, length in known})
        if (core := known.get(("core", length))) and (plain := known.get(("plain", length)))
    ]  # fmt: skip
    if len(points) > 1:
        target = None if quick else EXPONENT
        yield Growth(what=WORDS["core"], setting=str(shape), points=tuple(points), target=target)


def _schedule(shape: Shape, quick: bool) -> Iterator[tuple[int, tuple[Way, ...]]]:
    yield shape.length, ("plain", "core", "full", "eager")
    for length in (2 * shape.length,) if quick else LENGTHS:
        if length != shape.length:
            yield length, ("plain", "core")


def _runs(costs: dict[Way, Cost], shape: Shape, quick: bool) -> Iterator[Ratio | ModelRun]:
    plain, core, eager = costs.get("plain"), costs.get("core"), costs.get("eager")
    if core and eager:
        # Eager runs once in its own process; alternating rounds would take minutes and give the same ratio.
        yield Ratio(
            topic=_topic(shape), what=WORDS["core"], against=WORDS["eager"], ours_ms=1e3 * core.seconds,
            theirs_ms=1e3 * eager.seconds, speedup=eager.seconds / core.seconds, target=None if quick else EAGER,
        )  # fmt: skip
    for way, measured in costs.items():
        yield ModelRun(
            setting=f"{shape}, L = {shape.length:,}", what=WORDS[way],
            times_plain=measured.peak_mb / plain.peak_mb if plain else None,
            most_times_plain=None if quick or way not in ("core", "full") else MEMORY, **asdict(measured),
        )  # fmt: skip


def _whole_run(folder: Path, text: Path | None, length: int, target: float | None) -> ModelRun:
    """Measure from the start of Python to the tables, including loading the model."""
    arguments = f"{str(folder)!r}, {None if text is None else str(text)!r}, {length}, {torch.get_num_threads()}"
    start = time.perf_counter()
    measured = run_and_read_json(f"from attnorm.bench.analyze import report; report({arguments})")
    return ModelRun(
        setting=f"{folder.name}, everything, rows=last, from the start of Python to the tables",
        what=f"{length:,} tokens, {measured['heads']} heads", seconds=time.perf_counter() - start,
        peak_mb=measured["peak_mb"], most_seconds=target,
    )  # fmt: skip


def report(folder: str, text: str | None, length: int, threads: int) -> None:
    """Run in the new process: analyze, and print JSON."""
    import resource

    from attnorm.analysis.analyze import analyze

    torch.set_num_threads(threads)
    inputs = None if text is None else {Path(text).name: Path(text).read_text(encoding="utf-8")}
    heads = analyze(folder, inputs, lengths=length, rows="last", metrics="all").heads.num_rows
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MEGABYTE
    sys.stdout.write(json.dumps({"heads": heads, "peak_mb": peak}))


SWEEP_WORKERS = 2
MAX_TIMES_IDEAL = 1.3  # promised for Ray
MAX_SECONDS_PER_ITEM = 1.0  # promised for Ray
SWEEP_PLAN = """
command = "analyze"
[grid]
model = ["bundled"]
length = {lengths}
seed = {seeds}
[options]
{options}
"""
SWEEP_OPTIONS = 'windows = 2\nrows = 64\nnormalizers = ["model", "entmax15"]'
QUICK_SWEEP_OPTIONS = "windows = 1\nrows = 4\nread_keys = 0"


def measure_sweep(
    *, quick: bool = False, notes: list[str], places: Sequence[str] = ("local", "ray")
) -> Iterator[SweepCost]:
    """Yield the cost on each of the places; one that cannot be used becomes a note."""
    lengths, seeds = ([16], [0, 1]) if quick else (list(range(64, 128, 8)), list(range(8)))
    text = SWEEP_PLAN.format(lengths=lengths, seeds=seeds, options=QUICK_SWEEP_OPTIONS if quick else SWEEP_OPTIONS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.toml"
        path.write_text(text, encoding="utf-8")
        for engine in places:
            try:
                yield _measure_sweep(path, engine, quick=quick)
            except (ImportError, RuntimeError) as error:
                notes.append(f"sweep on {engine} was not measured: {error}")


def _measure_sweep(path: Path, engine: str, *, quick: bool) -> SweepCost:
    from attnorm.sweep.plan import read_plan
    from attnorm.sweep.run import sweep

    plan, out = read_plan(path), path.parent / engine
    start = time.perf_counter()
    done = sweep(plan, out, on=engine, workers=SWEEP_WORKERS, address="local" if engine == "ray" else None)
    wall = time.perf_counter() - start
    if failed := [state.error for state in done.states if state.state != "finished"]:
        raise RuntimeError(f"{len(failed)} of {len(plan.items)} items failed: {failed[0]}")
    results = [json.loads(file.read_text(encoding="utf-8")) for file in (out / "results").iterdir()]
    judged = engine == "ray" and not quick
    return SweepCost(
        what={"local": "local processes", "ray": "Ray"}[engine], items=len(plan.items), workers=SWEEP_WORKERS,
        wall_seconds=wall, item_seconds=sum(result["seconds"] for result in results),
        models_loaded=sum(result["models_loaded"] for result in results),
        most_times_ideal=MAX_TIMES_IDEAL if judged else None,
        most_overhead_seconds=MAX_SECONDS_PER_ITEM if judged else None,
    )  # fmt: skip
