"""The folder of a run: every file is complete or absent, and an interrupted run resumes from its finished parts.

    manifest.json               what was measured and how (analysis/manifest.py)
    heads.parquet, ...          the tables, written when all parts are finished
    parts/<key>/                one finished (text, length, window): its tables and part.json
    parts/.<key>.layers/00007   attention call 7 of an unfinished part: a JSON line, then its tables as Arrow streams

A part's key is a hash of everything that determines its numbers. A killed run loses a few seconds of measuring and the
layer that was being measured: the forward pass runs again, because later layers need its activations, but finished
layers are not measured again. The JSON line identifies the layer: the part's key, library versions, and the call's
number, kind, layer and shapes. A file that differs in any of them, or is damaged, is ignored. The folder is removed
when the part is finished.

manifest.json and part.json hold SHA-256 digests: of each table file, and of their own content ("sha256"). A file that
changed after it was written raises DamagedFileError. A file without a digest is not checked.
"""

import contextlib
import errno
import hashlib
import io
import json
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from attnorm.analysis.tables import SCHEMAS, TABLES, Part
from attnorm.files import atomic_replace
from attnorm.metrics.call import AttentionCall
from attnorm.provenance import versions

MANIFEST = "manifest.json"
PARTS = "parts"
_PART = "part.json"
_SEAL = "sha256"  # digest of the other entries of a JSON file
_DIGESTS = "digests"  # digests of the table files
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
# A short part writes no layers; a long one that is killed loses at most this time and the layers being measured.
SECONDS_BETWEEN_WRITES = 5.0


class DamagedFileError(ValueError):
    """The content of a file is not what attnorm wrote."""


def make_folder(folder: Path) -> None:
    """Create the output folder; an error names it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise
        why = f"cannot create the output folder {folder}: {error.strerror}. Choose another folder."
        raise type(error)(why) from error


def write_run(folder: Path, tables: Mapping[str, pa.Table], manifest: Mapping[str, Any]) -> None:
    """Write all tables, then the manifest with their digests."""
    digests = {name: write_table(folder / f"{name}.parquet", table) for name, table in tables.items()}
    write_json(folder / MANIFEST, {**manifest, _DIGESTS: digests})


def read_run(folder: Path, manifest: dict[str, Any]) -> tuple[dict[str, pa.Table], dict[str, Any]]:
    """Return the tables of a finished run, after checking their digests, and the manifest without digests."""
    digests = manifest.get(_DIGESTS, {})
    tables = {name: read_table(folder / f"{name}.parquet", digests.get(name)) for name in TABLES}
    return tables, {name: value for name, value in manifest.items() if name != _DIGESTS}


def write_part(folder: Path, part: Part, *, replace: bool = False) -> None:
    """Write a finished part. If another process has written it already, that one stays unless `replace` is set."""
    target = folder / PARTS / part.key
    if target.is_dir() and not replace:
        return
    with atomic_replace(target) as draft:
        draft.mkdir()
        contents = {name: _parquet(table) for name, table in part.tables.items()}
        for name, content in contents.items():
            _write_bytes(draft / f"{name}.parquet", content)
        digests = {name: digest_of(content) for name, content in contents.items()}
        about = with_digest({"key": part.key, **part.about, _DIGESTS: digests})
        _write_bytes(draft / _PART, json.dumps(about, indent=2).encode())


def read_part(folder: Path, key: str) -> Part | None:
    """Return the finished part with that key, or None; raise DamagedFileError if a file is missing or changed."""
    target = folder / PARTS / key
    if not target.is_dir():
        return None
    try:
        about = read_json(target / _PART)
        digests = about.pop(_DIGESTS, {})
        tables = {name: read_table(target / f"{name}.parquet", digests.get(name)) for name in SCHEMAS}
    except FileNotFoundError as error:
        raise DamagedFileError(f"{target} is incomplete: {error}") from error
    for name, schema in SCHEMAS.items():
        if not tables[name].schema.equals(schema):
            raise ValueError(
                f"{target / name}.parquet: expected the columns that this version of attnorm writes, got others. "
                f"Delete {target}."
            )
    return Part(key, about, tables)


def finished_parts(folder: Path) -> int:
    return sum(1 for path in (folder / PARTS).glob("*") if path.is_dir() and not path.name.startswith("."))


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON with a digest of its content, which `read_json` checks."""
    write_file(path, (json.dumps(with_digest(content), indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        reason = str(error).rstrip(".")
        raise DamagedFileError(f"{path} was not written by attnorm: {reason}. Choose another folder.") from error
    if not isinstance(content, dict):
        raise DamagedFileError(f"{path} was not written by attnorm: it contains no JSON object. Choose another folder.")
    return without_digest(path, content)


def write_table(path: Path, table: pa.Table) -> str:
    """Write a Parquet file and return its digest."""
    content = _parquet(table)
    write_file(path, content)
    return digest_of(content)


def read_table(path: Path, digest: str | None = None) -> pa.Table:
    """Read a Parquet file. digest: its SHA-256, if it is known."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(
            f"{path} is missing: the folder is incomplete, or attnorm did not write it. Run the same analysis again "
            "with this folder."
        ) from None
    check_digest(path, content, digest)
    try:
        return pq.ParquetFile(io.BytesIO(content)).read()  # read_table would look for a folder of files first: 1 ms
    except (pa.ArrowException, OSError) as error:
        reason = str(error).rstrip(".")
        raise DamagedFileError(f"{path} is damaged: {reason}. Delete it and run the analysis again.") from error


def write_file(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    with atomic_replace(path) as draft:
        _write_bytes(draft, content)


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def check_digest(path: Path, content: bytes, expected: str | None) -> None:
    """Raise DamagedFileError if the content has another digest; None: the digest is not known."""
    digest = digest_of(content)
    if expected is not None and digest != expected:
        raise DamagedFileError(
            f"{path} is damaged: expected the SHA-256 digest {expected}, got {digest}. Run the same analysis "
            "again with this folder: damaged files are written again."
        )


def with_digest(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content with a digest of all its other entries."""
    plain = {name: value for name, value in content.items() if name != _SEAL}
    return {**plain, _SEAL: _seal_of(plain)}


def without_digest(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Return the content without its digest; raise DamagedFileError if the digest does not match."""
    if _SEAL not in content:
        return content
    plain = {name: value for name, value in content.items() if name != _SEAL}
    digest = _seal_of(plain)
    if digest != content[_SEAL]:
        raise DamagedFileError(
            f"{path} is damaged or was edited: expected the SHA-256 digest {content[_SEAL]}, got {digest}. "
            f"Choose another folder, or delete {path} and run the same analysis again with this one."
        )
    return plain


@contextlib.contextmanager
def explained_when_full(folder: Path) -> Iterator[None]:
    """If the disk is full, raise an error that names the folder and how many finished parts it keeps."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NO_SPACE:
            raise
        kept = finished_parts(folder)
        parts = "1 finished part is" if kept == 1 else f"{kept} finished parts are"
        raise OSError(
            error.errno,
            f"the disk is full: cannot write to {folder}. {parts} kept there. "
            "Free some space and run the same analysis again to resume.",
        ) from error


def _seal_of(content: Mapping[str, Any]) -> str:
    as_read = json.loads(json.dumps(content))  # keys become text, tuples become lists
    return digest_of(json.dumps(as_read, sort_keys=True).encode())


def _parquet(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd", use_dictionary=False)  # numbers seldom repeat
    return buffer.getvalue()


def _write_bytes(path: Path, content: bytes) -> None:
    """Write a part of a draft; tests replace this function to simulate a full disk."""
    path.write_bytes(content)


@dataclass(frozen=True)
class MeasuredLayer:
    """The table rows of one attention call, without the columns that are equal for all layers."""

    longest: int  # visible keys of any row
    tables: dict[str, pa.Table]


class FinishedLayers:
    """The layers of one part that are on the disk, and those that are not written yet."""

    def __init__(self, folder: Path, key: str, now: Callable[[], float] = time.monotonic) -> None:
        self.folder = folder
        self._path = folder / PARTS / f".{key}.layers"
        self._belongs = {"key": key, "versions": versions()}
        self._now = now
        self._written = now()
        self._waiting: dict[str, bytes] = {}

    def find(self, number: int, call: AttentionCall) -> MeasuredLayer | None:
        """Return the layer of that call if an earlier process has finished it."""
        path = self._path / _name(number)
        if not path.is_file():
            return None
        try:
            about, body = _read(path)
            if any(about.get(name) != value for name, value in self._layer_facts(number, call).items()):
                return None
            return MeasuredLayer(int(about["longest"]), _tables(about["sizes"], body))
        except (DamagedFileError, pa.ArrowException, KeyError, ValueError) as error:
            warnings.warn(f"{path} is damaged ({error}). This layer is measured again.", stacklevel=2)
            return None

    def keep(self, number: int, call: AttentionCall, layer: MeasuredLayer) -> None:
        streams = {name: _stream(table) for name, table in layer.tables.items()}
        body = b"".join(streams.values())
        about = {
            **self._layer_facts(number, call),
            "longest": layer.longest,
            "sizes": {name: len(stream) for name, stream in streams.items()},
            "digest": digest_of(body),
        }
        self._waiting[_name(number)] = json.dumps(with_digest(about)).encode() + b"\n" + body
        if self._now() - self._written >= SECONDS_BETWEEN_WRITES:
            self.write()

    def write(self) -> None:
        """Write all layers that are not on the disk yet."""
        with explained_when_full(self.folder):
            for name, content in self._waiting.items():
                write_file(self._path / name, content)
        self._waiting.clear()
        self._written = self._now()

    def remove(self) -> None:
        self._waiting.clear()
        shutil.rmtree(self._path, ignore_errors=True)

    def _layer_facts(self, number: int, call: AttentionCall) -> dict[str, Any]:
        shapes = [list(tensor.shape) for tensor in (call.query_BHQD, call.key_BGKD, call.value_BGKE)]
        return {**self._belongs, "call": number, "kind": call.kind, "layer": call.layer, "shapes": shapes}


def _name(number: int) -> str:
    return f"{number:05d}"


def _read(path: Path) -> tuple[dict[str, Any], bytes]:
    head, _, body = path.read_bytes().partition(b"\n")
    about = json.loads(head)
    if not isinstance(about, dict) or "digest" not in about:
        raise DamagedFileError("no JSON line with a digest")
    check_digest(path, body, about["digest"])
    return without_digest(path, about), body


def _stream(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def _tables(sizes: Mapping[str, int], body: bytes) -> dict[str, pa.Table]:
    tables, start = {}, 0
    for name, size in sizes.items():
        tables[name] = pa.ipc.open_stream(body[start : start + size]).read_all()
        start += size
    return tables
