"""What a change would do to the same logits, and the command that measures it where a run did not."""

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from attnorm.analysis.default_text import NAMES as DEFAULT_TEXTS
from attnorm.analysis.settings import BUDGET, USUAL_GROUPS, groups
from attnorm.analysis.verdicts.rows import Row, number
from attnorm.analysis.verdicts.thresholds import Thresholds, thresholds_of
from attnorm.normalizers.registry import available

Rows = Sequence[Row]

# What analyze does where nothing else is asked for.
USUAL: dict[str, Any] = {
    "normalizers": ["model"],
    "rows": "auto",
    "metrics": [*groups(USUAL_GROUPS)],
    "top_n": [1, 5, 10, 20, 100],
    "vectors": "values",
    "seed": 0,
    "windows": "auto",
    "budget": BUDGET,
}


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


def command(manifest: Mapping[str, Any], **changes: Any) -> str:
    """What repeats a run with changed options of analyze: a line to type, or a call where Python objects were given."""
    settings, model = manifest.get("settings", {}), manifest.get("model", {})
    texts = [text for text in manifest.get("texts", []) if text["name"] not in DEFAULT_TEXTS]
    names = changes.get("normalizers") or settings.get("normalizers") or []
    typed = model.get("source", "") is not None and all(text.get("file", True) for text in texts)
    if not typed or not {*names} <= {"model", *available()}:
        return f"attnorm.analyze(..., {', '.join(f'{name}={value!r}' for name, value in changes.items())})"
    words = ["attnorm", "analyze", str(model.get("source") or model.get("name", "MODEL"))]
    for text in texts:
        words += ["--text", text["name"]]
    on_cpu = model.get("device", "cpu") == "cpu"
    options = {
        "lengths": [length for length in settings.get("lengths") or [] if length],
        **{name: settings.get(name) for name in USUAL},
        "tokenizer": model.get("tokenizer"),
        "dtype": None if on_cpu and model.get("dtype") == "float32" else model.get("dtype"),
    }
    changed = {name: value for name, value in options.items() if value and value != USUAL.get(name)}
    for name, value in {**changed, **changes}.items():
        words += [f"--{name.replace('_', '-')}", ",".join(map(str, value)) if isinstance(value, list) else str(value)]
    if settings.get("bos") is not None:
        words += ["--bos" if settings["bos"] else "--no-bos"]
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
