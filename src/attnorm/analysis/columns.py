"""Rows of a table as columns of numbers, layer by layer, until a pass is over."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

# Arrays of one length, and plain values that hold for all rows.
Columns = dict[str, Any]


FIXED = ("text", "length", "window")  # the same for all rows of a part


def layer_table(schema: pa.Schema, pieces: Sequence[Columns]) -> pa.Table:
    """One table out of all pieces, without the columns that are fixed for the part."""
    return table_of(pa.schema([field for field in schema if field.name not in FIXED]), pieces, {})


def joined(schema: pa.Schema, layers: Sequence[pa.Table], fixed: Mapping[str, Any]) -> pa.Table:
    """The tables of all layers in one, with the fixed columns."""
    rows = sum(layer.num_rows for layer in layers)
    columns = [
        pa.chunked_array([pa.repeat(pa.scalar(fixed[field.name], field.type), rows)])
        if field.name in FIXED
        else pa.chunked_array([chunk for layer in layers for chunk in layer[field.name].chunks], field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema).combine_chunks()


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
    return pa.repeat(pa.scalar(value, field.type), size)
