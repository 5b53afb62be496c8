"""Parts of an analysis for page, figures, tables and JSON, and columns read as numbers.

JSON has the verdict and one object per head; quantiles and curves are in the Parquet files only.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from attnorm.analysis.result import Analysis
from attnorm.analysis.tables import HEAD_KEY, VERDICT_COLUMNS
from attnorm.metrics.catalogue import PER_HEAD, PER_ROW
from attnorm.metrics.normalized import MODEL

DISTANCES = ("fixed_printed", "fixed_tight", "random_printed", "random_lower", "random_upper")
COUNTS = ("kv_head", "rows", "broken_rows", "n_low", "n_high")


def default_choice(analysis: Analysis) -> dict[str, Any]:
    """Return what is shown first: the longest length, and the first text and kind with that length."""
    choice: dict[str, Any] = {"text": "", "length": None, "normalizer": "", "kind": ""}
    heads = analysis.heads
    for name in ("length", "normalizer", "text", "kind"):
        values = distinct(heads, name)  # in the remaining rows: a text may lack a length
        if values:
            if name == "length":
                choice[name] = values[-1]
            else:
                choice[name] = MODEL if MODEL in values else values[0]
            heads = chosen_rows(heads, {name: choice[name]})
    return choice


def column(table: pa.Table, name: str) -> NDArray[np.float64]:
    """Return a column as floats; missing values, and columns that the table does not have, are NaN."""
    index = table.schema.get_field_index(name)  # a list of all names takes longer than the column
    if index < 0:
        return np.full(table.num_rows, np.nan)
    return np.asarray(table.column(index).to_numpy(zero_copy_only=False), dtype=np.float64)


def chosen_rows(table: pa.Table, choice: Mapping[str, Any]) -> pa.Table:
    """Return the rows that have the chosen values in all columns of the table."""
    for name, value in choice.items():
        if name in table.column_names:
            values = table.column(name)
            table = table.filter(pc.is_null(values) if value is None else pc.equal(values, value))
    return table


def measured_rows(table: pa.Table, choice: Mapping[str, Any]) -> pa.Table:
    """Return the chosen rows; raise ValueError if there are none."""
    rows = chosen_rows(table, choice)
    if not rows.num_rows:
        raise ValueError(
            f"no head was measured with {', '.join(f'{name} {value!r}' for name, value in choice.items())}"
        )
    return rows


def relative_distances(top_n: pa.Table) -> pa.Table:
    """Divide the bounds by (n - N) ||s||, as the distance itself is, so that heads and lengths are comparable."""
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = column(top_n, "relative_distance") / column(top_n, "d_tilde")
        for name in DISTANCES:
            scaled = pa.array(column(top_n, name) * factor, from_pandas=True)
            top_n = top_n.set_column(top_n.column_names.index(name), name, scaled)
    return top_n


def distinct(table: pa.Table, name: str) -> list[Any]:
    """Return distinct values in order of appearance; lengths by size, None (a whole input) first."""
    values = list(dict.fromkeys(table.column(name).to_pylist()))
    return sorted(values, key=lambda length: length or 0) if name == "length" else values


def analysis_as_dict(analysis: Analysis) -> dict[str, Any]:
    names = [*(name for name, _ in HEAD_KEY), *COUNTS, *PER_ROW, *PER_HEAD, *(name for name, _ in VERDICT_COLUMNS)]
    value: dict[str, Any] = finite(
        {
            "verdict": analysis.verdict.as_dict(),
            "manifest": analysis.manifest,
            "heads": analysis.heads.select(names).to_pylist(),
        }
    )
    return value


def finite(value: Any) -> Any:
    """Replace NaN and infinities by None, at any depth, because JSON has none."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
