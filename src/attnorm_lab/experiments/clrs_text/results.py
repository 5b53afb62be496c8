"""Exact matches by algorithm and size, and paired comparisons on the same test questions.

A comparison pairs the answers of the models of one seed to each question. An algorithm has few questions, so seeds and
questions are both a sample there (`difference_over_seeds_and_questions`), and p is corrected over algorithms by Holm's
method. Shares over all algorithms are compared over seeds (`difference_over_seeds`). Softmax models that differ in
nothing but the seed are up to 25 points apart, so a variant with one seed is not compared.

Intervals of shares are over the questions too, and take the trained models as given. The models of several seeds answer
the same questions, and some tasks share theirs, so all answers to one question count together.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from attnorm.arithmetic import (
    SIGNIFICANT,
    Difference,
    difference_over_seeds,
    difference_over_seeds_and_questions,
    holm,
    wilson_interval,
)
from attnorm_lab.experiments.clrs_text.workspace import ADAPTIVE, Line
from attnorm_lab.training.clrs.evaluate import OWN, REFITTED

Range = Literal["in", "between", "out"]
RANGES: dict[Range, str] = {"in": "sizes of the training", "between": "sizes between these", "out": "larger sizes"}
Cells = Mapping[str, Mapping[str, str]]

# Tasks of the test whose questions and answers are the same, apart from the name of the algorithm.
SAME_QUESTIONS = (
    ("bubble_sort", "heapsort", "insertion_sort", "quicksort"),
    ("bellman_ford", "dijkstra"),
    ("graham_scan", "jarvis_march"),
    ("kmp_matcher", "naive_string_matcher"),
)
TRAINING = ("stage", "label", "seed", "learning_rate", "problem", "steps", "held_out_loss", "held_out_exact")


@dataclass(frozen=True)
class ClrsVariant:
    """A normalizer in training and in the test, with the exact matches of each seed."""

    label: str
    tested_with: str
    by_seed: dict[int, Cells]
    entropy: dict[int, list[dict[str, float]]]  # by seed
    learning_rate: float

    @property
    def name(self) -> str:
        trained = f"{ADAPTIVE}, {REFITTED}" if self.label == REFITTED else self.label
        if self.tested_with == OWN:
            return trained
        other = f"{ADAPTIVE}, {REFITTED}," if self.tested_with == REFITTED else self.tested_with
        return f"{trained}; {other} in tests"

    def counts(self, algorithm: str, sizes: Iterable[int]) -> tuple[int, int]:
        """Return right answers and questions over all seeds."""
        bits = "".join(cells[algorithm].get(str(size), "") for cells in self.by_seed.values() for size in sizes)
        return bits.count("1"), len(bits)

    def bits(self, seed: int, algorithm: str, sizes: Iterable[int]) -> str:
        return "".join(self.by_seed[seed][algorithm].get(str(size), "") for size in sizes)

    def share(self, seed: int, algorithm: str, sizes: Iterable[int]) -> float:
        """Return the share of right answers of one model; NaN without questions."""
        bits = self.bits(seed, algorithm, sizes)
        return bits.count("1") / len(bits) if bits else math.nan

    def mean_entropy(self, name: str) -> dict[int, float]:
        """Return size -> mean over algorithms and seeds of "entropy_nats" or "entropy_ratio"."""
        values: dict[int, list[float]] = {}
        for records in self.entropy.values():
            for record in records:
                values.setdefault(int(record["size"]), []).append(record[name])
        return {size: sum(entropies) / len(entropies) for size, entropies in sorted(values.items())}


@dataclass(frozen=True)
class ClrsResults:
    variants: list[ClrsVariant]
    algorithms: list[str]
    sizes: dict[Range, list[int]]  # of the test
    training_sizes: list[int]
    base: str
    steps: int
    missing: list[str]  # labels without a finished main run
    trainings: list[dict[str, Any]]  # learning rate, held-out loss and held-out share of right answers of each model

    def variant(self, label: str, tested_with: str = OWN) -> ClrsVariant | None:
        return next(
            (variant for variant in self.variants if (variant.label, variant.tested_with) == (label, tested_with)), None
        )


def results_of(lines: Sequence[Line], labels: Sequence[str] = ()) -> ClrsResults:
    """Return the results of the run with most main lines; `labels` are those that the plan has.

    Raises:
        ValueError: No main run of softmax is finished.
    """
    runs = [line["run"] for line in lines if line["stage"] == "main" and line["problem"] is None]
    if not runs:
        raise ValueError("expected at least one finished model, got none. Train with --stage train, or use --quick.")
    run = max(dict.fromkeys(runs), key=runs.count)
    main_lines = [line for line in lines if line["run"] == run and line["stage"] == "main" and line["problem"] is None]
    grouped: dict[tuple[str, str], list[Line]] = {}
    for line in sorted(main_lines, key=lambda line: line["seed"]):
        for tested_with in line["exact"]:
            grouped.setdefault((line["label"], tested_with), []).append(line)
    variants = [
        ClrsVariant(
            label, tested_with, {line["seed"]: line["exact"][tested_with] for line in group},
            {line["seed"]: line["entropy"].get(tested_with, []) for line in group}, group[0]["learning_rate"],
        )
        for (label, tested_with), group in grouped.items()
    ]  # fmt: skip
    first = main_lines[0]
    sizes = sorted({int(size) for cells in first["exact"][OWN].values() for size in cells})
    # Earlier versions recorded the largest size only, and counted all sizes below it as those of the training.
    trained = first.get("training_sizes") or list(range(1, first["largest_training_size"] + 1))
    ranges: dict[Range, list[int]] = {
        "in": [size for size in sizes if size in trained],
        "between": [size for size in sizes if size not in trained and size < max(trained)],
        "out": [size for size in sizes if size > max(trained)],
    }
    missing = [label for label in labels if not any(line["label"] == label for line in main_lines)]
    trainings = [{name: line.get(name) for name in TRAINING} for line in lines if line["run"] == run]
    return ClrsResults(
        variants, sorted(first["algorithms"]), ranges, trained, first["base"], first["steps"], missing, trainings
    )


@dataclass(frozen=True)
class ClrsShare:
    """Share of right answers with its 95 % interval over the questions."""

    right: int
    answers: int  # of all seeds and tasks
    questions: int  # different ones
    share: float
    low: float
    high: float


def share_of(variant: ClrsVariant, algorithms: Iterable[str], sizes: Iterable[int]) -> ClrsShare:
    """Return the share of right answers of all seeds, with Wilson's interval for the effective number of questions.

    All answers to one question, of every seed and of every task with that question, are one cluster. The effective
    number of questions is p (1 - p) / v, where v is the variance of the share p over clusters
    (https://pmc.ncbi.nlm.nih.gov/articles/PMC6690503), and at most the number of different questions. For a single task
    it is that number: right if the seeds agree on every question, otherwise the interval is too wide. NaN without
    questions.
    """
    sizes = list(sizes)
    clusters: dict[tuple[str, int, int], tuple[int, int]] = {}  # right answers, answers
    for algorithm in algorithms:
        shared = next((group[0] for group in SAME_QUESTIONS if algorithm in group), algorithm)
        for seed in variant.by_seed:
            for size in sizes:
                for index, bit in enumerate(variant.bits(seed, algorithm, [size])):
                    right, answers = clusters.get((shared, size, index), (0, 0))
                    clusters[shared, size, index] = right + int(bit), answers + 1
    right, answers = (sum(cluster[column] for cluster in clusters.values()) for column in (0, 1))
    if not answers:
        return ClrsShare(0, 0, 0, math.nan, math.nan, math.nan)
    share = right / answers
    variance = sum((own_right - own * share) ** 2 for own_right, own in clusters.values()) / answers**2
    effective = min(len(clusters), share * (1 - share) / variance) if variance else len(clusters)
    return ClrsShare(right, answers, len(clusters), share, *wilson_interval(share, effective))


def mean_shares(variant: ClrsVariant, algorithms: Sequence[str], sizes: Sequence[int], *, once: bool) -> list[float]:
    """Return the share of right answers of each seed, over all algorithms.

    once: tasks with the same questions count as one, by their mean.
    """
    groups = [[one for one in group if one in algorithms] for group in SAME_QUESTIONS] if once else []
    weights = dict.fromkeys(algorithms, 1.0) | {one: 1 / len(group) for group in groups for one in group}
    shares = []
    for seed in variant.by_seed:
        answers = {algorithm: variant.bits(seed, algorithm, sizes) for algorithm in algorithms}
        questions = sum(weights[algorithm] * len(bits) for algorithm, bits in answers.items())
        right = sum(weights[algorithm] * bits.count("1") for algorithm, bits in answers.items())
        shares.append(right / questions if questions else math.nan)
    return shares


@dataclass(frozen=True)
class ClrsComparison:
    """One algorithm and range of sizes: the share of right answers of a variant minus that of the baseline."""

    algorithm: str
    difference: Difference
    p_holm: float
    unsolved: bool  # neither has a right answer

    @property
    def outcome(self) -> Literal["better", "worse", "no difference"]:
        if self.p_holm >= SIGNIFICANT:
            return "no difference"
        return "better" if self.difference.value > 0 else "worse"


def compare(
    variant: ClrsVariant, baseline: ClrsVariant, algorithms: Sequence[str], sizes: Sequence[int]
) -> list[ClrsComparison]:
    """Compare on the questions of these sizes, algorithm by algorithm; nothing with fewer than two common seeds."""
    seeds = sorted(variant.by_seed.keys() & baseline.by_seed.keys())
    if len(seeds) < 2:
        return []
    tests = [
        difference_over_seeds_and_questions([
            [int(own) - int(other) for own, other in zip(
                variant.bits(seed, algorithm, sizes), baseline.bits(seed, algorithm, sizes), strict=True
            )]
            for seed in seeds
        ])
        for algorithm in algorithms
    ]  # fmt: skip
    unsolved = [variant.counts(one, sizes)[0] == baseline.counts(one, sizes)[0] == 0 for one in algorithms]
    return [
        ClrsComparison(*compared)
        for compared in zip(algorithms, tests, holm([test.p for test in tests]), unsolved, strict=True)
    ]


def compare_shares(
    variant: ClrsVariant, baseline: ClrsVariant, algorithms: Sequence[str], sizes: Sequence[int]
) -> Difference | None:
    """Compare the shares of right answers over all algorithms, on these questions."""
    ours, theirs = (
        dict(zip(side.by_seed, mean_shares(side, algorithms, sizes, once=False), strict=True))
        for side in (variant, baseline)
    )
    return difference_over_seeds(ours, theirs)
