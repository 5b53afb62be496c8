"""Draw the four guidelines in six panels."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, PercentFormatter
from numpy.typing import NDArray

from attnorm.experiments.figure_style import (
    BELOW_LEGEND,
    CORRECTED,
    INK,
    MEASURED,
    NULL,
    PALE,
    PRINTED,
    TEMPERATURES,
    draw_norms,
    letter,
    note,
    tidy,
)
from attnorm.experiments.guidelines.measure import (
    PAPERS_LEVEL,
    PAPERS_SHARE,
    SHARES,
    TOP_N,
    Cooled,
    Covered,
    EarlySign,
    GuidelineNumbers,
    Selected,
)

ROOM = {"left": 0.065, "right": 0.985, "top": 0.945, "bottom": 0.105, "wspace": 0.27, "hspace": 0.42}
BARE = {"marker": None}
COVERED = 0.99  # by three heads, as printed


def figure(numbers: GuidelineNumbers, about: str) -> Figure:
    drawing = Figure(figsize=(11.4, 6.6), facecolor="white")
    panels = drawing.subplots(2, 3, gridspec_kw=ROOM)
    _draw_loss(panels[0, 0], numbers.selected)
    _draw_heaviest_keys(panels[0, 1], numbers.selected)
    _draw_early_sign(panels[0, 2], numbers.early)
    _draw_separability(panels[1, 0], numbers.cooled)
    _draw_jacobian_norms(panels[1, 1], numbers.cooled)
    _draw_coverage(panels[1, 2], numbers.covered)
    note(drawing, about)
    return drawing


def _draw_loss(axes: Axes, selected: Selected) -> None:
    changes = [selected.change(share) for share in SHARES]
    values = np.array([change.value for change in changes])
    low, high = np.array([change.interval for change in changes]).T
    axes.errorbar(
        [*SHARES, 1.0], [*values, 0.0], yerr=np.stack([[*(values - low), 0.0], [*(high - values), 0.0]]), **MEASURED,
        capsize=3, elinewidth=1, label=f"mean of {changes[0].windows} windows, 95 % interval",
    )  # fmt: skip
    axes.axhline(0, color=PALE, linewidth=0.8)
    top, bottom = float(high.max()), min(0.0, float(low.min()))
    axes.set_ylim(bottom - 0.14 * (top - bottom), top + 0.16 * (top - bottom))
    axes.set_ylabel("change of the loss (nats per token)")
    letter(axes, "a", "Guideline 1: loss with a smaller active set")
    axes.legend(loc="upper right", fontsize=7)
    _format_share_axis(axes)


def _draw_heaviest_keys(axes: Axes, selected: Selected) -> None:
    axes.plot(SHARES, selected.mass, **CORRECTED, label="share of the weight on them")
    axes.plot(SHARES, selected.separability, **MEASURED, label="distinguishable, $N_s/N$")
    axes.plot(SHARES, selected.null, **NULL, label="distinguishable, values permuted")
    axes.set_ylim(0, 1.4)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.set_ylabel("share, median over heads")
    letter(axes, "b", "Guideline 1: the heaviest keys")
    axes.legend(loc="upper left", fontsize=7)
    _format_share_axis(axes, top=1.03 / 1.4)


def _format_share_axis(axes: Axes, top: float = 0.84) -> None:
    """Draw the axis of shares. top: height at which the paper's line ends, below the legend."""
    axes.axvline(PAPERS_SHARE, ymax=top, color=INK, linewidth=0.9, linestyle=(0, (1, 2)))
    axes.text(PAPERS_SHARE, 0.02, " 0.06 L", transform=axes.get_xaxis_transform(), fontsize=7.5, va="bottom")
    axes.set_xscale("log")
    axes.set_xticks([*SHARES, 1.0], [f"{share:.0%}" for share in (*SHARES, 1.0)], fontsize=7.5)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("active set, share of the context")
    tidy(axes)


def _draw_early_sign(axes: Axes, early: EarlySign) -> None:
    like_chance = early.by_null
    looks: list[tuple[NDArray[np.bool_], dict[str, Any], str]] = [
        (~like_chance, {"marker": "o", "facecolor": "white", "edgecolor": INK}, "better than its null"),
        (like_chance, {"marker": "x", "color": INK}, "no better"),
    ]
    for mask, look, label in looks:
        axes.scatter(early.entropy_before[mask], early.apart_after[mask], s=15, linewidth=0.8, label=label, **look)
    axes.axhline(PAPERS_LEVEL, color=PALE, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.set_xlim(0, 1.02)
    axes.set_ylim(0, 1.25)
    axes.set_xlabel("entropy / log n at a quarter of the length")
    axes.set_ylabel(f"distinguishable at the length, $N_s/N$, N = {TOP_N}")
    letter(axes, "c", f"Guideline 2 (AUC {early.area_under_curve(early.by_level):.2f} for 80 %)")
    axes.legend(loc="upper right", fontsize=7, ncols=2)
    tidy(axes)


def _draw_separability(axes: Axes, cooled: Cooled) -> None:
    low, centre, high = np.nanquantile(cooled.separability, (0.25, 0.5, 0.75), axis=1)
    axes.fill_between(TEMPERATURES, low, high, color=INK, alpha=0.15, linewidth=0)
    axes.plot(TEMPERATURES, centre, **MEASURED, label="median head, quartiles")
    axes.set_ylim(0, 1.35)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.axvline(1, ymax=BELOW_LEGEND, color=PALE, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_xscale("log")
    axes.set_xlabel("temperature, 1 = as trained")
    axes.legend(loc="upper left", fontsize=7)
    axes.set_ylabel(f"distinguishable, $N_s/N$, N = {TOP_N}")
    letter(axes, "d", "Guideline 3: separability")
    _mark_temperatures(axes, cooled)


def _draw_jacobian_norms(axes: Axes, cooled: Cooled) -> None:
    draw_norms(axes, cooled.norm, "head")
    axes.set_ylabel("Jacobian norm, mean over rows")
    letter(axes, "e", "Guideline 3: gradients")
    _mark_temperatures(axes, cooled)


def _mark_temperatures(axes: Axes, cooled: Cooled) -> None:
    """Mark the paper's T = 0.1, relative to the trained temperature and on raw logits."""
    for temperature, text in ((0.1, "T = 0.1"), (0.1 / cooled.trained_temperature, "0.1 on raw q·k")):
        if temperature > TEMPERATURES[0]:
            axes.axvline(temperature, ymax=BELOW_LEGEND, color=INK, linewidth=0.9, linestyle=(0, (1, 2)))
            axes.text(
                temperature, BELOW_LEGEND + 0.005, text, transform=axes.get_xaxis_transform(), fontsize=6.5,
                va="bottom",
                ha="center",
            )  # fmt: skip
    tidy(axes)


def _draw_coverage(axes: Axes, covered: Covered) -> None:
    bars = {
        "one head,\nits own": (covered.alone, ""),
        "three, as\npredicted": (covered.predicted, "////"),
        "three, the\nfirst's": (covered.own, "...."),
        "three,\nall theirs": (covered.together, "xxxx"),
    }
    axes.axhline(COVERED, **{**PRINTED, **BARE}, label=f"{COVERED:.0%}, as printed", zorder=0)
    for index, (value, hatch) in enumerate(bars.values()):
        axes.bar(index, value, color="white", edgecolor=INK, hatch=hatch, width=0.62, linewidth=0.8)
        # Above the printed line where the bar comes near it.
        height = value + 0.03 if value < COVERED - 0.12 else COVERED + 0.03
        axes.text(index, max(height, value + 0.03), f"{value:.1%}", ha="center", fontsize=8)
    axes.set_xticks(range(len(bars)), list(bars), fontsize=7.5)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylim(0, 1.25)
    axes.set_ylabel(f"selected keys distinguished, N = {TOP_N}")
    letter(axes, "f", "Do three heads cover 99 %?")
    axes.legend(loc="upper right", fontsize=7)
    tidy(axes, grid=False)
