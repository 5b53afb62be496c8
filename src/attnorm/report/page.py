"""The report: one HTML file that contains its styles, script and data, and opens anywhere, offline.

A Content-Security-Policy allows only this style sheet and this script, by their hashes: no name of a text, model or
folder can run code or fetch anything. Headline, advice, table, explanations and manifest are HTML and need no
JavaScript (page_text.py); heat map, curves, sorting and filters are drawn by the script.

The data for the script: every head with its curves, and the tokens that it reads. Keys (text, length, normalizer, kind,
layer, head) are stored once, for the heads; the rows of another table that belong to head i are rows starts[i] to
starts[i + 1]. Tokens come from files of other people: control characters are spelled out here, and the script inserts
tokens as text, never as markup. Numbers are short strings: half precision with a scale per column, in base64. It has
three digits, which is enough for charts, and a report on 1,728 heads stays below 2 MB. `unpack` in script/data.js is
the inverse. Infinite values become missing values.
"""

import base64
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from attnorm.files import write_text
from attnorm.metrics.catalogue import BY_NAME, PER_ROW
from attnorm.report import page_text
from attnorm.report.page_text import LINE, WIDTH, Evaluated
from attnorm.report.views import (
    DISTANCES,
    KINDS,
    PANEL_METRICS,
    SHARES,
    TABLE_METRICS,
    VERDICTS,
    VerdictWord,
    column,
    default_choice,
    distinct,
    relative_distances,
    verdict_word,
)
from attnorm.report_data import INPUT, KEY, SIDES, ReportData, input_word
from attnorm.text import format_number, format_percent, render_page, visible

HERE = Path(__file__).parent / "html"
STYLES = ("colors", "page", "explorer", "charts", "reads", "table", "scores", "print")
SCRIPTS = (
    "data", "format", "color", "state", "elements", "chart", "curves", "heatmap", "picture", "reads", "panel", "table",
    "coverage", "main",
)  # fmt: skip

LARGEST = 60_000.0  # the largest magnitude of a column is scaled to this; half precision ends at 65,504
FEW = 256  # distinct values that fit into one byte
LONGEST_TOKEN = 40  # characters
MAX_KEYS = 4_000  # read keys on the page, about 25 kB; with more, each row shows fewer
MAX_PATCHES = 120_000  # of images, which need every key: two rows of 144 heads have 57,000 for 196 patches
# Columns for the curves of a head.
CURVES = (
    "n", "entropy_nats", "entropy_nats_q25", "entropy_nats_q75", "entropy_floor", "effective_keys", "max_weight",
    "weight_ceiling", "effective_gap", "effective_gap_q25", "effective_gap_q75", "effective_gap_without_sink",
)  # fmt: skip
SETS = (
    "top_n", "mass", "relative_distance", *DISTANCES, "separability", "separability_null", "separability_null_low",
    "separability_null_high", "separability_sphere", "separability_lower", "separability_upper",
)  # fmt: skip


def render(data: ReportData, evaluation: Evaluated | None = None) -> str:
    """Return the page as HTML.

    evaluation: scores of the model before and after a swap, which get a section of their own.
    """
    style, script = _join_files("style", "css", STYLES), _join_files("script", "js", SCRIPTS)
    scores = None if evaluation is None else evaluation.score_table()
    return render_page(
        HERE / "templates" / "page.html.j2",
        style=style,
        script=script,
        images="data:",
        filters={"number": format_number, "share": format_percent, "plain": page_text.plain},
        data=payload(data),
        **page_text.page_words(data),
        verdict_words=VERDICTS,
        evaluation=scores if scores is not None and scores.rows else None,  # none: stopped in its first part
        width=WIDTH,
        line=LINE,
    )


def save(data: ReportData, path: str | Path, evaluation: Evaluated | None = None) -> Path:
    """Write the page atomically and return its path."""
    target = Path(path)
    write_text(target, render(data, evaluation))
    return target


@cache
def _join_files(folder: str, suffix: str, names: tuple[str, ...]) -> str:
    parts = [(HERE / folder / f"{name}.{suffix}").read_text(encoding="utf-8") for name in names]
    text = "\n".join(parts)
    return f'(() => {{\n"use strict";\n{text}\n}})();' if suffix == "js" else text


_JUDGED = ["confidence", "saturation", "saturation_top_n", "saturation_excess", "saturation_low", "saturation_high"]


def payload(data: ReportData) -> dict[str, Any]:
    """Return the JSON value that the page embeds."""
    tables, manifest, heads = data.tables, data.manifest, data.tables["heads"]
    index = {key: row for row, key in enumerate(_keys(heads))}
    choices = {name: distinct(heads, name) for name in ("text", "length", "normalizer", "kind")}
    measured = [name for name in BY_NAME if np.isfinite(column(heads, name)).any()]
    quantiles = [f"{name}_q{q}" for name in PANEL_METRICS if name in PER_ROW for q in ("05", "95")]
    return {
        "choices": choices,
        "first": default_choice(tables),
        "kindNames": KINDS,
        "inputName": input_word(manifest).capitalize(),
        "runs": (manifest.get("model") or {}).get("runs", "softmax"),
        "metrics": [_describe_metric(name) for name in measured],
        "shares": list(SHARES),
        "panelMetrics": [name for name in PANEL_METRICS if name in measured],
        "tableMetrics": [name for name in TABLE_METRICS if name in measured],
        "verdicts": [vars(word) for word in _verdict_words(heads)],
        "heads": {
            "count": heads.num_rows,
            **{name: [choices[name].index(value) for value in heads[name].to_pylist()] for name in choices},
            "layer": heads["layer"].to_pylist(),
            "head": heads["head"].to_pylist(),
            "rows": heads["rows"].to_pylist(),
            "nLow": heads["n_low"].to_pylist(),
            "nHigh": heads["n_high"].to_pylist(),
            "broken": heads["broken_rows"].to_pylist(),
            **_judgments(heads),
            "columns": _columns(heads, [*measured, *quantiles, "gap_slope_error"]),
        },
        "byLength": _sort_by_head(tables["by_length"], index, CURVES),
        "topN": _sort_by_head(relative_distances(tables["top_n"]), index, SETS),
        "sensitivity": _sort_by_head(
            tables["sensitivity"],
            index,
            [name for name in tables["sensitivity"].column_names if name not in (*KEY, "rows")],
        ),
        "coverage": _coverage(tables["coverage"], choices),
        "reads": _reads(tables["reads"], index, MAX_PATCHES if manifest.get("pictures") else MAX_KEYS),
        "tokens": _tokens(tables["tokens"], choices),
        "pictures": _pictures(manifest, choices),
        "sides": {"input": INPUT, "kinds": {kind: list(pair) for kind, pair in SIDES.items()}},
    }


def _keys(table: pa.Table) -> list[tuple[Any, ...]]:
    return list(zip(*(table.column(name).to_pylist() for name in KEY), strict=True))


def _describe_metric(name: str) -> dict[str, Any]:
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


def _verdict_words(heads: pa.Table) -> list[VerdictWord]:
    """Return all verdicts, worst first, then those of the table that this version does not know."""
    names = [word.name for word in VERDICTS]
    others = [name for name in dict.fromkeys(heads["verdict"].to_pylist()) if name not in names]
    return [*VERDICTS, *(verdict_word(name) for name in others)]


def _judgments(heads: pa.Table) -> dict[str, Any]:
    index = {word.name: number for number, word in enumerate(_verdict_words(heads))}
    return {
        "verdict": [index[verdict_word(name).name] for name in heads["verdict"].to_pylist()],
        "flags": [[index.get(flag, flag) for flag in row or []] for row in heads["flags"].to_pylist()],
        "evidence": [evidence and page_text.keep_percent(evidence) for evidence in heads["evidence"].to_pylist()],
        "beside": [_confidence_and_saturation(row) for row in heads.select(_JUDGED).to_pylist()],
    }


def _confidence_and_saturation(row: dict[str, Any]) -> str:
    confidence, excess = row["confidence"], row["saturation_excess"]
    parts = [] if confidence is None or not np.isfinite(confidence) else [f"Confidence {format_percent(confidence)}."]
    if row["saturation"] not in (None, "", "not judged"):
        numbers = ""
        if excess is not None and np.isfinite(excess):
            low, high = row["saturation_low"], row["saturation_high"]
            interval = f", {format_number(low)} to {format_number(high)}" if np.isfinite(low) else ""
            numbers = (
                f" (excess over permuted weights at N = {row['saturation_top_n']}: {format_number(excess)}{interval})"
            )
        parts.append(f"Saturation: {row['saturation']}{numbers}.")
    return " ".join(parts)


def _columns(table: pa.Table, names: Sequence[str]) -> dict[str, Any]:
    logarithmic = {name for name, metric in BY_NAME.items() if metric.logarithmic}
    return {
        name: packed(column(table, name), logarithmic=name in logarithmic)
        for name in names
        if name in table.column_names
    }


def _owned_rows(
    table: pa.Table, index: Mapping[tuple[Any, ...], int], *order: str
) -> tuple[list[int], NDArray[np.intp]]:
    """Return where the rows of each head start, and the rows sorted by head, then by the columns `order`."""
    owner = np.array([index.get(key, -1) for key in _keys(table)])
    rows = np.lexsort((*(column(table, name) for name in reversed(order)), owner))
    rows = rows[owner[rows] >= 0]
    return np.searchsorted(owner[rows], np.arange(len(index) + 1)).tolist(), rows


def _sort_by_head(table: pa.Table, index: dict[tuple[Any, ...], int], names: Sequence[str]) -> dict[str, Any]:
    """Sort rows by head, then by their own first column (n, N or T)."""
    if not table.num_rows:
        return {"starts": [0] * (len(index) + 1), "columns": {}}
    starts, order = _owned_rows(table, index, names[0])
    rows = table.take(pa.array(order))
    finite = [name for name in names if np.isfinite(column(rows, name)).any()]
    return {"starts": starts, "columns": _columns(rows, finite)}


def _coverage(table: pa.Table, choices: dict[str, list[Any]]) -> list[list[Any]]:
    """Return [text, length, normalizer, kind, layer, N, per head, union, independent]; the first four as indices."""
    rows = []
    for row in table.to_pylist():
        key = [choices[name].index(row[name]) if row[name] in choices[name] else -1 for name in choices]
        numbers = [row["per_head"], row["union"], row["independent"]]
        rounded = [None if number is None or not np.isfinite(number) else float(f"{number:.4g}") for number in numbers]
        rows.append([*key, row["layer"], row["top_n"], *rounded])
    return rows


def _reads(reads: pa.Table, index: Mapping[tuple[Any, ...], int], limit: int) -> dict[str, Any]:
    """Return the read keys sorted by head, row and rank. left_out: keys per row that are not on the page."""
    reads = _first_window(reads)
    if not reads.num_rows:
        return {"starts": [0] * (len(index) + 1), "columns": {}, "left_out": 0}
    most, shown = int(pc.max(reads["rank"]).as_py()), _ranks_that_fit(reads, limit)
    reads = reads.filter(pc.less_equal(reads["rank"], shown))
    starts, order = _owned_rows(reads, index, "row", "rank")
    integer_columns = {name: packed_whole(reads[name].to_numpy()[order]) for name in ("row", "key")}
    columns = {**integer_columns, "weight": packed(column(reads, "weight")[order])}
    return {"starts": starts, "columns": columns, "left_out": most - shown}


def _tokens(tokens: pa.Table, choices: Mapping[str, list[Any]]) -> list[dict[str, Any]]:
    """Return the tokens of each text, length and side, by position."""
    tokens_by_side: dict[tuple[int, int, str], list[str]] = {}
    for row in _first_window(tokens).sort_by("position").to_pylist():
        if row["text"] in choices["text"] and row["length"] in choices["length"]:
            side_key = (choices["text"].index(row["text"]), choices["length"].index(row["length"]), row["side"])
            tokens_by_side.setdefault(side_key, []).append(visible(row["token"] or "", LONGEST_TOKEN))
    return [
        {"text": text, "length": length, "side": side, "tokens": side_tokens}
        for (text, length, side), side_tokens in tokens_by_side.items()
    ]


def _pictures(manifest: Mapping[str, Any], choices: Mapping[str, list[Any]]) -> dict[int, dict[str, Any]]:
    """Return the images by the index of their text. A folder may come from anyone: only a PNG as data is shown."""
    pictures = {}
    for name, picture in (manifest.get("pictures") or {}).items():
        if name in choices["text"] and str(picture["png"]).startswith("data:image/png;base64,"):
            pictures[choices["text"].index(name)] = {name: picture[name] for name in ("png", "rows", "columns")}
    return pictures


def _ranks_that_fit(reads: pa.Table, limit: int) -> int:
    """Return the largest rank up to which all keys fit on the page; at least 1."""
    counts = np.bincount(reads["rank"].to_numpy())
    return max(1, int(np.searchsorted(np.cumsum(counts), limit, side="right")) - 1)


def _first_window(table: pa.Table) -> pa.Table:
    """Select the first window of each text, so that the page stays small."""
    return table.filter(pc.equal(table["window"], pc.min(table["window"]))) if table.num_rows else table


def packed(values: NDArray[np.float64], *, logarithmic: bool = False) -> dict[str, Any]:
    """Encode a column as a dictionary for JSON.

    {"all": v} if all values are equal, {"levels": [...], "bytes": ...} if there are few values, else {"half": ...} with
    a scale. logarithmic: store the logarithm to base 10, for columns with values such as 1e30.
    """
    finite = np.where(np.isfinite(values), values, np.nan)
    levels, indices = np.unique(finite, return_inverse=True)  # NaN counts as one value
    if len(levels) <= 1:
        return {"all": _round_digits(float(levels[0])) if len(levels) else None}
    if len(levels) <= FEW:
        return {"levels": [_round_digits(float(level)) for level in levels], "bytes": _text(indices.astype(np.uint8))}
    if logarithmic:
        finite = np.log10(finite, out=np.full_like(finite, np.nan), where=finite > 0)
    scale = float(np.nanmax(np.abs(finite))) / LARGEST or 1.0
    return {"half": _text((finite / scale).astype("<f2")), "scale": scale, "logarithmic": logarithmic}


def packed_whole(values: NDArray[np.integer[Any]]) -> dict[str, Any]:
    """Encode integers from 0 on without rounding."""
    levels, indices = np.unique(values, return_inverse=True)
    if len(levels) <= 1:
        return {"all": int(levels[0]) if len(levels) else None}
    if len(levels) <= FEW:
        return {"levels": levels.tolist(), "bytes": _text(indices.astype(np.uint8))}
    width = 2 if int(levels[-1]) < 2**16 else 4
    return {"whole": _text(values.astype(f"<u{width}")), "width": width}


def _round_digits(value: float) -> float | None:
    return None if np.isnan(value) else float(f"{value:.6g}")


def _text(array: NDArray[Any]) -> str:
    return base64.b64encode(array.tobytes()).decode("ascii")
