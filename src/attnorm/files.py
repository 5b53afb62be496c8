"""Files and folders that exist completely or not at all, and text that may be compressed with xz.

Every part of attnorm writes its results through `atomic_replace`: a reader never sees half a file, and a crash of the
machine leaves either the old content or the new one.
"""

import json
import lzma
import math
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Any


@contextmanager
def atomic_replace(path: Path) -> Iterator[Path]:
    """Yield a temporary path for a file or a folder; it replaces `path` if the block ends without an error.

    The content is on the disk (fsync) before the rename. Temporary files of processes that no longer exist are removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(path.parent, path.name)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    _remove(draft)
    try:
        yield draft
        _fsync(draft)
        if draft.is_dir() and path.exists():  # a folder cannot replace one that contains files
            _remove(path)
        draft.replace(path)
        _fsync(path.parent, contents=False)
    finally:
        _remove(draft)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically."""
    if path.is_dir():
        raise IsADirectoryError(f"expected a file to write, got the folder {path}. Add a file name.")
    with atomic_replace(path) as draft:
        draft.write_text(text, encoding="utf-8")


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write indented JSON atomically; NaN and infinities raise ValueError."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def finite(value: Any) -> Any:
    """Replace NaN and infinities by None, at any depth, because JSON has none."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def append_jsonl(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Append one line of JSON per record; a line that a killed process left incomplete is ended first."""
    text = "".join(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records)
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                text = "\n" + text
        file.write(text.encode())


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read the JSON objects of a .jsonl or .jsonl.xz file; a missing file has none, incomplete lines are skipped.

    Raises:
        ValueError: The file cannot be decompressed or is not UTF-8.
    """
    if not path.exists():
        return []
    records = []
    try:
        with open_text(path) as file:
            for line in file:
                try:
                    record = json.loads(line)
                except json.JSONDecodeError:
                    continue
                if isinstance(record, dict):
                    records.append(record)
    except (lzma.LZMAError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({error}). Remove it, or copy it again.") from None
    return records


def open_text(path: Path) -> TextIOWrapper:
    """Open UTF-8 text, decompressing .xz files; a byte order mark is skipped."""
    return lzma.open(path, "rt", encoding="utf-8-sig") if path.suffix == ".xz" else path.open(encoding="utf-8-sig")


def read_text(path: Path) -> str:
    """Read a whole text file, plain or .xz.

    Raises:
        ValueError: No such file, not UTF-8, or not xz although its name says so.
    """
    try:
        with open_text(path) as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}). Convert it to UTF-8."
        ) from None
    except (lzma.LZMAError, EOFError):
        raise ValueError(f"{path} is not a valid xz file, or it is truncated. Compress it again.") from None
    except OSError as error:
        raise ValueError(f"cannot read the text {path}: {error.strerror}. Check the path.") from None


def text_name(path: Path) -> str:
    """The path as text for results: a file name may hold any bytes, tables and manifests hold text."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def _fsync(path: Path, *, contents: bool = True) -> None:
    """Flush a file, or a folder and the files in it: a new name must never point at missing bytes."""
    inside = path.iterdir() if path.is_dir() and contents else ()
    for each in (*inside, path):
        if os.name == "nt" and each.is_dir():  # Windows cannot open folders
            continue
        descriptor = os.open(each, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_abandoned(folder: Path, name: str | None = None) -> None:
    """Remove the temporary files of processes that no longer exist, of one file or of all in the folder."""
    for left in folder.glob(".*.tmp"):
        of, _, process = left.name[1:].removesuffix(".tmp").rpartition(".")
        if name in (None, of) and process.isdecimal() and not _is_running(int(process)):
            _remove(left)


def _is_running(process: int) -> bool:
    if os.name != "posix":  # signal 0 would end the process elsewhere
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
