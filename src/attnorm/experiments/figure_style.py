"""The common style of all experiment figures: fonts, colours, line styles, recurring panels, reproducible files.

Every quantity has its own line style and marker besides its colour, so that figures can be read in grey.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnorm.experiments.experiment import Floats
from attnorm.report.views import INK, PALE

__all__ = ["CORRECTED", "INK", "MEASURED", "NULL", "PALE", "PRINTED", "letter", "note", "save", "style", "tidy"]

LETTERING: dict[Any, Any] = {
    "font.family": "DejaVu Sans", "font.size": 8.5, "mathtext.fontset": "dejavusans",
    "svg.fonttype": "path", "svg.hashsalt": "attnorm", "pdf.fonttype": 42,
    "axes.edgecolor": PALE, "axes.linewidth": 0.7, "axes.titlesize": 9.5, "axes.labelsize": 9,
    "xtick.color": PALE, "ytick.color": PALE, "xtick.labelcolor": INK, "ytick.labelcolor": INK,
    "text.color": INK, "axes.labelcolor": INK, "legend.frameon": False, "legend.fontsize": 8,
}  # fmt: skip

# Keyword arguments of a line for each quantity that figures compare; they differ in lightness too.
MEASURED: dict[str, Any] = {"color": INK, "linestyle": "-", "marker": "o", "markersize": 4, "linewidth": 1.8}
CORRECTED: dict[str, Any] = {"color": "#0a6ab4", "linestyle": "--", "marker": "s", "markersize": 4, "linewidth": 1.5}
PRINTED: dict[str, Any] = {
    "color": "#d9731a", "linestyle": ":", "marker": "^", "markersize": 4.5, "linewidth": 1.7,
    "markerfacecolor": "white",
}  # fmt: skip
NULL: dict[str, Any] = {
    "color": "#8b939d", "linestyle": "-.", "marker": "D", "markersize": 3.5, "linewidth": 1.3,
    "markerfacecolor": "white",
}  # fmt: skip

# Lines of several models; dashed blue is reserved for theory.
MODELS: tuple[dict[str, Any], ...] = (
    MEASURED,
    {"color": "#d9731a", "linestyle": (0, (1, 1)), "marker": "^", "markersize": 4.5, "linewidth": 1.8},
    {"color": "#0b8466", "linestyle": "-.", "marker": "v", "markersize": 4.5, "linewidth": 1.6},
    {"color": "#9a62c7", "linestyle": (0, (5, 1)), "marker": "P", "markersize": 4.5, "linewidth": 1.6},
    {"color": "#b0305c", "linestyle": (0, (3, 1, 1, 1, 1, 1)), "marker": "X", "markersize": 4.5, "linewidth": 1.6},
)

TEMPERATURES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
BARE = {"marker": None}
TOP = 1e5  # the legend stands above the lines
BELOW_LEGEND = 0.76  # of the height
LOWEST = 1e-6


@contextmanager
def style() -> Iterator[None]:
    """Apply the style to figures that are made and saved inside."""
    with matplotlib.rc_context(LETTERING):
        yield


def save(figure: Figure, stem: Path) -> list[Path]:
    """Save as SVG, PNG and PDF without dates: the same figure gives the same bytes."""
    svg, png, pdf = (stem.with_name(f"{stem.name}.{suffix}") for suffix in ("svg", "png", "pdf"))
    figure.savefig(svg, metadata={"Date": None}, facecolor="white")
    figure.savefig(png, dpi=160, facecolor="white")
    figure.savefig(pdf, metadata={"CreationDate": None}, facecolor="white")
    return [svg, png, pdf]


def tidy(axes: Axes, *, grid: bool = True) -> None:
    """Remove the box and draw a pale grid behind the data."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if grid:
        axes.grid(color="#e9ebee", linewidth=0.7)
        axes.set_axisbelow(True)


def letter(axes: Axes, which: str, title: str) -> None:
    """Write the panel's letter and title above it on the left."""
    axes.set_title(f"({which})  {title}", loc="left")


def note(figure: Figure, text: str) -> None:
    """Write a line in small print at the bottom: model, text, rows."""
    # A dollar sign in the name of a model or text must not start a formula.
    figure.text(0.01, 0.008, text, fontsize=7, color=PALE, parse_math=False)


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
