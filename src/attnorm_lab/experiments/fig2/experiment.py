"""Figure 2: the distance between the selected keys and the rest, compared with random selection; run and drawn.

The paper compares the distance d_tilde of every head with its expectation E for a random set of the same size. The
critical N is the smallest at which a Kolmogorov-Smirnov test does not distinguish the two. Its E is misprinted. This
experiment measures both forms and what the printed one means: d_tilde is about (L - N) ||s||, the printed E about (L -
N) ||x_bar||. So the two meet when the N heaviest keys make up the whole output, whatever random sets do.

The figure has the paper's layout.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnorm.figures import CORRECTED, INK, MEASURED, PALE, PRINTED, note, panel
from attnorm.metrics.vectors import Vectors
from attnorm_lab.experiments.experiment import Experiment, ExperimentSubject, Floats, Outcome, ProgressCallback
from attnorm_lab.experiments.fig2 import measure
from attnorm_lab.experiments.fig2.findings import findings, summary
from attnorm_lab.experiments.fig2.measure import (
    LEVEL,
    PAIRS,
    PANEL_N,
    Distances,
    Point,
    Result,
    at_point,
    compare,
    critical_of_pair,
    fewer_heads,
    ks_statistic,
    ks_threshold,
    layers_with_all_keys,
    n_grid,
    over_grid,
)
from attnorm_lab.experiments.model_runs import LastRows, join_layers, last_rows

PANEL_NS = (1, 5, 10, 20, 100)
PANEL_LENGTH = 1024


@dataclass(frozen=True)
class Fig2Sizes:
    lengths: tuple[int, ...]
    ratio: float  # between two N of the grid
    resamples: int
    draws: int  # of random sets
    windows: int  # of the text, at the length of panel (b)
    heaviest: int  # keys that the corrected bounds of panels (a) and (b) treat separately


FULL = Fig2Sizes((32, 64, 128, 256, 512, 1024, 2048), 1.06, 400, 200, 4, 6)
QUICK = Fig2Sizes((32, 64, 128, 256, 512), 1.2, 60, 20, 1, 3)


def _run(subject: ExperimentSubject, progress: ProgressCallback, parts: Path) -> Outcome:
    sizes = QUICK if subject.quick else FULL
    lengths = subject.lengths(sizes.lengths)
    generator = torch.Generator().manual_seed(subject.seed)
    panel_length = max(length for length in lengths if length <= PANEL_LENGTH)

    distances: list[Distances] = []
    by_length: list[Point] = []
    by_n: list[Point] = []
    permuted: Distances | None = None
    for length in lengths:
        layers = _layers(subject, length, progress)
        distances.append(_measure_grid(layers, sizes.ratio, progress, f"distances at {length} tokens"))
        by_length.append(at_point(layers, PANEL_N, sizes.draws, generator, sizes.heaviest))
        if length == panel_length:
            top_n = [N for N in PANEL_NS if length > N]
            by_n = [at_point(layers, N, sizes.draws, generator, sizes.heaviest) for N in top_n]
            with_permuted_weights = [layer.permuted(generator) for layer in layers]
            permuted = _measure_grid(with_permuted_weights, sizes.ratio, progress, "the same with permuted weights")
    assert permuted is not None
    at_panel = next(candidate for candidate in distances if candidate.length == panel_length)
    result = Result(
        distances=tuple(distances),
        at_panel=at_panel,
        by_length=tuple(by_length),
        by_n=tuple(by_n),
        comparisons={name: compare(name, distances, sizes.resamples, subject.seed) for name in PAIRS},
        permuted_critical={name: critical_of_pair(permuted, name) for name in PAIRS},
        fewer_heads=fewer_heads(at_panel, sizes.resamples, subject.seed),
        choices=_choices(subject, panel_length, sizes, progress),
    )
    setting = f"{subject.model_and_text()}; last row of every head, vectors: values"
    return Outcome(
        summary=summary(result),
        findings=findings(result),
        figures={"fig2": paper_figure(result, setting)},
        tables=_tables(result),
        parameters={
            "lengths": lengths,
            "panel_length": panel_length,
            "top_n": {"a": PANEL_N, "b": [point.top_n for point in by_n], "c": {d.length: d.grid for d in distances}},
            "rows": "last",
            "vectors": "values after the head's projection",
            "level": LEVEL,
            "resamples_of_heads": sizes.resamples,
            "intervals": "95 % of the critical N of heads drawn with replacement; drawing twice roughens both samples, "
            "so they lie to the high side of the number itself",
            "random_sets": sizes.draws,
            "seed": subject.seed,
        },
    )


def _layers(
    subject: ExperimentSubject, length: int, progress: ProgressCallback, start: int = 0, vectors: Vectors = "values"
) -> list[LastRows]:
    layers = last_rows(subject, length, progress=progress, start=start, vectors=vectors)
    return join_layers(layers_with_all_keys(layers, length))


def _measure_grid(layers: list[LastRows], ratio: float, progress: ProgressCallback, what: str) -> Distances:
    """ratio: between two N of the grid."""
    grid = n_grid(layers[0].keys, ratio)
    return over_grid(layers, grid, lambda done: progress(what, done, len(grid)))


def _choices(
    subject: ExperimentSubject, length: int, sizes: Fig2Sizes, progress: ProgressCallback
) -> list[dict[str, float | int | str]]:
    """Compute the critical N for other windows of the text and other vectors, which the paper does not specify."""
    rows: list[dict[str, float | int | str]] = []
    tokens = subject.tokens(length * sizes.windows)
    for start in (length * window for window in range(1, sizes.windows)):
        if start + length > tokens:
            break
        layers = _layers(subject, length, progress, start=start)
        rows.append(_choice(layers, sizes, progress, f"values, tokens {start + 1} to {start + length}"))
    if not subject.quick:
        layers = _layers(subject, length, progress, vectors="inputs")
        rows.append(_choice(layers, sizes, progress, "layer inputs"))
    return rows


def _choice(
    layers: list[LastRows], sizes: Fig2Sizes, progress: ProgressCallback, what: str
) -> dict[str, float | int | str]:
    distances = _measure_grid(layers, max(sizes.ratio, 1.1), progress, what)
    return {"what": what, **{name: critical_of_pair(distances, name) for name in PAIRS}}


def _tables(result: Result) -> dict[str, pa.Table]:
    points = {(point.length, point.top_n): point for point in (*result.by_length, *result.by_n)}
    distances = result.at_panel
    curves: dict[str, Floats | list[int]] = {"top_n": list(distances.grid)}
    for name, pair in PAIRS.items():
        curves[f"ks: {name}"] = ks_statistic(*pair(distances))
    for name in ("measured", "printed", "lower", "upper", "mass"):
        curves[f"median {name}"] = np.median(getattr(distances, name), axis=0)
    curves["threshold"] = np.full(len(distances.grid), ks_threshold(distances.heads))
    return {
        "fig2_heads": pa.concat_tables([point.table() for point in points.values()]),
        "fig2_critical": pa.Table.from_pylist(
            [row for comparison in result.comparisons.values() for row in comparison.rows()]
        ),
        "fig2_ks": pa.table(curves),
        "fig2_fewer_heads": pa.Table.from_pylist(result.fewer_heads),
        **({"fig2_choices": pa.Table.from_pylist(result.choices)} if result.choices else {}),
    }


EXPERIMENT = Experiment(
    name="fig2",
    title="Figure 2: distances and critical N",
    source="Mudarisov et al. 2025, Figure 2 and Theorem 1",
    question="How far are the selected keys from the rest, and from which N on is selection no better than chance?",
    run=_run,
    tokens=(FULL.lengths[2], QUICK.lengths[2]),  # three lengths: fewer have no power law
)

BOUND: dict[str, Any] = {"color": "#b3261e", "linestyle": (0, (6, 2)), "marker": "v", "markersize": 4, "linewidth": 1.2}
BARS: dict[str, Any] = {"capsize": 2.5, "elinewidth": 0.9}


def paper_figure(result: Result, setting: str) -> Figure:
    """(a) against L, (b) against N, (c) critical N."""
    figure = Figure(figsize=(11.4, 3.9))
    a, b, c = figure.subplots(
        1, 3, gridspec_kw={"wspace": 0.3, "left": 0.06, "right": 0.99, "top": 0.73, "bottom": 0.17}
    )
    N = result.by_length[0].top_n
    _draw_distances(a, result.by_length, [point.length for point in result.by_length])
    a.set_xlabel("context length $L$ (tokens)")
    _log2_ticks(a, [point.length for point in result.by_length])
    a.set_ylabel(r"distance $\tilde{d}$ (median over heads)")
    panel(a, "a", f"$N$ = {N}")
    _draw_distances(b, result.by_n, [point.top_n for point in result.by_n])
    ends = (*a.get_ylim(), *b.get_ylim())
    for axes in (a, b):  # the same distances: one scale
        axes.set_ylim(min(ends), max(ends))
    b.set(ylabel=r"distance $\tilde{d}$ (median over heads)", xlabel="selected keys $N$")
    b.set_xticks([point.top_n for point in result.by_n], [str(point.top_n) for point in result.by_n])
    b.set_xticks([], minor=True)
    panel(b, "b", f"$L$ = {result.length}")
    _draw_critical(c, result)
    panel(c, "c", "critical $N$")
    handles, labels = a.get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper left", bbox_to_anchor=(0.05, 0.995), ncols=3)
    handles, labels = c.get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper right", bbox_to_anchor=(0.995, 0.995), ncols=1)
    spread = f"gray: quartiles over {result.at_panel.heads} heads; bars in (c): 95 % of resampled heads"
    note(figure, f"{setting}; {spread}")
    return figure


def _draw_distances(axes: Axes, points: tuple[Point, ...], x: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    medians: Callable[[str], list[float]] = lambda name: [float(np.median(getattr(p, name))) for p in points]  # noqa: E731
    low, high = ([float(np.quantile(point.measured, share)) for point in points] for share in (0.25, 0.75))
    axes.fill_between(x, low, high, color=INK, alpha=0.1, linewidth=0)
    axes.plot(x, medians("fixed_printed"), label="upper bound, true set (printed, holds)", **BOUND)
    axes.plot(x, medians("printed"), label="expectation, random set, as printed", **PRINTED)
    axes.plot(x, medians("measured"), label=r"measured distance $\tilde{d}$", **MEASURED)
    axes.fill_between(x, medians("lower"), medians("upper"), color=CORRECTED["color"], alpha=0.2, linewidth=0)
    axes.plot(x, medians("upper"), label="expectation, random set, corrected (band: its bounds)", **CORRECTED)


def _draw_critical(axes: Axes, result: Result) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    lengths = np.array([point.length for point in result.by_length], dtype=float)
    axes.plot(lengths, 0.06 * lengths, color=PALE, linewidth=1, linestyle=(0, (1, 2)), label="0.06 $L$ (the paper)")
    for name, look, label in (
        (measure.PRINTED, PRINTED, "printed expectation"),
        (measure.UPPER, CORRECTED, "corrected (bounds: filled, hollow)"),
        (measure.LOWER, {**CORRECTED, "markerfacecolor": "white", "linewidth": 0.9}, None),
    ):
        comparison = result.comparisons[name]
        values = np.array([point.top_n for point in comparison.critical])
        low, high = np.array([point.interval for point in comparison.critical]).T
        spread = np.nan_to_num(np.stack([values - low, high - values])).clip(min=0)
        axes.errorbar(lengths, values, yerr=spread, **{**look, "linestyle": "none"}, **BARS)
        law = comparison.law
        if law is not None:
            label_text = None if label is None else f"{label}: {law.coefficient:.2g} $L^{{{law.exponent:.2f}}}$"
            fit = {key: look[key] for key in ("color", "linestyle", "linewidth")}
            fit_lengths = lengths[np.isfinite(values)]  # the points of the fit
            axes.plot(fit_lengths, law.coefficient * fit_lengths**law.exponent, label=label_text, **fit)
    axes.set(xlabel="context length $L$ (tokens)", ylabel="critical $N$ (KS test, level 0.01)")
    _log2_ticks(axes, [int(length) for length in lengths])
    axes.set_yticks([1, 10, 100, 1000], ["1", "10", "100", "1000"])
    axes.set_ylim(bottom=0.8)


def _log2_ticks(axes: Axes, values: list[int]) -> None:
    axes.set_xticks(values, [str(value) for value in values])
    axes.set_xticks([], minor=True)
