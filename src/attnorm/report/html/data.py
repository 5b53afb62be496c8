"""What the page's script gets: every head with its curves, the rows of each head side by side, nothing twice.

Keys (text, length, normalizer, kind, layer, head) are written once, for the heads; the rows of another table that
belong to head i are rows starts[i] to starts[i + 1].
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from attnorm.analysis.tables import HEAD_KEY
from attnorm.metrics.catalogue import BY_NAME, PER_ROW
from attnorm.report.html.column_encoding import packed
from attnorm.report.html.numbers import number, share
from attnorm.report.html.reads import reads_payload, sides_payload, tokens_payload
from attnorm.report.selection import DISTANCES, column, default_choice, distinct, relative_distances
from attnorm.report.vocabulary import KINDS, PANEL_METRICS, SHARES, TABLE_METRICS, VERDICTS, verdict_word

KEY = tuple(name for name, _ in HEAD_KEY)

# What the curves of a head show; the rest of by_length stays in the tables.
CURVES = (
    "n", "entropy_nats", "entropy_nats_q25", "entropy_nats_q75", "entropy_floor", "effective_keys", "max_weight",
    "weight_ceiling", "effective_gap", "effective_gap_q25", "effective_gap_q75", "effective_gap_without_sink",
)  # fmt: skip
SETS = (
    "top_n", "mass", "relative_distance", *DISTANCES, "separability", "separability_null", "separability_null_low",
    "separability_null_high", "separability_sphere", "separability_lower", "separability_upper",
)  # fmt: skip


def payload(analysis: Any) -> dict[str, Any]:
    heads = analysis.heads
    index = {key: row for row, key in enumerate(_keys(heads))}
    choices = {name: distinct(heads, name) for name in ("text", "length", "normalizer", "kind")}
    measured = [name for name in BY_NAME if np.isfinite(column(heads, name)).any()]
    quantiles = [f"{name}_q{q}" for name in PANEL_METRICS if name in PER_ROW for q in ("05", "95")]
    return {
        "choices": choices,
        "first": default_choice(analysis),
        "kindNames": KINDS,
        "runs": (analysis.manifest.get("model") or {}).get("runs", "softmax"),
        "metrics": [_described(name) for name in measured],
        "shares": list(SHARES),
        "panelMetrics": [name for name in PANEL_METRICS if name in measured],
        "tableMetrics": [name for name in TABLE_METRICS if name in measured],
        "verdicts": [vars(word) for word in _words(heads)],
        "heads": {
            "count": heads.num_rows,
            **{name: _places(heads, name, choices[name]) for name in choices},
            "layer": heads.column("layer").to_pylist(),
            "head": heads.column("head").to_pylist(),
            "rows": heads.column("rows").to_pylist(),
            "nLow": heads.column("n_low").to_pylist(),
            "nHigh": heads.column("n_high").to_pylist(),
            "broken": heads.column("broken_rows").to_pylist(),
            **_judgements(heads),
            "columns": _columns(heads, [*measured, *quantiles, "gap_slope_error"]),
        },
        "byLength": _grouped(analysis.by_length, index, CURVES),
        "topN": _grouped(relative_distances(analysis.top_n), index, SETS),
        "sensitivity": _grouped(analysis.sensitivity, index, _numbers_of(analysis.sensitivity)),
        "coverage": _coverage(analysis.coverage, choices),
        "reads": reads_payload(analysis.reads, index, KEY),
        "tokens": tokens_payload(analysis.tokens, choices),
        "sides": sides_payload(),
    }


def _keys(table: pa.Table) -> list[tuple[Any, ...]]:
    return list(zip(*(table.column(name).to_pylist() for name in KEY), strict=True))


def _places(table: pa.Table, name: str, choices: Sequence[Any]) -> list[int]:
    place = {choice: number for number, choice in enumerate(choices)}
    return [place[value] for value in table.column(name).to_pylist()]


def _described(name: str) -> dict[str, Any]:
    metric = BY_NAME[name]
    return {
        "name": name,
        "label": metric.label,
        "unit": metric.unit,
        "meaning": metric.meaning,
        "reading": metric.reading,
        "logarithmic": metric.logarithmic,
        "bounded": metric.bounded,
        "rows": metric.per_row,
    }


def _words(heads: pa.Table) -> list[Any]:
    """All verdicts in order of urgency, then those of the table that this version does not know."""
    known = [word.name for word in VERDICTS]
    if "verdict" not in heads.column_names:
        return list(VERDICTS)
    others = [name for name in dict.fromkeys(heads.column("verdict").to_pylist()) if name not in known]
    return [*VERDICTS, *(verdict_word(name) for name in others)]


def _judgements(heads: pa.Table) -> dict[str, Any]:
    words = [word.name for word in _words(heads)]
    if "verdict" not in heads.column_names:
        return {"verdict": [None] * heads.num_rows, "flags": [[]] * heads.num_rows, "evidence": {}}
    verdicts = [verdict_word(name).name for name in heads.column("verdict").to_pylist()]
    place = {name: number for number, name in enumerate(words)}
    flags = [[place.get(flag, flag) for flag in row or []] for row in heads.column("flags").to_pylist()]
    evidence = heads.column("evidence").to_pylist()
    places = [place[name] for name in verdicts]
    return {"verdict": places, "flags": flags, "evidence": evidence, "beside": _beside(heads)}


def _beside(heads: pa.Table) -> list[str]:
    """What is judged apart from the verdict, in words: how sure it is, and saturation."""
    wanted = ["confidence", "saturation", "saturation_top_n", "saturation_excess", "saturation_low", "saturation_high"]
    found = [name for name in wanted if name in heads.column_names]
    return [_beside_words(row) for row in heads.select(found).to_pylist()]


def _beside_words(row: dict[str, Any]) -> str:
    confidence, excess = row.get("confidence"), row.get("saturation_excess")
    parts = [] if confidence is None or not np.isfinite(confidence) else [f"Confidence {share(confidence)}."]
    if row.get("saturation") not in (None, "", "not judged"):
        numbers = ""
        if excess is not None and np.isfinite(excess):
            low, high = row["saturation_low"], row["saturation_high"]
            interval = f", {number(low)} to {number(high)}" if np.isfinite(low) else ""
            numbers = f" (excess over permuted values at N = {row['saturation_top_n']}: {number(excess)}{interval})"
        parts.append(f"Saturation: {row['saturation']}{numbers}.")
    return " ".join(parts)


def _columns(table: pa.Table, names: Sequence[str]) -> dict[str, Any]:
    logarithmic = {name for name, metric in BY_NAME.items() if metric.logarithmic}
    return {
        name: packed(column(table, name), logarithmic=name in logarithmic)
        for name in names
        if name in table.column_names
    }


def _numbers_of(table: pa.Table) -> list[str]:
    return [name for name in table.column_names if name not in (*KEY, "rows")] if table is not None else []


def _grouped(table: pa.Table, index: dict[tuple[Any, ...], int], names: Sequence[str]) -> dict[str, Any]:
    """The rows sorted by head, then by their own first column (n, N or T)."""
    if table is None or not table.num_rows:
        return {"starts": [0] * (len(index) + 1), "columns": {}}
    owner = np.array([index.get(key, -1) for key in _keys(table)])
    order = np.lexsort((column(table, names[0]), owner))
    order = order[owner[order] >= 0]
    starts = np.searchsorted(owner[order], np.arange(len(index) + 1))
    rows = table.take(pa.array(order))
    finite = [name for name in names if np.isfinite(column(rows, name)).any()]
    return {"starts": starts.tolist(), "columns": _columns(rows, finite)}


def _coverage(table: pa.Table, choices: dict[str, list[Any]]) -> list[list[Any]]:
    """Rows of [text, length, normalizer, kind, layer, N, per head, union, independent]; the first four as places."""
    if table is None:
        return []
    rows = []
    for row in table.to_pylist():
        key = [choices[name].index(row[name]) if row[name] in choices[name] else -1 for name in choices]
        numbers = [row["per_head"], row["union"], row["independent"]]
        rounded = [None if one is None or not np.isfinite(one) else float(f"{one:.4g}") for one in numbers]
        rows.append([*key, row["layer"], row["top_n"], *rounded])
    return rows
