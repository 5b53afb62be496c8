"""The folder of a run: files that are whole or absent, and finished parts from which an interrupted run goes on.

    manifest.json               what was measured and how (analysis/manifest.py)
    heads.parquet, ...          the tables, once all parts are there
    parts/<key>/                one finished (text, length): its tables and part.json; the key names all that decides it
    parts/.<key>.layers/        finished layers of a long part in flight (analysis/layers.py)

A part is written into a folder of another name, which is then renamed. kill -9 loses a few seconds of measuring and the
layer in flight.
manifest.json and part.json hold the SHA-256 digests of their tables (analysis/digests.py); a damaged file is not read.
"""

import contextlib
import errno
import glob
import io
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from attnorm.analysis.digests import DIGESTS, DamagedFileError, check_digest, digest_of, opened, sealed
from attnorm.analysis.tables import OPTIONAL, SCHEMAS

MANIFEST = "manifest.json"
PARTS = "parts"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Part:
    """What one (text, length) gave: its tables, without verdicts, and a few words about how it was made."""

    key: str
    about: dict[str, Any]
    tables: dict[str, pa.Table]


def make_folder(folder: Path) -> None:
    """The folder of a run; where it cannot be, that is said with the reason."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise
        raise OSError(error.errno, f"cannot create the output folder {folder}: {error.strerror}") from error


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """The content with a seal by which `read_json` notices damage."""
    write_whole(path, (json.dumps(sealed(content), indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


def write_table(path: Path, table: pa.Table) -> None:
    write_whole(path, _parquet(table))


def write_run(folder: Path, tables: Mapping[str, pa.Table], manifest: Mapping[str, Any]) -> None:
    """All tables, and last the manifest with their digests."""
    digests = {}
    for name, table in tables.items():
        content = _parquet(table)
        write_whole(folder / f"{name}.parquet", content)
        digests[name] = digest_of(content)
    write_json(folder / MANIFEST, {**manifest, DIGESTS: digests})


def read_run(
    folder: Path, manifest: dict[str, Any], names: Iterable[str]
) -> tuple[dict[str, pa.Table], dict[str, Any]]:
    """The named tables of a finished run, checked against the manifest's digests, and the manifest without these.

    Optional tables that an earlier version did not write are left out.
    """
    digests = manifest.get(DIGESTS, {})
    paths = {name: folder / f"{name}.parquet" for name in names}
    absent = {name for name in OPTIONAL if name in paths and name not in digests and not paths[name].exists()}
    tables = {name: read_table(path, digests.get(name)) for name, path in paths.items() if name not in absent}
    return tables, {name: value for name, value in manifest.items() if name != DIGESTS}


def write_whole(path: Path, content: bytes) -> None:
    """The file is there with all of its content or as it was; drafts of it that killed processes left are removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{glob.escape(path.name)}-*"):
        if not _is_written(left.name.rpartition("-")[2]):
            left.unlink(missing_ok=True)
    unfinished = path.with_name(f".{path.name}-{os.getpid()}")
    try:
        _write_bytes(unfinished, content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"{path} is not a file that attnorm wrote: {error}; choose another folder") from error
    if not isinstance(content, dict):
        raise DamagedFileError(
            f"{path} is not a file that attnorm wrote: it holds no JSON object; choose another folder"
        )
    return opened(path, content)


def read_table(path: Path, digest: str | None = None) -> pa.Table:
    """The table of a Parquet file. digest: its SHA-256, where it is known."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path} is missing; the folder was not written completely, or not by attnorm"
        ) from None
    check_digest(path, content, digest)
    try:
        return pq.read_table(io.BytesIO(content))
    except (pa.ArrowException, OSError) as error:
        raise DamagedFileError(f"{path} is damaged: {error}; delete it and run the analysis again") from error


def write_part(folder: Path, part: Part, *, replace: bool = False) -> None:
    """The part appears under its key all at once. One that another process has finished meanwhile stays."""
    parts = folder / PARTS
    target = parts / part.key
    parts.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{part.key}-", dir=parts))
    try:
        digests = {}
        for name, table in part.tables.items():
            content = _parquet(table)
            _write_bytes(unfinished / f"{name}.parquet", content)
            digests[name] = digest_of(content)
        about = sealed({"key": part.key, **part.about, DIGESTS: digests})
        _write_bytes(unfinished / "part.json", json.dumps(about, indent=2).encode())
        if replace:
            shutil.rmtree(target, ignore_errors=True)
        unfinished.rename(target)
    except OSError:
        if replace or not (target / "part.json").is_file():
            raise
    finally:
        for leftover in parts.glob(f".{part.key}-*"):  # this one after an error, and those of killed processes
            shutil.rmtree(leftover, ignore_errors=True)


def read_part(folder: Path, key: str) -> Part | None:
    """The finished part of that key, or None; raises DamagedFileError where it is not what was written."""
    target = folder / PARTS / key
    if not target.is_dir():
        return None
    try:
        about = read_json(target / "part.json")
        digests = about.pop(DIGESTS, {})
        tables = {name: read_table(target / f"{name}.parquet", digests.get(name)) for name in SCHEMAS}
    except FileNotFoundError as error:
        raise DamagedFileError(f"{target} is not complete: {error}") from error
    for name, schema in SCHEMAS.items():
        if not tables[name].schema.equals(schema):
            raise ValueError(
                f"{target / name}.parquet has other columns than this version of attnorm writes; delete {target}"
            )
    return Part(key, about, tables)


def finished_parts(folder: Path) -> int:
    return sum(1 for path in (folder / PARTS).glob("*") if path.is_dir() and not path.name.startswith("."))


@contextlib.contextmanager
def explained_when_full(folder: Path) -> Iterator[None]:
    """A full disk is reported with the folder and what of the run is safe in it."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        kept = finished_parts(folder)
        parts = "1 finished part is" if kept == 1 else f"{kept} finished parts are"
        raise OSError(
            error.errno,
            f"the disk is full: nothing more can be written to {folder}. {parts} kept there; "
            "free some space and run the same analysis again, it goes on from there",
        ) from error


def _parquet(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


def _write_bytes(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # a rename may reach the disk before the content does


def _is_written(process: str) -> bool:
    """Whether the process of that number may still write its draft; asked only where asking cannot end it."""
    if not process.isdecimal() or os.name != "posix":
        return True
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True
