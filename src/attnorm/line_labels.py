"""Labels beside the ends of lines: moved apart as little as possible, so that each stays near its line."""

import math
from collections.abc import Sequence
from itertools import pairwise

from scipy.optimize import isotonic_regression


def spread(wanted: Sequence[float], heights: Sequence[float], *, highest: float = math.inf) -> list[float]:
    """Return centres for labels of these heights, from the top down, closest (least squares) to the wanted centres.

    Add to every wanted centre the room that the labels above it take: labels do not overlap if these sums never rise.
    That is an isotonic regression. No centre lies above `highest`.
    """
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
