"""All heads at once, layers down and heads across: their verdicts, or one metric as a heat map."""

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

from attnorm.metrics.catalogue import BY_NAME, Metric
from attnorm.report.palette import OTHER_COLOURS, SCALE, VERDICT_COLOURS
from attnorm.report.selection import chosen_rows, column, default_choice
from attnorm.report.vocabulary import VERDICTS, verdict_word

COLOURS = LinearSegmentedColormap.from_list("attnorm", SCALE)
LARGEST_CELL, WIDEST = 0.34, 6.2  # inches: of one cell, of all columns
LEFT, RIGHT, TOP, BOTTOM = 0.55, 1.95, 0.5, 0.5  # inches around the cells
MISSING: dict[str, Any] = {"facecolor": "white", "edgecolor": "#bdbab2", "hatch": "////", "linewidth": 0.4}


def verdict_map(analysis: Any, choice: Mapping[str, Any] | None = None) -> Figure:
    """Each cell with the colour and the mark of its verdict. `choice` may name text, length, normalizer and kind."""
    chosen = {**default_choice(analysis), **(choice or {})}
    heads = _measured(analysis.heads, chosen)
    words = [verdict_word(name) for name in heads.column("verdict").to_pylist()]
    figure, axes, size = _grid(heads, "Verdicts", chosen)
    for word, x, y in zip(words, *_places(heads), strict=True):
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


def heat_map(analysis: Any, metric: str, choice: Mapping[str, Any] | None = None) -> Figure:
    """One metric of the catalogue; missing values are hatched."""
    if metric not in BY_NAME:
        raise ValueError(f"unknown metric {metric!r}; expected one of {', '.join(map(repr, BY_NAME))}")
    chosen = {**default_choice(analysis), **(choice or {})}
    heads, about = _measured(analysis.heads, chosen), BY_NAME[metric]
    values = column(heads, metric)
    norm = _norm(about, values)
    figure, axes, _ = _grid(heads, f"{about.label} ({about.unit})" if about.unit else about.label, chosen)
    for value, x, y in zip(values, *_places(heads), strict=True):
        _cell(axes, x, y, **({"facecolor": COLOURS(norm(value))} if _drawable(about, value) else MISSING))
    box, width = axes.get_position(), figure.get_figwidth()
    beside = figure.add_axes((box.x1 + 0.2 / width, box.y0, 0.12 / width, box.height))
    bar = figure.colorbar(ScalarMappable(norm, COLOURS), cax=beside)
    bar.outline.set_linewidth(0)
    beside.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    beside.yaxis.set_minor_locator(NullLocator())
    return figure


def _measured(heads: pa.Table, choice: Mapping[str, Any]) -> pa.Table:
    found = chosen_rows(heads, choice)
    if not found.num_rows:
        asked = ", ".join(f"{name} {value!r}" for name, value in choice.items())
        raise ValueError(f"no head was measured with {asked}")
    return found


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
    """An empty map with room for the layers and heads; the font size that fits a cell."""
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


def _places(heads: pa.Table) -> tuple[list[int], list[int]]:
    """Column and line of every head on the map."""
    places = []
    for name in ("head", "layer"):
        values = heads.column(name).to_pylist()
        order = {value: place for place, value in enumerate(sorted(set(values)))}
        places.append([order[value] for value in values])
    return places[0], places[1]
