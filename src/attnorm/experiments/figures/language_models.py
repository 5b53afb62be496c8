"""Losses, keys found and entropy of models that differ in their normalizer; and how their losses fell."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnorm.experiments.figures.style import INK, PALE, letter, note, tidy
from attnorm.experiments.language_models.results import Contender, Spread

# By how many training lengths: colour, marker and filling differ.
LENGTHS: tuple[dict[str, Any], ...] = (
    {"color": INK, "marker": "o", "markersize": 6},
    {"color": "#0a6ab4", "marker": "s", "markersize": 5, "markerfacecolor": "white"},
    {"color": "#d9731a", "marker": "^", "markersize": 6},
)
LINES = ("-", "--", ":", "-.")
COLOURS = (INK, "#0a6ab4", "#d9731a", "#3a8f5c", "#9b4f96", "#8b939d")


def comparison_figure(found: Sequence[Contender]) -> Figure:
    """Rows are models, the lowest loss on top: losses on each text, keys found, entropy against keys found."""
    texts = list(found[0].losses)
    asked = any(one.found for one in found)
    shortest = min(found[0].losses[texts[0]])
    panels = 1 + len(texts) + 2 * asked
    figure = Figure(figsize=(3.1 * panels + 1.4, 0.3 * len(found) + 1.9), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    _rows(axes[0], found, [{shortest: one.losses[texts[0]][shortest]} for one in found], named=True)
    letter(axes[0], "a", f"{texts[0]}, {shortest:,} tokens")
    axes[0].set_xlabel("nats per token")
    for place, text in enumerate(texts, 1):
        _rows(axes[place], found, [one.losses[text] for one in found], named=False)
        letter(axes[place], "abcdef"[place], f"{text}, longer windows")
        axes[place].set_xlabel("nats per token")
    if asked:
        keys = axes[len(texts) + 1]
        _rows(keys, found, [one.found for one in found], named=False, scale=100)
        letter(keys, "abcdef"[len(texts) + 1], "Pass keys found")
        keys.set_xlabel("% of keys, every digit right")
        keys.set_xlim(-4, 104)
        _entropy(axes[-1], found)
        letter(axes[-1], "abcdef"[panels - 1], "Sharper heads, better recall?")
    axes[1].legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, columnspacing=1.0, handletextpad=0.2)
    return figure


def _rows(
    axes: Axes, found: Sequence[Contender], values: Sequence[Mapping[int, Spread]], *, named: bool, scale: float = 1.0
) -> None:
    lengths = sorted({length for one in values for length in one})
    for length, look in zip(lengths, LENGTHS, strict=False):
        for row, one in enumerate(values):
            if length not in one:
                continue
            spread = one[length]
            axes.plot(scale * spread.mean, row, linestyle="", label=f"{length:,} tokens" if row == 0 else None, **look)
            if spread.half:
                ends = (scale * (spread.mean - spread.half), scale * (spread.mean + spread.half))
                axes.plot(ends, (row, row), color=look["color"], linewidth=1.2)
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set_yticks(range(len(found)), [one.name for one in found] if named else [""] * len(found))
    tidy(axes)


def _entropy(axes: Axes, found: Sequence[Contender]) -> None:
    for one in found:
        if not one.found or "entropy_ratio" not in one.attention:
            continue
        length = max(one.found)
        x, y = one.attention["entropy_ratio"], 100 * one.found[length].mean
        trained = one.at_inference is None
        axes.plot(x, y, "o", color=INK, markersize=5, markerfacecolor=INK if trained else "white")
        axes.annotate(one.name, (x, y), xytext=(4, 3), textcoords="offset points", fontsize=7, color=PALE)
    axes.set_xlabel("entropy / log n before fine-tuning, mean over heads")
    axes.set_ylabel(f"% of keys at {max(found[0].found, default=0):,} tokens")
    axes.margins(x=0.25)
    axes.set_ylim(-6, 106)
    tidy(axes)


def course_figure(lines: Sequence[Mapping[str, Any]]) -> Figure:
    """Training loss of the main runs by tokens read."""
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.subplots()
    runs = [line for line in lines if line["stage"] == "main" and line["course"]]
    for number, run in enumerate(run for run in runs if run["seed"] == 0):
        tokens, losses, _ = zip(*run["course"], strict=True)
        axes.plot(
            [each / 1e6 for each in tokens], losses, label=run["normalizer"],
            color=COLOURS[number % len(COLOURS)], linestyle=LINES[number // 3 % len(LINES)],
        )  # fmt: skip
    axes.set_xlabel("million tokens read")
    axes.set_ylabel("training loss, nats per token")
    axes.set_xscale("log")
    if runs:
        axes.legend(ncols=2)
        note(figure, f"{runs[0]['parameters'] / 1e6:.1f} million parameters, {runs[0]['device']}; seed 0")
    tidy(axes)
    return figure
