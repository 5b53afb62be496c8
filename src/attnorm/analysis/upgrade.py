"""Tables that an older version of attnorm wrote, completed: columns and tables that it did not have, filled in.

Version 2 kept the mean of a metric under its own name and the median as _q50; it measured one window of a text and kept
no blocks of rows. Verdicts are judged again, without confidence, since nothing can be resampled.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from attnorm.analysis.manifest import SCHEMA
from attnorm.analysis.tables import BLOCKS, SCHEMAS, WINDOWS
from attnorm.metrics.catalogue import PER_ROW

ADDED = ("blocks", "windows")
NOTE = (
    "measured by an older attnorm: the verdicts are judged again by the present rules, without confidence, and "
    "saturation is not judged"
)


def completed_tables(tables: Mapping[str, pa.Table]) -> dict[str, pa.Table]:
    """The tables of version 2 with the columns of the present one."""
    found = {name: _completed(name, table) for name, table in tables.items()}
    return {**found, "blocks": BLOCKS.empty_table(), "windows": WINDOWS.empty_table()}


def upgraded_manifest(manifest: Mapping[str, Any]) -> dict[str, Any]:
    return {**manifest, "schema": SCHEMA, "notes": [*manifest.get("notes", []), NOTE]}


def _completed(name: str, table: pa.Table) -> pa.Table:
    if name in ("heads", "by_length"):
        means = {f"{metric}_mean": table[metric] for metric in PER_ROW if metric in table.column_names}
        medians = {metric: table[f"{metric}_q50"] for metric in PER_ROW if f"{metric}_q50" in table.column_names}
        for column, values in medians.items():
            table = table.set_column(table.column_names.index(column), column, values)
        for column, values in means.items():
            table = table.append_column(column, values)
    for field in SCHEMAS[name]:
        if field.name not in table.column_names:
            table = table.append_column(field.name, pa.array(np.full(table.num_rows, np.nan), field.type))
    return table.select(SCHEMAS[name].names)
