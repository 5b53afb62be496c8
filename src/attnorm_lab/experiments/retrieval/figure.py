"""Draw retrieval: accuracy by size, kinds of errors, and the margin that logits deliver against the margin needed."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnorm.arithmetic import ceil_div
from attnorm.figures import CORRECTED, INK, MEASURED, NULL, PALE, PRINTED, note, panel, place_labels, tidy
from attnorm_lab.experiments.retrieval.plan import BASELINE, GOALS, PRINTED_SOFTMAX, Section
from attnorm_lab.experiments.retrieval.results import RetrievalLine, Scale
from attnorm_lab.training.retrieval.evaluate import OWN

CHANCE = 10.0  # %
DISPERSED, WRONG = "#9cc3e4", "#b5521b"
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
TASKS: dict[Section, tuple[str, str, str]] = {
    "ours": ("max retrieval", INK, "o"),
    "recall": ("associative recall", "#3f8fcf", "s"),
    "majority": ("majority", "#d9731a", "^"),
}


def draw_figures(lines: Sequence[RetrievalLine], scales: Sequence[Scale], about: str) -> dict[str, Figure]:
    """Draw the figures for which there are numbers; return them by file stem."""
    figures = {"accuracy": accuracy(lines, about)}
    if any(line.section == "parts" for line in lines):
        figures["parts"] = parts(lines, about)
    figures["errors"] = errors(lines, about)
    if scales:
        figures["scale"] = scale(scales, about)
    if any(line.section in ("recall", "majority") for line in lines):
        figures["tasks"] = tasks(lines, about)
    return figures


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


def errors(lines: Sequence[RetrievalLine], about: str) -> Figure:
    """Draw the errors by size, stacked: logits wrong and dispersed."""
    split = [line for line in lines if line.row.tested_with == OWN and line.row.dispersed is not None]
    ranked = [(section, label) for section in ("paper", "ours") for label in _rank_labels(split, section)]
    panels = [(section, label) for section, label in ranked if section == "paper" or label == BASELINE]
    across = min(6, max(1, len(panels)))
    down = ceil_div(len(panels), across)
    figure = Figure(figsize=(1.9 * across + 0.8, 1.75 * down + 1.0), layout="constrained")
    grid = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (section, label) in zip(grid.flat, panels, strict=False):
        panel_lines = sorted(
            (line for line in split if (line.section, line.label) == (section, label)), key=lambda line: line.row.size
        )
        columns = range(len(panel_lines))
        dispersed = [100 * line.row.dispersed.value for line in panel_lines if line.row.dispersed]
        wrong = [100 * line.row.logits_wrong.value for line in panel_lines if line.row.logits_wrong]
        axes.bar(columns, wrong, color=WRONG, width=0.9, label="logits wrong: the largest is not the right item's")
        axes.bar(columns, dispersed, bottom=wrong, color=DISPERSED, width=0.9, hatch="////", edgecolor="white",
                 linewidth=0, label="dispersed: it is, and the answer is wrong")  # fmt: skip
        axes.set_title(_name(label) if section == "paper" else f"{label}, our recipe", fontsize=8.5,
                       fontweight="bold" if label == BASELINE else "normal")  # fmt: skip
        axes.set_xticks(list(columns), [_short(line.row.size) for line in panel_lines], fontsize=6.5, rotation=45)
        axes.set_ylim(0, 100)
        tidy(axes)
    for row in grid:
        row[0].set_ylabel("errors, %")
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper left", ncols=2)
    figure.supxlabel(f"items in the set; the paper's recipe but for the last.  {about}", fontsize=7, color=PALE)
    return figure


def scale(scales: Sequence[Scale], about: str) -> Figure:
    """Draw margins in logits by size: delivered, needed by the normalizer, and added by the class."""
    candidates = [("paper", BASELINE), ("paper", "ssmax"), ("paper", "entmax15"), ("ours", BASELINE)]
    panels = [
        of_training
        for section, label in candidates
        if (of_training := [s for s in scales if (s.training.section, s.training.label) == (section, label)])
    ]
    figure = Figure(figsize=(3.0 * len(panels) + 0.6, 3.7), layout="constrained")
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for axes, of_training, panel_letter in zip(grid, panels, "abcd", strict=False):
        sizes = [s.size for s in of_training]
        noise = [(s.size, s.class_noise) for s in of_training if s.class_noise is not None]
        axes.plot(sizes, [s.delivered for s in of_training], **MEASURED, label="delivered: slope / (n + 1)")
        needed = [(s.size, s.needed) for s in of_training if s.needed is not None]
        if needed:
            axes.plot(*zip(*needed, strict=True), **CORRECTED, label="needed for half of the weight")
        if noise:
            where, height = zip(*noise, strict=True)
            bottom = min(*height, *(s.delivered for s in of_training)) / 3
            axes.fill_between(where, bottom, height, color=WRONG, alpha=0.13, linewidth=0)
            axes.plot(where, height, color=WRONG, linestyle=":", linewidth=1.7, label="added by the class (1 s.d.)")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(sizes, [_short(size) for size in sizes], rotation=45, fontsize=7.5)
        axes.set_xticks([], minor=True)
        recipe = "our recipe" if of_training[0].training.section == "ours" else "paper's recipe"
        panel(axes, panel_letter, f"{of_training[0].training.label}, {recipe}")
    grid[0].set_ylabel("margin between the two best, logits")
    grid[0].legend(loc="lower left", fontsize=7.5)
    figure.supxlabel(
        f"items in the set.  Below the dotted line the largest logit is a guess. {about}", fontsize=7, color=PALE
    )
    return figure


def tasks(lines: Sequence[RetrievalLine], about: str) -> Figure:
    """Draw accuracy at the largest size of each task, one row per normalizer with more than one task."""
    by_section = {
        section: _lines_at_largest_size([line for line in lines if line.section == section]) for section in TASKS
    }
    several = [name for name in by_section["ours"] if sum(name in by_name for by_name in by_section.values()) > 1]
    names = sorted(several, key=lambda name: (name != BASELINE, -by_section["ours"][name].accuracy))
    figure = Figure(figsize=(6.6, 0.3 * len(names) + 1.7), layout="constrained")
    axes = figure.subplots()
    for section, (title, color, marker) in TASKS.items():
        points = [
            (index, by_section[section][name].row) for index, name in enumerate(names) if name in by_section[section]
        ]
        if not points:
            continue
        axes.errorbar(
            [100 * row.accuracy.value for _, row in points], [index for index, _ in points],
            xerr=[100 * (row.accuracy.half_width or 0) for _, row in points], color=color, marker=marker,
            linestyle="none", markersize=5, elinewidth=1.0, label=f"{title}, {points[0][1].size:,} items",
            markerfacecolor=color if section == "ours" else "white",
        )  # fmt: skip
    axes.axvline(CHANCE, color=PALE, linewidth=0.8, linestyle=(0, (1, 3)))
    axes.set_yticks(range(len(names)), [_name(name) for name in names])
    axes.set(ylim=(len(names) - 0.5, -0.5), xlim=(0, 101), xlabel="right answers, %")
    figure.legend(loc="outside upper center", ncols=3)
    tidy(axes)
    figure.supxlabel(f"{about}. Dots: chance.", fontsize=6.5, color=PALE)
    return figure


def _lines_at_largest_size(lines: Sequence[RetrievalLine]) -> dict[str, RetrievalLine]:
    largest = max((line.row.size for line in lines), default=0)
    return {line.label: line for line in lines if line.row.size == largest and line.row.tested_with == OWN}


def _rank_labels(lines: Sequence[RetrievalLine], section: Section) -> list[str]:
    """Return softmax first, then the others from best to worst by mean accuracy."""
    section_lines = [line for line in lines if line.section == section]
    labels = list(dict.fromkeys(line.label for line in section_lines))
    mean = {label: fmean(line.accuracy for line in section_lines if line.label == label) for label in labels}
    return sorted(labels, key=lambda label: (label != BASELINE, -mean[label]))


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


def _short(size: int) -> str:
    return f"{size // 1024}k" if size >= 1024 else str(size)
