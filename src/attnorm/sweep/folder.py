"""The folder of a sweep: what is planned, finished, failed and running. Any machine that sees the folder can read it.

sweep.json         command, grid and options, and all items
items/ID/          the run folder of an item
results/ID.json    rows of a finished item, written last: an item is finished if and only if this file exists
failures/ID.json   the error of an item that failed
locks/ID           held by the process that runs the item; the operating system releases it if the process ends
table.parquet      rows of all finished items          index.html   the page that compares them
"""

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from attnorm.files import atomic_replace, write_json
from attnorm.provenance import now
from attnorm.run_folder import make_writable, read_record, require_only, require_same_run, try_lock
from attnorm.sweep.plan import Item, Plan

RECORD, TABLE, PAGE = "sweep.json", "table.parquet", "index.html"
FORMAT = 1


def item_folder(out: Path, key: str) -> Path:
    return out / "items" / key


def lock_of(out: Path, key: str) -> Path:
    return out / "locks" / key


def result_of(out: Path, key: str) -> dict[str, Any] | None:
    """Return the result of a finished item, or None; a damaged file counts as missing, so the item runs again."""
    return _read_json(out / "results" / f"{key}.json")


def failure_of(out: Path, key: str) -> dict[str, Any] | None:
    return _read_json(out / "failures" / f"{key}.json")


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def write_result(out: Path, item: Item, result: Mapping[str, Any]) -> None:
    write_json(out / "results" / f"{item.id}.json", {"item": item.as_dict(), **result})
    (out / "failures" / f"{item.id}.json").unlink(missing_ok=True)


def write_failure(out: Path, item: Item, error: str, host: str) -> None:
    record = {"item": item.as_dict(), "error": error, "host": host, "time": now()}
    write_json(out / "failures" / f"{item.id}.json", record)


def forget_failures(out: Path, items: Iterable[Item]) -> None:
    for item in items:
        (out / "failures" / f"{item.id}.json").unlink(missing_ok=True)


def open_sweep(out: Path, plan: Plan, *, extend: bool = False) -> None:
    """Claim the folder for this plan, or continue the sweep that it holds.

    extend: accept another plan; items that both plans have are not run again.

    Raises:
        ValueError: The folder holds another sweep or other files, or cannot be written.
    """
    items = {item.id: item.as_dict() for item in plan.items}
    record = read_record(out / RECORD, ("command", "content", "items"), "choose another folder")
    if record is None:
        require_only(out, (), "files, but no sweep")
        make_writable(out)
    elif not extend:
        remedy = "Choose another folder, or add --extend to run this plan here; finished items of both are kept"
        current, previous = (
            {"command": command, **_flatten(content), "content of the items": sorted(keys)}
            for command, content, keys in (
                (plan.command, plan.content, items), (record["command"], record["content"], record["items"]),
            )
        )  # fmt: skip
        require_same_run(current, previous, f"{out} holds another sweep", remedy, _shorten)
    write_json(
        out / RECORD, {"format": FORMAT, "command": plan.command, "content": plan.content, "items": items},
    )  # fmt: skip


def _flatten(content: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{table}.{name}": value for table, values in content.items() for name, value in values.items()}


def _shorten(value: Any) -> str:
    text = "missing" if value is None else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def read_items(out: Path) -> list[Item]:
    """Return the items of the sweep in a folder, in the order of its plan.

    Raises:
        ValueError: The folder holds no sweep, or a damaged one.
    """
    record = read_record(out / RECORD, ("items",), "run the sweep again with its plan")
    if record is None:
        raise ValueError(f"expected the folder of a sweep, got {out}, which has no {RECORD}. Start it with a plan.")
    return [Item(**item) for item in record["items"].values()]


@dataclass(frozen=True)
class ItemState:
    item: Item
    state: str  # finished, pruned, failed, running or waiting
    seconds: float | None = None
    host: str = ""
    error: str = ""


def states(out: Path, items: Iterable[Item]) -> list[ItemState]:
    """Return the state of every item."""
    item_states = []
    for item in items:
        if result := result_of(out, item.id):
            state = "pruned" if result.get("pruned") else "finished"
            item_states.append(ItemState(item, state, result.get("seconds"), result.get("host", "")))
        elif _is_running(out, item.id):
            item_states.append(ItemState(item, "running"))
        elif failure := failure_of(out, item.id):
            item_states.append(ItemState(item, "failed", None, failure.get("host", ""), failure.get("error", "")))
        else:
            item_states.append(ItemState(item, "waiting"))
    return item_states


def _is_running(out: Path, key: str) -> bool:
    path = lock_of(out, key)
    if not path.exists() or not os.access(path, os.W_OK):
        return False
    with try_lock(path) as free:
        return not free


def merged_rows(out: Path, items: Iterable[Item]) -> list[dict[str, Any]]:
    """Return the rows of all finished items, in the order of the plan."""
    rows = []
    for item in items:
        if (result := result_of(out, item.id)) and not result.get("pruned"):
            for row in result["rows"]:
                kept = {name: value for name, value in row.items() if name not in item.varied}
                rows.append({"item": item.id, **item.varied, **kept, "seconds": result["seconds"]})
    return rows


def write_table(out: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the merged table; a row without a column has null there."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: _column([row.get(name) for row in rows]) for name in names}
    with atomic_replace(out / TABLE) as draft:
        pq.write_table(pa.table(columns) if columns else pa.table({"item": pa.array([], pa.string())}), draft)


def _column(values: list[Any]) -> pa.Array:
    """One type per column: integers and floats become floats, anything else mixed becomes text."""
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float} and len(kinds) > 1:
        values = [None if value is None else float(value) for value in values]
    elif len(kinds) > 1 or not kinds <= {int, float, bool, str}:
        values = [None if value is None else str(value) for value in values]
    return pa.array(values)


def plain(value: Any) -> Any:
    """A number for JSON: NaN and infinities become None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
