"""beta(H) of the four polynomials over the entropies of real rows, and what they do to them."""

from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from attnorm.experiments.adaptive import Adaptive
from attnorm.experiments.figures.style import CORRECTED, INK, MEASURED, NULL, PALE, PRINTED, letter, note, tidy

LOOKS: dict[str, dict[str, Any]] = {
    "printed": PRINTED,
    "printed, monotone": NULL,
    "re-fit": CORRECTED,
    "re-fit, monotone": {**MEASURED, "linewidth": 1.2},
}
ROOM = {"left": 0.06, "right": 0.985, "top": 0.91, "bottom": 0.155, "wspace": 0.32, "hspace": 0.12}
HIGHEST = 8.5  # nats


def figure(found: Adaptive, about: str) -> Figure:
    drawing = Figure(figsize=(11.4, 4.4), facecolor="white")
    grid = drawing.add_gridspec(2, 3, height_ratios=(2.2, 1), width_ratios=(1.25, 1, 1), **ROOM)
    upper = drawing.add_subplot(grid[0, 0])
    lower = drawing.add_subplot(grid[1, 0], sharex=upper)
    _factors(upper, found)
    _rows(lower, found)
    _after(drawing.add_subplot(grid[:, 1]), found)
    _losses(drawing.add_subplot(grid[:, 2]), found)
    note(drawing, about)
    return drawing


def _factors(axes: Axes, found: Adaptive) -> None:
    H = torch.linspace(0, HIGHEST, 400, dtype=torch.float64)
    top = 0.0
    for name, rule in found.rules.items():
        beta = rule.beta(H).numpy()
        axes.plot(H.numpy(), beta, **{**LOOKS[name], "markevery": 50}, label=name)
        top = max(top, float(np.quantile(beta, 0.95)))
    axes.axvspan(5.945, HIGHEST, color=PALE, alpha=0.13, linewidth=0)
    axes.text(5.945, 0.97, " printed:\n not corrected", transform=axes.get_xaxis_transform(), fontsize=7, va="top")
    axes.set_xlim(0, HIGHEST)
    axes.set_ylim(0.8, min(max(3.0, top * 1.1), 12.0))
    axes.set_ylabel("factor β on the logits")
    axes.tick_params(labelbottom=False)
    letter(axes, "a", "Where each version acts (β > 1)")
    axes.legend(loc="upper left", fontsize=7)
    tidy(axes)


def _rows(axes: Axes, found: Adaptive) -> None:
    edges = np.linspace(0, HIGHEST, 52).tolist()
    long = found.n > 381
    axes.hist(
        [found.entropy[~long], found.entropy[long]], edges, stacked=True, color=[PALE, INK],
        weights=[np.full(part.sum(), 100 / len(long)) for part in (~long, long)],
        label=["rows of at most 381 keys", "rows of more"], linewidth=0,
    )  # fmt: skip
    axes.set_xlabel("entropy H of the row (nats)")
    axes.set_ylabel("rows (%)")
    axes.legend(loc="upper right", fontsize=7)
    tidy(axes)


def _after(axes: Axes, found: Adaptive) -> None:
    """The largest weight of rows, before and after, as shares of rows up to it."""
    lines: dict[str, tuple[NDArray[np.float64], dict[str, Any]]] = {
        "as it runs": (found.largest, {"color": INK, "linewidth": 2.4, "linestyle": "-", "marker": None})
    }
    lines |= {name: (values[1], LOOKS[name]) for name, values in found.after.items()}
    for name, (values, look) in lines.items():
        ordered = np.sort(values)
        shares = np.linspace(0, 1, len(ordered))
        few = slice(None, None, max(1, len(ordered) // 400))
        axes.plot(ordered[few], shares[few], **{**look, "markevery": 60}, label=name)
    axes.set_xlim(0, 1.01)
    axes.set_ylim(0, 1.02)
    axes.set_xlabel("largest weight of the row")
    axes.set_ylabel("share of rows up to it")
    letter(axes, "b", "What it does to the rows")
    axes.legend(loc="lower right", fontsize=7)
    tidy(axes)


def _losses(axes: Axes, found: Adaptive) -> None:
    names = list(found.losses)
    values = [found.losses[name] for name in names]
    places = np.arange(len(names))[::-1]
    hatches = ("", "....", "////", "xxxx", "++++")
    for place, value, hatch in zip(places, values, hatches, strict=False):
        axes.barh(place, value, color="white", edgecolor=INK, hatch=hatch, height=0.6, linewidth=0.8)
        axes.text(value, place, f" {value:.3f}", va="center", fontsize=8)
    axes.set_yticks(places, [name.replace(", ", ",\n") for name in names])
    axes.set_xlim(0, max(values) * 1.15)
    axes.set_xlabel("loss (nats per token)")
    letter(axes, "c", "In all layers, without training")
    tidy(axes, grid=False)
