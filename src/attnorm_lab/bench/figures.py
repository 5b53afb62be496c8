"""The figures of `attnorm lab dispersion` and `attnorm lab bench analyze`.

Dispersion: the weight kept against context length, both logarithmic, with a label at the end of every line. Lines that
coincide are drawn once and share a label. Groups differ in lightness and width, so that the figure can be read in gray.

Growth: time and memory of analyze() against length, next to the plain pass, on logarithmic axes. A dotted line in each
half has the expected slope: time grows with the square of the length, as attention does, memory with its first power.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnorm.figures import DOTTED, INK, MEASURED, NULL, PALE, note, place_labels, save, save_figure_files, style, tidy
from attnorm.figures import wrapped as wrap
from attnorm_lab.bench.dispersion import MEANING, Curve, Dispersion, Verdict, percent, printed_lengths
from attnorm_lab.bench.results import Result

FLOOR = 3e-6  # below the equal share of 131,072 keys, 7.6e-6
SAME = 1.01  # curves that never differ by more than this factor are one line

LINES: dict[Verdict, dict[str, Any]] = {
    "stays": {"color": "#0a4a8c", "linewidth": 2.4},
    "fades": {"color": "#cf7426", "linewidth": 1.4},
    "collapses": {"color": "#7d858f", "linewidth": 1.4, "linestyle": (0, (5, 2))},
}
SOFTMAX: dict[str, Any] = {"color": INK, "linewidth": 3.2}
SMALL = 9.7  # points
ROW = 0.035  # of the plot's height
HIGHEST = 1.13  # where the first heading may stand, in heights of the plot: beside the title
LABEL_WIDTH = 44  # characters


def save_dispersion_figure(dispersion: Dispersion, folder: Path) -> list[Path]:
    """Write dispersion.svg and dispersion.png to the folder; return their paths."""
    if not dispersion.curves:
        raise ValueError("expected at least one measured normalizer to plot, got none: all were skipped.")
    return save_figure_files(partial(dispersion_figure, dispersion), folder, "dispersion")


def dispersion_figure(dispersion: Dispersion) -> Figure:
    figure = Figure(figsize=(12.8, 7.2), facecolor="white")  # a 16:9 slide
    axes = figure.add_axes((0.07, 0.135, 0.525, 0.69))
    lengths = dispersion.curves[0].lengths
    ticks = [lengths[index] for index in printed_lengths(lengths)]
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlim=(lengths[0], lengths[-1]), ylim=(FLOOR, 1.3), xlabel="keys in the context")
    axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
    axes.set_yticks(shares := [1.0, 0.1, 0.01, 0.001, 1e-4, 1e-5], [f"{100 * share:g} %" for share in shares])
    axes.minorticks_off()
    tidy(axes)
    axes.plot(lengths, [1 / n for n in lengths], **DOTTED)
    middle = lengths[len(lengths) // 2]
    axes.text(middle, 0.3 / middle, "dotted: equal share, 1/n", fontsize=SMALL, color=PALE, ha="right")
    lines = merge_coinciding_curves(dispersion)
    for line in sorted(lines, key=lambda line: (_is_softmax(line), line[0].verdict == "stays")):
        axes.plot(lengths, [max(kept, FLOOR * FLOOR) for kept in line[0].kept], **_look(line))
    _label_ends(axes, lines)
    title = "How much attention does a clear winner keep?"
    figure.text(0.018, 0.935, title, fontsize=19, fontweight="bold", color=INK)
    figure.text(0.018, 0.89, f"{dispersion.setting} Its share of the weight:", fontsize=11.5, color=INK)
    left_out = f"\nLeft out: {', '.join(dispersion.left_out)}." if dispersion.left_out else ""
    about = (
        f"Median of {dispersion.draws} draws; the winner is in the middle of the context. Settings not named are the "
        f"defaults. Rows that sum to more than 1 are divided by their sum. attnorm lab dispersion{left_out}"
    )
    note(figure, about)
    return figure


def merge_coinciding_curves(dispersion: Dispersion) -> list[list[Curve]]:
    """Return the curves of each line to draw, softmax first, from the most to the least weight kept."""
    lines: list[list[Curve]] = []
    for _, curves in dispersion.groups():
        for curve in curves:
            twin = next((line for line in lines if _coincide(line[0], curve)), None)
            if twin is None:
                lines.append([curve])
            else:
                twin.append(curve)
    return [sorted(line, key=lambda curve: curve.name != "softmax") for line in lines]


def _coincide(a: Curve, b: Curve) -> bool:
    pairs = [(max(x, FLOOR), max(y, FLOOR)) for x, y in zip(a.kept, b.kept, strict=True)]
    return a.verdict == b.verdict and all(1 / SAME < x / y < SAME for x, y in pairs)


def _is_softmax(line: list[Curve]) -> bool:
    return line[0].name == "softmax"


def _look(line: list[Curve]) -> dict[str, Any]:
    return SOFTMAX if _is_softmax(line) else LINES[line[0].verdict]


def _label_ends(axes: Axes, lines: list[list[Curve]]) -> None:
    """Write names at the right, each connected to the end of its line, under the heading of their group."""
    texts: list[list[str]] = []
    for before, line in zip([None, *lines], lines, strict=False):
        verdict, names = line[0].verdict, [curve.label.replace(", ", " ") for curve in line]
        is_new = before is None or before[0].verdict != verdict
        texts.append([*([f"{verdict.upper()}: {MEANING[verdict]}"] if is_new else []), *wrap(names, LABEL_WIDTH)])
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = [float(to_axes.transform((1, max(line[0].kept[-1], FLOOR)))[1]) for line in lines]
    centers = place_labels(ends, [ROW * len(text) for text in texts], highest=HIGHEST)
    for line, end, center, text in zip(lines, ends, centers, texts, strict=True):
        write: dict[str, Any] = {
            "transform": axes.transAxes,
            "color": _look(line)["color"],
            "fontsize": SMALL,
            "va": "center",
        }
        for row, part in enumerate(text):
            height = center + ROW * ((len(text) - 1) / 2 - row)
            axes.text(1.153, height, part, fontweight="bold" if _is_softmax(line) or ": " in part else None, **write)
            if row == (": " in text[0]):  # the first names
                axes.text(1.138, height, percent(line[0].kept[-1]), ha="right", **write)
                if line[0].kept[-1] >= FLOOR:
                    hair: dict[str, Any] = {"linewidth": 0.7, "clip_on": False, "transform": axes.transAxes}
                    x, y = [1.003, 1.012, 1.04, 1.048], [end, end, height, height]
                    axes.plot(x, y, color=write["color"], **hair)


def save_growth_figure(growth: Sequence[Result], folder: Path) -> Path:
    """Write growth.svg to the folder, which exists; return its path. growth: a row of numbers for each length."""
    with style():
        return save(growth_figure(growth), folder / "growth", ("svg",))[0]


def growth_figure(growth: Sequence[Result]) -> Figure:
    figure = Figure(figsize=(9.6, 4.0), layout="constrained")
    lengths = [int(result.what.split()[0].replace(",", "")) for result in growth]
    halves = (("Time, s", 2, "seconds", "plain_seconds"), ("Memory of the pass, MB", 1, "extra_mb", "plain_mb"))
    for axes, (title, power, ours, plain) in zip(figure.subplots(1, 2), halves, strict=True):
        for name, column, look in (("plain pass", plain, NULL), ("analyze", ours, MEASURED)):
            axes.loglog(lengths, [result.numbers[column] for result in growth], label=name, **look)
        last = growth[-1].numbers[ours] or 0.0
        axes.plot(lengths, [last * (length / lengths[-1]) ** power for length in lengths], **DOTTED)
        axes.set_title(f"{title}   (dotted: as L{'²' * (power == 2)})", loc="left")
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.set_xticks([], minor=True)
        axes.set_xlabel("tokens")
        axes.legend()
        tidy(axes)
    figure.suptitle(growth[0].table, fontsize=8, color=PALE)
    return figure
