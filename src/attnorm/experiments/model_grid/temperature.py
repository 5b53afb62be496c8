"""`attnorm reproduce temperature`: models trained at fixed and learned temperatures, for three maps.

Nair 2025 bounds the Jacobian of softmax at temperature T by 1/(2T), and Mudarisov et al. 2025 advise against T of
0.1 and less, since the Jacobian norm explodes. Neither trains a model.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from attnorm.experiments.experiment import (
    Experiment,
    ExperimentFinding,
    ExperimentSubject,
    Outcome,
    ProgressCallback,
    Verdict,
)
from attnorm.experiments.model_grid.grid import (
    TINY,
    GridModel,
    GridPlan,
    Record,
    loss,
    mean,
    mean_over_heads,
    records_of,
    seed_deviation,
    select_records,
    table,
    values,
)
from attnorm.figures import CORRECTED, MEASURED, NULL, PRINTED, letter, note, tidy

MAPS = {"softmax": "softmax", "entmax15": "entmax15", "kneemax": "kneemax+share=1"}  # name in the results -> map
TEMPERATURES = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
LEARNED = "learned"
GUIDELINE = 0.1
WORSE = 0.05  # nats: more than seeds of one model differ by
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


def run(subject: ExperimentSubject, progress: ProgressCallback, parts: Path) -> Outcome:
    plan = QUICK if subject.quick else FULL
    return outcome(records_of(plan, subject, progress, parts), plan)


def outcome(records: Sequence[Record], plan: GridPlan) -> Outcome:
    small = plan is QUICK
    return Outcome(
        summary=summary(records, small=small),
        findings=findings(records, small=small),
        figures={"temperature": figure(records), "course": course_figure(records)},
        tables={"models": table(records, largest_gradient=largest_gradient, jacobian_norm=jacobian_norm)},
        parameters=plan.as_dict(),
    )


def largest_gradient(record: Record) -> float:
    """Return the largest logged norm of the gradient after the warmup, before clipping."""
    norms = [norm for step, _, _, norm in record["course"] if step > record["settings"]["warmup"]]
    return max(norms, default=math.nan)


def jacobian_norm(record: Record) -> float:
    """Return the mean Jacobian norm over all heads of the trained model."""
    return mean_over_heads(record, "jacobian_norm")


def fixed_temperatures(records: Sequence[Record], map_: str) -> list[float]:
    """Return the fixed temperatures of a map, in ascending order."""
    temperatures = {record["temperature"] for record in select_records(records, map=map_)} - {LEARNED}
    return sorted(float(T) for T in temperatures)


def is_costly(records: Sequence[Record], map_: str, temperature: str) -> bool:
    """Whether some run diverges, or the mean loss is clearly above the best of the map."""
    group = select_records(records, map=map_, temperature=temperature)
    means = [
        mean(select_records(records, map=map_, temperature=str(T)), loss) for T in fixed_temperatures(records, map_)
    ]
    best = min((value for value in means if math.isfinite(value)), default=math.nan)
    return any(record["diverged"] for record in group) or not mean(group, loss) < best + WORSE


def findings(records: Sequence[Record], *, small: bool) -> tuple[ExperimentFinding, ...]:
    """Judge two claims for each map: training diverges at low temperatures, and low temperatures increase the loss."""
    results = []
    for map_ in dict.fromkeys(record["map"] for record in records):
        results += [_judge_stability(records, map_, small=small), _judge_loss(records, map_, small=small)]
    return tuple(results)


def _judge_stability(records: Sequence[Record], map_: str, *, small: bool) -> ExperimentFinding:
    temperatures = fixed_temperatures(records, map_)
    low = [r for T in temperatures if T <= GUIDELINE for r in select_records(records, map=map_, temperature=str(T))]
    high = [r for T in temperatures if T > GUIDELINE for r in select_records(records, map=map_, temperature=str(T))]
    diverged = [sum(record["diverged"] for record in group) for group in (low, high)]
    verdict: Verdict = "does not" if not diverged[0] else "partly"
    if diverged[0] == len(low) and not diverged[1]:
        verdict = "reproduces"
    runs = (
        f"{diverged[0]} of {len(low)} runs diverged or ended above the loss of word counts, {diverged[1]} of "
        f"{len(high)} at higher temperatures"
    )
    gradients = (
        f"largest norm of the gradient {mean(low, largest_gradient):.2g} and {mean(high, largest_gradient):.2g} (means)"
    )
    return ExperimentFinding(
        claim=f"training with {map_} is unstable at temperatures of {GUIDELINE:g} and less",
        ours=gradients if small else f"{runs}; {gradients}",
        verdict="not tested" if small else verdict,
        why="too small to judge" if small else "by the runs that diverged",
    )


def _judge_loss(records: Sequence[Record], map_: str, *, small: bool) -> ExperimentFinding:
    temperatures = fixed_temperatures(records, map_)
    bad = [T for T in temperatures if is_costly(records, map_, str(T))]
    ended = {T: mean(select_records(records, map=map_, temperature=str(T)), loss) for T in temperatures}
    low = [T for T in temperatures if T <= GUIDELINE]
    verdict: Verdict = "partly"
    if not any(T in bad for T in low):
        verdict = "does not"
    elif all(T in bad for T in low) and not any(T > GUIDELINE for T in bad):
        verdict = "reproduces"
    return ExperimentFinding(
        claim=f"temperatures of {GUIDELINE:g} and less, and only those, cost {map_} loss",
        ours="nats per token: " + ", ".join(f"{value:.3f} at {T:g}" for T, value in ended.items()),
        verdict="not tested" if small else verdict,
        why="too small to judge"
        if small
        else f"worse than the best by {WORSE} nats, or diverged: {_list_temperatures(bad)}",
    )


def _list_temperatures(temperatures: Sequence[float]) -> str:
    return ", ".join(f"T = {T:g}" for T in temperatures) or "none"


def summary(records: Sequence[Record], *, small: bool) -> str:
    sentences = []
    for map_ in dict.fromkeys(record["map"] for record in records):
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
    return " ".join(sentences) + (" Models this small show only that everything runs." if small else "")


def figure(records: Sequence[Record]) -> Figure:
    drawn = Figure(figsize=(10.5, 3.4))
    loss_axes, gradient_axes, norm_axes = drawn.subplots(1, 3)
    for map_ in dict.fromkeys(record["map"] for record in records):
        T = fixed_temperatures(records, map_)
        groups = [select_records(records, map=map_, temperature=str(temperature)) for temperature in T]
        bars = [np.nan_to_num(seed_deviation(group, loss)) for group in groups]
        loss_axes.errorbar(T, [mean(group, loss) for group in groups], bars, label=map_, capsize=2, **STYLES[map_])
        gradient_axes.plot(T, [mean(group, largest_gradient) for group in groups], label=map_, **STYLES[map_])
        norm_axes.plot(T, [mean(group, jacobian_norm) for group in groups], label=map_, **STYLES[map_])
        diverged = [
            temperature
            for temperature, group in zip(T, groups, strict=True)
            if any(record["diverged"] for record in group)
        ]
        ended = values(select_records(records, map=map_), loss)
        if diverged and ended:
            loss_axes.scatter(diverged, [max(ended)] * len(diverged), marker="x", color="#b3261e", zorder=5)
    T = sorted({float(r["temperature"]) for r in records if r["temperature"] != LEARNED})
    norm_axes.plot(T, [1 / (2 * temperature) for temperature in T], label="bound of softmax, 1/(2T)", **NULL)
    titles = ("final loss", "largest norm of the gradient", "Jacobian norm of the attention")
    labels = ("nats per token", "before clipping", "mean over heads")
    for axes, panel_letter, title, label in zip(
        (loss_axes, gradient_axes, norm_axes), "abc", titles, labels, strict=True
    ):
        axes.set_xscale("log")
        axes.set_xlabel("temperature T")
        axes.set_ylabel(label)
        letter(axes, panel_letter, title)
        tidy(axes)
    gradient_axes.set_yscale("log")
    norm_axes.set_yscale("log")
    norm_axes.legend()
    seeds = len({record["seed"] for record in records})
    bars_and_crosses = "bars: standard deviation; crosses: a run diverged"
    note(drawn, f"Means over {seeds} seed{'s' * (seeds > 1)}, {bars_and_crosses}. attnorm reproduce temperature")
    drawn.tight_layout(rect=(0, 0.04, 1, 1))
    return drawn


def course_figure(records: Sequence[Record]) -> Figure:
    """The training loss and the Jacobian norm on the way, one column per map and one line per temperature."""
    maps = list(dict.fromkeys(record["map"] for record in records))
    drawn = Figure(figsize=(3.5 * len(maps), 5.2))
    panels = drawn.subplots(2, len(maps), squeeze=False, sharey="row")
    for column, map_ in enumerate(maps):
        temperatures = fixed_temperatures(records, map_)
        shades = matplotlib.colormaps["viridis"](np.linspace(0, 0.85, len(temperatures)))
        for T, shade in zip(temperatures, shades, strict=True):
            group = select_records(records, map=map_, temperature=str(T))
            for axes, line in zip(panels[:, column], (_mean_course(group), _mean_norms(group)), strict=True):
                axes.plot(*line, color=shade, label=f"T = {T:g}", linewidth=1.3)
        letter(panels[0, column], "abcdefgh"[column], f"{map_}: training loss")
        letter(panels[1, column], "abcdefgh"[len(maps) + column], f"{map_}: Jacobian norm")
        panels[1, column].set_yscale("log")
        panels[1, column].set_xlabel("training steps")
        for axes in panels[:, column]:
            tidy(axes)
    panels[0, 0].set_ylabel("nats per token")
    panels[1, 0].set_ylabel("mean over heads")
    panels[0, -1].legend()
    note(drawn, "Means over seeds. attnorm reproduce temperature")
    drawn.tight_layout(rect=(0, 0.03, 1, 1))
    return drawn


def _mean_course(records: Sequence[Record]) -> tuple[list[float], list[float]]:
    """Steps after the warmup and mean losses, as far as all runs got."""
    rows = zip(*(record["course"] for record in records), strict=False)
    after = [[entry[:2] for entry in row] for row in rows if row[0][0] > records[0]["settings"]["warmup"]]
    return [row[0][0] for row in after], [float(np.mean([value for _, value in row])) for row in after]


def _mean_norms(records: Sequence[Record]) -> tuple[list[float], list[float]]:
    looks = list(zip(*(record.get("looks", ()) for record in records), strict=False))
    return [look[0]["step"] for look in looks], [float(np.mean([o["jacobian_norm"] for o in look])) for look in looks]


EXPERIMENT = Experiment(
    name="temperature",
    title="Training at fixed and learned temperatures",
    source="Mudarisov et al. 2025, guideline 2; Nair 2025, Theorem 1",
    question="Does the bound 1/(2T) on the Jacobian predict where training breaks?",
    run=run,
    needs_model=False,
)
