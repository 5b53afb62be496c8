"""What a change would do to the same logits, and the command that measures it where a run did not."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from attnorm.analysis.default_text import NAMES as DEFAULT_TEXTS
from attnorm.analysis.head_rows import Row, number
from attnorm.analysis.thresholds import Thresholds, thresholds_of

Rows = Sequence[Row]


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """The median over the heads concerned, as the model runs and with the change."""

    change: str  # a normalizer, "top 100 instead of top 20", "T = 0.5"
    quantity: str
    before: float
    after: float
    heads: int


@dataclass(frozen=True, kw_only=True)
class Advice:
    title: str
    text: str
    heads: int  # concerned
    what_if: tuple[WhatIf, ...] = ()
    command: str | None = None  # measures what is missing
    caution: bool = False  # what not to expect, rather than something to try

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def command(manifest: Mapping[str, Any], **changes: str) -> str:
    """The command line that repeats a run with changed options."""
    settings, model = manifest.get("settings", {}), manifest.get("model", {})
    words = ["attnorm", "analyze", str(model.get("source") or model.get("name", "MODEL"))]
    for text in manifest.get("texts", []):
        if text["name"] not in DEFAULT_TEXTS:  # taken where no text is given
            words += ["--text", text["name"]]
    options = {
        "lengths": ",".join(str(length) for length in settings.get("lengths") or [] if length),
        "normalizers": ",".join(settings.get("normalizers") or []),
        "rows": "" if settings.get("rows") in ("all", None) else str(settings["rows"]),
    }
    for name, value in {**options, **changes}.items():
        if value and (name, value) != ("normalizers", "model"):
            words += [f"--{name}", value]
    judged_by = thresholds_of(manifest.get("thresholds", {}))
    for name, (threshold, _) in judged_by.differences(Thresholds()).items():
        words += ["--threshold", f"{name}={threshold:g}"]
    return shlex.join(words)


def medians(change: str, quantity: str, metric: str, pairs: Iterable[tuple[Row, Row]]) -> list[WhatIf]:
    """The metric's median over pairs (as it runs, with the change) in which both are known; empty where none are."""
    both = [(a, b) for x, y in pairs if (a := number(x, metric)) is not None and (b := number(y, metric)) is not None]
    if not both:
        return []
    before, after = (median(values) for values in zip(*both, strict=True))
    return [WhatIf(change=change, quantity=quantity, before=before, after=after, heads=len(both))]


def pairs(before: Rows, after: Rows) -> list[tuple[Row, Row]]:
    """The same head in both."""
    there = {head_of(row): row for row in after}
    return [(row, there[head_of(row)]) for row in before if head_of(row) in there]


def head_of(row: Row) -> tuple[Any, ...]:
    return row["text"], row["length"], row["kind"], row["layer"], row["head"]


def with_verdict(rows: Rows, verdicts: Sequence[str]) -> list[Row]:
    return [row for row in rows if row["verdict"] in verdicts]
