"""The tables of an analysis: their columns, how numbers become rows, how windows and runs merge.

Merging (`merge_parts`) averages the windows of a text: numbers are means, except horizons, which are medians (a horizon
is exponential in the logit spread). Row counts are summed and largest norms are maxima. The table `windows` keeps the
numbers of each window. `merge_runs` joins runs on one model.
"""

import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock
from typing import Any

import numpy as np
import pyarrow as pa

from attnorm.metrics.catalogue import PER_HEAD, PER_ROW
from attnorm.report_data import KEY

QUANTILES = (5, 25, 50, 75, 95)
_filters = RLock()


# Derived from the other columns when the tables of all parts are combined (analysis/verdicts/).
VERDICT_COLUMNS = [
    ("verdict", pa.string()),
    ("flags", pa.list_(pa.string())),
    ("evidence", pa.string()),
    ("leaning", pa.string()),  # the verdict of the point estimates; `verdict` is "undecided" if confidence is low
    ("confidence", pa.float64()),  # share of bootstrap resamples that give the same verdict
    ("agreement", pa.float64()),  # share of windows that give the same verdict
    ("deciding", pa.string()),  # the column that decides; its value, 95 % interval and threshold follow
    ("deciding_value", pa.float64()),
    ("deciding_low", pa.float64()),
    ("deciding_high", pa.float64()),
    ("deciding_threshold", pa.float64()),
    ("saturation", pa.string()),  # "saturated", "distinguishes" or "not judged"
    ("saturation_top_n", pa.int64()),
    ("saturation_excess", pa.float64()),  # separability - null, with its 90 % interval
    ("saturation_low", pa.float64()),
    ("saturation_high", pa.float64()),
    ("saturation_power", pa.float64()),  # power of the equivalence test
]

HEAD_KEY = [(name, pa.int64() if name in ("length", "layer", "head") else pa.string()) for name in KEY]
_KEY = HEAD_KEY[:-1]


def _number_fields(*names: str) -> list[tuple[str, pa.DataType]]:
    return [(name, pa.float64()) for name in names]


def with_quantiles(metric: str) -> list[str]:
    """Return the columns of a metric: its own name for the median row, NAME_mean, and NAME_q05, ... for quantiles."""
    return [metric, f"{metric}_mean", *(f"{metric}_q{q:02d}" for q in QUANTILES)]


# One row per head. Per-row metrics are summarized over the longest rows only, those with n_low <= n <= n_high visible
# keys, because the metrics depend on n. `by_length` has all lengths. With several windows of a text, a number is the
# mean over windows; a horizon is the median.
HEADS = pa.schema(
    [
        *HEAD_KEY,
        ("kv_head", pa.int64()),
        ("rows", pa.int64()),  # measured in [n_low, n_high]
        ("broken_rows", pa.int64()),  # rows with logits or weights that are not finite; no number includes them
        ("n_low", pa.int64()),
        ("n_high", pa.int64()),
        *_number_fields(*(column for name in PER_ROW for column in with_quantiles(name))),
        *_number_fields(*PER_HEAD, "gap_slope_error", "worst_norm"),  # worst_norm: bound on the Jacobian norm at n_high
    ]
)


# One row per head and bin of visible keys n: the curves against length.
BY_LENGTH = pa.schema(
    [
        *HEAD_KEY,
        ("n_low", pa.int64()),
        ("n_high", pa.int64()),
        ("rows", pa.int64()),
        *_number_fields(
            "n",
            *(f"{name}{suffix}" for name in PER_ROW for suffix in ("", "_mean", "_q25", "_q50", "_q75")),
        ),
    ]
)


# One row per head and block of consecutive long rows: medians of the metrics that decide verdicts, for resampling.
BLOCK_METRICS = (
    "entropy_ratio", "entropy_nats", "entropy_floor", "max_weight", "sink_mass", "horizon", "jacobian_norm",
    "entropy_ratio_without_sink", "horizon_without_sink", "row_sum",
)  # fmt: skip
BLOCK_NORM = "jacobian_norm_q75"
BLOCKS = pa.schema(
    [
        *HEAD_KEY,
        ("window", pa.int64()),
        ("block", pa.int64()),
        ("rows", pa.int64()),
        *_number_fields(*BLOCK_METRICS, BLOCK_NORM),
    ]
)


# One row per head and N: the N heaviest keys. `mass` is a mean over the longest rows (on a GPU over 256 rows at most),
# the other columns over the sampled rows that `rows` counts. See docs/theory/distance.md and geometry.md.
TOP_N_NUMBERS = (
    "mass",
    "d_tilde",
    "relative_distance",  # d_tilde / ((n - N) ||s||)
    "fixed_printed",
    "fixed_tight",
    "random_printed",
    "random_lower",
    "random_upper",
    "separability",  # Ns / N
    "separability_null",  # mean over permuted weights
    "separability_null_low",  # 5 % and 95 % of the permutations' means
    "separability_null_high",
    "separability_sphere",  # vectors scaled to norm 1
    "separability_sphere_null",
    "separability_lower",  # moment bounds, heuristic at the data's own radius
    "separability_upper",
    "separability_excess_error",  # standard error of separability - null over the compared rows
)
TOP_N = pa.schema([*HEAD_KEY, ("top_n", pa.int64()), ("rows", pa.int64()), *_number_fields(*TOP_N_NUMBERS)])


# One row per head and temperature on top of the model's own: how far weights move when logits do.
SENSITIVITY = pa.schema(
    [
        *HEAD_KEY,
        ("temperature", pa.float64()),
        ("rows", pa.int64()),
        *_number_fields("jacobian_norm", "jacobian_norm_max", "bound", "gain_0.001", "gain_0.1", "gain_10"),
    ]
)


# One row per layer and N: the share of keys that the heads cover together, measured and if heads were independent.
COVERAGE = pa.schema(
    [*_KEY, ("top_n", pa.int64()), ("rows", pa.int64()), *_number_fields("per_head", "union", "independent")]
)


# One row per listed query row and key, by rank: the heaviest keys of a head and the text of both positions.
# `weight` is not rescaled to a row sum of 1. A token is null if the position is not a token (image, audio).
READS = pa.schema(
    [
        *HEAD_KEY,
        ("window", pa.int64()),
        ("row", pa.int64()),
        ("rank", pa.int64()),
        ("key", pa.int64()),
        ("weight", pa.float64()),
        ("row_token", pa.string()),
        ("key_token", pa.string()),
    ]
)


# One row per position of a measured sequence: the text around the listed keys.
TOKENS = pa.schema(
    [
        ("text", pa.string()),
        ("length", pa.int64()),
        ("window", pa.int64()),
        ("side", pa.string()),  # encoder or decoder; input for a model with one stack
        ("position", pa.int64()),
        ("token_id", pa.int64()),
        ("token", pa.string()),
    ]
)

SCHEMAS = {
    "heads": HEADS,
    "by_length": BY_LENGTH,
    "top_n": TOP_N,
    "sensitivity": SENSITIVITY,
    "coverage": COVERAGE,
    "blocks": BLOCKS,
    "reads": READS,
    "tokens": TOKENS,
}


# Derived when parts are combined: one row per head and window, with the verdict of that window alone.
WINDOW_NUMBERS = (
    *BLOCK_METRICS, BLOCK_NORM, "max_weight_without_sink", "effective_keys", "effective_keys_without_sink",
    "gap_slope", "gap_slope_without_sink", "gap_slope_error",
)  # fmt: skip
WINDOWS = pa.schema(
    [
        *HEAD_KEY,
        ("window", pa.int64()),
        ("start", pa.int64()),  # token of the text at which the window starts
        ("rows", pa.int64()),
        ("broken_rows", pa.int64()),
        ("n_low", pa.int64()),
        ("n_high", pa.int64()),
        *_number_fields(*WINDOW_NUMBERS, "worst_norm"),
        ("verdict", pa.string()),
    ]
)
ALL_SCHEMAS = {**SCHEMAS, "windows": WINDOWS}
TABLES = tuple(ALL_SCHEMAS)


# Columns while a layer is measured: arrays of one length, and plain values that hold for all rows.
Columns = dict[str, Any]
FIXED = ("text", "length", "window")  # the same for all rows of a part


@dataclass(frozen=True)
class Part:
    """The tables of one (text, length, window), without verdicts, and the facts that the manifest lists about it."""

    key: str
    about: dict[str, Any]
    tables: dict[str, pa.Table]


def layer_table(schema: pa.Schema, pieces: Sequence[Columns]) -> pa.Table:
    """Combine the columns of a layer into one table without the FIXED columns; numbers not measured are NaN."""
    kept = _without_fixed(schema)
    tables = [pa.Table.from_arrays(_fill_columns(piece, kept), schema=kept) for piece in pieces] or [kept.empty_table()]
    return tables[0] if len(tables) == 1 else pa.concat_tables(tables).combine_chunks()


def part_table(schema: pa.Schema, layers: Sequence[pa.Table], fixed: Mapping[str, Any]) -> pa.Table:
    """Combine the tables of all layers into one table with the FIXED columns."""
    if not layers:
        return schema.empty_table()
    joined = pa.concat_tables(layers).combine_chunks()
    columns = [
        pa.repeat(pa.scalar(fixed[field.name], field.type), joined.num_rows)
        if field.name in FIXED
        else joined[field.name]
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


@functools.cache
def _without_fixed(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field for field in schema if field.name not in FIXED])


def _fill_columns(piece: Columns, schema: pa.Schema) -> list[pa.Array]:
    """Return a column of each field; a number that is not in the piece is NaN."""
    size = next(len(value) for value in piece.values() if isinstance(value, np.ndarray))
    unmeasured = pa.array(np.full(size, np.nan))
    columns = []
    for name, kind in zip(schema.names, schema.types, strict=True):
        value = piece.get(name)
        if isinstance(value, np.ndarray):
            columns.append(pa.array(value, kind))
        elif name not in piece and kind == pa.float64():
            columns.append(unmeasured)
        else:
            columns.append(pa.repeat(pa.scalar(piece[name], kind), size))
    return columns


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
    names_of_reduction: dict[Reduce, list[str]] = {}
    for field in table.schema:
        if field.name not in keys and (pa.types.is_floating(field.type) or pa.types.is_integer(field.type)):
            names_of_reduction.setdefault(_reduction(field.name), []).append(field.name)

    def by_window(numbers: np.ndarray) -> np.ndarray:
        """Return numbers of the table's rows as (..., heads, windows), NaN where there is no window."""
        stacked = np.full((*numbers.shape[:-1], len(group_of_key), int(slot.max(initial=0)) + 1), np.nan)
        stacked[..., owner, slot] = numbers
        return stacked

    reduced: dict[str, np.ndarray] = {}
    with nan_expected(), np.errstate(invalid="ignore"):
        for reduce, names in names_of_reduction.items():
            numbers = by_window(np.stack([_floats(table, name) for name in names]))
            reduced |= zip(names, reduce(numbers, axis=-1), strict=True)
    for name in reduced.keys() & _ERRORS:
        excess = _floats(table, "separability") - _floats(table, "separability_null")
        reduced[name] = np.fmax(reduced[name], _error_between_windows(by_window(excess)))
    columns = [
        pa.array(reduced[field.name].astype(np.int64 if pa.types.is_integer(field.type) else np.float64), field.type)
        if field.name in reduced
        else table[field.name].combine_chunks().take(pa.array(first))
        for field in table.schema
    ]
    return pa.Table.from_arrays(columns, schema=table.schema)


@contextmanager
def nan_expected() -> Iterator[None]:
    """Within the with statement, NumPy does not warn about rows of NaN.

    One thread at a time: the filters of warnings belong to the process, and two threads would restore each other's.
    """
    with _filters, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


def _floats(table: pa.Table, name: str) -> np.ndarray:
    return np.asarray(table[name].to_numpy(zero_copy_only=False), dtype=np.float64)


def _error_between_windows(values: np.ndarray) -> np.ndarray:
    """Return the standard error of the mean over axis 1; NaN with fewer than ENOUGH_WINDOWS values."""
    count = (~np.isnan(values)).sum(1)
    with nan_expected():
        spread = np.nanstd(values, axis=1, ddof=1)
    return np.where(count >= ENOUGH_WINDOWS, spread / np.sqrt(np.maximum(count, 1)), np.nan)


def _reduction(name: str) -> Reduce:
    """Return how the numbers of windows become one, without NaN; NaN if nothing is left."""
    exceptions: dict[tuple[str, ...], Reduce] = {
        _SUMS: np.nansum, _MAXIMA: np.nanmax, _MINIMA: np.nanmin, _ERRORS: _error_of_mean,
    }  # fmt: skip
    default: Reduce = np.nanmedian if name.partition("_q")[0].removesuffix("_mean") in _MEDIANS else np.nanmean
    return next((function for names, function in exceptions.items() if name in names), default)


def _error_of_mean(errors: np.ndarray, axis: int) -> np.ndarray:
    count = (~np.isnan(errors)).sum(axis)
    return np.where(count > 0, np.sqrt(np.nansum(errors**2, axis=axis)) / np.maximum(count, 1), np.nan)


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
