"""`attnorm lab reproduce positions`: which effects of length belong to the normalizer, and which to the positions.

Velickovic et al. 2024 leave positions out of their theory. Here models differ in both: rotary positions, ALiBi, learned
positions or none, each with softmax, ssmax and entmax15.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import stdev

import numpy as np
from matplotlib.figure import Figure

from attnorm.arithmetic import ceil_div
from attnorm.figures import CORRECTED, MEASURED, NULL, PALE, PRINTED, note, panel
from attnorm_lab.experiments.experiment import Experiment, ExperimentFinding, Outcome, Verdict, judge
from attnorm_lab.experiments.model_grid.grid import (
    TINY,
    GridModel,
    GridPlan,
    Number,
    Record,
    distinct,
    lengths_table,
    loss_at,
    mean,
    mean_over_heads,
    row_numbers,
    run_grid,
    select_records,
    share_beyond_horizon,
    table,
    values,
    values_of_heads,
    variance_shares,
    without_offsets,
)

NORMALIZERS = ("softmax", "ssmax", "entmax15")
LONGER = (1, 2, 4, 8)
FACTORS = ("positions", "map")
STYLES = {"rotary": MEASURED, "ALiBi": CORRECTED, "learned": PRINTED, "none": NULL}


def models(normalizers: Sequence[str]) -> tuple[GridModel, ...]:
    """Return one model per kind of position and normalizer.

    Learned positions need GPT-2, whose blocks differ from Llama's. The other models differ in positions only.
    """
    ways = {
        "rotary": ("llama", "{}"),
        "ALiBi": ("nope", "alibi:map={}"),
        "none": ("nope", "{}"),
        "learned": ("gpt2", "{}"),
    }
    return tuple(
        GridModel({"positions": way, "map": name}, spec.format(name), {"architecture": architecture})
        for way, (architecture, spec) in ways.items()
        for name in normalizers
    )


FULL = GridPlan(models=models(NORMALIZERS), longer=LONGER)
QUICK = replace(TINY, models=models(("softmax",)), heads=2, longer=(1, 2))


def outcome(records: Sequence[Record], plan: GridPlan) -> Outcome:
    numbers = effects(max(plan.longer))
    others: dict[str, Number] = {
        **{f"loss_at_{times}x": partial(loss_at, times=times) for times in plan.longer},
        "slope, deviation over heads": slope_deviation, "slope, standard error": slope_error,
        "heads with a slope": lambda record: len(values_of_heads(record, "gap_slope")),
        **row_numbers(records, ("effective_keys",)),
    }  # fmt: skip
    return Outcome(
        summary=summary(records, max(plan.longer)),
        findings=findings(records, numbers),
        figures={"positions": figure(records, plan.longer)},
        tables={
            "models": table(records, **others, **numbers), "lengths": lengths_table(records, ("positions", "map")),
        },
        parameters=plan.as_dict(),
    )  # fmt: skip


def slope(record: Record) -> float:
    """Return the slope of the effective gap, mean over heads."""
    return mean_over_heads(record, "gap_slope")


def slope_deviation(record: Record) -> float:
    """Return the standard deviation of the slope of the effective gap over the heads of a model."""
    slopes = values_of_heads(record, "gap_slope")
    return stdev(slopes) if len(slopes) > 1 else math.nan


def slope_error(record: Record) -> float:
    """Return the standard error of the mean slope over heads, as if they were independent; it leaves out the seed."""
    return slope_deviation(record) / math.sqrt(max(1, len(values_of_heads(record, "gap_slope"))))


def effects(times: int) -> dict[str, Number]:
    """The effects of length, by name."""
    return {
        f"rise of the loss to {times} times the length": lambda record: loss_at(record, times) - loss_at(record, 1),
        "slope of the effective gap": slope,
        "share of heads beyond their horizon": share_beyond_horizon,
    }


def findings(records: Sequence[Record], numbers: dict[str, Number]) -> tuple[ExperimentFinding, ...]:
    """Compare how much of the variance of each effect the positions and the normalizer explain."""
    # Learned positions end at the training length and have no rise of the loss; some models have no horizon.
    return tuple(_finding(records, name, number) for name, number in numbers.items() if values(records, number))


def _finding(records: Sequence[Record], name: str, number: Number) -> ExperimentFinding:
    known = [record for record in records if math.isfinite(number(record))]
    shares = variance_shares(known, FACTORS, number) if _freedom(known) else {}
    with_positions = [record for record in known if record["positions"] != "none"]
    # Of two by two models, one that differs gives a third to each: no share is estimated from so few.
    apart = variance_shares(with_positions, FACTORS, number) if _freedom(with_positions) > 1 else {}
    ours = f"of the variance between {len(known)} models: {_describe_shares(shares)}" if shares else _no_shares(known)
    if apart:
        ours += f"; of that between the {len(with_positions)} with positions: {_describe_shares(apart)}"
    return ExperimentFinding(
        claim=f"the {name} belongs to the normalizer, not to the positions",
        ours=ours,
        verdict=_verdict(shares) if shares else "not tested",
        why=f"{len(known)} of {len(records)} models have this number; the larger share must be over twice the rest",
    )


def _freedom(records: Sequence[Record]) -> int:
    """Return the degrees of freedom that two main effects leave; 0 if a factor has a single value."""
    return math.prod(max(0, len(distinct(records, factor)) - 1) for factor in FACTORS)


def _no_shares(known: Sequence[Record]) -> str:
    """Return the reason why the variance is not divided among the factors."""
    for factor, levels in (("map", "normalizers"), ("positions", "kinds of positions")):
        found = distinct(known, factor)
        if len(found) == 1:
            return f"a share of the variance needs two {levels}; the models with this number have one, {found[0]}"
    return "the models do not differ"


def _describe_shares(shares: Mapping[str, float]) -> str:
    return f"positions {shares['positions']:.0%}, normalizer {shares['map']:.0%}, the rest {shares['the rest']:.0%}"


def _verdict(shares: Mapping[str, float]) -> Verdict:
    """Judge which share is larger; "not decided" if the rest, combinations and noise, is half of it or more."""
    map_, positions = shares["map"], shares["positions"]
    if max(map_, positions) <= 2 * shares["the rest"]:
        return "not decided"
    return judge(map_ > 2 * positions, partly=positions <= 2 * map_)


def summary(records: Sequence[Record], times: int) -> str:
    sentences = []
    for way in distinct(records, "positions"):
        by = {
            record["map"]: (loss_at(record, 1), loss_at(record, times))
            for record in select_records(records, positions=way)
        }
        listed = "; ".join(
            f"{name} {short:.3f}" + (f" and {long:.3f}" if math.isfinite(long) else "")
            for name, (short, long) in by.items()
        )
        sentences.append(f"{way}: {listed}.")
    return f"Nats per token at the training length and at {times} times it. " + " ".join(sentences)


def figure(records: Sequence[Record], longer: Sequence[int]) -> Figure:
    maps = distinct(records, "map")
    rows = ceil_div(len(maps) + 1, 2)
    drawn = Figure(figsize=(7.2, 2.8 * rows + 0.4))
    grid = drawn.subplots(rows, 2, squeeze=False).ravel()
    for unused in grid[len(maps) + 1 :]:
        unused.set_visible(False)
    panels = grid[: len(maps) + 1]
    for axes in panels[1:-1]:
        axes.sharey(panels[0])
    for axes, panel_letter, name in zip(panels, "abcdefgh", maps, strict=False):
        for way, look in STYLES.items():
            group = select_records(records, positions=way, map=name)
            axes.plot(longer, [mean(group, partial(loss_at, times=times)) for times in longer], label=way, **look)
        axes.set_xscale("log", base=2)
        axes.set_xticks(longer, [f"{times}x" for times in longer])
        axes.set(xlabel="length of the window, in training lengths", ylabel="nats per token")
        panel(axes, panel_letter, name)
    panels[0].legend()
    last = panels[-1]
    for index, (way, look) in enumerate(STYLES.items()):
        groups = [select_records(records, positions=way, map=name) for name in maps]
        slopes = [mean(group, slope) for group in groups]
        last.errorbar(
            [position + 0.06 * (index - 1.5) for position in range(len(maps))], slopes,
            np.nan_to_num([mean(group, slope_error) for group in groups]), capsize=2, **{**look, "linestyle": ""},
        )  # fmt: skip
    last.set_xticks(range(len(maps)), maps)
    last.set_ylabel("slope, mean over heads")
    if not values(records, slope):
        last.set_yticks([])
        reason = "no head has a finite gap\nat enough lengths for a slope"
        last.text(0.5, 0.5, reason, transform=last.transAxes, ha="center", va="center", color=PALE)
    panel(last, "abcdefgh"[len(maps)], "slope of the effective gap")
    without_offsets(drawn)
    note(
        drawn,
        "Learned positions end at the training length; bars: standard error of heads. attnorm lab reproduce positions",
    )
    drawn.tight_layout(rect=(0, 0.03, 1, 1))
    return drawn


EXPERIMENT = Experiment(
    name="positions",
    title="Positions and normalizers",
    source="no paper: Velickovic et al. 2024 leave positions out",
    question="Which effects of length belong to the normalizer and which to the positions?",
    run=partial(run_grid, FULL, QUICK, outcome),
    needs_model=False,
)
