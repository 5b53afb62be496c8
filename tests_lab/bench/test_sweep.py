"""The cost of a sweep: the arithmetic of its limits, and a quick run in real processes."""

import sys

import pytest

from attnorm_lab.bench.analyze import measure_sweep, sweep_numbers
from attnorm_lab.bench.promises import LIMITS
from attnorm_lab.bench.suites import run_benchmarks
from attnorm_lab.bench.timing import Bench


@pytest.mark.parametrize(
    ("wall", "count", "times", "overhead", "met"),
    [(65, 64, 1.3, 30 / 64, True), (66, 64, 1.32, 0.5, False), (64, 20, 1.28, 1.4, False)],
)
def test_the_ideal_is_the_time_of_the_items_over_the_workers_and_both_limits_count(
    wall: float, count: int, times: float, overhead: float, met: bool
) -> None:
    found = sweep_numbers(wall, 100.0, count)
    assert (found["times_ideal"], found["overhead_per_item_s"]) == pytest.approx((times, overhead))
    assert Bench().result("a sweep", "Ray", found, LIMITS["sweep"]).met is met


@pytest.mark.nightly  # tests_lab/runs starts workers on every commit
def test_a_quick_run_measures_local_processes_and_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnorm_lab.bench.analyze.SWEEP_WORKERS", 1)
    monkeypatch.setitem(sys.modules, "ray", None)
    results = run_benchmarks("sweep", quick=True)
    (found,) = results.results
    assert (found.table, found.what, found.met) == ("A sweep of 2 items with 1 workers", "local processes", None)
    assert 0 < (found.numbers["ideal_s"] or 0) < (found.numbers["wall_s"] or 0)
    assert found.numbers["models_loaded"] == 1  # of two items
    assert "attnorm[lab]" in results.notes[0]


@pytest.mark.nightly
def test_a_quick_run_measures_ray() -> None:
    pytest.importorskip("ray")
    bench = Bench(quick=True)
    (found,) = measure_sweep(bench, engines=("ray",))
    assert (found.what, bench.notes) == ("Ray", [])
    assert (found.numbers["overhead_per_item_s"] or 0) > 0
