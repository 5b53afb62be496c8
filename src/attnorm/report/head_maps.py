"""Maps of all heads, with a row per layer and a column per head: verdicts, or one metric as a heat map."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, NullLocator
from numpy.typing import NDArray

from attnorm.analysis.result import Analysis
from attnorm.metrics.catalogue import BY_NAME, Metric
from attnorm.report.selection import column, default_choice, measured_rows
from attnorm.report.vocabulary import OTHER_COLOURS, SCALE, VERDICT_COLOURS, VERDICTS, verdict_word

COLOURS = LinearSegmentedColormap.from_list("attnorm", SCALE)
LARGEST_CELL, WIDEST = 0.34, 6.2  # inches: of one cell, of all columns
LEFT, RIGHT, TOP, BOTTOM = 0.55, 1.95, 0.5, 0.5  # inches around the cells
MISSING: dict[str, Any] = {"facecolor": "white", "edgecolor": "#bdbab2", "hatch": "////", "linewidth": 0.4}


def verdict_map(analysis: Analysis, choice: Mapping[str, Any] | None = None) -> Figure:
    """Draw verdicts as colours and marks. choice: text, length, normalizer and kind."""
    chosen = {**default_choice(analysis), **(choice or {})}
    heads = measured_rows(analysis.heads, chosen)
    words = [verdict_word(name) for name in heads.column("verdict").to_pylist()]
    figure, axes, size = _grid(heads, "Verdicts", chosen)
    for word, x, y in zip(words, *_coordinates(heads), strict=True):
        fill, ink = VERDICT_COLOURS.get(word.name, OTHER_COLOURS)
        _cell(axes, x, y, facecolor=fill)
        axes.text(x, y, word.mark, ha="center", va="center", color=ink, fontsize=size, fontweight="bold")
    order = [word for word in dict.fromkeys([*VERDICTS, *words]) if word in words]
    axes.legend(
        handles=[
            Patch(
                facecolor=VERDICT_COLOURS.get(word.name, OTHER_COLOURS)[0],
                label=f"{word.mark}  {word.label} ({words.count(word)})",
            )
            for word in order
        ],
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
        fontsize=7,
    )
    return figure


def heat_map(analysis: Analysis, metric: str, choice: Mapping[str, Any] | None = None) -> Figure:
    """Draw one metric of the catalogue; missing values are hatched."""
    if metric not in BY_NAME:
        raise ValueError(f"unknown metric {metric!r}; expected one of {', '.join(map(repr, BY_NAME))}")
    chosen = {**default_choice(analysis), **(choice or {})}
    heads, about = measured_rows(analysis.heads, chosen), BY_NAME[metric]
    values = column(heads, metric)
    norm = _norm(about, values)
    figure, axes, _ = _grid(heads, f"{about.label} ({about.unit})" if about.unit else about.label, chosen)
    for value, x, y in zip(values, *_coordinates(heads), strict=True):
        _cell(axes, x, y, **({"facecolor": COLOURS(norm(value))} if _drawable(about, value) else MISSING))
    box, width = axes.get_position(), figure.get_figwidth()
    beside = figure.add_axes((box.x1 + 0.2 / width, box.y0, 0.12 / width, box.height))
    bar = figure.colorbar(ScalarMappable(norm, COLOURS), cax=beside)
    bar.outline.set_linewidth(0)
    beside.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    beside.yaxis.set_minor_locator(NullLocator())
    return figure


def _cell(axes: Axes, x: int, y: int, **look: Any) -> None:
    axes.add_patch(Rectangle((x - 0.46, y - 0.46), 0.92, 0.92, **{"linewidth": 0, **look}))


def _drawable(metric: Metric, value: float) -> bool:
    return bool(np.isfinite(value) and (value > 0 or not metric.logarithmic))


def _norm(metric: Metric, values: NDArray[np.float64]) -> Normalize:
    usable = [float(value) for value in values if _drawable(metric, value)] or [1.0]
    low, high = metric.bounded or (min(usable), max(usable))
    if metric.logarithmic:
        return LogNorm(low, high) if high > low else LogNorm(0.9 * low, 1.1 * low)
    return Normalize(low, high) if high > low else Normalize(low - 0.5, low + 0.5)


def _grid(heads: pa.Table, title: str, choice: Mapping[str, Any]) -> tuple[Figure, Axes, float]:
    """Return an empty map for these layers and heads, and the font size that fits a cell."""
    layers, columns = (sorted(set(heads.column(name).to_pylist())) for name in ("layer", "head"))
    cell = min(LARGEST_CELL, WIDEST / len(columns))
    width, height = LEFT + cell * len(columns) + RIGHT, TOP + max(cell * len(layers), 1.4) + BOTTOM
    figure = Figure(figsize=(width, height), facecolor="white")
    across, down = cell * len(columns) / width, cell * len(layers) / height
    axes = figure.add_axes((LEFT / width, 1 - TOP / height - down, across, down))
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(len(layers) - 0.5, -0.5)
    for values, ticks in ((columns, axes.set_xticks), (layers, axes.set_yticks)):
        every = math.ceil(len(values) / 24)
        ticks(range(0, len(values), every), [str(value) for value in values[::every]])
    axes.tick_params(length=0)
    axes.set_xlabel("head")
    axes.set_ylabel("layer")
    for spine in axes.spines.values():
        spine.set_visible(False)
    where = ", ".join(str(choice[name]) for name in ("text", "length", "normalizer") if choice[name] is not None)
    axes.set_title(f"{title}\n{where}", fontsize=8, loc="left")
    return figure, axes, max(3.0, 22 * cell)


def _coordinates(heads: pa.Table) -> tuple[list[int], list[int]]:
    """Return column and row of every head on the map."""
    columns, layers = (heads[name].to_pylist() for name in ("head", "layer"))
    heads_shown, layers_shown = sorted(set(columns)), sorted(set(layers))
    return [heads_shown.index(head) for head in columns], [layers_shown.index(layer) for layer in layers]
