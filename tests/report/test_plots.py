"""analysis.plot(): figures without a display, of the numbers in the tables."""

import doctest
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from matplotlib.figure import Figure

from attnorm.analysis import result
from attnorm.analysis.result import Analysis
from attnorm.report.plots import plot, worst_head
from tests.analysis.synthetic import synthetic_manifest, synthetic_tables
from tests.report.html.sample import CAST, HOSTILE, hostile, sample


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("verdicts", {}), ("heads", {}), ("heads", {"metric": "horizon", "length": 64}), ("curves", {}),
        ("curves", {"metric": "effective_keys", "layer": 1, "normalizer": "entmax15"}),
        ("curves", {"metric": "entropy_nats", "layer": 0, "head": 1}), ("head", {"layer": 0, "head": 1}),
    ],
)  # fmt: skip
def test_every_kind_is_a_figure_that_a_notebook_shows(kind: str, options: dict[str, Any]) -> None:
    figure = plot(sample().tables, kind, **options)
    assert isinstance(figure, Figure)
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]


def test_a_curve_holds_the_numbers_of_the_table() -> None:
    (axes,) = plot(sample().tables, "curves", "entropy_nats", layer=0, head=1).axes
    (line,) = axes.lines
    rows = [
        row
        for row in sample().tables["by_length"].to_pylist()
        if (row["layer"], row["head"], row["text"], row["length"], row["normalizer"]) == (0, 1, "prose", 160, "model")
    ]
    expected = sorted((row["n"], row["entropy_nats"]) for row in rows)
    assert np.array(line.get_xydata()) == pytest.approx(np.array(expected))
    assert axes.get_xscale() == "log"


def test_all_heads_have_a_line_and_their_median_another() -> None:
    axes = plot(sample().tables, "curves").axes[0]
    assert len(axes.lines) == len(CAST) * len(CAST[0]) + 1
    median = axes.lines[-1]
    wanted = {"text": "prose", "length": 160, "normalizer": "model", "n_high": 160}
    rows = [
        row for row in sample().tables["by_length"].to_pylist() if all(row[name] == wanted[name] for name in wanted)
    ]
    longest = [row["entropy_ratio"] for row in rows]
    assert median.get_ydata()[-1] == pytest.approx(np.nanmedian(longest))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "map"}, "got 'map'"), ({"kind": "curves", "metric": "gap_slope"}, "got 'gap_slope'"),
        ({"kind": "heads", "metric": "entropie"}, "'entropie'"), ({"kind": "head"}, "got None and None"),
        ({"kind": "verdicts", "metric": "horizon"}, "got 'horizon'"),
        ({"kind": "heads", "layer": 1}, "layer, head"), ({"kind": "curves", "layer": 99}, "layer 99"),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn_is_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        plot(sample().tables, **options)
    with pytest.raises(TypeError, match="got 'lenght'"):
        plot(sample().tables, lenght=64)


@pytest.mark.filterwarnings("ignore:Glyph:UserWarning")  # the font has no owl
@pytest.mark.parametrize("kind", ["curves", "heads", "verdicts"])
def test_hostile_names_are_text_in_a_figure(kind: str) -> None:
    figure = plot(hostile().tables, kind)
    title = figure.axes[0].get_title(loc="left")
    assert HOSTILE[:20] in title
    assert "\u202e" not in title
    assert figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]


def test_the_examples_in_the_docstrings_run(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options: dict[str, Any] = {"cast": CAST * 2, "texts": ("prose",), "lengths": (64,), "normalizers": ("model",)}
    tables, manifest = synthetic_tables(**options), synthetic_manifest(**options)
    run = Analysis.of(tables, manifest, result.Thresholds())
    finder = doctest.DocTestFinder(recurse=False)
    examples = [
        test
        for function in (Analysis.plot, Analysis.top_keys)
        for test in finder.find(function, globs={"analysis": run}, module=False)
    ]
    assert sum(len(test.examples) for test in examples) == 3
    checker = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in examples:
        for example in test.examples:
            if not example.want and example.source.startswith("print"):
                example.want = "layer 3 head 1, row 63 ...\n"
        checker.run(test)
    assert checker.failures == 0
    assert (tmp_path / "heads.png").is_file()


def test_the_worst_head_is_not_one_whose_curves_may_be_empty() -> None:
    numbers = {"verdict": ["broken", "silent", "healthy", "sink-dominated"], "entropy_ratio": [math.nan] * 4}
    assert worst_head(pa.table({**numbers, "layer": [0] * 4, "head": [0, 1, 2, 3]})) == (0, 3)
