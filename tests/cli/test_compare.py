"""attnorm compare: saved runs and models side by side."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from attnorm.analysis.result import Analysis
from attnorm.analysis.verdicts.thresholds import Thresholds
from attnorm.cli import app
from tests.analysis.synthetic import synthetic_manifest, synthetic_tables
from tests.cli.saved_model import save_model, save_text

runner = CliRunner()
CAST = (("selects", "flat"), ("lazy", "parked"))


def flat(text: str) -> str:
    return " ".join(text.replace("│", " ").split())


def saved(folder: Path, cast: Any = CAST, normalizers: tuple[str, ...] = ("model",)) -> str:
    options: dict[str, Any] = {"cast": cast, "lengths": (128,), "normalizers": normalizers}
    Analysis.of(synthetic_tables(**options), synthetic_manifest(**options), Thresholds()).save(folder)
    return str(folder)


def test_two_runs_are_compared_head_by_head(tmp_path: Path) -> None:
    before = saved(tmp_path / "before")
    after = saved(tmp_path / "after", (("selects", "selects"), CAST[1]))
    result = runner.invoke(app, ["compare", before, after])
    assert result.exit_code == 0, result.output
    assert "1 of 4 heads have another verdict" in flat(result.stdout)
    found = json.loads(runner.invoke(app, ["compare", before, after, "--json"]).stdout)
    assert found["changes"][0]["verdicts"] == ["dispersed-forced", "healthy"]
    assert found["changed_verdicts"] == {after: 1}
    assert [side["label"] for side in found["sides"]] == [before, after]


def test_one_run_is_compared_over_its_normalizers(tmp_path: Path) -> None:
    result = runner.invoke(app, ["compare", saved(tmp_path / "run", normalizers=("model", "entmax15"))])
    assert result.exit_code == 0, result.output
    assert "entmax15 compared with model" in result.stdout


def test_models_are_measured_on_the_spot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = save_text(tmp_path / "words.txt")
    models = [
        str(save_model(tmp_path / f"model-{seed}", layers=layers, seed=seed)) for seed, layers in ((0, 1), (1, 2))
    ]
    result = runner.invoke(app, ["compare", *models, "--text", str(text), "--lengths", "32", "--metrics", "core"])
    assert result.exit_code == 0, result.output
    assert "has other layers or heads" in flat(result.stdout)
    assert not list(tmp_path.glob("*.html"))


def measured(tmp_path: Path) -> tuple[list[str], Path]:
    """A run in a folder, measured in its own way, and another model to compare it with; the text."""
    text = save_text(tmp_path / "words.txt")
    models = [str(save_model(tmp_path / f"model-{seed}", seed=seed)) for seed in (0, 1)]
    out = str(tmp_path / "run")
    options = ["--lengths", "24,32", "--rows", "8", "--metrics", "core", "--out", out, "--no-html"]
    assert runner.invoke(app, ["analyze", models[0], "--text", str(text), *options]).exit_code == 0
    return [out, models[1]], text


def test_a_model_is_measured_as_the_folder_before_it_was(tmp_path: Path) -> None:
    sides, _ = measured(tmp_path)
    result = runner.invoke(app, ["compare", *sides, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["notes"] == []
    assert found["matched"] == [sides[1]]
    assert [side["longest"] for side in found["sides"]] == [32, 32]
    found = json.loads(runner.invoke(app, ["compare", *sides, "--lengths", "16", "--rows", "all", "--json"]).stdout)
    assert [side["longest"] for side in found["sides"]] == [32, 16]
    assert "the measured rows differ" in " ".join(found["notes"])


def test_a_text_that_cannot_be_read_again_is_asked_for(tmp_path: Path) -> None:
    sides, text = measured(tmp_path)
    other = save_text(tmp_path / "other.txt", seed=1)
    for change, says in ((lambda: text.write_text(other.read_text()), "has changed"), (text.unlink, "does not exist")):
        change()
        refused = runner.invoke(app, ["compare", *sides])
        assert refused.exit_code == 2
        assert says in flat(refused.stderr)
        assert "--text FILE" in flat(refused.stderr)
    given = runner.invoke(app, ["compare", *sides, "--text", str(other)])
    assert given.exit_code == 0, given.output
    assert "the texts differ" in flat(given.stdout)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["{run}"], "--normalizers"),
        (["{run}", "{run}"], "twice"),
        (["{run}", "{empty}"], "manifest.json"),
        (["{run}", "./nothing"], "'./nothing'"),
        (["./nothing"], "'./nothing'"),
        (["bundled"], "attnorm analyze bundled --normalizers"),
    ],
)
def test_what_cannot_be_compared_exits_with_2(arguments: list[str], complaint: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    folders = {"run": saved(tmp_path / "run"), "empty": str(tmp_path / "empty")}
    result = runner.invoke(app, ["compare", *(argument.format(**folders) for argument in arguments)])
    assert result.exit_code == 2, result.output
    assert complaint in flat(result.output)


def test_thresholds_hold_for_all_sides_and_a_difference_is_found(tmp_path: Path) -> None:
    here, there = saved(tmp_path / "here"), saved(tmp_path / "there")
    strict = Thresholds(dispersed_entropy=1.0)
    Analysis.load(there).judged(strict).save(there)
    assert "the thresholds differ" in flat(runner.invoke(app, ["compare", here, there]).stdout)
    result = runner.invoke(app, ["compare", here, there, "--threshold", "dispersed_entropy=1", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["changed_verdicts"] == {there: 0}
    assert found["sides"][0]["counts"]["dispersed-forced"] == 0
    assert not found["notes"]
    refused = runner.invoke(app, ["compare", here, there, "--threshold", "zebra=1"])
    assert refused.exit_code == 2
    assert "'zebra'" in flat(refused.stderr)
