"""The benchmarks: they run in seconds when asked to, time in turn, measure real memory, survive a missing rival."""

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import attnorm
from attnorm_lab.bench import attention, normalizers, suites, timing
from attnorm_lab.bench.attention import adaptive_as_printed, blocked_normalizers, dense
from attnorm_lab.bench.normalizers import by_bisection, compare_normalizers
from attnorm_lab.bench.results import Result
from attnorm_lab.bench.suites import run_benchmarks
from attnorm_lab.bench.timing import Bench, in_new_process, peak_above, run_and_read_json, time_alternating

linux_only = pytest.mark.skipif(not timing.RESET.exists(), reason="needs /proc/self/clear_refs")


def test_a_quick_run_covers_everything_and_judges_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """But analyze, sweep and linear, which test_analyze.py, test_sweep.py and cli/test_reproduce.py run."""
    asked: list[Bench] = []
    for name in ("analyze", "linear", "sweep"):
        monkeypatch.setitem(suites.SUITES, name, lambda bench: iter(asked.append(bench) or ()))
    heard: list[Result] = []
    results = run_benchmarks("all", threads=1, quick=True, finished=heard.append)
    assert [bench.quick for bench in asked] == [True, True, True]
    assert results.quick
    assert all(result.met is None for result in results.results)
    assert tuple(heard) == results.results
    ratios = [result for result in results.results if result.against]
    timed = {result.what.partition(",")[0] for result in ratios}
    fused = {"sparsemax", "softmax", "ssmax", "log_scaled", "sink", "adaptive_temperature"}
    assert timed >= fused | {*blocked_normalizers()}
    for result in ratios:
        assert all((result.numbers[name] or 0) > 0 for name in ("ours_ms", "theirs_ms", "speedup"))
    assert max(result.numbers.get("error") or 0 for result in ratios) < 1e-6


def process_id(name: str, value: int) -> dict[str, Any]:
    return {name: value, "parent": os.getppid()}


def test_what_a_new_process_prints_is_read_and_its_error_is_raised() -> None:
    assert run_and_read_json("import os; print('[%d]' % os.getppid())") == [os.getpid()]
    assert in_new_process(process_id, "of", 3) == {"of": 3, "parent": os.getpid()}
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        run_and_read_json("1 / 0")


def test_the_thread_count_is_stated_and_put_back() -> None:
    before = torch.get_num_threads()
    results = run_benchmarks("normalizers", threads=2, quick=True)
    assert results.machine.threads == 2
    assert torch.get_num_threads() == before
    assert str(results.machine.cores) in str(results.machine)


def test_rivals_take_turns_with_ours_and_share_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0
    calls: list[str] = []

    def taking(name: str, seconds: float) -> Callable[[], None]:
        def call() -> None:
            nonlocal clock
            clock += seconds
            calls.append(name)

        return call

    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock)
    twice, half = time_alternating(taking("ours", 0.02), taking("twice", 0.04), taking("half", 0.01), rounds=3)
    assert twice == pytest.approx({"ours_ms": 20, "theirs_ms": 40, "speedup": 2})
    assert half == pytest.approx({"ours_ms": 20, "theirs_ms": 10, "speedup": 0.5})
    assert calls[6:] == ["ours", "twice", "half", "half", "twice", "ours", "ours", "twice", "half"]
    (short,) = time_alternating(taking("ours", 0.002), taking("theirs", 0.008), rounds=3)
    assert short == pytest.approx({"ours_ms": 2, "theirs_ms": 8, "speedup": 4})


def test_a_missing_rival_is_reported_and_not_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    import_module = importlib.import_module

    def without_entmax(name: str, *rest: Any) -> Any:
        if name == "entmax":
            raise ImportError(name)
        return import_module(name, *rest)

    monkeypatch.setattr(normalizers.importlib, "import_module", without_entmax)
    ours_alone = list(compare_normalizers(bench := Bench(quick=True)))
    assert "pip install entmax" in bench.notes[0]
    assert {(ratio.what, ratio.against) for ratio in ours_alone} == {
        (f"kneemax, {way}", name)
        for way in ("forward", "forward + backward")
        for name in ("ssmax", "entmax15", "asentmax")
    }


@pytest.mark.parametrize(("name", "alpha"), [("sparsemax", 2.0), ("entmax15", 1.5)])
def test_the_reference_by_bisection_is_exact(name: str, alpha: float) -> None:
    entmax = importlib.import_module("entmax")
    z = torch.randn(20, 33, dtype=torch.float64)
    assert torch.allclose(by_bisection(z, alpha), getattr(entmax, name)(z, dim=-1), atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_both_sides_of_the_adaptive_comparison_compute_the_same(causal: bool) -> None:
    q, k, v = torch.randn(3, 1, 2, 200, 16).unbind()
    printed = adaptive_as_printed(q, k, v, causal=causal)
    assert torch.allclose(attnorm.attention(q, k, v, "adaptive_temperature", causal=causal), printed, atol=1e-4)


@pytest.mark.parametrize("name", ["entmax15", "sigmoid", "stick_breaking"])
def test_both_sides_of_the_blocked_comparison_compute_the_same(name: str) -> None:
    normalizer = attnorm.get(name)
    assert isinstance(normalizer, attnorm.Normalizer)
    q, k, v = torch.randn(3, 1, 2, 50, 16).unbind()
    expected = dense(q, k, v, normalizer, causal=True)
    assert torch.allclose(attnorm.attention(q, k, v, normalizer, causal=True), expected, atol=1e-5)


def test_what_runs_on_fused_kernels_is_not_called_blocked() -> None:
    blocked = blocked_normalizers()
    assert not {"softmax", "ssmax", "log_scaled", "softmax1", "sink", "adaptive_temperature", "linear"} & set(blocked)
    assert {"sparsemax", "sigmoid", "topk", "local"} <= set(blocked)


@linux_only
def test_the_peak_of_a_call_is_what_it_touched_for_a_moment() -> None:
    size = 64 * 10**6

    def touch_and_forget() -> None:
        torch.ones(size // 4)

    for _ in range(3):  # what the allocator keeps of one call must not hide the next
        touch_and_forget()
        assert 0.9 * size < peak_above(touch_and_forget) < 1.5 * size
    assert 0 <= peak_above(lambda: None) < 0.1 * size


@linux_only
def test_small_blocks_freed_before_do_not_hide_what_a_call_takes() -> None:
    count, size = 3000, 16_000  # each below the size from which glibc returns a block when it is freed

    def small_blocks() -> None:
        [torch.ones(size // 4) for _ in range(count)]

    before = [torch.ones(size // 4) for _ in range(4 * count)]
    last = before[-1]  # the heap does not shrink below a block in use
    del before
    assert 0.9 * count * size < peak_above(small_blocks) < 1.5 * count * size
    assert last.numel()


@linux_only
def test_memory_is_not_measured_where_the_allocator_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[torch.Tensor] = []
    ones = torch.ones
    monkeypatch.setattr(timing, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(torch, "ones", lambda count: kept.append(ones(count)) or kept[-1])
    with pytest.raises(RuntimeError, match="allocator"):
        peak_above(lambda: None)


@linux_only
def test_memory_is_not_measured_where_the_kernel_keeps_its_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "RESET", tmp_path / "does_nothing")
    torch.ones(2 * timing.PROBE_BYTES // 4)
    with pytest.raises(RuntimeError, match="VmHWM"):
        peak_above(lambda: None)


@linux_only
def test_a_process_that_fails_becomes_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing.sys, "executable", "false")
    assert list(attention.measure_footprints(bench := Bench(quick=True))) == []
    assert "entmax15 was not measured: exit code 1" in bench.notes[0]


def test_without_procfs_memory_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "RESET", Path("/nowhere/clear_refs"))
    assert list(attention.measure_footprints(bench := Bench(quick=True))) == []
    assert "Linux" in bench.notes[0]
