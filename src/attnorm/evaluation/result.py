"""What an evaluation found: scores per side, task and length, their intervals and changes, and its HTML page."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from attnorm.evaluation.documents import EvaluationRow, Scores, mean_interval, paired
from attnorm.experiments.retrieval.lines import holm
from attnorm.files import write_text
from attnorm.run_folder import read_record

WIDTH = 200  # of the drawing of an interval
RECORD = "evaluation.json"
PARTS = "parts"
PAGE = "evaluation.html"
AS_LOADED = "model"  # the side without a swap, as in attnorm analyze


@dataclass(frozen=True)
class EvaluationPart:
    """One side at one task and length."""

    side: str
    task: str
    length: int | None
    scores: Scores
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "scores": self.scores.as_dict()}

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> "EvaluationPart":
        return cls(saved["side"], saved["task"], saved["length"], Scores(**saved["scores"]), saved["seconds"])


@dataclass(frozen=True)
class Evaluation:
    """Scores of a model as it was loaded and with other normalizers, on the same documents."""

    record: dict[str, Any]
    parts: tuple[EvaluationPart, ...]

    @classmethod
    def load(cls, folder: str | Path) -> "Evaluation":
        """Read a folder that `attnorm evaluate --out` wrote.

        Raises:
            ValueError: It holds no evaluation, or a damaged one.
        """
        folder = Path(folder)
        remedy = "run attnorm evaluate again"
        record = read_record(folder / RECORD, ("run", "sides", "items"), remedy)
        if record is None:
            raise ValueError(f"expected the folder of an evaluation, got {folder} without {RECORD}; {remedy}")
        found = []
        for path in sorted((folder / PARTS).glob("*.json")):
            saved = read_record(path, ("side", "task", "length", "scores", "seconds"), f"remove it and {remedy}")
            if saved is not None:
                found.append(EvaluationPart.of(saved))
        return cls(record, tuple(found))

    @property
    def sides(self) -> list[str]:
        """The sides in their order; changes are measured from the first."""
        measured = {part.side for part in self.parts}
        return [side for side in self.record["sides"] if side in measured]

    @property
    def rows(self) -> list[EvaluationRow]:
        """One row per task, length and side."""
        by_item: dict[tuple[str, int | None], dict[str, Scores]] = {}
        for part in self.parts:
            by_item.setdefault((part.task, part.length), {})[part.side] = part.scores
        order = [tuple(item) for item in self.record["items"]]
        rows = []
        for task, length in sorted(by_item, key=lambda item: order.index(item) if item in order else len(order)):
            found = by_item[task, length]
            first = found.get(self.sides[0])
            for side in (side for side in self.sides if side in found):
                scores = found[side]
                change = None if first is None or side == self.sides[0] else paired(first, scores)
                rows.append(
                    EvaluationRow(
                        task, length, side, scores.metric, scores.better, len(scores.values),
                        float(np.mean(scores.values)), mean_interval(scores.values), change, None,
                    )
                )  # fmt: skip
        raw = [row.change.p for row in rows if row.change is not None and row.change.p is not None]
        corrected = iter(holm(raw))
        return [
            replace(row, p_holm=next(corrected)) if row.change is not None and row.change.p is not None else row
            for row in rows
        ]

    def as_dict(self) -> dict[str, Any]:
        return {**self.record, "rows": [row.as_dict() for row in self.rows]}

    def summary(self) -> str:
        """One line per task, length and side."""
        return "\n".join(
            f"{row.task}{'' if row.length is None else f' at {row.length}'}, {row.side}: {row.mean:.4g} {row.metric}, "
            f"{row.documents} documents{f' ({row.verdict})' if row.verdict else ''}"
            for row in self.rows
        )

    def save_html(self, path: str | Path) -> None:
        """Write the table as one HTML file that works offline."""
        write_text(Path(path), render(self.rows, self.sides[0] if self.parts else "", self.record.get("command", "")))


def side_by_side(evaluations: Mapping[str, Evaluation]) -> Evaluation:
    """Several evaluations as one: the sides carry the labels, and changes are measured from the first.

    Documents are matched by their content, so folders with other documents have no change.
    """
    if len(evaluations) == 1:
        return next(iter(evaluations.values()))
    parts = [
        replace(part, side=f"{label}: {part.side}") for label, run in evaluations.items() for part in run.parts
    ]  # fmt: skip
    sides = [f"{label}: {side}" for label, run in evaluations.items() for side in run.sides]
    items: Sequence[Any] = [item for run in evaluations.values() for item in run.record["items"]]
    unique = [list(item) for item in dict.fromkeys(map(tuple, items))]
    runs = {label: run.record["run"] for label, run in evaluations.items()}
    return Evaluation({"run": runs, "sides": sides, "items": unique}, tuple(parts))


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
