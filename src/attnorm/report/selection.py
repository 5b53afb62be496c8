"""Which rows of an analysis are shown, and the numbers of a column as page, figures and tables show them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from attnorm.metrics.normalized import MODEL

DISTANCES = ("fixed_printed", "fixed_tight", "random_printed", "random_lower", "random_upper")


def default_choice(analysis: Any) -> dict[str, Any]:
    """What is shown first: the longest length, the first text and kind that have it, the model as it runs."""
    choice: dict[str, Any] = {"text": "", "length": None, "normalizer": "", "kind": ""}
    heads = analysis.heads
    for name in ("length", "normalizer", "text", "kind"):
        values = distinct(heads, name)  # of what is left: a text need not have every length
        if values:
            choice[name] = values[-1] if name == "length" else MODEL if MODEL in values else values[0]
            heads = chosen_rows(heads, {name: choice[name]})
    return choice


def column(table: pa.Table, name: str) -> NDArray[np.float64]:
    """A column as floats, NaN where it is missing - also where the table has no such column.

    Under a metric's own name lies what verdicts are judged by and the report shows: the median row.
    """
    if table is None or name not in table.column_names:
        return np.full(0 if table is None else table.num_rows, np.nan)
    return np.asarray(table.column(name).to_numpy(zero_copy_only=False), dtype=np.float64)


def chosen_rows(table: pa.Table, choice: Mapping[str, Any]) -> pa.Table:
    """The rows that agree with the choice in every column that the table has."""
    for name, value in choice.items():
        if name in table.column_names:
            values = table.column(name)
            table = table.filter(pc.is_null(values) if value is None else pc.equal(values, value))
    return table


def relative_distances(top_n: pa.Table) -> pa.Table:
    """Bounds over (n - N) ||s|| like the distance itself, which makes heads and lengths comparable."""
    if top_n is None or not {"d_tilde", "relative_distance", *DISTANCES} <= set(top_n.column_names):
        return top_n
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = column(top_n, "relative_distance") / column(top_n, "d_tilde")
        for name in DISTANCES:
            scaled = pa.array(column(top_n, name) * factor, from_pandas=True)
            top_n = top_n.set_column(top_n.column_names.index(name), name, scaled)
    return top_n


def distinct(table: pa.Table, name: str) -> list[Any]:
    """In order of appearance; lengths by size, None (an input that was taken whole) first."""
    values = list(dict.fromkeys(table.column(name).to_pylist()))
    return sorted(values, key=lambda length: length or 0) if name == "length" else values
