"""Draw Figure 3: box plots over heads, the bounds of Theorem 2 as printed and as corrected, and two nulls."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnorm.experiments.fig3.measure import Separabilities
from attnorm.experiments.figure_style import CORRECTED, INK, NULL, PALE, PRINTED, letter, note, tidy

IDEAL: dict[str, Any] = {
    "color": "#3d7d4c",
    "linestyle": (0, (3, 1, 1, 1)),
    "marker": "P",
    "markersize": 4.5,
    "linewidth": 1.2,
}
LOWEST = -0.3


def figure(sphere: Separabilities, raw: Separabilities, setting: str) -> Figure:
    drawn = Figure(figsize=(11.4, 4.6), facecolor="white")
    left, right = drawn.subplots(
        1, 2, sharey=True, gridspec_kw={"wspace": 0.06, "left": 0.055, "right": 0.99, "top": 0.79, "bottom": 0.14}
    )
    _panel(left, sphere)
    letter(left, "a", "vectors on the sphere, as in the paper")
    _panel(right, raw)
    letter(right, "b", "vectors as they are")
    left.set_ylabel("distinguishable share $N_s / N$")
    handles, labels = left.get_legend_handles_labels()
    drawn.legend(handles, labels, loc="upper left", bbox_to_anchor=(0.05, 0.995), ncols=3)
    note(drawn, f"{setting}; boxes: quartiles over heads, whiskers 5 to 95 %; lines: medians over heads")
    return drawn


def _panel(axes: Axes, found: Separabilities) -> None:
    at = np.arange(len(found.top_n), dtype=float)
    axes.axhspan(0.7, 0.85, color="#eceef1", linewidth=0, label="0.7 to 0.85 (the paper)")
    box: dict[str, Any] = {"color": INK, "linewidth": 0.9}
    axes.boxplot(
        [column[np.isfinite(column)] for column in found.measured.T], positions=at.tolist(), widths=0.42,
        whis=(5, 95), showfliers=False, patch_artist=True, boxprops={"facecolor": "#b9c4cf", **box},
        medianprops={"color": INK, "linewidth": 2}, whiskerprops=box, capprops=box, manage_ticks=False,
    )  # fmt: skip
    axes.plot([], [], marker="s", markersize=9, linestyle="none", markerfacecolor="#b9c4cf", markeredgecolor=INK,
              label="measured, over heads")  # fmt: skip
    axes.plot(at, np.median(found.permuted, 0), label="null: values permuted", **NULL)
    axes.plot(at, np.median(found.isotropic, 0), label="null: uniform directions (Assumption 1)", **IDEAL)
    held = {**IDEAL, "markerfacecolor": "white", "linewidth": 0.9}
    axes.plot(at, np.median(found.isotropic_fixed, 0), label="the same with $r$ held fixed", **held)
    axes.fill_between(
        at, np.median(found.lower, 0), np.median(found.upper, 0), color=CORRECTED["color"], alpha=0.13, linewidth=0
    )
    axes.plot(at, np.median(found.lower, 0), label="Theorem 2 corrected, $r$ held fixed (band)", **CORRECTED)
    axes.plot(at, np.median(found.upper, 0), **CORRECTED)
    axes.plot(at, np.median(found.printed_upper, 0), label="Theorem 2 as printed", **PRINTED)
    printed = np.median(found.printed_lower, 0)
    axes.plot(at, np.where(printed >= LOWEST, printed, np.nan), **PRINTED)
    if (printed < LOWEST).any():
        outside = ", ".join(f"{value:.1f}" for value in printed[printed < LOWEST])
        text = f"printed lower bound, off the scale: {outside}"
        axes.text(0.99, 0.015, text, transform=axes.transAxes, fontsize=7.5, color=PRINTED["color"], ha="right")
    axes.axhline(0, color=PALE, linewidth=0.6)
    axes.set_ylim(LOWEST, 1.06)
    axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    axes.set_xticks(at.tolist(), [str(N) for N in found.top_n])
    axes.set_xlim(-0.5, len(at) - 0.5)
    axes.set_xlabel("selected keys $N$")
    tidy(axes)
