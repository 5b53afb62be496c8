"""The command line: JSON that parses, exit codes that mean what they say, errors that help."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from typer.testing import CliRunner

import attnorm
from attnorm.cli import app, doctor
from attnorm.machine import this_machine
from attnorm_lab.bench import suites
from attnorm_lab.bench.results import Benchmarks, Result

ROOT = Path(__file__).resolve().parents[2]

runner = CliRunner()


def test_normalizers_lists_all_of_them_for_people() -> None:
    result = runner.invoke(app, ["normalizers"])
    assert result.exit_code == 0
    for name in attnorm.available():
        assert name in result.stdout


def test_normalizers_lists_all_of_them_for_machines() -> None:
    listed = json.loads(runner.invoke(app, ["normalizers", "--json"]).stdout)
    assert [one["name"] for one in listed] == attnorm.available()
    by_name = {one["name"]: one for one in listed}
    assert by_name["softmax"]["lipschitz_1024"] == 0.5
    assert by_name["ssmax"]["learned"] == ["s"]
    assert by_name["sparsemax"]["exact_zeros"]
    assert by_name["linear"]["kind"] == "mechanism"
    assert by_name["entmax"]["options"] == {"alpha": "1.5", "learned": "False", "heads": "None"}
    assert all(one["url"].startswith("https://") or (ROOT / one["url"]).is_file() for one in listed)


def test_normalizers_shows_one_by_name() -> None:
    (one,) = json.loads(runner.invoke(app, ["normalizers", "entmax", "--json"]).stdout)
    shown = runner.invoke(app, ["normalizers", "entmax"])
    assert shown.exit_code == 0
    assert one["name"] == "entmax"
    for word in (one["summary"], *one["options"], one["paper"], one["url"]):
        assert word in " ".join(shown.stdout.split())
    assert "sparsemax" not in shown.stdout


needs_installation = pytest.mark.skipif(
    attnorm.__version__.endswith("+source"), reason="attnorm is on the path, not installed; run pip install -e ."
)


@needs_installation
def test_doctor_finds_this_machine_well() -> None:
    result = runner.invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0, result.stdout
    health = json.loads(result.stdout)
    assert health["well"]
    promises = " ".join(check["promise"] for check in health["checks"])
    assert len(health["checks"]) >= 7
    assert "analyze measures" in promises
    assert "patch replaces" in promises
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {Requirement(line).name for line in project["dependencies"]}
    optional = {one["name"] for one in health["optional"]}
    assert not optional & required, "what is required is not optional"
    for_users = ("lab", "lightning", "frames")
    assert optional >= {Requirement(line).name for one in for_users for line in project["optional-dependencies"][one]}
    assert health["versions"]["attnorm"] == attnorm.__version__
    assert "cpu" in health["devices"]


def test_doctor_names_every_package_of_the_extras() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    listed = {Requirement(line).name for name in {*extras} - {"test", "lint", "docs", "dev"} for line in extras[name]}
    assert listed <= {*doctor.OPTIONAL_PACKAGES}


def test_doctor_exits_with_1_when_a_promise_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks() -> tuple[bool, str]:
        raise ArithmeticError("two and two are five")

    monkeypatch.setattr(doctor, "PROMISES", {"arithmetic holds": breaks})
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert "FAILED" in result.stdout
    assert "two and two are five" in result.stdout


def test_dispersion_prints_json_and_writes_both_figures(tmp_path: Path, few: None) -> None:
    result = runner.invoke(app, ["lab", "dispersion", "--out", str(tmp_path / "new"), "--draws", "2", "--json"])
    assert result.exit_code == 0, result.output
    measured = json.loads(result.stdout)
    verdicts = {curve["label"]: curve["verdict"] for curve in measured["curves"]}
    assert verdicts["softmax"] == "fades"
    assert verdicts["sparsemax"] == "stays"
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["dispersion.png", "dispersion.svg"]


def test_dispersion_prints_a_table(few: None) -> None:
    result = runner.invoke(app, ["lab", "dispersion", "--draws", "1", "--gap", "4"])
    assert result.exit_code == 0, result.output
    assert "One key scores 4" in result.stdout
    for word in ("softmax", "131,072", "stays", "fades", "not measured: soft"):
        assert word in result.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["lab", "dispersion", "--gap", "-1"], "gap"),
        (["lab", "dispersion", "--noise", "-0.5"], "noise"),
        (["lab", "dispersion", "--draws", "0"], "draws"),
        (["lab", "bench", "speed"], "speed"),
        (["lab", "bench", "cuda-decodin"], "Did you mean 'cuda-decoding'?"),
        (["lab", "bench", "normalizers", "--threads", "0"], "threads"),
        (["lab", "bench", "--json", "--markdown"], "--markdown"),
        (["normalizer"], "normalizer"),
        (["normalizers", "entmx"], "'entmax'"),
        *((["lab", "train", task], "--out DIR") for task in ("clrs", "retrieval")),
    ],
)
def test_wrong_usage_exits_with_2_and_says_why(arguments: list[str], complaint: str) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2
    assert complaint in " ".join(result.output.replace("│", " ").split())


def raced(what: str, against: str, ours_ms: float, theirs_ms: float) -> Result:
    numbers = {"ours_ms": ours_ms, "theirs_ms": theirs_ms, "speedup": theirs_ms / ours_ms}
    return Result(table="race", what=what, against=against, numbers=numbers, promised={"speedup": 2.0})


def test_bench_exits_with_1_when_a_promise_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = raced("tortoise", "hare", ours_ms=9, theirs_ms=3)
    monkeypatch.setitem(suites.SUITES, "normalizers", lambda _: iter([slow]))
    result = runner.invoke(app, ["lab", "bench", "normalizers"])
    assert result.exit_code == 1
    assert "2x faster: missed" in result.stdout


def test_bench_without_a_suite_says_first_what_it_runs_and_how_to_run_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suites, "run_benchmarks", lambda *_, **__: Benchmarks(machine=this_machine()))
    said = " ".join(runner.invoke(app, ["lab", "bench"]).stderr.split())
    assert re.match(r"Running \d+ suites: normalizers, attention, .*many minutes.*attnorm lab bench NAME", said)
    assert ("Skipping cuda-attention" in said) is not torch.cuda.is_available()
    assert "Running" not in runner.invoke(app, ["lab", "bench", "normalizers"]).stderr
    assert "Leave it out to measure" in runner.invoke(app, ["lab", "bench", "normalizers", "--quick"]).stderr


def test_an_interrupted_bench_says_where_finished_comparisons_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def cut_short(_: Any) -> Iterator[Result]:
        yield raced("hare", "tortoise", ours_ms=1, theirs_ms=3)
        raise KeyboardInterrupt

    monkeypatch.setitem(suites.SUITES, "normalizers", cut_short)
    for options, kept in (["--out", str(tmp_path)], str(tmp_path / "results.jsonl")), ([], "--out DIR"):
        result = runner.invoke(app, ["lab", "bench", "normalizers", *options])
        assert result.exit_code == 130
        assert "hare: 3.00x the speed of tortoise" in result.stderr
        assert kept in result.stderr
    assert "tortoise" in (tmp_path / "results.jsonl").read_text()


def test_bench_prints_json_and_markdown(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = raced("hare", "tortoise", ours_ms=1, theirs_ms=3)
    monkeypatch.setitem(suites.SUITES, "normalizers", lambda _: iter([fast]))
    as_json = runner.invoke(app, ["lab", "bench", "normalizers", "--json", "--threads", "1"])
    assert as_json.exit_code == 0
    assert json.loads(as_json.stdout)["results"][0]["met"] is True
    assert json.loads(as_json.stdout)["machine"]["threads"] == 1
    as_markdown = runner.invoke(app, ["lab", "bench", "normalizers", "--markdown"])
    assert "| hare | tortoise | 1.0 | 3.0 | 3x faster | 2x faster: met |" in as_markdown.stdout


def test_without_a_verb_the_command_explains_itself() -> None:
    helped = runner.invoke(app, [])
    for verb in ("normalizers", "evaluate", "doctor", "lab"):
        assert verb in helped.output


@needs_installation
def test_the_installed_command_keeps_stdout_for_results() -> None:
    command = Path(sys.executable).with_name("attnorm")
    listed = subprocess.run([command, "normalizers", "--json"], capture_output=True, text=True, check=True)
    assert json.loads(listed.stdout)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dispersion of a few normalizers only: all of them are measured in tests_lab/bench."""
    monkeypatch.setattr("attnorm_lab.bench.dispersion.available", lambda: ["softmax", "sparsemax", "local", "soft"])
