"""The toy, its move on real rows, exact norms beside their bounds, and what cooling does."""

import math

import numpy as np
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnorm.experiments.cooling import TEMPERATURES
from attnorm.experiments.figures.cooling import draw_norms
from attnorm.experiments.figures.style import CORRECTED, INK, MEASURED, PALE, PRINTED, letter, note, tidy
from attnorm.experiments.gradients import HEIGHTS, Gradients

ROOM = {"left": 0.075, "right": 0.985, "top": 0.94, "bottom": 0.115, "wspace": 0.24, "hspace": 0.42}
BARE = {"marker": None}
MARKERS = "vsD^o"


def figure(found: Gradients, example: pa.Table, about: str) -> Figure:
    drawing = Figure(figsize=(8.8, 6.6), facecolor="white")
    panels = drawing.subplots(2, 2, gridspec_kw=ROOM)
    _toy(panels[0, 0], example)
    _moves(panels[0, 1], found)
    _norms(panels[1, 0], found)
    _cooling(panels[1, 1], found)
    note(drawing, about)
    return drawing


def _toy(axes: Axes, example: pa.Table) -> None:
    rows = example.to_pylist()
    for place, a in enumerate(HEIGHTS):
        own = [row for row in rows if row["a_over_T"] == a]
        shade = str(0.75 - 0.75 * place / (len(HEIGHTS) - 1))
        axes.plot(
            [row["eps_over_T"] for row in own], [row["per_step"] for row in own], color=shade, marker=MARKERS[place],
            markersize=4, linewidth=1.2, label=f"a = {a:g} T",
        )  # fmt: skip
    axes.axhline(math.sqrt(2), **{**PRINTED, **BARE}, label="printed, √2")
    axes.axhline(0.75 * math.sqrt(2), **{**CORRECTED, **BARE}, label="correct, 3√2/4")
    axes.set_xscale("log")
    axes.set_ylim(0, 1.55)
    axes.set_xlabel("step ε/T")
    axes.set_ylabel("change of the weights, in units of ε/T")
    letter(axes, "a", "Toy of section 2.3, 1,024 keys")
    axes.legend(loc="center left", fontsize=7, ncols=2, bbox_to_anchor=(0.02, 0.33))
    tidy(axes)


def _moves(axes: Axes, found: Gradients) -> None:
    """How much the toy's move does to real rows, at three temperatures."""
    for T, look in ((0.1, PRINTED), (1.0, MEASURED), (3.0, CORRECTED)):
        values = np.sort(found.move[:, TEMPERATURES.index(T)])
        few = slice(None, None, max(1, len(values) // 300))
        axes.plot(values[few], np.linspace(0, 1, len(values))[few], **{**look, "markevery": 40}, label=f"T = {T:g}")
    axes.axvline(0.75 * math.sqrt(2), color=PALE, linewidth=1, linestyle=(0, (4, 3)))
    axes.text(0.75 * math.sqrt(2), 0.03, "3√2/4 ", ha="right", fontsize=7.5)
    axes.set_xlim(-0.02, 1.3)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("change of the weights, in units of ε/T, ε → 0")
    axes.set_ylabel("share of rows up to it")
    letter(axes, "b", "The same move on real rows")
    axes.legend(loc="lower right", fontsize=7.5, bbox_to_anchor=(0.8, 0.12))
    tidy(axes)


def _norms(axes: Axes, found: Gradients) -> None:
    axes.scatter(found.n, found.norm, s=4, color=INK, alpha=0.25, linewidth=0, rasterized=True)
    edges = np.geomspace(8, found.n.max() * 1.001, 9)
    place = np.digitize(found.n, edges)
    middles = [
        (float(found.n[place == one].mean()), float(np.median(found.norm[place == one]))) for one in np.unique(place)
    ]
    axes.plot(*zip(*middles, strict=True), **{**MEASURED, "markerfacecolor": "white"}, label="median of the rows")
    axes.axhline(0.25, **{**PRINTED, **BARE}, label="printed bound 1/4")
    axes.axhline(0.5, **{**CORRECTED, **BARE}, label="correct bound 1/2")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_ylim(0, 0.68)
    axes.set_xlabel("visible keys n")
    axes.set_ylabel("exact norm of the Jacobian, as trained")
    letter(axes, "c", "Real rows and Corollary 3")
    axes.legend(loc="upper left", fontsize=7, ncols=2, columnspacing=1.0)
    tidy(axes)


def _cooling(axes: Axes, found: Gradients) -> None:
    draw_norms(axes, found.norms.T, "row")
    axes.set_ylabel("exact norm of the Jacobian")
    letter(axes, "d", "Cooling freezes most rows")
    tidy(axes)
