"""analysis.plot(): the figures of an analysis as matplotlib objects, without a display and without pyplot.

verdicts   the verdict of every head, layers down and heads across
heads      one metric of every head, as a heat map
curves     one metric against the number n of visible keys, a line for each head
head       the six panels of one head
"""

import io
from typing import Any

import matplotlib
import numpy as np
import pyarrow as pa
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from attnorm.analysis.visible import visible
from attnorm.metrics.catalogue import BY_NAME, PER_ROW
from attnorm.report.head_curves import head_curves
from attnorm.report.head_maps import COLOURS, heat_map, verdict_map
from attnorm.report.palette import ACCENT, INK, LETTERING, PALE
from attnorm.report.selection import chosen_rows, column, default_choice

KINDS = ("verdicts", "heads", "curves", "head")
METRIC = "entropy_ratio"
_CHOICE = {"text": "text", "length": "length", "normalizer": "normalizer", "attention": "kind"}
_FIGURE_DPI = 144


class ShownFigure(Figure):
    """A matplotlib Figure that notebooks show although it belongs to no pyplot window."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=_FIGURE_DPI)
        return buffer.getvalue()


def plot(
    analysis: Any,
    kind: str = "verdicts",
    metric: str | None = None,
    *,
    layer: int | None = None,
    head: int | None = None,
    **choice: Any,
) -> Figure:
    """The figure of that kind; see the module's docstring. choice: text, length, normalizer, attention."""
    if kind not in KINDS:
        raise ValueError(f"expected a plot of the kind {', '.join(map(repr, KINDS))}, got {kind!r}.")
    unknown = [name for name in choice if name not in _CHOICE]
    if unknown:
        raise TypeError(f"expected {', '.join(_CHOICE)}, layer or head, got {unknown[0]!r}.")
    chosen = {_CHOICE[name]: value for name, value in choice.items() if value is not None}
    if kind in ("verdicts", "head") and metric is not None:
        raise ValueError(f"expected no metric for the kind {kind!r}, got {metric!r}. Use 'heads' or 'curves'.")
    if kind in ("verdicts", "heads") and (layer is not None or head is not None):
        raise ValueError(f"expected no layer and head for the kind {kind!r}. Use 'curves' or 'head'.")
    with matplotlib.rc_context(LETTERING):
        if kind == "verdicts":
            figure = verdict_map(analysis, chosen)
        elif kind == "heads":
            figure = heat_map(analysis, metric or METRIC, chosen)
        elif kind == "head":
            if layer is None or head is None:
                raise ValueError(f"expected a layer and a head, got layer {layer} and head {head}. Give both.")
            figure = head_curves(analysis, layer, head, chosen)
        else:
            figure = metric_curves(analysis, metric or METRIC, chosen, layer=layer, head=head)
    figure.__class__ = ShownFigure  # drawn by functions that know nothing of notebooks
    return figure


def metric_curves(
    analysis: Any, metric: str, choice: dict[str, Any], *, layer: int | None = None, head: int | None = None
) -> Figure:
    """A metric of each row against its visible keys n: one line per head, the median of all heads in black.

    layer, head: only the lines of that layer, or of that head, which then has its quartiles as a band.
    """
    if metric not in PER_ROW:
        raise ValueError(f"expected a metric of each row: {', '.join(map(repr, PER_ROW))}; got {metric!r}.")
    chosen = {**default_choice(analysis), **choice}
    wanted = {**chosen, **({} if layer is None else {"layer": layer}), **({} if head is None else {"head": head})}
    table = chosen_rows(analysis.by_length, wanted)
    if not table.num_rows:
        asked = ", ".join(f"{name} {value!r}" for name, value in wanted.items())
        raise ValueError(f"expected a head that was measured, got {asked}.")
    about = BY_NAME[metric]
    figure = Figure(figsize=(6.0, 3.6), facecolor="white", layout="constrained")
    axes = figure.subplots()
    lines = _lines(table, metric)
    layers = [where[0] for where in lines]
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
    axes.set_title(f"{label}\n{_where(chosen, layer, head)}", fontsize=8, loc="left")
    return figure


def _lines(table: pa.Table, metric: str) -> dict[tuple[int, int], tuple[Any, Any]]:
    """(layer, head) -> n and the metric, sorted by n."""
    layer, head = (table.column(name).to_numpy() for name in ("layer", "head"))
    n, values = column(table, "n"), column(table, metric)
    found = {}
    for where in sorted(set(zip(layer.tolist(), head.tolist(), strict=True))):
        own = np.flatnonzero((layer == where[0]) & (head == where[1]))
        own = own[np.argsort(n[own])]
        found[where] = n[own], values[own]
    return found


def _median(table: pa.Table, metric: str) -> tuple[list[float], list[float]]:
    """By bin of n, the middle of the heads whose number is finite."""
    low, n, values = (column(table, name) for name in ("n_low", "n", metric))
    points = []
    for start in sorted(set(low.tolist())):
        own = values[(low == start) & np.isfinite(values)]
        if len(own):
            points.append((float(n[low == start].mean()), float(np.median(own))))
    return [point[0] for point in points], [point[1] for point in points]


def _where(choice: dict[str, Any], layer: int | None, head: int | None) -> str:
    parts = [str(choice[name]) for name in ("text", "length", "normalizer") if choice[name] is not None]
    parts += [f"layer {layer}"] if layer is not None else []
    parts += [f"head {head}"] if head is not None else []
    return visible(", ".join(parts))
