"""A plan becomes items that are identified by their content, and wrong plans are explained."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from attnorm_lab.runs.plan import Plan, read_plan
from attnorm_lab.runs.tasks import lm_settings

Write = Callable[[str], Path]
ANALYZE = """
command = "analyze"
[grid]
model = ["bundled"]
text = ["a.txt", "b.txt"]
length = [64, 128]
[options]
windows = 1
"""


@pytest.fixture
def texts(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"{name} text\n" * 50)


def ids(plan: Plan) -> list[str]:
    return [item.id for item in plan.items]


@pytest.mark.usefixtures("texts")
def test_every_combination_is_one_item(plan_file: Write) -> None:
    plan = read_plan(plan_file(ANALYZE))
    assert [(item.varied["text"], item.varied["length"]) for item in plan.items] == [
        ("a.txt", 64), ("a.txt", 128), ("b.txt", 64), ("b.txt", 128),
    ]  # fmt: skip
    assert len(set(ids(plan))) == 4
    assert all(item.values["windows"] == 1 for item in plan.items)


@pytest.mark.usefixtures("texts")
def test_an_item_is_identified_by_the_content_of_its_files(plan_file: Write, tmp_path: Path) -> None:
    path = plan_file(ANALYZE)
    before = ids(read_plan(path))
    (tmp_path / "b.txt").write_text("another text\n" * 50)
    after = ids(read_plan(path))
    assert before[:2] == after[:2]
    assert set(before[2:]).isdisjoint(after[2:])


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_an_item_is_identified_by_the_content_of_its_model(plan_file: Write, tmp_path: Path, name: str) -> None:
    model = tmp_path / "mine"
    model.mkdir()
    for file in ("config.json", "model.safetensors", "tokenizer.json", "README.md"):
        (model / file).write_bytes(b"first")
    path = plan_file('command="analyze"\n[grid]\nlength=[8]\nmodel=["mine"]')
    before = ids(read_plan(path))
    (model / "README.md").write_bytes(b"other")
    assert ids(read_plan(path)) == before
    (model / name).write_bytes(b"again")  # as many bytes, as after another training
    assert ids(read_plan(path)) != before


def test_items_of_one_model_are_neighbours(plan_file: Write) -> None:
    plan = read_plan(plan_file('command="analyze"\n[grid]\nlength=[8, 9]\nmodel=["gpt2", "bundled"]'))
    assert [item.varied["model"] for item in plan.items] == ["gpt2", "gpt2", "bundled", "bundled"]


@pytest.mark.usefixtures("texts")
def test_normalizers_may_be_names_files_and_recipes(plan_file: Write, tmp_path: Path) -> None:
    (tmp_path / "mixed.toml").write_text('[layers]\n"1" = "ssmax"\n')
    plan = read_plan(
        plan_file(
            'command="train lm"\n[grid]\nnormalizer=["entmax:alpha=1.3", "mixed.toml", {"0" = "ssmax"}]\n'
            '[options]\ntexts=["a.txt"]\nvalid="b.txt"\nlayers=2\n'
        )
    )
    first, second, third = (lm_settings(item.values) for item in plan.items)
    assert (first.normalizer, first.normalizer_options) == ("entmax", {"alpha": 1.3})
    assert second.recipe == {"0": "softmax", "1": "ssmax"}
    assert third.recipe == {"0": "ssmax", "1": "softmax"}
    assert plan.items[2].label == "normalizer 0:ssmax"


LM = 'command="train lm"\n[options]\ntexts=["a.txt"]\nvalid="b.txt"\n'


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("command = 'analyse'", "'analyze'"),
        ("", "command"),
        ("command = [", "TOML"),
        ("command = 'analyze'\n[gird]\nmodel = ['bundled']", "'grid'"),
        ("command = 'analyze'\n[grid]\nmodle = ['bundled']", "'model'"),
        ("command = 'analyze'\n[grid]\nlength = [8]", "model"),
        ("command = 'analyze'\n[grid]\nmodel = 'bundled'", "grid.model"),
        ("command = 'analyze'\n[grid]\nmodel = []", "grid.model"),
        ("command = 'analyze'\n[grid]\nmodel = ['bundled', 'bundled']", "twice"),
        ("command = 'analyze'\n[grid]\nmodel = ['bundled']\n[options]\nmodel = 'gpt2'", "both"),
        ("command = 'analyze'\n[grid]\nmodel = ['bundled']\ntext = ['c.txt']", "'c.txt'"),
        ("command = 'analyze'\n[grid]\nmodel = ['bundled']\nlength = ['long']", "length"),
        ("command = 'analyze'\n[grid]\nmodel = ['bundled']\nlength = [0]", "0"),
        ("command = 'analyze'\n[options]\nmodel = 'bundled'\nmetrics = ['cores']", "'core'"),
        ("command = 'analyze'\n[options]\nmodel = 'bundled'\n[resources]\ncpu = 2", "'cpus'"),
        ("command = 'analyze'\n[options]\nmodel = 'bundled'\n[resources]\ncpus = -1", "cpus"),
        (LM + "normalizer = 'sofmax'", "'softmax'"),
        (LM + "layers = 1\nnormalizer = {'3' = 'ssmax'}", "3"),
        (LM + "steps = 0", "steps"),
        (LM + "steps = 1.5", "steps"),
        (LM + "needle = {step = 5}", "'steps'"),
        ("command = 'train retrieval'\n[options]\nnormalizer = 'ssmaxx'", "'ssmax'"),
        ("command = 'reproduce'\n[options]\nexperiment = 'fig9'", "fig9"),
    ],
)
@pytest.mark.usefixtures("texts")
def test_a_wrong_plan_is_explained(plan_file: Write, text: str, named: str) -> None:
    with pytest.raises(ValueError, match=named) as error:
        read_plan(plan_file(text))
    assert "plan.toml" in str(error.value)


def test_resources_are_read(plan_file: Write) -> None:
    text = "command='analyze'\n[options]\nmodel='bundled'\n[resources]\ncpus=2\nmemory_gb=1.5"
    resources: Any = read_plan(plan_file(text)).resources
    assert (resources.cpus, resources.gpus, resources.memory_gb, resources.threads) == (2, 0, 1.5, 2)
