"""Figures of an analysis for papers, as SVG and PDF: the verdicts, a few heat maps, the curves of one head.

White ground, letters as paths, no date inside: the same analysis gives the same bytes. Drawn from the tables alone.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pyarrow as pa
from matplotlib.figure import Figure

from attnorm.report.head_curves import head_curves
from attnorm.report.head_maps import heat_map, verdict_map
from attnorm.report.palette import LETTERING
from attnorm.report.selection import chosen_rows, column, default_choice
from attnorm.report.vocabulary import PANEL_METRICS, VERDICTS


def save_head_figures(analysis: Any, folder: Path) -> list[Path]:
    """The verdicts, a heat map of each metric at the top of a head's panel, the curves of the worst head; the paths.

    All of the first text and the longest length, for the model as it runs; verdict_map, heat_map and head_curves draw
    any other choice and metric.
    """
    heads = chosen_rows(analysis.heads, default_choice(analysis))
    if not heads.num_rows:
        raise ValueError("there is nothing to draw: the analysis holds no head")
    paths = _saved(partial(verdict_map, analysis), folder / "verdicts")
    for name in PANEL_METRICS:
        if np.isfinite(column(heads, name)).any():
            paths += _saved(partial(heat_map, analysis, name), folder / f"map-{name}")
    layer, head = worst_head(heads)
    return paths + _saved(partial(head_curves, analysis, layer, head), folder / f"layer-{layer}-head-{head}")


def worst_head(heads: pa.Table) -> tuple[int, int]:
    """Of the most urgent verdict that leaves something to draw, the head that spreads its attention most."""
    order = [word.name for word in VERDICTS if word.name != "broken"] + ["broken"]

    def urgency(row: Mapping[str, Any]) -> tuple[int, float]:
        spread = row["entropy_ratio"]
        place = order.index(row["verdict"]) if row["verdict"] in order else len(order)
        return place, -spread if spread is not None and math.isfinite(spread) else 0.0

    row = min(heads.select(["verdict", "entropy_ratio", "layer", "head"]).to_pylist(), key=urgency)
    return row["layer"], row["head"]


def _saved(draw: Callable[[], Figure], stem: Path) -> list[Path]:
    stem.parent.mkdir(parents=True, exist_ok=True)
    svg, pdf = stem.parent / f"{stem.name}.svg", stem.parent / f"{stem.name}.pdf"
    with matplotlib.rc_context(LETTERING):
        figure = draw()
        figure.savefig(svg, metadata={"Date": None})
        figure.savefig(pdf, metadata={"CreationDate": None})
    return [svg, pdf]
