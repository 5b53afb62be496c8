"""`attnorm lab reproduce clrs-text`: on how many of the 30 algorithms does adaptive temperature help?

The figures show the right answers against problem size, a panel per algorithm, and the entropy of answer rows.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from attnorm.arithmetic import Difference, ceil_div
from attnorm.engines.execution import one_thread
from attnorm.figures import CORRECTED, MEASURED, NULL, PALE, PRINTED, note, panel, tidy
from attnorm_lab.experiments.clrs_text.results import (
    RANGES,
    ClrsComparison,
    ClrsResults,
    ClrsVariant,
    Range,
    compare,
    compare_shares,
    mean_shares,
    results_of,
    share_of,
)
from attnorm_lab.experiments.clrs_text.workspace import (
    ADAPTIVE,
    FULL,
    QUICK,
    SOFTMAX,
    ClrsWorkspace,
    Line,
    read_lines,
    run_items,
)
from attnorm_lab.experiments.experiment import (
    Experiment,
    ExperimentFinding,
    ExperimentSubject,
    Outcome,
    ProgressCallback,
    Verdict,
    judge,
)
from attnorm_lab.training.clrs.evaluate import OWN, REFITTED

ALGORITHMS = 30
MIN_SEEDS = 2
EXCEPTIONS = ("heapsort", "mst_kruskal", "bubble_sort")
PAPER = "Velickovic et al. 2024, CLRS-Text"


def _run(subject: ExperimentSubject, progress: ProgressCallback, parts: Path) -> Outcome:
    plan = (QUICK if subject.quick else FULL).only(subject.only)
    out = parts.parent.parent
    lines = [] if subject.quick else read_lines(out)
    if not lines:
        if not subject.quick and not (subject.texts and subject.valid):
            raise ValueError(
                f"expected records of clrs-text in {out} (records.jsonl or clrs-text*.jsonl, plain or .xz), got none. "
                "Copy them there, give --text TRAIN.jsonl and --valid TEST.jsonl to train here, use --stage train on a "
                "machine with a GPU, or --quick."
            )
        import torch

        if not torch.cuda.is_available():
            plan = replace(plan, dtype="float32")
        train, test = (subject.texts[0], subject.valid[0]) if subject.texts and subject.valid else (None, None)
        workspace = ClrsWorkspace.open(parts, plan, train=train, test=test, seed=subject.seed)
        with one_thread():
            run_items(workspace, device=subject.device, progress=progress)
        lines = workspace.lines()
    return outcome(lines, plan.normalizers)


def outcome(lines: Sequence[Line], labels: Sequence[str]) -> Outcome:
    """Return figures, tables and findings of the records.

    Raises:
        ValueError: No model is finished.
    """
    results = results_of(lines, labels)
    comparisons = comparisons_of(results)
    seeds = {variant.name: len(variant.by_seed) for variant in results.variants}
    return Outcome(
        summary=summary_of(results, comparisons),
        findings=findings_of(results, comparisons),
        figures=figures_of(results),
        tables={
            "shares": _shares_table(results, comparisons), "accuracy": _accuracy_table(results),
            "comparisons": _comparison_table(results, comparisons), "entropy": _entropy_table(results),
            "trainings": pa.Table.from_pylist(results.trainings),
        },
        parameters={
            "base": results.base, "steps": results.steps, "seeds": seeds, "algorithms": results.algorithms,
            "sizes": {name: list(sizes) for name, sizes in results.sizes.items()}, "missing": results.missing,
            "learning_rates": {
                variant.name: variant.learning_rate for variant in results.variants if variant.tested_with == OWN
            },
        },
    )  # fmt: skip


Comparisons = dict[tuple[str, Range], list[ClrsComparison]]
"""(name of a variant, range of sizes) -> comparisons with softmax, by algorithm."""


def comparisons_of(results: ClrsResults) -> Comparisons:
    softmax = results.variant(SOFTMAX)
    if softmax is None:
        return {}
    return {
        (variant.name, where): compare(variant, softmax, results.algorithms, results.sizes[where])
        for variant in results.variants
        if variant is not softmax and variant.by_seed.keys() & softmax.by_seed.keys()
        for where, sizes in results.sizes.items()
        if sizes
    }


def _shares_against_softmax(results: ClrsResults, variant: ClrsVariant, where: Range) -> Difference | None:
    softmax = results.variant(SOFTMAX)
    if softmax is None or variant is softmax:
        return None
    return compare_shares(variant, softmax, results.algorithms, results.sizes[where])


def _describe_ranges(results: ClrsResults, comparisons: Comparisons, variant: ClrsVariant) -> str:
    return "; ".join(
        f"{words}: {_describe_share(_shares_against_softmax(results, variant, where))}; "
        f"{_describe_comparisons(compared)}"
        for where, words in RANGES.items()
        if (compared := comparisons.get((variant.name, where)))
    )


def _describe_share(test: Difference | None) -> str:
    if test is None:
        return "not compared"
    return f"{100 * test.value:+.1f} points ({100 * test.low:+.1f} to {100 * test.high:+.1f}, p = {test.p:.2g})"


def _count(comparisons: Sequence[ClrsComparison], outcome: str) -> int:
    return sum(comparison.outcome == outcome for comparison in comparisons)


def _describe_comparisons(comparisons: Sequence[ClrsComparison]) -> str:
    higher = sum(comparison.difference.value > 0 for comparison in comparisons)
    return (
        f"better beyond chance on {_count(comparisons, 'better')} of {len(comparisons)}, worse on "
        f"{_count(comparisons, 'worse')} (higher on {higher}, no right answer of either on "
        f"{sum(comparison.unsolved for comparison in comparisons)})"
    )


def _why_no_verdict(results: ClrsResults, *variants: ClrsVariant | None) -> str:
    """Return why there is no verdict; empty if there is one."""
    if len(results.algorithms) < ALGORITHMS:
        return f"{len(results.algorithms)} of {ALGORITHMS} algorithms: too few for a verdict on the claim."
    if any(variant is None or len(variant.by_seed) < MIN_SEEDS for variant in variants):
        return f"fewer than {MIN_SEEDS} seeds of both: no verdict."
    return ""


def findings_of(results: ClrsResults, comparisons: Comparisons) -> tuple[ExperimentFinding, ...]:
    softmax, adaptive = results.variant(SOFTMAX), results.variant(ADAPTIVE)
    at_test = results.variant(SOFTMAX, ADAPTIVE)
    findings = []
    if adaptive is not None and (adaptive.name, "out") in comparisons:
        outside = comparisons[adaptive.name, "out"]
        everywhere = [one for where in RANGES for one in comparisons.get((adaptive.name, where), ())]
        judged = _mostly_better(outside, everywhere, _shares_against_softmax(results, adaptive, "out"))
        unjudged = _why_no_verdict(results, softmax, adaptive)
        findings.append(
            ExperimentFinding(
                f"With adaptive temperature in all heads, in training and inference, most of the 30 tasks improve, "
                f"especially at larger sizes ({PAPER}).",
                _describe_ranges(results, comparisons, adaptive),
                "not tested" if unjudged else judged,
                unjudged
                or "Points: t-tests over seeds. Algorithms: tests over seeds and questions, Holm's correction over "
                "algorithms.",
            )
        )
        exceptions = [comparison for comparison in outside if comparison.algorithm in EXCEPTIONS]
        if exceptions:
            better = [comparison.algorithm for comparison in exceptions if comparison.outcome == "better"]
            verdict: Verdict = "does not" if len(better) == len(exceptions) else "partly" if better else "reproduces"
            if unjudged:
                verdict = "not tested"
            elif judged in ("does not", "not decided"):
                verdict = "not decided"
                unjudged = "No improvement of the other algorithms is shown, so there is nothing to be an exception to."
            findings.append(
                ExperimentFinding(
                    f"Exceptions are {', '.join(EXCEPTIONS)}: adaptive temperature does not help there ({PAPER}).",
                    _describe_exceptions(comparisons, adaptive),
                    verdict,
                    unjudged,
                )
            )
    if at_test is not None and (at_test.name, "out") in comparisons:
        unjudged = _why_no_verdict(results, softmax)
        overall = _shares_against_softmax(results, at_test, "out")
        helps = overall is not None and overall.low > 0
        findings.append(
            ExperimentFinding(
                f"On CLRS-Text adaptive temperature must be introduced in training; inference alone is not enough "
                f"({PAPER}).",
                f"softmax models tested with it: {_describe_ranges(results, comparisons, at_test)}",
                "not tested" if unjudged else judge(not helps),
                unjudged,
            )
        )
    return tuple(findings)


def _describe_exceptions(comparisons: Comparisons, variant: ClrsVariant) -> str:
    """Return difference, outcome and Holm's p of each exception."""
    described = []
    for where, words in RANGES.items():
        each = [
            f"{one.algorithm} {100 * one.difference.value:+.1f} points, {one.outcome} (p = {one.p_holm:.2g})"
            for one in comparisons.get((variant.name, where), ())
            if one.algorithm in EXCEPTIONS
        ]
        if each:
            described.append(f"{words}: {', '.join(each)}")
    return "; ".join(described)


def _mostly_better(
    outside: Sequence[ClrsComparison], everywhere: Sequence[ClrsComparison], overall: Difference | None
) -> Verdict:
    """Judge by the larger sizes, and "partly" by all sizes: a gain outside does not count if more is lost inside.

    overall: the share of right answers at larger sizes; nothing is decided if its interval contains 0.
    """
    if 2 * _count(outside, "better") > len(outside):
        return "reproduces"
    if overall is None or overall.low <= 0 <= overall.high:
        return "not decided"
    return "partly" if _count(everywhere, "better") > _count(everywhere, "worse") else "does not"


def summary_of(results: ClrsResults, comparisons: Comparisons) -> str:
    largest = max(results.training_sizes)
    ranges = [where for where in RANGES if results.sizes.get(where)]
    variants = sorted(results.variants, key=lambda variant: variant.name != SOFTMAX)
    shares = []
    for variant in variants:
        by_range = " / ".join(_share_right(results, variant, where) for where in ranges)
        shares.append(f"{variant.name} {by_range} % ({_format_seeds(variant)})")
    judged = [
        f"{variant.name} {_count(outside, 'better')} / {_count(outside, 'worse')}"
        for variant in variants
        if (outside := comparisons.get((variant.name, "out")))
    ]
    trained = f"{results.base}, {results.steps:,} steps, {len(results.algorithms)} algorithms"
    parts = [
        f"{trained}, sizes up to {largest} in training.",
        f"Right answers at {' / '.join(RANGES[where] for where in ranges)}: {' · '.join(shares)}.",
    ]
    if judged:
        parts.append(
            f"Of {len(results.algorithms)} algorithms at {RANGES['out']}, better / worse than softmax beyond chance: "
            f"{' · '.join(judged)}."
        )
    if results.missing:
        parts.append(f"Not finished: {', '.join(results.missing)}.")
    return " ".join(parts)


def _share_right(results: ClrsResults, variant: ClrsVariant, where: Range) -> str:
    counts = [variant.counts(algorithm, results.sizes[where]) for algorithm in results.algorithms]
    right, total = (sum(column) for column in zip(*counts, strict=True))
    return f"{100 * right / total:.1f}" if total else "-"


def _format_seeds(variant: ClrsVariant) -> str:
    return f"{len(variant.by_seed)} seed{'s' if len(variant.by_seed) > 1 else ''}"


def _shares_table(results: ClrsResults, comparisons: Comparisons) -> pa.Table:
    """Return the share of right answers by variant and range of sizes, with the lowest and highest seed.

    low and high: 95 % interval over the questions, all answers to one question together. It takes the trained models
    as given.
    """
    rows = []
    for variant in results.variants:
        for where, sizes in results.sizes.items():
            total = share_of(variant, results.algorithms, sizes)
            if not total.answers:
                continue
            by_seed = mean_shares(variant, results.algorithms, sizes, once=False)
            once = mean_shares(variant, results.algorithms, sizes, once=True)
            compared = comparisons.get((variant.name, where))
            test = _shares_against_softmax(results, variant, where)
            rows.append(
                {
                    "variant": variant.name, "range": where, "seeds": len(by_seed), "share": total.share,
                    "lowest_seed": min(by_seed), "highest_seed": max(by_seed), "low": total.low, "high": total.high,
                    "difference": test and test.value, "difference_low": test and test.low,
                    "difference_high": test and test.high, "p": test and test.p,
                    "better": _count(compared, "better") if compared else None,
                    "worse": _count(compared, "worse") if compared else None,
                    "share_same_questions_once": fmean(once), "lowest_seed_same_questions_once": min(once),
                    "highest_seed_same_questions_once": max(once),
                }
            )  # fmt: skip
    return pa.Table.from_pylist(rows)


def _accuracy_table(results: ClrsResults) -> pa.Table:
    """Return the share of right answers by variant, algorithm and size.

    low and high: 95 % Wilson interval for the number of different questions, however many seeds answer them.
    """
    rows: list[dict[str, Any]] = []
    for variant in results.variants:
        for algorithm in results.algorithms:
            for where, sizes in results.sizes.items():
                for size in sizes:
                    cell = share_of(variant, [algorithm], [size])
                    by_seed = [variant.share(seed, algorithm, [size]) for seed in variant.by_seed]
                    rows.append(
                        {
                            "variant": variant.name, "trained_with": variant.label, "tested_with": variant.tested_with,
                            "seeds": len(variant.by_seed), "algorithm": algorithm, "size": size, "range": where,
                            "questions": cell.questions, "answers": cell.answers, "right": cell.right,
                            "share": cell.share, "low": cell.low, "high": cell.high,
                            "lowest_seed": min(by_seed), "highest_seed": max(by_seed),
                        }
                    )  # fmt: skip
    return pa.Table.from_pylist(rows)


def _comparison_table(results: ClrsResults, all_comparisons: Comparisons) -> pa.Table:
    """Return the tests of every variant with two seeds against softmax, with both shares; intervals as in accuracy."""
    by_name = {variant.name: variant for variant in results.variants}
    rows: list[dict[str, Any]] = []
    for (name, where), comparisons in all_comparisons.items():
        sizes = results.sizes[where]
        for comparison in comparisons:
            row: dict[str, Any] = {"variant": name, "range": where, "algorithm": comparison.algorithm}
            for prefix, side in (("", by_name[name]), ("softmax_", by_name[SOFTMAX])):
                total = share_of(side, [comparison.algorithm], sizes)
                by_seed = [side.share(seed, comparison.algorithm, sizes) for seed in side.by_seed]
                row |= {
                    f"{prefix}share": total.share, f"{prefix}low": total.low, f"{prefix}high": total.high,
                    f"{prefix}lowest_seed": min(by_seed), f"{prefix}highest_seed": max(by_seed),
                }  # fmt: skip
            row |= {
                "difference": comparison.difference.value, "difference_low": comparison.difference.low,
                "difference_high": comparison.difference.high, "p": comparison.difference.p,
                "p_holm": comparison.p_holm, "unsolved_by_both": comparison.unsolved, "outcome": comparison.outcome,
            }  # fmt: skip
            rows.append(row)
    return pa.Table.from_pylist(rows)


def _entropy_table(results: ClrsResults) -> pa.Table:
    rows = [
        {"variant": variant.name, "seed": seed, **record}
        for variant in results.variants
        for seed, records in variant.entropy.items()
        for record in records
    ]
    return pa.Table.from_pylist(rows)


EXPERIMENT = Experiment(
    name="clrs-text",
    title="CLRS-Text: algorithms on problems larger than in training",
    source="Velickovic et al. 2024, CLRS-Text; the benchmark: Markeeva et al. 2024",
    question="With adaptive temperature in all heads, on how many of 30 algorithms are more answers right?",
    run=_run,
    needs_model=False,
)

COLUMNS = 6
NOTE_CHARACTERS = 16  # per inch of width
NOTE_LINE = 0.14  # inches
Looks = dict[tuple[str, str], dict[str, Any]]

# What the paper compares, and the same polynomial at test time only.
ADAPTIVE_LOOKS: Looks = {
    (SOFTMAX, OWN): MEASURED,
    (ADAPTIVE, OWN): CORRECTED,
    (REFITTED, OWN): PRINTED,
    (SOFTMAX, ADAPTIVE): NULL,
}
OTHER_LOOKS: Looks = {
    (SOFTMAX, OWN): MEASURED,
    ("ssmax", OWN): CORRECTED,
    ("entmax15", OWN): PRINTED,
    ("asentmax", OWN): NULL,
}


def figures_of(results: ClrsResults) -> dict[str, Figure]:
    """Return the figures by name; other normalizers are in that of the entropy, where they were trained."""
    about = f"{results.base}, {results.steps:,} steps. attnorm lab reproduce clrs-text"
    has_others = any(results.variant(*key) is not None for key in OTHER_LOOKS if key != (SOFTMAX, OWN))
    drawn = [_variants_to_draw(results, looks) for looks in (ADAPTIVE_LOOKS, OTHER_LOOKS)[: 1 + has_others]]
    return {
        "clrs-text": _draw_accuracy(results, drawn[0], about),
        "entropy": _draw_entropies(results, drawn, about),
    }


Drawn = list[tuple[ClrsVariant, dict[str, Any]]]


def _variants_to_draw(results: ClrsResults, looks: Looks) -> Drawn:
    candidates = ((results.variant(*key), look) for key, look in looks.items())
    return [(variant, look) for variant, look in candidates if variant is not None]


def _draw_accuracy(results: ClrsResults, drawn: Drawn, about: str) -> Figure:
    """Draw right answers in % against size, a panel per algorithm; the first two variants have bands."""
    count = len(results.algorithms)
    columns = min(COLUMNS, max(2, count))
    rows = ceil_div(count, columns)
    width = 2.1 * columns + 0.7  # inches
    words = f"Bands of the first two: range of the seeds, of a single seed its 95 % Wilson interval; {about}"
    lines = textwrap.wrap(words, int(NOTE_CHARACTERS * width))
    further = NOTE_LINE * (len(lines) - 1)
    height = 1.1 + 1.75 * rows + further
    figure = Figure(figsize=(width, height))
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    sizes = sorted(size for group in results.sizes.values() for size in group)
    for index, axes in enumerate(grid.flat):
        if index >= count:
            axes.set_visible(False)
            continue
        _draw_panel(axes, results, drawn, results.algorithms[index], sizes)
        axes.tick_params(labelbottom=index + columns >= count)
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper left", bbox_to_anchor=(0.02, 1.0), ncols=2, fontsize=8)
    figure.supxlabel("problem size (gray: those of the training)", fontsize=9, y=(0.3 + further) / height)
    figure.supylabel("right answers (%)", fontsize=9, x=0.005)
    note(figure, "\n".join(lines))
    figure.subplots_adjust(
        left=0.6 / width, right=1 - 0.15 / width, top=1 - 0.75 / height, bottom=(0.65 + further) / height, wspace=0.12,
        hspace=0.4,
    )  # fmt: skip
    return figure


def _draw_panel(axes: Axes, results: ClrsResults, drawn: Drawn, algorithm: str, sizes: list[int]) -> None:
    _mark_training(axes, results)
    for index, (variant, look) in enumerate(drawn):
        shares = [100 * share_of(variant, [algorithm], [size]).share for size in sizes]
        axes.plot(sizes, shares, **{**look, "markersize": 2.5}, label=variant.name)
        if index < 2:
            ends = [_band(variant, algorithm, size) for size in sizes]
            low, high = ([100 * end for end in column] for column in zip(*ends, strict=True))
            axes.fill_between(sizes, low, high, color=look["color"], alpha=0.15, linewidth=0)
    axes.set_title(algorithm.replace("_", " "), fontsize=7.5, loc="left")
    axes.set_ylim(-3, 103)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    tidy(axes)


def _band(variant: ClrsVariant, algorithm: str, size: int) -> tuple[float, float]:
    """Return the lowest and highest share of the seeds; of a single seed, its 95 % Wilson interval."""
    if len(variant.by_seed) == 1:
        cell = share_of(variant, [algorithm], [size])
        return cell.low, cell.high
    by_seed = [variant.share(seed, algorithm, [size]) for seed in variant.by_seed]
    return min(by_seed), max(by_seed)


def _mark_training(axes: Axes, results: ClrsResults) -> None:
    for size in results.training_sizes:
        axes.axvspan(size - 0.3, size + 0.3, color=PALE, alpha=0.25, linewidth=0)


def _draw_entropies(results: ClrsResults, groups: list[Drawn], about: str) -> Figure:
    """Draw the mean entropy of answer rows against size, in nats and as a share of the uniform row's."""
    height = 0.7 + 2.9 * len(groups)  # inches
    figure = Figure(figsize=(8.6, height))
    grid = figure.subplots(len(groups), 2, sharex=True, squeeze=False)
    columns = (
        ("entropy_nats", "Entropy of answer rows (nats)"),
        ("entropy_ratio", "Entropy / log of the visible keys"),
    )
    letters = iter("abcd")
    for row, drawn in zip(grid, groups, strict=True):
        for axes, (name, title) in zip(row, columns, strict=True):
            _mark_training(axes, results)
            for variant, look in drawn:
                means = variant.mean_entropy(name)
                axes.plot(list(means), list(means.values()), **look, label=variant.name)
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            panel(axes, next(letters), title)
        row[0].legend(loc="best", fontsize=7)
    for axes in grid[-1]:
        axes.set_xlabel("problem size (gray: those of the training)")
    note(figure, about)
    figure.subplots_adjust(left=0.07, right=0.98, top=1 - 0.35 / height, bottom=0.7 / height, wspace=0.2, hspace=0.3)
    return figure
