"""The figures of `attnorm lab dispersion` and `attnorm lab bench analyze`.

Dispersion: the weight kept against context length, both logarithmic, with a label at the end of every line. Lines that
coincide are drawn once and share a label. Groups differ in lightness and width, so that the figure can be read in gray.

Growth: time and memory of analyze() against length, next to the plain pass, on logarithmic axes. A dotted line in each
half has the expected slope: time grows with the square of the length, as attention does, memory with its first power.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from attnorm.figures import FONTS, place_labels, save_figure_files, wrapped
from attnorm_lab.bench.dispersion import MEANING, Curve, Dispersion, Verdict, percent, printed_lengths
from attnorm_lab.bench.results import Growth
from attnorm_lab.errata.figures import INK, PALE

FLOOR = 3e-6  # below the equal share of 131,072 keys, 7.6e-6
CEILING = 1.3
SAME = 1.01  # curves that never differ by more than this factor are one line

COLOR: dict[Verdict, str] = {"stays": "#0a4a8c", "fades": "#cf7426", "collapses": "#7d858f"}
SMALL = 9.7  # points
LINE_HEIGHT = 0.035  # of the plot's height
HEADING_ROWS = 1.6
HIGHEST = 1.13  # where the first heading may stand, in heights of the plot: beside the title
LABEL_WIDTH = 44  # characters


@dataclass(frozen=True)
class DispersionLine:
    """One or more curves that coincide, softmax first."""

    curves: tuple[Curve, ...]

    @property
    def shape(self) -> Curve:
        return self.curves[0]

    @property
    def names(self) -> list[str]:
        return [curve.label.replace(", ", " ") for curve in self.curves]

    @property
    def is_softmax(self) -> bool:
        return self.shape.name == "softmax"

    @property
    def color(self) -> str:
        return INK if self.is_softmax else COLOR[self.shape.verdict]


def save_dispersion_figure(dispersion: Dispersion, folder: Path) -> list[Path]:
    """Write dispersion.svg and dispersion.png to the folder; return their paths."""
    if not dispersion.curves:
        raise ValueError("expected at least one measured normalizer to plot, got none: all were skipped.")
    return save_figure_files(partial(dispersion_figure, dispersion), folder, "dispersion")


def dispersion_figure(dispersion: Dispersion) -> Figure:
    figure = Figure(figsize=(12.8, 7.2), facecolor="white")  # a 16:9 slide
    axes = figure.add_axes((0.07, 0.135, 0.525, 0.69))
    lengths = dispersion.curves[0].lengths
    _draw_dispersion_axes(axes, lengths)
    lines = merge_coinciding_curves(dispersion)
    for line in sorted(lines, key=lambda line: (line.is_softmax, line.shape.verdict == "stays")):
        _draw_line(axes, line)
    _label_ends(axes, lines)
    _label_falls(axes, [line for line in lines if line.shape.kept[-1] < FLOOR])
    _write_around(figure, dispersion)
    return figure


def merge_coinciding_curves(dispersion: Dispersion) -> list[DispersionLine]:
    """Return the lines to draw, from the most to the least weight kept."""
    lines: list[list[Curve]] = []
    for _, curves in dispersion.groups():
        for curve in curves:
            twin = next((line for line in lines if _coincide(line[0], curve)), None)
            if twin is None:
                lines.append([curve])
            else:
                twin.append(curve)
    return [DispersionLine(tuple(sorted(line, key=lambda curve: curve.name != "softmax"))) for line in lines]


def _coincide(a: Curve, b: Curve) -> bool:
    pairs = [(max(x, FLOOR), max(y, FLOOR)) for x, y in zip(a.kept, b.kept, strict=True)]
    return a.verdict == b.verdict and all(1 / SAME < x / y < SAME for x, y in pairs)


def _draw_dispersion_axes(axes: Axes, lengths: tuple[int, ...]) -> None:
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlim=(lengths[0], lengths[-1]), ylim=(FLOOR, CEILING))
    ticks = [lengths[index] for index in printed_lengths(lengths)]
    axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
    axes.set_xticks([], minor=True)
    shares = [1.0, 0.1, 0.01, 0.001, 1e-4, 1e-5]
    axes.set_yticks(shares, [f"{100 * share:g} %" for share in shares])
    axes.set_yticks([], minor=True)
    axes.tick_params(length=0, labelsize=10.5, labelcolor=INK, pad=7)
    axes.set_xlabel("keys in the context", fontsize=11, color=INK, labelpad=8)
    axes.grid(axis="y", color="#e9ebee", linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(PALE)
    axes.plot(lengths, [1 / n for n in lengths], color=PALE, linewidth=1.1, linestyle=(0, (1, 3)))
    middle = lengths[len(lengths) // 2]
    axes.text(
        middle, 0.6 / middle, "equal share, 1/n", fontsize=SMALL, color=PALE, ha="center", va="center",
        rotation=_angle(axes, middle), rotation_mode="anchor",
    )  # fmt: skip


def _angle(axes: Axes, n: int) -> float:
    """Return the angle of the line 1/n on the page, in degrees."""
    (x0, y0), (x1, y1) = axes.transData.transform([(n, 1 / n), (2 * n, 0.5 / n)])
    return math.degrees(math.atan2(y1 - y0, x1 - x0))


def _draw_line(axes: Axes, line: DispersionLine) -> None:
    curve = line.shape
    width = 3.2 if line.is_softmax else 2.4 if curve.verdict == "stays" else 1.4
    kept = [max(value, FLOOR * FLOOR) for value in curve.kept]
    style = (0, (5, 2)) if curve.verdict == "collapses" else "solid"
    axes.plot(curve.lengths, kept, color=line.color, linewidth=width, linestyle=style, solid_capstyle="round")


def _label_ends(axes: Axes, lines: list[DispersionLine]) -> None:
    """Write names at the right under the heading of their group, each connected to the end of its line."""
    entries: list[tuple[DispersionLine, bool]] = []  # a line, and whether this is the heading above it
    for before, line in pairwise([None, *lines]):
        assert line is not None
        if before is None or before.shape.verdict != line.shape.verdict:
            entries.append((line, True))
        entries.append((line, False))
    ends = [_height(axes, line.shape.kept[-1]) for line, _ in entries]
    texts = [wrapped(line.names, LABEL_WIDTH) for line, _ in entries]
    rows = [HEADING_ROWS if heading else len(text) for text, (_, heading) in zip(texts, entries, strict=True)]
    centers = place_labels(ends, [LINE_HEIGHT * count for count in rows], highest=HIGHEST)
    for (line, heading), end, center, text in zip(entries, ends, centers, texts, strict=True):
        if heading:
            _write_heading(axes, line.shape.verdict, center - LINE_HEIGHT * (HEADING_ROWS - 1) / 2)
        else:
            _write_label(axes, line, text, end, center + LINE_HEIGHT * (len(text) - 1) / 2)


def _height(axes: Axes, kept: float) -> float:
    """Return the height of a weight between the bottom (0) and the top (1) of the plot."""
    height: float = axes.transAxes.inverted().transform(axes.transData.transform((1, max(kept, FLOOR))))[1]
    return height


def _write_heading(axes: Axes, verdict: Verdict, center: float) -> None:
    write: dict[str, Any] = {"color": COLOR[verdict], "fontsize": SMALL}
    heading = axes.text(
        1.055, center, verdict.upper(), transform=axes.transAxes, va="center", fontweight="bold", **write
    )
    axes.annotate(
        MEANING[verdict], xy=(1, 0), xycoords=heading, xytext=(6, 0), textcoords="offset points", va="bottom", **write
    )


def _write_label(axes: Axes, line: DispersionLine, text: list[str], end: float, top: float) -> None:
    write: dict[str, Any] = {
        "transform": axes.transAxes, "color": line.color, "fontsize": SMALL, "va": "center",
        "fontweight": "bold" if line.is_softmax else "normal",
    }  # fmt: skip
    if line.shape.kept[-1] >= FLOOR:
        hair = ([1.003, 1.012, 1.04, 1.048], [end, end, top, top])
        axes.plot(*hair, transform=axes.transAxes, color=line.color, linewidth=0.7, clip_on=False)
    axes.text(1.138, top, percent(line.shape.kept[-1]), ha="right", **write)
    for row, part in enumerate(text):
        axes.text(1.153, top - row * LINE_HEIGHT, part, **write)


def _label_falls(axes: Axes, lines: list[DispersionLine]) -> None:
    """Write names beside the lines that leave the plot at the bottom."""
    for row, line in enumerate(sorted(lines, key=lambda line: _crossing(line.shape, FLOOR))):
        height = FLOOR * 2.6 * 2**row
        x = _crossing(line.shape, height) * 1.15
        axes.text(x, height, ", ".join(line.names), fontsize=SMALL, color=line.color, va="center")


def _crossing(curve: Curve, level: float) -> float:
    """Return the length at which the drawn curve falls below the level."""
    points = [
        (math.log(n), math.log(max(kept, FLOOR * FLOOR))) for n, kept in zip(curve.lengths, curve.kept, strict=True)
    ]
    wanted = math.log(level)
    for (x0, y0), (x1, y1) in pairwise(points):
        if y0 >= wanted > y1:
            return math.exp(x0 + (y0 - wanted) / (y0 - y1) * (x1 - x0))
    return float(curve.lengths[0])


def _write_around(figure: Figure, dispersion: Dispersion) -> None:
    left = 0.018
    figure.text(left, 0.935, "How much attention does a clear winner keep?", fontsize=19, fontweight="bold", color=INK)
    figure.text(left, 0.89, f"{dispersion.setting} Its share of the weight:", fontsize=11.5, color=INK)
    left_out = f"\nLeft out: {', '.join(dispersion.left_out)}." if dispersion.left_out else ""
    draws = f"Median of {dispersion.draws} draws; the winner is in the middle of the context. "
    note = (
        f"{draws}Settings not named are the defaults. Rows that sum to more than 1 are divided by their sum.{left_out}"
    )
    figure.text(left, 0.01, note, fontsize=8, color=PALE, linespacing=1.4)
    figure.text(0.985, 0.022, "attnorm lab dispersion", fontsize=8, color=PALE, ha="right")


OURS, PLAIN = "#0a4a8c", "#8b939d"


def save_growth_figure(growth: Growth, folder: Path) -> Path:
    """Write growth.svg to the folder; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "growth.svg"
    with matplotlib.rc_context(FONTS):
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
        _draw_growth_axes(axes, f"{title}   (dotted: as L{'²' * (power == 2)})", lengths)
        _draw_slope(axes, lengths, ours, power)
        for values, color, name in ((plain, PLAIN, "plain pass"), (ours, OURS, "analyze")):
            axes.plot(lengths, values, "o-", color=color, linewidth=2, markersize=5)
            axes.annotate(
                name, (lengths[-1], values[-1]), xytext=(7, 0), textcoords="offset points", va="center", fontsize=9,
                color=color,
            )  # fmt: skip
    figure.text(0.018, 0.94, "What measuring every head costs", fontsize=15, fontweight="bold", color=INK, va="top")
    about = f"{growth.what[:1].upper()}{growth.what[1:]}; {growth.setting}"
    figure.text(0.018, 0.025, about, fontsize=8, color=PALE)
    figure.text(0.985, 0.025, "attnorm lab bench analyze --out", fontsize=8, color=PALE, ha="right")
    return figure


def _draw_growth_axes(axes: Axes, title: str, lengths: Sequence[int]) -> None:
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
