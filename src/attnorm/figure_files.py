"""What the figures of bench and claims share: colours, fonts, and reproducible files.

Text is drawn as paths and files have no date: the same numbers give the same bytes.
"""

from collections.abc import Callable
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
