"""What the command line prints when the disk is full or a name holds escape sequences."""

import errno
from pathlib import Path

import pytest
import typer

from attnorm.cli.output import _safe_messages, failures


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_names_the_folder_and_what_to_do(code: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as left, failures(writes_to=Path("results")):
        raise OSError(code, "No space left on device")
    printed = capsys.readouterr().err
    assert left.value.exit_code == 1
    assert "results" in printed
    assert "--out" in printed


def test_escape_sequences_of_a_name_are_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit), failures():
        raise OSError(errno.EIO, "Input/output error", "a\x1b[31mred\x9b1m.txt")
    assert "\x1b" not in capsys.readouterr().err
    with pytest.raises(typer.BadParameter) as wrong, _safe_messages(), failures():
        raise FileNotFoundError(errno.ENOENT, "No such file", "\x1b]0;title\x07")
    assert str(wrong.value).isprintable()
