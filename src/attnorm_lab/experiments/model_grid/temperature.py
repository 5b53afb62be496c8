"""`attnorm lab reproduce temperature`: models trained at fixed and learned temperatures, for three maps.

Nair 2025 bounds the Jacobian of softmax at temperature T by 1/(2T), and Mudarisov et al. 2025 advise against T of
0.1 and less, since the Jacobian norm explodes. Neither trains a model.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
import pyarrow as pa
from matplotlib.figure import Figure

from attnorm.arithmetic import SIGNIFICANT
from attnorm.figures import CORRECTED, MEASURED, NULL, PRINTED, note, panel
from attnorm_lab.experiments.experiment import Experiment, ExperimentFinding, Outcome, Verdict, compare_over_seeds
from attnorm_lab.experiments.model_grid.grid import (
    TINY,
    GridModel,
    GridPlan,
    Number,
    Record,
    distinct,
    diverged,
    ended_above_word_counts,
    lengths_table,
    loss,
    mean,
    mean_over_heads,
    run_grid,
    select_records,
    table,
    values,
    without_offsets,
)
from attnorm_lab.training.run import LARGEST_GRADIENT

MAPS = {"softmax": "softmax", "entmax15": "entmax15", "kneemax": "kneemax+share=1"}  # name in the results -> map
TEMPERATURES = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
LEARNED = "learned"
GUIDELINE = 0.1
BROKEN = (diverged, ended_above_word_counts)
STYLES = dict(zip(MAPS, (MEASURED, CORRECTED, PRINTED), strict=True))


def models(maps: Iterable[str], temperatures: Sequence[float]) -> tuple[GridModel, ...]:
    fixed = [
        GridModel({"map": name, "temperature": str(T)}, f"tempered:map={MAPS[name]}:temperature={T}")
        for T in temperatures
        for name in maps
    ]
    learned = [
        GridModel({"map": name, "temperature": LEARNED}, f"tempered:map={MAPS[name]}:temperature=1:learned=true")
        for name in maps
    ]
    return (*fixed, *learned)


FULL = GridPlan(
    models=models(MAPS, TEMPERATURES), seeds=(0, 1, 2), layers=4, heads=8, width=256, context=512, batch=32,
    tokens=10_485_760, looks=True,
)  # fmt: skip
QUICK = replace(TINY, models=models(("softmax",), (0.05, 1.0)), heads=2, tokens=1_500, looks=True)


def outcome(records: Sequence[Record], plan: GridPlan) -> Outcome:
    numbers: dict[str, Number] = {
        "largest_gradient": largest_gradient, "largest_gradient_after_warmup": largest_gradient_after_warmup,
        "jacobian_norm_median_row": median_jacobian_norm, "jacobian_norm_mean_row": mean_jacobian_norm,
    }  # fmt: skip
    return Outcome(
        summary=summary(records),
        findings=findings(records),
        figures={"temperature": figure(records)},
        tables={
            "models": table(records, **numbers), "temperatures": temperatures_table(records, {"loss": loss, **numbers}),
            "lengths": lengths_table(records, ("map", "temperature")),
        },
        parameters=plan.as_dict(),
    )  # fmt: skip


def temperatures_table(records: Sequence[Record], numbers: dict[str, Number]) -> pa.Table:
    """Return one row per map and temperature: each number as its mean over seeds, smallest and largest value."""
    rows = []
    for map_, T in dict.fromkeys((record["map"], record["temperature"]) for record in records):
        group = select_records(records, map=map_, temperature=T)
        row: dict[str, Any] = {"map": map_, "temperature": T, "seeds": len(group)}
        for name, number in numbers.items():
            found = values(group, number)
            row |= {
                name: mean(group, number), f"{name}_low": min(found, default=math.nan),
                f"{name}_high": max(found, default=math.nan),
            }  # fmt: skip
        rows.append(row)
    return pa.Table.from_pylist(rows)


def largest_gradient(record: Record) -> float:
    """Return the largest logged norm of the gradient before clipping; every tenth step is logged."""
    return max((norm for _, _, _, norm in record["course"]), default=math.nan)


def largest_gradient_after_warmup(record: Record) -> float:
    norms = [norm for step, _, _, norm in record["course"] if step > record["settings"]["warmup"]]
    return max(norms, default=math.nan)


def median_jacobian_norm(record: Record) -> float:
    """Return the Jacobian norm of each head's median row, mean over the heads of the trained model.

    Where most rows are one-hot, the median is 0 although other rows are at the bound.
    """
    return mean_over_heads(record, "jacobian_norm")


def mean_jacobian_norm(record: Record) -> float:
    """Return the mean Jacobian norm over rows and heads of the trained model, on the window watched in training."""
    looks = record.get("looks", ())
    norm = looks[-1]["jacobian_norm"] if looks and not diverged(record) else None
    return math.nan if norm is None else float(norm)


def fixed_temperatures(records: Sequence[Record], map_: str) -> list[float]:
    """Return the fixed temperatures of a map, in ascending order."""
    temperatures = {record["temperature"] for record in select_records(records, map=map_)} - {LEARNED}
    return sorted(float(T) for T in temperatures)


def costly_temperatures(records: Sequence[Record], map_: str) -> list[float]:
    """Return the fixed temperatures at which some run diverges, or which cost loss against the map's best one.

    Tested over seeds with Holm's correction over the temperatures of the map. One seed cannot show a cost.
    """
    groups = {T: select_records(records, map=map_, temperature=str(T)) for T in fixed_temperatures(records, map_)}
    ended = {T: {r["seed"]: loss(r) for r in runs if not diverged(r)} for T, runs in groups.items()}
    finished = {T: losses for T, losses in ended.items() if losses}
    best = min(finished.values(), key=lambda losses: fmean(losses.values()), default={})
    tests = compare_over_seeds({T: (losses, best) for T, losses in finished.items() if losses is not best})
    worse = {T for T, (test, p_holm) in tests.items() if test.value > 0 and p_holm < SIGNIFICANT}
    return [T for T, runs in groups.items() if T in worse or any(map(diverged, runs))]


def findings(records: Sequence[Record]) -> tuple[ExperimentFinding, ...]:
    """Judge two claims for each map: training diverges at low temperatures, and low temperatures increase the loss."""
    results = []
    for map_ in distinct(records, "map"):
        results += [_judge_stability(records, map_), _judge_loss(records, map_)]
    return tuple(results)


def _judge_stability(records: Sequence[Record], map_: str) -> ExperimentFinding:
    temperatures = fixed_temperatures(records, map_)
    low = [r for T in temperatures if T <= GUIDELINE for r in select_records(records, map=map_, temperature=str(T))]
    high = [r for T in temperatures if T > GUIDELINE for r in select_records(records, map=map_, temperature=str(T))]
    stopped, above = ([sum(map(is_so, group)) for group in (low, high)] for is_so in BROKEN)
    broken = [sum(counts) for counts in zip(stopped, above, strict=True)]
    verdict: Verdict = "does not" if not broken[0] else "partly"
    if broken[0] == len(low) and not broken[1]:
        verdict = "reproduces"
    gradients, later = (
        " and ".join(f"{max(values(group, number), default=math.nan):.2g}" for group in (low, high))
        for number in (largest_gradient, largest_gradient_after_warmup)
    )
    return ExperimentFinding(
        claim=f"training with {map_} is unstable at temperatures of {GUIDELINE:g} and less",
        ours=f"{_conditions(low + high)}: {stopped[0]} of {len(low)} runs diverged and {above[0]} ended above the loss "
        f"of word counts, at higher temperatures {stopped[1]} and {above[1]} of {len(high)}; largest norm of the "
        f"gradient {gradients}, after the warmup {later}",
        verdict=verdict,
        why="by the runs that diverged or ended above the loss of word counts; other conditions were not tested",
    )


def _conditions(records: Sequence[Record]) -> str:
    """Name the settings on which it depends whether a run breaks."""
    rates = sorted({float(record["settings"]["learning_rate"]) for record in records})
    listed = ", ".join(f"{rate:g}" for rate in rates)
    return f"with gradients clipped at {LARGEST_GRADIENT:g} and a learning rate of {listed}"


def _judge_loss(records: Sequence[Record], map_: str) -> ExperimentFinding:
    temperatures = fixed_temperatures(records, map_)
    bad = costly_temperatures(records, map_)
    ended = {T: mean(select_records(records, map=map_, temperature=str(T)), loss) for T in temperatures}
    low = [T for T in temperatures if T <= GUIDELINE]
    verdict: Verdict = "partly"
    if not any(T in bad for T in low):
        verdict = "does not" if len({record["seed"] for record in records}) > 1 else "not decided"
    elif all(T in bad for T in low) and not any(T > GUIDELINE for T in bad):
        verdict = "reproduces"
    return ExperimentFinding(
        claim=f"temperatures of {GUIDELINE:g} and less, and only those, cost {map_} loss",
        ours="nats per token: " + ", ".join(f"{value:.3f} at {T:g}" for T, value in ended.items()),
        verdict=verdict,
        why="worse than the best temperature in a t-test over seeds, after Holm's correction, or a run diverged: "
        + _list_temperatures(bad),
    )


def _list_temperatures(temperatures: Sequence[float]) -> str:
    return ", ".join(f"T = {T:g}" for T in temperatures) or "none"


def summary(records: Sequence[Record]) -> str:
    sentences = []
    for map_ in distinct(records, "map"):
        by = {
            T: mean(select_records(records, map=map_, temperature=str(T)), loss)
            for T in fixed_temperatures(records, map_)
        }
        ended = {T: value for T, value in by.items() if math.isfinite(value)}
        if ended:
            best = min(ended, key=lambda T: ended[T])
            sentences.append(f"{map_} has its lowest loss, {ended[best]:.3f} nats per token, at T = {best:g}.")
        learned = mean(select_records(records, map=map_, temperature=LEARNED), loss)
        if math.isfinite(learned):
            sentences.append(f"With a learned temperature it has {learned:.3f}.")
    stopped, above = (sum(map(is_so, records)) for is_so in BROKEN)
    outcomes = f"{stopped} of {len(records)} runs diverged, {above} ended above the loss of word counts"
    sentences.append(f"Trained {_conditions(records)}, {outcomes}.")
    if not stopped:
        sentences.append("As no run diverged, this does not test whether the bound predicts where training breaks.")
    return " ".join(sentences)


def figure(records: Sequence[Record]) -> Figure:
    drawn = Figure(figsize=(10.5, 3.4))
    loss_axes, gradient_axes, norm_axes = drawn.subplots(1, 3)
    for map_ in distinct(records, "map"):
        T = fixed_temperatures(records, map_)
        groups = [select_records(records, map=map_, temperature=str(temperature)) for temperature in T]
        loss_axes.errorbar(
            T, [mean(group, loss) for group in groups], _distances_to_extremes(groups, loss), label=map_, capsize=2,
            **STYLES[map_],
        )  # fmt: skip
        gradient_axes.errorbar(
            T, [mean(group, largest_gradient) for group in groups], _distances_to_extremes(groups, largest_gradient),
            capsize=2, **STYLES[map_],
        )  # fmt: skip
        later = [mean(group, largest_gradient_after_warmup) for group in groups]
        gradient_axes.errorbar(
            T, later, _distances_to_extremes(groups, largest_gradient_after_warmup),
            **{**STYLES[map_], "linewidth": 0.7, "markersize": 2},
        )  # fmt: skip
        norm_axes.plot(T, [mean(group, median_jacobian_norm) for group in groups], label=map_, **STYLES[map_])
        broken = [temperature for temperature, group in zip(T, groups, strict=True) if any(map(diverged, group))]
        ended = values(select_records(records, map=map_), loss)
        if broken and ended:
            loss_axes.scatter(broken, [max(ended)] * len(broken), marker="x", color="#b3261e", zorder=5)
    T = sorted({float(r["temperature"]) for r in records if r["temperature"] != LEARNED})
    norm_axes.plot(T, [1 / (2 * temperature) for temperature in T], label="bound of softmax, 1/(2T)", **NULL)
    titles = ("final loss", "largest norm of the gradient", "Jacobian norm of the attention")
    labels = ("nats per token", "before clipping", "median row, mean over heads")
    for axes, panel_letter, title, label in zip(
        (loss_axes, gradient_axes, norm_axes), "abc", titles, labels, strict=True
    ):
        axes.set(xscale="log", xlabel="temperature T", ylabel=label)
        panel(axes, panel_letter, title)
    largest = max(values(records, largest_gradient), default=1.0)
    gradient_axes.set_ylim(0, max(gradient_axes.get_ylim()[1], 1.03 * largest))  # with room for a marker
    norm_axes.set_yscale("log")
    norm_axes.legend()
    without_offsets(drawn)
    seeds = len(distinct(records, "seed"))
    legend = "bars: range of the seeds; crosses: a run diverged; thin lines in (b): after the warmup"
    note(drawn, f"Means over {seeds} seed{'s' * (seeds > 1)}, {legend}. attnorm lab reproduce temperature")
    drawn.tight_layout(rect=(0, 0.04, 1, 1))
    return drawn


def _distances_to_extremes(groups: Sequence[Sequence[Record]], number: Number) -> np.ndarray:
    """Return the distances from the mean over seeds to the smallest and to the largest seed, for error bars."""
    found = [values(group, number) or [math.nan] for group in groups]
    return np.nan_to_num(
        [[fmean(seeds) - min(seeds) for seeds in found], [max(seeds) - fmean(seeds) for seeds in found]]
    )


EXPERIMENT = Experiment(
    name="temperature",
    title="Training at fixed and learned temperatures",
    source="Mudarisov et al. 2025, guideline 2; Nair 2025, Theorem 1",
    question="Does the bound 1/(2T) on the Jacobian predict where training breaks?",
    run=partial(run_grid, FULL, QUICK, outcome),
    needs_model=False,
)
