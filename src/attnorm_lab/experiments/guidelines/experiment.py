"""The practical guidelines of Mudarisov et al. 2025, each tested on a model: yes, partly or no; and drawn.

1. Keep the active set at most about 0.06 L.   2. A rising entropy is an early sign of saturation.
3. Do not lower T below 0.1.                   4. Three heads at p = 0.8 cover 99 % of the top-N tokens.
"""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, PercentFormatter
from numpy.typing import NDArray

from attnorm.figures import BARE, CORRECTED, DASHED, DOTTED, INK, MEASURED, NULL, PALE, PRINTED, note, panel
from attnorm_lab.experiments.experiment import (
    Experiment,
    ExperimentFinding,
    ExperimentSubject,
    Outcome,
    ProgressCallback,
    Verdict,
)
from attnorm_lab.experiments.gradients import BELOW_LEGEND, TEMPERATURES, draw_norms
from attnorm_lab.experiments.guidelines.measure import (
    MIN_KEYS,
    PAPERS_LEVEL,
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

    about = f"{subject.model_and_text()}, {length:,} tokens, {rows} of the longest rows per head"
    return Outcome(
        summary=_summary(findings, numbers.selected),
        findings=findings,
        figures={"guidelines": figure(numbers, about)},
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

ROOM = {"left": 0.065, "right": 0.985, "top": 0.945, "bottom": 0.105, "wspace": 0.27, "hspace": 0.42}
COVERED = 0.99  # by three heads, as printed


def figure(numbers: GuidelineNumbers, about: str) -> Figure:
    drawing = Figure(figsize=(11.4, 6.6))
    panels = drawing.subplots(2, 3, gridspec_kw=ROOM)
    _draw_loss(panels[0, 0], numbers.selected)
    _draw_heaviest_keys(panels[0, 1], numbers.selected)
    _draw_early_sign(panels[0, 2], numbers.early)
    _draw_separability(panels[1, 0], numbers.cooled)
    _draw_jacobian_norms(panels[1, 1], numbers.cooled)
    _draw_coverage(panels[1, 2], numbers.covered)
    note(drawing, about)
    return drawing


def _draw_loss(axes: Axes, selected: Selected) -> None:
    changes = [selected.change(share) for share in SHARES]
    values = np.array([change.value for change in changes])
    low, high = np.array([change.interval for change in changes]).T
    axes.errorbar(
        [*SHARES, 1.0], [*values, 0.0], yerr=np.stack([[*(values - low), 0.0], [*(high - values), 0.0]]), **MEASURED,
        capsize=3, elinewidth=1, label=f"mean of {changes[0].windows} windows, 95 % interval",
    )  # fmt: skip
    axes.axhline(0, color=PALE, linewidth=0.8)
    top, bottom = float(high.max()), min(0.0, float(low.min()))
    axes.set(ylim=(bottom - 0.14 * (top - bottom), top + 0.16 * (top - bottom)))
    axes.set(ylabel="change of the loss (nats per token)")
    panel(axes, "a", "Guideline 1: loss with a smaller active set")
    axes.legend(loc="upper right", fontsize=7)
    _format_share_axis(axes)


def _draw_heaviest_keys(axes: Axes, selected: Selected) -> None:
    axes.plot(SHARES, selected.mass, **CORRECTED, label="share of the weight on them")
    axes.plot(SHARES, selected.separability, **MEASURED, label="distinguishable, $N_s/N$")
    axes.plot(SHARES, selected.null, **NULL, label="distinguishable, weights permuted")
    axes.set(ylim=(0, 1.4), yticks=[0, 0.25, 0.5, 0.75, 1], ylabel="share, median over heads")
    panel(axes, "b", "Guideline 1: the heaviest keys")
    axes.legend(loc="upper left", fontsize=7)
    _format_share_axis(axes, top=1.03 / 1.4)


def _format_share_axis(axes: Axes, top: float = 0.84) -> None:
    """Draw the axis of shares. top: height at which the paper's line ends, below the legend."""
    axes.axvline(PAPERS_SHARE, ymax=top, **DOTTED)
    axes.text(PAPERS_SHARE, 0.02, " 0.06 L", transform=axes.get_xaxis_transform(), fontsize=7.5, va="bottom")
    axes.set_xscale("log")
    axes.set_xticks([*SHARES, 1.0], [f"{share:.0%}" for share in (*SHARES, 1.0)], fontsize=7.5)
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("active set, share of the context")


def _draw_early_sign(axes: Axes, early: EarlySign) -> None:
    like_chance = early.by_null
    groups: list[tuple[NDArray[np.bool_], dict[str, Any], str]] = [
        (~like_chance, {"marker": "o", "facecolor": "white", "edgecolor": INK}, "better than its null"),
        (like_chance, {"marker": "x", "color": INK}, "no better"),
    ]
    for mask, style, label in groups:
        axes.scatter(early.entropy_before[mask], early.apart_after[mask], s=15, linewidth=0.8, label=label, **style)
    axes.axhline(PAPERS_LEVEL, color=PALE, linewidth=0.9, linestyle=(0, (4, 3)))
    axes.set(xlim=(0, 1.02), ylim=(0, 1.25))
    axes.set(
        xlabel="entropy / log n at a quarter of the length",
        ylabel=f"distinguishable at the length, $N_s/N$, N = {TOP_N}",
    )
    panel(axes, "c", f"Guideline 2 (AUC {early.area_under_curve(early.by_level):.2f} for 80 %)")
    axes.legend(loc="upper right", fontsize=7, ncols=2)


def _draw_separability(axes: Axes, cooled: Cooled) -> None:
    low, center, high = np.nanquantile(cooled.separability, (0.25, 0.5, 0.75), axis=1)
    axes.fill_between(TEMPERATURES, low, high, color=INK, alpha=0.15, linewidth=0)
    axes.plot(TEMPERATURES, center, **MEASURED, label="median head, quartiles")
    axes.set(ylim=(0, 1.35), yticks=[0, 0.25, 0.5, 0.75, 1])
    axes.axvline(1, ymax=BELOW_LEGEND, **DASHED)
    axes.set(xscale="log", xlabel="temperature, 1 = as trained", ylabel=f"distinguishable, $N_s/N$, N = {TOP_N}")
    panel(axes, "d", "Guideline 3: separability")
    axes.legend(loc="upper left", fontsize=7)
    _mark_temperatures(axes, cooled)


def _draw_jacobian_norms(axes: Axes, cooled: Cooled) -> None:
    draw_norms(axes, cooled.norm, "head")
    axes.set_ylabel("Jacobian norm, mean over rows")
    panel(axes, "e", "Guideline 3: gradients")
    _mark_temperatures(axes, cooled)


def _mark_temperatures(axes: Axes, cooled: Cooled) -> None:
    """Mark the paper's T = 0.1, relative to the trained temperature and on raw logits."""
    for temperature, text in ((0.1, "T = 0.1"), (0.1 / cooled.trained_temperature, "0.1 on raw q·k")):
        if temperature > TEMPERATURES[0]:
            axes.axvline(temperature, ymax=BELOW_LEGEND, **DOTTED)
            axes.text(
                temperature, BELOW_LEGEND + 0.005, text, transform=axes.get_xaxis_transform(), fontsize=6.5,
                va="bottom",
                ha="center",
            )  # fmt: skip


def _draw_coverage(axes: Axes, covered: Covered) -> None:
    bars = {
        "one head,\nits own": (covered.alone, ""),
        "three, as\npredicted": (covered.predicted, "////"),
        "three, the\nfirst's": (covered.own, "...."),
        "three,\nall theirs": (covered.together, "xxxx"),
    }
    axes.axhline(COVERED, **{**PRINTED, **BARE}, label=f"{COVERED:.0%}, as printed", zorder=0)
    for index, (value, hatch) in enumerate(bars.values()):
        axes.bar(index, value, color="white", edgecolor=INK, hatch=hatch, width=0.62, linewidth=0.8)
        # Above the printed line where the bar comes near it.
        height = value + 0.03 if value < COVERED - 0.12 else COVERED + 0.03
        axes.text(index, max(height, value + 0.03), f"{value:.1%}", ha="center", fontsize=8)
    axes.set_xticks(range(len(bars)), list(bars), fontsize=7.5)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set(ylim=(0, 1.25), ylabel=f"selected keys distinguished, N = {TOP_N}")
    panel(axes, "f", "Do three heads cover 99 %?", grid=False)
    axes.legend(loc="upper right", fontsize=7)
