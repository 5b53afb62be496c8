"""The practical guidelines of Mudarisov et al. 2025, each tested on a model: yes, partly or no.

1. Keep the active set at most about 0.06 L.   2. A rising entropy is an early sign of saturation.
3. Do not lower T below 0.1.                   4. Three heads at p = 0.8 cover 99 % of the top-N tokens.
"""

from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa

from attnorm_lab.experiments.experiment import (
    Experiment,
    ExperimentFinding,
    ExperimentSubject,
    Outcome,
    ProgressCallback,
    Verdict,
)
from attnorm_lab.experiments.gradients import TEMPERATURES
from attnorm_lab.experiments.guidelines.measure import (
    MIN_KEYS,
    PAPERS_SHARE,
    SHARES,
    TOP_N,
    Cooled,
    Covered,
    EarlySign,
    GuidelineNumbers,
    Selected,
    measure,
)
from attnorm_lab.experiments.model_runs import judge_loss_change

Answer = Literal["yes", "partly", "no"]
AS_VERDICT: dict[Answer, Verdict] = {"yes": "reproduces", "partly": "partly", "no": "does not"}
AS_ANSWER: dict[Verdict, str] = {verdict: answer for answer, verdict in AS_VERDICT.items()}
LENGTHS, QUICK_LENGTH = (512, 1024), 256  # the longest that there is text for
WINDOWS, QUICK_WINDOWS = 8, 3  # windows of the text for the losses
LITTLE, MUCH = 0.02, 0.2  # nats per token: a negligible and a clear change of the loss


def run(subject: ExperimentSubject, progress: ProgressCallback, parts: Path) -> Outcome:
    length = subject.longest_length(LENGTHS, QUICK_LENGTH)
    rows = 4 if subject.quick else 8
    windows = (length, QUICK_WINDOWS if subject.quick else WINDOWS)
    numbers = measure(subject, progress, length, rows, windows)
    findings = judge_claims(numbers)
    return Outcome(
        summary=_summary(findings, numbers.selected),
        findings=findings,
        figures={},
        tables={
            "active-set": active_set(numbers.selected),
            "temperature": temperature(numbers.cooled),
            "heads": _early_table(numbers.early),
        },
        parameters={
            "length": length, "rows": rows, "windows": windows, "shares": SHARES, "top_n": TOP_N,
            "temperatures": TEMPERATURES, "seed": subject.seed,
        },
    )  # fmt: skip


def judge_claims(numbers: GuidelineNumbers) -> tuple[ExperimentFinding, ...]:
    return (
        _judge_active_set(numbers.selected),
        _judge_entropy(numbers.early),
        _judge_temperature(numbers.cooled),
        _judge_coverage(numbers.covered),
    )


def _finding(claim: str, answer: Answer, ours: str, why: str) -> ExperimentFinding:
    return ExperimentFinding(claim=claim, ours=f"{answer}: {ours}", verdict=AS_VERDICT[answer], why=why)


def _judge_active_set(selected: Selected) -> ExperimentFinding:
    index = SHARES.index(PAPERS_SHARE)
    lost, most = (selected.change(share) for share in (PAPERS_SHARE, SHARES[-1]))
    fading = [selected.separability[position] - selected.null[position] for position in (0, index, -1)]
    verdict, phrase = judge_loss_change(lost, LITTLE, MUCH)
    return ExperimentFinding(
        "Keep the active set small: beyond about 0.06 L more tokens yield vanishing returns (guideline 1)",
        f"{AS_ANSWER[verdict]}: with only the heaviest 6 % of the keys of each row ({MIN_KEYS} at least) the loss "
        f"changes by {lost} nats per token ({phrase}; with {SHARES[-1]:.0%} of the keys {most}); they hold "
        f"{selected.mass[index]:.0%} of the weight in the median "
        f"head, and their separability is {fading[1]:+.2f} above that of permuted weights (N = 1 % of L: "
        f"{fading[0]:+.2f}, 50 %: {fading[2]:+.2f})",
        verdict,
        "the median head has its weight on few keys, but heads that average over many need them all, in a model that "
        "was not trained to select (all layers cut at once); and a share of L is a linear rule",
    )


def _judge_entropy(early: EarlySign) -> ExperimentFinding:
    claim = "Monitor entropy: its rise is an early sign of saturation (guideline 2)"
    readings = {"at most 80 % distinguishable": early.by_level, "no better than with permuted weights": early.by_null}
    areas = {name: early.area_under_curve(saturated) for name, saturated in readings.items()}
    known = [area for area in areas.values() if not np.isnan(area)]
    phrase = "; ".join(
        f"saturated = {name} ({int(saturated.sum())} of {len(saturated)} heads): "
        + ("nothing to predict" if np.isnan(areas[name]) else f"{areas[name]:.0%} of the pairs")
        for name, saturated in readings.items()
    )
    if not known:
        return ExperimentFinding(claim, phrase, "not decided")
    answer: Answer = "yes" if min(known) >= 0.8 else "partly" if max(known) >= 0.65 else "no"
    return _finding(
        claim,
        answer,
        "entropy / log n at a quarter of the length ranks a head that will be saturated above one that will not "
        f"(chance: 50 %): {phrase}; a rise of entropy and a drop of separability have rank correlation "
        f"{-early.correlation():+.2f}",
        "entropy depends on the weights only; how many keys are distinguishable depends on the vectors too, and with "
        "permuted weights it is often as many",
    )


def _judge_temperature(cooled: Cooled) -> ExperimentFinding:
    cold, trained = (TEMPERATURES.index(T) for T in (0.1, 1.0))
    colder = 0
    norm = np.median(cooled.norm, 1)
    apart = np.nanmedian(cooled.separability, 1)
    # The paper's Figure 4 shows the largest norm; training depends on those of most heads.
    largest_grows = cooled.norm[colder].max() > cooled.norm[cold].max()
    most_grow, sharper = norm[colder] > norm[cold], apart[colder] > apart[cold] + 0.02
    answer: Answer = "yes" if most_grow and not sharper else "partly" if largest_grows or not sharper else "no"
    return _finding(
        "Avoid T below 0.1: it increases Jacobian norms without increasing separability (guideline 3)",
        answer,
        f"from T = 1 to 0.1 and {TEMPERATURES[0]:g} of the trained temperature the median norm is "
        f"{norm[trained]:.3g}, {norm[cold]:.3g}, {norm[colder]:.3g} (largest head {cooled.norm[trained].max():.2g}, "
        f"{cooled.norm[cold].max():.2g}, {cooled.norm[colder].max():.2g}) and separability {apart[trained]:.2f}, "
        f"{apart[cold]:.2f}, {apart[colder]:.2f}",
        f"the paper's T = 0.1 on raw logits is {0.1 / cooled.trained_temperature:.3g} of the trained temperature; "
        "there most rows are decided and their gradient is gone, a few tied ones explode",
    )


def _judge_coverage(covered: Covered) -> ExperimentFinding:
    answer: Answer = "yes" if covered.own >= 0.99 else "partly" if covered.own >= 0.95 else "no"
    return _finding(
        "Three heads cover 99 % of the top-N tokens, 1 - (1 - p)^3 at p = 0.8 (Discussion)",
        answer,
        f"a head distinguishes {covered.alone:.0%} of its own top {TOP_N}, so three should cover "
        f"{covered.predicted:.1%}; "
        f"they cover {covered.own:.1%} of the first one's, and {covered.together:.1%} of what the three select "
        "together",
        "the formula assumes independent heads that cover one set of tokens; heads of a layer select different sets, "
        "and what one misses the other two rarely distinguish",
    )


def active_set(selected: Selected) -> pa.Table:
    return pa.table(
        {
            "share_of_context": SHARES, "mass": selected.mass, "separability": selected.separability,
            "separability_null": selected.null, "loss": [float(selected.losses[share].mean()) for share in SHARES],
            "loss_as_it_runs": [float(selected.losses[1.0].mean())] * len(SHARES),
            "change": [selected.change(share).value for share in SHARES],
            "change_error": [selected.change(share).error for share in SHARES],
            "windows": [len(selected.losses[1.0])] * len(SHARES),
        }
    )  # fmt: skip


def temperature(cooled: Cooled) -> pa.Table:
    return pa.table(
        {
            "temperature": TEMPERATURES, "papers_temperature": [T * cooled.trained_temperature for T in TEMPERATURES],
            "norm_median": np.median(cooled.norm, 1), "norm_largest": cooled.norm.max(1),
            "separability_median": np.nanmedian(cooled.separability, 1),
        }
    )  # fmt: skip


def _early_table(early: EarlySign) -> pa.Table:
    return pa.table(
        {
            "entropy_ratio_quarter": early.entropy_before, "entropy_ratio": early.entropy_after,
            "separability_quarter": early.apart_before, "separability": early.apart_after,
            "separability_null_high": early.chance_after,
        }
    )  # fmt: skip


def _summary(findings: tuple[ExperimentFinding, ...], selected: Selected) -> str:
    short = ("Active set at most 0.06 L", "entropy as an early sign", "T not below 0.1", "three heads cover 99 %")
    first, *rest = (
        f"{name}: {AS_ANSWER.get(finding.verdict, finding.verdict)}"
        for name, finding in zip(short, findings, strict=True)
    )
    change = selected.change(PAPERS_SHARE)
    low, high = change.interval
    loss = (
        f"the loss changes by {change} nats per token, mean ± standard error of {change.windows} windows; 95 %: "
        f"{low:.3f} to {high:.3f}"
    )
    return "; ".join([f"{first} ({loss})", *rest]) + "."


EXPERIMENT = Experiment(
    name="guidelines",
    title="The practical guidelines, put to the test",
    source="Mudarisov et al. 2025, Discussion and Conclusions",
    question="Does each guideline hold on this model?",
    run=run,
    tokens=(LENGTHS[0], QUICK_LENGTH),
)
