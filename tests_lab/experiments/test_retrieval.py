"""Who takes part, and from records, found or trained, to statistics, tables, figures and verdicts."""

import json
import lzma
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import ttest_rel

from attnorm.arithmetic import holm
from attnorm.figures import style
from attnorm.files import read_jsonl
from attnorm.normalizers.contract import Normalizer
from attnorm.normalizers.registry import BUILT_IN, get
from attnorm_lab.experiments.experiment import ExperimentSubject
from attnorm_lab.experiments.retrieval import experiment, plan
from attnorm_lab.experiments.retrieval.experiment import RetrievalNumbers, findings, summary
from attnorm_lab.experiments.retrieval.plan import (
    ADDED_SINCE,
    BASELINE,
    BEST,
    FOR_SETS,
    OUR_RECIPE,
    PAPERS_RECIPE,
    PARTS,
    PRINTED_ADAPTIVE,
    PRINTED_SIZES,
    PRINTED_SOFTMAX,
    RetrievalPlan,
    Section,
    Training,
    TrainingRecords,
    collect,
    our_recipe,
)
from attnorm_lab.experiments.retrieval.plan import plan as planned
from attnorm_lab.experiments.retrieval.results import (
    compare_with,
    lines_of,
    predicted_right,
    read_hard,
    scales_of,
)
from attnorm_lab.training.retrieval.data import CLASSES, RetrievalRecipe
from attnorm_lab.training.retrieval.evaluate import Trials
from attnorm_lab.training.retrieval.model import run_key

SEEDS = (0, 1, 2)


def training(
    section: Section = "paper",
    label: str = "softmax",
    sizes: tuple[int, ...] = (16, 64),
    others: tuple[str, ...] = ("hard",),
    **changed: Any,
) -> Training:
    task = section if section in ("recall", "majority") else "max"
    recipe = RetrievalRecipe(**{"steps": 3, "batch": 4, "width": 8, **changed})
    normalizer = "softmax" if section in ("parts", "steps") else label
    return Training(section, label, task, normalizer, recipe, Trials(sizes=sizes, sets=10, others=others))


def record(of: Training, size: int, seed: int, tested_with: str, accuracy: float, **changed: Any) -> dict[str, Any]:
    usual = {
        "run": run_key(of.task, of.normalizer, of.recipe, changed.get("device", "cpu")),
        "task": of.task, "normalizer": of.normalizer, "device": "cpu", "seed": seed, "size": size, "sets": 10,
        "tested_with": tested_with, "accuracy": accuracy, "logits_wrong": 0.75 * (1 - accuracy),
        "dispersed": 0.25 * (1 - accuracy), "logits_right": accuracy, "winner_weight": 0.5, "slope": 100.0,
        "leak": 1e-3, "learned": {},
    }  # fmt: skip
    return {**usual, **changed}


def found(
    of: Training, percents: Mapping[str, Sequence[float]], jitter: float = 0.1, **changed: Any
) -> TrainingRecords:
    """% right by test, one for each size; seeds lie `jitter` points apart around it."""
    records = [
        record(of, size, seed, name, (percent + jitter * (seed - 1)) / 100, **changed)
        for name, numbers in percents.items()
        for size, percent in zip(of.trials.sizes, numbers, strict=True)
        for seed in SEEDS
    ]
    return TrainingRecords(of, records, True)


def quiet(what: str, done: int, total: int) -> None:
    pass


SMALL = RetrievalPlan(
    SEEDS,
    (
        training("paper", "softmax"),
        training("paper", "ssmax"),
        training("parts", "paper's recipe"),
        training("parts", "our recipe", cosine=True),
        training("ours", "softmax", cosine=True),
        training("recall", "softmax"),
        training("majority", "softmax"),
    ),
)


def written(path: Path, members: list[TrainingRecords]) -> None:
    lines = [json.dumps(one) for member in members for one in member.records]
    with lzma.open(path, "wt") as file:
        file.write("\n".join(lines) + "\n")


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("nothing is to be trained")

    monkeypatch.setattr(plan, "train_retrieval", refuse)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of parts after a run of the small plan."""
    parts = tmp_path_factory.mktemp("out") / "parts" / "retrieval-key"
    plan.collect(SMALL, parts / "training", [], "cpu", quiet)
    return parts


def test_a_run_gives_tables_and_figures_of_what_was_trained(
    trained: Path, no_training: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "plan", lambda **options: SMALL)
    with style():
        outcome = experiment.run(ExperimentSubject(quick=True, device="cpu"), quiet, trained)
    assert set(outcome.figures) == {"accuracy", "parts"}
    rows = outcome.tables["accuracy"].to_pylist()
    records = read_jsonl(trained / "training" / "records.jsonl")
    for row in rows:
        numbers = [
            r["accuracy"] for r in records
            if (r["normalizer"], r["task"], r["size"], r["tested_with"], r["cosine"])
            == (row["normalizer"], row["task"], row["size"], row["tested_with"], row["section"] == "ours"
                or row["label"] == "our recipe")
        ]  # fmt: skip
        assert len(numbers) == row["seeds"] == 3
        assert row["accuracy"] == pytest.approx(sum(numbers) / 3)
    assert len(rows) == len(SMALL.trainings) * 2 * 2
    assert {one.verdict for one in outcome.findings} == {"not tested"}
    assert json.loads(json.dumps(outcome.parameters))["seeds"] == list(SEEDS)


def test_records_of_a_gpu_are_enough_and_what_they_lack_is_named(
    tmp_path: Path, no_training: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine without one nothing is trained instead."""
    monkeypatch.setattr(experiment, "plan", lambda **options: SMALL)
    half = found(SMALL.trainings[1], {"own": (97, 90)}, device="cuda")
    written(
        tmp_path / "records.jsonl.xz",
        [found(SMALL.trainings[0], {"own": (98, 94), "hard": (99, 95)}, device="cuda"), half],
    )
    with style():
        outcome = experiment.run(ExperimentSubject(), quiet, tmp_path / "parts" / "retrieval-key")
    assert outcome.parameters["device"] == "cuda"
    assert [one["complete"] for one in outcome.parameters["trainings"]] == [True, False, True]
    assert "Not finished: paper: ssmax; parts: our recipe; ours: all; recall: all; majority: all." in outcome.summary
    assert "98.0, 94.0 % of sets of 16, 64 items" in outcome.summary


def test_records_of_one_device_only(tmp_path: Path, no_training: None) -> None:
    """Data differ between devices: rows of both could not be paired."""
    first = SMALL.trainings[0]
    both = [
        found(first, {"own": (98, 94), "hard": (99, 95)}, device="cuda"), found(first, {"own": (1, 1), "hard": (1, 1)})
    ]  # fmt: skip
    written(tmp_path / "some.jsonl.xz", both)
    (taken,) = plan.collect(RetrievalPlan(SEEDS, (first,)), tmp_path / "x", [tmp_path / "some.jsonl.xz"], "cpu", quiet)
    assert {one["device"] for one in taken.records} == {"cpu"}
    assert taken.complete


def test_the_rest_is_trained_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    train: Callable[..., Any] = plan.train_retrieval

    def watched(normalizers: list[str], *args: Any, **options: Any) -> Any:
        calls.extend(normalizers)
        return train(normalizers, *args, **options)

    monkeypatch.setattr(plan, "train_retrieval", watched)
    two = RetrievalPlan(SEEDS, SMALL.trainings[:2])
    written(tmp_path / "known.jsonl.xz", [found(two.trainings[0], {"own": (98, 94), "hard": (99, 95)})])
    for _ in range(2):
        taken = plan.collect(two, tmp_path / "t", [tmp_path / "known.jsonl.xz"], "cpu", quiet)
        assert all(one.complete for one in taken)
    assert calls == ["ssmax"]


def test_what_a_cpu_began_is_finished_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there is a GPU by now: rows of both could not be paired."""
    devices: list[str | None] = []

    def noted(*args: Any, device: str | None, **options: Any) -> Any:
        devices.append(device)
        return SimpleNamespace(records=[])

    monkeypatch.setattr(plan, "train_retrieval", noted)
    monkeypatch.setattr(plan, "chosen_device", lambda name: torch.device(name or "cuda"))
    two = RetrievalPlan(SEEDS, SMALL.trainings[:2])
    for device, known in (("cpu", "cpu"), (None, "cuda")):
        written(tmp_path / f"{known}.jsonl.xz", [found(two.trainings[0], {"own": (98, 94)}, device=known)])
        plan.collect(two, tmp_path / "t", [tmp_path / f"{known}.jsonl.xz"], None, quiet)
        assert devices == [device, device]
        devices.clear()


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl.xz"
    path.write_bytes(b"not packed")
    with pytest.raises(ValueError, match=r"records\.jsonl\.xz"):
        read_jsonl(path)
    assert read_jsonl(tmp_path / "nothing.jsonl.xz") == []


def judge_claims(own: list[float], hard: list[float], adaptive: list[float], ours: list[float]) -> dict[str, str]:
    """Verdicts by the first word of the claim."""
    at = tuple(PRINTED_SIZES)
    paper = training("paper", "softmax", at, ("hard", "adaptive_temperature"))
    members = [
        found(paper, {"own": own, "hard": hard}),
        found(training("ours", "softmax", at, cosine=True), {"own": ours, "hard": ours}),
    ]
    # Seeds further apart than those of "own": differences that are equal in three seeds are no proof.
    members[0].records.extend(found(paper, {"adaptive_temperature": adaptive}, jitter=0.2).records)
    for member in members:
        for one in member.records:  # what hard attention cannot find has wrong logits
            right = hard[at.index(one["size"])] / 100 if member is members[0] else one["accuracy"]
            one["logits_wrong"] = min(1 - right, 1 - one["accuracy"])
            one["dispersed"] = 1 - one["accuracy"] - one["logits_wrong"]
    numbers = RetrievalNumbers(lines_of(members), scales_of(members))
    assert summary(numbers, [], quick=False)
    return {one.claim.split()[0]: one.verdict for one in findings(numbers, quick=False)}


PRINTED, BETTER = list(PRINTED_SOFTMAX.values()), list(PRINTED_ADAPTIVE.values())
GOOD = [99.0] * 6


def test_verdicts_follow_the_numbers() -> None:
    as_printed = judge_claims(PRINTED, GOOD, [value + 3 for value in PRINTED], PRINTED)
    assert as_printed == {"A": "reproduces", "Adaptive": "reproduces", "The": "reproduces", "Softmax": "reproduces"}
    other = judge_claims(GOOD, [value / 2 for value in GOOD], [value - 1 for value in GOOD], GOOD)
    assert other == {"A": "does not", "Adaptive": "does not", "The": "does not", "Softmax": "partly"}
    slightly = judge_claims([value - 10 for value in PRINTED], [value - 5 for value in PRINTED], PRINTED, GOOD)
    assert slightly["A"] == "partly"
    assert record(training(), 16, 0, "own", 0.5)["dispersed"] == 0.125


def test_the_paper_is_judged_by_a_run_of_as_many_steps() -> None:
    at, tests = tuple(PRINTED_SIZES), ("hard", "adaptive_temperature")
    short = found(training("paper", "softmax", at, tests), dict.fromkeys(("own", *tests), PRINTED))
    long = found(training("steps", PAPERS_RECIPE, at, tests, steps=9), dict.fromkeys(("own", *tests), GOOD))
    numbers = RetrievalNumbers(lines_of([short, long]), scales_of([short, long]))
    fall = findings(numbers, quick=False)[0]
    assert fall.verdict == "does not"
    assert fall.ours.startswith("99.0, 99.0")
    assert "of the 100,000 steps: 98.6, 94.3" in fall.why
    assert "After 100,000 steps, as in the paper, it is right in 99.0" in summary(numbers, [], quick=False)


def test_differences_are_paired_by_seed_whatever_the_order() -> None:
    of = training()
    base = [record(of, 16, seed, "own", value) for seed, value in enumerate((0.5, 0.7, 0.6))]
    other = [record(of, 16, seed, "own", value) for seed, value in ((2, 0.65), (0, 0.52), (1, 0.78))]
    found_ = compare_with(base, {("ssmax", "own"): other}, [16])[("ssmax", "own"), 16]
    assert found_.mean.value == pytest.approx(0.05)
    assert found_.p == pytest.approx(ttest_rel([0.52, 0.78, 0.65], [0.5, 0.7, 0.6]).pvalue)
    assert found_.p == found_.p_holm


def test_equal_rows_do_not_differ_and_a_single_seed_says_nothing() -> None:
    of = training()
    base = [record(of, 16, seed, "own", 0.5) for seed in range(3)]
    assert compare_with(base, {("a", "own"): base}, [16])[("a", "own"), 16].p == 1
    assert compare_with(base, {("a", "own"): base[:1]}, [16]) == {}


@pytest.mark.parametrize("seeds", [2, 3, 6])
def test_a_difference_that_is_equal_in_few_seeds_is_no_proof(seeds: int) -> None:
    of = training()
    base, other = ([record(of, 16, seed, "own", value) for seed in range(seeds)] for value in (0.5, 0.75))
    assert compare_with(base, {("a", "own"): other}, [16])[("a", "own"), 16].p == 2 ** (1 - seeds)


def test_hard_attention_on_both_sides_compares_what_training_changed() -> None:
    members = [
        found(training(label="softmax"), {"own": (90, 80), "hard": (90, 85)}),
        found(training(label="sparsemax"), {"own": (60, 50), "hard": (95, 91)}, jitter=0.3),
        found(training(section="recall", label="ssmax"), {"own": (91, 81), "hard": (50, 40)}),
    ]
    small, large = read_hard(members).to_pylist()
    assert (small["label"], small["size"], large["size"]) == ("sparsemax", 16, 64), "recall has no softmax"
    assert (large["accuracy"], large["softmax"], large["difference"]) == pytest.approx((0.91, 0.85, 0.06))
    expected = ttest_rel([0.907, 0.91, 0.913], [0.849, 0.85, 0.851])
    assert large["p_holm"] == large["p_paired_t"] == pytest.approx(expected.pvalue)


def test_the_correction_covers_the_rows_of_a_table_and_no_others() -> None:
    members = [
        found(training(label="softmax"), {"own": (90, 80), "hard": (90, 85)}),
        found(training(label="ssmax"), {"own": (91, 81), "hard": (50, 40)}, jitter=0.3),
        found(training(label="entmax15"), {"own": (90, 78), "hard": (50, 40)}, jitter=0.2),
    ]
    lines = lines_of(members)
    differences = {(line.label, line.row.tested_with): line.difference for line in lines if line.row.size == 64}
    assert differences["softmax", "own"] is None
    assert differences["ssmax", "hard"] is None
    compared = [differences[key] for key in (("softmax", "hard"), ("ssmax", "own"), ("entmax15", "own"))]
    assert all(difference is not None for difference in compared)
    assert holm([d.p for d in compared if d]) == [d.p_holm for d in compared if d]


@pytest.mark.parametrize(("leak", "size"), [(2e-3, 64), (2e-3, 512), (1e-2, 512)])
def test_wrong_logits_are_predicted_as_brute_force_finds_them(leak: float, size: int) -> None:
    generator = np.random.default_rng(1)
    sets = 4000
    priority, label = generator.random((sets, size)), generator.integers(CLASSES, size=(sets, size))
    offset = leak * generator.standard_normal((sets, CLASSES))
    logit = priority + np.take_along_axis(offset, label, 1)
    right = float((logit.argmax(1) == priority.argmax(1)).mean())
    assert predicted_right(leak, size) == pytest.approx(right, abs=0.03)


def test_the_prediction_goes_from_certainty_to_chance() -> None:
    assert predicted_right(0, 10**6) == 1
    assert predicted_right(1, 10**6) == pytest.approx(1 / CLASSES, abs=0.01)


def test_the_leak_among_the_contenders_is_taken_where_it_is_known() -> None:
    coarse = found(training(sizes=(1024,)), {"own": (50,)})
    fine = found(training(sizes=(1024,)), {"own": (50,)}, slope_at_top=400.0, leak_at_top=1e-5)
    (first,), (second,) = scales_of([coarse]), scales_of([fine])
    assert second.predicted_right > first.predicted_right
    assert second.slope == first.slope == 100
    falling = found(training(sizes=(1024,)), {"own": (50,)}, leak=None)
    assert scales_of([falling]) == []


def test_a_leak_over_all_priorities_says_nothing_about_the_top_after_squeezed_training() -> None:
    (scale,) = scales_of([found(training(sizes=(1024,)), {"own": (50,)}, squeezed=0.9)])
    assert scale.predicted_right is None
    (known,) = scales_of(
        [found(training(sizes=(1024,)), {"own": (50,)}, squeezed=0.9, slope_at_top=9.0, leak_at_top=0.1)]
    )
    assert known.predicted_right == pytest.approx(predicted_right(0.1, 1024))


def test_every_normalizer_for_which_a_set_has_no_order_takes_part() -> None:
    trained = {one.label for one in planned().of("paper")}
    for name in BUILT_IN:
        made = get(name)
        fits = isinstance(made, Normalizer) and made.properties.permutation_equivariant
        left_out = name in (*ADDED_SINCE, "adaptive_temperature")
        assert (FOR_SETS.get(name, name) in trained) == (fits and not left_out), name
    assert "ssa" in {one.label for one in planned(only=["ssa"]).of("paper")}
    assert {"softmax", "ssmax", "kneemax:share=1", "hard"} <= trained
    assert not {"stick_breaking", "local", "scale_invariant"} & trained


@pytest.mark.parametrize("quick", [False, True])
def test_conditions_are_equal_within_a_comparison(quick: bool) -> None:
    made = planned(quick=quick)
    for section in ("paper", "ours", "recall", "majority"):
        members = made.of(section)
        assert members[0].label == BASELINE
        assert len({(one.recipe, one.task, one.trials.sizes, one.trials.sets) for one in members}) == 1
    assert made.of("paper")[0].recipe == made.of("parts")[0].recipe
    assert all(one.recipe.largest == 16 for one in made.trainings)
    if not quick:
        assert len(made.seeds) >= 10
        assert made.of("paper")[0].recipe == RetrievalRecipe(steps=20_000)


def test_the_parts_are_added_and_taken_away_one_by_one() -> None:
    recipes = {one.label: one.recipe for one in planned().of("parts")}
    paper, whole = recipes[PAPERS_RECIPE], recipes[OUR_RECIPE]
    assert whole == our_recipe(paper)
    for part, fields in PARTS.items():
        for name, value in fields.items():
            assert getattr(paper, name) != value
            assert getattr(whole, name) == value
            assert getattr(recipes[f"+ {part}"], name) == value
            assert getattr(recipes[f"ours without {part}"], name) == getattr(paper, name)
    keys = [run_key("max", BASELINE, recipe, "cpu") for recipe in recipes.values()]
    assert len(set(keys)) == len(keys)
    (best,) = (one.recipe for one in planned().of("steps") if one.label == "best")
    assert all(getattr(best, name) == value for name, value in BEST.items())
    assert best.steps == 100_000


def test_only_some_normalizers_and_softmax_to_compare_with() -> None:
    assert [one.label for one in planned(only=["ssmax"]).of("ours")] == ["softmax", "ssmax"]
    assert [one.label for one in planned(only=["topk"], quick=True).of("ours")] == ["softmax", "topk:k=4"]
    fixed_knee = planned(only=["kneemax:knee=0.25"])
    assert [one.label for one in fixed_knee.of("ours", "majority")] == ["softmax", "kneemax:knee=0.25"] * 2
    assert planned(seed=5).seeds[0] == 5
    with pytest.raises(ValueError, match=r"softmax.*'local'"):
        planned(only=["local"])


def test_the_published_records_are_those_of_the_plan(tmp_path: Path) -> None:
    published = Path(__file__).parents[2] / "docs" / "results" / "retrieval.jsonl.xz"
    found = collect(planned(), tmp_path, [published], None, lambda what, done, of: None)
    assert all(one.complete for one in found)
    assert not list(tmp_path.iterdir()), "nothing was left to train"
