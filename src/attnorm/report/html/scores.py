"""Scores of `attnorm evaluate` as the report shows them: a line per task and length, the sides next to each other."""

from dataclasses import dataclass
from typing import Protocol

WIDTH = 160  # of the drawing of the intervals
LINE = 12  # height of one interval in it


@dataclass(frozen=True)
class SideScore:
    """One side at one task and length, in words. Numbers of `drawn` are pixels: left end, mean, right end."""

    score: str
    interval: str
    drawn: tuple[float, float, float]
    change: str = ""
    verdict: str = ""


@dataclass(frozen=True)
class ScoreRow:
    task: str
    length: int | None
    documents: int
    better: str  # higher or lower
    cells: tuple[SideScore | None, ...]  # one per side; None where it was not evaluated


@dataclass(frozen=True)
class ScoreTable:
    """Scores of an evaluated model. sides: the model as loaded, then with other normalizers."""

    model: str
    sides: tuple[str, ...]
    rows: tuple[ScoreRow, ...]
    command: str = ""


class Evaluated(Protocol):
    """What the report needs of an evaluation. The package `evaluation` imports the report, so it cannot be imported."""

    def score_table(self) -> ScoreTable: ...
