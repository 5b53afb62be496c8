"""Figure 1: a row of three panels for each scene - on the circle, scaled by attention, the ball around s."""

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle

from attnorm.experiments.arrays import Floats
from attnorm.experiments.figures.style import INK, PALE, note

if TYPE_CHECKING:
    from attnorm.experiments.fig1 import Scene

OTHER: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 3.2, "color": INK, "alpha": 0.75}
SELECTED: dict[str, Any] = {"linestyle": "none", "marker": "*", "markersize": 9.5, "markeredgecolor": INK}
MAGENTA = "#d81b79"


def figure(scenes: "tuple[Scene, ...]", top_n: int, setting: str) -> Figure:
    drawn = Figure(figsize=(10.2, 3.35 * len(scenes) + 0.65), facecolor="white")
    rows = drawn.subplots(
        len(scenes), 3, squeeze=False,
        gridspec_kw={"left": 0.09, "right": 0.99, "top": 0.9, "bottom": 0.1, "wspace": 0.24, "hspace": 0.36},
    )  # fmt: skip
    for axes, one in zip(rows, scenes, strict=True):
        _circle(axes[0], one)
        _scaled(axes[1], one)
        _ball(axes[2], one)
        title = axes[0].annotate(
            one.title, (-0.26, 0.5), xycoords="axes fraction", rotation=90, fontsize=9, ha="center", va="center",
        )  # fmt: skip
        title.set_parse_math(False)
        along, across = ("$x_1$", "$x_2$") if one.dimension == 2 else ("along $s$", "across $s$ (widest direction)")
        for panel in axes:
            panel.set_xlabel(along, fontsize=8)
            panel.set_ylabel(across, fontsize=8, labelpad=1)
    handles, labels = rows[0][2].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="upper center", ncols=5, columnspacing=1.4, handletextpad=0.3)
    exact = "real head: lengths (middle) and distances from s (right) are exact, angles are those in a plane"
    note(drawn, f"{setting}, N = {top_n}; {exact}")
    return drawn


def _circle(axes: Axes, one: "Scene") -> None:
    axes.add_patch(Circle((0, 0), 1, fill=False, color=PALE, linewidth=0.8))
    _points(axes, one, np.ones_like(one.lengths), one.directions, (0.0, 0.0))
    _frame(axes, 1.15, (0.0, 0.0))
    axes.set_title(r"tokens $x_i$ on the sphere", fontsize=9)


def _scaled(axes: Axes, one: "Scene") -> None:
    _points(axes, one, one.lengths, one.directions, (0.0, 0.0))
    axes.plot(0, 0, "+", color=PALE, markersize=8)
    _frame(axes, 1.15 * float(one.lengths.max()), (0.0, 0.0))
    axes.set_title(r"scaled by attention: $\alpha_i x_i$", fontsize=9)


def _ball(axes: Axes, one: "Scene") -> None:
    s = one.context
    axes.add_patch(Circle(s, one.radius, facecolor="#e6e9ee", edgecolor=PALE, linewidth=0.9, label=r"ball $B_r(s)$"))
    _points(axes, one, one.distances, one.from_context, s)
    axes.plot(*s, "X", color="white", markeredgecolor=INK, markersize=8, label="context vector $s$")
    farthest = float(one.distances[one.chosen > 0].max())
    _frame(axes, 1.25 * max(farthest, one.radius), s)
    axes.set_title(rf"inside the ball: {int(one.inside.sum())} of {int(one.chosen.sum())}", fontsize=9)


def _points(axes: Axes, one: "Scene", radii: Floats, angles: Floats, centre: tuple[float, float]) -> None:
    x, y = centre[0] + radii * np.cos(angles), centre[1] + radii * np.sin(angles)
    outside, lost, kept = one.chosen == 0, (one.chosen > 0) & (one.inside == 0), one.inside > 0
    axes.plot(x[outside], y[outside], label="not selected", **OTHER)
    axes.plot(x[lost], y[lost], label="selected, outside the ball", markerfacecolor="white", **SELECTED)
    axes.plot(x[kept], y[kept], label="selected, distinguishable", markerfacecolor=MAGENTA, **SELECTED)


def _frame(axes: Axes, half: float, centre: tuple[float, float]) -> None:
    axes.set_aspect("equal")
    axes.set_xlim(centre[0] - half, centre[0] + half)
    axes.set_ylim(centre[1] - half, centre[1] + half)
    axes.locator_params(nbins=4)
    axes.tick_params(labelsize=7)
