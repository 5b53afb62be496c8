"""The verdict and its evidence in a few lines: plain text, or HTML for a notebook."""

import html
from typing import Any

from attnorm.report_data import VERDICTS, ReportData, Row
from attnorm.text import visible, visible_lines

_WORST = 8
_LISTED = 6  # values of a list in a sentence
_SHOWN = ("kind", "layer", "head", "verdict", "evidence")


def text_summary(data: ReportData) -> str:
    notes = data.manifest["notes"]
    lines = [data.headline, "", *_describe_run(data), "", _counts(data)]
    lines += ["", *(f"- {sentence}" for sentence in data.sentences)] if data.sentences else []
    for title, cautions in (("What to try:", False), ("What does not help:", True)):
        items = [f"- {advice.heading}. {advice.text}" for advice in data.advice if advice.caution == cautions]
        lines += ["", title, *items] if items else []
    lines += ["", *(f"Note: {note}" for note in notes)] if notes else []
    return visible_lines("\n".join(lines))


def notebook_summary(data: ReportData) -> str:
    """Return HTML without scripts and styles; names are escaped and hidden characters spelled out."""
    head = "".join(f"<th>{_escape_html(name)}</th>" for name in _SHOWN)
    rows = "".join(
        "<tr>" + "".join(f"<td>{_escape_html(str(row[name]))}</td>" for name in _SHOWN) + "</tr>"
        for row in _worst(data)
    )
    about = "<br>".join(_escape_html(line) for line in [*_describe_run(data), _counts(data), *data.manifest["notes"]])
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>" if rows else ""
    return f"<div><p><b>{_escape_html(data.headline)}</b></p><p>{about}</p>{table}</div>"


def measured_on(data: ReportData) -> str:
    """Return the number of windows and their lengths: "8 windows of 1,024 tokens"."""
    most = max((text.get("windows") or 1 for text in data.manifest["texts"]), default=1)
    lengths = _list_values([f"{length:,}" for length in sorted(set(data.tables["heads"]["length"].to_pylist()))])
    return f"{f'{most} windows of ' if most > 1 else ''}{lengths} tokens"


def _escape_html(value: Any) -> str:
    return html.escape(visible(str(value)))


def _describe_run(data: ReportData) -> list[str]:
    manifest = data.manifest
    model, settings = manifest["model"], manifest["settings"]
    revision = f" at {model['revision'][:12]}" if model.get("revision") else ""
    texts = _list_values([text["name"] for text in manifest["texts"]])
    measured = f"{texts}; {measured_on(data)}; normalizers: {_list_values(settings['normalizers'])}"
    rows = settings["rows"] or "different between runs"  # None: merged
    return [
        f"Model: {model['name']}{revision}, {model.get('dtype')}, on {model.get('device')}",
        f"Measured: {measured}; rows: {rows}",
    ]


def _counts(data: ReportData) -> str:
    return "Heads: " + ", ".join(f"{number} {name}" for name, number in data.counts.items() if number)


def _worst(data: ReportData) -> list[Row]:
    """Return heads that are not healthy, of those that the headline counts."""
    unhealthy = [row for row in data.rows if row["verdict"] not in ("healthy", None)]
    return sorted(unhealthy, key=lambda row: VERDICTS.index(row["verdict"]))[:_WORST]


def _list_values(values: list[Any]) -> str:
    shown = ", ".join(str(value) for value in values[:_LISTED])
    return shown if len(values) <= _LISTED else f"{shown} and {len(values) - _LISTED} more"
