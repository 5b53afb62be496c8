"""Benchmark what a sweep adds to its items: 64 small `analyze` items with two workers, in local processes and on Ray.

Ideal: the seconds that the items take inside their workers, divided by the number of workers. They include loading the
model. The wall time also has the start of Ray and of the workers, scheduling, and the merged table and page.
"""

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from attnorm.bench.results import SweepCost

WORKERS = 2
MAX_TIMES_IDEAL = 1.3  # promised for Ray
MAX_SECONDS_PER_ITEM = 1.0  # promised for Ray
PLAN = """
command = "analyze"
[grid]
model = ["bundled"]
length = {lengths}
seed = {seeds}
[options]
{options}
"""
OPTIONS = 'windows = 2\nrows = 64\nnormalizers = ["model", "entmax15"]'
QUICK_OPTIONS = "windows = 1\nrows = 4\nread_keys = 0"


def measure_sweep(
    *, quick: bool = False, notes: list[str], places: Sequence[str] = ("local", "ray")
) -> Iterator[SweepCost]:
    """Yield the cost on each of the places; one that cannot be used becomes a note."""
    lengths, seeds = ([16], [0, 1]) if quick else (list(range(64, 128, 8)), list(range(8)))
    text = PLAN.format(lengths=lengths, seeds=seeds, options=QUICK_OPTIONS if quick else OPTIONS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.toml"
        path.write_text(text, encoding="utf-8")
        for engine in places:
            try:
                yield _measure(path, engine, quick=quick)
            except (ImportError, RuntimeError) as error:
                notes.append(f"sweep on {engine} was not measured: {error}")


def _measure(path: Path, engine: str, *, quick: bool) -> SweepCost:
    from attnorm.sweep.plan import read_plan
    from attnorm.sweep.run import sweep

    plan, out = read_plan(path), path.parent / engine
    start = time.perf_counter()
    done = sweep(plan, out, on=engine, workers=WORKERS, address="local" if engine == "ray" else None)
    wall = time.perf_counter() - start
    if failed := [state.error for state in done.states if state.state != "finished"]:
        raise RuntimeError(f"{len(failed)} of {len(plan.items)} items failed: {failed[0]}")
    results = [json.loads(file.read_text(encoding="utf-8")) for file in (out / "results").iterdir()]
    judged = engine == "ray" and not quick
    return SweepCost(
        what={"local": "local processes", "ray": "Ray"}[engine], items=len(plan.items), workers=WORKERS,
        wall_seconds=wall, item_seconds=sum(result["seconds"] for result in results),
        models_loaded=sum(result["models_loaded"] for result in results),
        most_times_ideal=MAX_TIMES_IDEAL if judged else None,
        most_overhead_seconds=MAX_SECONDS_PER_ITEM if judged else None,
    )  # fmt: skip
