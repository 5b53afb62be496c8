"""The text of the page, which can be read without JavaScript: words, the table of heads, scores."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import pyarrow as pa

from attnorm.metrics.catalogue import BY_NAME, METRICS
from attnorm.report.views import (
    GROUPS,
    KINDS,
    SHARES,
    TABLE_METRICS,
    VERDICTS,
    chosen_rows,
    column,
    default_choice,
    verdict_word,
)
from attnorm.report_data import Advice, ReportData, WhatIf, input_word
from attnorm.text import MISSING, format_keys, format_number, format_percent, minus_sign


def page_words(data: ReportData) -> dict[str, Any]:
    """Return everything that the templates show as text."""
    manifest, choice = data.manifest, default_choice(data.tables)
    return {
        "model_name": str(manifest["model"].get("name") or "a model"),
        "headline": data.headline.partition("; "),  # the first clause is set larger
        "sentences": [with_lead(keep_percent(sentence)) for sentence in data.sentences],
        "counts": verdict_counts(data.counts),
        "advice": [advice_words(advice) for advice in data.advice if not advice.caution],
        "cautions": [advice_words(advice) for advice in data.advice if advice.caution],
        "choice": choice,
        "choice_words": [choice["text"], length_text(choice["length"]), KINDS.get(choice["kind"], choice["kind"])],
        "notes": [f"{note[:1].upper()}{note[1:].rstrip('.')}." for note in map(str, manifest.get("notes") or [])],
        "facts": model_facts(manifest["model"]),
        "table_metrics": [BY_NAME[name] for name in TABLE_METRICS],
        "rows": table_rows(data.tables["heads"], choice),
        "metric_groups": [
            (title, [metric for metric in METRICS if metric.group == group]) for group, title in GROUPS.items()
        ],
        "input_word": input_word(manifest),
        "settings": settings_of(manifest),
        "judged_by": data.threshold_sentences,
        "manifest": sections(manifest, data.default_thresholds),
        "output": output_panel(manifest.get("output") or {}),
        "created": str(manifest.get("created") or ""),
        "version": str((manifest.get("versions") or {}).get("attnorm") or ""),
    }


OUTPUT_WIDTH, OUTPUT_HEIGHT, OUTPUT_FLOOR = 400.0, 170.0, 1e-4  # of the panel's chart, and its lowest loss in nats


def output_panel(output: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the words, curves and table about the output layer; None if it was not measured."""
    if not output:
        return None
    curves = [output[name] for name in ("own", "larger") if output.get(name)]
    widest = max(max(curve["ranks"]) for curve in curves)
    top = math.log10(max(max(curve["kl"]) for curve in curves) + OUTPUT_FLOOR)
    bottom = math.log10(OUTPUT_FLOOR)

    def point(rank: float, kl: float) -> tuple[float, float]:
        height = (math.log10(max(kl, OUTPUT_FLOOR)) - bottom) / max(top - bottom, 1e-9)
        return OUTPUT_WIDTH * rank / widest, OUTPUT_HEIGHT * (1 - height)

    def path(curve: Mapping[str, Any]) -> str:
        points = [point(*pair) for pair in zip(curve["ranks"], curve["kl"], strict=True)]
        return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)

    ticks = [10.0**power for power in range(math.ceil(bottom), math.floor(top) + 1)]
    shown = [*range(0, len(curves[0]["ranks"]), max(1, len(curves[0]["ranks"]) // 6)), len(curves[0]["ranks"]) - 1]
    return {
        "sentences": output["sentences"],
        "width": output["width"],
        "at_width": point(output["width"], 1)[0],
        "widest": widest,
        "paths": [(curve["model"], path(curve)) for curve in curves],
        "ticks": [(f"{tick:g}", point(0, tick)[1]) for tick in ticks],
        "table": [
            (curves[0]["ranks"][index], format_number(curves[0]["kl"][index]), format_number(curves[0]["loss"][index]))
            for index in dict.fromkeys(shown)
        ],
    }


def keep_percent(text: str) -> str:
    """Return the text with no-break spaces before percent signs, so that no line starts with one."""
    return text.replace(" %", "\u00a0%")


def with_lead(sentence: str) -> tuple[str, str]:
    """Split a sentence that starts with a question or a title into this start and the rest."""
    match = re.match(r"([^.;]{3,60}?[?:]) (.*)", sentence, re.DOTALL)
    return (match[1], match[2]) if match else ("", sentence)


def verdict_counts(counts: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the verdicts that occur, worst first, with start and width of their part of a bar that is 100 wide."""
    order = [word.name for word in VERDICTS]
    names = [name for name in order if counts.get(name)]
    names += [name for name in counts if counts[name] and name not in order]
    total = sum(counts[name] for name in names) or 1
    parts, start = [], 0.0
    for name in names:
        width = 100 * counts[name] / total
        parts.append({"word": verdict_word(name), "count": counts[name], "start": start, "width": width})
        start += width
    return parts


def advice_words(advice: Advice) -> dict[str, Any]:
    return {
        "title": advice.title,
        "text": keep_percent(advice.text),
        "command": advice.command or "",
        "table": what_if_table(advice.what_if, advice.baseline) if advice.what_if else None,
    }


def what_if_table(what_if: Sequence[WhatIf], baseline: str = "now") -> dict[str, Any]:
    """Return a row per quantity with its value before and a column per change.

    If it differs between changes, because other heads were measured, the cell shows both values.
    baseline: heading of the values before (see Advice).
    """
    changes = list(dict.fromkeys(entry.change for entry in what_if))
    rows = []
    for quantity in dict.fromkeys(entry.quantity for entry in what_if):
        by_change = {entry.change: entry for entry in what_if if entry.quantity == quantity}
        now = format_number(next(iter(by_change.values())).before)
        cells = []
        for change in changes:
            entry = by_change.get(change)
            before, after = (format_number(entry.before), format_number(entry.after)) if entry else (now, MISSING)
            cells.append(after if before == now else f"{before} → {after}")
        rows.append([quantity, now, *cells])
    return {"headings": ["", baseline, *changes], "rows": rows}


def length_text(length: int | None) -> str:
    return "whole input" if length is None else f"{length:,} tokens"


def metric_text(name: str, value: float | None) -> str:
    """Format a metric, as metricText of script/format.js does."""
    if name in SHARES:
        return format_percent(value)
    if BY_NAME[name].unit == "keys" and value is not None and 1 <= value < 1_000:
        return format_keys(value)
    return format_number(value)


def model_facts(model: Mapping[str, Any]) -> list[str]:
    """Return the facts below the headline: size of the model and how it ran."""
    facts = []
    if model.get("layers") and model.get("heads"):
        facts.append(f"{plain(model['layers'])} layers × {plain(model['heads'])} heads")
    if isinstance(model.get("parameters"), int):
        facts.append(f"{format_number(model['parameters'])} parameters")
    return facts + [str(model[name]) for name in ("class", "dtype", "device") if model.get(name)]


def table_rows(heads: pa.Table, choice: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of the table of heads before the script sorts or filters them."""
    rows = chosen_rows(heads, choice)
    values = {name: column(rows, name).tolist() for name in TABLE_METRICS}
    return [
        {
            "layer": row["layer"],
            "head": row["head"],
            "word": verdict_word(row["verdict"]),
            "evidence": keep_percent(row["evidence"] or ""),
            "numbers": [metric_text(name, values[name][index]) for name in TABLE_METRICS],
        }
        for index, row in enumerate(rows.select(["layer", "head", "verdict", "evidence"]).to_pylist())
    ]


def settings_of(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings that the section Methods names; missing ones are empty."""
    settings = manifest["settings"]
    names = ("rows", "vectors", "vector_rows", "seed", "top_n", "temperatures", "metrics")
    return {name: plain(settings[name]) if settings.get(name) is not None else "" for name in names}


def sections(
    manifest: Mapping[str, Any], default_thresholds: Mapping[str, float]
) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the manifest as titled lists; deeper entries are named by their path."""
    titled: list[tuple[str, list[tuple[str, str]]]] = []
    manifest = {**manifest, "thresholds": _beside(default_thresholds, manifest.get("thresholds") or {})}
    loose = [(str(key), plain(value)) for key, value in manifest.items() if not _is_nested(value)]
    for key, value in manifest.items():
        if _is_nested(value):
            titled.append((str(key).replace("_", " ").capitalize(), list(_leaves(value))))
    return [*titled, *([("Run", loose)] if loose else [])]


def _beside(defaults: Mapping[str, float], thresholds: Mapping[str, Any]) -> dict[str, str]:
    """Return each threshold, with its default if that differs."""
    changed = {name: value for name, value in defaults.items() if thresholds.get(name, value) != value}
    default_texts = {name: f" (default {value:g})" for name, value in changed.items()}
    return {name: f"{value:g}{default_texts.get(name, '')}" for name, value in thresholds.items()}


def _is_nested(value: Any) -> bool:
    if isinstance(value, list):
        return any(isinstance(item, Mapping) for item in value)
    return isinstance(value, Mapping) and bool(value)


def _leaves(value: Any, path: str = "") -> Iterable[tuple[str, str]]:
    entries = value.items() if isinstance(value, Mapping) else enumerate(value, start=1)
    for key, item in entries:
        name = f"{path} › {key}" if path else str(key)
        if _is_nested(item):
            yield from _leaves(item, name)
        else:
            yield name, plain(item)


def plain(value: Any) -> str:
    """Format any value of the manifest."""
    match value:
        case None:
            return MISSING
        case bool():
            return "yes" if value else "no"
        case int():
            return minus_sign(f"{value:,}")
        case float():
            return format_number(value)
        case dict() if not value:
            return MISSING
        case list() | tuple():
            return ", ".join(plain(item) for item in value) or MISSING
        case _:
            return str(value)


WIDTH = 160  # of the drawing of the intervals
LINE = 12  # height of one interval in it


@dataclass(frozen=True)
class SideScore:
    """One side at one task and length, in words. Numbers of `drawn` are pixels: left end, mean, right end."""

    score: str
    interval: str
    drawn: tuple[float, float, float]
    change: str = ""
    verdict: str = ""


@dataclass(frozen=True)
class ScoreRow:
    task: str
    length: int | None
    documents: int
    better: str  # higher or lower
    cells: tuple[SideScore | None, ...]  # one per side; None where it was not evaluated


@dataclass(frozen=True)
class ScoreTable:
    """Scores of an evaluated model. sides: the model as loaded, then with other normalizers."""

    model: str
    sides: tuple[str, ...]
    rows: tuple[ScoreRow, ...]
    command: str = ""
    note: str = ""


class Evaluated(Protocol):
    """What the report needs of an evaluation. The package `evaluation` imports the report, so it cannot be imported."""

    def score_table(self) -> ScoreTable: ...
