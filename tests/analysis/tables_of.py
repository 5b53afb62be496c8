"""Made-up tables with every column of the real ones."""

import math
from typing import Any

import pyarrow as pa

from attnorm.analysis.tables import SCHEMAS


def row(schema: pa.Schema, **values: Any) -> dict[str, Any]:
    """One row: numbers are 0 unless given, so that a test writes only what it is about."""
    zero = {pa.string(): "", pa.int64(): 0, pa.float64(): 0.0}
    made = {field.name: zero[field.type] for field in schema}
    assert not set(values) - set(made), set(values) - set(made)
    return made | values


def table(name: str, rows: list[dict[str, Any]]) -> pa.Table:
    schema = SCHEMAS[name]
    return pa.Table.from_pylist([row(schema, **values) for values in rows], schema=schema)


def tables(
    text: str = "t", length: int = 16, normalizer: str = "model", heads: int = 2, **numbers: float
) -> dict[str, pa.Table]:
    """A small set: `heads` heads of one layer, with one NaN, an infinity and a denormal among the numbers."""
    key = {"text": text, "length": length, "normalizer": normalizer, "kind": "decoder", "layer": 0}
    odd = {"entropy_nats": math.nan, "horizon": math.inf, "max_weight": 5e-324, **numbers}
    each = [{**key, "head": head} for head in range(heads)]
    return {
        "heads": table("heads", [{**one, "rows": 4, "n_low": 12, "n_high": 16, **odd} for one in each]),
        "by_length": table(
            "by_length", [{**one, "n_low": low, "n_high": high} for one in each for low, high in [(9, 11), (12, 16)]]
        ),
        "top_n": table(
            "top_n", [{**one, "top_n": n, "mass": 0.5, "d_tilde": math.nan} for one in each for n in (1, 5)]
        ),
        "sensitivity": table("sensitivity", [{**one, "temperature": 1.0} for one in each]),
        "coverage": table("coverage", [{**key, "top_n": 5}]),
        "reads": table(
            "reads",
            [{**one, "row": length - 1, "rank": rank, "key": rank, "weight": 0.5} for one in each for rank in (1, 2)],
        ),
        "tokens": table(
            "tokens",
            [{"text": text, "length": length, "side": "input", "position": at, "token": "a"} for at in range(length)],
        ),
        "blocks": table("blocks", [{**one, "block": block} for one in each for block in (0, 1)]),
    }
