"""Finished layers of an unfinished part: a run that was killed measures only the missing layers.

    parts/.<key>.layers/00007   attention call number 7 of the part: a JSON line, then its tables as Arrow streams

The forward pass runs again, because later layers need its activations, but finished layers are not measured again. The
JSON line identifies the layer: the part's key (model, weights, text, settings), library versions, and the call's
number, kind, layer and shapes. A file that differs in any of them, or is damaged, is ignored. The folder is removed
when the part is finished.
"""

import io
import json
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from attnorm.analysis import store
from attnorm.analysis.store import DamagedFileError
from attnorm.metrics.call import AttentionCall
from attnorm.provenance import versions

# A short part writes no layers; a long one that is killed loses at most this time and the layers being measured.
SECONDS_BETWEEN_WRITES = 5.0


@dataclass(frozen=True)
class MeasuredLayer:
    """The table rows of one attention call, without the columns that are equal for all layers."""

    longest: int  # visible keys of any row
    tables: dict[str, pa.Table]


class FinishedLayers:
    """The layers of one part that are on the disk, and those that are not written yet."""

    def __init__(self, folder: Path, key: str, now: Callable[[], float] = time.monotonic) -> None:
        self.folder = folder
        self._path = folder / store.PARTS / f".{key}.layers"
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
            if any(about.get(name) != value for name, value in self._about(number, call).items()):
                return None
            return MeasuredLayer(int(about["longest"]), _tables(about["sizes"], body))
        except (DamagedFileError, pa.ArrowException, KeyError, ValueError) as error:
            warnings.warn(f"{path} is damaged ({error}); this layer is measured again", stacklevel=2)
            return None

    def keep(self, number: int, call: AttentionCall, layer: MeasuredLayer) -> None:
        streams = {name: _stream(table) for name, table in layer.tables.items()}
        body = b"".join(streams.values())
        about = {
            **self._about(number, call),
            "longest": layer.longest,
            "sizes": {name: len(stream) for name, stream in streams.items()},
            "digest": store.digest_of(body),
        }
        self._waiting[_name(number)] = json.dumps(store.sealed(about)).encode() + b"\n" + body
        if self._now() - self._written >= SECONDS_BETWEEN_WRITES:
            self.write()

    def write(self) -> None:
        """Write all layers that are not on the disk yet."""
        with store.explained_when_full(self.folder):
            for name, content in self._waiting.items():
                store.write_file(self._path / name, content)
        self._waiting.clear()
        self._written = self._now()

    def remove(self) -> None:
        self._waiting.clear()
        shutil.rmtree(self._path, ignore_errors=True)

    def _about(self, number: int, call: AttentionCall) -> dict[str, Any]:
        shapes = [list(tensor.shape) for tensor in (call.query_BHQD, call.key_BGKD, call.value_BGKE)]
        return {**self._belongs, "call": number, "kind": call.kind, "layer": call.layer, "shapes": shapes}


def _name(number: int) -> str:
    return f"{number:05d}"


def _read(path: Path) -> tuple[dict[str, Any], bytes]:
    head, _, body = path.read_bytes().partition(b"\n")
    about = json.loads(head)
    if not isinstance(about, dict) or "digest" not in about:
        raise DamagedFileError("no JSON line with a digest")
    store.check_digest(path, body, about["digest"])
    return store.unsealed(path, about), body


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
