"""Draw dispersion: a summary in six panels."""

import math
from collections.abc import Mapping

import numpy as np
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter

from attnorm.analysis.collect_rows import SHORTEST_IN_SLOPE
from attnorm.figures import BARE, CORRECTED, DASHED, INK, MEASURED, NULL, PALE, PRINTED, note, panel
from attnorm_lab.experiments.dispersion.measure import CEILING_LENGTHS, CONTENT, KEYS, RUNS, Key, bins, column
from attnorm_lab.experiments.experiment import Floats

ROOM = {"left": 0.065, "right": 0.985, "top": 0.95, "bottom": 0.105, "wspace": 0.27, "hspace": 0.42}


def overview(
    heads: Mapping[Key, pa.Table], curves: Mapping[Key, pa.Table], ceilings: pa.Table, main: int, about: str
) -> Figure:
    drawing = Figure(figsize=(11.4, 6.6))
    panels = drawing.subplots(2, 3, gridspec_kw=ROOM)
    table = heads[main, RUNS]
    _draw_entropy(panels[0, 0], curves[main, RUNS])
    _draw_gap(panels[0, 1], curves[main, RUNS])
    _draw_slopes(panels[0, 2], heads, main)
    _draw_bound_shares(panels[1, 0], table, ceilings, main)
    _draw_slopes_by_layer(panels[1, 1], table)
    _draw_groups(panels[1, 2], table)
    note(drawing, about)
    return drawing


def _draw_entropy(axes: Axes, curves: pa.Table) -> None:
    n, middle, low, high = _band(curves, "entropy_nats_q50")
    floor = _band(curves, "entropy_floor_q50")[1]
    axes.plot(n, np.log(n), color=PALE, linewidth=1.4, label="log n: uniform")
    axes.fill_between(n, low, high, color=INK, alpha=0.15, linewidth=0)
    axes.plot(n, middle, **MEASURED, label="heads: median, 10 to 90 %")
    axes.plot(n, floor, **{**CORRECTED, **BARE}, label="floor that the spread allows (median)")
    axes.set_ylabel("entropy (nats)")
    panel(axes, "a", "Entropy, its floor and log n")
    _finish_length_panel(axes, n)
    axes.set_ylim(top=1.3 * math.log(n[-1]))


def _draw_gap(axes: Axes, curves: pa.Table) -> None:
    n, middle, low, high = _band(curves, "effective_gap_q50")
    axes.fill_between(n, low, high, color=INK, alpha=0.15, linewidth=0)
    axes.plot(n, middle, **MEASURED, label="heads: median, 10 to 90 %")
    start = int(np.argmax(n >= SHORTEST_IN_SLOPE))
    axes.plot(
        n[start:], middle[start] + np.log(n[start:] / n[start]), **{**CORRECTED, **BARE}, label="slope 1: keeps up"
    )
    axes.plot(n[start:], np.full(len(n) - start, middle[start]), **{**PRINTED, **BARE}, label="slope 0: disperses")
    axes.set_ylabel("effective gap (nats)")
    panel(axes, "b", "The rate test: effective gap")
    _finish_length_panel(axes, n)
    axes.set_ylim(top=float(np.max(high)) * 1.25)


def _draw_slopes(axes: Axes, heads: Mapping[Key, pa.Table], main: int) -> None:
    """Draw cumulative distributions of the slopes over heads."""
    table = heads[main, RUNS]
    lines = [("all keys", column(table, "gap_slope"), MEASURED)]
    lines.append(("without the sink key", column(table, "gap_slope_without_sink"), CORRECTED))
    if (main, CONTENT) in heads:
        lines.append(("before rotation", column(heads[main, CONTENT], "gap_slope"), PRINTED))
    lines += [
        (f"all keys, {length:,} tokens", column(heads[length, RUNS], "gap_slope"), NULL)
        for length in sorted({length for length, _ in heads if length > main})
    ]
    for label, slopes, look in lines:
        known = np.sort(slopes[np.isfinite(slopes)])
        shares = np.arange(1, len(known) + 1) / max(1, len(known))
        axes.plot(known, shares, **{**look, "markevery": max(1, len(known) // 8)}, label=label)
    top = 1.3  # room for the legend above the lines
    for slope in (0, 1):
        axes.axvline(slope, ymax=1.02 / top, **DASHED)
    all_slopes = np.concatenate([slopes[np.isfinite(slopes)] for _, slopes, _ in lines])
    axes.set(
        xlim=(min(-0.1, float(all_slopes.min()) - 0.05), max(1.1, float(all_slopes.max()) + 0.05)),
        ylim=(0, top),
        yticks=[0, 0.25, 0.5, 0.75, 1],
    )
    axes.set(xlabel="slope on log n (0: disperses, 1: keeps up)", ylabel="share of heads up to this slope")
    panel(axes, "c", "Slopes of the gap over heads")
    axes.legend(loc="upper left", fontsize=7, ncols=2, columnspacing=1.0)


def _draw_bound_shares(axes: Axes, table: pa.Table, ceilings: pa.Table, main: int) -> None:
    n = np.logspace(1.5, 6.5, 200)
    most = 0.0
    for keys, suffix in KEYS.items():
        look = {**(MEASURED if not suffix else CORRECTED), **BARE}
        for name, style, reading in (("binding_length", "-", "spread grows on"), ("horizon", ":", "spread as it is")):
            lengths = column(table, f"{name}{suffix}")
            lengths = lengths[~np.isnan(lengths)]
            shares = [float((lengths < length).mean()) for length in n]
            axes.plot(n, shares, **{**look, "linestyle": style}, label=f"{keys}, {reading}")
            most = max(most, *shares)
    measured = [
        row for row in ceilings.to_pylist()
        if (row["length"], row["logits"], row["keys"]) == (main, RUNS, "all keys") and not math.isnan(row["measured"])
    ]  # fmt: skip
    axes.plot(
        [row["n"] for row in measured], [row["measured"] for row in measured], "D", color=INK, markersize=6,
        markerfacecolor="white", label="all keys, measured at that n",
    )  # fmt: skip
    axes.axvspan(main, n[-1], color=PALE, alpha=0.1, linewidth=0)
    axes.set_xscale("log")
    axes.set_xticks(list(CEILING_LENGTHS.values()), list(CEILING_LENGTHS))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(n[0], n[-1])
    top = max(0.1, 1.9 * most)  # room for the legend above the lines
    axes.set_ylim(-0.02 * top, top)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set(xlabel="visible keys n  (shaded: beyond what was measured)", ylabel="share of heads whose ceiling binds")
    panel(axes, "d", "No key can have half of the weight")
    axes.legend(loc="upper left", fontsize=7)


def _draw_slopes_by_layer(axes: Axes, table: pa.Table) -> None:
    layer, slope = column(table, "layer"), column(table, "gap_slope")
    axes.scatter(layer, slope, s=11, facecolor="white", edgecolor=INK, linewidth=0.7, label="head", zorder=3)
    middles = [(index, float(np.nanmedian(slope[layer == index]))) for index in np.unique(layer)]
    axes.plot(*zip(*middles, strict=True), **{**CORRECTED, **BARE}, label="median of the layer")
    for level in (0, 1):
        axes.axhline(level, **DASHED)
    axes.set(ylim=(-1, 2), xlabel="layer", ylabel="slope of the gap on log n")
    panel(axes, "e", "Slopes by layer")
    axes.legend(loc="upper right", fontsize=7, ncols=2)


def _draw_groups(axes: Axes, table: pa.Table) -> None:
    """Draw each head against the mean of the others of its group; without groups, slope against entropy."""
    layer, group, slope = (column(table, name) for name in ("layer", "kv_head", "gap_slope"))
    pairs = [
        (slope[index], float(np.nanmean(slope[others])))
        for index in range(len(slope))
        if (others := (layer == layer[index]) & (group == group[index]) & (np.arange(len(slope)) != index)).any()
    ]
    if pairs:
        own, of_others = zip(*pairs, strict=True)
        axes.scatter(own, of_others, s=11, facecolor="white", edgecolor=INK, linewidth=0.7)
        ends = (float(np.nanmin(pairs)) - 0.05, float(np.nanmax(pairs)) + 0.05)
        axes.plot(ends, ends, color=PALE, linewidth=1, linestyle=(0, (4, 3)))
        axes.set(xlim=ends, ylim=ends, xlabel="slope of a head", ylabel="mean slope, others of its KV group")
        panel(axes, "f", "Heads that share keys")
    else:
        ratio = column(table, "entropy_ratio")
        axes.scatter(slope, ratio, s=14, facecolor="white", edgecolor=INK, linewidth=0.7)
        axes.set(xlabel="slope of the gap on log n", ylabel="entropy / log n, longest rows", ylim=(0, 1.02))
        panel(axes, "f", "Slope and entropy (no shared keys)")


def _band(curves: pa.Table, name: str) -> tuple[Floats, ...]:
    """Return n and, over heads, the median, 10 % and 90 %."""
    cut = bins(curves)
    numbers = [np.nanquantile(_finite(column(part, name)), (0.5, 0.1, 0.9)) for _, part in cut]
    return np.array([mean_n for mean_n, _ in cut]), *np.array(numbers).T


def _finite(values: Floats) -> Floats:
    return np.where(np.isfinite(values), values, np.nan)


def _set_log_axis(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(10))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _finish_length_panel(axes: Axes, n: Floats) -> None:
    _set_log_axis(axes)
    axes.set(xlim=(n[0] * 0.9, n[-1] * 1.1), xlabel="visible keys n")
    axes.legend(loc="upper left", fontsize=7)
