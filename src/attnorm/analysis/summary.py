"""An analysis in a few lines: plain text, and the small table that a notebook shows."""

import html
from typing import Any

from attnorm.analysis.result import Analysis
from attnorm.analysis.verdicts import VERDICTS, representative
from attnorm.analysis.verdicts.rows import Row, head_rows
from attnorm.analysis.visible import visible, visible_lines

_WORST = 8
_SHOWN = ("kind", "layer", "head", "verdict", "evidence")


def summary(analysis: Analysis) -> str:
    verdict = analysis.verdict
    lines = [verdict.headline, "", *_about(analysis), "", _counts(analysis)]
    lines += ["", *(f"- {sentence}" for sentence in verdict.sentences)] if verdict.sentences else []
    for title, cautions in (("What to try:", False), ("What not to expect:", True)):
        given = [f"- {advice.text}" for advice in verdict.advice if advice.caution == cautions]
        lines += ["", title, *given] if given else []
    lines += ["", *(f"Note: {note}" for note in analysis.manifest["notes"])] if analysis.manifest["notes"] else []
    return visible_lines("\n".join(lines))


def notebook(analysis: Analysis) -> str:
    """HTML without scripts or styles of its own; every name in it is escaped, and hidden characters are spelled out."""
    verdict = analysis.verdict
    head = "".join(f"<th>{_escaped(name)}</th>" for name in _SHOWN)
    rows = "".join(
        "<tr>" + "".join(f"<td>{_escaped(str(row[name]))}</td>" for name in _SHOWN) + "</tr>"
        for row in _worst(analysis)
    )
    about = "<br>".join(_escaped(line) for line in [*_about(analysis), _counts(analysis), *analysis.manifest["notes"]])
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>" if rows else ""
    return f"<div><p><b>{_escaped(verdict.headline)}</b></p><p>{about}</p>{table}</div>"


def _escaped(value: Any) -> str:
    return html.escape(visible(str(value)))


def _about(analysis: Analysis) -> list[str]:
    model, settings = analysis.manifest["model"], analysis.manifest["settings"]
    revision = f" at {model['revision'][:12]}" if model.get("revision") else ""
    lengths = sorted(set(analysis.heads["length"].to_pylist()))
    texts = [text["name"] for text in analysis.manifest["texts"]]
    most = max((text.get("windows") or 1 for text in analysis.manifest["texts"]), default=1)
    windows = f"{most} windows of " if most > 1 else ""
    measured = f"{_listed(texts)}; {windows}{_listed(lengths)} tokens; {_listed(settings['normalizers'])}"
    rows = settings["rows"] or "different from run to run"  # None: merged
    return [
        f"Model: {model['name']}{revision}, {model.get('dtype')}, on {model.get('device')}",
        f"Measured: {measured}; rows: {rows}",
    ]


def _counts(analysis: Analysis) -> str:
    return "Heads: " + ", ".join(f"{number} {name}" for name, number in analysis.verdict.counts.items() if number)


def _worst(analysis: Analysis) -> list[Row]:
    """Heads that are not healthy, of those that the headline counts."""
    heads, _ = representative(head_rows(analysis.heads))
    unwell = [row for row in heads if row["verdict"] not in ("healthy", None)]
    return sorted(unwell, key=lambda row: VERDICTS.index(row["verdict"]))[:_WORST]


def _listed(values: list[Any], limit: int = 6) -> str:
    shown = ", ".join(str(value) for value in values[:limit])
    return shown if len(values) <= limit else f"{shown} and {len(values) - limit} more"
