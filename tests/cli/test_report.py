"""attnorm report: the page and the figures of a saved run, without measuring again."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from attnorm.analysis.result import Analysis
from attnorm.analysis.verdicts.thresholds import Thresholds
from attnorm.cli import app
from attnorm.metrics.catalogue import BY_NAME
from attnorm.report import plots
from tests.analysis.synthetic import synthetic_manifest, synthetic_tables

runner = CliRunner()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run that measured little: every metric that is there costs a figure."""
    options: dict[str, Any] = {"cast": (("selects", "flat"), ("lazy", "parked")), "lengths": (128,)}
    tables = dict(synthetic_tables(**options))
    missing = set(BY_NAME) - {"entropy_ratio", "sink_mass", "horizon", "gap_slope"}
    rows = [
        row | dict.fromkeys((column for column in row if column.partition("_q")[0] in missing), math.nan)
        for row in tables["heads"].to_pylist()
    ]
    tables["heads"] = pa.Table.from_pylist(rows, schema=tables["heads"].schema)
    Analysis.of(tables, synthetic_manifest(**options), Thresholds()).save(tmp_path / "run")
    return tmp_path / "run"


def blank_figure(draw: Callable[[], Figure], stem: Path) -> list[Path]:
    paths = [stem.parent / f"{stem.name}.{suffix}" for suffix in ("svg", "pdf")]
    stem.parent.mkdir(exist_ok=True)
    for path in paths:
        path.touch()
    return paths


def test_the_page_is_written_into_the_folder(folder: Path) -> None:
    result = runner.invoke(app, ["report", str(folder)])
    assert result.exit_code == 0, result.output
    assert "<html" in (folder / "report.html").read_text(encoding="utf-8")
    assert "1 of 4 heads still select" in result.stdout
    assert f"report: {folder / 'report.html'}" in result.stderr


def test_page_and_figures_go_where_they_are_asked_for(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the figures show is in tests/report/html/test_head_figures.py."""
    monkeypatch.setattr(plots, "_save_formats", blank_figure)
    page, figures = tmp_path / "page.html", tmp_path / "figures"
    result = runner.invoke(app, ["report", str(folder), "--out", str(page), "--figures", str(figures), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["report"] == str(page)
    assert page.is_file()
    assert not (folder / "report.html").exists()
    suffixes = {path.suffix for path in figures.iterdir()}
    assert suffixes == {".svg", ".pdf"}
    files = {path.stem for path in figures.iterdir()}
    assert {"verdicts", "map-entropy_ratio", "map-sink_mass", "map-horizon", "map-gap_slope"} < files
    assert len(files) == 6, "the worst head besides"
    assert f"figures: 12 files in {figures}" in result.stderr
    assert "verdicts.svg" not in result.stderr


@pytest.mark.parametrize("damage", ["no folder", "empty", "half", "unreadable"])
def test_a_folder_without_a_finished_run_exits_with_2(damage: str, folder: Path, tmp_path: Path) -> None:
    manifest = folder / "manifest.json"
    if damage == "half":
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "finished": False}))
    elif damage == "unreadable":
        manifest.write_text("{")
    asked = {"no folder": tmp_path / "nowhere", "empty": tmp_path}.get(damage, folder)
    result = runner.invoke(app, ["report", str(asked)])
    assert result.exit_code == 2, result.output
    assert not (asked / "report.html").exists()


def test_saved_numbers_are_judged_again_and_the_page_says_so(folder: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    page = tmp_path / "page.html"
    result = runner.invoke(
        app, ["report", str(folder), "--out", str(page), "--threshold", "sink_dominated=1", "--json"]
    )
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["verdict"]["counts"]["sink-dominated"] == 0
    assert told["manifest"]["thresholds"]["sink_dominated"] == 1
    text = page.read_text(encoding="utf-8")
    assert "Judged by thresholds other than the default: sink_dominated 1 (default 0.5)." in text
    assert (
        "The verdicts were recomputed from the saved numbers; when these were measured, sink_dominated was 0.5." in text
    )
    assert "1 (default 0.5)" in text.partition("<h3>Manifest</h3>")[2]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before, "the run itself stays"


def test_an_unknown_threshold_exits_with_2_and_names_the_nearest(folder: Path) -> None:
    result = runner.invoke(app, ["report", str(folder), "--threshold", "sink_dominate=1"])
    assert result.exit_code == 2
    assert "did you mean 'sink_dominated'" in " ".join(result.stderr.replace("│", " ").split())
    assert not (folder / "report.html").exists()
