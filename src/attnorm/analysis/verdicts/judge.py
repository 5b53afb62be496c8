"""The verdict on each head, with the numbers that led to it in one sentence."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from attnorm.analysis.collect import SHORTEST_IN_SLOPE
from attnorm.analysis.tables import HEAD_KEY, VERDICT_COLUMNS
from attnorm.analysis.verdicts.rows import Row, head_rows, number
from attnorm.analysis.verdicts.rules import OPEN, RULES, Case, selects
from attnorm.analysis.verdicts.thresholds import VERDICTS, Thresholds

_HEAD = tuple(name for name, _ in HEAD_KEY)
_OVER_LENGTHS = tuple(name for name in _HEAD if name != "length")


@dataclass(frozen=True)
class Judgement:
    verdict: str | None  # None: nothing to judge by
    flags: tuple[str, ...]  # every verdict that holds, in order
    evidence: str


def judge(
    heads: pa.Table,
    by_length: pa.Table,
    top_n: pa.Table,
    thresholds: Thresholds = Thresholds(),  # noqa: B008  # frozen
    *,
    sensitivity: pa.Table | None = None,
    model_runs: str | None = "softmax",
) -> pa.Table:
    """`heads` with the columns verdict, flags and evidence.

    sensitivity: where measured, it has the worst case of the Jacobian norm for the normalizers' own parameters.
    model_runs: the normalizer behind the rows named "model": a patched model runs another than softmax. None where it
    is not known. Whether a ceiling bounds a row is told by the row itself: it has a horizon or has none.
    """
    slopes = _slopes_over_lengths(by_length)
    sets, bounds = _rows_by_head(top_n), _bounds(sensitivity)
    judged = [
        judge_head(
            Case(
                row=row,
                top_n=sets.get(_key(row, _HEAD), ()),
                thresholds=thresholds,
                runs=model_runs if row["normalizer"] == "model" else row["normalizer"],
                slope_over_lengths=slopes.get(_key(row, _OVER_LENGTHS)),
                bound=bounds.get(_key(row, _HEAD)),
            )
        )
        for row in head_rows(heads)
    ]
    plain = heads.drop_columns([name for name, _ in VERDICT_COLUMNS if name in heads.column_names])
    for name, kind in VERDICT_COLUMNS:
        plain = plain.append_column(name, pa.array([getattr(one, name) for one in judged], type=kind))
    return plain


def judge_head(case: Case) -> Judgement:
    broken = case.row.get("broken_rows") or 0
    if broken:
        rows = f"{broken:,} measured row{'s' * (broken != 1)}"
        return Judgement("broken", ("broken",), f"{rows} had logits or weights that are not finite; none is averaged.")
    if case.number("entropy_ratio") is None:
        return Judgement(None, (), "Not judged: no row with at least two visible keys.")
    findings = [finding for rule in RULES for finding in rule(case)]
    found = {name: words for name, words in findings if name != OPEN}
    flags = tuple(name for name in VERDICTS if name in found and name != "healthy")
    verdict = flags[0] if flags else "healthy"
    unknown = "; ".join(words for name, words in findings if name == OPEN)
    evidence = found.get(verdict) or selects(case)
    return Judgement(verdict, flags, f"{evidence}{'; not judged: ' if unknown else ''}{unknown}.")


def _key(row: Row, names: Sequence[str]) -> tuple[Any, ...]:
    return tuple(row[name] for name in names)


def _rows_by_head(top_n: pa.Table) -> dict[tuple[Any, ...], list[Row]]:
    columns = [*_HEAD, "top_n", "separability", "separability_null", "separability_null_high"]
    rows: dict[tuple[Any, ...], list[Row]] = {}
    for row in top_n.select(columns).to_pylist():
        rows.setdefault(_key(row, _HEAD), []).append(row)
    return rows


def _bounds(sensitivity: pa.Table | None) -> dict[tuple[Any, ...], float]:
    """At the model's own temperature."""
    rows = [] if sensitivity is None else sensitivity.select([*_HEAD, "temperature", "bound"]).to_pylist()
    return {
        _key(row, _HEAD): bound
        for row in rows
        if row["temperature"] == 1 and (bound := number(row, "bound")) is not None
    }


def _slopes_over_lengths(by_length: pa.Table) -> dict[tuple[Any, ...], float]:
    """The slope of the gap over the longest rows of several runs: the only one that a bidirectional model has."""
    longest: dict[tuple[Any, ...], dict[int, tuple[float, float]]] = {}
    for row in by_length.select([*_HEAD, "n", "effective_gap", "effective_gap_q50"]).to_pylist():
        n, gap = number(row, "n"), number(row, "effective_gap")
        if n is None or gap is None or n < SHORTEST_IN_SLOPE:
            continue
        points = longest.setdefault(_key(row, _OVER_LENGTHS), {})
        points[row["length"]] = max(points.get(row["length"], (0.0, 0.0)), (math.log(n), gap))
    slopes = {}
    for key, points in longest.items():
        x, y = np.array(list(points.values())).T
        if np.ptp(x) > math.log(1.4):  # less than half an octave says nothing about growth
            slopes[key] = float(np.polyfit(x, y, 1)[0])
    return slopes
