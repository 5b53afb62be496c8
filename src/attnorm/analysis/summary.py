"""The summary of an analysis: plain text, and a small HTML table for notebooks."""

import html
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from attnorm.analysis.verdicts import VERDICTS, ModelVerdict, representative
from attnorm.analysis.verdicts.rows import Row, head_rows
from attnorm.safe_text import visible, visible_lines

_WORST = 8
_SHOWN = ("kind", "layer", "head", "verdict", "evidence")


def text_summary(heads: pa.Table, manifest: Mapping[str, Any], verdict: ModelVerdict) -> str:
    lines = [verdict.headline, "", *_about(heads, manifest), "", _counts(verdict)]
    lines += ["", *(f"- {sentence}" for sentence in verdict.sentences)] if verdict.sentences else []
    for title, cautions in (("What to try:", False), ("What not to expect:", True)):
        given = [f"- {advice.text}" for advice in verdict.advice if advice.caution == cautions]
        lines += ["", title, *given] if given else []
    lines += ["", *(f"Note: {note}" for note in manifest["notes"])] if manifest["notes"] else []
    return visible_lines("\n".join(lines))


def notebook_summary(heads: pa.Table, manifest: Mapping[str, Any], verdict: ModelVerdict) -> str:
    """Return HTML without scripts and styles; names are escaped and hidden characters spelled out."""
    head = "".join(f"<th>{_escaped(name)}</th>" for name in _SHOWN)
    rows = "".join(
        "<tr>" + "".join(f"<td>{_escaped(str(row[name]))}</td>" for name in _SHOWN) + "</tr>" for row in _worst(heads)
    )
    about = "<br>".join(_escaped(line) for line in [*_about(heads, manifest), _counts(verdict), *manifest["notes"]])
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>" if rows else ""
    return f"<div><p><b>{_escaped(verdict.headline)}</b></p><p>{about}</p>{table}</div>"


def measured_on(heads: pa.Table, manifest: Mapping[str, Any]) -> str:
    """Return the number of windows and their lengths: "8 windows of 1,024 tokens"."""
    most = max((text.get("windows") or 1 for text in manifest["texts"]), default=1)
    lengths = _listed([f"{length:,}" for length in sorted(set(heads["length"].to_pylist()))])
    return f"{f'{most} windows of ' if most > 1 else ''}{lengths} tokens"


def _escaped(value: Any) -> str:
    return html.escape(visible(str(value)))


def _about(heads: pa.Table, manifest: Mapping[str, Any]) -> list[str]:
    model, settings = manifest["model"], manifest["settings"]
    revision = f" at {model['revision'][:12]}" if model.get("revision") else ""
    texts = _listed([text["name"] for text in manifest["texts"]])
    measured = f"{texts}; {measured_on(heads, manifest)}; {_listed(settings['normalizers'])}"
    rows = settings["rows"] or "different between runs"  # None: merged
    return [
        f"Model: {model['name']}{revision}, {model.get('dtype')}, on {model.get('device')}",
        f"Measured: {measured}; rows: {rows}",
    ]


def _counts(verdict: ModelVerdict) -> str:
    return "Heads: " + ", ".join(f"{number} {name}" for name, number in verdict.counts.items() if number)


def _worst(heads: pa.Table) -> list[Row]:
    """Return heads that are not healthy, of those that the headline counts."""
    rows, _ = representative(head_rows(heads))
    unhealthy = [row for row in rows if row["verdict"] not in ("healthy", None)]
    return sorted(unhealthy, key=lambda row: VERDICTS.index(row["verdict"]))[:_WORST]


def _listed(values: list[Any], limit: int = 6) -> str:
    shown = ", ".join(str(value) for value in values[:limit])
    return shown if len(values) <= limit else f"{shown} and {len(values) - limit} more"
