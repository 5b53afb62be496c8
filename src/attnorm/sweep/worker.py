"""How a worker runs an item: once, whatever happens to the workers around it.

The item's lock admits one process; whoever gets it next finds the result, or continues from the last checkpoint. An
error of the item becomes its outcome, so one bad item stops no other.
"""

import errno
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attnorm.provenance import now, versions
from attnorm.run_folder import lock
from attnorm.sweep.folder import RECORD, item_folder, lock_of, plain, result_of, write_failure, write_result
from attnorm.sweep.plan import Item
from attnorm.sweep.tasks import TASKS, models_loaded


@dataclass(frozen=True)
class Outcome:
    id: str
    error: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    pruned: bool = False
    found: bool = False  # it was finished before


class Pruned(Exception):  # noqa: N818 - not an error: the run was stopped because others are better
    """Raised by a hook to stop an item early; its rows so far are its result."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        super().__init__("pruned")
        self.rows = rows


Hook = Callable[[Mapping[str, Any], Path, Path], list[dict[str, Any]]]


def run_chunk(out: str, items: list[dict[str, Any]], threads: int, hook: Hook | None = None) -> list[Outcome]:
    """Run items one after another in this process; called in a worker by every engine."""
    import torch

    torch.set_num_threads(threads)
    return [run_item(Path(out), Item(**item), hook) for item in items]


def run_item(out: Path, item: Item, hook: Hook | None = None) -> Outcome:
    """Run an item, or return its result if it is finished. hook: what to run instead of the item's command."""
    if not (out / RECORD).is_file():
        return Outcome(
            item.id,
            f"expected the sweep in {out} on {socket.gethostname()}, got no {RECORD}. Use a folder that all machines "
            "share.",
        )
    with lock(lock_of(out, item.id)):
        if (result := result_of(out, item.id)) is not None:
            return Outcome(item.id, "", result["rows"], result["seconds"], result.get("pruned", False), found=True)
        started, loaded = time.monotonic(), models_loaded()
        pruned = False
        try:
            try:
                rows = (hook or TASKS[item.command].run)(item.values, item_folder(out, item.id), out)
            except Pruned as stopped:
                rows, pruned = stopped.rows, True
            rows = [{name: plain(value) for name, value in row.items()} for row in rows]
            seconds = round(time.monotonic() - started, 3)
            about = {"models_loaded": models_loaded() - loaded, "process": os.getpid(), "versions": versions()}
            write_result(
                out, item, {"rows": rows, "seconds": seconds, "pruned": pruned, "host": socket.gethostname(),
                            "time": now(), **about},
            )  # fmt: skip
        except Exception as error:
            words = describe_error(error)
            with suppress(OSError):  # the disk may be full; the driver records the failure too
                write_failure(out, item, words, socket.gethostname())
            return Outcome(item.id, words, seconds=round(time.monotonic() - started, 3))
        return Outcome(item.id, "", rows, seconds, pruned)


def describe_error(error: BaseException) -> str:
    """Return the error of an item with what to do about it."""
    import torch

    where = socket.gethostname()
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return f"out of memory on {where}. Use a shorter length, a smaller batch, or a larger machine."
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"no space left on {where}: {error.filename or 'disk full'}. Free some space and run the sweep again."
    return str(error) or type(error).__name__ if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
