"""The benchmarks on CUDA, rehearsed on a CPU: what is compared with what, and how the first call is timed."""

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import attnorm
from attnorm.cli import app
from attnorm.files import read_jsonl
from attnorm_lab.bench import cuda, promises, suites, timing
from attnorm_lab.bench.results import Result
from attnorm_lab.bench.timing import Bench

SHAPE = (1, 1, 32, 16)


@pytest.fixture
def cpu_as_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """With softmax in place of the rivals that a CPU does not have, and one call of each side."""
    monkeypatch.setattr(cuda, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a CPU")
    monkeypatch.setattr(cuda, "_softmax_on", lambda backend, q, k, v: attnorm.attention(q, k, v, causal=True))
    monkeypatch.setattr(cuda, "_flex_softmax", lambda: attnorm.attention)
    monkeypatch.setitem(sys.modules, "adasplash", SimpleNamespace(adasplash2=attnorm.attention))
    for shapes in ("CUDA_SHAPES", "SLOW_ON_CUDA"):
        monkeypatch.setattr(cuda, shapes, (SHAPE,) if shapes == "CUDA_SHAPES" else ())
    for shape in ("TFLOPS_SHAPE", "EMPTY_TILES_SHAPE", "QUICK_CUDA_SHAPE", "FIRST_CALL_SHAPE"):
        monkeypatch.setattr(cuda, shape, SHAPE)
    monkeypatch.setattr(cuda, "QUEUED_KEYS", 0)
    timed = {"ours_ms": 4.0, "theirs_ms": 8.0, "speedup": 2.0}
    monkeypatch.setattr(timing, "time_alternating", lambda ours, *rivals, rounds: [timed for _ in rivals])


def _promised(name: str, logits: str = "") -> dict[str, tuple[float | None, float | None]]:
    """The targets of a normalizer by rival, forward and with backward."""
    found: dict[str, list[float | None]] = {}
    for result in cuda.compare_cuda_attention(Bench()):
        if result.against and result.what.startswith(f"{name} (") and result.table.endswith(logits):
            found.setdefault(result.against, []).append(result.promised.get("speedup"))
    return {rival: (targets[0], targets[1]) for rival, targets in found.items()}


@pytest.mark.usefixtures("cpu_as_device")
@pytest.mark.parametrize(
    ("name", "logits", "promised"),
    [
        (
            "softmax", "L = 32",
            {"flash softmax": (None, None), "cuDNN softmax": (0.9, 0.9), "flex softmax": (None, None)},
        ),
        ("sigmoid", "L = 32", {"flash softmax": (0.7, 0.7), "cuDNN softmax": (None, None)}),
        (
            "asentmax", "L = 32",
            {"flash softmax": (None, None), "cuDNN softmax": (None, None), "adasplash2's entmax15": (1.3, 1.2)},
        ),
        ("topk", "L = 32", {"flash softmax": (None, None), "cuDNN softmax": (None, None), "entmax15": (0.7, 0.7)}),
        ("entmax15", "empty", {"flash softmax": (1.0, None), "cuDNN softmax": (None, 1.0)}),
    ],
)  # fmt: skip
def test_each_normalizer_is_compared_with_the_rivals_of_its_promise(
    name: str, logits: str, promised: dict[str, tuple[float | None, float | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promises, "ATTENTION", {name: promises.ATTENTION[name]})
    assert _promised(name, logits) == promised


@pytest.mark.usefixtures("cpu_as_device")
def test_times_are_per_call_and_the_promised_speed_of_threshold_maps_is_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forward four calls are queued, with backward two; 4 ms in all."""
    monkeypatch.setattr(promises, "ATTENTION", {"entmax15": promises.ATTENTION["entmax15"]})
    monkeypatch.setattr(promises, "EMPTY_TILES", {})
    *ratios, alone = sorted(cuda.compare_cuda_attention(Bench()), key=lambda result: not result.against)
    assert {
        (result.what.rpartition(", ")[2], result.numbers["ours_ms"], result.numbers["theirs_ms"]) for result in ratios
    } == {("forward", 1.0, 2.0), ("forward + backward", 2.0, 4.0)}
    assert alone.numbers == pytest.approx({"seconds": 1e-3, "tflops": 2 * 32**2 * 16 / 1e9})
    assert alone.promised == {"tflops": 170.0}


@pytest.mark.usefixtures("cpu_as_device")
def test_a_rival_that_fails_is_a_note_and_the_others_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("too long\nhere")

    monkeypatch.setitem(sys.modules, "adasplash", SimpleNamespace(adasplash2=broken))
    two = {name: promises.ATTENTION[name] for name in ("entmax15", "sparsemax")}
    monkeypatch.setattr(promises, "ATTENTION", two)
    monkeypatch.setattr(promises, "EMPTY_TILES", {})
    results = list(cuda.compare_cuda_attention(bench := Bench()))
    assert {result.against for result in results if result.against} == {"flash softmax", "cuDNN softmax"}
    assert [note.rpartition(": ")[2] for note in bench.notes] == ["too long", "too long"]  # forward, with backward


@pytest.mark.parametrize("name", ["entmax15", "sparsemax"])
def test_seven_of_ten_tiles_are_empty(name: str) -> None:
    """Exactly those whose keys are far below, and in a long sequence they are 70 % of the causal tiles."""
    q, k, _ = (t.double() for t in cuda.logits_with_empty_tiles((1, 1, 2560, 64), "cpu"))
    normalizer = attnorm.get(name)
    assert isinstance(normalizer, attnorm.Normalizer)
    weights = normalizer(q @ k.mT / 8, torch.ones(2560, 2560, dtype=torch.bool).tril())
    used = weights.reshape(20, 128, 20, 128).amax((1, 3)) > 0
    visible = [tile % 10 in cuda.VISIBLE_TILES for tile in range(20)]
    assert torch.equal(used, torch.tensor(visible).expand(20, 20).tril())
    tiles = cuda.EMPTY_TILES_SHAPE[2] // cuda.TILE_KEYS
    empty = sum(tiles - tile for tile in range(tiles) if tile % 10 not in cuda.VISIBLE_TILES)
    assert empty / (tiles * (tiles + 1) / 2) == pytest.approx(0.7, abs=0.01)


def test_the_first_call_is_timed_with_an_empty_cache_that_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(name: str, shape: cuda.Shape, device: str) -> dict[str, object]:
        folders = {Path(os.environ[name]).parent for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
        return {"call": (name, shape, device), "caches": {folder: list(folder.iterdir()) for folder in folders}}

    for variable in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(variable, "of the user")
    monkeypatch.setattr(cuda, "time_first_call", timed)
    found = cuda.first_call("entmax15", SHAPE, "cpu")
    assert found["call"] == ("entmax15", SHAPE, "cpu")
    assert list(found["caches"].values()) == [[]]
    assert not any(folder.exists() for folder in found["caches"])


def test_the_first_call_with_backward_contains_the_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 13.0, 18.0])
    monkeypatch.setattr(cuda.time, "perf_counter", lambda: next(clock))
    measured = cuda.time_first_call("entmax15", SHAPE, "cpu")
    assert measured == {"engine": "blocked", "forward": 3.0, "forward + backward": 8.0}


@pytest.mark.usefixtures("cpu_as_device")
def test_every_first_call_is_judged_and_a_process_that_fails_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def process(_: object, name: str, *arguments: object) -> dict[str, object]:
        if name == "sink":
            raise RuntimeError("out of memory")
        return {"engine": "sparse", "forward": 3.0, "forward + backward": 11.0}

    monkeypatch.setattr(cuda, "in_new_process", process)
    results = list(cuda.measure_first_calls(bench := Bench()))
    assert {result.what.partition(" ")[0] for result in results} == set(promises.ATTENTION) - {"sink"}
    assert {(result.what.rpartition(", ")[2], result.met) for result in results} == {
        ("forward", True),
        ("forward + backward", False),
    }
    assert bench.notes == ["the first call of sink was not measured: out of memory"]


@pytest.mark.parametrize(
    ("way", "tokens", "plain_ms", "most_ms"),
    [("core", 8192, 50.0, 350.0), ("core", 32_768, 100.0, 600.0), ("core of 7B", 32_768, 100.0, 150.0),
     ("full", 32_768, 100.0, 2100.0), ("full", 131_072, 100.0, None), ("three", 8192, 100.0, None)],
)  # fmt: skip
def test_analyze_may_take_more_milliseconds_or_times_the_plain_pass(
    way: str, tokens: int, plain_ms: float, most_ms: float | None
) -> None:
    least = promises.least_speedup(way, tokens, plain_ms)
    assert (least if least is None else plain_ms / least) == (most_ms if most_ms is None else pytest.approx(most_ms))


ONE = Result(table="t", what="w", against="a", numbers={"ours_ms": 1.0, "theirs_ms": 2.0, "speedup": 2.0})
PARTS: list[suites.Suite] = ["cuda-attention", "cuda-decoding", "cuda-first-call", "cuda-analyze"]


@pytest.mark.parametrize("suite", ["cuda", *PARTS])
def test_the_suite_cuda_is_all_of_its_parts(suite: suites.Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PARTS:
        monkeypatch.setitem(suites.SUITES, name, lambda _, name=name: iter([replace(ONE, what=name)]))
    measured = [result.what for result in suites.run_benchmarks(suite).results]
    assert measured == (PARTS if suite == "cuda" else [suite])


def test_a_run_that_is_cut_short_leaves_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_short(_: Bench) -> Iterator[Result]:
        yield replace(ONE, promised={"speedup": 3.0})
        yield Result(table="s", what="d", numbers={"seconds": 2.0}, promised={"seconds": 10.0})
        raise KeyboardInterrupt

    monkeypatch.setitem(suites.SUITES, "cuda-attention", cut_short)
    command = ["lab", "bench", "cuda-attention", "--threads", "3", "--out", str(tmp_path / "new")]
    assert CliRunner().invoke(app, command).exit_code != 0
    start, ratio, alone = read_jsonl(tmp_path / "new" / "results.jsonl")
    assert (start["suite"], start["quick"], start["machine"]["threads"]) == ("cuda-attention", False, 3)
    assert (ratio["against"], ratio["numbers"]["speedup"], ratio["met"]) == ("a", 2.0, False)
    assert (alone["what"], alone["numbers"], alone["met"]) == ("d", {"seconds": 2.0}, True)
