"""The folder of a retrieval run: records as they come, nothing done twice, nothing of others touched."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from attnorm.files import append_jsonl, read_jsonl
from attnorm_lab.training.retrieval import evaluate as trials
from attnorm_lab.training.retrieval import train as runner
from attnorm_lab.training.retrieval.data import RetrievalRecipe
from attnorm_lab.training.retrieval.evaluate import Trials
from attnorm_lab.training.retrieval.train import Results, RetrievalProgress, train_retrieval

RECIPE = RetrievalRecipe(steps=3, batch=4, width=8)
TRIALS = Trials(sizes=(4, 32), sets=10)


def go(out: Path, *normalizers: str, **changed: Any) -> Results:
    options = {"seeds": (0, 1), "recipe": RECIPE, "trials": TRIALS, "device": "cpu", **changed}
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
    results = go(tmp_path, "ssmax", "softmax")
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
    go(tmp_path, "ssmax", command="attnorm lab train retrieval ...")
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["command"] == "attnorm lab train retrieval ..."
    assert {"torch", "python"} <= set(manifest["versions"])
    (model,) = manifest["models"]
    assert (model["normalizer"], model["seeds"], model["recipe"]) == ("ssmax", [0, 1], RECIPE.as_dict())
    weights = load_file(tmp_path / model["file"])
    assert weights["to_key.weight_SIO"].shape == (2, 8, 8)
    assert any(name.startswith("normalizer.") and len(value) == 2 for name, value in weights.items())


def test_what_is_finished_is_not_done_again(tmp_path: Path, trainings: list[list[int]]) -> None:
    first = go(tmp_path)
    text = (tmp_path / "records.jsonl").read_text()
    assert go(tmp_path).records == first.records
    assert trainings == [[0, 1]]
    assert (tmp_path / "records.jsonl").read_text() == text
    go(tmp_path, "softmax", "entmax15")
    go(tmp_path, recipe=RetrievalRecipe(steps=4, batch=4, width=8))
    assert len(trainings) == 3
    assert go(tmp_path).records == first.records


def test_more_seeds_train_only_those_that_are_missing_and_change_nothing(
    tmp_path: Path, trainings: list[list[int]]
) -> None:
    at_once = go(tmp_path / "at once", seeds=(0, 1, 2))
    go(tmp_path / "in parts", seeds=(1,))
    in_parts = go(tmp_path / "in parts", seeds=(0, 1, 2))
    assert trainings == [[0, 1, 2], [1], [0, 2]]
    assert [(r["seed"], r["size"]) for r in in_parts.records] == [(r["seed"], r["size"]) for r in at_once.records]
    spreads = ([record["spread"] for record in each.records] for each in (at_once, in_parts))
    torch.testing.assert_close(*spreads, rtol=1e-3, atol=1e-4)
    assert {record["seed"] for record in go(tmp_path / "in parts", seeds=(2,)).records} == {2}
    assert len(trainings) == 3


def test_more_sizes_and_tests_use_the_trained_weights(tmp_path: Path, trainings: list[list[int]]) -> None:
    go(tmp_path)
    more = go(tmp_path, trials=Trials(sizes=(4, 32, 64), sets=10, others=("hard", "softmax")))
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
        go(tmp_path)
    path = tmp_path / "records.jsonl"
    assert {record["size"] for record in read_jsonl(path)} == {4}
    path.write_text(path.read_text() + '{"run": "max-soft')  # and in the middle of a line
    monkeypatch.setattr(trials, "evaluate", evaluate)
    assert len(go(tmp_path).records) == len(read_jsonl(path)) == 8
    assert trainings == [[0, 1]]


def test_appending_after_half_a_line_loses_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    append_jsonl(path, [{"a": 1}])
    path.write_text(path.read_text() + '{"b": ')
    append_jsonl(path, [{"c": 3}])
    assert read_jsonl(path) == [{"a": 1}, {"c": 3}]


def test_progress_tells_every_stage(tmp_path: Path) -> None:
    seen: list[RetrievalProgress] = []
    go(tmp_path, "softmax", "ssmax", report=seen.append)
    assert [(p.normalizer, p.stage, p.done, p.total) for p in seen if p.number == 2] == [
        ("ssmax", "training", 0, 3), ("ssmax", "training", 3, 3),
        ("ssmax", "testing", 0, 2), ("ssmax", "testing", 1, 2), ("ssmax", "testing", 2, 2),
    ]  # fmt: skip
    assert seen[1].loss is not None


@pytest.mark.parametrize("task", ["recall", "majority"])
def test_tasks_without_priorities_have_no_leak(tmp_path: Path, task: str) -> None:
    records = go(tmp_path, task=task).records
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
    ],
)
def test_wrong_input_is_refused_before_anything_is_written(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        go(tmp_path / "out", **changed)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("softmax", "sofmax"), "'softmax'"),
        (("softmax", "linear"), "'linear'"),
        (("softmax", "softmax"), "'softmax'.*twice"),
    ],
)
def test_wrong_normalizers_are_refused_before_the_first_is_trained(
    tmp_path: Path, names: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        go(tmp_path / "out", *names)
    assert not (tmp_path / "out").exists()


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ValueError, match="contains files"):
        go(tmp_path)
    with pytest.raises(ValueError, match="got the file"):
        go(tmp_path / "thesis.tex")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    go(tmp_path)
    (path,) = (tmp_path / "models").iterdir()
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match="is damaged"):
        go(tmp_path)
