"""The heads table as plain rows: what verdicts, advice and summaries read, and how a number of them is told."""

import math
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from attnorm.analysis.tables import HEAD_KEY, VERDICT_COLUMNS, with_quantiles

Row = Mapping[str, Any]

NUMBERS = (
    "entropy_ratio", "entropy_nats", "entropy_floor", "effective_keys", "max_weight", "row_sum", "sink_mass",
    "logit_spread", "horizon", "jacobian_norm", "entropy_ratio_without_sink", "effective_keys_without_sink",
    "max_weight_without_sink", "logit_spread_without_sink", "horizon_without_sink", "gap_slope",
    "gap_slope_without_sink", "gap_slope_error",
)  # fmt: skip


def head_rows(heads: pa.Table) -> list[dict[str, Any]]:
    """Without the columns that no verdict reads, which are most of them: a large model has many thousand heads."""
    names = (
        [name for name, _ in HEAD_KEY]
        + ["rows", "broken_rows", "n_low", "n_high"]
        + [name for name, _ in VERDICT_COLUMNS]
    )
    names += ["worst_norm"]
    names += [column for number in NUMBERS for column in with_quantiles(number)]
    rows: list[dict[str, Any]] = heads.select([name for name in names if name in heads.column_names]).to_pylist()
    return rows


def number(row: Row, name: str) -> float | None:
    """The median row's value, the column itself where no median is kept; None where it is missing or not finite."""
    for column in (f"{name}_q50", name):
        value = row.get(column)
        if value is not None and math.isfinite(value):
            return float(value)
    return None


def keys(count: float) -> str:
    """A number of keys as a person says it: 8.4, 2,190, 27.2 million, 2e+15."""
    for size, word in ((1e12, ""), (1e9, " billion"), (1e6, " million")):
        if count >= size:
            return f"{count / size:,.3g}{word}" if word else f"{count:.0e}"
    return f"{count:,.0f}" if count >= 10 else f"{count:.2g}"
