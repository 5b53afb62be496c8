"""Exact matches by algorithm and size, and paired comparisons on the same test questions.

A comparison pairs the answers of two models to each question. With several seeds, seeds are paired too, and a question
counts once: by the sign of its difference summed over the seeds. The exact binomial test of these signs is McNemar's
test for one seed (https://doi.org/10.1007/BF02295996). p-values are corrected over algorithms by Holm's method. The
test treats questions as the sample and the trained models as given; so "better" also requires the same sign for every
seed. A variant with fewer seeds than the baseline must differ in the same direction from the baseline's other seeds:
softmax models that differ in nothing but the seed are up to 25 points apart.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from scipy.stats import binomtest

from attnorm.experiments.clrs_text.plan import ADAPTIVE
from attnorm.experiments.clrs_text.work import Line
from attnorm.experiments.language_models.results import wilson_interval
from attnorm.experiments.retrieval.lines import holm
from attnorm.training.clrs.run import OWN, REFITTED

SIGNIFICANT = 0.05
Range = Literal["in", "between", "out"]
RANGES: dict[Range, str] = {"in": "sizes of the training", "between": "sizes between these", "out": "larger sizes"}
Cells = Mapping[str, Mapping[str, str]]


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

    def mean_entropy(self, name: str) -> dict[int, float]:
        """Return size -> mean over algorithms and seeds of "entropy_nats" or "entropy_ratio"."""
        values: dict[int, list[float]] = {}
        for records in self.entropy.values():
            for record in records:
                values.setdefault(int(record["size"]), []).append(record[name])
        return {size: sum(found) / len(found) for size, found in sorted(values.items())}


@dataclass(frozen=True)
class ClrsResults:
    variants: list[ClrsVariant]
    algorithms: list[str]
    sizes: dict[Range, list[int]]  # of the test
    training_sizes: list[int]
    base: str
    steps: int
    missing: list[str]  # labels without a finished main run

    def variant(self, label: str, tested_with: str = OWN) -> ClrsVariant | None:
        return next((one for one in self.variants if (one.label, one.tested_with) == (label, tested_with)), None)


def results_of(lines: Sequence[Line], labels: Sequence[str] = ()) -> ClrsResults:
    """Return the results of the run with most main lines; `labels` are those that the plan has.

    Raises:
        ValueError: No main run of softmax is finished.
    """
    runs = [line["run"] for line in lines if line["stage"] == "main" and line["problem"] is None]
    if not runs:
        raise ValueError("no model is finished yet; train with --stage train, or use --quick")
    run = max(dict.fromkeys(runs), key=runs.count)
    mine = [line for line in lines if line["run"] == run and line["stage"] == "main" and line["problem"] is None]
    grouped: dict[tuple[str, str], list[Line]] = {}
    for line in sorted(mine, key=lambda line: line["seed"]):
        for tested_with in line["exact"]:
            grouped.setdefault((line["label"], tested_with), []).append(line)
    variants = [
        ClrsVariant(
            label, tested_with, {line["seed"]: line["exact"][tested_with] for line in group},
            {line["seed"]: line["entropy"].get(tested_with, []) for line in group}, group[0]["learning_rate"],
        )
        for (label, tested_with), group in grouped.items()
    ]  # fmt: skip
    first = mine[0]
    sizes = sorted({int(size) for cells in first["exact"][OWN].values() for size in cells})
    # Earlier versions recorded the largest size only, and counted all sizes below it as those of the training.
    trained = first.get("training_sizes") or list(range(1, first["largest_training_size"] + 1))
    ranges: dict[Range, list[int]] = {
        "in": [size for size in sizes if size in trained],
        "between": [size for size in sizes if size not in trained and size < max(trained)],
        "out": [size for size in sizes if size > max(trained)],
    }
    missing = [label for label in labels if not any(line["label"] == label for line in mine)]
    return ClrsResults(variants, sorted(first["algorithms"]), ranges, trained, first["base"], first["steps"], missing)


def interval(variant: ClrsVariant, algorithm: str, sizes: Iterable[int]) -> tuple[float, float, float]:
    """Return the share of right answers with its 95 % Wilson interval."""
    right, total = variant.counts(algorithm, sizes)
    return (right / total, *wilson_interval(right / total, total)) if total else (float("nan"),) * 3


@dataclass(frozen=True)
class ClrsComparison:
    """One algorithm and range of sizes: a variant minus the baseline."""

    algorithm: str
    difference: float  # of the shares of right answers over all seeds of each
    better: int  # questions
    worse: int
    p: float
    p_holm: float
    every_seed: bool  # the difference has the same sign for every seed of both
    unsolved: bool  # neither has a right answer

    @property
    def outcome(self) -> Literal["better", "worse", "no difference"]:
        if self.p_holm >= SIGNIFICANT or not self.every_seed:
            return "no difference"
        return "better" if self.difference > 0 else "worse"


def compare(
    variant: ClrsVariant, baseline: ClrsVariant, algorithms: Sequence[str], sizes: Sequence[int]
) -> list[ClrsComparison]:
    """Compare on the questions of these sizes, algorithm by algorithm, over the seeds that both have."""
    seeds = sorted(variant.by_seed.keys() & baseline.by_seed.keys())
    unpaired = sorted(baseline.by_seed.keys() - variant.by_seed.keys())
    raw = []
    for algorithm in algorithms:
        by_seed = [
            [int(a) - int(b) for a, b in zip(
                variant.bits(seed, algorithm, sizes), baseline.bits(seed, algorithm, sizes), strict=True
            )]
            for seed in seeds
        ]  # fmt: skip
        sums = [sum(column) for column in zip(*by_seed, strict=True)]
        better, worse = sum(one > 0 for one in sums), sum(one < 0 for one in sums)
        p = float(binomtest(better, better + worse).pvalue) if better + worse else 1.0
        totals = [sum(one) for one in by_seed]
        between_seeds = totals + [
            variant.bits(seed, algorithm, sizes).count("1") - baseline.bits(other, algorithm, sizes).count("1")
            for other in unpaired
            for seed in seeds
        ]
        same = all(one > 0 for one in between_seeds) or all(one < 0 for one in between_seeds)
        (right, questions), (right_before, questions_before) = (
            one.counts(algorithm, sizes) for one in (variant, baseline)
        )
        difference = right / questions - right_before / questions_before if questions and questions_before else 0.0
        unsolved = right == right_before == 0
        raw.append((algorithm, difference, better, worse, p, same, unsolved))
    corrected = holm([one[4] for one in raw])
    return [
        ClrsComparison(algorithm, difference, better, worse, p, p_holm, same, unsolved)
        for (algorithm, difference, better, worse, p, same, unsolved), p_holm in zip(raw, corrected, strict=True)
    ]
