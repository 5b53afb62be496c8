"""`reproduce vision`: one record per model, resuming by records, and how records become findings."""

import json
import lzma
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from attnorm.cli import app
from attnorm.files import append_jsonl, read_jsonl
from attnorm.run_folder import try_lock
from attnorm_lab.experiments import vision
from attnorm_lab.experiments.experiment import ExperimentSubject, no_progress
from attnorm_lab.experiments.run import reproduce
from attnorm_lab.training.vision.model import VisionSettings

QUICK = ExperimentSubject(quick=True, device="cpu")
PLAN = replace(vision.QUICK, epochs=((8, 1),))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[vision.Record]]:
    parts = tmp_path_factory.mktemp("out") / "parts" / "vision"
    return parts, vision.records_of(PLAN, QUICK, no_progress, parts)


def test_every_model_has_a_record(trained: tuple[Path, list[vision.Record]]) -> None:
    parts, records = trained
    assert [record["model"] for record in records] == ["softmax", "soft", "linear"]
    for record in records:
        assert record["tokens"] == 4
        assert 0 <= record["correct"] <= record["tested_on"] == 64
        assert record["images_per_second"] > 0
        assert record["peak_bytes"] is None  # on a CPU
    assert read_jsonl(parts / vision.RESULTS) == records


def test_finished_models_are_not_trained_again(
    trained: tuple[Path, list[vision.Record]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, records = trained
    monkeypatch.setattr(vision, "train_vit", lambda *_, **__: pytest.fail("trained again"))
    assert vision.records_of(PLAN, QUICK, no_progress, parts) == records
    of_a_gpu = [{**one, "settings": {**one["settings"], "dtype": "bfloat16"}} for one in records]
    append_jsonl(tmp_path / vision.RECORDS, of_a_gpu)
    assert vision.records_of(PLAN, QUICK, no_progress, tmp_path / "parts" / "vision") == of_a_gpu
    assert vision.records_of(PLAN, replace(QUICK, only=("soft",)), no_progress, parts) == [records[1]]


def test_a_model_that_another_process_trains_is_left_to_it(
    trained: tuple[Path, list[vision.Record]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, records = trained

    def train(settings: VisionSettings, *_: Any, **__: Any) -> tuple[None, vision.Record]:
        return None, records[1] | {"settings": settings.as_dict()}

    monkeypatch.setattr(vision, "train_vit", train)
    parts = tmp_path / "parts" / "vision"
    with try_lock(parts / "locks" / "softmax, patch 8, seed 0.lock"):
        found = vision.records_of(PLAN, QUICK, no_progress, parts)
    assert [record["model"] for record in found] == ["soft", "linear"]


def test_records_of_other_settings_are_not_used(
    trained: tuple[Path, list[vision.Record]], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, records = trained
    seen: list[float] = []

    def train(settings: VisionSettings, *_: Any, **__: Any) -> tuple[None, vision.Record]:
        seen.append(settings.learning_rate)
        return None, records[0] | {"settings": settings.as_dict()}

    monkeypatch.setattr(vision, "train_vit", train)
    plan = replace(PLAN, settings=replace(PLAN.settings, learning_rate=0.5))
    vision.records_of(plan, replace(QUICK, only=("softmax",)), no_progress, parts)
    assert seen == [0.5]


def test_the_full_plan_needs_images(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--images"):
        vision.records_of(vision.FULL, ExperimentSubject(device="cpu"), no_progress, tmp_path)


def test_a_record_that_lacks_an_entry_is_named(tmp_path: Path) -> None:
    (tmp_path / vision.RECORDS).write_text('{"images": "cifar"}\n')
    with pytest.raises(ValueError, match=rf"{vision.RECORDS}.*'settings'"):
        vision.records_of(vision.FULL, ExperimentSubject(device="cpu"), no_progress, tmp_path / "parts" / "vision-0")


def test_a_damaged_archive_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "images.tar").write_text("no archive")
    subject = ExperimentSubject(images=tmp_path / "images.tar", device="cpu")
    with pytest.raises(ValueError, match=r"images\.tar"):
        vision.records_of(vision.FULL, subject, no_progress, tmp_path / "out" / "parts" / "vision-0")
    assert not (tmp_path / "out").exists()


def test_an_unknown_model_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'sofd'"):
        vision.records_of(PLAN, replace(QUICK, only=("sofd",)), no_progress, tmp_path)


def test_the_full_plan_trains_seven_models_of_three_sizes_with_three_seeds() -> None:
    wanted = vision.FULL.trained(0, ())
    assert len(wanted) == (7 * 3 + 2 + 3) * 3  # K = Q with the largest patches only, and three pyramids
    assert {(s.patch, s.landmarks) for _, s in wanted if s.architecture == "pyramid"} == {
        (2, "segments"), (2, "convolution"),
    }  # fmt: skip
    assert {settings.patch for _, settings in wanted} == {4, 2, 1}
    assert [settings.patch for _, settings in wanted] == sorted((s.patch for _, s in wanted), reverse=True)


def test_published_records_are_models_of_the_plan(tmp_path: Path) -> None:
    published = Path(__file__).parents[2] / "docs" / "results" / "vision.jsonl.xz"
    records = [(one["model"], one["settings"]["patch"], one["settings"]["seed"]) for one in read_jsonl(published)]
    planned = {(model.name, settings.patch, settings.seed) for model, settings in vision.FULL.trained(0, ())}
    assert len(set(records)) == len(records) > 0
    assert set(records) <= planned


def test_published_records_are_drawn_without_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vision, "train_vit", lambda *_, **__: pytest.fail("trained"))
    published = Path(__file__).parents[2] / "docs" / "results" / "vision.jsonl.xz"
    records = read_jsonl(published)[2:]
    (tmp_path / f"{vision.RECORDS}.xz").write_bytes(lzma.compress("\n".join(map(json.dumps, records)).encode()))
    made = vision.run(ExperimentSubject(device="cpu"), no_progress, tmp_path / "parts" / "vision")
    planned = len(vision.FULL.trained(0, ()))
    assert made.tables["models"]["seeds"].to_numpy().sum() == len(records)
    assert f"{planned - len(records)} of the {planned} models" in made.summary
    append_jsonl(tmp_path / vision.RECORDS, [records[0] | {"images": "other.tar 0123"}])
    with pytest.raises(ValueError, match=r"cifar10.* and of other\.tar"):
        vision.run(ExperimentSubject(device="cpu"), no_progress, tmp_path / "parts" / "vision")


def test_what_a_run_with_images_left_is_drawn_without_them(
    trained: tuple[Path, list[vision.Record]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is unfinished, and with --fresh once it has finished."""
    trained_record = {name: value for name, value in trained[1][0].items() if name not in ("model", "images")}
    images, out = tmp_path / "images.tar", tmp_path / "out"
    images.write_bytes(b"read by the stub only")
    kept = {"softmax": 1, "soft": 2}

    def train(settings: VisionSettings, *_: Any, **__: Any) -> tuple[None, vision.Record]:
        name = settings.normalizer.partition(":")[0]
        if name not in kept:
            raise KeyboardInterrupt
        return None, trained_record | {"settings": settings.as_dict(), "correct": kept[name]}

    monkeypatch.setattr("attnorm_lab.experiments.run.save", lambda *_: None)  # figures are not looked at
    monkeypatch.setattr(vision, "FULL", PLAN)
    monkeypatch.setattr(vision, "read_images", lambda _: None)
    monkeypatch.setattr(vision, "train_vit", train)
    with_images, without = ExperimentSubject(images=images, device="cpu"), ExperimentSubject(device="cpu")
    with pytest.raises(KeyboardInterrupt):
        reproduce(["vision"], with_images, out)

    def drawn(**options: Any) -> dict[str, float]:
        reproduce(["vision"], without, out, **options)
        rows = pq.read_table(out / "vision" / "models.parquet").to_pylist()
        return {row["model"]: row["accuracy"] for row in rows}

    accuracies = {name: correct / 64 for name, correct in kept.items()}
    assert drawn() == accuracies
    kept["linear"] = 3
    reproduce(["vision"], with_images, out, fresh=True)
    with pytest.raises(ValueError, match="--fresh"):
        drawn()
    assert drawn(fresh=True) == {**accuracies, "linear": 3 / 64}


def test_every_mean_lies_within_its_panel() -> None:
    small, large = record("softmax", 700), record("softmax", 300)
    large |= {"tokens": 256, "images_per_second": 50.0, "peak_bytes": 9 * 10**9}
    unstable = [record("soft", correct, seed) for seed, correct in enumerate((709, 265, 297))]
    panels = vision.figure([small, large, *unstable]).axes
    expected = [(70.0, 30.0, pytest.approx(42.3667, abs=1e-3)), (10.0, 50.0), (1.0, 9.0)]
    for panel, numbers in zip(panels, expected, strict=True):
        low, high = panel.get_xlim()
        drawn = [float(x) for bar in panel.containers for x in bar[0].get_xdata()]  # type: ignore[index]
        assert all(any(number == x for x in drawn) for number in numbers)
        assert all(low < x < high for x in drawn)
    assert panels[0].get_xlim()[0] > 20  # an interval from 0 to 100 does not decide the axis
    points: list[Any] = [line for line in panels[0].lines if line.get_marker() in ("<", ">")]
    arrows = [(point.get_marker(), point.get_xdata()[0]) for point in points]
    assert arrows == list(zip("<>", panels[0].get_xlim(), strict=True)), "where the interval of soft goes on"
    assert not {"<", ">"} & {line.get_marker() for panel in panels[1:] for line in panel.lines}


def record(model: str, correct: int | None, seed: int = 0) -> vision.Record:
    return {
        "model": model, "tokens": 64, "correct": correct, "tested_on": 1000, "settings": {"seed": seed},
        "images_per_second": 10.0, "peak_bytes": 10**9, "parameters": 5,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("soft", "verdict"),
    [
        ((800, 801, 805), "reproduces"),
        ((600, 601, 605), "does not"),
        ((690, 700, 720), "not decided"),
        ((702, 706, 707), "reproduces"),  # by seed, 2 to 4 more; intervals of the accuracies overlap
        ((800, 802), "not tested"),  # two differences may be equal by chance
        ((), "not tested"),
    ],
)
def test_verdicts_follow_from_differences_of_models_of_the_same_seed(soft: tuple[int, ...], verdict: str) -> None:
    softmax = [record("softmax", correct, seed) for seed, correct in enumerate((700, 702, 704))]
    others = [record("soft", correct, seed) for seed, correct in enumerate(soft)] or [record("soft", None)]
    (found,) = vision.findings([*softmax, *others])
    assert found.verdict == verdict


def test_marks_are_corrected_for_all_comparisons_with_softmax() -> None:
    softmax = [record("softmax", correct, seed) for seed, correct in enumerate((700, 702, 704))]
    soft = [record("soft", correct, seed) for seed, correct in enumerate((706, 711, 709))]  # p = 0.03
    (alone,) = vision.findings([*softmax, *soft])
    linear = [record("linear", correct, seed) for seed, correct in enumerate((690, 705, 712))]
    (beside_another,) = vision.findings([*softmax, *soft, *linear])
    assert (alone.verdict, beside_another.verdict) == ("reproduces", "not decided")
    assert "over 2 tests" in beside_another.why
    row = next(row for row in vision.table([*softmax, *soft, *linear]).to_pylist() if row["model"] == "soft")
    assert row["p_holm"] == pytest.approx(2 * row["p"])


def test_no_published_difference_survives_the_correction() -> None:
    packed = Path(__file__).parents[2] / "docs" / "results" / "vision.jsonl.xz"
    with lzma.open(packed, "rt") as file:
        records = [json.loads(line) for line in file]
    rows = [row for row in vision.table(records).to_pylist() if row["p"] is not None]
    assert len(rows) == 22
    assert round(min(row["p_holm"] for row in rows), 2) == 0.21
    assert {found.verdict for found in vision.findings(records)} == {"not decided"}


def test_intervals_over_seeds_are_students() -> None:
    found = vision.accuracy([record("soft", correct) for correct in (700, 710, 720)])
    assert found.mean == pytest.approx(0.71)
    assert found.high - found.mean == pytest.approx(4.302653 * 0.01 / np.sqrt(3), rel=1e-5)


def test_an_interval_ends_at_no_image_and_at_all() -> None:
    found = vision.accuracy([record("soft", correct) for correct in (709, 265, 297)])
    assert found.low == 0.0
    assert 0.424 < found.high <= 1.0


def test_a_failed_model_is_counted_and_drawn(trained: tuple[Path, list[vision.Record]]) -> None:
    _, records = trained
    made = vision.outcome([*records, record("gaussian", None)], PLAN, planned=4)
    rows = {row["model"]: row for row in made.tables["models"].to_pylist()}
    assert rows["gaussian"]["failed"] == 1
    assert rows["soft"]["failed"] == 0


def test_the_command_needs_images_or_quick(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["lab", "train", "vision", "--out", str(tmp_path / "x")])
    assert done.exit_code == 2
    assert "--quick" in done.output


@pytest.mark.parametrize(
    ("flags", "named"), [(["--epochs", "0"], "--epochs"), (["--lr", "nan"], "--lr"), (["--patch", "-1"], "--patch")]
)
def test_the_command_names_a_setting_that_cannot_work(flags: list[str], named: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["lab", "train", "vision", "--quick", *flags, "--out", str(tmp_path / "x")])
    assert done.exit_code == 2
    assert f"{named}: expected" in " ".join(done.output.split())


def test_the_command_writes_a_folder_that_it_can_write_or_trains_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = CliRunner().invoke(app, ["lab", "train", "vision", "--quick", "--out", str(tmp_path / "file" / "x")])
    assert done.exit_code == 2
    assert "training" not in done.output
