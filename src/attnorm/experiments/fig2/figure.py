"""Draw Figure 2 in the paper's layout, and a second figure that explains the printed critical N."""

from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnorm.experiments.experiment import Floats
from attnorm.experiments.fig2 import measure as pairs
from attnorm.experiments.fig2.measure import Distances, Point, Result, ks_statistic, ks_threshold
from attnorm.experiments.figure_style import CORRECTED, INK, MEASURED, NULL, PALE, PRINTED, letter, note, tidy

BOUND: dict[str, Any] = {"color": "#b3261e", "linestyle": (0, (6, 2)), "marker": "v", "markersize": 4, "linewidth": 1.2}
BARS: dict[str, Any] = {"capsize": 2.5, "elinewidth": 0.9}


def paper_figure(result: Result, setting: str) -> Figure:
    """(a) against L, (b) against N, (c) critical N."""
    figure = Figure(figsize=(11.4, 3.9), facecolor="white")
    a, b, c = figure.subplots(
        1, 3, gridspec_kw={"wspace": 0.3, "left": 0.06, "right": 0.99, "top": 0.73, "bottom": 0.17}
    )
    N = result.by_length[0].top_n
    _draw_distances(a, result.by_length, [point.length for point in result.by_length])
    a.set_xlabel("context length $L$ (tokens)")
    _log2_ticks(a, [point.length for point in result.by_length])
    a.set_ylabel(r"distance $\tilde{d}$ (median over heads)")
    letter(a, "a", f"$N$ = {N}")
    _draw_distances(b, result.by_n, [point.top_n for point in result.by_n])
    ends = (*a.get_ylim(), *b.get_ylim())
    for axes in (a, b):  # the same distances: one scale
        axes.set_ylim(min(ends), max(ends))
    b.set_ylabel(r"distance $\tilde{d}$ (median over heads)")
    b.set_xlabel("selected keys $N$")
    b.set_xticks([point.top_n for point in result.by_n], [str(point.top_n) for point in result.by_n])
    b.set_xticks([], minor=True)
    letter(b, "b", f"$L$ = {result.length}")
    _draw_critical(c, result)
    letter(c, "c", "critical $N$")
    handles, labels = a.get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper left", bbox_to_anchor=(0.05, 0.995), ncols=3)
    handles, labels = c.get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper right", bbox_to_anchor=(0.995, 0.995), ncols=1)
    spread = f"grey: quartiles over {result.at_panel.heads} heads; bars in (c): 95 % of resampled heads"
    note(figure, f"{setting}; {spread}")
    return figure


def _draw_distances(axes: Axes, points: tuple[Point, ...], x: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    medians: Callable[[str], list[float]] = lambda name: [float(np.median(getattr(p, name))) for p in points]  # noqa: E731
    low, high = ([float(np.quantile(point.measured, share)) for point in points] for share in (0.25, 0.75))
    axes.fill_between(x, low, high, color=INK, alpha=0.1, linewidth=0)
    axes.plot(x, medians("fixed_printed"), label="upper bound, true set (printed, holds)", **BOUND)
    axes.plot(x, medians("printed"), label="expectation, random set, as printed", **PRINTED)
    axes.plot(x, medians("measured"), label=r"measured distance $\tilde{d}$", **MEASURED)
    axes.fill_between(x, medians("lower"), medians("upper"), color=CORRECTED["color"], alpha=0.2, linewidth=0)
    axes.plot(x, medians("upper"), label="expectation, random set, corrected (band: its bounds)", **CORRECTED)
    tidy(axes)


def _draw_critical(axes: Axes, result: Result) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    lengths = np.array([point.length for point in result.by_length], dtype=float)
    axes.plot(lengths, 0.06 * lengths, color=PALE, linewidth=1, linestyle=(0, (1, 2)), label="0.06 $L$ (the paper)")
    for name, look, label in (
        (pairs.PRINTED, PRINTED, "printed expectation"),
        (pairs.UPPER, CORRECTED, "corrected (bounds: filled, hollow)"),
        (pairs.LOWER, {**CORRECTED, "markerfacecolor": "white", "linewidth": 0.9}, None),
    ):
        comparison = result.comparisons[name]
        values = np.array([point.top_n for point in comparison.critical])
        low, high = np.array([point.interval for point in comparison.critical]).T
        spread = np.nan_to_num(np.stack([values - low, high - values])).clip(min=0)
        axes.errorbar(lengths, values, yerr=spread, **{**look, "linestyle": "none"}, **BARS)
        law = comparison.law
        if law is not None:
            label_text = None if label is None else f"{label}: {law.coefficient:.2g} $L^{{{law.exponent:.2f}}}$"
            fit = {key: look[key] for key in ("color", "linestyle", "linewidth")}
            fit_lengths = lengths[np.isfinite(values)]  # the points of the fit
            axes.plot(fit_lengths, law.coefficient * fit_lengths**law.exponent, label=label_text, **fit)
    axes.set_xlabel("context length $L$ (tokens)")
    axes.set_ylabel("critical $N$ (KS test, level 0.01)")
    _log2_ticks(axes, [int(length) for length in lengths])
    axes.set_yticks([1, 10, 100, 1000], ["1", "10", "100", "1000"])
    axes.set_ylim(bottom=0.8)
    tidy(axes)


def why_figure(result: Result, setting: str) -> Figure:
    """(a) the two ratios that are the same, (b) the test's statistic, (c) fewer heads."""
    figure = Figure(figsize=(11.4, 3.9), facecolor="white")
    a, b, c = figure.subplots(
        1, 3, gridspec_kw={"wspace": 0.3, "left": 0.06, "right": 0.99, "top": 0.9, "bottom": 0.17}
    )
    distances = result.at_panel
    _draw_ratios(a, distances, result.critical(pairs.PRINTED).top_n)
    _draw_statistics(b, result)
    _draw_fewer_heads(c, result)
    note(figure, f"{setting}; L = {distances.length}, {distances.heads} heads")
    return figure


def _draw_ratios(axes: Axes, distances: Distances, critical: float) -> None:
    top_n = int(critical) if np.isfinite(critical) else 5
    column = distances.column(top_n)
    x = distances.output[:, column] / distances.context[:, column]
    y = distances.printed[:, column] / distances.measured[:, column]
    axes.set_xscale("log")
    axes.set_yscale("log")
    ends = [min(x.min(), y.min()) * 0.9, max(x.max(), y.max()) * 1.1]
    axes.plot(ends, ends, color=PALE, linewidth=0.8, linestyle="--", label="equal")
    axes.plot(x, y, "o", markersize=3.2, color=PRINTED["color"], alpha=0.55, markeredgewidth=0,
              label="as printed")  # fmt: skip
    y = distances.upper[:, column] / distances.measured[:, column]
    axes.plot(x, y, "s", markersize=3, color=CORRECTED["color"], alpha=0.55, markeredgewidth=0,
              label="corrected, upper end")  # fmt: skip
    axes.set_xlabel(r"whole output over selected part, $\|\bar{x}\| / \|s\|$")
    axes.set_ylabel("expectation over measured distance")
    axes.legend(loc="upper left", handletextpad=0.3)
    letter(axes, "a", f"one point per head, $N$ = {top_n}")
    tidy(axes)


def _draw_statistics(axes: Axes, result: Result) -> None:
    distances, permuted = result.at_panel, result.permuted
    axes.set_xscale("log", base=2)
    compared: list[tuple[Floats, Floats, dict[str, Any], str]] = [
        (distances.measured, distances.printed, PRINTED, r"$\tilde{d}$ against printed expectation"),
        (
            distances.context,
            distances.output,
            {**MEASURED, "marker": "x", "linewidth": 0.8},
            r"$\|s\|$ against $\|\bar{x}\|$",
        ),
        (permuted.measured, permuted.printed, NULL, "printed, values permuted"),
        (distances.measured, distances.upper, CORRECTED, r"$\tilde{d}$ against corrected, upper end"),
    ]
    for first, second, look, label in compared:
        axes.plot(distances.grid, ks_statistic(first, second), label=label, markevery=6, **look)
    threshold: dict[str, Any] = {"color": INK, "linewidth": 0.9, "linestyle": (0, (1, 2))}
    axes.axhline(ks_threshold(distances.heads), label="distinguished above this line", **threshold)
    axes.set_ylim(0, 1.45)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    _log2_ticks(axes, [4**power for power in range(6) if 4**power <= distances.length])
    axes.set_xlabel("selected keys $N$")
    axes.set_ylabel("Kolmogorov-Smirnov statistic")
    axes.legend(loc="upper right", fontsize=7.5, labelspacing=0.25)
    letter(axes, "b", "what the test compares")
    tidy(axes)


def _draw_fewer_heads(axes: Axes, result: Result) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes: list[int] = []
    for name, look, label in (
        (pairs.PRINTED, PRINTED, "printed expectation"),
        (pairs.UPPER, CORRECTED, "corrected, upper end"),
    ):
        rows = [row for row in result.fewer_heads if row["compared"] == name]
        sizes = [row["heads"] for row in rows]
        values, low, high = (np.array([row[key] for row in rows]) for key in ("critical_n", "low", "high"))
        spread = np.nan_to_num(np.stack([values - low, high - values])).clip(min=0)
        axes.errorbar(sizes, values, yerr=spread, label=label, **look, **BARS)
    _log2_ticks(axes, sizes)
    axes.set_yticks([1, 10, 100, 1000], ["1", "10", "100", "1000"])
    axes.set_ylim(0.8, 2500)
    axes.set_xlabel("heads in the test (random subsets)")
    axes.set_ylabel("critical $N$")
    axes.legend(loc="center right")
    letter(axes, "c", "against the number of heads")
    tidy(axes)


def _log2_ticks(axes: Axes, values: list[int]) -> None:
    axes.set_xticks(values, [str(value) for value in values])
    axes.set_xticks([], minor=True)
