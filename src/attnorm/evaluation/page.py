"""The page of an evaluation: one HTML file with the table and its intervals drawn; it works offline."""

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from attnorm.evaluation.documents import EvaluationRow

WIDTH = 200  # of the drawing of an interval


def render(rows: Sequence[EvaluationRow], first: str, command: str) -> str:
    """first: the side from which changes are measured."""
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    here = Path(__file__).parent
    style = (here / "page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return template.from_string((here / "page.html.j2").read_text(encoding="utf-8")).render(
        policy=f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'",
        style=Markup(style),
        command=command,
        rows=[{"row": row, "drawn": _drawn(row, _range(row, rows))} for row in rows],
        first=first,
        width=WIDTH,
        percent=number,
    )


def number(value: float, metric: str) -> str:
    """A score as text: shares in percent."""
    return f"{value:.3f}" if metric == "nats per token" else f"{100 * value:.1f} %"


def _range(row: EvaluationRow, rows: Sequence[EvaluationRow]) -> tuple[float, float]:
    """Shares are drawn from 0 to 1, other scores over the range of their task and length."""
    if row.metric != "nats per token":
        return 0.0, 1.0
    ends = [
        end
        for other in rows
        if (other.task, other.length) == (row.task, row.length)
        for end in (other.interval or (other.mean, other.mean))
    ]
    return min(ends), max(ends)


def _drawn(row: EvaluationRow, ends: tuple[float, float]) -> dict[str, Any]:
    low, high = ends
    left, right = row.interval or (row.mean, row.mean)
    shown = {"left": left, "right": right, "mean": row.mean}
    if high <= low:
        return dict.fromkeys(shown, WIDTH / 2)
    return {name: round(4 + (WIDTH - 8) * (value - low) / (high - low), 1) for name, value in shown.items()}
