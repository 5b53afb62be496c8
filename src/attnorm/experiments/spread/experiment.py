"""The logit spread of real heads: the table of Velickovic et al. 2024 for any models, next to Proposition 3.1.

The spread d = largest - smallest logit sets the ceiling: among n keys no weight exceeds 1/(1 + (n-1) e^-d). The paper's
table has one number per model; our source does not specify rows and length. So there are three readings: each head's
last row, the mean of its longest rows, and the last row without the first key. The spread grows with the length, so
several models are also compared at the longest context that all of them have.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from attnorm.analysis.verdicts.rows import keys
from attnorm.experiments.experiment import (
    Experiment,
    ExperimentFinding,
    ExperimentSubject,
    Outcome,
    ProgressCallback,
    Verdict,
)
from attnorm.experiments.spread.figure import figure
from attnorm.experiments.spread.measure import (
    PRINTED,
    READINGS,
    Spreads,
    common_keys,
    heads_table,
    measure,
    spread_table,
)
from attnorm.theory.dispersion import horizon

LENGTHS, QUICK_LENGTH = (256, 512, 1024, 2048), 512  # the longest that there is text for
NEAR = 12.0  # nats: a horizon of 160,000 keys, contexts of today


def run(subject: ExperimentSubject, progress: ProgressCallback, parts: Path) -> Outcome:
    rows = 16 if subject.quick else 64
    found, lengths = [], {}
    for one in subject.each():
        length = one.lengths((QUICK_LENGTH,) if subject.quick else LENGTHS)[-1]
        found.append(measure(one, progress, length, rows))
        lengths[found[-1].model] = length

    return Outcome(
        summary=summary(found),
        findings=judge_claims(found),
        figures={"spread": figure(found)},
        tables={"spread": spread_table(found), "heads": heads_table(found)},
        parameters={"length": lengths, "rows": rows, "readings": READINGS, "seed": subject.seed},
    )


EXPERIMENT = Experiment(
    name="spread",
    title="The logit spread of real heads",
    source="Velickovic et al. 2024, table of logit spreads and Proposition 3.1",
    question="How large is the logit spread in practice, and how far is it from what the weights allow?",
    run=run,
    tokens=(LENGTHS[0], QUICK_LENGTH),
)


LEAST = min(mean - deviation for _, _, mean, deviation in PRINTED.values())
MOST = max(mean + deviation for _, _, mean, deviation in PRINTED.values())
FAR_MORE = max(mean + 3 * deviation for _, _, mean, deviation in PRINTED.values())
AS_PRINTED = " and ".join(
    f"{mean:.2f} ± {deviation:.2f} for {name}" for name, (_, _, mean, deviation) in PRINTED.items()
)


def judge_claims(found: Sequence[Spreads]) -> tuple[ExperimentFinding, ...]:
    growths = " and ".join(f"{_growth(one):.2f}" + (f" ({one.model})" if len(found) > 1 else "") for one in found)
    return (
        ExperimentFinding(
            claim=f"The logit spread of real heads is small: {AS_PRINTED} [V]",
            ours=_each(found, [_readings(one, len(found) > 1) for one in found]),
            verdict=_together([_small(one) for one in found]),
            why=f"it is no constant of a model: it grows by {growths} nats per e-fold of n, so a table without a "
            "length says little",
        ),
        _proposition(found),
        ExperimentFinding(
            claim="... far below what floating point allows, so dispersion comes sooner than in the worst case (notes "
            "on [V])",
            ours=_each(found, [_horizons(one) for one in found]),
            verdict=_together(["reproduces" if float(np.median(one.last)) < NEAR else "partly" for one in found]),
            why="sooner is not soon: beyond the horizon 1 + e^spread no key can have half of the weight, before it the "
            "spread forbids nothing",
        ),
    )


def summary(found: Sequence[Spreads]) -> str:
    """Return the summary: the table in a sentence, then what decides its numbers."""
    spreads = ", ".join(
        f"the {len(one.last)} heads of {one.model} {_spread(one.last)} nats at {one.keys:,} keys" for one in found
    )
    growth = "; ".join(
        f"{np.nanmean(one.against_n[:, 0]):.1f} at {one.n[0]:.0f} keys to {np.nanmean(one.against_n[:, -1]):.1f} at "
        f"{one.keys:,}" + (f" in {one.model}" if len(found) > 1 else "")
        for one in found
    )
    return (
        f"Logit spreads in the last row, mean ± deviation over heads: {spreads}; the paper has {AS_PRINTED}. The "
        f"spread grows with the context, as the extremes of more numbers do: from {growth}.{_compared(found)}"
    )


def _compared(found: Sequence[Spreads]) -> str:
    if len(found) < 2:
        return ""
    same = common_keys(found)
    phrases = ", ".join(
        f"{one.model} {_spread(one.at(same))}" for one in sorted(found, key=lambda one: one.at(same).mean())
    )
    return f" At {same:,} keys, the most that all have: {phrases}."


def _each(found: Sequence[Spreads], phrases: Sequence[str]) -> str:
    """Join the phrases of all models, with their names if there are several."""
    return (
        phrases[0]
        if len(found) == 1
        else "; ".join(f"{one.model}: {text}" for one, text in zip(found, phrases, strict=True))
    )


def _together(verdicts: Sequence[Verdict]) -> Verdict:
    """Combine verdicts: untested models do not count; different verdicts give "partly"."""
    tested = {verdict for verdict in verdicts if verdict != "not tested"}
    if not tested:
        return "not tested"
    return next(iter(tested)) if len(tested) == 1 else "partly"


def _spread(values: np.ndarray) -> str:
    return f"{np.nanmean(values):.2f} ± {np.nanstd(values):.2f}"


def _readings(one: Spreads, with_keys: bool) -> str:
    phrases = "; ".join(f"{_spread(one.readings[name])} ({meaning})" for name, meaning in READINGS.items())
    at = f" at {one.keys:,} keys" if with_keys else ""
    return f"{phrases} nats{at}; range {one.last.min():.2f} to {one.last.max():.2f}"


def _small(one: Spreads) -> Verdict:
    mean = float(one.last.mean())
    return "reproduces" if LEAST <= mean <= MOST else "partly" if mean < FAR_MORE else "does not"


def _growth(one: Spreads) -> float:
    return float(np.polyfit(np.log(one.n), np.nanmean(one.against_n, 0), 1)[0])


def _horizons(one: Spreads) -> str:
    mean, middle = (keys(float(horizon(float(value)))) for value in (one.last.mean(), np.median(one.last)))
    return f"the mean spread has its horizon at {mean} keys; half of the heads have theirs below {middle}"


def _proposition(found: Sequence[Spreads]) -> ExperimentFinding:
    verdicts: list[Verdict] = []
    phrases = []
    for one in found:
        ratio = one.bound_ratio
        if not len(ratio):
            verdicts.append("not tested")
            phrases.append("not applicable: q and k of this model are not its input times a matrix")
            continue
        holds = int((ratio >= 1).sum())
        verdicts.append("reproduces" if holds == len(ratio) else "does not")
        phrases.append(
            f"holds in {holds} of {len(ratio)} heads; the bound is {np.median(ratio):.0f} times the spread in the "
            f"median head (smallest {ratio.min():.1f}, largest {ratio.max():.0f})"
        )
    # One violation refutes a bound.
    verdict = "does not" if "does not" in verdicts else _together(verdicts)
    why = "norms multiply what never points the same way; RoPE changes no norm, so the bound stays"
    return ExperimentFinding(
        "Spread <= 2 smax(Q) smax(K) ||y|| max ||x|| (Proposition 3.1 [V])",
        _each(found, phrases),
        verdict,
        why if verdict != "not tested" else "",
    )
