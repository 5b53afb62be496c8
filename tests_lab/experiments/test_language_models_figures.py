"""The figures show what the lines say, also where one model is far off, was not measured, or softmax is missing."""

import json
import lzma
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from attnorm_lab.experiments.language_models.figure import comparison_figure
from attnorm_lab.experiments.language_models.results import Spread, contenders

PUBLISHED = Path(__file__).parents[2] / "docs" / "results" / "language-models.jsonl.xz"


@pytest.fixture(scope="module")
def lines() -> list[dict[str, Any]]:
    every = [json.loads(line) for line in lzma.decompress(PUBLISHED.read_bytes()).splitlines()]
    return [line for line in every if line.get("seed", 0) == 0]


def written(figure: Figure) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_a_loss_far_off_is_written_and_does_not_squeeze_the_others(lines: list[dict[str, Any]]) -> None:
    models = contenders(lines)
    sink = next(model for model in models if model.name == "sink")
    sink.losses["war-and-peace"][4096] = Spread(6.0, None)  # only one text is far off: both are drawn
    figure = comparison_figure(models)
    assert len(figure.axes) == 6
    assert [text.get_text() for text in figure.axes[2].texts] == ["8.09, 8.23 →"]
    twice = figure.axes[1]
    assert [text.get_text() for text in twice.texts] == ["6.39, 6.69 →"]
    assert twice.get_xlim()[1] < 4.7
    assert not figure.axes[0].texts


def test_models_that_were_not_asked_say_so(lines: list[dict[str, Any]]) -> None:
    asked = [line for line in lines if line["stage"] != "needle" or line["normalizer"] in ("softmax", "sink")]
    trained = {line["normalizer"] for line in lines if line["stage"] == "measure"}
    assert written(comparison_figure(contenders(asked))).count("not measured") == len(trained) - 2
    without = [line for line in lines if line["stage"] != "needle"]
    assert len(comparison_figure(contenders(without)).axes) == 3
