"""Which rows stand for a model: one per head, as it runs, at the longest length; and which heads see only a window."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from attnorm.analysis.verdicts.rows import Row
from attnorm.analysis.verdicts.thresholds import VERDICTS


def representative(heads: Sequence[Row], normalizer: str | None = None) -> tuple[list[Row], int]:
    """One row per head, each text at its longest length, and how many heads the texts disagree on.

    With several texts a head has the verdict that most of them give it, the worse one if two are as frequent, and the
    numbers of the longest of those texts.
    normalizer None: the model as it runs, or the first measured where it was not.
    """
    if not heads:
        return [], 0
    names = [row["normalizer"] for row in heads]
    measured = normalizer or ("model" if "model" in names else names[0])
    longest: dict[str, int] = {}
    for row in heads:
        longest[row["text"]] = max(longest.get(row["text"], 0), row["length"] or 0)
    by_head: dict[tuple[Any, ...], list[Row]] = {}
    for row in heads:
        if row["normalizer"] == measured and (row["length"] or 0) == longest[row["text"]]:
            by_head.setdefault(place(row), []).append(row)
    chosen, changing = [], 0
    for rows in by_head.values():
        verdicts = Counter(row["verdict"] for row in rows)
        changing += len(verdicts) > 1
        most = max(verdicts, key=lambda name: (verdicts[name], -_rank(name)))
        chosen.append(max((row for row in rows if row["verdict"] == most), key=lambda row: row["n_high"] or 0))
    return chosen, changing


def by_view(chosen: Sequence[Row], heads: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """The chosen heads that see as many keys as any of their kind on the same text, and those behind a window.

    What a head does among 512 keys says nothing about 8,192, and no longer text takes it beyond its horizon.
    """
    longest: dict[tuple[Any, ...], int] = {}
    for row in heads:
        longest[_pass(row)] = max(longest.get(_pass(row), 0), row["n_high"] or 0)
    seeing_all: list[Row] = []
    windowed: list[Row] = []
    for row in chosen:
        behind = row["n_high"] is not None and row["n_high"] < longest[_pass(row)]
        (windowed if behind else seeing_all).append(row)
    return seeing_all, windowed


def place(row: Row) -> tuple[str, int, int]:
    return row["kind"], row["layer"], row["head"]


def _pass(row: Row) -> tuple[Any, ...]:
    return row["text"], row["length"], row["kind"]


def _rank(verdict: str | None) -> int:
    return len(VERDICTS) if verdict is None else VERDICTS.index(verdict)
