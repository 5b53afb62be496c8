"""The heads table as Python dicts: read and format numbers, and choose one row per head for the model's verdict."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from attnorm.analysis.tables import HEAD_KEY, QUANTILES, VERDICT_COLUMNS
from attnorm.analysis.verdicts.thresholds import DIFFERS, UNDECIDED
from attnorm.report_data import Row

NUMBERS = (
    "entropy_ratio", "entropy_nats", "entropy_floor", "effective_keys", "max_weight", "row_sum", "row_sum_mean",
    "row_sum_q05", "sink_mass", "logit_spread", "horizon", "jacobian_norm",
    "entropy_ratio_without_sink", "effective_keys_without_sink",
    "max_weight_without_sink", "logit_spread_without_sink", "horizon_without_sink", "gap_slope",
    "gap_slope_without_sink", "gap_slope_error", "induction", "previous_token", "retrieval", "circuit_reach",
    "circuit_probed", "gated_sink_mass",
)  # fmt: skip


def head_rows(heads: pa.Table) -> list[dict[str, Any]]:
    """Return the table as dicts, with only the columns that verdicts read: a large model has many thousand heads."""
    names = (
        [name for name, _ in HEAD_KEY]
        + ["rows", "broken_rows", "n_low", "n_high"]
        + [name for name, _ in VERDICT_COLUMNS]
    )
    names += ["worst_norm", *NUMBERS, *(f"jacobian_norm_q{q:02d}" for q in QUANTILES)]
    present = set(heads.column_names)  # pyarrow builds a new list at every access
    chosen = [name for name in dict.fromkeys(names) if name in present]
    columns = [_as_list(heads[name]) for name in chosen]
    return [dict(zip(chosen, row, strict=True)) for row in zip(*columns, strict=True)]


def _as_list(column: pa.ChunkedArray) -> list[Any]:
    """Return the values; through NumPy for numbers, which takes a tenth of pyarrow's time."""
    numbers = pa.types.is_floating(column.type) or pa.types.is_integer(column.type)
    values: list[Any] = column.to_numpy().tolist() if numbers and not column.null_count else column.to_pylist()
    return values


def representative_rows(heads: Sequence[Row], normalizer: str | None = None) -> tuple[list[Row], int]:
    """Return one row per head, at the longest length of each text; and how many heads have different verdicts.

    With several texts, the verdict of a head is that of more than half of them. Otherwise it is "differs", or
    "undecided" if no two texts contradict each other. Its numbers are those of the longest text with that verdict.
    normalizer: name in the table (default: "model", or the first one if the model's own was not measured).
    """
    if not heads:
        return [], 0
    names = [row["normalizer"] for row in heads]
    measured = normalizer or ("model" if "model" in names else names[0])
    longest: dict[str, int] = {}
    for row in heads:
        longest[row["text"]] = max(longest.get(row["text"], 0), row["length"] or 0)
    by_head: dict[tuple[Any, ...], list[Row]] = {}
    for row in heads:
        if row["normalizer"] == measured and (row["length"] or 0) == longest[row["text"]]:
            by_head.setdefault(head_id(row), []).append(row)
    representatives, changing = [], 0
    for rows in by_head.values():
        verdict = verdict_over_texts([row["verdict"] for row in rows])
        verdicts = {row["verdict"] for row in rows} - {UNDECIDED}
        changing += len(verdicts) > 1
        agreeing = [row for row in rows if row["verdict"] == verdict] or rows
        row = max(agreeing, key=lambda candidate: candidate["n_high"] or 0)
        representatives.append(
            row if row["verdict"] == verdict else {**row, "verdict": verdict, "evidence": _list_verdicts(rows)}
        )
    return representatives, changing


def verdict_over_texts(verdicts: Sequence[str | None]) -> str | None:
    """Return the verdict of more than half of the texts, else "undecided" or "differs"."""
    most, count = Counter(verdicts).most_common(1)[0]
    if 2 * count > len(verdicts):
        return most
    return DIFFERS if len(set(verdicts) - {UNDECIDED}) > 1 else UNDECIDED


def _list_verdicts(rows: Sequence[Row]) -> str:
    return "; ".join(f"{row['verdict'] or 'not judged'} on {row['text']!r}" for row in rows) + "."


def split_by_window(chosen: Sequence[Row], heads: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """Split heads into those that see all keys, and those with a sliding window (see `sees_fewer_keys`).

    They are judged separately: what a head does among 512 keys says nothing about 8,192 keys, and a longer text does
    not take a head with a window beyond its horizon.
    """
    seeing_all: list[Row] = []
    windowed: list[Row] = []
    for row, behind in zip(chosen, sees_fewer_keys(chosen, heads), strict=True):
        (windowed if behind else seeing_all).append(row)
    return seeing_all, windowed


def sees_fewer_keys(chosen: Iterable[Row], heads: Iterable[Row]) -> list[bool]:
    """Return for each chosen head whether it sees fewer keys than another head of its kind on the same text."""
    longest: dict[tuple[Any, ...], int] = {}
    for row in heads:
        longest[_pass_key(row)] = max(longest.get(_pass_key(row), 0), row["n_high"] or 0)
    return [row["n_high"] is not None and row["n_high"] < longest[_pass_key(row)] for row in chosen]


def head_id(row: Row) -> tuple[str, int, int]:
    return row["kind"], row["layer"], row["head"]


def _pass_key(row: Row) -> tuple[Any, ...]:
    return row["text"], row["length"], row["kind"]
