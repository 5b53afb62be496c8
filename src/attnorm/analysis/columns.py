"""Rows of a table as columns of numbers, layer by layer, until a pass is over."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

# Arrays of one length, and plain values that hold for all rows.
Columns = dict[str, Any]


def table_of(schema: pa.Schema, pieces: Sequence[Columns], fixed: Mapping[str, Any]) -> pa.Table:
    """One table out of all pieces; a number that was not measured is NaN."""
    sizes = [next(len(value) for value in piece.values() if isinstance(value, np.ndarray)) for piece in pieces]
    columns = [
        pa.chunked_array(
            [_filled({**piece, **fixed}, field, size) for piece, size in zip(pieces, sizes, strict=True)], field.type
        )
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema).combine_chunks()


def _filled(piece: Columns, field: pa.Field, size: int) -> pa.Array:
    value = piece.get(field.name, np.nan) if field.type == pa.float64() else piece[field.name]
    if isinstance(value, np.ndarray):
        return pa.array(value, field.type)
    return pa.array([value] * size, field.type)
