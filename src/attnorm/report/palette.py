"""Colours and lettering of the figures of an analysis; verdicts and scale are those of the page."""

from typing import Any

INK, PALE, ACCENT, WARM = "#1f2023", "#7d8088", "#3a49b0", "#a4430c"
LETTERING: dict[Any, Any] = {
    "font.family": "DejaVu Sans", "font.size": 8, "svg.fonttype": "path", "svg.hashsalt": "attnorm", "pdf.fonttype": 42,
    "axes.edgecolor": PALE, "axes.linewidth": 0.6, "xtick.color": PALE, "ytick.color": PALE,
    "xtick.labelcolor": INK, "ytick.labelcolor": INK, "text.color": INK, "axes.labelcolor": INK,
    "text.parse_math": False,  # names of texts and models are data: a dollar sign must not start a formula
}  # fmt: skip
SCALE = ("#2a1a5e", "#34438c", "#2c6a94", "#25908c", "#4bb573", "#a3d04d", "#f6e34b")
VERDICT_COLOURS: dict[str, tuple[str, str]] = {  # fill, ink
    "broken": ("#1c1c1f", "#ffffff"),
    "dispersed-forced": ("#b8470f", "#ffffff"),
    "dispersed-by-choice": ("#eda73a", "#2b1a00"),
    "dispersed": ("#f3d3a2", "#2b1a00"),
    "differs": ("#cd86ae", "#2a0b1d"),
    "undecided": ("#b9b7b0", "#1f2023"),
    "sink-dominated": ("#85c4ec", "#06263a"),
    "frozen": ("#1f6aa5", "#ffffff"),
    "sensitive": ("#f2e35c", "#2e2a00"),
    "healthy": ("#d3e5de", "#1f3a33"),
}
OTHER_COLOURS = ("#e4e2dc", "#1f2023")
