"""Files are whole or absent; a part is there or not, whatever happens in between."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

from attnorm.analysis import store
from attnorm.analysis.tables import Part
from tests.analysis.tables_of import tables


def part(key: str = "k" * 64, **numbers: float) -> Part:
    return Part(key, {"text": "t", "length": 16, "tokens": 16, "seconds": 0.1}, tables(**numbers))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


def bits(tables: dict[str, pa.Table]) -> dict[str, object]:
    """What NaN, infinities and denormals hide from ==: the bytes of every number."""
    return {
        f"{name}.{column}": values.to_numpy().tobytes() if values.type == pa.float64() else values.to_pylist()
        for name, table in tables.items()
        for column, values in zip(table.column_names, table.columns, strict=True)
    }


def test_a_part_comes_back_bit_for_bit(tmp_path: Path) -> None:
    written = part()
    store.write_part(tmp_path, written)
    read = store.read_part(tmp_path, written.key)
    assert read is not None
    assert read.about == {"key": written.key, **written.about}
    for name, table in written.tables.items():
        assert read.tables[name].schema.equals(table.schema)
    assert bits(read.tables) == bits(written.tables)
    assert store.finished_parts(tmp_path) == 1


def test_a_part_that_was_never_written_is_none(tmp_path: Path) -> None:
    assert store.read_part(tmp_path, "missing") is None
    assert store.finished_parts(tmp_path) == 0


@pytest.mark.parametrize("fails_at", [1, 3, 6])
def test_a_full_disk_leaves_no_half_part_and_says_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    store.write_part(tmp_path, part("a" * 64))
    written, real = 0, store._write_bytes

    def failing(path: Path, content: bytes) -> None:
        nonlocal written
        written += 1
        if written == fails_at:
            real(path, content[: len(content) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        real(path, content)

    monkeypatch.setattr(store, "_write_bytes", failing)
    with pytest.raises(OSError, match="disk is full") as caught, store.explained_when_full(tmp_path):
        store.write_part(tmp_path, part("b" * 64))
    assert caught.value.errno == errno.ENOSPC
    assert str(tmp_path) in str(caught.value)
    assert "1 finished part is kept" in str(caught.value)
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["a" * 64]


def test_other_errors_of_the_disk_are_not_called_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), store.explained_when_full(tmp_path):
        raise PermissionError(errno.EACCES, "denied")


def test_a_file_keeps_its_old_content_when_writing_the_new_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "deep" / "manifest.json"
    store.write_json(path, {"value": 1})

    def failing(path: Path, content: bytes) -> None:
        path.write_bytes(content[:3])
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(store, "_write_bytes", failing)
    with pytest.raises(OSError, match="full"):
        store.write_json(path, {"value": 2})
    assert store.read_json(path) == {"value": 1}
    assert [file.name for file in path.parent.iterdir()] == ["manifest.json"]


def test_what_a_killed_process_left_is_no_part(tmp_path: Path) -> None:
    leftover = tmp_path / "parts" / f".{'k' * 64}-abc"
    leftover.mkdir(parents=True)
    (leftover / "heads.parquet").write_bytes(b"half")
    assert store.finished_parts(tmp_path) == 0
    assert store.read_part(tmp_path, "k" * 64) is None


def test_a_part_from_another_process_stays_unless_it_is_to_be_replaced(tmp_path: Path) -> None:
    store.write_part(tmp_path, part(row_sum=1.0))
    store.write_part(tmp_path, part(row_sum=2.0))
    kept = store.read_part(tmp_path, part().key)
    assert kept is not None
    assert kept.tables["heads"]["row_sum"].to_pylist() == [1.0, 1.0]
    store.write_part(tmp_path, part(row_sum=2.0), replace=True)
    kept = store.read_part(tmp_path, part().key)
    assert kept is not None
    assert kept.tables["heads"]["row_sum"].to_pylist() == [2.0, 2.0]


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    store.write_part(tmp_path, part())
    damaged = tmp_path / "parts" / part().key / "heads.parquet"
    damaged.write_bytes(damaged.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"heads\.parquet"):
        store.read_part(tmp_path, part().key)


def test_a_part_of_other_columns_is_refused(tmp_path: Path) -> None:
    other = part()
    other.tables["coverage"] = other.tables["coverage"].drop_columns(["union"])
    store.write_part(tmp_path, other)
    with pytest.raises(ValueError, match=r"coverage\.parquet"):
        store.read_part(tmp_path, other.key)


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", "\x00"])
def test_a_manifest_of_something_else_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match=r"manifest\.json"):
        store.read_json(tmp_path / "manifest.json")


def test_json_refuses_what_other_readers_could_not_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"not JSON compliant|Out of range"):
        store.write_json(tmp_path / "a.json", {"value": float("nan")})
    assert names(tmp_path) == []
    store.write_json(tmp_path / "a.json", {"name": "Ω 😀"})
    assert store.read_json(tmp_path / "a.json") == {"name": "Ω 😀"}


def test_drafts_of_killed_processes_go_and_those_of_running_ones_stay(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    target = tmp_path / "heads [1].parquet"
    left, at_work = (tmp_path / f".{target.name}.{process}.tmp" for process in (gone.pid, os.getppid()))
    others = [tmp_path / f".other.parquet.{gone.pid}.tmp", tmp_path / f".{target.name}.notes.tmp"]
    for path in (left, at_work, *others):
        path.write_bytes(b"half")
    store.write_file(target, b"whole")
    assert target.read_bytes() == b"whole"
    assert not left.exists()
    assert at_work.exists()
    assert all(path.exists() for path in others)
