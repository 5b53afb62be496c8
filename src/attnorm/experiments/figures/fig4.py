"""Figure 4: log-log curves of the largest sensitivity against T, under the printed and the correct bound."""

import math

import numpy as np
import torch
from matplotlib.figure import Figure

from attnorm.experiments.fig4 import EPSILONS, Sensitivity
from attnorm.experiments.figures.style import CORRECTED, INK, MEASURED, PALE, PRINTED, note, tidy
from attnorm.theory.gradient import corollary3_corrected, corollary3_printed

SHADES = ("#0b3d66", "#3f8fcf", "#9cc3e4")
MARKERS = ("v", "D", "s")


def figure(found: Sensitivity, about: str) -> Figure:
    drawing = Figure(figsize=(6.6, 5.4), facecolor="white")
    axes = drawing.add_axes((0.105, 0.14, 0.865, 0.725))
    T = found.temperatures
    bare = {"marker": None}
    axes.plot(
        T, corollary3_corrected(torch.from_numpy(T)).numpy(), **{**CORRECTED, **bare}, label="correct bound 1/(2T)"
    )
    axes.plot(
        T, corollary3_printed(torch.from_numpy(T)).numpy(), **{**PRINTED, **bare}, label="printed bound min{1/(4T), √2}"
    )
    axes.plot(T, found.norm.max(0), **{**MEASURED, "markersize": 3.5}, label="exact norm, largest over heads")
    for eps, curve, colour, marker in zip(EPSILONS, found.gain.max(1), SHADES, MARKERS, strict=True):
        label = f"g(T, ε), ε = {eps:g}, largest over heads"
        axes.plot(
            T, curve, color=colour, marker=marker, markersize=3.8, linewidth=1.2, markeredgecolor=INK,
            markeredgewidth=0.4, label=label,
        )  # fmt: skip
        cap = math.sqrt(2) / eps
        if cap < corollary3_corrected(T[0]):
            axes.axhline(cap, color=colour, linewidth=0.8, linestyle=(0, (1, 2)))
            axes.text(T[-1], cap * 1.12, f"√2/ε, ε = {eps:g}", fontsize=7, ha="right", color=INK)
    axes.axvline(found.trained_temperature, color=PALE, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.text(
        found.trained_temperature * 1.06, 0.985, "T = √d:\nas trained", fontsize=7, color=INK, va="top",
        transform=axes.get_xaxis_transform(),
    )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(T[0] * 0.9, T[-1] * 1.12)
    drawn = np.concatenate([found.gain.max(1).ravel(), found.norm.max(0)])
    axes.set_ylim(max(float(drawn[drawn > 0].min()) / 2, 1e-6), 1e3)
    axes.set_xlabel("temperature T on the raw logits q·k")
    axes.set_ylabel("change of the weights per change of the logits")
    drawing.legend(loc="upper left", bbox_to_anchor=(0.095, 0.995), fontsize=7.5, ncols=2)
    tidy(axes)
    note(drawing, about)
    return drawing
