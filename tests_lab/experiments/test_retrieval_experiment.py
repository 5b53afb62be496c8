"""From records, found or trained, to tables, figures and verdicts."""

import json
import lzma
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from attnorm.figures import style
from attnorm.files import read_jsonl
from attnorm_lab.experiments import catalogue
from attnorm_lab.experiments.experiment import ExperimentSubject
from attnorm_lab.experiments.retrieval import experiment, plan
from attnorm_lab.experiments.retrieval.experiment import RetrievalNumbers, findings, summary
from attnorm_lab.experiments.retrieval.plan import (
    PAPERS_RECIPE,
    PRINTED_ADAPTIVE,
    PRINTED_SIZES,
    PRINTED_SOFTMAX,
    RetrievalPlan,
    TrainingRecords,
)
from attnorm_lab.experiments.retrieval.results import lines_of, scales_of
from tests_lab.experiments.retrieval_records import SEEDS, found, record, training


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


def test_the_experiment_is_found_under_its_name() -> None:
    found = catalogue.experiment("retrieval")
    assert found.name == "retrieval"
    assert not found.needs_model
