"""Statistics over the records of a grid: means, deviations over seeds, and the variance that each factor explains."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean, stdev
from typing import Any

import numpy as np
import pyarrow as pa

Record = dict[str, Any]
Number = Callable[[Record], float]
LISTS = (list, dict)


def select_records(records: Sequence[Record], **columns: Any) -> list[Record]:
    """Return the records that have these values."""
    return [record for record in records if all(record.get(name) == value for name, value in columns.items())]


def values(records: Sequence[Record], number: Number) -> list[float]:
    """Return the number of every record that has one."""
    numbers = [number(record) for record in records]
    return [value for value in numbers if math.isfinite(value)]


def mean(records: Sequence[Record], number: Number) -> float:
    numbers = values(records, number)
    return fmean(numbers) if numbers else math.nan


def seed_deviation(records: Sequence[Record], number: Number) -> float:
    """Return the standard deviation over seeds; NaN below two."""
    numbers = values(records, number)
    return stdev(numbers) if len(numbers) > 1 else math.nan


def loss(record: Record) -> float:
    return math.nan if record["valid_loss"] is None else float(record["valid_loss"])


def loss_at(record: Record, times: int, text: int = 0) -> float:
    """Return the loss in windows of `times` training lengths; NaN if the model has no such positions."""
    if "losses" not in record:
        return math.nan
    by_length = list(record["losses"].values())[text]
    return float(by_length.get(str(times * record["settings"]["context"]), math.nan))


def mean_over_heads(record: Record, column: str) -> float:
    """Return the mean of a column over all heads of a model."""
    numbers = np.array(record.get("heads", {}).get(column, []), dtype=np.float64)
    return float(np.nanmean(numbers)) if np.isfinite(numbers).any() else math.nan


def share_beyond_horizon(record: Record) -> float:
    """Return the share of heads whose longest rows have more keys than their horizon.

    NaN if no head has a horizon: with weights of exactly 0, or a penalty on distance, a head need not disperse.
    """
    heads = record.get("heads", {"horizon": [], "n_high": []})
    horizon, n = (np.array(heads[name], dtype=np.float64) for name in ("horizon", "n_high"))
    return float(np.mean(n > horizon)) if np.isfinite(horizon).any() else math.nan


def variance_shares(records: Sequence[Record], factors: Sequence[str], number: Number) -> dict[str, float]:
    """Return the share of the variance between models that each factor explains by itself, and what is left.

    Sums of squares of the main effects; models without the number are left out. The shares add up to 1 if every
    combination of the factors has equally many models.
    """
    kept = [record for record in records if math.isfinite(number(record))]
    y = np.array([number(record) for record in kept])
    total = float(((y - y.mean()) ** 2).sum()) if len(y) else 0.0
    if not total:
        return {}
    shares = {}
    for factor in factors:
        levels = np.array([str(record[factor]) for record in kept])
        means = {level: y[levels == level].mean() for level in np.unique(levels)}
        shares[factor] = float(sum((means[level] - y.mean()) ** 2 for level in levels)) / total
    return shares | {"the rest": 1 - sum(shares.values())}


def table(records: Sequence[Record], **numbers: Number) -> pa.Table:
    """Return one row per model: its plain values, and the given numbers."""
    rows = [
        {name: value for name, value in record.items() if not isinstance(value, LISTS)}
        | {name: number(record) for name, number in numbers.items()}
        for record in records
    ]
    return pa.Table.from_pylist([{name: _plain(value) for name, value in row.items()} for row in rows])


def _plain(value: Any) -> Any:
    """Convert numbers to float, so that a column has one type."""
    return value if value is None or isinstance(value, bool | str) else float(value)
