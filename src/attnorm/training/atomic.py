"""Files and folders that are there whole or not at all, also when the machine stops in the middle."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write a file or a folder at; it takes the place of `path` when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    _remove(draft)
    try:
        yield draft
        _flush(draft)
        if draft.is_dir() and path.exists():  # a folder cannot replace one that holds files
            _remove(path)
        draft.replace(path)
        _flush(path.parent, itself_only=True)
    finally:
        _remove(draft)


def remove_drafts(folder: Path) -> None:
    """Remove what `replacing` left in the folder when its process was killed; drafts of running processes stay."""
    for draft in folder.glob(".*.tmp"):
        process = draft.name.removesuffix(".tmp").rpartition(".")[2]
        if process.isdecimal() and not _is_running(int(process)):
            _remove(draft)


def _is_running(process: int) -> bool:
    if process == os.getpid():
        return False  # this process has only begun
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OverflowError, PermissionError):
        return True
    return True


def write_text(path: Path, text: str) -> None:
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")


def write_json(path: Path, value: dict[str, Any]) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _flush(path: Path, *, itself_only: bool = False) -> None:
    """On disk, not only handed to the operating system: the new name must never point at missing bytes."""
    inside = path.iterdir() if path.is_dir() and not itself_only else ()
    for each in (*inside, path):
        descriptor = os.open(each, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
