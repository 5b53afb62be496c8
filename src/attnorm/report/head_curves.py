"""The curves of one head in six panels, against n, N and T, with the bounds of theory."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from numpy.typing import NDArray

from attnorm.analysis.result import Analysis
from attnorm.report.selection import chosen_rows, column, default_choice, measured_rows, relative_distances
from attnorm.report.vocabulary import ACCENT, INK, PALE, WARM, verdict_word

ROOM = {"left": 0.06, "right": 0.985, "top": 0.885, "bottom": 0.085, "wspace": 0.26, "hspace": 0.42}
MEASURED: dict[str, Any] = {"color": ACCENT, "linewidth": 1.6, "marker": "o", "markersize": 2.5}
BOUND: dict[str, Any] = {"color": INK, "linewidth": 1.0, "linestyle": "--"}
PRINTED: dict[str, Any] = {"color": INK, "linewidth": 1.0, "linestyle": ":"}
WARM_PRINTED: dict[str, Any] = {**PRINTED, "color": WARM}
FAINT: dict[str, Any] = {"color": PALE, "linewidth": 0.8}


def head_curves(analysis: Analysis, layer: int, head: int, choice: Mapping[str, Any] | None = None) -> Figure:
    """Draw entropy, gap and largest weight against n, separability and distance against N, sensitivity against T."""
    chosen = {**default_choice(analysis), **(choice or {}), "layer": layer, "head": head}
    numbers = measured_rows(analysis.heads, chosen).to_pylist()[0]
    figure = Figure(figsize=(7.2, 4.4), facecolor="white")
    panels = figure.subplots(2, 3, gridspec_kw=ROOM)
    verdict = verdict_word(numbers.get("verdict")).label
    title = f"Layer {layer}, head {head}: {verdict} ({chosen['text']}, {chosen['normalizer']})"
    figure.suptitle(title, fontsize=9, x=0.01, ha="left")
    lengths = _sorted(chosen_rows(analysis.by_length, chosen), "n")
    sets = _sorted(relative_distances(chosen_rows(analysis.top_n, chosen)), "top_n")
    steps = _sorted(chosen_rows(analysis.sensitivity, chosen), "temperature")
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
    known = np.isfinite(gap) & np.isfinite(n)
    if known.sum() > 1:
        logs = np.log(n[known])
        for tilt, style in ((1, "-"), (0, ":")):
            line = gap[known][0] + tilt * (logs - logs[0])
            axes.plot(n[known], line, **FAINT, linestyle=style, label=f"slope {tilt}")
    fitted = f", slope {slope:.2f}" if slope is not None and math.isfinite(slope) else ""
    _finish(axes, f"Effective gap (nats){fitted}", "n", n)


def _weight(axes: Axes, table: pa.Table) -> None:
    n = column(table, "n")
    _lines(axes, table, "n", ("max_weight", MEASURED, "largest weight"), ("weight_ceiling", BOUND, "ceiling"))
    axes.plot(n, 1 / n, **FAINT, label="1/n")
    axes.set_ylim(0, 1.02)
    _finish(axes, "Largest weight", "n", n)


def _separability(axes: Axes, table: pa.Table) -> None:
    _band(axes, table, "top_n", "separability_null_low", "separability_null_high", PALE)
    _lines(
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
    _lines(
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
    _lines(
        axes,
        table,
        "temperature",
        ("jacobian_norm", MEASURED, "exact norm"),
        ("bound", BOUND, "bound K/T"),
        ("gain_0.1", WARM_PRINTED, "g(T, 0.1)"),
    )
    _finish(axes, "Sensitivity", "T", column(table, "temperature"), logarithmic=True)


def _lines(axes: Axes, table: pa.Table, x: str, *lines: tuple[str, dict[str, Any], str]) -> None:
    """Draw columns against the column x, each with a look and a label; "_" is not in the legend."""
    for name, look, label in lines:
        axes.plot(column(table, x), column(table, name), **look, label=label)


def _finish(axes: Axes, title: str, x: str, values: NDArray[np.float64], *, logarithmic: bool = False) -> None:
    axes.set_title(title, fontsize=8, loc="left")
    axes.set_xlabel(x, labelpad=1)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
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


def _band(axes: Axes, table: pa.Table, x: str, low: str, high: str, colour: str) -> None:
    xs, below, above = column(table, x), column(table, low), column(table, high)
    known = np.isfinite(below) & np.isfinite(above)
    if known.sum() > 1:
        axes.fill_between(xs[known], below[known], above[known], color=colour, alpha=0.18, linewidth=0)


def _mark_horizon(axes: Axes, horizon: float | None) -> None:
    low, high = axes.get_xlim()
    if horizon is not None and low < horizon < high and axes.get_xscale() == "log":
        axes.axvline(horizon, color=WARM, linewidth=0.8, linestyle=(0, (3, 3)))
        axes.text(horizon, 1.0, " horizon", transform=axes.get_xaxis_transform(), fontsize=6, color=WARM, va="top")


def _sorted(table: pa.Table, name: str) -> pa.Table:
    return table.sort_by(name) if table.num_rows else table
