"""Names of models, texts and folders that hold escape sequences: no command prints a control or format character."""

import io
import json
import shutil
import unicodedata
import warnings
from pathlib import Path

import pytest
from rich.table import Table
from typer.testing import CliRunner, Result

from attnorm.analysis.result import Analysis
from attnorm.cli import app
from attnorm.cli.output import SafeConsole, show_json
from attnorm.text import escaped_json, visible_lines
from tests.cli.saved_model import save_model, save_text

# Clears the screen, sets a title, is red by an 8-bit sequence, reverses what follows, and is markup of rich.
EVIL = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202e[red]"
SMALL = ["--lengths", "16", "--rows", "8", "--metrics", "core", "--device", "cpu"]


def hidden_in(text: str) -> set[str]:
    return {one for one in text if one != "\n" and unicodedata.category(one) in ("Cc", "Cf", "Cs", "Zl", "Zp")}


def run(*argv: str) -> Result:
    result = CliRunner().invoke(app, list(argv))
    assert not hidden_in(result.stdout)
    assert not hidden_in(result.stderr)
    return result


@pytest.fixture(scope="module")
def analyzed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A folder of results, and what the command printed."""
    folder = tmp_path_factory.mktemp("hostile")
    model = save_model(folder / f"model{EVIL}")
    text = save_text(folder / f"text{EVIL}.txt")
    out = folder / f"out{EVIL}"
    return out, run("analyze", str(model), "--text", str(text), *SMALL, "--out", str(out))


def test_analyze_prints_the_names_with_their_characters_spelled_out(analyzed: tuple[Path, Result]) -> None:
    _, printed = analyzed
    assert printed.exit_code == 0, printed.output
    assert "␛[2J" in printed.stdout
    assert "out␛[2J␛]0;owned␇⟨U+009B⟩31m⟨U+202E⟩[red]" in printed.stderr


def test_json_keeps_the_value_of_a_name(analyzed: tuple[Path, Result]) -> None:
    out, _ = analyzed
    printed = run("report", str(out), "--json")
    assert printed.exit_code == 0, printed.output
    assert EVIL in "".join(strings_of(json.loads(printed.stdout)))


def strings_of(value: object) -> list[str]:
    if isinstance(value, dict):
        return [one for key, inner in value.items() for one in (str(key), *strings_of(inner))]
    if isinstance(value, list):
        return [one for inner in value for one in strings_of(inner)]
    return [value] if isinstance(value, str) else []


def test_compare_and_the_summary_are_safe_too(analyzed: tuple[Path, Result]) -> None:
    out, _ = analyzed
    shutil.copytree(out, out.with_name(f"other{EVIL}"))
    printed = run("compare", str(out), str(out.with_name(f"other{EVIL}")))
    assert printed.exit_code == 0, printed.output
    assert "[red]" in printed.stdout.replace("\n", "")
    found = Analysis.load(out)
    assert not hidden_in(found.summary())
    assert "␛[2J" in found.summary()
    assert not hidden_in(found._repr_html_())


@pytest.mark.parametrize(
    "argv",
    [
        ["analyze", f"no-such-{EVIL}"],
        ["analyze", "bundled", "--text", f"no-such-{EVIL}.txt"],
        ["analyze", "bundled", "--rows", EVIL],
        ["analyze", f"--{EVIL}"],
        ["report", f"no-such-{EVIL}"],
        ["compare", f"no-such-{EVIL}", f"no-such-{EVIL}"],
        ["lab", "bench", "analyze", "--text", f"no-such-{EVIL}"],
        ["lab", "train", "lm", f"no-such-{EVIL}", "--valid", EVIL, "--out", f"no-such-{EVIL}"],
        ["lab", "train", "retrieval", "--out", "never", "--normalizers", EVIL],
        ["lab", "train", "needle", f"no-such-{EVIL}", "--text", EVIL],
        ["lab", "reproduce", f"no-such-{EVIL}"],
        ["normalizers", EVIL],
        [EVIL],
    ],
    ids=lambda argv: " ".join(argv[:2]).encode("unicode_escape").decode()[:24],
)
def test_an_error_names_what_was_given_safely(argv: list[str]) -> None:
    assert run(*argv).exit_code == 2


def test_only_styles_of_our_own_reach_a_terminal() -> None:
    table = Table(title=EVIL)
    table.add_column("a")
    table.add_row(EVIL, style="red")
    out = io.StringIO()
    SafeConsole(file=out, force_terminal=True, width=80, color_system="standard").print(table)
    assert "\x1b[31m" in out.getvalue()  # the style
    assert "\x1b[2J" not in out.getvalue()
    assert not {"\x07", "\x9b", "\u202e"} & set(out.getvalue())


def test_warnings_are_printed_safely(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from attnorm.cli import output

    def shown(message: object, *_: object, **__: object) -> None:
        print(message)  # noqa: T201

    monkeypatch.setattr(warnings, "showwarning", shown)
    with output._safe_messages(), warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn(EVIL, stacklevel=1)
    assert not hidden_in(capsys.readouterr().out)
    assert warnings.showwarning is shown


def test_printed_json_is_the_same_value(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"name": f"{EVIL}\ud800\U000e0041é🦉\n\u2028", "inner": [{"\x7f": "\x00"}]}
    show_json(value)
    printed = capsys.readouterr().out
    assert not hidden_in(printed)
    assert json.loads(printed) == value
    assert escaped_json('"é🦉"') == '"é🦉"'


def test_lines_stay_and_everything_else_that_is_hidden_is_spelled_out() -> None:
    assert visible_lines("one\ntwo\x1b[0m\tthree\r\n") == "one\ntwo␛[0m⇥three␍\n"
    assert visible_lines("plain é 🦉") == "plain é 🦉"
