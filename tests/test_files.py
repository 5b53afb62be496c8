"""Files are complete or absent, whatever happens while they are written; .jsonl files survive a killed process."""

import lzma
import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnorm.files import append_jsonl, atomic_replace, open_text, read_jsonl, read_text, write_json, write_text


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_keeps_its_content_if_writing_fails(tmp_path: Path) -> None:
    path = tmp_path / "result.txt"
    write_text(path, "old")

    def fail(draft: Path) -> None:
        draft.write_text("half of the n")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), atomic_replace(path) as draft:
        fail(draft)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["result.txt"]
    write_text(path, "new")
    assert path.read_text() == "new"


def test_a_folder_in_the_place_of_the_file_is_named_and_kept(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(IsADirectoryError, match=r"expected a file to write, got the folder .*out\."):
        write_text(tmp_path / "out", "page")
    assert names(tmp_path) == ["out"]


def test_the_content_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[int, bool]] = []
    path = tmp_path / "result.txt"
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append((os.fstat(descriptor).st_ino, path.exists())))
    write_text(path, "new")
    assert synced == [(path.stat().st_ino, False), (tmp_path.stat().st_ino, True)]


def test_a_folder_replaces_a_folder_that_holds_files(tmp_path: Path) -> None:
    for content in ("first", "second"):
        with atomic_replace(tmp_path / "deep" / "run") as draft:
            draft.mkdir()
            (draft / content).write_text(content)
    assert names(tmp_path / "deep" / "run") == ["second"]
    assert names(tmp_path / "deep") == ["run"]


@pytest.mark.skipif(os.name != "posix", reason="processes are looked up by signal 0")
def test_drafts_of_dead_processes_are_removed_and_those_of_living_ones_kept(tmp_path: Path) -> None:
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    abandoned = tmp_path / f".a.txt.{dead.stdout.strip()}.tmp"
    others = [tmp_path / f".a.txt.{os.getppid()}.tmp", tmp_path / f".ab.txt.{dead.stdout.strip()}.tmp"]
    for path in (abandoned, *others):
        path.write_text("draft")
    write_text(tmp_path / "a.txt", "whole")
    assert not abandoned.exists()
    assert all(path.exists() for path in others)


def test_numbers_that_json_does_not_have_are_rejected_before_the_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    write_json(path, {"loss": 1.5})
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(path, {"loss": float("nan")})
    assert path.read_text() == '{\n  "loss": 1.5\n}\n'


@pytest.mark.parametrize("left", ['{"step": 2, "lo', '{"step": 2, "lo\n', ""])
def test_an_incomplete_line_is_skipped_and_does_not_swallow_the_next_one(tmp_path: Path, left: str) -> None:
    path = tmp_path / "log.jsonl"
    assert read_jsonl(path) == []
    append_jsonl(path, [{"step": 1}])
    with path.open("a") as file:
        file.write(left)
    append_jsonl(path, [{"step": 3, "name": "ä"}, {"step": 4}])
    assert read_jsonl(path) == [{"step": 1}, {"step": 3, "name": "ä"}, {"step": 4}]


def test_compressed_text_and_records_are_read_like_plain_ones(tmp_path: Path) -> None:
    plain, packed = tmp_path / "a.jsonl", tmp_path / "a.jsonl.xz"
    append_jsonl(plain, [{"a": 1}, {"b": [2]}])
    packed.write_bytes(lzma.compress(plain.read_bytes()))
    assert read_jsonl(packed) == read_jsonl(plain) == [{"a": 1}, {"b": [2]}]
    assert read_text(packed) == read_text(plain)
    marked = tmp_path / "marked.txt"
    marked.write_bytes("\ufeffbook".encode())
    with open_text(marked) as file:
        assert file.read() == "book"
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"a\.jsonl\.xz"):
        read_jsonl(packed)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [("a.txt", b"\xff\xfe\xfa", "not UTF-8"), ("a.txt.xz", b"plain", "xz"), ("none.txt", None, "cannot read")],
)
def test_unreadable_texts_name_the_file_and_the_reason(
    tmp_path: Path, name: str, content: bytes | None, complaint: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=complaint) as raised:
        read_text(tmp_path / name)
    assert str(tmp_path / name) in str(raised.value)
