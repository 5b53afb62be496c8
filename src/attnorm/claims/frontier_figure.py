"""Draw the frontier: effort K g to keep weight 0.5 and 0.9 against the number of keys, one panel each.

Normalizers with the same effort share a line and a label. The shaded area below the law is impossible.
"""

import math
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnorm.claims.frontier_table import MEASURED, label
from attnorm.figure_files import INK, PALE, save_figure_files
from attnorm.line_labels import spread, wrapped
from attnorm.theory.normalizer_frontier import Frontier

SAME = 1.01  # efforts that never differ by more than this factor are one line
SHADES = ("#0a4a8c", "#3f7fb8", "#cf7426", "#a8551a", "#7d858f")
DASHES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)), (0, (8, 3)))
SMALL = 9.5


def save_frontier_figure(placed: Frontier, folder: Path) -> list[Path]:
    """Write frontier.svg and frontier.png to the folder; return their paths."""
    if not placed.points:
        raise ValueError("there is nothing to draw: the law applies to none of the normalizers")
    return save_figure_files(partial(frontier_figure, placed), folder, "frontier")


def merged(placed: Frontier) -> list[list[str]]:
    """Group names with the same effort at every length and weight, from the least to the most effort."""
    groups: list[list[str]] = []
    for name in placed.names:
        twin = next((group for group in groups if _coincide(placed, group[0], name)), None)
        if twin is None:
            groups.append([name])
        else:
            twin.append(name)
    return [sorted(group, key=lambda name: (name != "softmax", name)) for group in groups]


def _coincide(placed: Frontier, one: str, other: str) -> bool:
    pairs = [
        pair
        for weight in placed.weights
        for pair in zip(placed.efforts(one, weight), placed.efforts(other, weight), strict=True)
    ]
    return all(1 / SAME < a / b < SAME for a, b in pairs)


def frontier_figure(placed: Frontier) -> Figure:
    figure = Figure(figsize=(12.8, 6.4), facecolor="white")
    groups = merged(placed)
    top = 1.08 * max(point.effort for point in placed.points)
    count = len(placed.weights)
    wide = 0.635 / count
    for index, weight in enumerate(placed.weights):
        axes = figure.add_axes((0.06 + index * (wide + 0.05), 0.145, wide, 0.645))
        _draw_axes(axes, placed, weight, top, labelled=index == 0)
        for position, group in enumerate(groups):
            _draw_line(axes, placed, group, weight, position)
        if index == count - 1:
            _label_ends(axes, placed, groups, weight)
    left = 0.018
    title = "What does it cost to keep attention on one key?"
    figure.text(left, 0.925, title, fontsize=18, fontweight="bold", color=INK)
    subtitle = "Lead g in the logits, times the largest gain K of the map: the effort that leaves the key a weight w."
    figure.text(left, 0.872, subtitle, fontsize=11.5, color=INK)
    note = "A temperature does not change K g. Lipschitz constants K as declared; settings not named are the defaults."
    if placed.measured:
        note += f" {MEASURED} K measured from below."
    if placed.absent:
        note += f"\nThe law does not speak about {', '.join(placed.absent)}."
    figure.text(left, 0.012, note, fontsize=8, color=PALE, linespacing=1.5)
    figure.text(0.985, 0.037, "attnorm frontier", fontsize=8, color=PALE, ha="right")
    return figure


def _draw_axes(axes: Axes, placed: Frontier, weight: float, top: float, *, labelled: bool) -> None:
    lengths = placed.lengths
    axes.set_xscale("log")
    axes.set_xlim(lengths[0], lengths[-1])
    axes.set_ylim(0, top)
    ticks = [n for n in (16, 256, 4096, 65_536, 1_000_000) if lengths[0] <= n <= lengths[-1]]
    axes.set_xticks(ticks, [f"{n:,}" if n < 10**6 else "1 million" for n in ticks])
    axes.set_xticks([], minor=True)
    axes.tick_params(length=0, labelsize=10, labelcolor=INK, pad=6, labelleft=labelled)
    axes.set_xlabel("keys in the row", fontsize=10.5, color=INK, labelpad=6)
    if labelled:
        axes.set_ylabel("effort K g", fontsize=10.5, color=INK, labelpad=6)
    axes.set_title(f"to keep w = {weight:g}", fontsize=12, color=INK, loc="left", pad=8)
    axes.grid(axis="y", color="#e9ebee", linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(PALE)
    least = placed.least(weight)
    axes.fill_between(lengths, least, 0, color="#eceef1", linewidth=0)
    middle = (lengths[0] * lengths[-1]) ** 0.5
    axes.text(middle, least[-1] / 2, "no map can", fontsize=SMALL, color="#5f6872", ha="center", va="center")


def _draw_line(axes: Axes, placed: Frontier, group: list[str], weight: float, position: int) -> None:
    softmax = "softmax" in group
    axes.plot(
        placed.lengths,
        placed.efforts(group[0], weight),
        color=_colour(group, position),
        linewidth=3.0 if softmax else 2.2,
        linestyle="solid" if softmax else DASHES[position % len(DASHES)],
        solid_capstyle="round",
    )


def _colour(group: list[str], position: int) -> str:
    return INK if "softmax" in group else SHADES[position % len(SHADES)]


def _label_ends(axes: Axes, placed: Frontier, groups: list[list[str]], weight: float) -> None:
    """Write names right of the last panel, each connected to the end of its line."""
    top = axes.get_ylim()[1]
    order = list(enumerate(groups))[::-1]
    ends = [_last(placed.efforts(group[0], weight)) / top for _, group in order]
    texts = [
        [*wrapped([label(name, placed) for name in group], 26), *_length_reached(group[0], placed)]
        for _, group in order
    ]
    line = 0.05  # of the panel's height
    places = spread(ends, [line * (len(text) + 0.4) for text in texts])
    for (position, group), end, index, text in zip(order, ends, places, texts, strict=True):
        colour = _colour(group, position)
        axes.plot(
            [1.005, 1.03, 1.07, 1.085], [end, end, index, index],
            transform=axes.transAxes, color=colour, linewidth=0.7, clip_on=False,
        )  # fmt: skip
        shown = "\n".join([*text[:-1], f"{text[-1]}  {end * top:.2f}"])
        axes.text(
            1.1, index, shown, transform=axes.transAxes, fontsize=SMALL, color=colour, va="center", linespacing=1.3,
            fontweight="bold" if "softmax" in group else "normal",
        )  # fmt: skip


def _length_reached(name: str, placed: Frontier) -> list[str]:
    """Return an extra line of the label for a map whose line ends early."""
    longest = max(point.n for point in placed.points if point.name == name)
    return [f"at {longest:,} keys"] if longest < placed.lengths[-1] else []


def _last(efforts: list[float]) -> float:
    return next(effort for effort in reversed(efforts) if not math.isnan(effort))
