"""The options about windows, budget and BOS of analyze, compare and stability."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from attnorm.cli import app
from tests.analysis.tiny_models import VOCABULARY, gpt2
from tests.cli.saved_model import save_model, save_text

runner = CliRunner()
CORE = ["--metrics", "core", "--json", "--no-html"]
BOS = VOCABULARY - 1


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_text(tmp_path_factory.mktemp("texts") / "words.txt", words=240))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("models") / "plain", layers=1))


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose tokenizer has a BOS token of its own and does not add it."""
    folder = tmp_path_factory.mktemp("models") / "bos"
    made = gpt2(layers=1, heads=2, positions=64, seed=0)
    made.config.bos_token_id, made.config.eos_token_id = BOS, 0
    made.save_pretrained(folder)
    vocabulary = {"[UNK]": 0} | {f"w{i}": i for i in range(1, BOS)} | {"<s>": BOS}
    words = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", bos_token="<s>").save_pretrained(folder)
    return str(folder)


def ran(*words: str) -> dict[str, Any]:
    result = runner.invoke(app, list(words))
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def manifest_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize(
    ("options", "windows", "length"),
    [
        (["--lengths", "32", "--windows", "3"], 3, 32),
        (["--lengths", "32", "--windows", "1"], 1, 32),
        (["--lengths", "32", "--budget", "64"], 2, 32),
        (["--budget", "128"], 8, 16),  # windows of an eighth of the budget
    ],
)
def test_windows_and_budget_set_what_is_measured(
    tmp_path: Path, model: str, text: str, options: list[str], windows: int, length: int
) -> None:
    ran("analyze", model, "--text", text, *options, *CORE, "--out", str(tmp_path / "run"))
    parts = manifest_of(tmp_path / "run")["parts"]
    assert [part["tokens"] for part in parts] == [length] * windows
    starts = [part["start"] for part in parts]
    assert all(later - earlier >= length for earlier, later in pairwise(starts)), "disjoint"


@pytest.mark.parametrize("option", [["--windows", "many"], ["--windows", "0"], ["--budget", "0"]])
def test_wrong_windows_and_budgets_exit_with_2_and_name_the_option(model: str, text: str, option: list[str]) -> None:
    result = runner.invoke(app, ["analyze", model, "--text", text, "--lengths", "32", *option, *CORE])
    assert result.exit_code == 2
    assert option[0].removeprefix("--") in result.output


def test_bos_starts_every_window_and_no_bos_none(tmp_path: Path, with_bos: str, text: str) -> None:
    options = ["--text", text, "--lengths", "32", "--windows", "3", *CORE]
    firsts = {}
    for option in ("--bos", "--no-bos"):
        out = tmp_path / option.removeprefix("--")
        ran("analyze", with_bos, *options, option, "--out", str(out))
        manifest = manifest_of(out)
        firsts[option] = [part["first_token"] for part in manifest["parts"]]
        assert manifest["settings"]["bos"] is (option == "--bos")
        assert not any("BOS" in note for note in manifest["notes"]), "the user has decided"
    assert firsts["--bos"] == ["<s>"] * 3
    assert "<s>" not in firsts["--no-bos"]
    ran("analyze", with_bos, *options, "--out", str(tmp_path / "open"))
    assert any("--bos" in note for note in manifest_of(tmp_path / "open")["notes"])


def test_bos_without_a_bos_token_exits_with_2(model: str, text: str, tmp_path: Path) -> None:
    folder = tmp_path / "none"
    made = gpt2(layers=1, heads=2, positions=64, seed=0)
    made.config.bos_token_id = None
    made.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((Path(model) / name).read_bytes())
    result = runner.invoke(app, ["analyze", str(folder), "--text", text, "--lengths", "32", "--bos", *CORE])
    assert result.exit_code == 2
    assert "BOS" in result.output


def test_compare_measures_with_the_windows_that_are_given(model: str, with_bos: str, text: str) -> None:
    options = ["--text", text, "--lengths", "32", "--metrics", "core", "--json"]
    assert ran("compare", model, with_bos, *options, "--windows", "2")["notes"] == []
    result = runner.invoke(app, ["compare", model, with_bos, *options, "--windows", "many"])
    assert result.exit_code == 2
    assert "--windows" in result.output


def test_compare_repeats_windows_and_bos_of_the_folder(
    tmp_path: Path, with_bos: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--text", text, "--lengths", "32", "--windows", "2", "--no-bos", *CORE]
    ran("analyze", with_bos, *options, "--out", str(tmp_path / "run"))
    seen: list[dict[str, Any]] = []
    from attnorm.cli import analysis_options

    def watched(name: str, **given: Any) -> Any:
        seen.append(given)
        return measure(name, **given)

    measure = analysis_options.measure
    monkeypatch.setattr(analysis_options, "measure", watched)
    ran("compare", str(tmp_path / "run"), with_bos, "--json")
    assert (seen[0]["windows"], seen[0]["bos"], seen[0]["lengths"]) == (2, False, [32])
    ran("compare", str(tmp_path / "run"), with_bos, "--windows", "3", "--bos", "--json")
    assert (seen[1]["windows"], seen[1]["bos"]) == (3, True)


def test_stability_measures_every_passage_and_counts_seeds_of_the_same_numbers_once(
    tmp_path: Path, model: str, text: str
) -> None:
    command = ["lab", "stability", model, "--text", text, "--passages", "2", "--seeds", "0,1", "--lengths", "16"]
    command += ["--windows", "2", "--out", str(tmp_path / "runs")]
    found = ran(*command, "--json")
    assert (found["runs"], found["heads"], found["passages"], found["seeds"]) == (2, 2, 2, [0, 1])
    assert (found["seeds_alike"], found["windows"], found["length"]) == ([0, 1], 2, 16)
    assert 0 <= found["same"] <= found["kept"] <= found["judged"] <= 2
    folders = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert folders == ["1", "2"]
    assert [manifest_of(tmp_path / "runs" / name)["settings"]["seed"] for name in folders] == [0, 0]
    again = runner.invoke(app, [*command, "--json"])
    assert again.stderr.count("Nothing was measured again") == 2
    assert json.loads(again.stdout) == found
    table = runner.invoke(app, command)
    assert table.exit_code == 0
    assert "2 passages x 2 seeds, 2 windows of 16 tokens" in table.stdout


def test_a_seed_that_changes_numbers_is_measured_on_every_passage(
    tmp_path: Path, model: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnorm.analysis.compare.same_numbers", lambda run, window: False)
    options = ["--passages", "2", "--seeds", "0,1", "--lengths", "16", "--windows", "2", "--json"]
    found = ran("lab", "stability", model, "--text", text, *options, "--out", str(tmp_path / "runs"))
    assert (found["runs"], found["seeds_alike"]) == (4, [0])
    folders = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert folders == ["1", "1-seed-1", "2", "2-seed-1"]
    assert [manifest_of(tmp_path / "runs" / name)["settings"]["seed"] for name in folders] == [0, 1, 0, 1]


def test_other_seeds_change_no_verdict(tmp_path: Path, model: str, text: str) -> None:
    options = ["--passages", "2", "--lengths", "16", "--windows", "2", "--json"]
    command = ("lab", "stability", model, "--text", text, *options, "--seeds")
    one, three = (ran(*command, seeds) for seeds in ("0", "0,1,2"))
    names = ("heads", "judged", "kept", "same", "undecided")
    assert {name: one[name] for name in names} == {name: three[name] for name in names}


def test_stability_starts_windows_with_bos_on_request(tmp_path: Path, with_bos: str, text: str) -> None:
    options = ["--text", text, "--passages", "2", "--lengths", "16", "--windows", "2", "--bos", "--json"]
    ran("lab", "stability", with_bos, *options, "--out", str(tmp_path / "runs"))
    for place in ("1", "2"):
        assert [part["first_token"] for part in manifest_of(tmp_path / "runs" / place)["parts"]] == ["<s>"] * 2


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ([], "--text"),
        (["--passages", "1"], "passages"),
        (["--seeds", "x"], "--seeds"),
        (["--windows", "x"], "--windows"),
    ],
)
def test_wrong_usage_of_stability_exits_with_2(model: str, text: str, words: list[str], named: str) -> None:
    given = ["lab", "stability", model, *(["--text", text] if words else []), *words]
    result = runner.invoke(app, given)
    assert result.exit_code == 2
    assert named in result.output
