"""The call that a record keeps: it can be repeated, and tells nobody's folders."""

import sys
from pathlib import Path

import pytest

from attnorm.provenance import recorded_command


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["train", "lm", "{here}/book.txt", "--valid", "../v.txt"], "train lm book.txt --valid v.txt"),
        (["train", "lm", "--valid={here}/v.txt", "~/b.txt"], "train lm --valid=v.txt b.txt"),
        (["reproduce", "fig2", "--out", "runs/new"], "reproduce fig2 --out new"),
        (["reproduce", "fig2", "--model", "owner/name"], "reproduce fig2 --model owner/name"),
        (["train", "lm", "--note", "see https://example.org/book"], "train lm --note 'see https://example.org/book'"),
        (["train", "lm", "--note", "/".join(["x" * 300] * 2)], f"train lm --note {'/'.join(['x' * 300] * 2)}"),
    ],
)
def test_files_lose_their_folders_and_nothing_else_changes(
    words: list[str], kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["/usr/bin/attnorm", *(word.format(here=tmp_path) for word in words)])
    assert recorded_command() == f"attnorm {kept}"
