"""Stacks learn, a training that stops goes on as if it had not, and its folder holds every record once."""

import functools
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from attnorm.files import read_jsonl
from attnorm.normalizers.spec import parse_spec
from attnorm_lab.training.checkpoints import TrainingInterrupted, finished_checkpoints
from attnorm_lab.training.retrieval import evaluate as trials
from attnorm_lab.training.retrieval import train as runner
from attnorm_lab.training.retrieval import train as training
from attnorm_lab.training.retrieval.data import TASKS, RetrievalRecipe, find_task, training_batches
from attnorm_lab.training.retrieval.evaluate import Trials, class_leak, leak_at_top, leaked_share
from attnorm_lab.training.retrieval.model import Retrievers, normalizer_for, run_key
from attnorm_lab.training.retrieval.train import (
    Journal,
    Results,
    RetrievalProgress,
    Trained,
    _loss,
    _standardized,
    train,
    train_retrieval,
)
from tests_lab.training.retrieval_stack import CPU, learned, outcomes, small, trained


@pytest.fixture(scope="module")
def stack() -> Trained:
    return learned()


@pytest.fixture
def in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def test_the_loss_falls_and_16_items_are_mostly_right(stack: Trained) -> None:
    first = trained(seeds=(0, 1), steps=1)
    assert max(stack.losses) < 0.5 * min(first.losses)
    assert all(record["accuracy"] > 0.75 for record in outcomes(stack.models, (0, 1), 16))


@pytest.mark.parametrize("task", ["recall", pytest.param("majority", marks=pytest.mark.nightly)])
def test_the_other_tasks_can_be_learned(task: str) -> None:
    record = outcomes(trained(task=task, steps=150).models, (0,), 16, task)[0]
    assert record["accuracy"] > 0.3, "chance is 0.1"
    assert ("dispersed" in record) == (task == "recall")


@pytest.mark.parametrize("normalizer", ["softmax", "ssmax", "asentmax"])
def test_a_stack_equals_separate_trainings(normalizer: str, in_float64: None) -> None:
    """In float64: the key's bias shifts all logits, so its gradient is rounding, which Adam blows up to full steps."""
    options = {"steps": 6, "batch": 16, "width": 16, "leak_penalty": 0.3, "squeezed": 0.5, "cosine": True}
    together = trained(normalizer, (0, 1, 2), **options)
    records = outcomes(together.models, (0, 1, 2), 50, sets=300)
    for copy, seed in enumerate((0, 1, 2)):
        alone = trained(normalizer, (seed,), **options)
        ours, theirs = together.models.state_dict(), alone.models.state_dict()
        for name, weight in theirs.items():
            torch.testing.assert_close(ours[name][copy], weight[0], rtol=1e-6, atol=1e-7, msg=f"{name} of seed {seed}")
        torch.testing.assert_close(together.losses[copy], alone.losses[0], rtol=1e-7, atol=1e-9)
        (record,) = outcomes(alone.models, (seed,), 50, sets=300)
        assert records[copy]["seed"] == seed
        assert records[copy]["spread"] == pytest.approx(record["spread"], rel=1e-6)
        assert records[copy]["accuracy"] == pytest.approx(record["accuracy"], abs=0.004)  # one set


def test_starting_weights_do_not_depend_on_normalizer_or_neighbors() -> None:
    first, second = (
        Retrievers(find_task("max"), normalizer_for(name, len(seeds)), seeds, 16)
        for name, seeds in (("softmax", [3, 7]), ("ssmax", [7]))
    )
    assert torch.equal(first.to_key.weight_SIO[1], second.to_key.weight_SIO[0])
    assert not torch.equal(first.to_key.weight_SIO[0], first.to_key.weight_SIO[1])
    assert first.to_key.weight_SIO.abs().max() <= 16**-0.5


def test_what_a_normalizer_learns_it_learns_for_each_seed() -> None:
    models = trained("ssmax", (0, 1), steps=20).models
    parameters = dict(models.normalizer.named_parameters())
    assert parameters
    assert all(len(set(value.flatten().tolist())) == 2 for value in parameters.values())


@pytest.mark.parametrize(("steps", "loss"), [(60, 2.3), pytest.param(160, 1.0, marks=pytest.mark.nightly)])
def test_the_penalty_lowers_what_the_class_adds_to_the_logits(steps: int, loss: float) -> None:
    """On fresh sets, to a fraction; and the models still learn, which takes more steps."""
    fresh = small(steps=1, batch=256, leak_penalty=1.0, leak_from=0.0)
    batch = next(training_batches(find_task("max"), (8, 9), fresh, CPU))
    shares = []
    for penalty in (0.0, 300.0):
        stack = trained(seeds=(0, 1), steps=steps, leak_penalty=penalty, leak_from=0.5, cosine=True)
        assert max(stack.losses) < loss, "a guess costs log 10 = 2.303"
        with torch.no_grad():
            logits = stack.models.logits(stack.models.read(batch.items_SBNF), batch.query_SBF)
            shares.append(leaked_share(stack.models, batch, logits))
    assert (shares[1] < 0.3 * shares[0]).all()


def test_the_leak_is_in_units_of_priority() -> None:
    """A logit 3 p + b with b = -1 or 1 by class: two items 2/3 apart in priority are level."""
    models = Retrievers(find_task("max"), normalizer_for("softmax", 1), [0], 8)

    def logits(read: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        items = read.unflatten(1, (query.shape[1], -1))
        return 3 * items[..., 0] + torch.where(items[..., 1:].argmax(-1) % 2 == 0, 1.0, -1.0)

    models.read = lambda items: items.flatten(1, 2)  # type: ignore[method-assign]
    models.logits = logits  # type: ignore[method-assign]
    (found,) = class_leak(models)
    assert found == pytest.approx({"slope": 3.0, "leak": 1 / 3}, rel=1e-4)


def test_the_leak_at_the_top_is_that_among_the_best_of_a_set() -> None:
    """A logit 2 p + (1 - p) b with b = -1 or 1 by class: the leak goes to 0 at the top."""
    models = Retrievers(find_task("max"), normalizer_for("softmax", 1), [0], 8)

    def logits(read: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        items = read.unflatten(1, (query.shape[1], -1)).double()
        sign = torch.where(items[..., 1:].argmax(-1) % 2 == 0, 1.0, -1.0)
        return 2 * items[..., 0] + (1 - items[..., 0]) * sign

    models.read = lambda items: items.flatten(1, 2)  # type: ignore[method-assign]
    models.logits = logits  # type: ignore[method-assign]
    for size in (4, 99, 9999):
        (found,) = leak_at_top(models, size)
        window = min(10, size) / (size + 1)
        assert found == pytest.approx({"slope_at_top": 2.0, "leak_at_top": window / 4}, rel=1e-2)


def test_a_logit_that_falls_with_the_priority_has_no_leak() -> None:
    models = Retrievers(find_task("max"), normalizer_for("softmax", 2), [0, 1], 8)
    with torch.no_grad():
        models.to_key.weight_SIO.zero_()
    assert [entry["leak"] for entry in class_leak(models)] == [None, None]


def test_the_cosine_ends_near_zero_and_the_rate_is_kept_without_it() -> None:
    falling, kept = small(steps=100, cosine=True), small(steps=100)
    assert falling.rate_at(0) == kept.rate_at(0) == kept.rate_at(99) == 5e-3
    assert falling.rate_at(50) == pytest.approx(2.5e-3)
    assert 0 < falling.rate_at(99) < 1e-5
    assert trained(steps=10, cosine=True).losses != trained(steps=10).losses


@pytest.mark.parametrize("task", [name for name, task in TASKS.items() if not task.has_priority])
def test_there_is_nothing_to_squeeze_without_priorities(task: str) -> None:
    with pytest.raises(ValueError, match=r"squeezed.*0"):
        trained(task=task, squeezed=0.5, steps=1)


def test_options_stand_behind_the_name() -> None:
    assert parse_spec("entmax:alpha=1.3:learned=true") == ("entmax", {"alpha": 1.3, "learned": True})
    assert parse_spec("topk:k=sqrt") == ("topk", {"k": "sqrt"})
    row = torch.tensor([[[[3.0, 2.0, 1.0]]]])
    assert int((normalizer_for("topk:k=2", 1)(row) > 0).sum()) == 2
    learned = normalizer_for("entmax:learned=true", 3)
    assert all(len(value) == 3 for value in learned.parameters())


@pytest.mark.parametrize(
    "normalizer", [*(pytest.param(name, marks=pytest.mark.nightly) for name in ("softmax", "entmax15")), "topk"]
)
def test_a_step_is_one_graph(normalizer: str) -> None:
    """fullgraph refuses whatever would make a GPU wait for the CPU, such as reading a number off it."""
    task, recipe = find_task("max"), RetrievalRecipe(steps=1, batch=4, width=8, leak_penalty=1.0, leak_from=0.0)
    models = Retrievers(task, normalizer_for(normalizer, 2), (0, 1), 8)
    batch = next(training_batches(task, (0, 1), recipe, CPU))
    torch.compiler.reset()
    graph = torch.compile(lambda drawn: _loss(models, drawn, recipe), backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(graph(batch)[0], _loss(models, batch, recipe)[0])


@pytest.mark.nightly
def test_bfloat16_is_for_the_products_in_training_alone() -> None:
    small = {"batch": 24, "width": 16, "learning_rate": 1e-2}
    ours, theirs = (trained(dtype=dtype, steps=2, **small).models.state_dict() for dtype in ("bfloat16", "float32"))
    assert all(value.dtype == torch.float32 for value in ours.values())
    assert not torch.equal(ours["to_key.weight_SIO"], theirs["to_key.weight_SIO"])
    (record,) = outcomes(trained(dtype="bfloat16", steps=200, **small).models, (0,), 16)
    assert record["accuracy"] > 0.6  # 1/16 by chance


def test_the_key_of_a_run_names_what_is_switched_on() -> None:
    """An option that a later version adds, switched off, must not hide the runs of this one."""
    assert set(RetrievalRecipe().identity()) == {
        "steps", "batch", "smallest", "largest", "width", "learning_rate", "weight_decay",
    }  # fmt: skip
    assert RetrievalRecipe(squeezed=0.5).identity() == {**RetrievalRecipe().identity(), "squeezed": 0.5}
    recipes = (
        RetrievalRecipe(),
        RetrievalRecipe(squeezed=0.5),
        RetrievalRecipe(dtype="bfloat16"),
        RetrievalRecipe(steps=1),
        RetrievalRecipe(cosine=True),
    )
    assert len({run_key("max", "softmax", recipe, "cpu") for recipe in recipes}) == len(recipes)


def test_standardized_logits_forget_their_scale_and_what_is_not_visible() -> None:
    logits = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0))
    visible = torch.arange(16) < torch.tensor([5, 9, 16])[:, None].expand(2, 3, 1)
    scaled = _standardized(logits, visible, 6.0)
    for copy in range(2):
        for row in range(3):
            kept = scaled[copy, row][visible[copy, row]]
            assert kept.mean().abs() < 1e-5
            assert kept.std(correction=0) == pytest.approx(6.0, rel=1e-5)
    torch.testing.assert_close(_standardized(1e-3 * logits + 7, visible, 6.0), scaled, rtol=0.01, atol=0.01)
    changed = logits.masked_fill(~visible, 1e4)
    torch.testing.assert_close(_standardized(changed, visible, 6.0)[visible], scaled[visible])
    assert not _standardized(torch.ones_like(logits), visible, 6.0).any()


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


RUN_RECIPE = RetrievalRecipe(steps=3, batch=4, width=8)
TRIALS = Trials(sizes=(4, 32), sets=10)


def folder_of(out: Path, *normalizers: str, **changed: Any) -> Results:
    options = {"seeds": (0, 1), "recipe": RUN_RECIPE, "trials": TRIALS, "device": "cpu", **changed}
    return train_retrieval(normalizers or ("softmax",), out, **options)


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The seeds of every training from now on."""
    seen: list[list[int]] = []
    train = runner.train

    def watched(task: Any, normalizer: Any, seeds: list[int], *args: Any, **options: Any) -> Any:
        seen.append(list(seeds))
        return train(task, normalizer, seeds, *args, **options)

    monkeypatch.setattr(runner, "train", watched)
    return seen


def test_one_record_per_normalizer_test_size_and_seed(tmp_path: Path) -> None:
    results = folder_of(tmp_path, "ssmax", "softmax")
    keys = [(r["normalizer"], r["tested_with"], r["size"], r["seed"]) for r in results.records]
    assert keys == [
        (name, test, size, seed)
        for name in ("ssmax", "softmax") for test in ("own", "hard") for size in (4, 32) for seed in (0, 1)
    ]  # fmt: skip
    assert sorted(map(str, read_jsonl(tmp_path / "records.jsonl"))) == sorted(map(str, results.records))
    for record in results.records:
        assert record["accuracy"] + record["logits_wrong"] + record["dispersed"] == pytest.approx(1)
        assert {"leak", "slope", "train_loss", "steps", "run", "task", "sets", "device"} <= set(record)
    scales = [list(r["learned"].values()) for r in results.records if r["size"] == 4 and r["tested_with"] == "own"]
    assert [len(values) for values in scales] == [1, 1, 0, 0]
    assert scales[0] != scales[1], "what a normalizer learned is that of the seed"


def test_weights_and_manifest_say_how_they_came_about(tmp_path: Path) -> None:
    folder_of(tmp_path, "ssmax", command="attnorm lab train retrieval ...")
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["command"] == "attnorm lab train retrieval ..."
    assert {"torch", "python"} <= set(manifest["versions"])
    (model,) = manifest["models"]
    assert (model["normalizer"], model["seeds"], model["recipe"]) == ("ssmax", [0, 1], RUN_RECIPE.as_dict())
    weights = load_file(tmp_path / model["file"])
    assert weights["to_key.weight_SIO"].shape == (2, 8, 8)
    assert any(name.startswith("normalizer.") and len(value) == 2 for name, value in weights.items())


def test_what_is_finished_is_not_done_again(tmp_path: Path, trainings: list[list[int]]) -> None:
    first = folder_of(tmp_path)
    text = (tmp_path / "records.jsonl").read_text()
    assert folder_of(tmp_path).records == first.records
    assert trainings == [[0, 1]]
    assert (tmp_path / "records.jsonl").read_text() == text
    folder_of(tmp_path, "softmax", "entmax15")
    folder_of(tmp_path, recipe=RetrievalRecipe(steps=4, batch=4, width=8))
    assert len(trainings) == 3
    assert folder_of(tmp_path).records == first.records


def test_more_seeds_train_only_those_that_are_missing_and_change_nothing(
    tmp_path: Path, trainings: list[list[int]]
) -> None:
    at_once = folder_of(tmp_path / "at once", seeds=(0, 1, 2))
    folder_of(tmp_path / "in parts", seeds=(1,))
    in_parts = folder_of(tmp_path / "in parts", seeds=(0, 1, 2))
    assert trainings == [[0, 1, 2], [1], [0, 2]]
    assert [(r["seed"], r["size"]) for r in in_parts.records] == [(r["seed"], r["size"]) for r in at_once.records]
    spreads = ([record["spread"] for record in each.records] for each in (at_once, in_parts))
    torch.testing.assert_close(*spreads, rtol=1e-3, atol=1e-4)
    assert {record["seed"] for record in folder_of(tmp_path / "in parts", seeds=(2,)).records} == {2}
    assert len(trainings) == 3


def test_more_sizes_and_tests_use_the_trained_weights(tmp_path: Path, trainings: list[list[int]]) -> None:
    folder_of(tmp_path)
    more = folder_of(tmp_path, trials=Trials(sizes=(4, 32, 64), sets=10, others=("hard", "softmax")))
    assert len(trainings) == 1
    assert len(more.records) == 2 * 3 * 3
    assert len(read_jsonl(tmp_path / "records.jsonl")) == 2 * 3 * 3, "no line twice"


def test_a_run_killed_while_testing_goes_on(
    tmp_path: Path, trainings: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate = trials.evaluate

    def killed(models: Any, task: Any, seeds: Any, size: int, *args: Any) -> Any:
        if size == 32:
            raise KeyboardInterrupt
        return evaluate(models, task, seeds, size, *args)

    monkeypatch.setattr(trials, "evaluate", killed)
    with pytest.raises(KeyboardInterrupt):
        folder_of(tmp_path)
    path = tmp_path / "records.jsonl"
    assert {record["size"] for record in read_jsonl(path)} == {4}
    path.write_text(path.read_text() + '{"run": "max-soft')  # and in the middle of a line
    monkeypatch.setattr(trials, "evaluate", evaluate)
    assert len(folder_of(tmp_path).records) == len(read_jsonl(path)) == 8
    assert trainings == [[0, 1]]


def test_progress_tells_every_stage(tmp_path: Path) -> None:
    seen: list[RetrievalProgress] = []
    folder_of(tmp_path, "softmax", "ssmax", report=seen.append)
    assert [(p.normalizer, p.stage, p.done, p.total) for p in seen if p.number == 2] == [
        ("ssmax", "training", 0, 3), ("ssmax", "training", 3, 3),
        ("ssmax", "testing", 0, 2), ("ssmax", "testing", 1, 2), ("ssmax", "testing", 2, 2),
    ]  # fmt: skip
    assert seen[1].loss is not None


@pytest.mark.parametrize("task", ["recall", "majority"])
def test_tasks_without_priorities_have_no_leak(tmp_path: Path, task: str) -> None:
    records = folder_of(tmp_path, task=task).records
    assert all("leak" not in record for record in records)
    assert all(("dispersed" in record) == (task == "recall") for record in records)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"task": "maxx"}, "'max'"),
        ({"seeds": ()}, "seeds: expected at least one"),
        ({"seeds": (1, 1)}, "seeds, got 1 "),
        ({"seeds": (-1,)}, "got -1"),
        ({"task": "recall", "recipe": RetrievalRecipe(steps=1, squeezed=0.5)}, "Set it to 0"),
        ({"device": "abacus"}, "'abacus'"),
        ({"names": ("softmax", "sofmax")}, "'softmax'"),
        ({"names": ("softmax", "linear")}, "'linear'"),
        ({"names": ("softmax", "softmax")}, "'softmax'.*twice"),
    ],
)
def test_wrong_input_is_refused_before_anything_is_written(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        folder_of(tmp_path / "out", *changed.pop("names", ()), **changed)
    assert not (tmp_path / "out").exists()


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match="contains files"):
        folder_of(tmp_path)
    with pytest.raises(ValueError, match="got the file"):
        folder_of(tmp_path / "thesis.tex")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    folder_of(tmp_path)
    (path,) = (tmp_path / "models").iterdir()
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match="is damaged"):
        folder_of(tmp_path)
