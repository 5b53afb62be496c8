"""Merge tables: average the windows of a text (`merge_parts`), and join runs on one model (`merge_runs`).

Over windows, numbers are means, except horizons, which are medians (a horizon is exponential in the logit spread).
Row counts are summed and largest norms are maxima. The table `windows` keeps the numbers of each window.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from attnorm.analysis.store import Part
from attnorm.analysis.tables import HEAD_KEY, SCHEMAS, WINDOWS

Reduce = Callable[..., np.ndarray]

ENOUGH_WINDOWS = 4  # to estimate an error from the spread between windows
_MEDIANS = ("horizon", "horizon_without_sink")
_SUMS = ("rows", "broken_rows")
_MAXIMA = ("jacobian_norm_max", "n_high")
_MINIMA = ("n_low",)
_ERRORS = ("separability_excess_error",)  # independent between windows: the error of their mean
_KEYS = {name for name, _ in HEAD_KEY} | {"top_n", "temperature"}
_ROW_KEYS = {*_KEYS, "n_low", "n_high", "window", "block", "row", "rank", "side", "position"}


class NotMeasuredError(ValueError):
    """A row that is in several runs lacks a number in one of them."""


def merge_parts(parts: Sequence[Part]) -> dict[str, pa.Table]:
    """Return the tables of all parts with one row per head, averaged over windows, and the table `windows`."""
    tables = {name: pa.concat_tables([part.tables[name] for part in parts]).combine_chunks() for name in SCHEMAS}
    if len({(part.about["text"], part.about["length"]) for part in parts}) < len(parts):
        windowed = {name for name, schema in SCHEMAS.items() if "window" in schema.names}
        tables |= {name: _average_windows(name, tables[name]) for name in SCHEMAS if name not in windowed}
    return {**tables, "windows": _windows_table(parts)}


def merge_runs(name: str, tables: Sequence[pa.Table]) -> pa.Table:
    """Concatenate a table of several runs; a row that several runs have must be equal in all, and is kept once."""
    together = pa.concat_tables(tables)
    # In `heads` and `windows`, n_low and n_high are numbers: a head has one row.
    numbers = ("n_low", "n_high") if name in ("heads", "windows") else ()
    keys = [key for key in together.column_names if key in _ROW_KEYS and key not in numbers]
    first: dict[tuple[object, ...], int] = {}
    repeated: list[tuple[int, int]] = []
    for index, key in enumerate(zip(*(together[key].to_pylist() for key in keys), strict=True)):
        if key in first:
            repeated.append((first[key], index))
        else:
            first[key] = index
    if not repeated:
        return together
    once, again = (together.take(pa.array(indices)) for indices in zip(*repeated, strict=True))
    for column in together.column_names:
        for index, (a, b) in enumerate(zip(once[column].to_pylist(), again[column].to_pylist(), strict=True)):
            if a != b and not (a != a and b != b):
                label = ", ".join(f"{key} {once[key][index].as_py()!r}" for key in keys)
                error = NotMeasuredError if (a != a) != (b != b) else ValueError
                raise error(
                    f"expected equal numbers for {label} in {name!r}, got {column} {a} in one run and {b} in another. "
                    "Give the texts different names, or merge only one of the runs."
                )
    return together.take(pa.array(sorted(first.values())))


def _average_windows(name: str, table: pa.Table) -> pa.Table:
    """Combine all rows with the same keys into one, in the order of their first appearance."""
    more = {"kv_head", "n_low", "n_high"} if name == "by_length" else {"kv_head"}
    keys = [key for key in table.column_names if key in _KEYS | more]
    group_of_key: dict[tuple[Any, ...], int] = {}
    owner = np.array(
        [
            group_of_key.setdefault(key, len(group_of_key))
            for key in zip(*(table[key].to_pylist() for key in keys), strict=True)
        ],
        dtype=np.int64,
    )
    first = np.unique(owner, return_index=True)[1] if len(owner) else np.zeros(0, dtype=np.int64)
    order = np.argsort(owner, kind="stable")
    slot = np.zeros(len(owner), dtype=np.int64)  # number of a row among those with the same keys
    slot[order] = np.arange(len(owner)) - np.searchsorted(owner[order], owner[order])
    columns = []
    for field in table.schema:
        if field.name in keys or not (pa.types.is_floating(field.type) or pa.types.is_integer(field.type)):
            columns.append(table[field.name].combine_chunks().take(pa.array(first)))
            continue
        stacked = np.full((len(group_of_key), int(slot.max(initial=0)) + 1), np.nan)
        stacked[owner, slot] = _floats(table, field.name)
        reduced = _reduce_windows(field.name, stacked)
        if field.name in _ERRORS:
            stacked[owner, slot] = _floats(table, "separability") - _floats(table, "separability_null")
            reduced = np.fmax(reduced, _error_between_windows(stacked))
        columns.append(pa.array(reduced.astype(np.int64) if pa.types.is_integer(field.type) else reduced, field.type))
    return pa.Table.from_arrays(columns, schema=table.schema)


def _floats(table: pa.Table, name: str) -> np.ndarray:
    return np.asarray(table[name].to_numpy(zero_copy_only=False), dtype=np.float64)


def _error_between_windows(values: np.ndarray) -> np.ndarray:
    """Return the standard error of the mean over axis 1; NaN with fewer than ENOUGH_WINDOWS values."""
    count = (~np.isnan(values)).sum(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        spread = np.nanstd(values, axis=1, ddof=1)
    return np.where(count >= ENOUGH_WINDOWS, spread / np.sqrt(np.maximum(count, 1)), np.nan)


def _reduce_windows(name: str, values: np.ndarray) -> np.ndarray:
    """Reduce axis 1 without NaN; NaN if nothing is left."""
    with warnings.catch_warnings(), np.errstate(invalid="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy warns about rows of NaN
        if name in _ERRORS:
            count = (~np.isnan(values)).sum(1)
            return np.where(count > 0, np.sqrt(np.nansum(values**2, axis=1)) / np.maximum(count, 1), np.nan)
        metric = name.partition("_q")[0].removesuffix("_mean")
        default: Reduce = np.nanmedian if metric in _MEDIANS else np.nanmean
        exceptions: dict[tuple[str, ...], Reduce] = {_SUMS: np.nansum, _MAXIMA: np.nanmax, _MINIMA: np.nanmin}
        reduce = next((function for names, function in exceptions.items() if name in names), default)
        return np.asarray(reduce(values, axis=1))


def _windows_table(parts: Sequence[Part]) -> pa.Table:
    """Return one row per head and window; verdicts are added when heads are judged."""
    tables = []
    for part in parts:
        heads = part.tables["heads"]
        added = {name: pa.repeat(pa.scalar(part.about.get(name) or 0), heads.num_rows) for name in ("window", "start")}
        added["verdict"] = pa.nulls(heads.num_rows, pa.string())
        columns = [added[name] if name in added else heads[name].combine_chunks() for name in WINDOWS.names]
        tables.append(pa.Table.from_arrays(columns, schema=WINDOWS))
    return pa.concat_tables(tables).combine_chunks() if tables else WINDOWS.empty_table()
