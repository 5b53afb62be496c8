"""The cost of a sweep: the arithmetic of its limits, and a quick run in real processes."""

import sys

import pytest

from attnorm.machine import this_machine
from attnorm_lab.bench.analyze import measure_sweep
from attnorm_lab.bench.results import Benchmarks, SweepCost, benchmark_markdown
from attnorm_lab.bench.suites import run_benchmarks

LIMITS = {"most_times_ideal": 1.3, "most_overhead_seconds": 1.0}


def cost(wall: float, items: float, count: int = 64, **limits: float) -> SweepCost:
    return SweepCost(
        what="Ray", items=count, workers=2, wall_seconds=wall, item_seconds=items, models_loaded=2, **limits
    )


def test_the_ideal_is_the_time_of_the_items_over_the_workers() -> None:
    found = cost(wall=65, items=100)
    assert found.times_ideal == pytest.approx(1.3)
    assert found.overhead_seconds == pytest.approx(30 / 64)
    assert found.met is None


@pytest.mark.parametrize(
    ("wall", "items", "count", "met"), [(64, 100, 64, True), (66, 100, 64, False), (64, 100, 20, False)]
)
def test_both_limits_count(wall: float, items: float, count: int, met: bool) -> None:
    found = cost(wall, items, count, **LIMITS)
    assert found.met is met
    results = Benchmarks(machine=this_machine(), results=(found,))
    assert results.missed == ([] if met else [found])
    assert f"1.3x, 1 s per item: {'met' if met else 'missed'}" in benchmark_markdown(results)
    (written,) = results.as_dict()["sweeps"]
    assert (written["times_ideal"], written["met"]) == (found.times_ideal, met)


@pytest.mark.nightly  # tests/sweep starts workers on every commit
def test_a_quick_run_measures_local_processes_and_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnorm_lab.bench.analyze.SWEEP_WORKERS", 1)
    monkeypatch.setitem(sys.modules, "ray", None)
    results = run_benchmarks("sweep", quick=True)
    (found,) = results.of_kind(SweepCost)
    assert (found.what, found.items, found.met) == ("local processes", 2, None)
    assert 0 < found.item_seconds < found.workers * found.wall_seconds
    assert found.models_loaded == 1  # of two items
    assert "attnorm[lab]" in results.notes[0]


@pytest.mark.nightly
def test_a_quick_run_measures_ray() -> None:
    pytest.importorskip("ray")
    notes: list[str] = []
    (found,) = measure_sweep(quick=True, notes=notes, engines=("ray",))
    assert (found.what, found.items, notes) == ("Ray", 2, [])
    assert found.overhead_seconds > 0
