"""Shared functions for figures: colours, fonts, reproducible files, and labels next to the ends of lines.

Text is drawn as paths and files have no date: the same numbers give the same bytes.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

INK, PALE = "#1b2129", "#8b939d"
LETTERING: dict[Any, Any] = {"font.family": "DejaVu Sans", "svg.fonttype": "path", "svg.hashsalt": "attnorm"}


def save_figure_files(draw: Callable[[], Figure], folder: Path, name: str) -> list[Path]:
    """Write NAME.svg and NAME.png to the folder; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    svg, png = folder / f"{name}.svg", folder / f"{name}.png"
    with matplotlib.rc_context(LETTERING):
        figure = draw()
        figure.savefig(svg, metadata={"Date": None})
        figure.savefig(png, dpi=150, pil_kwargs={"optimize": True})
    return [svg, png]


def place_labels(wanted: Sequence[float], heights: Sequence[float], *, highest: float = math.inf) -> list[float]:
    """Return centres for labels of these heights, from the top down, closest (least squares) to the wanted centres.

    Add to every wanted centre the room that the labels above it take: labels do not overlap if these sums never rise.
    That is an isotonic regression. No centre lies above `highest`.
    """
    from scipy.optimize import isotonic_regression

    if len(wanted) != len(heights):
        raise ValueError(f"each label needs a height, got {len(wanted)} labels and {len(heights)} heights")
    if not wanted:
        return []
    room = [0.0]
    for above, below in pairwise(heights):
        room.append(room[-1] + (above + below) / 2)
    levels = isotonic_regression(
        [centre + taken for centre, taken in zip(wanted, room, strict=True)], increasing=False
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
