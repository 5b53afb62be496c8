"""Benchmark results in words: faster and slower distinguished, promises judged, Markdown that GitHub reads."""

import json

import pytest

from attnorm.machine import Machine
from attnorm_lab.bench.results import Benchmarks, Result, benchmark_markdown, relative
from attnorm_lab.bench.timing import Bench

MACHINE = Machine(processor="a processor", cores=2, threads=1, torch="2.13", python="3.11", system="Linux")


def ratio(speedup: float, least: float | None = None, **numbers: float) -> Result:
    timed = {"ours_ms": 10.0, "theirs_ms": 10 * speedup, "speedup": speedup, **numbers}
    return Bench().result("a topic", "ours", timed, {"speedup": least}, "theirs")


def memory(forward: float, backward: float) -> Result:
    limits = {"forward_mb": 400.0, "backward_mb": 400.0}
    return Bench().result("memory", "entmax15", {"forward_mb": forward, "backward_mb": backward}, limits)


@pytest.mark.parametrize(
    ("speedup", "words"),
    [(4.0, "4x faster"), (1.04, "0.96x the time"), (1 / 1.15, "1.15x the time"), (12.34, "12.3x faster")],
)
def test_a_ratio_reads_as_words(speedup: float, words: str) -> None:
    assert relative(speedup) == words


@pytest.mark.parametrize(
    ("result", "met"),
    [
        (ratio(4.1, 4.0), True),
        (ratio(3.9, 4.0), False),
        (ratio(3.9), None),
        (ratio(1 / 1.14, 1 / 1.15), True),
        (memory(300, 399), True),
        (memory(300, 401), False),
        (memory(401, 300), False),
        (Bench().result("t", "w", {"tflops": 169.0}, {"tflops": 170.0}), False),
        (Bench().result("t", "w", {"seconds": None}, {"seconds": 10.0}), False),
        (Bench(quick=True).result("t", "w", {"seconds": 11.0}, {"seconds": 10.0}), None),
    ],
)
def test_a_promise_is_met_missed_or_not_made(result: Result, met: bool | None) -> None:
    assert result.met is met
    results = Benchmarks(machine=MACHINE, results=(ratio(5.0, 4.0), result))
    assert results.missed == ([result] if met is False else [])


def test_a_promise_about_what_was_not_measured_is_an_error() -> None:
    with pytest.raises(KeyError, match="seconds"):
        _ = Bench().result("t", "w", {}, {"seconds": 10.0}).met


def test_markdown_has_the_machine_and_even_tables() -> None:
    first = Bench().result("on a GPU", "first", {"seconds": 12.34, "faster_from": None}, {"seconds": 10.0})
    results = (ratio(5.0, 4.0, error=1e-7), first, memory(75, 300), ratio(0.5))
    text = benchmark_markdown(Benchmarks(machine=MACHINE, results=results, notes=("so",)))
    assert "2 cores, 1 thread, torch 2.13" in text
    assert text.count("### a topic") == 1
    assert "| ours | theirs | 10.0 | 50.0 | 5x faster | 1.0e-07 | 4x faster: met |" in text
    assert "| ours | theirs | 10.0 | 5.0 | 2.00x the time |  |  |" in text
    assert "| first | 12.3 | - | seconds at most 10: missed |" in text
    assert "forward MB at most 400; forward + backward MB at most 400: met" in text
    assert "Note: so" in text
    for block in text.split("\n\n"):
        rows = [line.count("|") for line in block.splitlines() if line.startswith("|")]
        assert len(set(rows)) <= 1


def test_json_has_every_number_and_whether_the_promise_is_met() -> None:
    written = Benchmarks(machine=MACHINE, quick=False, results=(ratio(5.0, 4.0), memory(1, 2)), notes=("so",)).as_dict()
    assert json.loads(json.dumps(written, allow_nan=False)) == {
        "machine": {"processor": "a processor", "cores": 2, "threads": 1, "torch": "2.13", "python": "3.11",
                    "system": "Linux"},
        "quick": False,
        "results": [
            {"table": "a topic", "what": "ours", "against": "theirs", "promised": {"speedup": 4.0}, "met": True,
             "numbers": {"ours_ms": 10.0, "theirs_ms": 50.0, "speedup": 5.0}},
            {"table": "memory", "what": "entmax15", "against": "", "met": True,
             "promised": {"forward_mb": 400.0, "backward_mb": 400.0},
             "numbers": {"forward_mb": 1, "backward_mb": 2}},
        ],
        "notes": ["so"],
    }  # fmt: skip
