"""The benchmarks on CUDA, rehearsed on a CPU: what is compared with what, and how the first call is timed."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import attnorm
from attnorm.cli import app
from attnorm.files import read_jsonl
from attnorm_lab.bench import cuda, suites
from attnorm_lab.bench.results import Duration, Ratio, Result
from attnorm_lab.bench.timing import Timed

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
    monkeypatch.setattr(cuda, "time_against", lambda ours, rivals, rounds: [Timed(4.0, 8.0, 2.0) for _ in rivals])


def _promised(name: str, logits: str = "") -> dict[str, tuple[float | None, float | None]]:
    """The targets of a normalizer by rival, forward and with backward."""
    found: dict[str, list[float | None]] = {}
    for result in cuda.compare_cuda_attention(notes=[]):
        if isinstance(result, Ratio) and result.what.startswith(f"{name} (") and result.topic.endswith(logits):
            found.setdefault(result.against, []).append(result.target)
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
    monkeypatch.setattr(cuda, "PROMISED", {name: cuda.PROMISED[name]})
    assert _promised(name, logits) == promised


@pytest.mark.usefixtures("cpu_as_device")
def test_times_are_per_call_and_the_promised_speed_of_threshold_maps_becomes_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forward four calls are queued, with backward two; 4 ms in all."""
    monkeypatch.setattr(cuda, "PROMISED", {"entmax15": cuda.PROMISED["entmax15"]})
    monkeypatch.setattr(cuda, "PROMISED_WITH_EMPTY_TILES", {})
    results = list(cuda.compare_cuda_attention(notes=[]))
    assert {(r.what.rpartition(", ")[2], r.ours_ms, r.theirs_ms) for r in results if isinstance(r, Ratio)} == {
        ("forward", 1.0, 2.0),
        ("forward + backward", 2.0, 4.0),
    }
    (duration,) = [result for result in results if isinstance(result, Duration)]
    assert duration.seconds == pytest.approx(1e-3)
    assert duration.most_seconds == pytest.approx(2 * 32**2 * 16 / 170e12)


@pytest.mark.usefixtures("cpu_as_device")
def test_a_rival_that_fails_is_a_note_and_the_others_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("too long\nhere")

    monkeypatch.setitem(sys.modules, "adasplash", SimpleNamespace(adasplash2=broken))
    monkeypatch.setattr(cuda, "PROMISED", {name: cuda.PROMISED[name] for name in ("entmax15", "sparsemax")})
    monkeypatch.setattr(cuda, "PROMISED_WITH_EMPTY_TILES", {})
    notes: list[str] = []
    results = list(cuda.compare_cuda_attention(notes=notes))
    assert {result.against for result in results if isinstance(result, Ratio)} == {"flash softmax", "cuDNN softmax"}
    assert [note.rpartition(": ")[2] for note in notes] == ["too long", "too long"]  # forward, with backward


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


def test_the_first_call_is_timed_with_an_empty_cache_that_is_removed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: dict[str, list[str]] = {}

    def first_call(name: str, shape: cuda.Shape, device: str) -> dict[str, object]:
        for variable in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
            folder = Path(os.environ[variable]).parent
            seen[str(folder)] = [path.name for path in folder.iterdir()]
        return {"call": (name, shape, device)}

    for variable in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(variable, "of the user")
    monkeypatch.setattr(cuda, "time_first_call", first_call)
    cuda.report_first_call("entmax15", SHAPE, "cpu")
    assert json.loads(capsys.readouterr().out) == {"call": ["entmax15", list(SHAPE), "cpu"]}
    assert list(seen.values()) == [[]]
    assert not Path(next(iter(seen))).exists()


def test_the_first_call_with_backward_contains_the_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 13.0, 18.0])
    monkeypatch.setattr(cuda.time, "perf_counter", lambda: next(clock))
    measured = cuda.time_first_call("entmax15", SHAPE, "cpu")
    assert measured == {"engine": "blocked", "forward": 3.0, "forward + backward": 8.0}


@pytest.mark.usefixtures("cpu_as_device")
def test_every_first_call_is_judged_and_a_process_that_fails_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def process(code: str) -> dict[str, object]:
        if "'sink'" in code:
            raise RuntimeError("out of memory")
        return {"engine": "sparse", "forward": 3.0, "forward + backward": 11.0}

    monkeypatch.setattr(cuda, "run_and_read_json", process)
    notes: list[str] = []
    results = list(cuda.measure_first_calls(notes=notes))
    assert {result.what.partition(" ")[0] for result in results} == set(cuda.PROMISED) - {"sink"}
    assert {(result.what.rpartition(", ")[2], result.met) for result in results} == {
        ("forward", True),
        ("forward + backward", False),
    }
    assert notes == ["the first call of sink was not timed: out of memory"]


PARTS = {
    "cuda-attention": "compare_cuda_attention",
    "cuda-decoding": "compare_cuda_decoding",
    "cuda-first-call": "measure_first_calls",
    "cuda-analyze": "measure_cuda_analysis",
}
ONE = Ratio(topic="t", what="w", against="a", ours_ms=1.0, theirs_ms=2.0, speedup=2.0)


@pytest.mark.parametrize("suite", ["cuda", *PARTS])
def test_the_suite_cuda_is_all_of_its_parts(suite: suites.Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, function in PARTS.items():
        monkeypatch.setattr(suites, function, lambda name=name, **_: iter([replace(ONE, what=name)]))
    measured = [result.what for result in suites.run_benchmarks(suite).results]
    assert measured == (list(PARTS) if suite == "cuda" else [suite])


def test_a_run_that_is_cut_short_leaves_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_short(**_: object) -> Result:
        yield replace(ONE, target=3.0)
        yield Duration(what="d", setting="s", seconds=2.0, most_seconds=10.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(suites, "compare_cuda_attention", cut_short)
    command = ["lab", "bench", "cuda-attention", "--threads", "3", "--out", str(tmp_path / "new")]
    assert CliRunner().invoke(app, command).exit_code != 0
    start, ratio, duration = read_jsonl(tmp_path / "new" / "results.jsonl")
    assert (start["suite"], start["quick"], start["machine"]["threads"]) == ("cuda-attention", False, 3)
    assert (ratio["kind"], ratio["speedup"], ratio["met"]) == ("Ratio", 2.0, False)
    assert (duration["kind"], duration["seconds"], duration["met"]) == ("Duration", 2.0, True)
