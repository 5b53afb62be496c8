"""The language models: every piece of work is done once, whoever comes; results are what the lines say."""

import json
import lzma
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from attnorm import figures
from attnorm.analysis.analyze import analyze
from attnorm.files import read_jsonl
from attnorm.models.load import load
from attnorm.models.patch_state import normalizer_of, patched_modules
from attnorm_lab.experiments.experiment import ExperimentSubject
from attnorm_lab.experiments.language_models import stages
from attnorm_lab.experiments.language_models import train as training
from attnorm_lab.experiments.language_models.experiment import EXPERIMENT, outcome
from attnorm_lab.experiments.language_models.results import main_runs
from attnorm_lab.experiments.language_models.stages import (
    MAX_PROBLEMS,
    choose_engines,
    closest,
    run_stage,
    run_works,
)
from attnorm_lab.experiments.language_models.train import (
    FULL,
    LARGE,
    QUICK,
    LanguageModelPlan,
    LMWorkspace,
    Worker,
    best_rate,
    seconds_of_tests,
    trained_model,
)
from attnorm_lab.experiments.trained_models import change_plan, prepare_texts, read_texts, texts_of
from attnorm_lab.training.checkpoints import OutOfTimeError
from attnorm_lab.training.lm.attention import fastest_attention, in_training
from attnorm_lab.training.lm.evaluate import attention_statistics, spread_chunks
from attnorm_lab.training.lm.model import build_model
from attnorm_lab.training.needle import NeedleTask
from tests_lab.training.conftest import write_text

PUBLISHED = Path(__file__).parents[2] / "docs" / "results"
TINY = replace(
    QUICK,
    normalizers=("softmax", "kneemax:knee=0.25"), at_inference=("log_scaled",),
    context=96, vocab=300, batch=2, rates=(1e-3, 1e-2), rate_tokens=576, main_tokens=1920, chunks=2, observed=1,
    needle=NeedleTask(steps=2, batch=2, questions=2, characters=2, longer=(1, 2), depths=(0.5,)),
)  # fmt: skip


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    folder = tmp_path_factory.mktemp("texts")
    sizes = {"train": 400, "valid": 150, "other": 100}
    train, valid, other = (
        write_text(folder / f"{name}.txt", size, seed) for seed, (name, size) in enumerate(sizes.items())
    )
    return train, valid, other


@pytest.fixture(scope="module")
def finished(texts: tuple[Path, Path, Path], tmp_path_factory: pytest.TempPathFactory) -> LMWorkspace:
    workspace = LMWorkspace.open(tmp_path_factory.mktemp("lm"), TINY)
    prepare_texts(workspace, texts[:1], texts[1], texts[2:])
    assert not run_works(workspace, "everything", max_minutes=0.0, device="cpu")
    assert [line["stage"] for line in workspace.results()] == ["texts"]
    assert run_works(workspace, "rates", ["softmax"], device="cpu")
    assert run_works(workspace, "everything", device="cpu"), workspace.results(stage="problem")
    return workspace


def test_two_texts_of_one_name_are_named(texts: tuple[Path, Path, Path], tmp_path: Path) -> None:
    workspace = LMWorkspace.open(tmp_path, TINY)
    with pytest.raises(ValueError, match="'other'"):
        prepare_texts(workspace, texts[:1], texts[1], [texts[2], texts[2]])


def test_every_piece_of_work_is_one_line(finished: LMWorkspace) -> None:
    done = [(line["stage"], line.get("normalizer"), line.get("at_inference")) for line in finished.results()]
    assert len(done) == 1 + 2 * 2 + 2 + 3 + 3
    assert done.count(("rate", "softmax", None)) == 2
    assert {key for key in done if key[0] == "measure"} == {
        ("measure", "softmax", None), ("measure", "softmax", "log_scaled"), ("measure", "kneemax:knee=0.25", None),
    }  # fmt: skip
    main = finished.results(stage="main", normalizer="kneemax:knee=0.25")[0]
    assert main["steps"] == 10
    assert main["tokens"] == 1920
    assert main["learning_rate"] == best_rate(finished, "kneemax:knee=0.25")
    assert main["tokens_per_second"] > 0
    assert main["settings"]["normalizer"] == "kneemax"
    assert main["settings"]["normalizer_options"] == {"knee": 0.25}
    assert {"torch", "transformers", "python"} <= main["versions"].keys()


def test_what_is_finished_is_not_done_again(finished: LMWorkspace) -> None:
    before = len(finished.results())
    assert run_works(finished, "everything", device="cpu")
    assert len(finished.results()) == before


def test_the_best_learning_rate_is_that_of_the_lowest_loss_that_is_one(finished: LMWorkspace, tmp_path: Path) -> None:
    tried = {line["learning_rate"]: line["valid_loss"] for line in finished.results(stage="rate", normalizer="softmax")}
    assert best_rate(finished, "softmax") == min(tried, key=lambda rate: tried[rate])
    workspace = LMWorkspace.open(tmp_path, TINY)
    workspace.add({"stage": "rate", "normalizer": "softmax", "learning_rate": 1e-3, "valid_loss": 3.0})
    with pytest.raises(ValueError, match=r"0\.01"):
        best_rate(workspace, "softmax")
    workspace.add({"stage": "rate", "normalizer": "softmax", "learning_rate": 1e-2, "valid_loss": None})
    assert best_rate(workspace, "softmax") == 1e-3


def test_losses_at_all_lengths_are_of_the_same_tokens(finished: LMWorkspace) -> None:
    losses = finished.results(stage="measure", normalizer="softmax", at_inference=None)[0]["losses"]
    assert {name: list(by) for name, by in losses.items()} == {
        "valid": ["96", "192", "384"], "other": ["96", "192", "384"],
    }  # fmt: skip
    swapped = finished.results(stage="measure", at_inference="log_scaled")[0]["losses"]["valid"]
    assert swapped["96"] == losses["valid"]["96"]  # softmax itself up to the training length
    assert swapped["384"] != losses["valid"]["384"]
    tokens = read_texts(finished).valid
    chunks = spread_chunks(tokens, 160, 3)
    assert [len(chunk) for chunk in chunks] == [161, 161, 161]
    assert chunks[0].tolist() == tokens[:161].tolist()
    with pytest.raises(ValueError, match="100001"):
        spread_chunks(tokens, 100_000, 3)


def test_models_are_exported_in_half_precision_with_what_they_learned(finished: LMWorkspace) -> None:
    assert run_works(finished, "export", ["kneemax:knee=0.25"], device="cpu")
    worker = Worker.at(finished, read_texts(finished), device="cpu")
    trained, _ = trained_model(worker, "kneemax:knee=0.25", 0)
    exported = load(finished.model_folder("kneemax:knee=0.25", 0), dtype="auto", device="cpu")
    assert exported.model.dtype == torch.bfloat16
    assert exported.tokenizer is not None
    for name, weight in exported.model.named_parameters():
        assert torch.equal(weight, trained.get_parameter(name).to(torch.bfloat16))
    assert {normalizer_of(module).name for module in patched_modules(exported.model).values()} == {"kneemax"}


def test_two_processes_do_not_do_the_same(finished: LMWorkspace, tmp_path: Path) -> None:
    with finished.claimed("softmax-seed-7") as mine:
        assert mine
        other = LMWorkspace.open(finished.folder, TINY)
        with other.claimed("softmax-seed-7") as also_mine:
            assert not also_mine
        assert not run_works(other, "main", ["softmax"], seeds=[7], device="cpu")
    assert not finished.results(seed=7)


def copy_without(finished: LMWorkspace, folder: Path, plan: LanguageModelPlan = TINY, **left_out: Any) -> LMWorkspace:
    """A folder with the results of another machine and the texts, but no checkpoints; without one kind of results."""
    workspace = LMWorkspace.open(folder, plan)
    (folder / "data").symlink_to(finished.data)
    for line in finished.results():
        if not left_out or any(line.get(key) != value for key, value in left_out.items()):
            workspace.add(line)
    return workspace


def test_a_model_that_lost_its_checkpoint_before_its_tests_is_trained_again(
    finished: LMWorkspace, tmp_path: Path
) -> None:
    workspace = copy_without(finished, tmp_path, stage="needle", normalizer="kneemax:knee=0.25")
    before = len(workspace.results())
    assert run_works(workspace, "main", device="cpu")
    assert len(workspace.results()) == before, "the stage alone has nothing to do"
    assert run_works(workspace, "everything", device="cpu")
    assert [(line["stage"], line["normalizer"]) for line in workspace.results()[before:]] == [
        ("main", "kneemax:knee=0.25"), ("needle", "kneemax:knee=0.25"),
    ]  # fmt: skip
    again, first = (place.results(stage="main", normalizer="kneemax:knee=0.25") for place in (workspace, finished))
    assert again[-1]["course"] == first[0]["course"]
    assert len(main_runs(workspace.results())) == 2


def test_a_model_is_tested_at_its_last_step_only(finished: LMWorkspace, tmp_path: Path) -> None:
    """Its checkpoint was lost, and training it again was interrupted."""
    workspace = copy_without(finished, tmp_path, stage="needle", normalizer="softmax")
    (steps,) = (line["steps"] for line in finished.results(stage="main", normalizer="softmax"))
    checkpoints = workspace.run_folder("softmax", "main-seed-0") / training.CHECKPOINTS
    for step, unfinished in ((steps - 1, True), (steps, False)):
        (checkpoints / f"step-{step:08d}").mkdir(parents=True)
        assert training._must_be_trained(workspace, "softmax", 0) == unfinished


@pytest.mark.parametrize(
    "name", [pytest.param("soft:landmarks=32:learned=16:normalised=true", marks=pytest.mark.nightly), "linear"]
)
def test_mechanisms_are_tested_without_statistics(
    name: str, finished: LMWorkspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = replace(TINY, normalizers=(*TINY.normalizers, name), rates=(1e-3,))
    workspace = copy_without(finished, tmp_path, plan)
    assert run_works(workspace, "everything", [name], device="cpu"), workspace.results(stage="problem")
    (measured,) = workspace.results(stage="measure", normalizer=name)
    assert measured["attention_statistics"] is None
    assert measured["losses"]["valid"].keys() == {"96", "192", "384"}
    assert workspace.results(stage="needle", normalizer=name)
    (trained,) = workspace.results(stage="main", normalizer=name)
    assert not trained["learned"], "matrices are too large for a record"
    made = outcome(workspace.results(), plan)
    assert made.tables["models"].num_rows == 4
    monkeypatch.setattr(figures, "save", lambda figure, stem: [])  # made, but not drawn: that takes half of the time
    assert run_stage("tables", tmp_path, plan)
    assert name in (tmp_path / "tables.md").read_text()


def test_a_diverged_model_is_neither_tested_nor_trained_again(finished: LMWorkspace, tmp_path: Path) -> None:
    workspace = copy_without(finished, tmp_path, normalizer="kneemax:knee=0.25")
    lines = finished.results(normalizer="kneemax:knee=0.25")
    for line in lines:
        if line["stage"] in ("rate", "main"):
            workspace.add(line | ({"valid_loss": None} if line["stage"] == "main" else {}))
    before = workspace.results()
    assert run_works(workspace, "everything", device="cpu")
    assert workspace.results() == before


def timed_main(seed: int, *, seconds: float, steps: int = 10) -> dict[str, Any]:
    return {
        "stage": "main", "normalizer": "softmax", "seed": seed, "problem": None, "valid_loss": 3.0,
        "steps": steps, "training_seconds": seconds, "wall_seconds": 1.0,  # resumed: the last part took a second
    }  # fmt: skip


def test_only_models_that_can_finish_in_time_are_started(finished: LMWorkspace, tmp_path: Path) -> None:
    workspace = copy_without(finished, tmp_path, normalizer="kneemax:knee=0.25")
    for line in (
        timed_main(1, seconds=300.0),
        {"stage": "measure", "normalizer": "softmax", "seed": 1, "at_inference": None, "wall_seconds": 20.0},
        {"stage": "needle", "normalizer": "softmax", "seed": 1, "at_inference": None, "wall_seconds": 30.0},
        {"stage": "needle", "normalizer": "softmax", "seed": 1, "at_inference": "log_scaled", "wall_seconds": 40.0},
    ):
        workspace.add(line)
    assert seconds_of_tests(workspace) == 60.0
    before = workspace.results()
    options: dict[str, Any] = {"normalizers": ["kneemax:knee=0.25"], "device": "cpu", "whole": True}
    assert not run_works(workspace, "everything", max_minutes=359 / 60, **options)
    assert workspace.results() == before, "not even short runs"
    assert run_works(workspace, "everything", max_minutes=60, **options)


def test_the_time_of_an_unfinished_run_is_that_of_its_remaining_steps(tmp_path: Path) -> None:
    workspace = LMWorkspace.open(tmp_path, replace(TINY, main_tokens=1000 * 192))
    assert training._seconds_needed(workspace, "softmax", 2) == 0.0
    workspace.add(timed_main(1, seconds=3000.0, steps=1000))
    assert training._seconds_needed(workspace, "softmax", 2) == 3000.0
    assert training._seconds_needed(workspace, "kneemax:knee=0.25", 2) == 3000.0, "the fastest that is known"
    workspace.add({"stage": "measure", "normalizer": "softmax", "seed": 1, "wall_seconds": 7.0})
    checkpoints = workspace.run_folder("softmax", "main-seed-2") / training.CHECKPOINTS
    for step, needed in ((10, 990 * 3 + 7), (800, 200 * 2 + 7)):  # the speed of so few steps would be that of compiling
        checkpoint = checkpoints / f"step-{step:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "state.json").write_text(json.dumps({"step": step, "seconds": 1600.0}))
        assert training._seconds_needed(workspace, "softmax", 2) == needed


def test_a_run_whose_first_steps_show_that_it_cannot_finish_is_stopped(
    finished: LMWorkspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = replace(TINY, main_tokens=20 * 192)
    workspace = copy_without(finished, tmp_path, plan, stage="main")
    for stage in ("measure", "needle"):
        assert workspace.results(stage=stage)
    monkeypatch.setattr(training, "SETTLED", 15)
    monkeypatch.setattr(training, "seconds_of_tests", lambda workspace: 3600.0)
    monkeypatch.setattr(training, "_seconds_needed", lambda *_: 0.0)
    said: list[str] = []
    options: dict[str, Any] = {"normalizers": ["softmax"], "device": "cpu", "whole": True, "log": said.append}
    assert not run_works(workspace, "everything", max_minutes=59, **options)
    assert said[-1].startswith("stopped")
    monkeypatch.setattr(training, "SETTLED", 2)  # from the checkpoint of step 10 on; the next log entry is at step 15
    said.clear()
    assert not run_works(workspace, "everything", max_minutes=59, **options)
    assert said[-1].startswith("stopped")
    assert not workspace.results(stage="main")
    assert not workspace.results(stage="problem")
    assert run_works(workspace, "everything", max_minutes=600, **options)
    assert workspace.results(stage="main")[0]["steps"] == 20


def test_the_time_of_a_run_is_known_after_its_first_steps(finished: LMWorkspace, tmp_path: Path) -> None:
    untested = copy_without(finished, tmp_path / "untested", stage="measure")
    (tmp_path / "untested" / "results.jsonl").write_text("")
    settings = TINY.settings("softmax", rate=1e-3, tokens=1000 * 192, seed=0)

    def check(workspace: LMWorkspace, seconds: float, step: int = 50) -> None:
        worker = Worker.at(workspace, read_texts(workspace), device="cpu", max_minutes=seconds / 60, whole=True)
        training._check_remaining_time(worker, settings, step, tokens_per_second=192.0)

    check(untested, 950 + 250 + 30)
    with pytest.raises(OutOfTimeError):
        check(untested, 950 + 250)
    check(untested, 100 + 250 + 30, step=900)
    tests = seconds_of_tests(finished) or 0.0
    check(finished, 950 + tests + 30)
    with pytest.raises(OutOfTimeError):
        check(finished, 950 + tests)


def test_a_plan_with_one_rate_has_no_short_runs(finished: LMWorkspace, tmp_path: Path) -> None:
    workspace = LMWorkspace.open(tmp_path, replace(TINY, rates=(2e-3,)))
    (tmp_path / "data").symlink_to(finished.data)
    assert run_works(workspace, "rates", ["softmax"], device="cpu")
    assert not workspace.results(stage="rate")
    assert best_rate(workspace, "softmax") == 2e-3


@pytest.mark.parametrize("content", ["{", "[1]"])
def test_a_damaged_plan_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(content)
    with pytest.raises(ValueError, match=r"plan\.json.*remove"):
        LMWorkspace.open(tmp_path, TINY)


def test_a_folder_belongs_to_one_plan(finished: LMWorkspace) -> None:
    with pytest.raises(ValueError, match=r"width.*64.*32"):
        LMWorkspace.open(finished.folder, replace(TINY, width=64))


def test_one_that_fails_does_not_keep_the_others_from_their_turn(finished: LMWorkspace, tmp_path: Path) -> None:
    workspace = LMWorkspace.open(tmp_path, replace(TINY, normalizers=("local", "softmax")))
    (tmp_path / "data").symlink_to(finished.data)
    for rate in TINY.rates:
        for name in ("local", "softmax"):
            workspace.add(
                {
                    "stage": "rate",
                    "normalizer": name,
                    "learning_rate": rate,
                    "valid_loss": None if name == "local" else 1.0,
                }
            )
    assert not run_works(workspace, "main", device="cpu")
    assert "diverged at every learning rate" in workspace.results(stage="problem")[0]["problem"]
    assert workspace.results(stage="main", normalizer="softmax")


def test_a_stage_that_comes_too_early_is_no_problem_of_the_model(finished: LMWorkspace, tmp_path: Path) -> None:
    """After MAX_PROBLEMS a model is left out, and the log says so."""
    workspace = LMWorkspace.open(tmp_path, TINY)
    (tmp_path / "data").symlink_to(finished.data)
    said: list[str] = []
    options: dict[str, Any] = {"normalizers": ["softmax"], "device": "cpu", "log": said.append}
    assert not run_works(workspace, "main", **options)
    assert "--stage rates" in said[-1]
    assert "Traceback" not in said[-1]
    assert not workspace.results(stage="problem")
    for _ in range(MAX_PROBLEMS):
        workspace.add({"stage": "problem", "normalizer": "softmax", "seed": 0, "problem": "a full GPU"})
    assert not run_works(workspace, "rates", **options)
    assert "a full GPU" in said[-1]


def test_without_accelerate_no_model_is_tried(
    finished: LMWorkspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnorm_lab.training.device.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'attnorm\[lab\]'"):
        run_stage("everything", finished.folder, TINY, device="cpu")
    with pytest.raises(ImportError, match=r"pip install 'attnorm\[lab\]'"):
        EXPERIMENT.run(ExperimentSubject(quick=True, device="cpu"), lambda what, done, total: None, tmp_path / "parts")
    assert not (tmp_path / "parts").exists()


def test_the_statistics_are_those_of_analyze(finished: LMWorkspace) -> None:
    worker = Worker.at(finished, read_texts(finished), device="cpu")
    model, _ = trained_model(worker, "kneemax:knee=0.25", 0)
    window = torch.from_numpy(worker.texts.valid[:96].astype("int64"))
    ours = attention_statistics(model, window[None], torch.device("cpu"))
    heads = analyze(model, {"input_ids": window[None]}, metrics="core").heads.to_pydict()
    for name in ("entropy_nats", "effective_keys", "sink_mass", "max_weight"):
        assert [number for layer in ours["heads"][name] for number in layer] == pytest.approx(
            heads[f"{name}_mean"], rel=1e-3
        )


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.nightly if number % 3 else ())
        for number, name in enumerate(FULL.normalizers)
    ],
)
def test_every_normalizer_has_statistics(name: str) -> None:
    settings = TINY.settings(name, rate=1e-3, tokens=1, seed=0)
    model = build_model(settings, vocabulary=300, end_of_text=0)
    found = attention_statistics(model, torch.arange(48).reshape(2, 24), torch.device("cpu"))
    assert 0 < found["mean"]["entropy_ratio"] <= 1.001
    assert found["mean"]["jacobian_norm"] > 0


def test_a_trial_chooses_a_way_that_runs(finished: LMWorkspace, tmp_path: Path) -> None:
    workspace = LMWorkspace.open(tmp_path, TINY)
    choose_engines(workspace, ["kneemax:knee=0.25"], device="cpu")
    lines = workspace.results(stage="trial")
    assert [line["attention"] for line in lines] == ["dense", "engine"]
    assert [line["problem"] for line in lines] == [None, None]
    fastest = max(lines, key=lambda line: line["tokens_per_second"])
    assert json.loads((tmp_path / "attention.json").read_text()) == {"kneemax:knee=0.25": fastest["attention"]}


def test_the_closest_get_a_second_seed(tmp_path: Path) -> None:
    workspace = LMWorkspace.open(tmp_path, FULL)
    for name, loss in {"softmax": 3.0, "ssmax": 2.0, "sigmoid": 2.5, "sink": 4.0, "kneemax": None}.items():
        workspace.add({"stage": "main", "normalizer": name, "seed": 0, "valid_loss": loss})
    assert closest(workspace, 2) == ("softmax", "ssmax", "sigmoid")


def test_the_outcome_compares_with_softmax(finished: LMWorkspace) -> None:
    made = outcome(finished.results(), TINY)
    assert {finding.claim.split(" models")[0] for finding in made.findings} == {
        "kneemax:knee=0.25",
        "softmax → log_scaled",
    }
    assert made.tables["models"].num_rows == 3
    assert "lowest loss on valid" in made.summary
    assert set(made.figures) == {"language-models"}
    assert EXPERIMENT.name == "language-models"


def test_a_few_hundredths_of_a_nat_are_no_verdict() -> None:
    packed = (PUBLISHED / "language-models.jsonl.xz").read_bytes()
    lines = [json.loads(line) for line in lzma.decompress(packed).splitlines()]
    findings = outcome([line for line in lines if line.get("seed", 0) == 0], FULL).findings
    verdicts = {finding.claim.split(" models")[0]: finding.verdict for finding in findings}
    assert verdicts["entmax15"] == "does not"  # -0.019 at the training length, +0.072 beyond
    assert verdicts["softpick"] == "partly"  # +0.068 and -0.098
    assert verdicts["sigmoid"] == "does not"


def test_texts_may_be_packed_and_several_held_out(tmp_path: Path) -> None:
    packed, first, second = tmp_path / "train.txt.xz", tmp_path / "first.txt", tmp_path / "second.txt.xz"
    packed.write_bytes(lzma.compress(b"to train on"))
    first.write_text("held out")
    second.write_bytes(lzma.compress(b"also held out"))
    subject = ExperimentSubject(texts=(packed,), valid=(first, second))
    assert texts_of(subject, tmp_path) == ([packed], first, [second])
    assert [text.content for text in subject.passages()] == ["to train on"]
    before = subject.identity(with_model=False)
    assert [name for name, _ in (*before["texts"], *before["valid"])] == [packed.name, first.name, second.name]
    second.write_bytes(lzma.compress(b"another text"))
    assert subject.identity(with_model=False) != before
    packed.write_bytes(b"no xz")
    with pytest.raises(ValueError, match=r"train\.txt\.xz"):
        ExperimentSubject(texts=(packed, first)).passages()
    with pytest.raises(ValueError, match="--valid"):
        texts_of(ExperimentSubject(texts=(packed,)), tmp_path)


def test_the_stages_run_by_name(finished: LMWorkspace, texts: tuple[Path, Path, Path], tmp_path: Path) -> None:
    def run(stage: str, folder: Path, **options: Any) -> bool:
        return run_stage(stage, folder, TINY, device="cpu", **options)

    said: list[str] = []
    assert run("prepare", tmp_path, texts=texts[:1], held_out=texts[1:], log=said.append)
    assert "--tokenizer DIR" in said[0]
    assert list(read_texts(LMWorkspace.open(tmp_path, TINY)).held_out) == ["valid", "other"]
    assert not run("main", tmp_path, only=["softmax"], max_minutes=0.0)
    for stage in ("rates", "main", "measure", "needle", "everything"):
        assert run(stage, finished.folder)
    for stage, options, complaint in (
        ("prepare", {}, "--valid"),
        ("nedle", {}, "'needle'"),
        ("tables", {}, "no results"),
    ):
        with pytest.raises(ValueError, match=complaint):
            run(stage, tmp_path / stage, **options)


def test_the_tables_need_nothing_but_the_lines(
    finished: LMWorkspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "results.jsonl").write_text((finished.folder / "results.jsonl").read_text())
    monkeypatch.setattr(figures, "save", lambda figure, stem: [stem])  # made, but not drawn
    heard: list[str] = []
    assert run_stage("tables", tmp_path, FULL, log=heard.append)
    assert heard == [f"wrote {tmp_path / name}" for name in ("tables.md", "language-models")]
    assert "## Loss" in (tmp_path / "tables.md").read_text()


def test_a_model_that_does_not_fit_the_memory_of_a_cpu_is_not_started(
    finished: LMWorkspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "machine_memory_gb", lambda: 16.0)
    shutil.copytree(finished.folder / "data", tmp_path / "data")
    with pytest.raises(ValueError, match="at least 25 GB") as error:
        run_stage("everything", tmp_path, LARGE, device="cpu")
    assert all(part in str(error.value) for part in ("16 GB", "--size 30M", "batch=4"))
    assert not (tmp_path / "plan.json").exists()
    said: list[str] = []
    monkeypatch.setattr(stages, "machine_memory_gb", lambda: 64.0)
    stages.check_memory(LARGE, said.append)
    stages.check_memory(TINY, said.append)
    assert len(said) == 1
    assert "23 GB" in said[0]


def test_plans_change_by_name() -> None:
    plan = change_plan(FULL, ["main_tokens=1000", "rates=[0.1]", "needle.steps=7"])
    assert (plan.main_tokens, plan.rates, plan.needle.steps) == (1000, (0.1,), 7)
    assert isinstance(plan, LanguageModelPlan)
    for change in ("needle=3", "batch.steps=3", "dtype.b=3", "needle.nothing=3", "nothing=3"):
        with pytest.raises(ValueError, match=r"needle\.steps"):
            change_plan(FULL, [change])
    with pytest.raises(ValueError, match="'relu'"):
        FULL.chosen(["relu"])
    model = FULL.settings("ssmax", rate=1e-3, tokens=60_000_000, seed=0)
    assert model.steps == 3663
    assert model.tokens_per_step == 16384


def test_the_published_lines_are_of_the_plan_that_the_command_runs() -> None:
    lines = read_jsonl(PUBLISHED / "language-models.jsonl.xz")
    trained = [line for line in lines if line["stage"] in ("rate", "main")]
    assert {line["normalizer"] for line in trained} == set(FULL.normalizers)
    for line in trained:
        tokens = FULL.main_tokens if line["stage"] == "main" else FULL.rate_tokens
        planned = FULL.settings(line["normalizer"], rate=line["learning_rate"], tokens=tokens, seed=line["seed"])
        assert line["settings"] == planned.as_dict()
        assert line["tokens"] == planned.steps * planned.tokens_per_step
    asked = [line for line in lines if line["stage"] == "needle"]
    assert {line["course"][-1]["step"] for line in asked} == {FULL.needle.steps}
    assert {(answer["depth"], answer["questions"]) for line in asked for answer in line["answers"]} == {
        (depth, FULL.needle.questions) for depth in FULL.needle.depths
    }
    observed = [line["attention_statistics"] for line in lines if line["stage"] == "measure"]
    assert {(each["windows"], each["length"]) for each in observed} == {(FULL.observed, FULL.context)}


def test_a_given_tokenizer_encodes_the_texts(texts: tuple[Path, Path, Path], tmp_path: Path) -> None:
    own = prepare_texts(LMWorkspace.open(tmp_path / "own", TINY), texts[:1], texts[1]).corpus
    own.tokenizer.save(str(tmp_path / "tokenizer.json"))
    other = LMWorkspace.open(tmp_path / "other", replace(TINY, vocab=999))
    given = prepare_texts(other, texts[:1], texts[1], tokenizer=tmp_path / "tokenizer.json").corpus
    assert given.vocabulary == own.vocabulary <= 300
    assert given.train.tolist() == own.train.tolist()
    with pytest.raises(ValueError, match="nowhere"):
        prepare_texts(LMWorkspace.open(tmp_path / "none", TINY), texts[:1], texts[1], tokenizer=tmp_path / "nowhere")


@pytest.mark.parametrize("normalizer", LARGE.normalizers)
def test_every_model_of_the_large_plan_can_be_built_and_trained(normalizer: str) -> None:
    settings = LARGE.model_settings(
        normalizer, rate=1e-3, tokens=16, seed=0, layers=1, heads=1, width=64, context=16, vocab=300, dtype="float32"
    )
    model = build_model(settings, 300, 0)
    way = fastest_attention(normalizer, torch.device("cpu"))
    assert (way == "engine") == (normalizer.split(":")[0] in ("softmax", "ssmax", "sink", "gaussian", "soft", "linear"))
    with in_training(model, attention=way):
        loss = model(input_ids=torch.arange(16)[None], labels=torch.arange(16)[None]).loss
        loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_the_fastest_attention_of_gates_that_read_hidden_states() -> None:
    assert fastest_attention("forget:width=24", torch.device("cpu")) == "engine"
