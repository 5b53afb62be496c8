"""Draw retrieval: accuracy by size, of the normalizers and of the parts of our recipe."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnorm.figures import CORRECTED, INK, MEASURED, NULL, PALE, PRINTED, note, panel, place_labels, tidy
from attnorm_lab.experiments.retrieval.plan import BASELINE, GOALS, PRINTED_SOFTMAX, Section
from attnorm_lab.experiments.retrieval.results import RetrievalLine
from attnorm_lab.training.retrieval.evaluate import OWN

CHANCE = 10.0  # %
LINE_HEIGHT = 0.043  # of a label, in heights of the plot
TESTS: dict[str, tuple[str, dict[str, Any]]] = {
    OWN: ("softmax", MEASURED),
    "adaptive_temperature": ("softmax, adaptive temperature in tests", CORRECTED),
    "hard": ("softmax, hard attention in tests", NULL),
}
PANELS: dict[Section, str] = {"paper": "the paper's recipe", "ours": "our recipe: same model, same sizes in training"}
AS_PRINTED: dict[str, Any] = PRINTED | {"label": "softmax, as printed"}
GOAL: dict[str, Any] = {
    "color": INK, "marker": "*", "markersize": 9, "linestyle": "none", "markerfacecolor": "white",
    "label": "goals set beforehand",
}  # fmt: skip


def draw_figures(lines: Sequence[RetrievalLine], about: str) -> dict[str, Figure]:
    """Draw the figures for which there are numbers; return them by file stem."""
    has_parts = any(line.section == "parts" for line in lines)
    return {"accuracy": accuracy(lines, about)} | ({"parts": parts(lines, about)} if has_parts else {})


def accuracy(lines: Sequence[RetrievalLine], about: str) -> Figure:
    """Draw accuracy against set size: the paper's recipe on the left, ours on the right."""
    panels = [(section, title) for section, title in PANELS.items() if any(line.section == section for line in lines)]
    figure = Figure(figsize=(6.0 * len(panels), 5.2))
    for index, (section, title) in enumerate(panels):
        axes = figure.add_axes(((0.11 + index) / len(panels), 0.13, 0.69 / len(panels), 0.78))
        section_lines = [line for line in lines if line.section == section]
        sizes = _draw_sizes(axes, lines)
        for tested_with, (label, look) in TESTS.items():
            curve = [line for line in section_lines if (line.label, line.row.tested_with) == (BASELINE, tested_with)]
            if curve:
                _draw_line(axes, curve, label, look)
        others = [line for line in section_lines if line.label != BASELINE and line.row.tested_with == OWN]
        for label in dict.fromkeys(line.label for line in others):
            curve = [line for line in others if line.label == label]
            axes.plot(*_points(curve), color="#b9bec6", linewidth=1.0, zorder=1)
        marks = PRINTED_SOFTMAX if section == "paper" else GOALS
        shown = {size: value for size, value in marks.items() if size <= sizes[-1]}
        axes.plot(list(shown), list(shown.values()), **(AS_PRINTED if section == "paper" else GOAL))
        _list_beside(axes, [line for line in section_lines if line.row.tested_with == OWN])
        axes.legend(loc="upper right" if section == "paper" else "lower left", fontsize=7.5)
        panel(axes, "ab"[index], title)
    note(figure, f"{about}. Bars: 95 % confidence. Gray: other normalizers, trained and tested with themselves.")
    return figure


def parts(lines: Sequence[RetrievalLine], about: str) -> Figure:
    """Draw softmax with the paper's recipe, each part of ours alone, ours without each part, and ours."""
    figure = Figure(figsize=(9.2, 4.8))
    axes = figure.add_axes((0.07, 0.14, 0.56, 0.77))
    part_lines = [line for line in lines if line.section == "parts" and line.row.tested_with == OWN]
    _draw_sizes(axes, part_lines)
    line_styles = ("-", "--", "-.", ":")
    for index, label in enumerate(dict.fromkeys(line.label for line in part_lines)):
        curve = [line for line in part_lines if line.label == label]
        edge = label in ("paper's recipe", "our recipe")
        color = INK if edge else "#3f8fcf" if label.startswith("+") else "#d9731a"
        line_style = "-" if edge else line_styles[index % 4]
        axes.plot(*_points(curve), color=color, linewidth=2.2 if edge else 1.2, linestyle=line_style,
                  marker="os^vDPX*"[index % 8], markersize=4)  # fmt: skip
    _label_ends(axes, part_lines)
    axes.set_title("What each part of the recipe contributes; softmax throughout", loc="left")
    note(figure, f"{about}. Blue: one part alone; orange: all but one, or more.")
    return figure


def _points(lines: Sequence[RetrievalLine]) -> tuple[list[int], list[float]]:
    ordered = sorted(lines, key=lambda line: line.row.size)
    return [line.row.size for line in ordered], [100 * line.accuracy for line in ordered]


def _draw_line(axes: Axes, lines: Sequence[RetrievalLine], label: str, look: dict[str, Any]) -> None:
    sizes, values = _points(lines)
    half = [100 * (line.row.accuracy.half_width or 0) for line in sorted(lines, key=lambda line: line.row.size)]
    axes.errorbar(sizes, values, yerr=half, **look, label=label, elinewidth=1.0, zorder=3)


def _draw_sizes(axes: Axes, lines: Sequence[RetrievalLine]) -> list[int]:
    sizes = sorted({line.row.size for line in lines if line.training.task == "max"})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes], fontsize=7.5)
    axes.set_xticks([], minor=True)
    axes.set(xlim=(sizes[0] * 0.8, sizes[-1] * 1.15), ylim=(0, 102))
    axes.axhline(CHANCE, color=PALE, linewidth=0.8, linestyle=(0, (1, 3)))
    axes.set(xlabel="items in the set", ylabel="right answers, %")
    tidy(axes)
    return sizes


def _list_beside(axes: Axes, lines: Sequence[RetrievalLine]) -> None:
    """List names and values at the size where the normalizers differ most; label the line ends if it is the last."""
    sizes = sorted({line.row.size for line in lines})
    widest = max(sizes, key=lambda size: _deviation([line.accuracy for line in lines if line.row.size == size]))
    if widest == sizes[-1]:
        _label_ends(axes, lines)
        return
    ranked = sorted((line for line in lines if line.row.size == widest), key=lambda line: -line.accuracy)
    axes.text(1.06, 1.0, f"% at {widest:,}", transform=axes.transAxes, fontsize=7.5, va="center", color=PALE)
    for index, line in enumerate(ranked, 1):
        axes.text(1.06, 1.0 - 1.15 * LINE_HEIGHT * index, f"{100 * line.accuracy:4.1f}  {_name(line.label)}",
                  transform=axes.transAxes, fontsize=7.5, va="center",
                  fontweight="bold" if line.label == BASELINE else "normal")  # fmt: skip


def _deviation(values: Sequence[float]) -> float:
    """Return the interquartile range, which ignores one normalizer that failed to learn."""
    ordered = sorted(values)
    return ordered[(3 * len(ordered)) // 4 - (len(ordered) % 4 == 0)] - ordered[len(ordered) // 4]


def _label_ends(axes: Axes, lines: Sequence[RetrievalLine]) -> None:
    """Write names and final values at the right, moved apart if lines end close together."""
    ends = {}
    for line in sorted(lines, key=lambda line: line.row.size):
        ends[line.label] = (100 * line.accuracy, line.row.size)
    ordered = sorted(ends, key=lambda label: -ends[label][0])
    heights = [ends[label][0] / 102 for label in ordered]
    centers = place_labels(heights, [LINE_HEIGHT] * len(ordered), highest=1.0)
    raised = max(0.0, 0.01 - min(centers, default=0.0))
    for label, height, center in zip(ordered, heights, (center + raised for center in centers), strict=True):
        axes.plot([1.002, 1.02, 1.05], [height, height, center], transform=axes.transAxes, color=PALE, linewidth=0.6,
                  clip_on=False)  # fmt: skip
        weight = "bold" if label in (BASELINE, "our recipe") else "normal"
        label_text = f"{ends[label][0]:4.1f}  {_name(label)}"
        axes.text(1.06, center, label_text, transform=axes.transAxes, fontsize=7.5, va="center", fontweight=weight)


def _name(label: str) -> str:
    """Return the name of a normalizer without its options, which the tables have."""
    return label.partition(":")[0] if "=" in label else label
