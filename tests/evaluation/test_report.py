"""Scores of an evaluation in the report of an analysis, and beside a comparison of analyses."""

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import attnorm
from attnorm.cli import app
from attnorm.evaluation.result import Evaluation, EvaluationPart, Scores, side_by_side

runner = CliRunner()
NAMES = ["a", "b", "c"]
LOSSES = {"model": [3.0, 3.1, 3.2], "ssmax": [3.5, 3.61, 3.69]}


def evaluation(model: str = "bundled") -> Evaluation:
    """Perplexity before and after, and pass keys of the model alone."""
    parts = [
        EvaluationPart(side, "perplexity", 64, Scores("nats per token", "lower", values, NAMES), 1.0)
        for side, values in LOSSES.items()
    ]
    parts.append(EvaluationPart("model", "pass-key", 64, Scores("exact", "higher", [1.0, 0.0, 1.0], NAMES), 1.0))
    items = [["perplexity", 64], ["pass-key", 64]]
    record = {"run": {"model": model}, "sides": ["model", "ssmax"], "items": items, "command": "attnorm evaluate <b>"}
    return Evaluation(record, tuple(parts))


def save(found: Evaluation, folder: Path) -> Path:
    (folder / "parts").mkdir(parents=True)
    (folder / "evaluation.json").write_text(json.dumps(found.record))
    for number, part in enumerate(found.parts):
        (folder / "parts" / f"{number}.json").write_text(json.dumps(part.as_dict()))
    return folder


@pytest.fixture(scope="module")
def analysis(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("analysis")
    attnorm.analyze("bundled", lengths=[64], windows=1, rows=4, out=folder / "run")
    return folder / "run"


@pytest.fixture
def run(analysis: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(analysis, tmp_path / "run"))


def section(page: Path) -> str:
    found = re.search(r'<section id="evaluation".*?</section>', page.read_text(encoding="utf-8"), re.DOTALL)
    return found[0] if found else ""


def test_the_sides_of_a_task_and_length_are_in_one_line() -> None:
    table = evaluation().score_table()
    assert table.sides == ("model", "ssmax")
    losses, keys = table.rows
    assert (losses.task, losses.length, losses.documents, losses.better) == ("perplexity", 64, 3, "lower")
    before, after = losses.cells
    assert before is not None
    assert after is not None
    assert (before.score, before.change, before.verdict) == ("3.100", "", "")
    assert (after.score, after.verdict) == ("3.600", "worse")
    low, high = (float(end) for end in after.interval.split(" to "))
    assert low < 3.6 < high
    assert after.change.startswith("+0.500 (+0.4")
    assert 0 < before.drawn[0] < before.drawn[1] < before.drawn[2] < after.drawn[1] < 160
    assert keys.cells[0] is not None
    assert keys.cells[0].score == "66.7 %"
    assert keys.cells[1] is None


def test_the_report_shows_the_evaluation_of_its_folder(run: Path) -> None:
    assert runner.invoke(app, ["report", str(run)]).exit_code == 0
    assert section(run / "report.html") == ""
    save(evaluation(), run / "evaluation")
    assert runner.invoke(app, ["report", str(run)]).exit_code == 0
    shown = section(run / "report.html")
    for word in ("3.100", "3.600", "+0.500", "worse", "66.7 %", "ssmax", "attnorm evaluate &lt;b&gt;"):
        assert word in shown, word
    assert shown.count("<circle") == 3
    assert "These scores are of" not in shown
    assert 'href="#evaluation"' in (run / "report.html").read_text(encoding="utf-8")


def test_an_evaluation_that_was_stopped_in_its_first_part_is_not_shown(run: Path) -> None:
    for part in (save(evaluation(), run / "evaluation") / "parts").glob("*.json"):
        part.unlink()
    found = runner.invoke(app, ["report", str(run)])
    assert found.exit_code == 0, found.output
    assert section(run / "report.html") == ""


def test_the_evaluation_may_be_in_another_folder_and_of_another_model(run: Path, tmp_path: Path) -> None:
    other = save(evaluation("tuned"), tmp_path / "scores")
    assert runner.invoke(app, ["report", str(run), "--evaluation", str(other)]).exit_code == 0
    assert "These scores are of <bdi>tuned</bdi>" in section(run / "report.html")
    missing = runner.invoke(app, ["report", str(run), "--evaluation", str(tmp_path)])
    assert missing.exit_code == 2
    assert "evaluation.json" in missing.output


def test_python_takes_what_evaluate_returns(run: Path) -> None:
    page = attnorm.Analysis.load(run).save_html(run / "other.html", evaluation=evaluation())
    assert "3.600" in section(page)


def test_compare_shows_the_scores_of_the_analyses(analysis: Path, tmp_path: Path) -> None:
    names = []
    for name in ("a", "b"):
        shutil.copytree(analysis, tmp_path / name)
        save(evaluation(), tmp_path / name / "evaluation")
        names.append(str(tmp_path / name))
    both = side_by_side({name: evaluation() for name in names})
    found = runner.invoke(app, ["compare", *names, "--json"])
    assert found.exit_code == 0, found.output
    assert [row["side"] for row in json.loads(found.stdout)["evaluation"]["rows"]] == [row.side for row in both.rows]
    assert "p (Holm)" in runner.invoke(app, ["compare", *names]).output
    shutil.rmtree(tmp_path / "b" / "evaluation")
    shutil.rmtree(tmp_path / "a" / "evaluation")
    assert "evaluation" not in json.loads(runner.invoke(app, ["compare", *names, "--json"]).stdout)
