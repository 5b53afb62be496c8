"""analysis.plot(), and figures for papers. Both need neither a display nor pyplot.

verdicts   the verdict of every head: a row per layer, a column per head
heads      one metric of every head, as a heat map
curves     one metric against the number n of visible keys, one line per head
head       six panels about one head

Figures for papers are SVG and PDF with letters as paths and without dates: the same analysis gives the same bytes.
"""

import io
import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

from attnorm.arithmetic import ceil_div
from attnorm.figures import INK, LETTERING, PALE, save, tidy
from attnorm.metrics.catalogue import BY_NAME, PER_ROW, Metric
from attnorm.report.views import (
    OTHER_COLORS,
    PANEL_METRICS,
    SCALE,
    VERDICT_COLORS,
    VERDICTS,
    chosen_rows,
    column,
    default_choice,
    measured_rows,
    relative_distances,
    verdict_word,
)
from attnorm.report_data import Tables
from attnorm.text import did_you_mean, visible

KINDS = ("verdicts", "heads", "curves", "head")
METRIC = "entropy_ratio"
_CHOICE = {"text": "text", "length": "length", "normalizer": "normalizer", "attention": "kind"}
_FIGURE_DPI = 144
ACCENT, WARM = "#3a49b0", "#a4430c"
STYLE: dict[Any, Any] = {
    **LETTERING, "font.size": 8, "axes.linewidth": 0.6,
    "text.parse_math": False,  # a dollar sign in the name of a text must not start a formula
}  # fmt: skip


class ShownFigure(Figure):
    """A matplotlib Figure that notebooks show although it has no pyplot window."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=_FIGURE_DPI)
        return buffer.getvalue()


def plot(
    tables: Tables,
    kind: str = "verdicts",
    metric: str | None = None,
    *,
    layer: int | None = None,
    head: int | None = None,
    **choice: Any,
) -> Figure:
    """Draw a figure of a kind, see above. choice: text, length, normalizer, attention."""
    if kind not in KINDS:
        raise ValueError(f"kind: expected {', '.join(map(repr, KINDS))}, got {kind!r}.")
    unknown = [name for name in choice if name not in _CHOICE]
    if unknown:
        raise TypeError(f"expected {', '.join(_CHOICE)}, layer or head, got {unknown[0]!r}.")
    conditions = {_CHOICE[name]: value for name, value in choice.items() if value is not None}
    if kind in ("verdicts", "head") and metric is not None:
        raise ValueError(f"metric: expected none for the kind {kind!r}, got {metric!r}. Use 'heads' or 'curves'.")
    if kind in ("verdicts", "heads") and (layer is not None or head is not None):
        raise ValueError(f"layer, head: expected none for the kind {kind!r}. Use 'curves' or 'head'.")
    with matplotlib.rc_context(STYLE):
        if kind == "verdicts":
            figure = verdict_map(tables, conditions)
        elif kind == "heads":
            figure = heat_map(tables, metric or METRIC, conditions)
        elif kind == "head":
            if layer is None or head is None:
                raise ValueError(f"layer, head: expected both, got {layer} and {head}.")
            figure = head_curves(tables, layer, head, conditions)
        else:
            figure = metric_curves(tables, metric or METRIC, conditions, layer=layer, head=head)
    return figure


def metric_curves(
    tables: Tables, metric: str, choice: dict[str, Any], *, layer: int | None = None, head: int | None = None
) -> Figure:
    """Draw a per-row metric against the visible keys n: one line per head, the median of all heads in black.

    layer, head: draw only that layer or head; a single head gets its quartiles as a band.
    """
    if metric not in PER_ROW:
        raise ValueError(f"metric: expected one of {', '.join(map(repr, PER_ROW))}, got {metric!r}.")
    full_choice = {**default_choice(tables), **choice}
    conditions = {
        **full_choice,
        **({} if layer is None else {"layer": layer}),
        **({} if head is None else {"head": head}),
    }
    table = measured_rows(tables["by_length"], conditions)
    about = BY_NAME[metric]
    figure = ShownFigure(figsize=(6.0, 3.6), facecolor="white", layout="constrained")
    axes = figure.subplots()
    lines = _lines_by_head(table, metric)
    layers = [layer_and_head[0] for layer_and_head in lines]
    norm = Normalize(min(layers), max(max(layers), min(layers) + 1))
    for (own_layer, _), (n, values) in lines.items():
        axes.plot(n, values, color=COLORS(norm(own_layer)), linewidth=0.9, alpha=0.75)
    if len(lines) == 1:
        (line,) = axes.lines
        line.set(color=ACCENT, linewidth=1.6, alpha=1.0, marker="o", markersize=2.5)
        only = table.sort_by("n")
        low, high = (column(only, f"{metric}_q{q}") for q in (25, 75))
        axes.fill_between(
            column(only, "n"), low, high, color=ACCENT, alpha=0.15, linewidth=0, label="middle half of rows"
        )
    else:
        axes.plot(*_median(table, metric), color=INK, linewidth=1.8, label="median of the heads")
        if max(layers) > min(layers):
            bar = figure.colorbar(ScalarMappable(norm, COLORS), ax=axes, pad=0.01, aspect=30)
            bar.outline.set_linewidth(0)
            bar.set_label("layer")
            bar.locator = MaxNLocator(integer=True)
            bar.update_ticks()
    axes.set_xscale("log")
    if about.logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    elif about.bounded:
        axes.set_ylim(about.bounded[0] - 0.02, about.bounded[1] + 0.02)
    n = sorted(set(column(table, "n").tolist()))
    axes.set_xticks(n[:: max(1, len(n) // 6)])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("visible keys n")
    axes.grid(axis="y", color=PALE, alpha=0.25, linewidth=0.5)
    tidy(axes, grid=False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=7)
    axes.set_title(f"{about.title}\n{_describe_choice(full_choice, layer, head)}", fontsize=8, loc="left")
    return figure


def _lines_by_head(table: pa.Table, metric: str) -> dict[tuple[int, int], tuple[Any, Any]]:
    """Return (layer, head) -> n and the metric, sorted by n."""
    layer, head = (table.column(name).to_numpy() for name in ("layer", "head"))
    n, values = column(table, "n"), column(table, metric)
    lines = {}
    for layer_and_head in sorted(set(zip(layer.tolist(), head.tolist(), strict=True))):
        order = np.flatnonzero((layer == layer_and_head[0]) & (head == layer_and_head[1]))
        order = order[np.argsort(n[order])]
        lines[layer_and_head] = n[order], values[order]
    return lines


def _median(table: pa.Table, metric: str) -> tuple[list[float], list[float]]:
    """Return n and the median over heads of each bin of n, without values that are not finite."""
    low, n, values = (column(table, name) for name in ("n_low", "n", metric))
    points = []
    for start in sorted(set(low.tolist())):
        bin_values = values[(low == start) & np.isfinite(values)]
        if len(bin_values):
            points.append((float(n[low == start].mean()), float(np.median(bin_values))))
    return [point[0] for point in points], [point[1] for point in points]


def _describe_choice(choice: Mapping[str, Any], layer: int | None = None, head: int | None = None) -> str:
    parts = [str(choice[name]) for name in ("text", "length", "normalizer") if choice[name] is not None]
    parts += [f"layer {layer}"] if layer is not None else []
    parts += [f"head {head}"] if head is not None else []
    return visible(", ".join(parts))


def save_figures(tables: Tables, folder: Path) -> list[Path]:
    """Write the verdicts, a heat map of each main metric and the curves of the worst head as SVG and PDF.

    Figures show the first text at the longest length for the normalizer that the model runs; plot() draws any other.
    """
    heads = chosen_rows(tables["heads"], default_choice(tables))
    if not heads.num_rows:
        raise ValueError("expected at least one measured head, got none")
    paths = _save_formats(partial(verdict_map, tables), folder / "verdicts")
    for name in PANEL_METRICS:
        if np.isfinite(column(heads, name)).any():
            paths += _save_formats(partial(heat_map, tables, name), folder / f"map-{name}")
    layer, head = worst_head(heads)
    return paths + _save_formats(partial(head_curves, tables, layer, head), folder / f"layer-{layer}-head-{head}")


def worst_head(heads: pa.Table) -> tuple[int, int]:
    """Return layer and head with the worst verdict, and among those with the highest entropy.

    "silent" and "broken" come last: their curves may be empty.
    """
    last = ["silent", "broken"]
    order = [word.name for word in VERDICTS if word.name not in last] + last

    def urgency(row: Mapping[str, Any]) -> tuple[int, float]:
        spread = row["entropy_ratio"]
        rank = order.index(row["verdict"]) if row["verdict"] in order else len(order)
        return rank, -spread if spread is not None and math.isfinite(spread) else 0.0

    row = min(heads.select(["verdict", "entropy_ratio", "layer", "head"]).to_pylist(), key=urgency)
    return row["layer"], row["head"]


def _save_formats(draw: Callable[[], Figure], stem: Path) -> list[Path]:
    stem.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        return save(draw(), stem, ("svg", "pdf"))


COLORS = LinearSegmentedColormap.from_list("attnorm", SCALE)
LARGEST_CELL, WIDEST = 0.34, 6.2  # inches: of one cell, of all columns
LEFT, RIGHT, TOP, BOTTOM = 0.55, 1.95, 0.5, 0.5  # inches around the cells
MISSING: dict[str, Any] = {"facecolor": "white", "edgecolor": "#bdbab2", "hatch": "////", "linewidth": 0.4}
ROOM = {"left": 0.06, "right": 0.985, "top": 0.885, "bottom": 0.085, "wspace": 0.26, "hspace": 0.42}
MEASURED: dict[str, Any] = {"color": ACCENT, "linewidth": 1.6, "marker": "o", "markersize": 2.5}
BOUND: dict[str, Any] = {"color": INK, "linewidth": 1.0, "linestyle": "--"}
PRINTED: dict[str, Any] = {"color": INK, "linewidth": 1.0, "linestyle": ":"}
WARM_PRINTED: dict[str, Any] = {**PRINTED, "color": WARM}
FAINT: dict[str, Any] = {"color": PALE, "linewidth": 0.8}


def verdict_map(tables: Tables, choice: Mapping[str, Any] | None = None) -> Figure:
    """Draw verdicts as colors and marks. choice: text, length, normalizer and kind."""
    full_choice = {**default_choice(tables), **(choice or {})}
    heads = measured_rows(tables["heads"], full_choice)
    words = [verdict_word(name) for name in heads.column("verdict").to_pylist()]
    figure, axes, size = _grid(heads, "Verdicts", full_choice)
    for word, x, y in zip(words, *_coordinates(heads), strict=True):
        fill, ink = VERDICT_COLORS.get(word.name, OTHER_COLORS)
        _cell(axes, x, y, facecolor=fill)
        axes.text(x, y, word.mark, ha="center", va="center", color=ink, fontsize=size, fontweight="bold")
    order = [word for word in dict.fromkeys([*VERDICTS, *words]) if word in words]
    axes.legend(
        handles=[
            Patch(
                facecolor=VERDICT_COLORS.get(word.name, OTHER_COLORS)[0],
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


def heat_map(tables: Tables, metric: str, choice: Mapping[str, Any] | None = None) -> Figure:
    """Draw one metric of the catalogue; missing values are hatched."""
    if metric not in BY_NAME:
        raise ValueError(f"unknown metric {metric!r}; {did_you_mean(metric, BY_NAME)}")
    full_choice = {**default_choice(tables), **(choice or {})}
    heads, about = measured_rows(tables["heads"], full_choice), BY_NAME[metric]
    values = column(heads, metric)
    norm = _norm(about, values)
    figure, axes, _ = _grid(heads, about.title, full_choice)
    for value, x, y in zip(values, *_coordinates(heads), strict=True):
        _cell(axes, x, y, **({"facecolor": COLORS(norm(value))} if _is_drawable(about, value) else MISSING))
    box, width = axes.get_position(), figure.get_figwidth()
    beside = figure.add_axes((box.x1 + 0.2 / width, box.y0, 0.12 / width, box.height))
    bar = figure.colorbar(ScalarMappable(norm, COLORS), cax=beside)
    bar.outline.set_linewidth(0)
    beside.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    beside.yaxis.set_minor_locator(NullLocator())
    return figure


def _cell(axes: Axes, x: int, y: int, **look: Any) -> None:
    axes.add_patch(Rectangle((x - 0.46, y - 0.46), 0.92, 0.92, **{"linewidth": 0, **look}))


def _is_drawable(metric: Metric, value: float) -> bool:
    return bool(np.isfinite(value) and (value > 0 or not metric.logarithmic))


def _norm(metric: Metric, values: NDArray[np.float64]) -> Normalize:
    usable = [float(value) for value in values if _is_drawable(metric, value)] or [1.0]
    low, high = metric.bounded or (min(usable), max(usable))
    if metric.logarithmic:
        return LogNorm(low, high) if high > low else LogNorm(0.9 * low, 1.1 * low)
    return Normalize(low, high) if high > low else Normalize(low - 0.5, low + 0.5)


def _grid(heads: pa.Table, title: str, choice: Mapping[str, Any]) -> tuple[Figure, Axes, float]:
    """Return an empty map for these layers and heads, and the font size that fits a cell."""
    layers, columns = (sorted(set(heads.column(name).to_pylist())) for name in ("layer", "head"))
    cell = min(LARGEST_CELL, WIDEST / len(columns))
    width, height = LEFT + cell * len(columns) + RIGHT, TOP + max(cell * len(layers), 1.4) + BOTTOM
    figure = ShownFigure(figsize=(width, height), facecolor="white")
    across, down = cell * len(columns) / width, cell * len(layers) / height
    axes = figure.add_axes((LEFT / width, 1 - TOP / height - down, across, down))
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(layers) - 0.5, -0.5))
    for values, ticks in ((columns, axes.set_xticks), (layers, axes.set_yticks)):
        tick_step = ceil_div(len(values), 24)
        ticks(range(0, len(values), tick_step), [str(value) for value in values[::tick_step]])
    axes.tick_params(length=0)
    axes.set(xlabel="head", ylabel="layer")
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_title(f"{title}\n{_describe_choice(choice)}", fontsize=8, loc="left")
    return figure, axes, max(3.0, 22 * cell)


def _coordinates(heads: pa.Table) -> tuple[list[int], list[int]]:
    """Return column and row of every head on the map."""
    columns, layers = (heads[name].to_pylist() for name in ("head", "layer"))
    heads_shown, layers_shown = sorted(set(columns)), sorted(set(layers))
    return [heads_shown.index(head) for head in columns], [layers_shown.index(layer) for layer in layers]


def head_curves(tables: Tables, layer: int, head: int, choice: Mapping[str, Any] | None = None) -> Figure:
    """Draw entropy, gap and largest weight against n, separability and distance against N, sensitivity against T."""
    full_choice = {**default_choice(tables), **(choice or {}), "layer": layer, "head": head}
    numbers = measured_rows(tables["heads"], full_choice).to_pylist()[0]
    figure = ShownFigure(figsize=(7.2, 4.4), facecolor="white")
    panels = figure.subplots(2, 3, gridspec_kw=ROOM)
    verdict = verdict_word(numbers.get("verdict")).label
    title = f"Layer {layer}, head {head}: {verdict} ({full_choice['text']}, {full_choice['normalizer']})"
    figure.suptitle(title, fontsize=9, x=0.01, ha="left")
    lengths = _sort_by(chosen_rows(tables["by_length"], full_choice), "n")
    sets = _sort_by(relative_distances(chosen_rows(tables["top_n"], full_choice)), "top_n")
    steps = _sort_by(chosen_rows(tables["sensitivity"], full_choice), "temperature")
    _entropy(panels[0, 0], lengths)
    _gap(panels[0, 1], lengths, numbers.get("gap_slope"))
    _weight(panels[0, 2], lengths)
    _separability(panels[1, 0], sets)
    _distance(panels[1, 1], sets)
    _sensitivity(panels[1, 2], steps)
    for axes in panels[0]:
        _mark_horizon(axes, numbers.get("horizon"))
    return figure


def _entropy(axes: Axes, table: pa.Table) -> None:
    n = column(table, "n")
    _band(axes, table, "n", "entropy_nats_q25", "entropy_nats_q75", ACCENT)
    axes.plot(n, np.log(n), **FAINT, label="log n")
    axes.plot(n, column(table, "entropy_nats"), **MEASURED, label="entropy")
    axes.plot(n, column(table, "entropy_floor"), **BOUND, label="floor")
    _finish(axes, "Entropy (nats)", "n", n)


def _gap(axes: Axes, table: pa.Table, slope: float | None) -> None:
    n, gap = column(table, "n"), column(table, "effective_gap")
    _band(axes, table, "n", "effective_gap_q25", "effective_gap_q75", ACCENT)
    axes.plot(n, gap, **MEASURED, label="gap")
    finite = np.isfinite(gap) & np.isfinite(n)
    if finite.sum() > 1:
        logs = np.log(n[finite])
        for tilt, style in ((1, "-"), (0, ":")):
            line = gap[finite][0] + tilt * (logs - logs[0])
            axes.plot(n[finite], line, **FAINT, linestyle=style, label=f"slope {tilt}")
    fitted = f", slope {slope:.2f}" if slope is not None and math.isfinite(slope) else ""
    _finish(axes, f"Effective gap (nats){fitted}", "n", n)


def _weight(axes: Axes, table: pa.Table) -> None:
    n = column(table, "n")
    _draw_lines(axes, table, "n", ("max_weight", MEASURED, "largest weight"), ("weight_ceiling", BOUND, "ceiling"))
    axes.plot(n, 1 / n, **FAINT, label="1/n")
    axes.set_ylim(0, 1.02)
    _finish(axes, "Largest weight", "n", n)


def _separability(axes: Axes, table: pa.Table) -> None:
    _band(axes, table, "top_n", "separability_null_low", "separability_null_high", PALE)
    _draw_lines(
        axes,
        table,
        "top_n",
        ("separability", MEASURED, "measured"),
        ("separability_null", FAINT, "permuted"),
        ("separability_lower", PRINTED, "moment bounds"),
        ("separability_upper", PRINTED, "_"),
    )
    axes.set_ylim(0, 1.02)
    _finish(axes, "Separability Ns/N", "N", column(table, "top_n"))


def _distance(axes: Axes, table: pa.Table) -> None:
    _band(axes, table, "top_n", "random_lower", "random_upper", PALE)
    _draw_lines(
        axes,
        table,
        "top_n",
        ("relative_distance", MEASURED, "measured"),
        ("fixed_tight", BOUND, "fixed bound"),
        ("fixed_printed", PRINTED, "fixed, printed"),
        ("random_printed", WARM_PRINTED, "random, printed"),
    )
    _finish(axes, "Distance over (n - N) ‖s‖", "N", column(table, "top_n"), logarithmic=True)


def _sensitivity(axes: Axes, table: pa.Table) -> None:
    _draw_lines(
        axes,
        table,
        "temperature",
        ("jacobian_norm", MEASURED, "exact norm"),
        ("bound", BOUND, "bound K/T"),
        ("gain_0.1", WARM_PRINTED, "g(T, 0.1)"),
    )
    _finish(axes, "Sensitivity", "T", column(table, "temperature"), logarithmic=True)


def _draw_lines(axes: Axes, table: pa.Table, x: str, *lines: tuple[str, dict[str, Any], str]) -> None:
    """Draw columns against the column x, each with a look and a label; "_" is not in the legend."""
    for name, look, label in lines:
        axes.plot(column(table, x), column(table, name), **look, label=label)


def _finish(axes: Axes, title: str, x: str, values: NDArray[np.float64], *, logarithmic: bool = False) -> None:
    axes.set_title(title, fontsize=8, loc="left")
    axes.set_xlabel(x, labelpad=1)
    tidy(axes, grid=False)
    drawn = [line for line in axes.lines if np.isfinite(np.asarray(line.get_ydata(), dtype=float)).any()]
    if len(drawn) < 2:
        for line in list(axes.lines):
            line.remove()
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color=PALE)
        axes.set_xticks([])
        axes.set_yticks([])
        return
    axes.set_xscale("log")
    if logarithmic:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 50 * low else (1,)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    few = values if len(values) <= 7 else values[:: len(values) // 4]
    axes.set_xticks(few, [f"{value:,.0f}" if value >= 10 else f"{value:,.3g}" for value in few])
    axes.set_xticks([], minor=True)
    axes.grid(axis="y", color="#ebe9e3", linewidth=0.6)
    named = [line for line in drawn if not str(line.get_label()).startswith("_")]
    axes.legend(handles=named, fontsize=6, frameon=False)


def _band(axes: Axes, table: pa.Table, x: str, low: str, high: str, color: str) -> None:
    xs, below, above = column(table, x), column(table, low), column(table, high)
    finite = np.isfinite(below) & np.isfinite(above)
    if finite.sum() > 1:
        axes.fill_between(xs[finite], below[finite], above[finite], color=color, alpha=0.18, linewidth=0)


def _mark_horizon(axes: Axes, horizon: float | None) -> None:
    low, high = axes.get_xlim()
    if horizon is not None and low < horizon < high and axes.get_xscale() == "log":
        axes.axvline(horizon, color=WARM, linewidth=0.8, linestyle=(0, (3, 3)))
        axes.text(horizon, 1.0, " horizon", transform=axes.get_xaxis_transform(), fontsize=6, color=WARM, va="top")


def _sort_by(table: pa.Table, name: str) -> pa.Table:
    return table.sort_by(name) if table.num_rows else table
