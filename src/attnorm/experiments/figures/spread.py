"""The spread over heads beside the printed table, against the length, and against Proposition 3.1."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from attnorm.experiments.figures.style import CORRECTED, INK, MEASURED, NULL, PALE, letter, note, tidy
from attnorm.experiments.spread import PRINTED, READINGS, Spreads

SPREADS = (1, 2, 5, 10, 20, 50, 100, 200)
ROOM = {"left": 0.175, "right": 0.965, "top": 0.9, "bottom": 0.19, "wspace": 0.3, "width_ratios": (1.15, 1, 1)}


def figure(found: Spreads, name: str, about: str) -> Figure:
    drawing = Figure(figsize=(11.4, 3.7), facecolor="white")
    left, middle, right = drawing.subplots(1, 3, gridspec_kw=ROOM)
    _table(left, found, name)
    _growth(middle, found)
    _bound(right, found)
    note(drawing, about)
    return drawing


def _table(axes: Axes, found: Spreads, name: str) -> None:
    """Mean, standard deviation and range, as the paper's table has them."""
    rows = [(model, low, high, mean, std, NULL) for model, (low, high, mean, std) in PRINTED.items()]
    for reading, meaning in READINGS.items():
        values = found.readings[reading]
        rows.append((f"{name}:\n{meaning}", values.min(), values.max(), values.mean(), values.std(), MEASURED))
    for place, (_, low, high, mean, std, look) in enumerate(reversed(rows)):
        axes.plot([low, high], [place, place], color=look["color"], linewidth=0.9)
        axes.plot(
            [max(mean - std, low), min(mean + std, high)],
            [place, place],
            color=look["color"],
            linewidth=4.5,
            alpha=0.45,
        )
        axes.plot([mean], [place], color=look["color"], marker=look["marker"], markersize=5, markerfacecolor="white")
        axes.text(mean, place + 0.2, f"{mean:.2f} ± {std:.2f}", ha="center", fontsize=7.5)
    axes.set_yticks(range(len(rows)), [row[0] for row in reversed(rows)], fontsize=7.5)
    axes.set_ylim(-0.5, len(rows) - 0.3)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("logit spread (nats): range, mean ± std over heads")
    letter(axes, "a", "The table: printed (pale) and ours")
    tidy(axes)


def _growth(axes: Axes, found: Spreads) -> None:
    low, centre, high = np.nanquantile(found.against_n, (0.1, 0.5, 0.9), axis=0)
    axes.fill_between(found.n, low, high, color=INK, alpha=0.15, linewidth=0)
    axes.plot(found.n, centre, **MEASURED, label="heads: median, 10 to 90 %")
    axes.plot(found.n, np.log(found.n), **{**CORRECTED, "marker": None}, label="log n: below it the ceiling binds")
    axes.axhline(PRINTED["Gemma 2B"][2], color=PALE, linestyle=(0, (4, 3)), linewidth=1, label="Gemma 2B as printed")
    axes.set_xscale("log", base=2)
    ticks = [n for n in (16, 64, 256, 1024, 4096) if found.n[0] <= n <= found.n[-1]]
    axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yscale("log")
    axes.set_yticks(SPREADS, [f"{value}" for value in SPREADS])
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylim(min(2.0, float(low.min())), float(high.max()) * 3)
    axes.set_xlabel("visible keys n")
    axes.set_ylabel("logit spread (nats)")
    letter(axes, "b", "It grows with the context")
    axes.legend(loc="upper left", fontsize=7)
    tidy(axes)


def _bound(axes: Axes, found: Spreads) -> None:
    known = ~np.isnan(found.bound)
    letter(axes, "c", "Proposition 3.1")
    if not known.any():
        axes.text(0.5, 0.5, "not applicable", ha="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    last, bound, layer = (values[known] for values in (found.readings["last"], found.bound, found.layer))
    dots = axes.scatter(last, bound, c=layer, cmap="viridis", s=14, edgecolor=INK, linewidth=0.4)
    bar = axes.figure.colorbar(dots, ax=axes, pad=0.02)
    bar.set_label("layer", fontsize=8)
    ends = [float(last.min()) * 0.9, float(bound.max()) * 1.1]
    axes.plot(ends, ends, **{**CORRECTED, "marker": None}, label="bound = spread")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("measured spread, last row (nats)")
    axes.set_ylabel("bound of Proposition 3.1 (nats)")
    axes.legend(loc="lower right", fontsize=7)
    tidy(axes)
