"""Figures for papers: valid SVG and PDF, the same bytes every time, nothing missing without a word."""

import xml.etree.ElementTree as ElementTree
from functools import partial
from pathlib import Path

import matplotlib
import pytest
from matplotlib.figure import Figure

from attnorm.report import plots
from attnorm.report.plots import STYLE, head_curves, heat_map, save_figures, verdict_map, worst_head
from attnorm.report.views import chosen_rows, default_choice
from tests.report.html.sample import HOSTILE, core_only, empty, hostile, sample


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts] + [
        axes.get_title(loc="left") for axes in figure.axes
    ]


def test_maps_and_curves_are_written_as_svg_and_pdf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnorm.report.plots.PANEL_METRICS", ("horizon",))
    paths = save_figures(sample().tables, tmp_path / "figures")
    names = {path.name for path in paths}
    layer, head = worst_head(chosen_rows(sample().tables["heads"], default_choice(sample().tables)))
    stems = ("verdicts", "map-horizon", f"layer-{layer}-head-{head}")
    assert names == {f"{stem}.{kind}" for stem in stems for kind in ("svg", "pdf")}
    for path in paths:
        if path.suffix == ".svg":
            assert ElementTree.parse(path).getroot().tag.endswith("svg")
        else:
            assert path.read_bytes().startswith(b"%PDF")
    again = plots._save_formats(partial(verdict_map, sample().tables), tmp_path / "again")
    assert [path.read_bytes() for path in paths[:2]] == [path.read_bytes() for path in again]


def test_the_verdict_map_marks_every_head() -> None:
    marks = [text for text in texts(verdict_map(sample().tables)) if len(text) == 2]
    assert len(marks) == 12
    assert {"Df", "Dc", "Fr", "Si", "Se", "Br", "He"} <= set(marks)


def test_curves_name_what_was_not_measured() -> None:
    assert texts(head_curves(sample().tables, 0, 1)).count("not measured") == 0
    assert texts(head_curves(core_only().tables, 0, 1)).count("not measured") == 3
    assert texts(head_curves(sample().tables, 2, 3)).count("not measured") == 6  # broken


def test_a_choice_that_was_not_measured_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="head 99"):
        head_curves(sample().tables, 0, 99)
    with pytest.raises(ValueError, match="length 17"):
        heat_map(sample().tables, "horizon", {"length": 17})
    with pytest.raises(ValueError, match="'entropie'"):
        heat_map(sample().tables, "entropie")
    with pytest.raises(ValueError, match="got none"):
        save_figures(empty().tables, Path("unused"))


@pytest.mark.filterwarnings("ignore:Glyph:UserWarning")  # the font has no owl
def test_names_are_no_formulas(tmp_path: Path) -> None:
    with matplotlib.rc_context(STYLE):
        figure = verdict_map(hostile().tables)
        figure.savefig(tmp_path / "a.svg")
    assert any(HOSTILE[:20] in text for text in texts(figure))
