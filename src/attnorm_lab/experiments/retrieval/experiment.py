"""Max retrieval of Velickovic et al. 2024 with every normalizer, and two tasks where sharpness alone does not win.

Plan -> records (found or trained) -> tables, figures, findings. Records from elsewhere, for example from a GPU with
the same plan, are read from OUT/records.jsonl or OUT/records.jsonl.xz.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from attnorm.arithmetic import SIGNIFICANT
from attnorm_lab.experiments.experiment import (
    Experiment,
    ExperimentFinding,
    ExperimentSubject,
    Outcome,
    ProgressCallback,
    copied_records,
    judge,
    untested,
)
from attnorm_lab.experiments.retrieval import figure as figures
from attnorm_lab.experiments.retrieval.plan import (
    BASELINE,
    GOALS,
    LONG,
    PAPERS_RECIPE,
    PRINTED_ADAPTIVE,
    PRINTED_SIZES,
    PRINTED_SOFTMAX,
    Section,
    TrainingRecords,
    collect,
    plan,
)
from attnorm_lab.experiments.retrieval.results import (
    RetrievalLine,
    Scale,
    accuracy_table,
    lines_of,
    read_hard,
    scale_table,
    scales_of,
)
from attnorm_lab.training.retrieval.data import RetrievalRecipe
from attnorm_lab.training.retrieval.evaluate import OWN, RECORDS, Mean

TRAINING = "training"
CLOSE, NEAR = 6.0, 15.0  # points: as printed, and of the same kind
REPRODUCES_FROM, PARTLY_FROM = 0.75, 0.25  # of the errors at the largest size
TABLE = "Velickovic et al. 2024, Table 1"
ADAPTIVE = "adaptive_temperature"


def run(subject: ExperimentSubject, progress: ProgressCallback, parts: Path) -> Outcome:
    retrieval_plan = plan(quick=subject.quick, only=subject.only, seed=subject.seed)
    entries = collect(retrieval_plan, parts / TRAINING, _records_elsewhere(parts), subject.device, progress)
    with_records = [entry for entry in entries if entry.records]
    lines, scales = lines_of(with_records), scales_of(with_records)
    numbers = RetrievalNumbers(lines, scales)
    about = _about(len(retrieval_plan.seeds))
    return Outcome(
        summary=summary(numbers, _missing(entries), quick=subject.quick),
        findings=findings(numbers, quick=subject.quick),
        figures=figures.draw_figures(lines, about),
        tables={"accuracy": accuracy_table(lines), "scale": scale_table(scales), "read-hard": read_hard(with_records)},
        parameters={
            "seeds": list(retrieval_plan.seeds),
            "device": with_records[0].records[0]["device"],
            "trainings": [
                {
                    "section": entry.training.section,
                    "label": entry.training.label,
                    "task": entry.training.task,
                    "normalizer": entry.training.normalizer,
                    "recipe": entry.training.recipe.as_dict(),
                    "sizes": list(entry.training.trials.sizes),
                    "sets": entry.training.trials.sets,
                    "complete": entry.complete,
                }
                for entry in with_records
            ],
        },
    )


def _records_elsewhere(parts: Path) -> Iterator[Path]:
    """Yield record files that a user may have put into the output folder, and those of other selections."""
    yield from copied_records(parts)
    yield from sorted(parts.parent.glob(f"retrieval-*/{TRAINING}/{RECORDS}"))


def _missing(entries: list[TrainingRecords]) -> list[str]:
    """Return the incomplete trainings by section; "all" if none of it is complete."""
    phrases = []
    for section in dict.fromkeys(entry.training.section for entry in entries):
        in_section = [entry for entry in entries if entry.training.section == section]
        missing = [entry.training.label for entry in in_section if not entry.complete]
        if missing:
            phrases.append(f"{section}: {'all' if len(missing) == len(in_section) else ', '.join(missing)}")
    return phrases


def _about(seeds: int) -> str:
    return f"Means of {seeds} seeds, trained on at most 16 items. attnorm lab reproduce retrieval"


EXPERIMENT = Experiment(
    name="retrieval",
    title="Retrieval from sets far larger than any seen in training",
    source="Velickovic et al. 2024, Table 1",
    question="Which normalizer still finds the largest of n items, what fails in the others, and what helps?",
    run=run,
    needs_model=False,
)


@dataclass(frozen=True)
class RetrievalNumbers:
    """Lookup of numbers in the lines of the experiment."""

    lines: Sequence[RetrievalLine]
    scales: Sequence[Scale]

    def line(self, section: Section, label: str, tested_with: str, size: int) -> RetrievalLine | None:
        for line in self.lines:
            key = (line.section, line.label, line.row.tested_with, line.row.size)
            if key == (section, label, tested_with, size):
                return line
        return None

    def percents(self, section: Section, label: str, tested_with: str = OWN) -> dict[int, float]:
        return {
            line.row.size: 100 * line.accuracy
            for line in self.lines
            if (line.section, line.label, line.row.tested_with) == (section, label, tested_with)
        }

    @property
    def as_in_the_paper(self) -> tuple[Section, str]:
        """Section and label of softmax with the paper's recipe, with all of its steps if available."""
        long: tuple[Section, str] = ("steps", PAPERS_RECIPE)
        return long if self.percents(*long) else ("paper", BASELINE)

    def scale(self, section: Section, label: str) -> Scale | None:
        return next((s for s in self.scales if (s.training.section, s.training.label) == (section, label)), None)


def findings(numbers: RetrievalNumbers, *, quick: bool) -> tuple[ExperimentFinding, ...]:
    """Return the findings for which there are numbers; a quick run has no verdicts."""
    results = [
        finding
        for finding in (_judge_fall(numbers), _judge_adaptive(numbers), _judge_cause(numbers), _judge_softmax(numbers))
        if finding
    ]
    reason = "Few steps and narrow models: run without --quick for a verdict."
    return untested(results, reason) if quick else tuple(results)


def summary(numbers: RetrievalNumbers, missing: Sequence[str], *, quick: bool) -> str:
    paper, better = (numbers.percents(section, BASELINE) for section in ("paper", "ours"))
    long = numbers.percents("steps", PAPERS_RECIPE)
    parts = ["A small version of the experiment." if quick else ""]
    if paper:
        parts.append(f"Softmax, trained on at most 16 items, is right in {_series(paper)}.")
    if long:
        parts.append(f"After {LONG:,} steps, as in the paper, it is right in {_series(long)}.")
    split = _split_errors(numbers)
    if split:
        size, wrong, dispersed, hard = split
        parts.append(
            f"At {size:,} items {wrong:.0f} % of its answers are wrong because the largest logit is not the right "
            f"item's, and {dispersed:.0f} % although it is; hard attention, which cannot disperse, is right in "
            f"{hard:.0f} %."
        )
    if better:
        parts.append(f"With our recipe, the same model and normalizer are right in {_series(better)}.")
    if missing:
        parts.append(f"Not finished: {'; '.join(missing)}.")
    return " ".join(part for part in parts if part)


def _judge_fall(numbers: RetrievalNumbers) -> ExperimentFinding | None:
    percents = numbers.percents(*numbers.as_in_the_paper)
    if not percents.keys() & PRINTED_SOFTMAX.keys():
        return None
    off = _largest_difference(percents)
    verdict = judge(off <= CLOSE, partly=off <= NEAR)
    why = []
    steps = f"{RetrievalRecipe.steps:,}"
    if numbers.as_in_the_paper[0] == "steps" and (short := numbers.percents("paper", BASELINE)):
        why.append(
            f"After {steps} of the {LONG:,} steps: {_series(short)}; {_largest_difference(short):.1f} points apart."
        )
    if falling := numbers.percents("parts", "+ cosine"):
        why.append(
            f"After {steps} with a rate that falls to 0, and nothing else: {_series(falling)}. The table measures the "
            "noise that a constant rate leaves in the order of the logits."
        )
    return ExperimentFinding(
        f"A softmax head trained on at most 16 items is right in {_series(PRINTED_SOFTMAX)} ({TABLE}).",
        f"{_series(percents)}; {off:.1f} points apart at most",
        verdict,
        " ".join(why),
    )


def _largest_difference(percents: dict[int, float]) -> float:
    """Return the largest difference to the printed table, in points."""
    return max(abs(percents[size] - percent) for size, percent in PRINTED_SOFTMAX.items() if size in percents)


def _judge_adaptive(numbers: RetrievalNumbers) -> ExperimentFinding | None:
    softmax, sizes = numbers.as_in_the_paper, PRINTED_SIZES[1:]
    lines = [line for size in sizes if (line := numbers.line(*softmax, ADAPTIVE, size)) and line.difference]
    if not lines:
        return None
    gains = {line.row.size: line.difference for line in lines if line.difference}
    better = [size for size, gain in gains.items() if gain.mean.value > 0 and gain.p < SIGNIFICANT]
    verdict = judge(len(better) == len(gains), partly=better)
    phrases = ", ".join(
        f"{100 * gain.mean.value:+.1f} at {size:,} (p = {gain.p:.1g})" for size, gain in sorted(gains.items())
    )
    printed = ", ".join(f"{PRINTED_ADAPTIVE[size] - PRINTED_SOFTMAX[size]:+.1f} at {size:,}" for size in sizes)
    return ExperimentFinding(
        f"Adaptive temperature at inference helps from 64 items on, in points: {printed} ({TABLE}).",
        f"{phrases}; paired t-tests without correction, as printed",
        verdict,
        "It sharpens what is dispersed and cannot reorder logits; hard attention shows the limit of that.",
    )


def _judge_cause(numbers: RetrievalNumbers) -> ExperimentFinding | None:
    split = _split_errors(numbers)
    if split is None:
        return None
    size, wrong, dispersed, hard = split
    share = dispersed / max(wrong + dispersed, 1e-9)
    verdict = judge(share >= REPRODUCES_FROM, partly=share >= PARTLY_FROM)
    scale = numbers.scale(*numbers.as_in_the_paper)
    why = "The two best priorities are 1/(n + 1) apart on average" + (
        f", and the class moves a logit by as much as {scale.leak:.1g} in priority: from about {1 / scale.leak:,.0f} "
        "items on the order of the logits itself is a guess."
        if scale
        else "."
    )
    return ExperimentFinding(
        "The fall is dispersion: attention coefficients flatten as items are added (Section 3, Figure 2).",
        f"at {size:,} items {wrong:.0f} % logits wrong, {dispersed:.0f} % dispersed; hard attention {hard:.0f} % right",
        verdict,
        why,
    )


def _judge_softmax(numbers: RetrievalNumbers) -> ExperimentFinding | None:
    percents = numbers.percents("ours", BASELINE)
    goals = {size: goal for size, goal in GOALS.items() if size in percents}
    if not goals:
        return None
    reached = all(percents[size] >= goal for size, goal in goals.items())
    slopes = [scale.slope for section in ("paper", "ours") if (scale := numbers.scale(section, BASELINE))]
    steeper = f" Its logits are {slopes[1] / slopes[0]:.0f} times as steep." if len(slopes) == 2 else ""
    return ExperimentFinding(
        "Softmax cannot stay sharp as the number of items grows (Theorem 2.2), which is why the heads fail out of "
        "distribution.",
        f"our recipe, the same architecture and normalizer, at most 16 items in training: {_series(percents)}",
        "partly" if reached else "reproduces",
        "The theorem holds for bounded logits; training decides how steep they are, and so at which size it applies."
        + steeper,
    )


def _split_errors(numbers: RetrievalNumbers) -> tuple[int, float, float, float] | None:
    """Return for softmax, at the paper's largest size: size, % logits wrong, % dispersed, % right by hard attention."""
    softmax = numbers.as_in_the_paper
    sizes = [size for size in numbers.percents(*softmax) if size <= PRINTED_SIZES[-1]]
    if not sizes:
        return None
    size = max(sizes)
    own, hard = (numbers.line(*softmax, name, size) for name in (OWN, "hard"))
    if own is None or hard is None or own.row.logits_wrong is None or own.row.dispersed is None:
        return None
    return size, _percent(own.row.logits_wrong), _percent(own.row.dispersed), _percent(hard.row.accuracy)


def _percent(mean: Mean) -> float:
    return 100 * mean.value


def _series(percents: dict[int, float]) -> str:
    """Return percentages in words: 98.6, 94.3, 81.3 % of sets of 16, 64, 256 items."""
    sizes = sorted(percents)
    values = ", ".join(f"{percents[size]:.1f}" for size in sizes)
    return f"{values} % of sets of {', '.join(f'{size:,}' for size in sizes)} items"
