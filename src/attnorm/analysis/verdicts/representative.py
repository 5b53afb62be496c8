"""Which rows stand for a model: one per head, as it runs, at the longest length; and which heads see only a window."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from attnorm.analysis.verdicts.rows import Row
from attnorm.analysis.verdicts.thresholds import DIFFERS, UNDECIDED


def representative(heads: Sequence[Row], normalizer: str | None = None) -> tuple[list[Row], int]:
    """One row per head, each text at its longest length, and how many heads get different verdicts from the texts.

    With several texts a head has a verdict only if more than half of them give it that one, else it is "differs"; or
    "undecided" where no two texts contradict each other. Its numbers are those of the longest text that stands for it.
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
        verdict = over_texts([row["verdict"] for row in rows])
        given = {row["verdict"] for row in rows} - {UNDECIDED}
        changing += len(given) > 1
        agreeing = [row for row in rows if row["verdict"] == verdict] or rows
        row = max(agreeing, key=lambda one: one["n_high"] or 0)
        chosen.append(row if row["verdict"] == verdict else {**row, "verdict": verdict, "evidence": _between(rows)})
    return chosen, changing


def over_texts(verdicts: Sequence[str | None]) -> str | None:
    """What holds over texts: the verdict of more than half of them, else "undecided" or "differs"."""
    most, count = Counter(verdicts).most_common(1)[0]
    if 2 * count > len(verdicts):
        return most
    return DIFFERS if len(set(verdicts) - {UNDECIDED}) > 1 else UNDECIDED


def _between(rows: Sequence[Row]) -> str:
    return "; ".join(f"{row['verdict'] or 'not judged'} on {row['text']!r}" for row in rows) + "."


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
