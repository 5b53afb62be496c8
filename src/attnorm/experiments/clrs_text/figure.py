"""Two figures: a panel per algorithm with right answers against problem size, and the entropy of answer rows."""

import math
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from attnorm.experiments.clrs_text.plan import ADAPTIVE, SOFTMAX
from attnorm.experiments.clrs_text.results import ClrsResults, ClrsVariant, interval
from attnorm.experiments.figure_style import CORRECTED, MEASURED, NULL, PALE, PRINTED, letter, note, tidy
from attnorm.training.clrs.run import OWN, REFITTED

COLUMNS = 6
# What the paper compares, and the same polynomial at test time only; other normalizers are in the tables.
LOOKS: dict[tuple[str, str], dict[str, Any]] = {
    (SOFTMAX, OWN): MEASURED,
    (ADAPTIVE, OWN): CORRECTED,
    (REFITTED, OWN): PRINTED,
    (SOFTMAX, ADAPTIVE): NULL,
}
WITH_INTERVALS = ((SOFTMAX, OWN), (ADAPTIVE, OWN))


def _drawn(results: ClrsResults) -> list[tuple[ClrsVariant, dict[str, Any]]]:
    found = ((results.variant(*key), look) for key, look in LOOKS.items())
    return [(variant, look) for variant, look in found if variant is not None]


def panels(results: ClrsResults, about: str) -> Figure:
    """Draw right answers in % against size, a panel per algorithm."""
    count = len(results.algorithms)
    columns = min(COLUMNS, max(2, count))
    rows = math.ceil(count / columns)
    width, height = 2.1 * columns + 0.7, 1.1 + 1.75 * rows  # inches
    figure = Figure(figsize=(width, height), facecolor="white")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    sizes = sorted(size for some in results.sizes.values() for size in some)
    for index, axes in enumerate(grid.flat):
        if index >= count:
            axes.set_visible(False)
            continue
        _draw_panel(axes, results, results.algorithms[index], sizes)
        axes.tick_params(labelbottom=index + columns >= count)
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper left", bbox_to_anchor=(0.02, 1.0), ncols=2, fontsize=8)
    figure.supxlabel("problem size (grey: those of the training)", fontsize=9, y=0.3 / height)
    figure.supylabel("right answers (%)", fontsize=9, x=0.005)
    note(figure, about)
    figure.subplots_adjust(
        left=0.6 / width, right=1 - 0.15 / width, top=1 - 0.75 / height, bottom=0.65 / height, wspace=0.12, hspace=0.4
    )
    return figure


def _draw_panel(axes: Axes, results: ClrsResults, algorithm: str, sizes: list[int]) -> None:
    _mark_training(axes, results)
    for variant, look in _drawn(results):
        found = [interval(variant, algorithm, [size]) for size in sizes]
        axes.plot(sizes, [100 * one[0] for one in found], **{**look, "markersize": 2.5}, label=variant.name)
        if (variant.label, variant.tested_with) in WITH_INTERVALS:
            low, high = ([100 * one[end] for one in found] for end in (1, 2))
            axes.fill_between(sizes, low, high, color=look["color"], alpha=0.15, linewidth=0)
    axes.set_title(algorithm.replace("_", " "), fontsize=7.5, loc="left")
    axes.set_ylim(-3, 103)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    tidy(axes)


def _mark_training(axes: Axes, results: ClrsResults) -> None:
    for size in results.training_sizes:
        axes.axvspan(size - 0.3, size + 0.3, color=PALE, alpha=0.25, linewidth=0)


def entropies(results: ClrsResults, about: str) -> Figure:
    """Draw the mean entropy of answer rows against size, in nats and as a share of the uniform row's."""
    figure = Figure(figsize=(8.6, 3.6), facecolor="white")
    left, right = figure.subplots(1, 2)
    for axes, name, which, title in (
        (left, "entropy_nats", "a", "Entropy of answer rows (nats)"),
        (right, "entropy_ratio", "b", "Entropy / log of the visible keys"),
    ):
        _mark_training(axes, results)
        for variant, look in _drawn(results):
            means = variant.mean_entropy(name)
            axes.plot(list(means), list(means.values()), **look, label=variant.name)
        axes.set_xlabel("problem size (grey: those of the training)")
        letter(axes, which, title)
        tidy(axes)
    left.legend(loc="best", fontsize=7)
    note(figure, about)
    figure.subplots_adjust(left=0.07, right=0.98, top=0.9, bottom=0.2, wspace=0.2)
    return figure
