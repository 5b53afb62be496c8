"""A training that is stopped goes on as if it had not been, and its losses are on record."""

import functools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from attnorm.files import read_jsonl
from attnorm_lab.training.checkpoints import TrainingInterrupted, finished_checkpoints
from attnorm_lab.training.retrieval import train as training
from attnorm_lab.training.retrieval.data import RetrievalRecipe, find_task
from attnorm_lab.training.retrieval.evaluate import Trials
from attnorm_lab.training.retrieval.model import normalizer_for
from attnorm_lab.training.retrieval.train import Journal, Trained, train, train_retrieval
from tests_lab.training.retrieval_stack import CPU

RECIPE = RetrievalRecipe(steps=70, batch=4, width=8, leak_penalty=1.0, leak_from=0.5, squeezed=0.5, cosine=True)


class DyingJournal(Journal):
    """The program ends after the checkpoint of step 30, a few steps on."""

    def log(self, step: int, *args: Any) -> None:
        super().log(step, *args)
        if step == 36:
            raise SystemExit


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "REPORT_EVERY", 4)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The step from which each training draws its data."""
    seen: list[int] = []
    batches = training.training_batches

    def watched(task: Any, seeds: Any, recipe: Any, device: Any, first: int = 0) -> Any:
        seen.append(first)
        return batches(task, seeds, recipe, device, first)

    monkeypatch.setattr(training, "training_batches", watched)
    return seen


def go(journal: Journal | None, **options: Any) -> Trained:
    return train(
        find_task("max"), normalizer_for("ssmax", 2), (0, 1), RECIPE, device=CPU, journal=journal, **options
    )  # fmt: skip


@functools.cache
def uninterrupted() -> Trained:
    return go(None)


def same(one: Trained, other: Trained) -> bool:
    ours, theirs = one.models.state_dict(), other.models.state_dict()
    return one.losses == other.losses and all(torch.equal(ours[name], theirs[name]) for name in ours | theirs)


def test_killed_and_started_again_gives_the_same_weights_to_the_bit(tmp_path: Path, starts: list[int]) -> None:
    with pytest.raises(SystemExit):
        go(DyingJournal(tmp_path, "a", every=15))
    resumed = go(Journal(tmp_path, "a", every=15))
    assert starts == [0, 30]
    assert same(resumed, uninterrupted())


def test_losses_are_on_record_once_for_every_seed(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        go(DyingJournal(tmp_path, "a", every=15))
    Journal(tmp_path, "another stack").log(50, [0.5, float("nan")], 1.0)
    whole = go(Journal(tmp_path, "a", every=15))
    lines = read_jsonl(tmp_path / "metrics.jsonl")
    ours = [line for line in lines if line["stack"] == "a"]
    assert [line["step"] for line in ours] == [*range(4, 70, 4), 70]
    assert ours[-1]["losses"] == pytest.approx(whole.losses, abs=1e-6)
    assert [line["losses"] for line in lines if line["stack"] != "a"] == [[0.5, None]]


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)])
def test_a_signal_stops_between_two_steps_with_a_checkpoint(
    tmp_path: Path, number: signal.Signals, starts: list[int]
) -> None:
    def stop(step: int, loss: float) -> None:
        if step == 8:
            os.kill(os.getpid(), number)

    with pytest.raises(TrainingInterrupted) as stopped:
        go(Journal(tmp_path, "a"), report=stop)
    (checkpoint,) = finished_checkpoints(tmp_path / "checkpoints" / "a")
    assert checkpoint.name.endswith(f"{stopped.value.step:08d}")
    resumed = go(Journal(tmp_path, "a"))
    assert starts == [0, 8]
    assert same(resumed, uninterrupted())


def test_checkpoints_of_other_models_and_damaged_ones_are_named(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        go(DyingJournal(tmp_path, "a", every=15))
    recipe = RetrievalRecipe(steps=70, batch=4, width=8)
    with pytest.raises(ValueError, match="checkpoint of this model"):
        train(
            find_task("recall"), normalizer_for("ssmax", 2), (0, 1), recipe, device=CPU, journal=Journal(tmp_path, "a")
        )
    (checkpoint,) = finished_checkpoints(tmp_path / "checkpoints" / "a")
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(ValueError, match="cannot be read"):
        go(Journal(tmp_path, "a"))


def test_a_run_stopped_within_a_training_goes_on_and_leaves_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starts: list[int]
) -> None:
    def run(out: Path) -> list[dict[str, Any]]:
        found = train_retrieval(
            ["softmax", "ssmax"], out, seeds=(0, 1), recipe=RECIPE, trials=Trials(sizes=(4, 32), sets=10),
            device="cpu", checkpoint_every=15,
        ).records  # fmt: skip
        return [{name: value for name, value in record.items() if name != "train_seconds"} for record in found]

    def killed(journal: Journal, step: int, *args: Any) -> None:
        log(journal, step, *args)
        if step == 36 and journal.name.startswith("max-ssmax"):
            raise SystemExit

    log = Journal.log
    monkeypatch.setattr(Journal, "log", killed)
    with pytest.raises(SystemExit):
        run(tmp_path / "stopped")
    monkeypatch.setattr(Journal, "log", log)
    assert (tmp_path / "stopped" / "checkpoints").is_dir()
    assert run(tmp_path / "stopped") == run(tmp_path / "at once")
    assert starts == [0, 0, 30, 0, 0]
    assert not (tmp_path / "stopped" / "checkpoints").exists()
    with pytest.raises(ValueError, match=r"checkpoint_every.*got 0"):
        train_retrieval(["softmax"], tmp_path, checkpoint_every=0)
