"""Benchmark results in words: faster and slower distinguished, promises judged, Markdown that GitHub reads."""

import pytest

from attnorm.machine import Machine
from attnorm_lab.bench.results import (
    ApproximationError,
    Benchmarks,
    CostCurve,
    Duration,
    Footprint,
    Ratio,
    benchmark_markdown,
    relative,
)

MACHINE = Machine(processor="a processor", cores=2, threads=1, torch="2.13", python="3.11", system="Linux")


def ratio(speedup: float, target: float | None = None, error: float | None = None) -> Ratio:
    return Ratio(
        topic="a topic", what="ours", against="theirs", ours_ms=10, theirs_ms=10 * speedup, speedup=speedup,
        target=target, error=error, their_error=error,
    )  # fmt: skip


def footprint(forward: float, backward: float | None) -> Footprint:
    return Footprint(
        what="entmax15", setting="L = 8", forward_mb=forward, backward_mb=backward, seconds=1.0, dense_mb=4295,
        target_mb=400,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("speedup", "words"),
    [(4.0, "4x faster"), (1.04, "0.96x the time"), (1 / 1.15, "1.15x the time"), (12.34, "12.3x faster")],
)
def test_a_ratio_reads_as_words(speedup: float, words: str) -> None:
    assert relative(speedup) == words


def test_a_promise_is_met_missed_or_not_made() -> None:
    assert ratio(4.1, 4.0).met is True
    assert ratio(3.9, 4.0).met is False
    assert ratio(3.9).met is None
    assert ratio(1 / 1.14, 1 / 1.15).met is True
    assert footprint(300, 399).met is True
    assert footprint(300, 401).met is False
    assert footprint(401, None).met is False


def test_the_missed_ones_are_told() -> None:
    missed = ratio(1.0, 4.0)
    results = Benchmarks(machine=MACHINE, results=(ratio(5.0, 4.0), missed, footprint(1, 1)))
    assert results.missed == [missed]


def test_markdown_has_the_machine_and_even_tables() -> None:
    results = Benchmarks(
        machine=MACHINE,
        results=(
            ratio(5.0, 4.0, error=1e-7),
            Duration(what="first", setting="on a GPU", seconds=12.34, most_seconds=10.0),
            footprint(75, 300),
            ratio(0.5),  # of the same table as the first
        ),
        notes=("so",),
    )
    text = benchmark_markdown(results)
    assert "2 cores, 1 thread, torch 2.13" in text
    assert "1.0e-07" in text
    assert "4,295 MB" in text
    assert text.count("### a topic") == 1
    assert text.index("4,295 MB") < text.index("| first |")  # by kind, whatever was measured first
    assert "| first | 12.3 | at most 10 s: missed |" in text
    assert "Note: so" in text
    for block in text.split("\n\n"):
        rows = [line.count("|") for line in block.splitlines() if line.startswith("|")]
        assert len(set(rows)) <= 1


def test_json_has_a_list_for_each_kind_with_whether_the_promise_is_met() -> None:
    results = Benchmarks(
        machine=MACHINE,
        results=(
            CostCurve(what="ours", setting="s", points=()),
            ApproximationError(setting="s", pooling="p", landmarks=1, newton_steps=2, error=0.1, inverse_error=0.2),
            ratio(5.0, 4.0),
        ),
    ).as_dict()
    assert [*results] == [
        "machine", "quick", "ratios", "footprints", "durations", "runs", "growth", "costs", "errors", "sweeps", "notes",
    ]  # fmt: skip
    assert [one["met"] for one in results["ratios"]] == [True]
    assert results["footprints"] == []
    assert {*results["costs"][0]} == {"what", "setting", "points", "rival", "met", "exponent"}
    assert results["costs"][0]["met"] is None
    assert {*results["errors"][0]} == {
        "setting", "pooling", "landmarks", "newton_steps", "error", "inverse_error", "met",
    }  # fmt: skip
