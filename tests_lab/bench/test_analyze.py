"""The benchmark of analyze(): both sides measure the same, every promise is judged, the rest becomes a note."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import attnorm
from attnorm.cli import app
from attnorm_lab.bench import analyze as bench_analyze
from attnorm_lab.bench import timing
from attnorm_lab.bench.analyze import (
    TOP_N,
    WORDS,
    Cost,
    Shape,
    Way,
    cost_in_new_process,
    measure_analysis,
    pass_of,
    random_model,
    statistics_by_layer,
    tokens,
)
from attnorm_lab.bench.figures import save_growth_figure
from attnorm_lab.bench.results import (
    Benchmarks,
    Growth,
    GrowthPoint,
    ModelRun,
    Ratio,
    Result,
    benchmark_markdown,
)
from attnorm_lab.bench.suites import run_benchmarks
from tests.cli.saved_model import save_model, save_text

SMALL = Shape(48, layers=2, heads=2)

linux_only = pytest.mark.skipif(not timing.RESET.exists(), reason="needs /proc/self/clear_refs")


def growth(*megabytes: float, target: float | None = 1.1) -> Growth:
    points = [
        GrowthPoint(length=1024 * 2**i, seconds=2.0 * 4**i, plain_seconds=4.0**i, extra_mb=mb, plain_extra_mb=mb / 2)
        for i, mb in enumerate(megabytes)
    ]
    return Growth(what="analyze", setting="a model", points=tuple(points), target=target)


@pytest.fixture
def _no_real_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(bench_analyze.FOLDER, raising=False)


@pytest.mark.usefixtures("_no_real_model")
@linux_only
def test_a_quick_run_measures_every_way_and_judges_nothing() -> None:
    heard: list[Result] = []
    results = run_benchmarks("analyze", threads=1, quick=True, finished=heard.append)
    assert tuple(heard) == results.results
    assert [(ratio.what, ratio.against) for ratio in results.of_kind(Ratio)] == [
        (WORDS["core"], WORDS["plain"]),
        (WORDS["full"], WORDS["plain"]),
        (WORDS["core"], WORDS["eager"]),
    ]
    assert [run.what for run in results.of_kind(ModelRun)] == list(WORDS.values())
    assert [[point.length for point in one.points] for one in results.of_kind(Growth)] == [[64, 128]]
    assert all(result.met is None for result in results.results)
    assert any("--model" in note for note in results.notes)
    json.dumps(results.as_dict(), allow_nan=False)


@pytest.mark.parametrize(("asked", "used"), [(None, 2), (1, 1), (3, 3)])
def test_two_threads_unless_said_otherwise(asked: int | None, used: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnorm_lab.bench.suites.measure_analysis", lambda **_: iter([]))
    before = torch.get_num_threads()
    assert run_benchmarks("analyze", threads=asked).machine.threads == used
    assert torch.get_num_threads() == before


def test_eager_and_analyze_measure_the_same_numbers() -> None:
    model, ids = random_model(SMALL), tokens(SMALL.length)
    heads = attnorm.analyze(model, ids, top_n=TOP_N, metrics=("core", "gradient"), rows="all")
    by_layer = statistics_by_layer(model, ids)
    for head in heads.heads.to_pylist():
        rows = slice(head["n_low"] - 1, head["n_high"])
        found = by_layer[head["layer"]]
        for name in ("entropy_nats", "effective_keys", "max_weight", "logit_spread", "sink_mass", "jacobian_norm"):
            mean = found[name][0, head["head"], rows].mean().item()
            assert head[f"{name}_mean"] == pytest.approx(mean, rel=1e-3), (name, head["layer"], head["head"])
        masses = found["top_mass"][0, head["head"], rows].mean(0).tolist()
        table = heads.top_n.to_pylist()
        ours = [row["mass"] for row in table if (row["layer"], row["head"]) == (head["layer"], head["head"])]
        assert ours == pytest.approx(masses, rel=1e-4)


def test_the_model_attends_neither_uniformly_nor_to_one_key() -> None:
    shape = Shape(256, layers=2, heads=2)
    ratios = attnorm.analyze(random_model(shape), tokens(shape.length), metrics="core").heads["entropy_ratio"]
    assert 0.5 < np.mean(ratios.to_numpy()) < 0.9


def test_the_plain_pass_is_the_model_itself() -> None:
    model, ids = random_model(SMALL), tokens(SMALL.length)
    output: Any = pass_of("plain", model, ids)()
    with torch.no_grad():
        assert torch.equal(output.last_hidden_state, model.base_model(ids[None]).last_hidden_state)
    assert model.config._attn_implementation == "sdpa"


@linux_only
def test_a_process_of_its_own_tells_time_and_memory() -> None:
    cost = cost_in_new_process("core", Shape(512, layers=2, heads=2), least_seconds=0)
    assert cost.seconds > 0
    assert 512 * 128 * 4 / timing.MEGABYTE < cost.extra_mb < cost.peak_mb  # the hidden states of one layer, at least
    assert cost.peak_mb > 100  # torch alone


def costs(way: Way, shape: Shape) -> Cost:
    """As promised at every length, but eager as it is."""
    factor = {"plain": 1.0, "core": 1.4, "full": 1.2, "eager": 12.0}[way]
    return Cost(seconds=shape.length * factor, peak_mb=400 * factor, extra_mb=shape.length * factor)


def test_the_promises_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_analyze, "cost_in_new_process", costs)
    found = list(bench_analyze._in_own_processes(Shape(4096), False, notes := []))
    assert not notes
    (against_eager,) = (result for result in found if isinstance(result, Ratio))
    assert against_eager.speedup == pytest.approx(12 / 1.4)
    assert against_eager.met
    memory_met = {run.what: run.met for run in found if isinstance(run, ModelRun)}
    assert memory_met == {WORDS["plain"]: None, WORDS["core"]: True, WORDS["full"]: True, WORDS["eager"]: None}
    (grown,) = (result for result in found if isinstance(result, Growth))
    assert [point.length for point in grown.points] == [1024, 2048, 4096, 8192, 16384]
    assert grown.met


def test_a_pass_that_fails_becomes_a_note_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory_for_eager(way: Way, shape: Shape) -> Cost:
        if way == "eager":
            raise RuntimeError("exit code -9")
        return costs(way, shape)

    monkeypatch.setattr(bench_analyze, "cost_in_new_process", no_memory_for_eager)
    notes: list[str] = []
    found = list(bench_analyze._in_own_processes(Shape(4096), False, notes))
    assert [run.what for run in found if isinstance(run, ModelRun)] == [WORDS[way] for way in ("plain", "core", "full")]
    assert not any(isinstance(result, Ratio) for result in found)
    assert notes == [f"{WORDS['eager']}, at 4,096 tokens was not measured: exit code -9"]


def test_memory_that_grows_with_the_square_is_told_as_missed() -> None:
    assert growth(1, 2, 4).met
    assert growth(9, 10, 19.9).exponent == pytest.approx(1, abs=0.02)  # what is constant does not count
    quadratic = growth(1, 4, 16)
    assert quadratic.exponent == pytest.approx(2)
    results = Benchmarks(machine=run_benchmarks("cuda", quick=True).machine, results=(quadratic,))
    assert results.missed == [quadratic]
    last = benchmark_markdown(results).splitlines()[-1]
    assert last == "| 4,096 | 16.00 | 32.00 | 2.00x | 8 | 16 | memory as L^2.00, at most L^1.1: missed |"


@pytest.mark.parametrize("megabytes", [(1.0,), (0.0, 5.0), (5.0, 0.0)])
def test_growth_of_nothing_is_not_judged(megabytes: tuple[float, ...]) -> None:
    assert growth(*megabytes).exponent is None
    assert growth(*megabytes).met is None


@pytest.mark.parametrize(
    ("seconds", "times", "met"), [(59, None, True), (61, None, False), (59, 1.6, False), (59, 1.5, True)]
)
def test_a_run_must_keep_all_its_promises(seconds: float, times: float | None, met: bool) -> None:
    run = ModelRun(
        what="w", setting="s", seconds=seconds, peak_mb=1, times_plain=times, most_times_plain=1.5, most_seconds=60
    )
    assert run.met is met


@pytest.mark.nightly  # starts new interpreters, as the test above that measures one
def test_a_folder_is_measured_from_the_start_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_analyze, "_against_plain", lambda *_: iter(()))
    monkeypatch.setattr(bench_analyze, "_in_own_processes", lambda *_: iter(()))
    monkeypatch.setenv(bench_analyze.FOLDER, str(save_model(tmp_path / "tiny")))
    notes: list[str] = []
    ratio, run = measure_analysis(quick=True, notes=notes, text=save_text(tmp_path / "words.txt", words=40))
    assert isinstance(ratio, Ratio)
    assert (ratio.what, ratio.topic) == ("analyze, default settings", "Measuring tiny, 2 windows of 16 tokens")
    assert min(ratio.theirs_ms, ratio.ours_ms) > 0
    assert isinstance(run, ModelRun)
    assert run.what == "16 tokens, 4 heads"
    assert run.peak_mb > 100
    assert run.met is None
    assert not notes


def test_a_folder_that_cannot_be_measured_becomes_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(code: str) -> dict[str, Any]:
        raise RuntimeError("ValueError: 'text' has 20 tokens")

    monkeypatch.setattr(bench_analyze, "_against_plain", lambda *_: iter(()))
    monkeypatch.setattr(bench_analyze, "_in_own_processes", lambda *_: iter(()))
    monkeypatch.setattr(bench_analyze, "run_and_read_json", fails)
    notes: list[str] = []
    assert list(measure_analysis(notes=notes, model=tmp_path)) == []
    first, *others = notes
    assert first == f"the default call on {tmp_path.name} was not measured: ValueError: 'text' has 20 tokens"
    assert others == [
        f"{tmp_path.name} at {length} tokens was not measured: ValueError: 'text' has 20 tokens"
        for length in ("1,024", "8,192")
    ]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["lab", "bench", "cuda", "--model", "."], "suite analyze or all, got cuda"),
        (["lab", "bench", "analyze", "--model", "nowhere"], "--model: expected a folder, got nowhere"),
        (["lab", "bench", "analyze", "--text", "nowhere.txt"], "--text: expected a file, got nowhere.txt"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(arguments: list[str], complaint: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert complaint in " ".join(result.output.replace("│", " ").split())


def test_the_command_prints_the_tables_and_draws_the_growth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ModelRun(
        what="analyze", setting="s", seconds=1, peak_mb=700, extra_mb=300, times_plain=1.6, most_times_plain=1.5
    )
    monkeypatch.setattr("attnorm_lab.bench.suites.measure_analysis", lambda **_: iter([run, growth(1, 2, 4)]))
    result = CliRunner().invoke(app, ["lab", "bench", "analyze", "--markdown", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "| analyze | 1.00 | 700 | 300 | 1.60x | 1.5x: missed |" in result.stdout
    assert "memory as L^1.00, at most L^1.1: met" in result.stdout
    assert ElementTree.parse(tmp_path / "growth.svg").getroot().tag.endswith("svg")


def test_the_figure_is_the_same_every_time(tmp_path: Path) -> None:
    first, again = (save_growth_figure(growth(1, 2, 4), tmp_path / name) for name in ("a", "b"))
    assert first.read_bytes() == again.read_bytes()
    assert len(first.read_bytes()) < 60_000
