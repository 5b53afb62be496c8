"""The folder of a sweep: the state of every item (waiting, running, finished, failed), and the page that compares all.

sweep.json         command, grid and options, and all items
items/ID/          the run folder of an item
results/ID.json    rows of a finished item, written last: an item is finished if and only if this file exists
failures/ID.json   the error of an item that failed
locks/ID           held by the process that runs the item; the operating system releases it if the process ends
table.parquet      rows of all finished items          index.html   the page that compares them

Any machine that sees the folder can read it. The page is one HTML file with its style, script and data; it works
offline. The table, the failures and the counts are HTML. The script draws the chart and sorts the table. As in the
report, a Content-Security-Policy allows only this style and this script.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from attnorm.files import atomic_replace, write_json, write_text
from attnorm.provenance import now
from attnorm.run_folder import make_writable, read_record, require_only, require_same_run, try_lock
from attnorm.text import render_page
from attnorm_lab.runs.plan import Item, Plan

RECORD, TABLE, PAGE = "sweep.json", "table.parquet", "index.html"
FORMAT = 1

HERE = Path(__file__).parent
STATES = ("finished", "pruned", "failed", "running", "waiting")
# What the chart shows first, if the table has it.
FIRST_NUMBERS = ("loss", "accuracy", "entropy_ratio", "loss at 1x")
FIRST_AXES = ("length", "learning_rate", "size", "seed")
ROW_DIMENSIONS = ("size",)  # integers that a run itself varies


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
    """Claim the folder for this plan, or continue the sweep that it contains.

    extend: accept another plan; items that both plans have are not run again.

    Raises:
        ValueError: The folder contains another sweep or other files, or cannot be written.
    """
    items = {item.id: item.as_dict() for item in plan.items}
    record = read_record(out / RECORD, ("command", "content", "items"), "Choose another folder.")
    if record is None:
        require_only(out, (), "files, but no sweep")
        make_writable(out)
    elif not extend:
        remedy = "Choose another folder, or add --extend to run this plan here; finished items of both are kept"
        current, previous = (
            {"command": command, **_flatten(content), "the plan": tuple(sorted(keys))}
            for command, content, keys in (
                (plan.command, plan.content, items), (record["command"], record["content"], record["items"]),
            )
        )  # fmt: skip
        require_same_run(current, previous, f"{out} contains another sweep", remedy, _shorten)
    write_json(
        out / RECORD, {"format": FORMAT, "command": plan.command, "content": plan.content, "items": items},
    )  # fmt: skip


def _flatten(content: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{table}.{name}": value for table, values in content.items() for name, value in values.items()}


def _shorten(value: Any) -> str:
    if isinstance(value, tuple):  # the names of the items: hashes of values and files
        return f"{len(value):,} items"
    text = "missing" if value is None else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def read_items(out: Path) -> list[Item]:
    """Return the items of the sweep in a folder, in the order of its plan.

    Raises:
        ValueError: The folder contains no sweep, or a damaged one.
    """
    record = read_record(out / RECORD, ("items",), "Run the sweep again with its plan.")
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


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as a table; a row without a column has null there."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: _column([row.get(name) for row in rows]) for name in names}
    with atomic_replace(path) as draft:
        pq.write_table(pa.table(columns) if columns else pa.table({"item": pa.array([], pa.string())}), draft)


def _column(values: list[Any]) -> pa.Array:
    """One type per column: integers and floats become floats, anything else mixed becomes text."""
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float} and len(kinds) > 1:
        values = [None if value is None else float(value) for value in values]
    elif len(kinds) > 1 or not kinds <= {int, float, bool, str}:
        values = [None if value is None else str(value) for value in values]
    return pa.array(values)


def write_page(
    path: Path, states: Sequence[ItemState], rows: Sequence[Mapping[str, Any]], *, title: str = "Sweep"
) -> None:
    """Write the page atomically."""
    write_text(path, render(states, rows, path.parent, title=title))


def render(
    states: Sequence[ItemState], rows: Sequence[Mapping[str, Any]], folder: Path, *, title: str = "Sweep"
) -> str:
    style, script = ((HERE / f"page.{suffix}").read_text(encoding="utf-8") for suffix in ("css", "js"))
    varied = list(dict.fromkeys(name for item_state in states for name in item_state.item.varied))
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "item"]
    numbers = [name for name in names if _is_number_column(rows, name)]
    texts = [name for name in names if name not in numbers]
    dimensions = [*varied, *(name for name in (*texts, *ROW_DIMENSIONS) if name in names and name not in varied)]
    measured = [name for name in numbers if name not in dimensions]
    counts = Counter(item_state.state for item_state in states)
    return render_page(
        HERE / "page.html.j2",
        style=style,
        script=script,
        filters={"cell": cell},
        title=title,
        command=states[0].item.command if states else "",
        counts={name: counts[name] for name in STATES if counts[name]},
        total=len(states),
        seconds=sum(item_state.seconds or 0 for item_state in states),
        names=names,
        numbers=set(numbers),
        rows=rows,
        links={item_state.item.id: _link(folder, item_state.item.id) for item_state in states},
        failures=[item_state for item_state in states if item_state.state == "failed"],
        data={
            "rows": [{name: row.get(name) for name in (*dimensions, *measured)} for row in rows],
            "numbers": sorted(measured, key=lambda name: _rank(name, FIRST_NUMBERS)),
            "dimensions": sorted(dimensions, key=lambda name: _rank(name, FIRST_AXES)),
        },
    )


def _rank(name: str, first: Sequence[str]) -> int:
    return first.index(name) if name in first else len(first)


def _is_number_column(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    values = [row[name] for row in rows if row.get(name) is not None]
    return bool(values) and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _link(folder: Path, key: str) -> str:
    """The most readable file of a run folder; the folder itself if it has no page."""
    run = folder / "items" / key
    page = next((name for name in ("report.html", "index.html") if (run / name).is_file()), "")
    return f"items/{key}/{page}"


def cell(value: Any) -> str:
    """A value as text of a table."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 1e4 else str(value)
