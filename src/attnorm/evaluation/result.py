"""The result of an evaluation: scores per document, intervals, paired changes, and its HTML page."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from scipy.stats import binomtest, ttest_1samp

from attnorm.analysis.settings import start_note
from attnorm.arithmetic import Interval, holm, student_interval, wilson_interval
from attnorm.files import write_text
from attnorm.report.page_text import WIDTH as PANEL_WIDTH
from attnorm.report.page_text import ScoreRow, ScoreTable, SideScore
from attnorm.run_folder import read_record
from attnorm.text import render_page

SIGNIFICANT = 0.05
WIDTH = 110
RECORD = "evaluation.json"
PARTS = "parts"
PAGE = "evaluation.html"
AS_LOADED = "model"  # the side without a swap, as in attnorm analyze


@dataclass(frozen=True)
class Scores:
    """One number per document, and a hash that names the document."""

    metric: str
    better: Literal["higher", "lower"]
    values: list[float]
    documents: list[str]

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Paired:
    """The mean change over the documents that two sides share."""

    documents: int
    mean: float
    interval: Interval | None
    p: float | None  # two-sided; None for fewer than two documents


@dataclass(frozen=True)
class EvaluationRow:
    """One line of the table."""

    task: str
    length: int | None
    side: str
    metric: str
    better: str
    documents: int
    mean: float
    interval: Interval | None
    change: Paired | None  # from the first side; None for that side, and where no document is shared
    p_holm: float | None  # the p-value of the change, corrected for all changes of the table

    @property
    def verdict(self) -> str:
        if self.change is None or self.p_holm is None:
            return ""
        if self.p_holm >= SIGNIFICANT:
            return "no difference shown"
        return "better" if (self.change.mean > 0) == (self.better == "higher") else "worse"

    @property
    def perplexity(self) -> float | None:
        return math.exp(min(self.mean, 700.0)) if self.metric == "nats per token" else None

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict, "perplexity": self.perplexity}


def mean_interval(values: Sequence[float]) -> Interval | None:
    """95 % interval of the mean: Wilson for right or wrong, else Student's t; None for a single document."""
    if _is_binary(values):
        return wilson_interval(float(np.mean(values)), len(values))
    return student_interval(values) if len(values) > 1 else None


def paired(before: Scores, after: Scores) -> Paired | None:
    """The change from `before` to `after` on shared documents; None where they share none."""
    first = dict(zip(before.documents, before.values, strict=True))
    pairs = [(first[name], value) for name, value in zip(after.documents, after.values, strict=True) if name in first]
    if not pairs:
        return None
    old, new = np.array(pairs).T
    change = new - old
    binary = _is_binary(old) and _is_binary(new)
    interval = _newcombe_interval(old, new) if binary else student_interval(change) if len(change) > 1 else None
    return Paired(len(pairs), float(change.mean()), interval, _p_value(change, binary=binary))


def _is_binary(values: Any) -> bool:
    return set(np.unique(values)) <= {0.0, 1.0}


def _newcombe_interval(old: Any, new: Any) -> Interval:
    """Difference of paired shares from Wilson's intervals and their correlation (Newcombe 1998, method 10)."""
    n, p1, p2 = len(old), float(old.mean()), float(new.mean())
    (low1, high1), (low2, high2) = (wilson_interval(p, n) for p in (p1, p2))
    spread = float(np.sqrt(p1 * (1 - p1) * p2 * (1 - p2)))
    phi = (float((old * new).mean()) - p1 * p2) / spread if spread > 0 else 0.0
    below, above = (
        np.sqrt(max(0.0, a * a - 2 * phi * a * b + b * b))
        for a, b in ((p2 - low2, high1 - p1), (high2 - p2, p1 - low1))
    )
    return p2 - p1 - float(below), p2 - p1 + float(above)


def _p_value(change: Any, *, binary: bool) -> float | None:
    """McNemar's exact test for right or wrong, else Student's t-test of the changes."""
    if len(change) < 2:
        return None
    if not change.any():
        return 1.0
    if binary or np.ptp(change) == 0:  # a constant change has no spread to compare it with: only its sign counts
        return float(binomtest(int((change > 0).sum()), int((change != 0).sum())).pvalue)
    return float(ttest_1samp(change, 0.0).pvalue)


@dataclass(frozen=True)
class EvaluationPart:
    """One side at one task and length."""

    side: str
    task: str
    length: int | None
    scores: Scores
    seconds: float
    train_length: int | None = None  # at which a length rule starts; None: no such rule, or its options state it

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "scores": self.scores.as_dict()}

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> "EvaluationPart":
        return cls(
            saved["side"], saved["task"], saved["length"], Scores(**saved["scores"]), saved["seconds"],
            saved["train_length"],
        )  # fmt: skip


@dataclass(frozen=True)
class Evaluation:
    """Scores of a model as it was loaded and with other normalizers, on the same documents."""

    record: dict[str, Any]
    parts: tuple[EvaluationPart, ...]

    @classmethod
    def load(cls, folder: str | Path) -> "Evaluation":
        """Read a folder that `attnorm evaluate --out` wrote.

        Raises:
            ValueError: It contains no evaluation, or a damaged one.
        """
        folder = Path(folder)
        remedy = "Run attnorm evaluate again."
        record = read_record(folder / RECORD, ("run", "sides", "items"), remedy)
        if record is None:
            raise ValueError(f"expected the folder of an evaluation, got {folder}, which has no {RECORD}. {remedy}")
        parts = []
        for path in sorted((folder / PARTS).glob("*.json")):
            saved = read_record(
                path, ("side", "task", "length", "scores", "seconds", "train_length"),
                "Remove it and run attnorm evaluate again.",
            )  # fmt: skip
            if saved is not None:
                parts.append(EvaluationPart.of(saved))
        return cls(record, tuple(parts))

    @property
    def sides(self) -> list[str]:
        """The sides in their order; changes are measured from the first."""
        measured = {part.side for part in self.parts}
        return [side for side in self.record["sides"] if side in measured]

    @property
    def note(self) -> str:
        """The training lengths at which length rules start, in a sentence; empty without such a rule."""
        started = [(part.side, part.train_length) for part in self.parts if part.train_length is not None]
        names = [side for side in self.sides if side in dict(started)]
        return f"{start_note(names, sorted({length for _, length in started}))}." if started else ""

    @property
    def rows(self) -> list[EvaluationRow]:
        """One row per task, length and side."""
        by_item: dict[tuple[str, int | None], dict[str, Scores]] = {}
        for part in self.parts:
            by_item.setdefault((part.task, part.length), {})[part.side] = part.scores
        order = [tuple(item) for item in self.record["items"]]
        rows = []
        for task, length in sorted(by_item, key=lambda item: order.index(item) if item in order else len(order)):
            by_side = by_item[task, length]
            first = by_side.get(self.sides[0])
            for side in (side for side in self.sides if side in by_side):
                scores = by_side[side]
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
        rows, parts = ([one.as_dict() for one in several] for several in (self.rows, self.parts))
        return {**self.record, "note": self.note, "rows": rows, "parts": parts}

    def score_table(self) -> ScoreTable:
        """The scores as the report shows them: one line per task and length, the sides next to each other."""
        rows = self.rows
        by_item: dict[tuple[str, int | None], dict[str, EvaluationRow]] = {}
        for row in rows:
            by_item.setdefault((row.task, row.length), {})[row.side] = row
        lines = []
        for (task, length), by_side in by_item.items():
            cells = tuple(_cell(by_side[side], rows) if side in by_side else None for side in self.sides)
            most, any_row = max(row.documents for row in by_side.values()), next(iter(by_side.values()))
            lines.append(ScoreRow(task, length, most, any_row.better, cells))
        model = self.record["run"].get("model", "several models")
        return ScoreTable(model, tuple(self.sides), tuple(lines), self.record.get("command", ""), self.note)

    def summary(self) -> str:
        """One line per task, length and side."""
        lines = [
            f"{row.task}{'' if row.length is None else f' at {row.length}'}, {row.side}: {row.mean:.4g} {row.metric}, "
            f"{row.documents} documents{f' ({row.verdict})' if row.verdict else ''}"
            for row in self.rows
        ]
        return "\n".join([*lines, self.note] if self.note else lines)

    def save_html(self, path: str | Path) -> None:
        """Write the table as one HTML file that works offline."""
        write_text(
            Path(path),
            render(
                self.rows,
                self.sides[0] if self.parts else "",
                self._describe_subject(),
                self.record.get("command", ""),
                self.note,
            ),
        )

    def _describe_subject(self) -> str:
        """The model and the documents; empty for several evaluations, whose sides are labeled."""
        run = self.record["run"]
        if "model" not in run:
            return ""
        documents = f"up to {run['limit']} documents per task and length"
        return f"{run['model']}, {run['dtype']}; {documents}; text: {run['text']['name']}"


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


def render(rows: Sequence[EvaluationRow], first: str, about: str, command: str, note: str) -> str:
    """first: the side from which changes are measured. about: the model and the documents."""
    here = Path(__file__).parent
    return render_page(
        here / "page.html.j2",
        style=(here / "page.css").read_text(encoding="utf-8"),
        about=about,
        command=command,
        note=note,
        rows=[{"row": row, "drawn": _interval_pixels(row, _drawn_range(row, rows))} for row in rows],
        first=first,
        width=WIDTH,
        percent=number,
    )


def number(value: float, metric: str) -> str:
    """A score as text: shares in percent."""
    return f"{value:.3f}" if metric == "nats per token" else f"{100 * value:.1f} %"


def _cell(row: EvaluationRow, rows: Sequence[EvaluationRow]) -> SideScore:
    drawn, change = _interval_pixels(row, _drawn_range(row, rows), PANEL_WIDTH), row.change
    moved = "" if change is None else _format_signed(change.mean, row.metric)
    if change is not None and change.interval is not None:
        moved += f" ({' to '.join(_format_signed(end, row.metric) for end in change.interval)})"
    return SideScore(
        number(row.mean, row.metric),
        "" if row.interval is None else " to ".join(number(end, row.metric) for end in row.interval),
        (drawn["left"], drawn["mean"], drawn["right"]), moved, row.verdict,
    )  # fmt: skip


def _format_signed(value: float, metric: str) -> str:
    return ("+" if value > 0 else "") + number(value, metric)


def _drawn_range(row: EvaluationRow, rows: Sequence[EvaluationRow]) -> tuple[float, float]:
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


def _interval_pixels(row: EvaluationRow, ends: tuple[float, float], width: int = WIDTH) -> dict[str, Any]:
    low, high = ends
    left, right = row.interval or (row.mean, row.mean)
    shown = {"left": left, "right": right, "mean": row.mean}
    if high <= low:
        return dict.fromkeys(shown, width / 2)
    return {name: round(4 + (width - 8) * (value - low) / (high - low), 1) for name, value in shown.items()}
