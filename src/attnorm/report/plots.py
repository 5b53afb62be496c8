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
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from attnorm.analysis.result import Analysis
from attnorm.metrics.catalogue import BY_NAME, PER_ROW
from attnorm.report.head_figures import COLOURS, head_curves, heat_map, verdict_map
from attnorm.report.selection import chosen_rows, column, default_choice, measured_rows
from attnorm.report.vocabulary import ACCENT, INK, LETTERING, PALE, PANEL_METRICS, VERDICTS
from attnorm.safe_text import visible

KINDS = ("verdicts", "heads", "curves", "head")
METRIC = "entropy_ratio"
_CHOICE = {"text": "text", "length": "length", "normalizer": "normalizer", "attention": "kind"}
_FIGURE_DPI = 144


class ShownFigure(Figure):
    """A matplotlib Figure that notebooks show although it has no pyplot window."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=_FIGURE_DPI)
        return buffer.getvalue()


def plot(
    analysis: Analysis,
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
    with matplotlib.rc_context(LETTERING):
        if kind == "verdicts":
            figure = verdict_map(analysis, conditions)
        elif kind == "heads":
            figure = heat_map(analysis, metric or METRIC, conditions)
        elif kind == "head":
            if layer is None or head is None:
                raise ValueError(f"layer, head: expected both, got {layer} and {head}.")
            figure = head_curves(analysis, layer, head, conditions)
        else:
            figure = metric_curves(analysis, metric or METRIC, conditions, layer=layer, head=head)
    figure.__class__ = ShownFigure  # the functions above return plain figures
    return figure


def metric_curves(
    analysis: Analysis, metric: str, choice: dict[str, Any], *, layer: int | None = None, head: int | None = None
) -> Figure:
    """Draw a per-row metric against the visible keys n: one line per head, the median of all heads in black.

    layer, head: draw only that layer or head; a single head gets its quartiles as a band.
    """
    if metric not in PER_ROW:
        raise ValueError(f"metric: expected one of {', '.join(map(repr, PER_ROW))}, got {metric!r}.")
    full_choice = {**default_choice(analysis), **choice}
    conditions = {
        **full_choice,
        **({} if layer is None else {"layer": layer}),
        **({} if head is None else {"head": head}),
    }
    table = measured_rows(analysis.by_length, conditions)
    about = BY_NAME[metric]
    figure = Figure(figsize=(6.0, 3.6), facecolor="white", layout="constrained")
    axes = figure.subplots()
    lines = _lines(table, metric)
    layers = [layer_and_head[0] for layer_and_head in lines]
    norm = Normalize(min(layers), max(max(layers), min(layers) + 1))
    for (own_layer, _), (n, values) in lines.items():
        axes.plot(n, values, color=COLOURS(norm(own_layer)), linewidth=0.9, alpha=0.75)
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
            bar = figure.colorbar(ScalarMappable(norm, COLOURS), ax=axes, pad=0.01, aspect=30)
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
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=7)
    label = f"{about.label} ({about.unit})" if about.unit else about.label
    axes.set_title(f"{label}\n{_describe_choice(full_choice, layer, head)}", fontsize=8, loc="left")
    return figure


def _lines(table: pa.Table, metric: str) -> dict[tuple[int, int], tuple[Any, Any]]:
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


def _describe_choice(choice: dict[str, Any], layer: int | None, head: int | None) -> str:
    parts = [str(choice[name]) for name in ("text", "length", "normalizer") if choice[name] is not None]
    parts += [f"layer {layer}"] if layer is not None else []
    parts += [f"head {head}"] if head is not None else []
    return visible(", ".join(parts))


def save_figures(analysis: Analysis, folder: Path) -> list[Path]:
    """Write the verdicts, a heat map of each main metric and the curves of the worst head as SVG and PDF.

    Figures show the first text at the longest length for the normalizer that the model runs; plot() draws any other.
    """
    heads = chosen_rows(analysis.heads, default_choice(analysis))
    if not heads.num_rows:
        raise ValueError("expected at least one measured head, got none")
    paths = _save_formats(partial(verdict_map, analysis), folder / "verdicts")
    for name in PANEL_METRICS:
        if np.isfinite(column(heads, name)).any():
            paths += _save_formats(partial(heat_map, analysis, name), folder / f"map-{name}")
    layer, head = worst_head(heads)
    return paths + _save_formats(partial(head_curves, analysis, layer, head), folder / f"layer-{layer}-head-{head}")


def worst_head(heads: pa.Table) -> tuple[int, int]:
    """Return layer and head with the worst verdict, "broken" last, and among those with the highest entropy."""
    order = [word.name for word in VERDICTS if word.name != "broken"] + ["broken"]

    def urgency(row: Mapping[str, Any]) -> tuple[int, float]:
        spread = row["entropy_ratio"]
        rank = order.index(row["verdict"]) if row["verdict"] in order else len(order)
        return rank, -spread if spread is not None and math.isfinite(spread) else 0.0

    row = min(heads.select(["verdict", "entropy_ratio", "layer", "head"]).to_pylist(), key=urgency)
    return row["layer"], row["head"]


def _save_formats(draw: Callable[[], Figure], stem: Path) -> list[Path]:
    stem.parent.mkdir(parents=True, exist_ok=True)
    svg, pdf = stem.parent / f"{stem.name}.svg", stem.parent / f"{stem.name}.pdf"
    with matplotlib.rc_context(LETTERING):
        figure = draw()
        figure.savefig(svg, metadata={"Date": None})
        figure.savefig(pdf, metadata={"CreationDate": None})
    return [svg, pdf]
