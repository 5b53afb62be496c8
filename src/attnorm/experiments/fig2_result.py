"""What Figure 2 is drawn and judged from."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from attnorm.experiments.fig2_measure import Distances, Point
from attnorm.theory.distance import PowerLaw

# What the test compares with the measured distance, or, for NORMS, with ||s||.
PRINTED, UPPER, LOWER = "printed", "corrected, upper end", "corrected, lower end"
NORMS = "||s|| against ||x_bar||"


@dataclass(frozen=True)
class Critical:
    """At one length: the smallest N at which the test accepts, and the largest."""

    length: int
    top_n: float  # NaN where it never accepts
    interval: tuple[float, float]  # of resampled heads
    last_accepted: int

    @property
    def share(self) -> float:
        return self.top_n / self.length


@dataclass(frozen=True)
class Comparison:
    """One pair of numbers per head that the test compares, at every length."""

    name: str
    critical: tuple[Critical, ...]
    law: PowerLaw | None

    def at(self, length: int) -> Critical:
        return next(one for one in self.critical if one.length == length)

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "compared": self.name, "length": one.length, "critical_n": one.top_n, "share": one.share,
                "low": one.interval[0], "high": one.interval[1], "last_accepted": one.last_accepted,
                "exponent": self.law.exponent if self.law else math.nan,
                "exponent_low": self.law.exponent_interval[0] if self.law else math.nan,
                "exponent_high": self.law.exponent_interval[1] if self.law else math.nan,
            }
            for one in self.critical
        ]  # fmt: skip


@dataclass(frozen=True)
class Result:
    """Everything that was measured."""

    distances: tuple[Distances, ...]  # by length
    at_panel: Distances  # at the length of panel (b)
    permuted: Distances  # there, with the weights dealt out at random
    by_length: tuple[Point, ...]  # panel (a)
    by_n: tuple[Point, ...]  # panel (b)
    comparisons: Mapping[str, Comparison]
    permuted_critical: Mapping[str, float]
    fewer_heads: Sequence[Mapping[str, Any]]
    choices: Sequence[Mapping[str, Any]]

    @property
    def length(self) -> int:
        return self.at_panel.length

    def critical(self, name: str) -> Critical:
        """At the length of panel (b)."""
        return self.comparisons[name].at(self.length)
