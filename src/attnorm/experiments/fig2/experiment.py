"""Figure 2: the distance between the selected keys and the rest, compared with random selection.

The paper compares the distance d_tilde of every head with its expectation E for a random set of the same size. The
critical N is the smallest at which a Kolmogorov-Smirnov test does not distinguish the two. Its E is misprinted. This
experiment measures both forms and what the printed one means: d_tilde is about (L - N) ||s||, the printed E about
(L - N) ||x_bar||. So the two meet when the N heaviest keys make up the whole output, whatever random sets do.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch

from attnorm.experiments.attention_rows import LastRows, joined, last_rows
from attnorm.experiments.experiment import Experiment, Floats, Outcome
from attnorm.experiments.fig2.figure import paper_figure, why_figure
from attnorm.experiments.fig2.findings import findings, summary
from attnorm.experiments.fig2.measure import (
    LEVEL,
    LOWER,
    NORMS,
    PRINTED,
    UPPER,
    Critical,
    Distances,
    ExpectationComparison,
    Point,
    Result,
    accepted,
    at_point,
    bootstrap_heads,
    critical_n,
    interval,
    ks_statistic,
    ks_threshold,
    middle,
    n_grid,
    over_grid,
    power_law_over_heads,
    rejection_rates,
    resampled_critical_n,
    subsampled_heads,
    whole,
)
from attnorm.experiments.subject import ExperimentSubject, ProgressCallback
from attnorm.metrics.vectors import Vectors

PAPER_HEADS = 144  # of GPT-2 124M
PANEL_N = 5
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
        distances.append(_measure_grid(layers, sizes, progress, f"distances at {length} tokens"))
        by_length.append(at_point(layers, PANEL_N, sizes.draws, generator, sizes.heaviest))
        if length == panel_length:
            top_n = [N for N in PANEL_NS if length > N]
            by_n = [at_point(layers, N, sizes.draws, generator, sizes.heaviest) for N in top_n]
            shuffled = [layer.permuted(generator) for layer in layers]
            permuted = _measure_grid(shuffled, sizes, progress, "the same with permuted values")
    assert permuted is not None
    at_panel = next(candidate for candidate in distances if candidate.length == panel_length)
    result = Result(
        distances=tuple(distances),
        at_panel=at_panel,
        permuted=permuted,
        by_length=tuple(by_length),
        by_n=tuple(by_n),
        comparisons={name: _compare(name, distances, sizes, subject.seed) for name in PAIRS},
        permuted_critical={name: _critical(permuted, name) for name in PAIRS},
        fewer_heads=_fewer_heads(at_panel, sizes, subject.seed),
        choices=_choices(subject, panel_length, sizes, progress),
    )
    return Outcome(
        summary=summary(result),
        findings=findings(result),
        figures={"fig2": paper_figure(result, _setting(subject)), "fig2_why": why_figure(result, _setting(subject))},
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


# The two numbers per head that the Kolmogorov-Smirnov test compares.
PAIRS: dict[str, Callable[[Distances], tuple[Floats, Floats]]] = {
    PRINTED: lambda d: (d.measured, d.printed),
    UPPER: lambda d: (d.measured, d.upper),
    LOWER: lambda d: (d.measured, d.lower),
    NORMS: lambda d: (d.context, d.output),
}


def _layers(
    subject: ExperimentSubject, length: int, progress: ProgressCallback, start: int = 0, vectors: Vectors = "values"
) -> list[LastRows]:
    return joined(whole(last_rows(subject, length, progress=progress, start=start, vectors=vectors), length))


def _measure_grid(layers: list[LastRows], sizes: Fig2Sizes, progress: ProgressCallback, what: str) -> Distances:
    grid = n_grid(layers[0].keys, sizes.ratio)
    return over_grid(layers, grid, lambda done: progress(what, done, len(grid)))


def _critical(distances: Distances, pair: str) -> float:
    first, second = PAIRS[pair](distances)
    return critical_n(first, second, distances.grid)


def _compare(pair: str, distances: list[Distances], sizes: Fig2Sizes, seed: int) -> ExpectationComparison:
    """Compute the critical N at every length, with intervals from resampled heads, and the power law through it."""
    heads = min(measured.heads for measured in distances)
    resamples = bootstrap_heads(heads, heads, sizes.resamples, seed)
    points, resampled = [], []
    for measured in distances:
        first, second = PAIRS[pair](measured)
        drawn = resampled_critical_n(first, second, measured.grid, resamples)
        resampled.append(drawn)
        accepts = [N for N, yes in zip(measured.grid, accepted(first, second), strict=True) if yes]
        critical = critical_n(first, second, measured.grid)
        points.append(Critical(measured.length, critical, interval(drawn), max(accepts, default=0)))
    lengths = tuple(measured.length for measured in distances)
    law = power_law_over_heads(lengths, np.array([point.top_n for point in points]), np.stack(resampled, 1))
    return ExpectationComparison(pair, tuple(points), law)


def _fewer_heads(distances: Distances, sizes: Fig2Sizes, seed: int) -> list[dict[str, float | int | str]]:
    """Repeat the test with fewer heads: critical N, and the power at N = 5."""
    rows: list[dict[str, float | int | str]] = []
    for pair in (PRINTED, UPPER):
        first, second = PAIRS[pair](distances)
        for size in sorted({size for size in (18, 36, 72, PAPER_HEADS, distances.heads) if size <= distances.heads}):
            subsamples = subsampled_heads(distances.heads, size, sizes.resamples if size < distances.heads else 1, seed)
            drawn = resampled_critical_n(first, second, distances.grid, subsamples)
            low, high = interval(drawn)
            power = rejection_rates(first, second, bootstrap_heads(distances.heads, size, sizes.resamples, seed + 1))
            rows.append(
                {
                    "compared": pair, "heads": size, "critical_n": middle(drawn), "low": low, "high": high,
                    "power_at_5": float(power[distances.column(PANEL_N)]), "resolution": ks_threshold(size),
                }
            )  # fmt: skip
    return rows


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
    grid = n_grid(layers[0].keys, max(sizes.ratio, 1.1))
    distances = over_grid(layers, grid, lambda done: progress(what, done, len(grid)))
    return {"what": what, **{name: _critical(distances, name) for name in PAIRS}}


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


def _setting(subject: ExperimentSubject) -> str:
    return f"{subject.loaded().name}, {subject.passages()[0].name}; last row of every head, vectors: values"


EXPERIMENT = Experiment(
    name="fig2",
    title="Figure 2: distances and critical N",
    source="Mudarisov et al. 2025, Figure 2 and Theorem 1",
    question="How far are the selected keys from the rest, and from which N on is selection no better than chance?",
    run=_run,
    tokens=(FULL.lengths[2], QUICK.lengths[2]),  # three lengths: fewer have no power law
)
