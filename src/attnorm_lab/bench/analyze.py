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
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from attnorm_lab.bench.promises import LIMITS, SPEEDUPS
from attnorm_lab.bench.results import Result
from attnorm_lab.bench.timing import MEGABYTE, Bench, Call, in_new_process, peak_above, resident, time_alternating

Way = Literal["plain", "core", "full", "eager"]

DEFAULT_WINDOWS = 2
LENGTHS = (1024, 2048, 4096, 8192, 16_384)
MODEL_LENGTHS = (1024, 8192)
FOLDER = "ATTNORM_SMOLLM2"

WORDS: dict[str, str] = {
    "plain": "plain forward pass, torch SDPA",
    "core": "analyze, core and gradient, all rows",
    "full": "analyze, everything, rows=64",
    "eager": "output_attentions=True and the core numbers",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "core": {"rows": "all", "metrics": "core"},
    "full": {"rows": 64, "metrics": "all"},
}
GROWTH = "Growth with the length, beside the plain pass: "

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


Cost = dict[str, float]  # seconds; peak_mb of the whole process in the pass; extra_mb of it, beyond what it held before


def measure_analysis(bench: Bench) -> Iterator[Result]:
    """Yield the measurements of random models and of a folder of SmolLM2: bench.model, or $ATTNORM_SMOLLM2."""
    shape = Shape(64, layers=2, heads=2) if bench.quick else Shape(4096)
    yield from _against_plain(bench, shape)
    yield from _in_own_processes(bench, shape)
    if folder := bench.model or (Path(os.environ[FOLDER]) if os.environ.get(FOLDER) else None):
        yield from _pretrained(bench, folder)
    else:
        bench.notes.append(f"no pretrained model was measured: give a folder of SmolLM2 with --model or ${FOLDER}")


def _against_plain(bench: Bench, shape: Shape) -> Iterator[Result]:
    model, ids = random_model(shape), tokens(shape.length)
    ways: tuple[Way, ...] = ("core", "full")
    for way in ways:
        plain = {WORDS["plain"]: (pass_of("plain", model, ids), SPEEDUPS[f"analyze, {way}"])}
        yield from bench.compare(_table(shape), WORDS[way], pass_of(way, model, ids), plain, rounds=5)


def _table(shape: Shape) -> str:
    return f"Measuring a model, GPT-2 with random weights, {shape}, L = {shape.length:,}"


def _in_own_processes(bench: Bench, shape: Shape) -> Iterator[Result]:
    """Measure all ways at one length, then the plain pass and the core at every length."""
    known: dict[tuple[Way, int], Cost] = {}
    every_way: tuple[Way, ...] = ("plain", "core", "full", "eager")
    for length in dict.fromkeys((shape.length, *((2 * shape.length,) if bench.quick else LENGTHS))):
        ways = every_way if length == shape.length else every_way[:2]
        for way in ways:
            about = f"{WORDS[way]}, at {length:,} tokens"
            if found := bench.attempt(about, _cost_of, way, replace(shape, length=length), bench.quick):
                known[way, length] = found
        if length == shape.length:
            yield from _compare_costs(bench, shape, {way: known[way, length] for way in ways if (way, length) in known})
    yield from _growth(bench, shape, known)


def _cost_of(way: Way, shape: Shape, quick: bool) -> Cost:
    arguments = (way, shape.length, shape.layers, shape.heads)
    return cost(*arguments, 0.0) if quick else in_new_process(cost, *arguments)


def _compare_costs(bench: Bench, shape: Shape, costs: dict[Way, Cost]) -> Iterator[Result]:
    if "core" in costs and "eager" in costs:
        # Eager runs once in its own process; alternating rounds would take minutes and give the same ratio.
        ours, theirs = costs["core"]["seconds"], costs["eager"]["seconds"]
        numbers = {"ours_ms": 1e3 * ours, "theirs_ms": 1e3 * theirs, "speedup": theirs / ours}
        least = {"speedup": SPEEDUPS["analyze, eager"]}
        yield bench.result(_table(shape), WORDS["core"], numbers, least, WORDS["eager"])
    for way, measured in costs.items():
        times = {"times_plain": measured["peak_mb"] / costs["plain"]["peak_mb"]} if "plain" in costs else {}
        table = f"Each in its own process, {shape}, L = {shape.length:,}"
        yield bench.result(table, WORDS[way], {**measured, **times}, LIMITS.get(f"analyze, {way}") if times else None)


def _growth(bench: Bench, shape: Shape, known: dict[tuple[Way, int], Cost]) -> Iterator[Result]:
    """Yield the cost of the core beside the plain pass by the length.

    The promise is the power with which memory grows over the last step, where constants matter least.
    """
    lengths = sorted(n for way, n in known if way == "core" and ("plain", n) in known)
    if len(lengths) < 2:
        return
    last_two = [known["core", length]["extra_mb"] for length in lengths[-2:]]
    for length in lengths:
        core, plain = known["core", length], known["plain", length]
        numbers = {
            "plain_seconds": plain["seconds"], "seconds": core["seconds"], "plain_mb": plain["extra_mb"],
            "extra_mb": core["extra_mb"], "times": core["seconds"] / plain["seconds"],
        }  # fmt: skip
        if grown := length == lengths[-1] and min(last_two) > 0:
            numbers["power"] = math.log(last_two[1] / last_two[0]) / math.log(length / lengths[-2])
        limits = LIMITS["analyze, growth"] if grown else None
        yield bench.result(f"{GROWTH}{WORDS['core']}, {shape}", f"{length:,} tokens", numbers, limits)


def _pretrained(bench: Bench, folder: Path) -> Iterator[Result]:
    lengths = (16,) if bench.quick else MODEL_LENGTHS
    text = None if bench.text is None else str(bench.text)
    about, first = f"the default call on {folder.name}", lengths[0]
    if timed := bench.attempt(about, in_new_process, time_default, str(folder), text, first, 1 if bench.quick else 3):
        table = f"Measuring {folder.name}, {DEFAULT_WINDOWS} windows of {first:,} tokens"
        least = {"speedup": SPEEDUPS["analyze, default"]}
        yield bench.result(table, "analyze, default settings", timed, least, "model(input_ids) on each window")
    table = f"{folder.name}, everything, rows=last, from the start of Python to the tables"
    for length in lengths:
        about, start = f"{folder.name} at {length:,} tokens", time.perf_counter()
        if found := bench.attempt(about, in_new_process, whole_run, str(folder), text, length):
            numbers = {"seconds": time.perf_counter() - start, "peak_mb": found["peak_mb"]}
            limits = LIMITS["analyze, whole run"] if length == MODEL_LENGTHS[0] else None
            yield bench.result(table, f"{length:,} tokens, {found['heads']} heads", numbers, limits)


def time_default(folder: str, text: str | None, length: int, rounds: int) -> dict[str, float]:
    """Time the default call on a loaded model and the plain passes in alternation."""
    from attnorm.analysis.analyze import analyze
    from attnorm.models.load import load

    loaded = load(folder)
    generator = torch.Generator().manual_seed(0)
    windows = torch.randint(loaded.model.config.vocab_size, (DEFAULT_WINDOWS, length), generator=generator)

    @torch.no_grad()
    def plain() -> None:
        for window in windows:
            loaded.model(input_ids=window[None].to(loaded.model.device), use_cache=False)

    ours = partial(analyze, loaded, _read(text), lengths=length, windows=DEFAULT_WINDOWS)
    return time_alternating(ours, plain, rounds=rounds)[0]


def whole_run(folder: str, text: str | None, length: int) -> dict[str, float]:
    """Analyze, including loading the model, and return the number of heads and the peak memory of this process."""
    import resource

    from attnorm.analysis.analyze import analyze

    heads = analyze(folder, _read(text), lengths=length, rows="last", metrics="all").heads.num_rows
    return {"heads": heads, "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MEGABYTE}


def _read(text: str | None) -> dict[str, str] | None:
    return None if text is None else {Path(text).name: Path(text).read_text(encoding="utf-8")}


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

    return partial(analyze, model, ids, lengths=len(ids), top_n=TOP_N, **OPTIONS[way])


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


def cost(way: Way, length: int, layers: int, heads: int, least_seconds: float = SECONDS) -> Cost:
    """Measure one pass in this process. Linux only."""
    model, ids = random_model(Shape(length, layers, heads)), tokens(length)
    pass_of(way, model, ids[:WARM_UP])()
    call = pass_of(way, model, ids)
    seconds: list[float] = []

    def timed() -> None:
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)

    extra = peak_above(timed)
    peak = resident("VmHWM")
    while sum(seconds) < least_seconds and len(seconds) < 5:
        timed()
    return {"seconds": median(seconds), "peak_mb": peak / MEGABYTE, "extra_mb": extra / MEGABYTE}


SWEEP_WORKERS = 2
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


def measure_sweep(bench: Bench, engines: Sequence[str] = ("local", "ray")) -> Iterator[Result]:
    """Yield the cost on each engine; one that cannot be used becomes a note. The promises are made for Ray."""
    lengths, seeds = ([16], [0, 1]) if bench.quick else (list(range(64, 128, 8)), list(range(8)))
    options = QUICK_SWEEP_OPTIONS if bench.quick else SWEEP_OPTIONS
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.toml"
        path.write_text(SWEEP_PLAN.format(lengths=lengths, seeds=seeds, options=options), encoding="utf-8")
        table = f"A sweep of {len(lengths) * len(seeds)} items with {SWEEP_WORKERS} workers"
        for engine in engines:
            what = {"local": "local processes", "ray": "Ray"}[engine]
            if numbers := bench.attempt(f"sweep on {engine}", _time_sweep, path, engine):
                yield bench.result(table, what, numbers, LIMITS["sweep"] if engine == "ray" else None)


def _time_sweep(path: Path, engine: str) -> dict[str, float]:
    from attnorm_lab.runs.plan import read_plan
    from attnorm_lab.runs.run import sweep

    plan, out = read_plan(path), path.parent / engine
    start = time.perf_counter()
    done = sweep(plan, out, on=engine, workers=SWEEP_WORKERS, address="local" if engine == "ray" else None)
    wall = time.perf_counter() - start
    if failed := [state.error for state in done.states if state.state != "finished"]:
        raise RuntimeError(f"{len(failed)} of {len(plan.items)} items failed: {failed[0]}")
    results = [json.loads(file.read_text(encoding="utf-8")) for file in (out / "results").iterdir()]
    item_seconds = sum(result["seconds"] for result in results)
    loaded = sum(result["models_loaded"] for result in results)
    return {**sweep_numbers(wall, item_seconds, len(plan.items)), "models_loaded": loaded}


def sweep_numbers(wall: float, item_seconds: float, items: int) -> dict[str, float]:
    """Return the columns of a sweep; the ideal contains the loads of the model, so the overhead does not."""
    worker_seconds = wall * SWEEP_WORKERS
    return {
        "wall_s": wall, "ideal_s": item_seconds / SWEEP_WORKERS, "times_ideal": worker_seconds / item_seconds,
        "overhead_per_item_s": (worker_seconds - item_seconds) / items,
    }  # fmt: skip
