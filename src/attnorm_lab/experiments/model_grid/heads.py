"""`attnorm lab reproduce heads`: models of equal size with 4 to 32 heads per layer.

Mudarisov et al. 2025 suggest more heads, or another normalizer, against the loss of separability. They do not try it.
A claim holds if separability rises, and rises above its null too: narrower heads and sparser rows change both.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
from matplotlib.figure import Figure

from attnorm.figures import CORRECTED, MEASURED, PRINTED, note, panel
from attnorm_lab.experiments.experiment import Experiment, ExperimentFinding, Floats, Outcome, judge
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
    row_numbers,
    run_grid,
    seed_deviation,
    select_records,
    share_beyond_horizon,
    table,
    without_offsets,
)

NORMALIZERS = ("softmax", "entmax15", "ssmax")
HEADS = (4, 8, 16, 32)
TOP_N = 5  # keys per head
CLEAR = 0.02
STYLES = dict(zip(NORMALIZERS, (MEASURED, CORRECTED, PRINTED), strict=True))


def models(normalizers: Sequence[str], heads: Sequence[int]) -> tuple[GridModel, ...]:
    return tuple(
        GridModel({"heads_per_layer": count, "map": name}, name, {"heads": count})
        for count in heads
        for name in normalizers
    )


FULL = GridPlan(models=models(NORMALIZERS, HEADS), metrics="all")
QUICK = replace(TINY, models=models(("softmax",), (2, 4)), longer=(1,), metrics="all")


def outcome(records: Sequence[Record], plan: GridPlan) -> Outcome:
    return Outcome(
        summary=summary(records),
        findings=findings(records),
        figures={"heads": figure(records)},
        tables={
            "models": table(records, **numbers(records)), "top-n": top_n_table(records),
            "lengths": lengths_table(records, ("heads_per_layer", "map")),
        },
        parameters=plan.as_dict(),
    )  # fmt: skip


def separability(record: Record, top_n: int = TOP_N) -> float:
    """Return the share of a head's heaviest keys that its output distinguishes, mean over heads."""
    return _mean_of(record.get("top_n"), "separability", top_n)


def null(record: Record, top_n: int = TOP_N) -> float:
    """Return the separability of the same weights on exchanged values, mean over heads."""
    return _mean_of(record.get("top_n"), "separability_null", top_n)


def excess(record: Record, top_n: int = TOP_N) -> float:
    """Return separability minus its null; above 0, values help to distinguish keys."""
    return separability(record, top_n) - null(record, top_n)


def share_above_null(record: Record, top_n: int = TOP_N) -> float:
    """Return the share of heads whose separability is above the interval of their null."""
    rows = record.get("top_n")
    if not rows:
        return math.nan
    found, high = (_at_top_n(rows, column, top_n) for column in ("separability", "separability_null_high"))
    known = ~np.isnan(found + high)
    return float(np.mean(found[known] > high[known])) if known.any() else math.nan


def union(record: Record, top_n: int = TOP_N) -> float:
    """Return the share of keys that the heads of a layer cover together, mean over layers."""
    return _mean_of(record.get("coverage"), "union", top_n)


def independent(record: Record, top_n: int = TOP_N) -> float:
    """Return the share that heads would cover together if each chose as many keys at random, mean over layers."""
    return _mean_of(record.get("coverage"), "independent", top_n)


def _at_top_n(rows: dict[str, list[float]], column: str, top_n: int) -> Floats:
    chosen: Floats = np.array(rows[column], dtype=np.float64)[np.array(rows["top_n"]) == top_n]
    return chosen


def _mean_of(rows: dict[str, list[float]] | None, column: str, top_n: int) -> float:
    numbers = _at_top_n(rows, column, top_n) if rows else np.array([])
    return float(np.nanmean(numbers)) if np.isfinite(numbers).any() else math.nan


def top_n_table(records: Sequence[Record]) -> pa.Table:
    """Return separability and coverage by model and number of keys per head."""
    columns = (separability, null, excess, share_above_null, union, independent)
    return pa.Table.from_pylist([
        {name: record[name] for name in ("heads_per_layer", "map", "seed")}
        | {"top_n": int(top_n)}
        | {number.__name__: number(record, int(top_n)) for number in columns}
        for record in records
        for top_n in dict.fromkeys((record.get("top_n") or {"top_n": []})["top_n"])
    ])  # fmt: skip


def numbers(records: Sequence[Record]) -> dict[str, Number]:
    """The numbers of the table of models, by name."""
    return {
        "separability": separability,
        "separability_null": null,
        "union_coverage": union,
        "independent_coverage": independent,
        **row_numbers(records, ("effective_keys", "max_weight", "entropy_ratio")),
        "share_beyond_horizon": share_beyond_horizon,
    }


def findings(records: Sequence[Record]) -> tuple[ExperimentFinding, ...]:
    """Compare most with fewest heads for each map, and every other map with softmax over all numbers of heads."""
    counts = sorted(distinct(records, "heads_per_layer"))
    maps = distinct(records, "map")
    results = []
    for name in maps:
        few, many = (select_records(records, heads_per_layer=count, map=name) for count in (counts[0], counts[-1]))
        claim = f"more heads restore separability ({name})"
        results.append(_finding(claim, f"{counts[0]} heads", few, f"{counts[-1]}", many))
    softmax = select_records(records, map=maps[0])
    for name in maps[1:]:
        with_map = select_records(records, map=name)
        results.append(_finding(f"{name} restores separability", maps[0], softmax, name, with_map))
    return tuple(results)


def _finding(
    claim: str, first: str, before: Sequence[Record], second: str, after: Sequence[Record]
) -> ExperimentFinding:
    share, above = ([mean(group, number) for group in (before, after)] for number in (separability, excess))
    rises = [later > earlier + CLEAR for earlier, later in (share, above)]
    verdict = judge(all(rises), partly=any(rises))
    return ExperimentFinding(
        claim=claim,
        ours=f"Ns/N at N = {TOP_N}: {share[0]:.3f} with {first}, {share[1]:.3f} with {second}; above its null: "
        f"{above[0]:+.3f} and {above[1]:+.3f}",
        verdict="not tested" if not all(map(math.isfinite, share + above)) else verdict,
        why=f"both must rise by more than {CLEAR}",
    )


def summary(records: Sequence[Record]) -> str:
    sentences = []
    for name in distinct(records, "map"):
        by = {record["heads_per_layer"]: loss_at(record, 1) for record in select_records(records, map=name)}
        sentences.append(
            f"{name}: " + ", ".join(f"{value:.3f} with {count} heads" for count, value in by.items()) + "."
        )
    return "Nats per token at equal parameters. " + " ".join(sentences)


def figure(records: Sequence[Record]) -> Figure:
    """Draw loss, separability and coverage against the number of heads; thin lines are what chance would give."""
    drawn = Figure(figsize=(10.5, 3.6))
    panels = drawn.subplots(1, 3)
    drawn_numbers: list[tuple[str, str, Number, Number | None]] = [
        ("loss at the training length", "nats per token", partial(loss_at, times=1), None),
        ("keys that a head distinguishes", f"share of its {TOP_N} heaviest", separability, null),
        ("keys that a layer's heads cover", f"share of the row, {TOP_N} per head", union, independent),
    ]
    counts = sorted(distinct(records, "heads_per_layer"))
    for axes, panel_letter, (title, label, number, chance) in zip(panels, "abc", drawn_numbers, strict=True):
        for name in distinct(records, "map"):
            groups = [select_records(records, heads_per_layer=count, map=name) for count in counts]
            bars = [np.nan_to_num(seed_deviation(group, number)) for group in groups]
            axes.errorbar(
                counts, [mean(group, number) for group in groups], bars, label=name, capsize=2, **STYLES[name]
            )
            if chance is not None:
                thin = {**STYLES[name], "linewidth": 0.7, "marker": ""}
                axes.plot(counts, [mean(group, chance) for group in groups], **thin)
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.set(xlabel="heads per layer", ylabel=label)
        panel(axes, panel_letter, title)
    panels[0].legend()
    without_offsets(drawn)
    note(
        drawn,
        "Models of equal width and parameters. Thin lines: in (b) the same weights on exchanged values, in (c) heads "
        "that choose independently. attnorm lab reproduce heads",
    )
    drawn.tight_layout(rect=(0, 0.04, 1, 1))
    return drawn


EXPERIMENT = Experiment(
    name="heads",
    title="More heads of less width",
    source="Mudarisov et al. 2025, guidelines",
    question="Do more heads or another normalizer restore separability?",
    run=partial(run_grid, FULL, QUICK, outcome),
    needs_model=False,
)
