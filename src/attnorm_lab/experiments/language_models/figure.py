"""Draw losses, keys found and entropy of models that differ in their normalizer."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import median
from string import ascii_lowercase
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnorm.arithmetic import wilson_interval
from attnorm.figures import INK, PALE, letter, tidy
from attnorm.models.layer_normalizer import SOFTMAX
from attnorm_lab.experiments.language_models.results import LMContender, most_informative_length

# Styles of lengths or texts: color, marker and fill differ.
LOOKS: tuple[dict[str, Any], ...] = (
    {"color": INK, "marker": "o", "markersize": 5.5},
    {"color": "#0a6ab4", "marker": "s", "markersize": 5, "markerfacecolor": "white"},
    {"color": "#d9731a", "marker": "^", "markersize": 5.5},
)
FAR_OFF = 1.2  # times the median: larger losses are written at the edge
CLOSE = (0.03, 3.0)  # of entropy ratio and % of keys: the left one of two such points has its number on the left
DARK = 0.6  # larger shares have white digits


def comparison_figure(models: Sequence[LMContender]) -> Figure:
    """Draw one row per model, lowest loss on top: loss at every length, keys found, and entropy against keys found."""
    lengths = sorted(next(iter(models[0].losses.values())))
    has_keys = any(model.keys_found for model in models)
    columns = max(len(lengths), 3 if has_keys else 1)
    height = 0.25 * len(models) + 0.9
    figure = Figure(figsize=(3.2 * columns + 1.4, height * (1 + has_keys) + 0.8 * has_keys + 0.2), layout="constrained")
    axes = figure.subplots(1 + has_keys, columns, squeeze=False)
    for column, length in enumerate(lengths):
        _draw_losses(axes[0, column], models, length, named=column == 0)
        letter(axes[0, column], ascii_lowercase[column], f"Loss, windows of {length:,} tokens")
    for empty in axes[0, len(lengths) :]:
        empty.set_visible(False)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper right", ncols=4, handletextpad=0.1)
    if has_keys:
        any_found = any(spread.mean for model in models for spread in model.keys_found.values())
        panels = (_draw_keys, _draw_depths, _draw_entropy) if any_found else (_draw_keys,)
        for column, draw in enumerate(panels):
            letter(axes[1, column], ascii_lowercase[len(lengths) + column], draw(axes[1, column], models))
        for empty in axes[1, len(panels) :]:
            empty.set_visible(False)
    return figure


def _draw_losses(axes: Axes, models: Sequence[LMContender], length: int, *, named: bool) -> None:
    texts = list(models[0].losses)
    far = FAR_OFF * median(model.losses[text][length].mean for model in models for text in texts)
    for row, model in enumerate(models):
        spreads = {text: model.losses[text][length] for text in texts}
        if min(spread.mean for spread in spreads.values()) > far:
            off = ", ".join(f"{spread.mean:.2f}" for spread in spreads.values())
            axes.text(0.98, row, f"{off} →", transform=axes.get_yaxis_transform(), ha="right", va="center")
            continue
        for (text, spread), look in zip(spreads.items(), LOOKS, strict=False):
            axes.plot(spread.mean, row, linestyle="", label=text if row == 0 else None, **look)
            if spread.half:
                ends = (spread.mean - spread.half, spread.mean + spread.half)
                axes.plot(ends, (row, row), color=look["color"], linewidth=1.2)
    for model in (model for model in models if model.name == SOFTMAX):
        for text, look in zip(texts, LOOKS, strict=False):
            axes.axvline(model.losses[text][length].mean, color=look["color"], linewidth=0.7, linestyle=":", zorder=0)
    axes.set_xlabel("nats per token")
    axes.margins(x=0.08)
    _format_rows(axes, models, named=named)


def _format_rows(axes: Axes, models: Sequence[LMContender], *, named: bool) -> None:
    axes.set_ylim(len(models) - 0.5, -0.5)
    axes.set_yticks(range(len(models)), _numbered_names(models) if named else [""] * len(models))
    tidy(axes)


def _numbered_names(models: Sequence[LMContender]) -> list[str]:
    short = _short_names(model.normalizer for model in models)
    return [
        f"{model.name.replace(model.normalizer, short[model.normalizer], 1)}  {row}"
        for row, model in enumerate(models, 1)
    ]


def _short_names(normalizers: Iterable[str]) -> dict[str, str]:
    """Return the names without their options where no other normalizer has the same name."""
    names = {normalizer: normalizer.partition(":")[0] for normalizer in normalizers}
    taken = Counter(names.values())
    return {normalizer: name if taken[name] == 1 else normalizer for normalizer, name in names.items()}


def _draw_keys(axes: Axes, models: Sequence[LMContender]) -> str:
    lengths = sorted({length for model in models for length in model.keys_found})
    for row, model in enumerate(models):
        for length, look in zip(lengths, LOOKS, strict=False):
            if length not in model.keys_found:
                continue
            share = model.keys_found[length].mean
            ends = [100 * end for end in wilson_interval(share, model.questions)]
            axes.plot(ends, (row, row), color=look["color"], linewidth=0.8)
            axes.plot(100 * share, row, linestyle="", **look)
        if not model.keys_found:
            axes.text(50, row, "not measured", ha="center", va="center", color=PALE, fontsize=7)
    for length, look in zip(lengths, LOOKS, strict=False):
        axes.plot([], [], linestyle="", label=f"{length:,}", **look)
    axes.set(xlabel="% of keys, every character right", xlim=(-4, 104))
    axes.legend(
        loc="lower center", bbox_to_anchor=(0.5, -0.02), ncols=len(lengths), columnspacing=0.8, handletextpad=0.1
    )
    _format_rows(axes, models, named=True)
    axes.set_ylim(len(models) + 0.4, -0.5)
    return "Pass keys found, by length"


def _draw_depths(axes: Axes, models: Sequence[LMContender]) -> str:
    """Draw keys found, one row per model and one column per position of the key."""
    length = most_informative_length(models)
    assert length is not None
    depths = sorted({depth for model in models for depth in model.by_depth.get(length, ())})
    shares = [[model.by_depth.get(length, {}).get(depth, math.nan) for depth in depths] for model in models]
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1.15, aspect="auto", alpha=0.85)
    for row, of_model in enumerate(shares):
        for column, share in enumerate(of_model):
            if not math.isnan(share):
                dark = share > DARK
                axes.text(column, row, f"{100 * share:.0f}", ha="center", va="center", color="white" if dark else INK)
    learned = sum(depth * length <= min(n for model in models for n in model.keys_found) for depth in depths)
    axes.axvline(learned - 0.5, color=INK, linewidth=1)
    axes.set_xticks(range(len(depths)), [f"{depth * length:,.0f}" for depth in depths])
    axes.set_xlabel("token of the key; line: training length")
    _format_rows(axes, models, named=False)
    axes.set_ylim(len(models) + 0.4, -0.5)
    axes.grid(visible=False)
    return f"% of keys in {length:,} tokens, by position"


def _draw_entropy(axes: Axes, models: Sequence[LMContender]) -> str:
    length = most_informative_length(models)
    assert length is not None
    points: dict[tuple[float, float], list[int]] = {}
    for row, model in enumerate(models):
        if model.keys_found and "entropy_ratio" in model.attention:
            points.setdefault((model.attention["entropy_ratio"], 100 * model.keys_found[length].mean), []).append(row)
    for (x, y), rows in points.items():
        trained = any(models[row].at_inference is None for row in rows)
        ends = [100 * end for end in wilson_interval(y / 100, models[rows[0]].questions)]
        axes.plot((x, x), ends, color=PALE, linewidth=0.7)
        axes.plot(x, y, "o", color=INK, markersize=5, markerfacecolor=INK if trained else "white")
        numbers = ", ".join(str(row + 1) for row in rows)
        side = -1 if any(0 < other - x < CLOSE[0] and abs(height - y) < CLOSE[1] for other, height in points) else 1
        axes.annotate(
            numbers, (x, y), xytext=(5 * side, 0), textcoords="offset points", va="center",
            ha="left" if side > 0 else "right",
        )  # fmt: skip
    axes.set(xlabel="entropy / log n; numbers as in (d)", ylabel=f"% of keys in {length:,} tokens")
    axes.margins(x=0.12, y=0.08)
    tidy(axes)
    return "Sharper heads, better recall?"
