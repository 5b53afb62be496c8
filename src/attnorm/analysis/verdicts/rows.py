"""The heads table as plain rows: how a number is read and printed, and which rows stand for a model."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from attnorm.analysis.tables import HEAD_KEY, VERDICT_COLUMNS, with_quantiles
from attnorm.analysis.verdicts.thresholds import DIFFERS, UNDECIDED

Row = Mapping[str, Any]

NUMBERS = (
    "entropy_ratio", "entropy_nats", "entropy_floor", "effective_keys", "max_weight", "row_sum", "sink_mass",
    "logit_spread", "horizon", "jacobian_norm", "entropy_ratio_without_sink", "effective_keys_without_sink",
    "max_weight_without_sink", "logit_spread_without_sink", "horizon_without_sink", "gap_slope",
    "gap_slope_without_sink", "gap_slope_error", "induction", "previous_token", "retrieval", "circuit_reach",
    "circuit_probed",
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
    known = set(heads.column_names)  # a new list at every look
    rows: list[dict[str, Any]] = heads.select([name for name in names if name in known]).to_pylist()
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


def representative(heads: Sequence[Row], normalizer: str | None = None) -> tuple[list[Row], int]:
    """One row per head, each text at its longest length, and how many heads get different verdicts from the texts.

    With several texts a head has a verdict only if more than half of them give it that one, else it is "differs"; or
    "undecided" where no two texts contradict each other. Its numbers are those of the longest text that stands for it.
    normalizer None: the model as it runs, or the first measured where it was not.
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
    chosen, changing = [], 0
    for rows in by_head.values():
        verdict = over_texts([row["verdict"] for row in rows])
        given = {row["verdict"] for row in rows} - {UNDECIDED}
        changing += len(given) > 1
        agreeing = [row for row in rows if row["verdict"] == verdict] or rows
        row = max(agreeing, key=lambda one: one["n_high"] or 0)
        chosen.append(row if row["verdict"] == verdict else {**row, "verdict": verdict, "evidence": _between(rows)})
    return chosen, changing


def over_texts(verdicts: Sequence[str | None]) -> str | None:
    """What holds over texts: the verdict of more than half of them, else "undecided" or "differs"."""
    most, count = Counter(verdicts).most_common(1)[0]
    if 2 * count > len(verdicts):
        return most
    return DIFFERS if len(set(verdicts) - {UNDECIDED}) > 1 else UNDECIDED


def _between(rows: Sequence[Row]) -> str:
    return "; ".join(f"{row['verdict'] or 'not judged'} on {row['text']!r}" for row in rows) + "."


def by_view(chosen: Sequence[Row], heads: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """The chosen heads that see as many keys as any of their kind on the same text, and those behind a window.

    What a head does among 512 keys says nothing about 8,192, and no longer text takes it beyond its horizon.
    """
    seeing_all: list[Row] = []
    windowed: list[Row] = []
    for row, behind in zip(chosen, behind_windows(chosen, heads), strict=True):
        (windowed if behind else seeing_all).append(row)
    return seeing_all, windowed


def behind_windows(chosen: Iterable[Row], heads: Iterable[Row]) -> list[bool]:
    """For each chosen head whether it sees fewer keys than another of its kind on the same text."""
    longest: dict[tuple[Any, ...], int] = {}
    for row in heads:
        longest[_pass(row)] = max(longest.get(_pass(row), 0), row["n_high"] or 0)
    return [row["n_high"] is not None and row["n_high"] < longest[_pass(row)] for row in chosen]


def head_id(row: Row) -> tuple[str, int, int]:
    return row["kind"], row["layer"], row["head"]


def _pass(row: Row) -> tuple[Any, ...]:
    return row["text"], row["length"], row["kind"]
