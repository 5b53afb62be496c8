"""Draw time and memory of analyze() against length, next to the plain pass, on logarithmic axes.

A dotted line in each half has the expected slope: time grows with the square of the length, as attention does, and
memory with its first power.
"""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from attnorm.bench.results import Growth
from attnorm.figure_files import INK, LETTERING, PALE

OURS, PLAIN = "#0a4a8c", "#8b939d"


def save_growth_figure(growth: Growth, folder: Path) -> Path:
    """Write growth.svg to the folder; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "growth.svg"
    with matplotlib.rc_context(LETTERING):
        growth_figure(growth).savefig(path, metadata={"Date": None})
    return path


def growth_figure(growth: Growth) -> Figure:
    figure = Figure(figsize=(9.6, 4.4), facecolor="white")
    lengths = [point.length for point in growth.points]
    halves = (
        ("Time, s", 2, [p.seconds for p in growth.points], [p.plain_seconds for p in growth.points]),
        ("Memory of the pass, MB", 1, [p.extra_mb for p in growth.points], [p.plain_extra_mb for p in growth.points]),
    )
    for left, (title, power, ours, plain) in zip((0.07, 0.565), halves, strict=True):
        axes = figure.add_axes((left, 0.16, 0.36, 0.6))
        _draw_axes(axes, f"{title}   (dotted: as L{'²' * (power == 2)})", lengths)
        _draw_slope(axes, lengths, ours, power)
        for values, colour, name in ((plain, PLAIN, "plain pass"), (ours, OURS, "analyze")):
            axes.plot(lengths, values, "o-", color=colour, linewidth=2, markersize=5)
            axes.annotate(
                name, (lengths[-1], values[-1]), xytext=(7, 0), textcoords="offset points", va="center", fontsize=9,
                color=colour,
            )  # fmt: skip
    figure.text(0.018, 0.94, "What measuring every head costs", fontsize=15, fontweight="bold", color=INK, va="top")
    about = f"{growth.what[:1].upper()}{growth.what[1:]}; {growth.setting}"
    figure.text(0.018, 0.025, about, fontsize=8, color=PALE)
    figure.text(0.985, 0.025, "attnorm bench analyze --out", fontsize=8, color=PALE, ha="right")
    return figure


def _draw_axes(axes: Axes, title: str, lengths: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{length // 1024}k" if length >= 1024 else f"{length}" for length in lengths])
    axes.set_xticks([], minor=True)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.tick_params(length=0, labelsize=9, labelcolor=INK)
    axes.grid(color="#e9ebee", linewidth=0.8)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_title(title, fontsize=10.5, color=INK, loc="left")
    axes.set_xlabel("tokens", fontsize=9.5, color=INK)


def _draw_slope(axes: Axes, lengths: Sequence[int], values: Sequence[float], power: int) -> None:
    """Draw the expected slope through the last point."""
    line = [values[-1] * (length / lengths[-1]) ** power for length in lengths]
    axes.plot(lengths, line, ":", color=INK, linewidth=1)
