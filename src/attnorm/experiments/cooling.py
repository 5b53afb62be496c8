"""Lower temperatures: those at which rows and heads are measured, and how Jacobian norms are drawn against them."""

import numpy as np
from matplotlib.axes import Axes

from attnorm.experiments.experiment import Floats
from attnorm.experiments.figure_style import CORRECTED, INK, MEASURED, PALE, PRINTED

TEMPERATURES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


BARE = {"marker": None}
TOP = 1e5  # the legend stands above the lines
BELOW_LEGEND = 0.76  # of the height
LOWEST = 1e-6


def draw_norms(axes: Axes, norms: Floats, of: str) -> None:
    """norms: (temperatures, what `of` names)."""
    T = np.array(TEMPERATURES)
    low, centre, high = np.quantile(np.maximum(norms, LOWEST / 100), (0.25, 0.5, 0.75), axis=1)
    axes.fill_between(T, low, high, color=INK, alpha=0.15, linewidth=0)
    axes.plot(T, centre, **MEASURED, label=f"median {of}, quartiles")
    largest = {**MEASURED, "linestyle": "-.", "marker": "x", "linewidth": 1.0}
    axes.plot(T, norms.max(1), **largest, label=f"largest {of}")
    axes.plot(T, 1 / (2 * T), **{**CORRECTED, **BARE}, label="1/(2T), correct")
    axes.plot(T, 1 / (4 * T), **{**PRINTED, **BARE}, label="1/(4T), printed")
    axes.axvline(1, ymax=BELOW_LEGEND, color=PALE, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(max(LOWEST, float(low.min()) / 2), TOP)
    axes.set_yticks([10.0**power for power in range(-6, 3, 2)])
    axes.set_xlabel("temperature, 1 = as trained")
    axes.legend(loc="upper left", fontsize=7, ncols=2, columnspacing=1.2)
