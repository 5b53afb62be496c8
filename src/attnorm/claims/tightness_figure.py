"""Draw how tight each bound is, as printed and as corrected.

One row per printed claim that has a corrected form. A bar spans 5 to 95 % of quantity / bound over random rows, the dot
is the median, the tick is the worst row that the search found: above 1 it is a counterexample.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnorm.figure_files import INK, PALE, save_figure_files
from attnorm.theory.search import ROUNDING, Finding

LEAST, MOST = 0.01, 100.0  # ratios beyond are drawn at the edge
PRINTED, CORRECTED, BROKEN = "#8b939d", "#0a4a8c", "#c2410c"
# Statements of the form "about", or about growth: their ratio is not a tightness.
NO_BOUND = ("toy-2.3", "must-collapse", "corollary-2-ii-decay", "dispersed-is-uniform")


@dataclass(frozen=True)
class Pair:
    printed: Finding
    corrected: Finding


def save_tightness_figure(findings: Sequence[Finding], folder: Path) -> list[Path]:
    """Write tightness.svg and tightness.png to the folder; return their paths."""
    pairs = matched(findings)
    if not pairs:
        raise ValueError("there is nothing to draw: name a printed claim together with its correction, or none at all")
    return save_figure_files(partial(tightness_figure, pairs), folder, "tightness")


def matched(findings: Sequence[Finding]) -> list[Pair]:
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
    _draw_axes(axes, len(pairs))
    for row, pair in enumerate(pairs):
        _draw(axes, pair.printed, row - 0.17, PRINTED, hollow=True)
        _draw(axes, pair.corrected, row + 0.17, CORRECTED, hollow=False)
        false = pair.printed.claim.status == "false"
        axes.text(
            -0.012, row, pair.printed.claim.id, transform=axes.get_yaxis_transform(), ha="right", va="center",
            fontsize=10, color=BROKEN if false else INK,
        )  # fmt: skip
    _write_around(figure, axes, height)
    return figure


def _draw_axes(axes: Axes, rows: int) -> None:
    axes.set_xscale("log")
    axes.set_xlim(LEAST * 0.8, MOST * 1.25)
    axes.set_ylim(rows - 0.5, -0.5)
    axes.axvspan(1, MOST * 1.25, color="#fdf0e7", linewidth=0)
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


def _draw(axes: Axes, finding: Finding, height: float, colour: str, *, hollow: bool) -> None:
    assert finding.tightness is not None
    low, middle, high = (shown(value) for value in finding.tightness)
    worst = shown(finding.worst_ratio)
    broken = finding.worst_ratio > 1 + ROUNDING
    bar: dict[str, Any] = {"solid_capstyle": "butt", "linewidth": 6.5 if not hollow else 5.0}
    axes.plot([low, high], [height, height], color=colour, alpha=0.45 if hollow else 0.75, **bar)
    axes.plot([high, worst], [height, height], color=colour, linewidth=0.8)
    axes.plot(middle, height, "o", color="white", markeredgecolor=colour, markersize=5.5, markeredgewidth=1.4)
    mark: dict[str, Any] = {"marker": "X", "markersize": 8} if broken else {"marker": "|", "markersize": 9}
    axes.plot(worst, height, color=BROKEN if broken else colour, markeredgewidth=0 if broken else 1.8, **mark)


def shown(ratio: float) -> float:
    """Return the ratio as it is drawn, limited to the edges."""
    return MOST if math.isinf(ratio) and ratio > 0 else min(max(ratio, LEAST), MOST)


def _write_around(figure: Figure, axes: Axes, height: float) -> None:
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
    figure.text(0.985, 0.2 / height, "attnorm verify --figure", fontsize=8, color=PALE, ha="right")
