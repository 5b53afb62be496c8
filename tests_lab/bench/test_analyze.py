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
    GROWTH,
    TOP_N,
    WORDS,
    Cost,
    Shape,
    Way,
    cost,
    measure_analysis,
    pass_of,
    random_model,
    statistics_by_layer,
    tokens,
)  # fmt: skip
from attnorm_lab.bench.figures import save_growth_figure
from attnorm_lab.bench.results import Result
from attnorm_lab.bench.suites import SUITES, run_benchmarks
from attnorm_lab.bench.timing import Bench, in_new_process
from tests.cli.saved_model import save_model, save_text

SMALL = Shape(48, layers=2, heads=2)

linux_only = pytest.mark.skipif(not timing.RESET.exists(), reason="needs /proc/self/clear_refs")


def known(*megabytes: float) -> dict[tuple[str, int], Cost]:
    return {
        (way, 1024 * 2**i): {"seconds": factor * 4**i, "extra_mb": factor * mb, "peak_mb": 1.0}
        for i, mb in enumerate(megabytes)
        for way, factor in (("core", 2.0), ("plain", 1.0))
    }


def growth(*megabytes: float) -> list[Result]:
    return list(bench_analyze._growth(Bench(), Shape(1024), known(*megabytes)))


@pytest.fixture
def _no_real_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(bench_analyze.FOLDER, raising=False)


@pytest.mark.usefixtures("_no_real_model")
@linux_only
def test_a_quick_run_measures_every_way_and_judges_nothing() -> None:
    heard: list[Result] = []
    results = run_benchmarks("analyze", threads=1, quick=True, finished=heard.append)
    assert tuple(heard) == results.results
    assert [(result.what, result.against) for result in results.results if result.against] == [
        (WORDS["core"], WORDS["plain"]),
        (WORDS["full"], WORDS["plain"]),
        (WORDS["core"], WORDS["eager"]),
    ]
    alone = [result.what for result in results.results if not result.against]
    assert alone == [*WORDS.values(), "64 tokens", "128 tokens"]
    assert all(result.met is None for result in results.results)
    assert any("--model" in note for note in results.notes)
    json.dumps(results.as_dict(), allow_nan=False)


@pytest.mark.parametrize(("asked", "used"), [(None, 2), (1, 1), (3, 3)])
def test_two_threads_unless_said_otherwise(asked: int | None, used: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SUITES, "analyze", lambda _: iter([]))
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
    found = in_new_process(cost, "core", 512, 2, 2, 0.0)
    assert found["seconds"] > 0
    assert 512 * 128 * 4 / timing.MEGABYTE < found["extra_mb"] < found["peak_mb"]  # the hidden states of one layer
    assert found["peak_mb"] > 100  # torch alone


def costs(way: Way, shape: Shape, quick: bool) -> Cost:
    """As promised at every length, but eager as it is."""
    factor = {"plain": 1.0, "core": 1.4, "full": 1.2, "eager": 12.0}[way]
    return {"seconds": shape.length * factor, "peak_mb": 400 * factor, "extra_mb": shape.length * factor}


def test_the_promises_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_analyze, "_cost_of", costs)
    against_eager, *others = bench_analyze._in_own_processes(bench := Bench(), Shape(4096))
    assert not bench.notes
    assert against_eager.numbers["speedup"] == pytest.approx(12 / 1.4)
    assert [result.met for result in (against_eager, *others)] == [
        True, None, True, True, None, None, None, None, None, True
    ]  # fmt: skip
    assert [(result.what, list(result.promised)) for result in others[:3]] == [
        (WORDS["plain"], []), (WORDS["core"], ["times_plain"]), (WORDS["full"], ["times_plain"])
    ]  # fmt: skip
    assert [result.what.split()[0] for result in others[4:]] == ["1,024", "2,048", "4,096", "8,192", "16,384"]


@pytest.mark.parametrize(("way", "left"), [("eager", ["plain", "core", "full"]), ("plain", ["core", "full", "eager"])])
def test_a_pass_that_fails_becomes_a_note_and_the_others_go_on(
    way: Way, left: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(one: Way, shape: Shape, quick: bool) -> Cost:
        if one == way:
            raise RuntimeError("exit code -9")
        return costs(one, shape, quick)

    monkeypatch.setattr(bench_analyze, "_cost_of", no_memory)
    found = list(bench_analyze._in_own_processes(bench := Bench(), Shape(4096)))
    assert [result.what for result in found if result.table.startswith("Each")] == [WORDS[one] for one in left]
    assert [result.met for result in found if result.against] == ([] if way == "eager" else [True])
    assert bench.notes[0] == f"{WORDS[way]}, at 4,096 tokens was not measured: exit code -9"


@pytest.mark.parametrize(
    ("megabytes", "power", "met"),
    [
        ((1, 2, 4), 1, True),
        ((9, 10, 19.9), 0.993, True),  # what is constant does not count
        ((1, 4, 16), 2, False),
        ((0.0, 5.0), None, None),
        ((5.0, 0.0), None, None),
    ],
)
def test_memory_that_grows_with_the_square_is_missed(
    megabytes: tuple[float, ...], power: float | None, met: bool | None
) -> None:
    *others, last = growth(*megabytes)
    assert all(result.met is None and "power" not in result.numbers for result in others)
    assert last.numbers.get("power") == (power if power is None else pytest.approx(power, abs=1e-3))
    assert last.met is met
    assert last.numbers["times"] == 2


def test_one_length_shows_no_growth() -> None:
    assert growth(1.0) == []


@pytest.mark.nightly  # starts new interpreters, as the test above that measures one
def test_a_folder_is_measured_from_the_start_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_analyze, "_against_plain", lambda *_: iter(()))
    monkeypatch.setattr(bench_analyze, "_in_own_processes", lambda *_: iter(()))
    monkeypatch.setenv(bench_analyze.FOLDER, str(save_model(tmp_path / "tiny")))
    bench = Bench(quick=True, text=save_text(tmp_path / "words.txt", words=40))
    ratio, run = measure_analysis(bench)
    assert (ratio.what, ratio.table) == ("analyze, default settings", "Measuring tiny, 2 windows of 16 tokens")
    assert min(ratio.numbers["ours_ms"] or 0, ratio.numbers["theirs_ms"] or 0) > 0
    assert run.what == "16 tokens, 4 heads"
    assert (run.numbers["peak_mb"] or 0) > 100
    assert not bench.notes


def test_a_folder_that_cannot_be_measured_becomes_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> dict[str, Any]:
        raise RuntimeError("ValueError: 'text' has 20 tokens")

    monkeypatch.setattr(bench_analyze, "_against_plain", lambda *_: iter(()))
    monkeypatch.setattr(bench_analyze, "_in_own_processes", lambda *_: iter(()))
    monkeypatch.setattr(bench_analyze, "in_new_process", fails)
    bench = Bench(model=tmp_path)
    assert list(measure_analysis(bench)) == []
    first, *others = bench.notes
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
    numbers = {"seconds": 1.0, "peak_mb": 700.0, "times_plain": 1.6}
    run = Result(table="alone", what="analyze", numbers=numbers, promised={"times_plain": 1.5})
    monkeypatch.setitem(SUITES, "analyze", lambda _: iter([run, *growth(1, 2, 4)]))
    result = CliRunner().invoke(app, ["lab", "bench", "analyze", "--markdown", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "| analyze | 1 | 700 | 1.60x | against plain at most 1.50x: missed |" in result.stdout
    assert "grows as at most L^1.10: met" in result.stdout
    assert f"### {GROWTH}" in result.stdout
    assert ElementTree.parse(tmp_path / "growth.svg").getroot().tag.endswith("svg")


def test_the_figure_is_the_same_every_time(tmp_path: Path) -> None:
    first = save_growth_figure(growth(1, 2, 4), tmp_path).read_bytes()
    assert save_growth_figure(growth(1, 2, 4), tmp_path).read_bytes() == first
    assert len(first) < 100_000
