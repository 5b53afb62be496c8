"""Right answers against problem size, a panel per algorithm, and the entropy of answer rows."""

import math
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from attnorm.experiments.clrs_text.plan import ADAPTIVE, SOFTMAX
from attnorm.experiments.clrs_text.results import ClrsResults, ClrsVariant, interval
from attnorm.experiments.figure_style import CORRECTED, MEASURED, NULL, PALE, PRINTED, letter, note, tidy
from attnorm.training.clrs.train import OWN, REFITTED

COLUMNS = 6
Looks = dict[tuple[str, str], dict[str, Any]]
# What the paper compares, and the same polynomial at test time only.
ADAPTIVE_LOOKS: Looks = {
    (SOFTMAX, OWN): MEASURED,
    (ADAPTIVE, OWN): CORRECTED,
    (REFITTED, OWN): PRINTED,
    (SOFTMAX, ADAPTIVE): NULL,
}
OTHER_LOOKS: Looks = {
    (SOFTMAX, OWN): MEASURED,
    ("ssmax", OWN): CORRECTED,
    ("entmax15", OWN): PRINTED,
    ("asentmax", OWN): NULL,
}


def figures_of(results: ClrsResults) -> dict[str, Figure]:
    """Return the figures by name; other normalizers have one of their own where they were trained."""
    about = f"{results.base}, {results.steps:,} steps. attnorm reproduce clrs-text"
    has_others = any(results.variant(*key) is not None for key in OTHER_LOOKS if key != (SOFTMAX, OWN))
    groups = {"clrs-text": ADAPTIVE_LOOKS} | ({"normalizers": OTHER_LOOKS} if has_others else {})
    return {
        **{name: _draw_accuracy(results, _variants_to_draw(results, looks), about) for name, looks in groups.items()},
        "entropy": _draw_entropies(results, [_variants_to_draw(results, looks) for looks in groups.values()], about),
    }


Drawn = list[tuple[ClrsVariant, dict[str, Any]]]


def _variants_to_draw(results: ClrsResults, looks: Looks) -> Drawn:
    candidates = ((results.variant(*key), look) for key, look in looks.items())
    return [(variant, look) for variant, look in candidates if variant is not None]


def _draw_accuracy(results: ClrsResults, drawn: Drawn, about: str) -> Figure:
    """Draw right answers in % against size, a panel per algorithm; the first two variants have intervals."""
    count = len(results.algorithms)
    columns = min(COLUMNS, max(2, count))
    rows = math.ceil(count / columns)
    width, height = 2.1 * columns + 0.7, 1.1 + 1.75 * rows  # inches
    figure = Figure(figsize=(width, height), facecolor="white")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    sizes = sorted(size for group in results.sizes.values() for size in group)
    for index, axes in enumerate(grid.flat):
        if index >= count:
            axes.set_visible(False)
            continue
        _draw_panel(axes, results, drawn, results.algorithms[index], sizes)
        axes.tick_params(labelbottom=index + columns >= count)
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper left", bbox_to_anchor=(0.02, 1.0), ncols=2, fontsize=8)
    figure.supxlabel("problem size (grey: those of the training)", fontsize=9, y=0.3 / height)
    figure.supylabel("right answers (%)", fontsize=9, x=0.005)
    note(figure, f"95 % Wilson intervals of the first two; {about}")
    figure.subplots_adjust(
        left=0.6 / width, right=1 - 0.15 / width, top=1 - 0.75 / height, bottom=0.65 / height, wspace=0.12, hspace=0.4
    )
    return figure


def _draw_panel(axes: Axes, results: ClrsResults, drawn: Drawn, algorithm: str, sizes: list[int]) -> None:
    _mark_training(axes, results)
    for index, (variant, look) in enumerate(drawn):
        estimates = [interval(variant, algorithm, [size]) for size in sizes]
        axes.plot(
            sizes, [100 * estimate[0] for estimate in estimates], **{**look, "markersize": 2.5}, label=variant.name
        )
        if index < 2:
            low, high = ([100 * estimate[end] for estimate in estimates] for end in (1, 2))
            axes.fill_between(sizes, low, high, color=look["color"], alpha=0.15, linewidth=0)
    axes.set_title(algorithm.replace("_", " "), fontsize=7.5, loc="left")
    axes.set_ylim(-3, 103)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    tidy(axes)


def _mark_training(axes: Axes, results: ClrsResults) -> None:
    for size in results.training_sizes:
        axes.axvspan(size - 0.3, size + 0.3, color=PALE, alpha=0.25, linewidth=0)


def _draw_entropies(results: ClrsResults, groups: list[Drawn], about: str) -> Figure:
    """Draw the mean entropy of answer rows against size, in nats and as a share of the uniform row's."""
    height = 0.7 + 2.9 * len(groups)  # inches
    figure = Figure(figsize=(8.6, height), facecolor="white")
    grid = figure.subplots(len(groups), 2, sharex=True, squeeze=False)
    columns = (
        ("entropy_nats", "Entropy of answer rows (nats)"),
        ("entropy_ratio", "Entropy / log of the visible keys"),
    )
    letters = iter("abcd")
    for row, drawn in zip(grid, groups, strict=True):
        for axes, (name, title) in zip(row, columns, strict=True):
            _mark_training(axes, results)
            for variant, look in drawn:
                means = variant.mean_entropy(name)
                axes.plot(list(means), list(means.values()), **look, label=variant.name)
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            letter(axes, next(letters), title)
            tidy(axes)
        row[0].legend(loc="best", fontsize=7)
    for axes in grid[-1]:
        axes.set_xlabel("problem size (grey: those of the training)")
    note(figure, about)
    figure.subplots_adjust(left=0.07, right=0.98, top=1 - 0.35 / height, bottom=0.7 / height, wspace=0.2, hspace=0.3)
    return figure
