"""What the command line prints when the disk is full or a name holds escape sequences."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from attnorm import files
from attnorm.analysis.result import Analysis
from attnorm.analysis.verdicts.thresholds import Thresholds
from attnorm.cli import app
from attnorm.cli.output import _safe_messages, failures
from tests.analysis.synthetic import synthetic_manifest, synthetic_tables
from tests.cli.saved_model import save_model, save_text
from tests_lab.experiments.toy_experiments import Toy

FillDisk = Callable[[str], None]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_names_the_folder_and_what_to_do(code: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as left, failures(writes_to=Path("results")):
        raise OSError(code, "No space left on device")
    printed = capsys.readouterr().err
    assert left.value.exit_code == 1
    assert "results" in printed
    assert "--out" in printed


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PermissionError(13, "Permission denied", "results/a"), 1),
        (NotADirectoryError(20, "Not a directory", "results"), 2),
    ],
)
def test_a_folder_that_cannot_be_written_is_named_with_what_to_do(
    error: OSError, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((typer.Exit, typer.BadParameter)) as left, failures(writes_to=Path("results")):
        raise error
    printed = capsys.readouterr().err + getattr(left.value, "message", "")
    assert left.value.exit_code == code
    assert "results" in printed
    assert "--out" in printed


@pytest.fixture
def fill_disk(monkeypatch: pytest.MonkeyPatch) -> FillDisk:
    """Let no draft whose name holds a word be written any more. As in reality, the error names no file."""
    write = files._fsync

    def full(word: str) -> None:
        def fsync(path: Path, *, contents: bool = True) -> None:
            if word in path.name:
                raise OSError(errno.ENOSPC, "No space left on device")
            write(path, contents=contents)

        monkeypatch.setattr(files, "_fsync", fsync)

    return full


def stopped(*arguments: str) -> str:
    """What a command that ends with code 1 prints."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    return " ".join(result.stderr.split())


@pytest.mark.parametrize("out", ["", "run"])
def test_analyze_names_the_report_that_it_cannot_write(
    out: str, fill_disk: FillDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, text = save_model(tmp_path / "tiny-gpt"), save_text(tmp_path / "words.txt")
    fill_disk(".html")
    measured = ["analyze", str(model), "--text", str(text), "--lengths", "16", "--metrics", "core", "--threads", "1"]
    printed = stopped(*measured, *(["--out", out] if out else []))
    page = Path(out) / "report.html" if out else "attnorm-tiny-gpt.html"
    assert f"No space left on device: {page}. Free some space" in printed
    assert "--out" in printed


@pytest.mark.parametrize("asked", ["page.html", ""])
def test_report_names_the_page_that_it_cannot_write(asked: str, fill_disk: FillDisk, tmp_path: Path) -> None:
    options = {"cast": (("selects",),), "lengths": (128,)}
    Analysis.of(synthetic_tables(**options), synthetic_manifest(**options), Thresholds()).save(tmp_path / "run")
    fill_disk(".html")
    page = tmp_path / asked if asked else tmp_path / "run" / "report.html"
    printed = stopped("report", str(tmp_path / "run"), *(["--out", str(page)] if asked else []))
    assert f"No space left on device: {page}. Free some space" in printed
    assert "--out" in printed


@pytest.mark.parametrize("word", ["toy", "index.html"])
def test_reproduce_names_the_folder_that_it_cannot_write(
    word: str, fill_disk: FillDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Toy().enter(monkeypatch)
    fill_disk(word)
    printed = stopped("lab", "reproduce", "toy", "--quick", "--out", str(tmp_path / "results"))
    assert f"No space left on device: {tmp_path / 'results'}. Free some space" in printed
    assert "--out" in printed


def test_a_stage_of_reproduce_names_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> bool:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("attnorm_lab.cli.reproduce._run_stage", full)
    printed = stopped("lab", "reproduce", "language-models", "--stage", "main", "--out", str(tmp_path / "models"))
    assert f"No space left on device: {tmp_path / 'models'}. Free some space" in printed


def test_escape_sequences_of_a_name_are_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), failures():
        raise OSError(errno.EIO, "Input/output error", "a\x1b[31mred\x9b1m.txt")
    assert "\x1b" not in capsys.readouterr().err
    with pytest.raises(typer.BadParameter) as wrong, _safe_messages(), failures():
        raise FileNotFoundError(errno.ENOENT, "No such file", "\x1b]0;title\x07")
    assert str(wrong.value).isprintable()
