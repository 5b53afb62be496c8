"""The tables of several windows of a text become one: a head has one row, whatever the number of windows.

Numbers are means over windows, of a horizon medians (it is exponential in the spread of the logits). Counts of rows
are summed, largest norms are maxima. The numbers of each window stay in the table `windows`.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from attnorm.analysis.store import Part
from attnorm.analysis.tables import SCHEMAS, WINDOWS

ENOUGH_WINDOWS = 4  # for an error from the spread between windows
MEDIANS = ("horizon", "horizon_without_sink")
_SUMS = ("rows", "broken_rows")
_MAXIMA = ("jacobian_norm_max", "n_high")
_MINIMA = ("n_low",)
_ERRORS = ("separability_excess_error",)  # independent between windows: the error of their mean
_KEYS = ("text", "length", "normalizer", "kind", "layer", "head", "kv_head", "top_n", "temperature")


def together(parts: Sequence[Part]) -> dict[str, pa.Table]:
    """The tables of all parts, and `windows`."""
    tables = {name: pa.concat_tables([part.tables[name] for part in parts]) for name in SCHEMAS}
    windows = windows_table(parts)
    if len({(part.about["text"], part.about["length"]) for part in parts}) == len(parts):
        return {**{name: table.combine_chunks() for name, table in tables.items()}, "windows": windows}
    averaged = {
        name: table.combine_chunks() if "window" in table.column_names else over_windows(name, table)
        for name, table in tables.items()
    }
    return {**averaged, "windows": windows}


def over_windows(name: str, table: pa.Table) -> pa.Table:
    """One row for all rows with the same keys, in the order of their first appearance."""
    keys = [key for key in table.column_names if key in _KEYS or (name == "by_length" and key in ("n_low", "n_high"))]
    index_of: dict[tuple[Any, ...], int] = {}
    owner = np.array(
        [
            index_of.setdefault(key, len(index_of))
            for key in zip(*(table[key].to_pylist() for key in keys), strict=True)
        ],
        dtype=np.int64,
    )
    first = np.unique(owner, return_index=True)[1] if len(owner) else np.zeros(0, dtype=np.int64)
    order = np.argsort(owner, kind="stable")
    slot = np.zeros(len(owner), dtype=np.int64)
    slot[order] = np.arange(len(owner)) - np.searchsorted(owner[order], owner[order])
    columns = []
    for field in table.schema:
        if field.name in keys or not (pa.types.is_floating(field.type) or pa.types.is_integer(field.type)):
            columns.append(table[field.name].combine_chunks().take(pa.array(first)))
            continue
        stacked = np.full((len(index_of), int(slot.max(initial=0)) + 1), np.nan)
        stacked[owner, slot] = table[field.name].to_numpy(zero_copy_only=False).astype(np.float64)
        reduced = _reduced(field.name, stacked)
        if field.name in _ERRORS:
            reduced = np.fmax(reduced, _error_over_windows(table, owner, slot, stacked.shape))
        columns.append(pa.array(reduced.astype(np.int64) if pa.types.is_integer(field.type) else reduced, field.type))
    return pa.Table.from_arrays(columns, schema=table.schema)


def _error_over_windows(table: pa.Table, owner: np.ndarray, slot: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Standard error of the mean excess from its spread between windows: the larger of the two errors is kept."""
    excess = np.full(shape, np.nan)
    separability, null = (table[name].to_numpy(zero_copy_only=False) for name in ("separability", "separability_null"))
    excess[owner, slot] = separability - null
    count = (~np.isnan(excess)).sum(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        spread = np.nanstd(excess, axis=1, ddof=1)
    return np.where(count >= ENOUGH_WINDOWS, spread / np.sqrt(np.maximum(count, 1)), np.nan)


def windows_table(parts: Sequence[Part]) -> pa.Table:
    """One row per head and window; verdicts are added when heads are judged."""
    tables = []
    for part in parts:
        heads = part.tables["heads"]
        about: Mapping[str, Any] = part.about
        columns = []
        for field in WINDOWS:
            if field.name in ("window", "start"):
                columns.append(pa.array([about.get(field.name) or 0] * heads.num_rows, field.type))
            elif field.name == "verdict":
                columns.append(pa.nulls(heads.num_rows, field.type))
            else:
                columns.append(heads[field.name].combine_chunks())
        tables.append(pa.Table.from_arrays(columns, schema=WINDOWS))
    return pa.concat_tables(tables).combine_chunks() if tables else WINDOWS.empty_table()


def _reduced(name: str, values: np.ndarray) -> np.ndarray:
    """Over axis 1, NaN left out; NaN where nothing is left."""
    metric = name.partition("_q")[0].removesuffix("_mean")
    with warnings.catch_warnings(), np.errstate(invalid="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy's words for a row of NaN
        if name in _SUMS:
            return np.asarray(np.nansum(values, axis=1))
        if name in _MAXIMA:
            return np.asarray(np.nanmax(values, axis=1))
        if name in _MINIMA:
            return np.asarray(np.nanmin(values, axis=1))
        if name in _ERRORS:
            count = (~np.isnan(values)).sum(1)
            return np.where(count > 0, np.sqrt(np.nansum(values**2, axis=1)) / np.maximum(count, 1), np.nan)
        reduce = np.nanmedian if metric in MEDIANS else np.nanmean
        return np.asarray(reduce(values, axis=1))
