"""Draw beta(H) of the four polynomials over the entropies of real rows, their effect on the rows, and the losses."""

from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnorm.experiments import figure_style as style
from attnorm.experiments.adaptive.measure import MONOTONE, MOST_KEYS, PRINTED, REACH, REFIT, Adaptive
from attnorm.experiments.experiment import Floats
from attnorm.experiments.figure_style import CORRECTED, INK, MEASURED, NULL, PALE, letter, note, tidy
from attnorm.experiments.losses import AS_IT_RUNS

LOOKS: dict[str, dict[str, Any]] = {
    PRINTED: style.PRINTED,
    MONOTONE[PRINTED]: NULL,
    REFIT: CORRECTED,
    MONOTONE[REFIT]: {**MEASURED, "linewidth": 1.2},
}
ROOM = {"left": 0.06, "right": 0.985, "top": 0.85, "bottom": 0.135, "wspace": 0.3, "hspace": 0.12}
HIGHEST = 8.5  # nats
FACTORS = torch.linspace(0, HIGHEST, 400, dtype=torch.float64)


def figure(found: Adaptive, about: str) -> Figure:
    drawing = Figure(figsize=(11.4, 5.0), facecolor="white")
    grid = drawing.add_gridspec(2, 3, height_ratios=(2.2, 1), width_ratios=(1.25, 1, 1), **ROOM)
    upper = drawing.add_subplot(grid[0, 0])
    lower = drawing.add_subplot(grid[1, 0], sharex=upper)
    _factors(upper, found)
    _rows(lower, found)
    middle = drawing.add_subplot(grid[:, 1])
    _after(middle, found)
    handles, labels = ([*lines, *shade] for lines, shade in zip(_legend(middle), _legend(upper), strict=True))
    drawing.legend(handles, labels, loc="upper left", bbox_to_anchor=(0.05, 0.985), ncols=5, fontsize=8)
    _losses(drawing.add_subplot(grid[:, 2]), found)
    windows = len(found.losses[AS_IT_RUNS])
    note(drawing, f"{about}; (c): mean of {windows} windows, in brackets the change ± its standard error")
    return drawing


def _legend(axes: Axes) -> tuple[list[Any], list[Any]]:
    handles, labels = axes.get_legend_handles_labels()
    return handles, labels


def _factors(axes: Axes, found: Adaptive) -> None:
    top = 0.0
    for name in _apart(found):
        beta = found.rules[name].beta(FACTORS).numpy()
        axes.plot(FACTORS.numpy(), beta, **{**LOOKS[name], "markevery": 50})
        top = max(top, float(np.quantile(beta, 0.95)))
    axes.axvspan(REACH[1], HIGHEST, color=PALE, alpha=0.13, linewidth=0, label="too flat for the printed one")
    axes.set_xlim(0, HIGHEST)
    axes.set_ylim(0.8, min(max(3.0, top * 1.1), 12.0))
    axes.set_ylabel("factor β on the logits")
    axes.tick_params(labelbottom=False)
    letter(axes, "a", "Where each version acts (β > 1)")
    tidy(axes)


def _apart(found: Adaptive) -> dict[str, str]:
    """Return the versions to draw with their labels; a monotone form that is identical is not drawn twice."""
    labels: dict[str, str] = {}
    for name, monotone in MONOTONE.items():
        same = torch.equal(found.rules[name].beta(FACTORS), found.rules[monotone].beta(FACTORS))
        labels |= {name: f"{name} (monotone: the same)"} if same else {name: name, monotone: monotone}
    return labels


def _rows(axes: Axes, found: Adaptive) -> None:
    edges = np.linspace(0, HIGHEST, 52).tolist()
    long = found.n > MOST_KEYS
    axes.hist(
        [found.entropy[~long], found.entropy[long]], edges, stacked=True, color=[PALE, INK],
        weights=[np.full(part.sum(), 100 / len(long)) for part in (~long, long)],
        label=[f"rows of at most {MOST_KEYS} keys", "rows of more"], linewidth=0,
    )  # fmt: skip
    axes.axvspan(REACH[1], HIGHEST, color=PALE, alpha=0.13, linewidth=0)
    axes.set_ylim(top=axes.get_ylim()[1] * 1.75)  # the legend stands above the bars
    axes.set_xlabel("entropy H of the row (nats)")
    axes.set_ylabel("rows (%)")
    axes.legend(loc="upper left", fontsize=7, ncols=3, columnspacing=1.0)
    tidy(axes)


def _after(axes: Axes, found: Adaptive) -> None:
    """Draw the cumulative distribution of the largest weight of rows, before and after."""
    lines: dict[str, tuple[Floats, dict[str, Any]]] = {
        AS_IT_RUNS: (found.largest, {"color": INK, "linewidth": 2.4, "linestyle": "-", "marker": None})
    }
    lines |= {label: (found.after[name][1], LOOKS[name]) for name, label in _apart(found).items()}
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
    tidy(axes)


def _losses(axes: Axes, found: Adaptive) -> None:
    names = list(found.losses)
    values = [float(found.losses[name].mean()) for name in names]
    places = np.arange(len(names))[::-1]
    hatches = ("", "....", "////", "xxxx", "++++")
    for index, name, value, hatch in zip(places, names, values, hatches, strict=False):
        axes.barh(index, value, color="white", edgecolor=INK, hatch=hatch, height=0.5, linewidth=0.8)
        label_text = f"{value:.3f}" if name == AS_IT_RUNS else f"{value:.3f} ({found.change(name)})"
        axes.text(0, index + 0.3, label_text, va="bottom", fontsize=8)
    axes.set_yticks(places, [name.replace(", ", ",\n") for name in names])
    axes.set_xlim(0, max(values) * 1.05)
    axes.set_ylim(-0.5, len(names) - 0.3)
    axes.set_xlabel("loss (nats per token)")
    letter(axes, "c", "In all layers, without training")
    tidy(axes, grid=False)
