"""Labels beside the ends of lines: moved apart as little as possible, so that each stays near what it names."""

import math
from collections.abc import Sequence
from itertools import pairwise


def spread(wanted: Sequence[float], heights: Sequence[float], *, highest: float = math.inf) -> list[float]:
    """Centres for labels of these heights, listed from the top down, closest (least squares) to the wanted centres.

    With the room that the labels above need added to every wanted centre, no overlap means that the sums never rise:
    isotonic regression, by pooling neighbours that are out of order. No centre lies above `highest`.
    """
    if len(wanted) != len(heights):
        raise ValueError(f"each label needs a height, got {len(wanted)} labels and {len(heights)} heights")
    room = [0.0]
    for above, below in pairwise(heights):
        room.append(room[-1] + (above + below) / 2)
    pools: list[tuple[float, int]] = []  # mean, members
    for centre, taken in zip(wanted, room, strict=False):
        pools.append((centre + taken, 1))
        while len(pools) > 1 and pools[-2][0] < pools[-1][0]:
            (mean, count), (other, more) = pools[-2:]
            pools[-2:] = [((mean * count + other * more) / (count + more), count + more)]
    levels = [min(mean, highest) for mean, count in pools for _ in range(count)]
    return [level - taken for level, taken in zip(levels, room, strict=False)]


def wrapped(names: Sequence[str], width: int) -> list[str]:
    """The names joined by commas, in lines of at most `width` characters; a name is never cut."""
    lines = [""]
    for position, name in enumerate(names):
        text = name if position == len(names) - 1 else f"{name},"
        if lines[-1] and len(lines[-1]) + 1 + len(text) > width:
            lines.append(text)
        else:
            lines[-1] = f"{lines[-1]} {text}".strip()
    return lines
