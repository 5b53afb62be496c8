"""Benchmark analyze(): one run against the forward pass alone and `output_attentions=True`, and many in a sweep.

One run: time, memory and its growth with the length, for four ways to run the same random model over the same tokens.
plain: the forward pass with torch SDPA, nothing measured. core: analyze() of every row, all numbers of the weights and
the gradient. full: analyze() with distances and separability too, on 64 rows. eager: what one does without attnorm,
`output_attentions=True` and the core numbers computed from the weights. Heavy imports are lazy: the process of the
plain pass must not load what only the others use.

A pretrained model: the default call of analyze() against the model's own forward pass, and the time and memory of a
whole run from the start of Python.

A sweep: 64 small items with two workers, in local processes and on Ray. Ideal are the seconds that the items take
inside their workers, divided by the number of workers; they include loading the model. The wall time also has the start
of Ray and of the workers, scheduling, and the merged table and page.
"""

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from attnorm_lab.bench.results import Growth, GrowthPoint, ModelRun, Ratio, SweepCost
from attnorm_lab.bench.timing import MEGABYTE, Call, peak_above, resident, run_and_read_json, time_alternating

Way = Literal["plain", "core", "full", "eager"]

CORE, FULL, EAGER = 1 / 4, 1 / 2, 4.0  # promised speedups: over the plain pass (core, full), over eager
DEFAULT = 1 / 2  # promised speedup of the default call over the plain pass
DEFAULT_WINDOWS = 2
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

HEAD_WIDTH = 64
VOCABULARY = 1024
LOGIT_DEVIATION = 2.0  # initial weights give logits near 0, unlike trained models
TOP_N = (1, 5, 10, 20, 100)
SECONDS = 5.0  # a pass is repeated until the total reaches this
WARM_UP = 32  # tokens: libraries and thread pools start before the measurement


@dataclass(frozen=True)
class Shape:
    length: int
    layers: int = 8
    heads: int = 8

    def __str__(self) -> str:
        return f"{self.layers} layers x {self.heads} heads, width {HEAD_WIDTH}, float32"


@dataclass(frozen=True)
class Cost:
    seconds: float
    peak_mb: float  # of the whole process during the pass
    extra_mb: float  # of it, beyond what the process held before


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
    lengths = (16,) if quick else MODEL_LENGTHS
    try:
        yield _default_call(named, text, lengths[0], quick)
    except RuntimeError as error:
        notes.append(f"the default call on {named.name} was not measured: {error}")
    for length in lengths:
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


def _default_call(folder: Path, text: Path | None, length: int, quick: bool) -> Ratio:
    """Measure the default call on a loaded model; a new process shows whether the folder can be loaded."""
    arguments = f"{_as_arguments(folder, text, length)}, {1 if quick else 3}"
    timed = run_and_read_json(f"from attnorm_lab.bench.analyze import report_default; report_default({arguments})")
    return Ratio(
        topic=f"Measuring {folder.name}, {DEFAULT_WINDOWS} windows of {length:,} tokens",
        what="analyze, default settings", against="model(input_ids) on each window",
        target=None if quick else DEFAULT, **timed,
    )  # fmt: skip


def _as_arguments(folder: Path, text: Path | None, length: int) -> str:
    return f"{str(folder)!r}, {None if text is None else str(text)!r}, {length}, {torch.get_num_threads()}"


def _read(text: str | None) -> dict[str, str] | None:
    return None if text is None else {Path(text).name: Path(text).read_text(encoding="utf-8")}


def report_default(folder: str, text: str | None, length: int, threads: int, rounds: int) -> None:
    """Run in the new process: time the default call and the plain passes in alternation, and print JSON."""
    from attnorm.analysis.analyze import analyze
    from attnorm.models.load import load

    torch.set_num_threads(threads)
    loaded = load(folder)
    generator = torch.Generator().manual_seed(0)
    windows = torch.randint(loaded.model.config.vocab_size, (DEFAULT_WINDOWS, length), generator=generator)

    @torch.no_grad()
    def plain() -> None:
        for window in windows:
            loaded.model(input_ids=window[None].to(loaded.model.device), use_cache=False)

    ours = partial(analyze, loaded, _read(text), lengths=length, windows=DEFAULT_WINDOWS)
    sys.stdout.write(json.dumps(asdict(time_alternating(ours, plain, rounds=rounds))))


def _whole_run(folder: Path, text: Path | None, length: int, target: float | None) -> ModelRun:
    """Measure from the start of Python to the tables, including loading the model."""
    arguments = _as_arguments(folder, text, length)
    start = time.perf_counter()
    measured = run_and_read_json(f"from attnorm_lab.bench.analyze import report; report({arguments})")
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
    heads = analyze(folder, _read(text), lengths=length, rows="last", metrics="all").heads.num_rows
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MEGABYTE
    sys.stdout.write(json.dumps({"heads": heads, "peak_mb": peak}))


def random_model(shape: Shape) -> Any:
    """Return a GPT-2 in evaluation mode; its weights depend only on the shape."""
    from attnorm_lab.training.lm.model import LMSettings, build_model

    width = shape.heads * HEAD_WIDTH
    settings = LMSettings(layers=shape.layers, heads=shape.heads, width=width, context=shape.length, vocab=VOCABULARY)
    model = build_model(settings, VOCABULARY, 0).eval()
    with torch.no_grad():
        for layer in model.transformer.h:
            queries_and_keys = layer.attn.c_attn.weight[:, : 2 * width]
            queries_and_keys *= math.sqrt(LOGIT_DEVIATION / width) / queries_and_keys.std()
    return model


def tokens(length: int) -> Tensor:
    return torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(0))


def pass_of(way: Way, model: Any, ids: Tensor) -> Call:
    if way == "plain":
        from attnorm.models.forward_pass import run
        from attnorm.models.load import LoadedModel

        return partial(run, LoadedModel(model, None, way), {"input_ids": ids[None]})
    if way == "eager":
        return partial(statistics_by_layer, model, ids)

    from attnorm.analysis.analyze import analyze

    if way == "core":
        return partial(analyze, model, ids, lengths=len(ids), top_n=TOP_N, rows="all", metrics="core")
    return partial(analyze, model, ids, lengths=len(ids), top_n=TOP_N, rows=64, metrics="all")


@torch.no_grad()
def statistics_by_layer(model: Any, ids: Tensor) -> list[dict[str, Tensor]]:
    """Compute the core numbers of each row from the returned weights; the model stays in eager mode."""
    model.set_attn_implementation("eager")
    outputs = model.base_model(input_ids=ids[None], use_cache=False, output_attentions=True)
    return [statistics_of(weights) for weights in outputs.attentions]


def statistics_of(weights: Tensor) -> dict[str, Tensor]:
    """Return the numbers (B, H, L) and top_mass (B, H, L, N) of causal weights (B, H, L, L)."""
    from attnorm.theory.rank_one_eigenvalues import rank_one_eigenvalue

    length = weights.shape[-1]
    ahead = torch.ones(length, length, dtype=torch.bool).triu(1)
    largest = weights.amax(-1)
    smallest = weights.masked_fill(ahead, torch.inf).amin(-1)
    heaviest = weights.topk(min(max(TOP_N), length), dim=-1).values.cumsum(-1)
    return {
        "entropy_nats": torch.special.entr(weights).sum(-1),
        "effective_keys": 1 / weights.square().sum(-1),
        "max_weight": largest,
        "logit_spread": torch.log(largest) - torch.log(smallest),
        "sink_mass": weights[..., 0],
        "jacobian_norm": rank_one_eigenvalue(weights),
        "top_mass": heaviest[..., [min(N, length) - 1 for N in TOP_N]],
    }


def cost(way: Way, shape: Shape, least_seconds: float = SECONDS) -> Cost:
    """Measure one pass in this process. Linux only."""
    model, ids = random_model(shape), tokens(shape.length)
    pass_of(way, model, ids[:WARM_UP])()
    call = pass_of(way, model, ids)
    seconds: list[float] = []
    extra = peak_above(partial(_time_call, call, seconds))
    peak = resident("VmHWM")
    while sum(seconds) < least_seconds and len(seconds) < 5:
        _time_call(call, seconds)
    return Cost(median(seconds), peak / MEGABYTE, extra / MEGABYTE)


def _time_call(call: Callable[[], object], seconds: list[float]) -> None:
    start = time.perf_counter()
    call()
    seconds.append(time.perf_counter() - start)


def cost_in_new_process(way: Way, shape: Shape, least_seconds: float = SECONDS) -> Cost:
    arguments = f"{way!r}, {shape!r}, {torch.get_num_threads()}, {least_seconds}"
    return Cost(
        **run_and_read_json(f"from attnorm_lab.bench.analyze import Shape, report_cost; report_cost({arguments})")
    )


def report_cost(way: Way, shape: Shape, threads: int, least_seconds: float) -> None:
    """Run in the new process: measure, and print JSON."""
    torch.set_num_threads(threads)
    sys.stdout.write(json.dumps(asdict(cost(way, shape, least_seconds))))


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
    *, quick: bool = False, notes: list[str], engines: Sequence[str] = ("local", "ray")
) -> Iterator[SweepCost]:
    """Yield the cost on each engine; one that cannot be used becomes a note."""
    lengths, seeds = ([16], [0, 1]) if quick else (list(range(64, 128, 8)), list(range(8)))
    text = SWEEP_PLAN.format(lengths=lengths, seeds=seeds, options=QUICK_SWEEP_OPTIONS if quick else SWEEP_OPTIONS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.toml"
        path.write_text(text, encoding="utf-8")
        for engine in engines:
            try:
                yield _measure_sweep(path, engine, quick=quick)
            except (ImportError, RuntimeError) as error:
                notes.append(f"sweep on {engine} was not measured: {error}")


def _measure_sweep(path: Path, engine: str, *, quick: bool) -> SweepCost:
    from attnorm_lab.runs.plan import read_plan
    from attnorm_lab.runs.run import sweep

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
