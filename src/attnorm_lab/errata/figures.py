"""The figures of `attnorm lab frontier` and `attnorm lab verify`.

Frontier: effort K g to keep weight 0.5 and 0.9 against the number of keys, one panel each. Normalizers with the same
effort share a line and a label. The shaded area below the law is impossible.

Tightness: one row per printed claim that has a corrected form. A bar spans 5 to 95 % of quantity / bound over random
rows, the dot is the median, the tick is the worst row that the search found: above 1 it is a counterexample.
"""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnorm.figures import place_labels, save_figure_files, wrapped
from attnorm_lab.errata.frontier import Frontier
from attnorm_lab.errata.search import ROUNDING, Finding
from attnorm_lab.errata.tables import MEASURED, label

INK, PALE = "#1b2129", "#8b939d"
SAME = 1.01  # efforts that never differ by more than this factor are one line
SHADES = ("#0a4a8c", "#3f7fb8", "#cf7426", "#a8551a", "#7d858f")
DASHES: tuple[Any, ...] = ("solid", (0, (5, 2)), (0, (1, 1.5)), (0, (5, 2, 1, 2)), (0, (8, 3)))
SMALL = 9.5


def save_frontier_figure(placed: Frontier, folder: Path) -> list[Path]:
    """Write frontier.svg and frontier.png to the folder; return their paths."""
    if not placed.points:
        raise ValueError("there is nothing to draw: the law applies to none of the normalizers")
    return save_figure_files(partial(frontier_figure, placed), folder, "frontier")


def groups_of_equal_effort(placed: Frontier) -> list[list[str]]:
    """Group names with the same effort at every length and weight, from the least to the most effort."""
    groups: list[list[str]] = []
    for name in placed.names:
        twin = next((group for group in groups if _coincide(placed, group[0], name)), None)
        if twin is None:
            groups.append([name])
        else:
            twin.append(name)
    return [sorted(group, key=lambda name: (name != "softmax", name)) for group in groups]


def _coincide(placed: Frontier, first: str, other: str) -> bool:
    pairs = [
        pair
        for weight in placed.weights
        for pair in zip(placed.efforts(first, weight), placed.efforts(other, weight), strict=True)
    ]
    return all(1 / SAME < a / b < SAME for a, b in pairs)


def frontier_figure(placed: Frontier) -> Figure:
    figure = Figure(figsize=(12.8, 6.4), facecolor="white")
    groups = groups_of_equal_effort(placed)
    top = 1.08 * max(point.effort for point in placed.points)
    count = len(placed.weights)
    wide = 0.635 / count
    for index, weight in enumerate(placed.weights):
        axes = figure.add_axes((0.06 + index * (wide + 0.05), 0.145, wide, 0.645))
        _draw_frontier_axes(axes, placed, weight, top, labeled=index == 0)
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
        note += "\n" + textwrap.fill(f"The law does not apply to {', '.join(placed.absent)}.", 200)
    figure.text(left, 0.008, note, fontsize=7.5, color=PALE, linespacing=1.3)
    figure.text(0.985, 0.048, "attnorm lab frontier", fontsize=8, color=PALE, ha="right")
    return figure


def _draw_frontier_axes(axes: Axes, placed: Frontier, weight: float, top: float, *, labeled: bool) -> None:
    lengths = placed.lengths
    axes.set(xscale="log", xlim=(lengths[0], lengths[-1]), ylim=(0, top))
    ticks = [n for n in (16, 256, 4096, 65_536, 1_000_000) if lengths[0] <= n <= lengths[-1]]
    axes.set_xticks(ticks, [f"{n:,}" if n < 10**6 else "1 million" for n in ticks])
    axes.set_xticks([], minor=True)
    axes.tick_params(length=0, labelsize=10, labelcolor=INK, pad=6, labelleft=labeled)
    axes.set_xlabel("keys in the row", fontsize=10.5, color=INK, labelpad=6)
    if labeled:
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
        color=_color(group, position),
        linewidth=3.0 if softmax else 2.2,
        linestyle="solid" if softmax else DASHES[position % len(DASHES)],
        solid_capstyle="round",
    )


def _color(group: list[str], position: int) -> str:
    return INK if "softmax" in group else SHADES[position % len(SHADES)]


def _label_ends(axes: Axes, placed: Frontier, groups: list[list[str]], weight: float) -> None:
    """Write names right of the last panel, each connected to the end of its line."""
    top = axes.get_ylim()[1]
    order = list(enumerate(groups))[::-1]
    ends = [_last_known(placed.efforts(group[0], weight)) / top for _, group in order]
    texts = [
        [*wrapped([label(name, placed) for name in group], 26), *_length_reached(group[0], placed)]
        for _, group in order
    ]
    line = 0.05  # of the panel's height
    centers = place_labels(ends, [line * (len(text) + 0.4) for text in texts])
    for (position, group), end, center, text in zip(order, ends, centers, texts, strict=True):
        color = _color(group, position)
        axes.plot(
            [1.005, 1.03, 1.07, 1.085], [end, end, center, center],
            transform=axes.transAxes, color=color, linewidth=0.7, clip_on=False,
        )  # fmt: skip
        shown = "\n".join([*text[:-1], f"{text[-1]}  {end * top:.2f}"])
        axes.text(
            1.1, center, shown, transform=axes.transAxes, fontsize=SMALL, color=color, va="center", linespacing=1.3,
            fontweight="bold" if "softmax" in group else "normal",
        )  # fmt: skip


def _length_reached(name: str, placed: Frontier) -> list[str]:
    """Return an extra line of the label for a map whose line ends early."""
    longest = max(point.n for point in placed.points if point.name == name)
    return [f"at {longest:,} keys"] if longest < placed.lengths[-1] else []


def _last_known(efforts: list[float]) -> float:
    return next(effort for effort in reversed(efforts) if not math.isnan(effort))


MIN_RATIO, MAX_RATIO = 0.01, 100.0  # ratios beyond are drawn at the edge
PRINTED, CORRECTED, BROKEN = "#8b939d", "#0a4a8c", "#c2410c"
# Statements of the form "about", or about growth: their ratio is not a tightness.
NO_BOUND = ("toy-2.3", "must-collapse", "corollary-2-ii-decay", "dispersed-is-uniform")


@dataclass(frozen=True)
class Pair:
    printed: Finding
    corrected: Finding


def save_tightness_figure(findings: Sequence[Finding], folder: Path) -> list[Path]:
    """Write tightness.svg and tightness.png to the folder; return their paths."""
    pairs = corrected_pairs(findings)
    if not pairs:
        raise ValueError("there is nothing to draw: name a printed claim together with its correction, or none at all")
    return save_figure_files(partial(tightness_figure, pairs), folder, "tightness")


def corrected_pairs(findings: Sequence[Finding]) -> list[Pair]:
    """Return claims with the claim that corrects them, both searched, in the table's order."""
    known = {finding.claim.id: finding for finding in findings if finding.tightness}
    return [
        Pair(finding, known[finding.claim.correction])
        for finding in known.values()
        if finding.claim.correction in known and finding.claim.id not in NO_BOUND
    ]


def tightness_figure(pairs: Sequence[Pair]) -> Figure:
    height = 2.3 + 0.44 * len(pairs)
    figure = Figure(figsize=(12.8, height), facecolor="white")
    axes = figure.add_axes((0.205, 0.95 / height, 0.77, 1 - 2.3 / height))
    _draw_tightness_axes(axes, len(pairs))
    for row, pair in enumerate(pairs):
        _draw_bounds(axes, pair.printed, row - 0.17, PRINTED, hollow=True)
        _draw_bounds(axes, pair.corrected, row + 0.17, CORRECTED, hollow=False)
        false = pair.printed.claim.status == "false"
        axes.text(
            -0.012, row, pair.printed.claim.id, transform=axes.get_yaxis_transform(), ha="right", va="center",
            fontsize=10, color=BROKEN if false else INK,
        )  # fmt: skip
    _write_captions(figure, axes, height)
    return figure


def _draw_tightness_axes(axes: Axes, rows: int) -> None:
    axes.set(xscale="log", xlim=(MIN_RATIO * 0.8, MAX_RATIO * 1.25), ylim=(rows - 0.5, -0.5))
    axes.axvspan(1, MAX_RATIO * 1.25, color="#fdf0e7", linewidth=0)
    axes.axvline(1, color=INK, linewidth=1.1)
    axes.set_xticks([0.01, 0.1, 1, 10, 100], ["≤ 0.01", "0.1", "1", "10", "≥ 100"])
    axes.set_xticks([], minor=True)
    axes.set_yticks([])
    axes.tick_params(length=0, labelsize=10, labelcolor=INK, pad=6)
    for row in range(1, rows):
        axes.axhline(row - 0.5, color="#e9ebee", linewidth=0.8)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.set_xlabel("quantity / bound", fontsize=10.5, color=INK, labelpad=6)


def _draw_bounds(axes: Axes, finding: Finding, height: float, color: str, *, hollow: bool) -> None:
    assert finding.tightness is not None
    low, middle, high = (limit_to_edges(value) for value in finding.tightness)
    worst = limit_to_edges(finding.worst_ratio)
    broken = finding.worst_ratio > 1 + ROUNDING
    bar: dict[str, Any] = {"solid_capstyle": "butt", "linewidth": 6.5 if not hollow else 5.0}
    axes.plot([low, high], [height, height], color=color, alpha=0.45 if hollow else 0.75, **bar)
    axes.plot([high, worst], [height, height], color=color, linewidth=0.8)
    axes.plot(middle, height, "o", color="white", markeredgecolor=color, markersize=5.5, markeredgewidth=1.4)
    mark: dict[str, Any] = {"marker": "X", "markersize": 8} if broken else {"marker": "|", "markersize": 9}
    axes.plot(worst, height, color=BROKEN if broken else color, markeredgewidth=0 if broken else 1.8, **mark)


def limit_to_edges(ratio: float) -> float:
    """Return the ratio as it is drawn, limited to the edges."""
    return MAX_RATIO if math.isinf(ratio) and ratio > 0 else min(max(ratio, MIN_RATIO), MAX_RATIO)


def _write_captions(figure: Figure, axes: Axes, height: float) -> None:
    left = 0.018
    title = "How tight are the bounds?"
    legend = (
        "Pale: as printed. Blue: as corrected, or the sharper form. "
        "Bar: 5 to 95 % of random rows; ring: median; tick: worst row found."
    )
    violated = "violated: the search found a counterexample (cross)"
    figure.text(left, 1 - 0.3 / height, title, fontsize=18, fontweight="bold", color=INK, va="top")
    figure.text(left, 1 - 0.82 / height, legend, fontsize=11, color=INK, va="top")
    axes.text(0.985, 1.01, violated, transform=axes.transAxes, fontsize=9.5, color=BROKEN, ha="right", va="bottom")
    figure.text(left, 0.2 / height, "Names in red: false as printed.", fontsize=8, color=PALE)
    figure.text(0.985, 0.2 / height, "attnorm lab verify --figure", fontsize=8, color=PALE, ha="right")
