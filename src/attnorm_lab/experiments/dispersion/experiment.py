"""Dispersion against context length: the rate test, and for how many heads the ceiling of softmax binds.

If dispersion were forced, the entropy of a head would rise to log n. The effective gap, the log-odds of its winner
against the mean of the others, would stay constant: slope 0 on log n. Slope 1 keeps the largest weight at every length.
In a causal model one pass contains all shorter contexts, so every curve comes from one pass, binned by n.

Logits are measured in three forms: unchanged, without the first key (the sink), and from queries and keys before their
rotation, which shows what the content alone would select.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from attnorm.analysis.collect_rows import SHORTEST_IN_SLOPE
from attnorm.models.describe import longest_context
from attnorm_lab.experiments.dispersion.figure import overview
from attnorm_lab.experiments.dispersion.measure import (
    CONTENT,
    LENGTHS,
    QUICK_LENGTHS,
    RUNS,
    Key,
    PassLengths,
    bins,
    bound_shares,
    choose_pass_lengths,
    column,
    head_table,
    kv_effect,
    main_lengths,
    measure,
    share,
)
from attnorm_lab.experiments.experiment import (
    Experiment,
    ExperimentFinding,
    ExperimentSubject,
    Outcome,
    ProgressCallback,
    judge,
    median,
)

AS_1_OVER_N, NOT_AT_ALL = -0.9, -0.1  # exponents of the largest weight's fall


def run(subject: ExperimentSubject, progress: ProgressCallback, parts: Path) -> Outcome:
    limit, hard = longest_context(subject.loaded().model)
    quick, longest = subject.quick, subject.longest
    main = subject.lengths(main_lengths(limit, quick=quick, longest=longest))[-1]
    tokens = subject.tokens(max(2 * (limit or main), longest or 0))
    name = subject.loaded().name
    far = choose_pass_lengths(main, limit, hard=hard, tokens=tokens, quick=quick, longest=longest, model=name)
    rows = 96 if subject.quick else 384
    passes = [measure(subject, progress, main, rows, parts)]
    if far.beyond is not None:
        passes.append(measure(subject, progress, far.beyond, rows // 2, parts))
    heads = {
        (measured.length, variant): head_table(tables)
        for measured in passes
        for variant, tables in measured.variants.items()
    }
    curves = {
        (measured.length, name): tables["by_length"]
        for measured in passes
        for name, tables in measured.variants.items()
    }
    ceilings = bound_shares(heads, curves)
    groups = kv_effect(heads[main, RUNS], np.random.default_rng(subject.seed))

    findings = judge_claims(heads, curves, ceilings, groups, far)
    about = f"{subject.model_and_text()}, {main:,} tokens, {rows} rows per head, binned by n"
    return Outcome(
        summary=summary(heads, ceilings, far),
        findings=findings,
        figures={"dispersion": overview(heads, curves, ceilings, main, about)},
        tables={"heads": _join_tables(heads), "by-length": _join_tables(curves), "ceiling": ceilings},
        parameters={
            "lengths": [measured.length for measured in passes],
            "rows": rows,
            "rows_beyond": rows // 2,
            "made_for": limit,
            "reach": far.sentence,
            "rotation": "measured" if (main, CONTENT) in heads else "not applicable: the model does not rotate",
            "key_value_groups": groups,
            "seed": subject.seed,
        },
    )


def _join_tables(tables: Mapping[tuple[int, str], pa.Table]) -> pa.Table:
    named: list[Any] = []
    for (_, variant), table in tables.items():
        column = pa.array([variant] * table.num_rows)
        named.append(table.add_column(0, "logits", column))
    return pa.concat_tables(named)


EXPERIMENT = Experiment(
    name="dispersion",
    title="Dispersion against context length",
    source="Velickovic et al. 2024, Lemma 2.1 and Theorem 2.2; the rate test asked for in comments on Mudarisov et "
    "al. 2025",
    question="Does attention disperse at the rate that theory predicts, and for how many heads does the ceiling bind?",
    run=run,
    tokens=(LENGTHS[0], QUICK_LENGTHS[0]),
    removes_parts=True,
)


def judge_claims(
    heads: Mapping[Key, pa.Table],
    curves: Mapping[Key, pa.Table],
    ceilings: pa.Table,
    groups: Mapping[str, Any],
    reach: PassLengths,
) -> tuple[ExperimentFinding, ...]:
    main = reach.main
    table = heads[main, RUNS]
    return (
        _judge_entropy(table, curves[main, RUNS]),
        _judge_rate(table),
        _judge_vanishing(table),
        _judge_ceiling(ceilings, main),
        _judge_sink(table),
        _judge_rotation(heads, main),
        _judge_groups(groups),
        _judge_beyond(heads, main, reach.why_not_beyond),
    )


def summary(heads: Mapping[Key, pa.Table], ceilings: pa.Table, reach: PassLengths) -> str:
    main = reach.main
    table = heads[main, RUNS]
    slopes = column(table, "gap_slope")
    at_8k, far = (_shares(ceilings, main, RUNS, "all keys", "growing")[label] for label in ("8k", "1M"))
    return (
        f"Of {table.num_rows} heads, {share(slopes, 0.9):.0%} keep up with the growing context (slope of the "
        f"effective gap at least 0.9), {1 - share(slopes, 0.25):.0%} disperse nearly as theory predicts (below "
        f"0.25); the median slope is {median(slopes):.2f}, where the prediction is 0. So entropy climbs, but for "
        "most heads more slowly than forced dispersion would have it: their logits spread further apart as the "
        f"context grows. Growing on like that, the ceiling would bind for {at_8k:.0%} of the heads at 8k keys and for "
        f"{far:.0%} at a million. {reach.sentence}"
    )


def _judge_entropy(table: pa.Table, curves: pa.Table) -> ExperimentFinding:
    cut = [(n, part) for n, part in bins(curves) if n >= SHORTEST_IN_SLOPE]
    (n0, first), (n1, last) = cut[0], cut[-1]
    ratios = [median(column(part, "entropy_ratio_q50")) for part in (first, last)]
    rising = (
        column(last, "entropy_ratio_q50") > column(first, "entropy_ratio_q50")
        if first.num_rows == last.num_rows
        else None
    )
    climbing = float(np.mean(rising)) if rising is not None else float("nan")
    slope = median(column(table, "entropy_slope"))
    verdict = judge(ratios[1] > 0.9, partly=slope > 0)
    return ExperimentFinding(
        claim="Entropy should climb toward its maximum as the context grows (rate test, comments on [M])",
        ours=f"it grows by {slope:.2f} nats per e-fold of n (median head; uniform attention: 1); entropy / log n "
        f"goes from {ratios[0]:.2f} at {n0:.0f} keys to {ratios[1]:.2f} at {n1:,.0f}, and rises in {climbing:.0%} of "
        "the heads",
        verdict=verdict,
        why="log n grows too: entropy that climbs more slowly than log n is no convergence to uniform attention",
    )


def _judge_rate(table: pa.Table) -> ExperimentFinding:
    slopes, errors = column(table, "gap_slope"), column(table, "gap_slope_error")
    low, middle, high = np.nanquantile(slopes, (0.25, 0.5, 0.75))
    predicted = float(np.nanmean(np.abs(slopes) <= 2 * errors))
    verdict = judge(abs(middle) < 0.1, partly=middle < 0.5)
    return ExperimentFinding(
        claim="... at the rate that theory predicts: the effective gap stays constant, slope 0 (Theorem 2.2 [V])",
        ours=f"slope {middle:.2f} (quartiles {low:.2f} and {high:.2f}); {predicted:.0%} of the heads within two "
        f"standard errors of 0, {share(slopes, 0.9):.0%} at 0.9 or more",
        verdict=verdict,
        why="the theorem is about lengths at which the logits' bounds are reached; below the horizon a larger "
        "context also holds larger logits, and the gap grows",
    )


def _judge_vanishing(table: pa.Table) -> ExperimentFinding:
    slopes = column(table, "weight_slope")
    middle = median(slopes)
    verdict = judge(middle < AS_1_OVER_N, partly=middle < NOT_AT_ALL)
    return ExperimentFinding(
        claim="Attention weights collapse toward 1/L (introduction [M], Lemma 1)",
        ours=f"the largest weight falls as n^({middle:.2f}) in the median head; as 1/n or faster in "
        f"{float(np.nanmean(slopes <= AS_1_OVER_N)):.0%} of the heads (our lines for the median: reproduces below "
        f"{AS_1_OVER_N:g}, does not above {NOT_AT_ALL:g})",
        verdict=verdict,
        why="C2/L bounds it from above with C2 = e^spread, and the spread of real heads leaves room for thousands of "
        "keys",
    )


def _judge_ceiling(ceilings: pa.Table, main: int) -> ExperimentFinding:
    def shares_at(reading: str, keys: str) -> str:
        shares = _shares(ceilings, main, RUNS, keys, reading)
        known = [f"{value:.0%} at {label}" for label, value in shares.items() if not math.isnan(value)]
        return ", ".join(known) or "at none of these lengths"

    last = _shares(ceilings, main, RUNS, "all keys", "growing")["1M"]
    verdict = judge(last > 0.9, partly=last > 0.1)
    return ExperimentFinding(
        claim="The ceiling binds in long contexts (Lemma 2.1 [V]; is it binding for this workload?)",
        ours="heads for which no key can have half of the weight: measured "
        f"{shares_at('measured', 'all keys')}; with the spread as it is now {shares_at('as_measured', 'all keys')}; "
        f"if it keeps growing {shares_at('growing', 'all keys')}; the same without the sink "
        f"{shares_at('growing', 'without the sink')}",
        verdict=verdict,
        why="horizon 1 + e^spread; the last reading extrapolates spread = a + b sqrt(log n)",
    )


def _judge_sink(table: pa.Table) -> ExperimentFinding:
    with_sink, without_sink = (median(column(table, name)) for name in ("gap_slope", "gap_slope_without_sink"))
    parked = share(column(table, "sink_mass"), 0.5)
    return ExperimentFinding(
        claim="A sink may hide dispersion (not in the papers)",
        ours=f"median slope {with_sink:.2f} with the first key, {without_sink:.2f} without it; {parked:.0%} of the "
        "heads put most of their weight on it",
        verdict="not tested",
        why="a sink keeps its weight at every length, so it looks like a head that keeps up",
    )


def _judge_rotation(heads: Mapping[Key, pa.Table], main: int) -> ExperimentFinding:
    claim = "Positional encodings could alter how the constraint manifests (comments on [M]; untouched in [V])"
    if (main, CONTENT) not in heads:
        return ExperimentFinding(claim, "not applicable: this model does not rotate queries and keys", "not tested")
    with_, without = (column(heads[main, variant], "gap_slope") for variant in (RUNS, CONTENT))
    entropy, spread = (
        [median(column(heads[main, variant], name)) for variant in (RUNS, CONTENT)]
        for name in ("entropy_ratio", "logit_spread")
    )
    moved = float(np.nanmedian(np.abs(with_ - without)))
    return ExperimentFinding(
        claim=claim,
        ours=f"median slope {median(with_):.2f} with rotation, {median(without):.2f} from the same queries and keys "
        f"before it (median change per head {moved:.2f}); entropy / log n {entropy[0]:.2f} and {entropy[1]:.2f}, "
        f"spread {spread[0]:.1f} and {spread[1]:.1f} nats",
        verdict=judge(moved > 0.1),
        why="a rotation changes no norm, so what differs is selection by position; it says nothing about a model "
        "that was trained without it",
    )


def _judge_groups(groups: Mapping[str, Any]) -> ExperimentFinding:
    claim = "Head sharing (grouped queries) could alter it (comments on [M])"
    if not groups["applies"]:
        return ExperimentFinding(claim, "not applicable: every query head has keys of its own", "not tested")
    ratio, p = groups["within_groups_over_within_layers"], groups["p_value"]
    return ExperimentFinding(
        claim=claim,
        ours=f"slopes of heads that share keys vary {ratio:.2f} times as much as those of a layer (random groups "
        f"{groups['random_groups']:.2f}, p = {p:.3f})",
        verdict=judge(p < 0.01),
        why="the keys set how far logits can spread, the queries what they make of it",
    )


def _judge_beyond(heads: Mapping[Key, pa.Table], main: int, not_further: str) -> ExperimentFinding:
    claim = "Beyond the length a model was made for (streaming, sampled rows)"
    longer = [length for length, variant in heads if length > main and variant == RUNS]
    if not longer:
        return ExperimentFinding(claim, f"not measured: {not_further}", "not tested")
    main_table, other = heads[main, RUNS], heads[longer[0], RUNS]
    numbers = [
        f"{median(column(table, 'gap_slope')):.2f} and {median(column(table, 'entropy_ratio')):.2f} at {length:,}"
        for length, table in ((main, main_table), (longer[0], other))
    ]
    return ExperimentFinding(
        claim=claim,
        ours=f"median slope and entropy / log n: {', '.join(numbers)} tokens",
        verdict="not tested",
        why="no claim of the papers; positions beyond training are out of distribution as well as longer",
    )


def _shares(ceilings: pa.Table, length: int, logits: str, keys: str, reading: str) -> dict[str, float]:
    return {
        row["at"]: row[reading]
        for row in ceilings.to_pylist()
        if (row["length"], row["logits"], row["keys"]) == (length, logits, keys)
    }
