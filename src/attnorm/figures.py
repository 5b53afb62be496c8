"""The common style of figures: colors, fonts, line styles, reproducible files, and labels next to the ends of lines.

Every quantity has its own line style and marker besides its color, so that figures can be read in gray. Text is drawn
as paths and files have no date: the same numbers give the same bytes.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, PALE = "#1f2023", "#7d8088"
FONTS: dict[Any, Any] = {"font.family": "DejaVu Sans", "svg.fonttype": "path", "svg.hashsalt": "attnorm"}
LETTERING: dict[Any, Any] = {
    **FONTS, "pdf.fonttype": 42, "axes.edgecolor": PALE, "xtick.color": PALE, "ytick.color": PALE,
    "xtick.labelcolor": INK, "ytick.labelcolor": INK, "text.color": INK, "axes.labelcolor": INK,
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
BARE = {"marker": None}  # a line without markers
# A line that marks a value.
DASHED: dict[str, Any] = {"color": PALE, "linewidth": 0.8, "linestyle": (0, (4, 3))}


@contextmanager
def style() -> Iterator[None]:
    """Apply the style of the experiments to figures that are made and saved inside."""
    sizes: dict[Any, Any] = {
        "font.size": 8.5, "mathtext.fontset": "dejavusans", "axes.linewidth": 0.7, "axes.titlesize": 9.5,
        "axes.labelsize": 9, "legend.frameon": False, "legend.fontsize": 8,
    }  # fmt: skip
    with matplotlib.rc_context(LETTERING | sizes):
        yield


DATES: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}


def save(figure: Figure, stem: Path, formats: Sequence[str] = ("svg", "png", "pdf"), **png: Any) -> list[Path]:
    """Save in these formats without dates: the same figure gives the same bytes. png: options of PNG files."""
    paths = [stem.with_name(f"{stem.name}.{suffix}") for suffix in formats]
    for suffix, path in zip(formats, paths, strict=True):
        options = {"dpi": 160, **png} if suffix == "png" else {"metadata": DATES[suffix]}
        figure.savefig(path, facecolor="white", **options)
    return paths


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


def panel(axes: Axes, which: str, title: str, *, grid: bool = True) -> None:
    """Make the axes a panel of the figure: letter and title, no box, a pale grid."""
    letter(axes, which, title)
    tidy(axes, grid=grid)


def note(figure: Figure, text: str) -> None:
    """Write a line in small print at the bottom: model, text, rows."""
    # A dollar sign in the name of a model or text must not start a formula.
    figure.text(0.01, 0.008, text, fontsize=7, color=PALE, parse_math=False)


def save_figure_files(draw: Callable[[], Figure], folder: Path, name: str) -> list[Path]:
    """Write NAME.svg and NAME.png to the folder; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(FONTS):
        return save(draw(), folder / name, ("svg", "png"), dpi=150, pil_kwargs={"optimize": True})


def place_labels(wanted: Sequence[float], heights: Sequence[float], *, highest: float = math.inf) -> list[float]:
    """Return centers for labels of these heights, from the top down, closest (least squares) to the wanted centers.

    Add to every wanted center the room that the labels above it take: labels do not overlap if these sums never rise.
    That is an isotonic regression. No center lies above `highest`.
    """
    from scipy.optimize import isotonic_regression

    if len(wanted) != len(heights):
        raise ValueError(f"expected one height per label, got {len(wanted)} labels and {len(heights)} heights.")
    if not wanted:
        return []
    room = [0.0]
    for above, below in pairwise(heights):
        room.append(room[-1] + (above + below) / 2)
    levels = isotonic_regression(
        [center + taken for center, taken in zip(wanted, room, strict=True)], increasing=False
    ).x
    return [min(float(level), highest) - taken for level, taken in zip(levels, room, strict=True)]


def wrapped(names: Sequence[str], width: int) -> list[str]:
    """Join the names with commas, in lines of at most `width` characters; a name is never cut."""
    lines = [""]
    for position, name in enumerate(names):
        text = name if position == len(names) - 1 else f"{name},"
        if lines[-1] and len(lines[-1]) + 1 + len(text) > width:
            lines.append(text)
        else:
            lines[-1] = f"{lines[-1]} {text}".strip()
    return lines
