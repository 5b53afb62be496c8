"""attnorm lab verify and attnorm lab frontier: tables, JSON, figures, exit codes, help for the mistyped."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from attnorm.cli import app
from attnorm.normalizers.registry import available
from attnorm.theory import gradient
from attnorm_lab.errata import claims
from attnorm_lab.errata.frontier import Frontier, place_on_frontier

runner = CliRunner()
QUICK = ["--budget", "0.001"]


def flat(text: str) -> str:
    return " ".join(text.replace("│", " ").split())


def test_verify_prints_what_it_found_and_exits_with_0() -> None:
    result = runner.invoke(app, ["lab", "verify", "corollary-3", "corollary-3-corrected", "theorem-2.2", *QUICK])
    assert result.exit_code == 0, result.output
    assert result.exception is None
    for word in ("refuted", "survived", "argument", "All as expected: 2 claims searched on 576 rows, 1 false"):
        assert word in result.stdout


def test_verify_exits_with_1_when_a_formula_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = gradient.corollary3_corrected
    monkeypatch.setattr(gradient, "corollary3_corrected", lambda temperature: 0.9 * sound(temperature))
    result = runner.invoke(app, ["lab", "verify", "corollary-3-corrected", *QUICK])
    assert result.exit_code == 1
    assert "Not as expected: corollary-3-corrected (VIOLATED)." in flat(result.stdout)


def test_verify_prints_json_even_where_a_ratio_is_infinite() -> None:
    result = runner.invoke(app, ["lab", "verify", "theorem-2-upper", "--json", "--seed", "5", *QUICK])
    found = json.loads(result.stdout)
    (finding,) = found["findings"]
    assert found["stands"]
    assert finding["stands"]
    assert finding["verdict"] == "refuted"
    assert finding["counterexample_found"]["seed"] == 5
    assert finding["correction"] == "theorem-2-corrected"


def test_a_counterexample_is_shown_in_full() -> None:
    listed = runner.invoke(app, ["lab", "verify", "corollary-3", "--json", *QUICK])
    smallest = json.loads(listed.stdout)["findings"][0]["counterexample_found"]
    again = json.loads(runner.invoke(app, ["lab", "verify", "--replay", smallest["address"], "--json"]).stdout)
    assert again["violated"]
    assert again["ratio"] == smallest["ratio"]
    assert len(again["logits"]) == len(again["vectors"]) == smallest["keys"]
    shown = runner.invoke(app, ["lab", "verify", "--replay", smallest["address"]])
    assert shown.exit_code == 0
    assert "It fails here" in shown.stdout
    assert f"{again['logits'][0]:.17g}" in shown.stdout


def test_the_address_in_the_documentation_is_that_of_a_counterexample() -> None:
    page = (Path(__file__).parents[2] / "docs" / "theory.md").read_text(encoding="utf-8")
    (address,) = re.findall(r"^attnorm lab verify --replay (\S+)", page, flags=re.MULTILINE)
    assert json.loads(runner.invoke(app, ["lab", "verify", "--replay", address, "--json"]).stdout)["violated"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["lab", "verify", "corolary-3"], "'corollary-3'"),
        (["lab", "verify", "--budget", "0"], "budget_seconds"),
        (["lab", "verify", "--replay", "corollary-3"], "CLAIM:SEED:ROUND:ROW"),
        (["lab", "verify", "--replay", "corollary-3:0:0:99"], "0 to 31, got 99"),
        (["lab", "verify", "--replay", "theorem-2.2:0:0:0"], "is proved by an argument"),
        (["lab", "verify", "horizon", "--figure", "f", *QUICK], "nothing to draw"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_why(arguments: list[str], complaint: str) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert complaint in flat(result.output)


def test_ctrl_c_prints_what_was_found_and_exits_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(temperature: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gradient, "corollary3_corrected", interrupted)
    result = runner.invoke(app, ["lab", "verify", "corollary-3", "corollary-3-corrected", *QUICK])
    assert result.exit_code == 130
    assert "refuted" in result.stdout
    assert not re.search("^ *corollary-3-corrected", result.stdout, flags=re.MULTILINE)
    assert "Interrupted" in result.stderr


def test_the_tightness_figure_is_drawn(tmp_path: Path) -> None:
    chosen = ["lemma-2", "lemma-2-corrected"]
    result = runner.invoke(app, ["lab", "verify", *chosen, "--figure", str(tmp_path), *QUICK])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "tightness.svg").read_text().count("<svg") == 1
    with Image.open(tmp_path / "tightness.png") as image:
        assert image.width == 1920


def test_frontier_prints_a_table_json_and_a_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured_once: list[Frontier] = []

    def place_once(progress: Callable[[str], None]) -> Frontier:
        if not measured_once:
            measured_once.append(place_on_frontier((16, 1024), progress=progress))
        return measured_once[0]

    monkeypatch.setattr("attnorm_lab.errata.frontier.place_on_frontier", place_once)
    result = runner.invoke(app, ["lab", "frontier", "--out", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    measured = json.loads(result.stdout)
    at = {(point["name"], point["n"], point["weight"]): point["effort"] for point in measured["points"]}
    law = {(point["n"], point["weight"]): point["effort"] for point in measured["law"]}
    assert at["softmax", 1024, 0.9] == pytest.approx(4.564, abs=1e-3)
    assert at["sparsemax", 1024, 0.9] == pytest.approx(law[1024, 0.9], rel=1e-5)
    assert all(effort >= law[n, weight] * (1 - 1e-5) for (_, n, weight), effort in at.items())
    names = {claim.id.removeprefix("frontier-") for claim in claims() if claim.family == "frontier"}
    assert {name for name, _, _ in at} == names | {"adaptive_temperature"}
    marked = {point["name"] for point in measured["points"] if point["constant_measured"]}
    assert marked == {"adaptive_temperature"}
    assert set(measured["absent"]) | {name for name, _, _ in at} == set(available())
    assert (tmp_path / "frontier.svg").stat().st_size > 10_000
    table = runner.invoke(app, ["lab", "frontier"])
    for word in ("the law", "kneemax", "1,024", "4.564", "adaptive_temperature*", "not shift invariant", "it jumps"):
        assert word in table.stdout
