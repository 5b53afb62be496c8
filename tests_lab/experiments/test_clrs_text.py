"""CLRS-Text: each item is trained once, records merge, and verdicts follow from paired tests on the same questions."""

import json
import lzma
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from scipy.stats import binomtest
from typer.testing import CliRunner

from attnorm.arithmetic import difference_over_seeds_and_questions
from attnorm.cli import app
from attnorm.run_folder import try_lock
from attnorm_lab.experiments.clrs_text import experiment
from attnorm_lab.experiments.clrs_text import workspace as work
from attnorm_lab.experiments.clrs_text.experiment import EXCEPTIONS, comparisons_of, figures_of, findings_of, outcome
from attnorm_lab.experiments.clrs_text.results import (
    SAME_QUESTIONS,
    Cells,
    ClrsResults,
    ClrsVariant,
    compare,
    mean_shares,
    results_of,
    share_of,
)
from attnorm_lab.experiments.clrs_text.workspace import (
    ADAPTIVE,
    FULL,
    QUICK,
    RECORDS,
    SOFTMAX,
    ClrsItem,
    ClrsWorkspace,
    Line,
    best_rate,
    coefficients_of,
    items,
    read_lines,
    run_items,
)
from attnorm_lab.experiments.experiment import ExperimentFinding
from attnorm_lab.experiments.trained_models import change_plan
from attnorm_lab.training.checkpoints import NotFiniteError
from attnorm_lab.training.clrs.evaluate import OWN, REFITTED

runner = CliRunner()
TINY = replace(QUICK, rate_steps=1, steps=2, batch=2, width=8, observed=0, seeds=2, at_inference=(ADAPTIVE, REFITTED))
NAMES = [*EXCEPTIONS, *(f"task_{n:02}" for n in range(27))]


def made_line(label: str, seed: int, exact: dict[str, Any], run: str = "r", **others: Any) -> Line:
    """A finished main run; exact: tested with -> algorithm -> size -> bits."""
    row = {"entropy_nats": 1.0 + seed, "entropy_ratio": 0.5}
    entropy = {
        name: [{"algorithm": task, "size": int(size), **row} for task in found for size in found[task]]
        for name, found in exact.items()
    }
    algorithms = sorted(exact[OWN])
    return {
        "run": run, "stage": "main", "label": label, "seed": seed, "learning_rate": 1e-3, "problem": None,
        "exact": exact, "entropy": entropy, "training_sizes": [4, 8, 12], "algorithms": algorithms, "base": "made",
        "steps": 7, "held_out_loss": 1.0, "wall_seconds": 1.0, **others,
    }  # fmt: skip


def cells(right_small: int, right_large: int, names: list[str] = NAMES) -> dict[str, dict[str, str]]:
    """So many right answers of 32 at size 8 and at size 16."""
    small, large = (f"{'1' * right:0<32}" for right in (right_small, right_large))
    return {name: {"8": small, "16": large} for name in names}


def trained(adaptive: dict[str, Any], at_test: dict[str, Any], seeds: int = 3) -> ClrsResults:
    lines = [made_line(SOFTMAX, seed, {OWN: cells(20, 4), ADAPTIVE: at_test}) for seed in range(seeds)]
    lines += [made_line(ADAPTIVE, seed, {OWN: adaptive}) for seed in range(seeds)]
    return results_of(lines, FULL.normalizers)


def test_records_of_earlier_versions_name_only_the_largest_training_size() -> None:
    line = made_line(SOFTMAX, 0, {OWN: cells(20, 4)}, largest_training_size=12)
    del line["training_sizes"]
    results = results_of([line], FULL.normalizers)
    assert results.sizes == {"in": [8], "between": [], "out": [16]}
    assert max(results.training_sizes) == 12


def judge(results: ClrsResults) -> list[ExperimentFinding]:
    return list(findings_of(results, comparisons_of(results)))


def verdicts(results: ClrsResults) -> list[str]:
    return [one.verdict for one in judge(results)]


def test_the_order_serves_the_claim_first_and_each_item_after_what_it_needs() -> None:
    ordered = items(FULL)
    mains = [(one.label, one.seed) for one in ordered if one.stage == "main"]
    assert mains[:6] == [(SOFTMAX, 0), (ADAPTIVE, 0), (SOFTMAX, 1), (ADAPTIVE, 1), (SOFTMAX, 2), (ADAPTIVE, 2)]
    assert [label for label, _ in mains[6:]] == [REFITTED, "ssmax", "entmax15", "asentmax"]
    for label in FULL.normalizers:
        first = ordered.index(ClrsItem("main", label, 0))
        assert all(ordered.index(ClrsItem("rate", label, 0, rate)) < first for rate in FULL.rates)
    assert len(ordered) == len(set(ordered)) == 6 * 3 + 10


def test_changes_of_the_plan() -> None:
    assert change_plan(FULL, ["steps=5", 'algorithms=["minimum"]']).algorithms == ("minimum",)
    with pytest.raises(ValueError, match="stepz"):
        change_plan(FULL, ["stepz=5"])
    for change in ("steps=five", "steps=1.5", 'steps="5"', "compiled=1", "rates=0.1", 'rates=["0.1"]', "dense=[1]"):
        with pytest.raises(ValueError, match=change.partition("=")[0]) as error:
            change_plan(FULL, [change])
        assert change.partition("=")[2] in str(error.value)
    assert change_plan(FULL, ["rates=[1]", "dense=[]"]).rates == (1,)
    assert FULL.only(["ssmax"]).normalizers == (SOFTMAX, "ssmax")
    with pytest.raises(ValueError, match="sparsemax"):
        FULL.only(["sparsemax"])


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> ClrsWorkspace:
    workspace = ClrsWorkspace.open(tmp_path_factory.mktemp("clrs"), TINY)
    workspace = replace(workspace, data=replace(workspace.data, test=workspace.data.test[::16]))
    assert not run_items(workspace, minutes=0.0, device="cpu")
    assert workspace.lines() == []
    assert run_items(workspace, device="cpu")
    return workspace


def test_every_item_is_one_line_and_is_not_repeated(finished: ClrsWorkspace, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = finished.lines()
    assert len(lines) == len(items(TINY)) == 3 * 2 + 5
    monkeypatch.setattr(work, "train_clrs", lambda *a, **b: pytest.fail("trained again"))
    assert run_items(finished, device="cpu")
    main = [line for line in lines if line["stage"] == "main"]
    assert {line["label"]: list(line["exact"]) for line in main} == {
        SOFTMAX: [OWN, ADAPTIVE, REFITTED], ADAPTIVE: [OWN], REFITTED: [OWN],
    }  # fmt: skip
    assert all(line["learning_rate"] == best_rate(lines, TINY, line["label"]) for line in main)
    assert (
        coefficients_of(lines)
        == next(one for one in main if (one["label"], one["seed"]) == (SOFTMAX, 0))["coefficients"]
    )


def test_the_refitted_model_is_trained_with_the_fitted_polynomial(finished: ClrsWorkspace) -> None:
    record = json.loads((finished.folder / "runs" / "main-re-fitted-seed-0" / "training.json").read_text())
    assert record["run"]["normalizer"] == ADAPTIVE
    assert record["run"]["normalizer_options"] == {"coefficients": coefficients_of(finished.lines())}


def test_records_of_several_machines_merge(finished: ClrsWorkspace, tmp_path: Path) -> None:
    lines = (finished.folder / RECORDS).read_text().splitlines(keepends=True)
    (tmp_path / "clrs-text-1.jsonl").write_text("".join(lines[:6]))
    with lzma.open(tmp_path / "clrs-text-2.jsonl.xz", "wt") as file:
        file.write("".join(lines[4:]))
    assert sorted(map(json.dumps, read_lines(tmp_path))) == sorted(line.strip() for line in lines)
    elsewhere = replace(finished, folder=tmp_path)
    assert len(elsewhere.lines()) == len(lines)
    assert replace(elsewhere, plan=replace(TINY, steps=3)).lines() == [], "another plan has other lines"
    assert len(replace(elsewhere, plan=replace(TINY, seeds=9)).lines()) == len(lines), "more seeds use the same lines"


def test_records_of_other_experiments_in_the_same_file_are_left_alone(tmp_path: Path) -> None:
    line = {"run": "a", "stage": "main", "label": "softmax", "seed": 0}
    vision, retrieval = {"stage": "model", "images": "x"}, {"run": "b", "task": "max", "size": 16, "seed": 0}
    records = "\n".join(map(json.dumps, (line, vision, retrieval)))
    (tmp_path / "records.jsonl").write_text(f"{records}\n")
    assert read_lines(tmp_path) == [line]


def test_an_item_that_another_process_trains_is_left_to_it(
    finished: ClrsWorkspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[str] = []
    monkeypatch.setattr(work, "_finish", lambda workspace, item, *others: trained.append(item.name))
    said: list[str] = []
    more = replace(finished, plan=replace(TINY, seeds=4))
    first, second = (item.name for item in items(more.plan) if item.seed == 2)
    with try_lock(finished.folder / work.LOCKS / f"{first}.lock"):
        assert not run_items(more, device="cpu", log=said.append)
    assert first in said[0]
    assert trained == [second]


def test_an_item_that_does_not_fit_is_not_started(finished: ClrsWorkspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "train_clrs", lambda *a, **b: pytest.fail("started"))
    monkeypatch.setattr(work, "_expected_seconds", lambda lines, item: 1e6)
    said: list[str] = []
    assert not run_items(replace(finished, plan=replace(TINY, seeds=3)), minutes=5, device="cpu", log=said.append)
    assert len(said) == 2
    assert "main-softmax-seed-2" in said[0]


def test_a_diverged_learning_rate_is_a_result(
    finished: ClrsWorkspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = work.train_clrs

    def diverge(out: Path, base: Any, recipe: Any, *others: Any, **options: Any) -> Any:
        if recipe.learning_rate == TINY.rates[0]:
            raise NotFiniteError("the loss is nan")
        return train(out, base, recipe, *others, **options)

    monkeypatch.setattr(work, "train_clrs", diverge)
    alone = replace(finished, folder=tmp_path, plan=replace(TINY, seeds=1).only([ADAPTIVE]))
    alone = replace(alone, plan=replace(alone.plan, normalizers=(SOFTMAX,)))
    assert run_items(alone, device="cpu")
    assert best_rate(alone.lines(), TINY, SOFTMAX) == TINY.rates[1]
    assert best_rate(alone.lines(), TINY, ADAPTIVE) is None


def test_an_algorithm_is_tested_over_seeds_and_questions_with_holms_correction() -> None:
    names = ["x", "y"]
    a, b = ([cells(0, right, names) for right in counts] for counts in ((20, 21, 22), (10, 12, 11)))
    for answers in (*a, *b):
        answers["y"]["16"] = "0" * 32
    lines = [made_line(SOFTMAX, seed, {OWN: answers}) for seed, answers in enumerate(b)]
    lines += [made_line(ADAPTIVE, seed, {OWN: answers}) for seed, answers in enumerate(a)]
    found = results_of(lines)
    x, y = compare(found.variants[1], found.variants[0], names, [16])
    bits = [[[int(bit) for bit in answers["x"]["16"]] for answers in side] for side in (a, b)]
    expected = difference_over_seeds_and_questions(np.array(bits[0]) - np.array(bits[1]))
    assert x.difference == expected
    assert x.difference.value == pytest.approx(10 / 32)
    assert (x.p_holm, x.outcome) == (pytest.approx(2 * expected.p), "better")
    assert (y.p_holm, y.outcome, y.unsolved) == (1.0, "no difference", True)
    (back, _) = compare(found.variants[0], found.variants[1], names, [16])
    assert back.outcome == "worse"


def test_one_seed_of_either_side_is_not_compared() -> None:
    names = ["x"]
    softmax = [made_line(SOFTMAX, seed, {OWN: cells(0, right, names)}) for seed, right in ((0, 0), (1, 1))]
    made = outcome([*softmax, made_line("entmax15", 0, {OWN: cells(0, 32, names)})], FULL.normalizers)
    assert made.tables["comparisons"].to_pylist() == []
    assert [row["better"] for row in made.tables["shares"].to_pylist()] == [None] * 4


def published_lines() -> list[Line]:
    with lzma.open(Path(__file__).parents[2] / "docs" / "results" / "clrs-text.jsonl.xz", "rt") as file:
        return [json.loads(line) for line in file]


def test_the_published_records_give_the_numbers_of_the_page() -> None:
    results = results_of(published_lines())
    comparisons = comparisons_of(results)
    outcomes = {where: [one.outcome for one in comparisons[ADAPTIVE, where]] for where in results.sizes}
    assert {where: (found.count("better"), found.count("worse")) for where, found in outcomes.items()} == {
        "in": (0, 3), "between": (0, 2), "out": (0, 0),
    }  # fmt: skip
    shares = {
        row["range"]: [round(100 * row[name], 2) for name in ("difference", "difference_low", "difference_high")]
        for row in outcome(published_lines(), FULL.normalizers).tables["shares"].to_pylist()
        if row["variant"] == ADAPTIVE
    }
    assert shares == {"in": [-6.57, -10.5, -2.64], "between": [-10.76, -18.62, -2.91], "out": [-1.85, -3.84, 0.14]}
    assert verdicts(results) == ["not decided", "not decided", "reproduces"]
    assert {algorithm for group in SAME_QUESTIONS for algorithm in group} < set(results.algorithms)


def test_the_published_records_give_the_numbers_of_the_papers_exceptions() -> None:
    results = results_of(published_lines())
    comparisons = comparisons_of(results)
    found = {
        (one.algorithm, where): (round(100 * one.difference.value, 1), one.outcome)
        for where in results.sizes for one in comparisons[ADAPTIVE, where] if one.algorithm in EXCEPTIONS
    }  # fmt: skip
    assert found == {
        ("bubble_sort", "in"): (-0.7, "no difference"), ("bubble_sort", "between"): (-24.7, "no difference"),
        ("bubble_sort", "out"): (-13.0, "no difference"), ("heapsort", "in"): (-0.3, "no difference"),
        ("heapsort", "between"): (-28.1, "no difference"), ("heapsort", "out"): (-9.6, "no difference"),
        ("mst_kruskal", "in"): (-9.0, "worse"), ("mst_kruskal", "between"): (-12.2, "no difference"),
        ("mst_kruskal", "out"): (0.0, "no difference"),
    }  # fmt: skip
    ours = next(one.ours for one in findings_of(results, comparisons) if one.claim.startswith("Exceptions"))
    assert "sizes of the training: bubble_sort -0.7 points, no difference (p = 1)" in ours


def test_comparisons_have_the_shares_of_both_sides_with_intervals() -> None:
    names = ["x"]
    lines = [made_line(SOFTMAX, seed, {OWN: cells(0, 8 + 8 * seed, names)}) for seed in (0, 1)]
    lines += [made_line("ssmax", seed, {OWN: cells(0, 20, names)}) for seed in (0, 1)]
    made = outcome(lines, FULL.normalizers)
    (row,) = (row for row in made.tables["comparisons"].to_pylist() if row["range"] == "out")
    for prefix, right, low_seed, high_seed in (("", 20, 20, 20), ("softmax_", 12, 8, 16)):
        expected = binomtest(right, 32).proportion_ci(method="wilson")
        assert row[f"{prefix}share"] == right / 32
        assert (row[f"{prefix}low"], row[f"{prefix}high"]) == pytest.approx((expected.low, expected.high))
        assert (row[f"{prefix}lowest_seed"], row[f"{prefix}highest_seed"]) == (low_seed / 32, high_seed / 32)


def test_tasks_with_the_same_questions_may_count_once() -> None:
    names = ["bfs", *SAME_QUESTIONS[0]]
    answers = cells(0, 32, names) | cells(0, 0, ["bfs"]) | cells(0, 16, ["quicksort"])
    found = results_of([made_line(SOFTMAX, seed, {OWN: answers}) for seed in (0, 1)])
    assert mean_shares(found.variants[0], names, [16], once=False) == pytest.approx([3.5 / 5] * 2)
    assert mean_shares(found.variants[0], names, [16], once=True) == pytest.approx([3.5 / 4 / 2] * 2)


def test_shares_have_the_range_of_the_seeds_and_the_interval_of_the_questions() -> None:
    names = ["bfs", "dfs"]
    lines = [made_line(SOFTMAX, seed, {OWN: cells(0, right, names)}) for seed, right in ((0, 8), (1, 24))]
    made = outcome([*lines, made_line(ADAPTIVE, 0, {OWN: cells(0, 16, names)})], FULL.normalizers)
    softmax, adaptive = (row for row in made.tables["shares"].to_pylist() if row["range"] == "out")
    assert (softmax["share"], softmax["lowest_seed"], softmax["highest_seed"]) == (0.5, 0.25, 0.75)
    expected = binomtest(32, 64).proportion_ci(method="wilson")
    assert (adaptive["low"], adaptive["high"]) == pytest.approx((expected.low, expected.high))
    bands = made.figures["clrs-text"].axes[0].collections
    at_16 = [sorted(band.get_paths()[0].vertices[:, 1][band.get_paths()[0].vertices[:, 0] == 16]) for band in bands]
    assert (at_16[0][0], at_16[0][-1]) == (25, 75)
    one = binomtest(16, 32).proportion_ci(method="wilson")
    assert (at_16[1][0], at_16[1][-1]) == pytest.approx((100 * one.low, 100 * one.high))
    assert [row["held_out_loss"] for row in made.tables["trainings"].to_pylist()] == [1.0] * 3


def test_other_normalizers_have_panels_of_their_own_in_the_figure_of_the_entropy() -> None:
    few = {OWN: cells(10, 5, NAMES[:2])}  # a panel each
    softmax = [made_line(SOFTMAX, 0, few), made_line(ADAPTIVE, 0, few)]
    assert len(figures_of(results_of(softmax))["entropy"].axes) == 2
    panels = figures_of(results_of([*softmax, made_line("entmax15", 0, few)]))["entropy"].axes
    legends = [[text.get_text() for text in panels[first].get_legend().get_texts()] for first in (0, 2)]
    assert legends == [[SOFTMAX, ADAPTIVE], [SOFTMAX, "entmax15"]]


def test_seeds_that_answer_the_same_questions_do_not_narrow_the_interval() -> None:
    lines = [made_line(SOFTMAX, seed, {OWN: cells(16, 0)}) for seed in range(3)]
    found = results_of(lines)
    cell = share_of(found.variants[0], ["heapsort"], [8])
    expected = binomtest(16, 32).proportion_ci(method="wilson")
    assert (cell.right, cell.answers, cell.questions, cell.share) == (48, 96, 32, 0.5)
    assert (cell.low, cell.high) == pytest.approx((expected.low, expected.high))
    assert found.sizes == {"in": [8], "between": [], "out": [16]}
    assert found.variants[0].mean_entropy("entropy_nats") == {8: 2.0, 16: 2.0}
    row = next(row for row in outcome(lines, []).tables["accuracy"].to_pylist() if row["right"] == 48)
    assert (row["questions"], row["answers"], row["low"], row["high"]) == (32, 96, cell.low, cell.high)


def test_an_interval_of_no_right_answer_has_a_width() -> None:
    found = results_of([made_line(SOFTMAX, seed, {OWN: cells(32, 0)}) for seed in range(3)])
    for size, share in ((8, 1.0), (16, 0.0)):
        cell = share_of(found.variants[0], ["heapsort"], [size])
        expected = binomtest(int(32 * share), 32).proportion_ci(method="wilson")
        assert (cell.share, cell.low, cell.high) == pytest.approx((share, expected.low, expected.high))
    assert np.isnan(share_of(found.variants[0], ["heapsort"], [9]).low)


def drawn_variant(answers: dict[str, np.ndarray[Any, Any]]) -> ClrsVariant:
    """answers: algorithm -> right or not, seeds x questions of size 16."""
    exact: dict[int, Cells] = {
        seed: {name: {"16": "".join("01"[bit] for bit in right[seed].astype(int))} for name, right in answers.items()}
        for seed in range(len(next(iter(answers.values()))))
    }
    return ClrsVariant(SOFTMAX, OWN, exact, {}, 1e-3)


@pytest.mark.parametrize(("seeds_agree", "least", "most"), [(1.0, 0.93, 0.97), (0.5, 0.95, 1.0), (0.0, 0.95, 1.0)])
def test_intervals_cover_the_share_however_much_the_seeds_agree(seeds_agree: float, least: float, most: float) -> None:
    """Mean coverage over shares of 5 to 95 %: a single Wilson interval of 32 answers has 92 to 98 %."""
    draw = np.random.default_rng(0)
    covered = []
    for share in np.linspace(0.05, 0.95, 10):
        for _ in range(100):
            one, own = draw.random((1, 32)) < share, draw.random((3, 32)) < share
            answers = np.where(draw.random((1, 32)) < seeds_agree, one, own)
            cell = share_of(drawn_variant({"x": answers}), ["x"], [16])
            covered.append(cell.low <= share <= cell.high)
    assert least <= np.mean(covered) <= most


def test_intervals_over_tasks_cover_the_share_where_tasks_have_the_same_questions() -> None:
    """The sorts have half of their answers right, and always together; the other tasks hardly any."""
    draw = np.random.default_rng(0)
    sorts, others = SAME_QUESTIONS[0], [f"task_{n}" for n in range(12)]
    covered = []
    for _ in range(300):
        together = np.repeat(draw.random((1, 32)) < 0.5, 3, 0)
        answers = dict.fromkeys(sorts, together) | {name: draw.random((3, 32)) < 0.02 for name in others}
        total = share_of(drawn_variant(answers), list(answers), [16])
        assert total.questions == 13 * 32
        covered.append(total.low <= (4 * 0.5 + 12 * 0.02) / 16 <= total.high)
    assert 0.93 <= np.mean(covered) <= 1.0


def test_published_intervals_of_three_seeds_are_those_of_32_questions() -> None:
    row = next(
        row for row in outcome(published_lines(), FULL.normalizers).tables["accuracy"].to_pylist()
        if (row["variant"], row["algorithm"], row["size"]) == (SOFTMAX, "bubble_sort", 14)
    )  # fmt: skip
    assert (row["questions"], row["answers"], row["right"]) == (32, 96, 37)
    assert (row["low"], row["high"]) == pytest.approx((0.238, 0.558), abs=5e-4)
    assert (row["lowest_seed"], row["highest_seed"]) == (1 / 32, 29 / 32)


def test_sizes_between_those_of_the_training_are_compared_apart() -> None:
    """Trained on 4, 8 and 12: size 7 is no larger, and yet a size that the model has never seen."""

    def answers(right: int) -> dict[str, dict[str, str]]:
        return {name: {"7": f"{'1' * right:0<32}", "8": "1" * 32, "16": "0" * 32} for name in NAMES}

    lines = [made_line(SOFTMAX, seed, {OWN: answers(20)}) for seed in (0, 1)]
    results = results_of(lines + [made_line(ADAPTIVE, seed, {OWN: answers(0)}) for seed in (0, 1)])
    assert results.sizes == {"in": [8], "between": [7], "out": [16]}
    found = comparisons_of(results)
    outcomes = {where: {one.outcome for one in found[ADAPTIVE, where]} for where in ("in", "between", "out")}
    assert outcomes == {"in": {"no difference"}, "between": {"worse"}, "out": {"no difference"}}
    assert [all(one.unsolved for one in found[ADAPTIVE, where]) for where in ("in", "between", "out")] == [
        False, False, True,
    ]  # fmt: skip


def test_better_on_most_reproduces_and_the_exceptions_are_judged_apart() -> None:
    results = trained(cells(20, 24) | cells(20, 4, list(EXCEPTIONS)), at_test=cells(20, 4))
    assert verdicts(results) == ["reproduces", "reproduces", "reproduces"]
    first, second, _ = judge(results)
    assert "better beyond chance on 27 of 30, worse on 0" in first.ours
    assert "heapsort +0.0 points" in second.ours


def test_no_difference_decides_nothing_and_better_exceptions_are_no_exceptions() -> None:
    assert verdicts(trained(cells(20, 4), at_test=cells(20, 30))) == ["not decided", "not decided", "does not"]
    assert verdicts(trained(cells(20, 30), at_test=cells(20, 4)))[:2] == ["reproduces", "does not"]
    few = cells(20, 4) | cells(20, 30, NAMES[10:15])
    assert verdicts(trained(few, at_test=cells(20, 4)))[0] == "partly"
    worse_inside = few | cells(0, 4, NAMES[20:])
    assert verdicts(trained(worse_inside, at_test=cells(20, 4)))[:2] == ["does not", "not decided"]


def test_one_seed_or_few_algorithms_give_no_verdict() -> None:
    assert set(verdicts(trained(cells(20, 30), cells(20, 4), seeds=1))) == {"not tested"}
    names = NAMES[:4]
    lines = [made_line(label, seed, {OWN: cells(9, 9, names)}) for label in (SOFTMAX, ADAPTIVE) for seed in (0, 1)]
    assert set(verdicts(results_of(lines))) == {"not tested"}


def test_there_is_a_panel_per_algorithm_and_a_row_per_cell() -> None:
    names = NAMES[:7]
    lines = [made_line(label, seed, {OWN: cells(20, 24, names)}) for label in (SOFTMAX, ADAPTIVE) for seed in (0, 1)]
    made = outcome(lines, FULL.normalizers)
    titles = [axes.get_title(loc="left") for axes in made.figures["clrs-text"].axes if axes.get_visible()]
    assert titles == [name.replace("_", " ") for name in sorted(names)]
    assert made.tables["accuracy"].num_rows == 2 * 7 * 2
    assert made.tables["comparisons"].num_rows == 2 * 7
    assert len(made.figures["entropy"].axes[0].lines) == 2
    assert "ssmax" in made.summary, "what is missing is named"
    assert made.parameters["missing"] == [REFITTED, "ssmax", "entmax15", "asentmax"]


@pytest.mark.parametrize("count", [1, 2, 3, 30])
def test_the_note_of_a_figure_is_not_cut_at_its_edge(count: int) -> None:
    figures = figures_of(results_of([made_line(SOFTMAX, 0, {OWN: cells(20, 24, NAMES[:count])}, base="from-scratch")]))
    figure = figures["clrs-text"]
    box, label = text_boxes(figure, "Bands of", "problem size")
    assert box.x1 <= figure.bbox.x1
    assert figure.bbox.y0 - 1 <= box.y0, "the box is up to a pixel larger than the letters"
    assert box.y1 < label.y0


def text_boxes(figure: Figure, *starts: str) -> list[Any]:
    return [
        next(text for text in figure.texts if text.get_text().startswith(start)).get_window_extent() for start in starts
    ]


def test_the_stage_trains_and_the_experiment_draws_its_records(
    finished: ClrsWorkspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "run_items", lambda *a, **b: pytest.fail("trained again"))
    (tmp_path / RECORDS).write_bytes((finished.folder / RECORDS).read_bytes())
    result = runner.invoke(app, ["lab", "reproduce", "clrs-text", "--out", str(tmp_path), "--device", "cpu", "--json"])
    assert result.exit_code == 0, result.output
    (shown,) = json.loads(result.stdout)["experiments"]
    assert shown["parameters"]["seeds"][SOFTMAX] == 2
    assert (tmp_path / "clrs-text" / "clrs-text.png").is_file()


def test_the_stage_from_the_command_line(tmp_path: Path) -> None:
    changes = [
        f"--set={one}" for one in ("steps=1", "rate_steps=1", "width=8", "observed=0", 'normalizers=["softmax"]')
    ]
    call = ["lab", "reproduce", "clrs-text", "--quick", "--stage", "train", "--device", "cpu"]
    call += ["--out", str(tmp_path), *changes]
    stopped = runner.invoke(app, [*call, "--minutes", "0"])
    assert stopped.exit_code == 3, stopped.output
    result = runner.invoke(app, [*call, "--set=at_inference=[]"])
    assert result.exit_code == 0, result.output
    assert "main-softmax-seed-0" in result.stderr
    assert [line["stage"] for line in read_lines(tmp_path)] == ["rate", "rate", "main"]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--stage", "main", "--quick"], "'main'"),
        (["--stage", "train"], "--text"),
        (["--stage", "train", "--quick", "--seeds", "1"], "--seeds"),
        ([], "--stage train"),
        (["--model", "bundled", "--quick"], "--model"),
    ],
)
def test_wrong_calls_are_explained(flags: list[str], named: str, tmp_path: Path) -> None:
    result = runner.invoke(app, ["lab", "reproduce", "clrs-text", "--out", str(tmp_path / "out"), *flags])
    assert result.exit_code == 2, result.output
    assert named in result.stderr
