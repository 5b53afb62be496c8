"""Where every registered normalizer lies on the frontier of weight against gradient, or why it is not on it.

Each is run on rows with one leader to find the gap g that keeps a weight. K is the Lipschitz constant that the
normalizer declares; where it declares none, the largest Jacobian norm found (theory.frontier.measured_lipschitz), so
that its effort K g is a lower bound and the point is marked as measured.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from attnorm.engines.threads import one_thread
from attnorm.normalizers.contract import Mechanism, Normalizer
from attnorm.normalizers.hard import Hard
from attnorm.normalizers.registry import available, get
from attnorm.normalizers.topk import TopK
from attnorm.theory.frontier import (
    FrontierContender,
    FrontierPoint,
    frontier,
    frontier_effort,
    gap_to_keep,
    measured_lipschitz,
)

LENGTHS = (16, 64, 256, 1024, 4096, 32_768, 1_000_000)
WEIGHTS = (0.5, 0.9)
LONGEST_MEASURED = 4096  # keys up to which a Lipschitz constant is measured in seconds


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """Points of every normalizer that the law is about, by length and weight, and why the others have none."""

    lengths: tuple[int, ...]
    weights: tuple[float, ...]
    points: tuple[FrontierPoint, ...]
    measured: frozenset[str] = frozenset()  # names whose K is measured, not declared: their effort is at least this
    absent: dict[str, str]  # name -> why the law does not apply to it

    @property
    def names(self) -> list[str]:
        """From the least to the most effort at the longest row that was run and the largest weight."""
        last = {point.name: point.effort for point in self.points if point.weight == self.weights[-1]}
        return sorted(last, key=lambda name: last[name])

    def efforts(self, name: str, weight: float) -> list[float]:
        """One for each length; NaN beyond the longest at which K could be measured."""
        found = {point.n: point.effort for point in self.points if point.name == name and point.weight == weight}
        return [found.get(n, math.nan) for n in self.lengths]

    def least(self, weight: float) -> list[float]:
        return [frontier_effort(n, weight) for n in self.lengths]

    def as_dict(self) -> dict[str, Any]:
        law = [
            {"n": n, "weight": weight, "effort": frontier_effort(n, weight)}
            for weight in self.weights
            for n in self.lengths
        ]
        points = [{**asdict(point), "constant_measured": point.name in self.measured} for point in self.points]
        return {"law": law, "points": points, "absent": self.absent}


def outside_the_law(normalizer: Normalizer | Mechanism) -> str | None:
    """Why the law of docs/theory/frontier.md does not apply; None if it does."""
    if not isinstance(normalizer, Normalizer):
        return "not a map of a row of logits to weights"
    promised = normalizer.properties
    reasons = []
    if promised.row_sum != "one":
        reasons.append("rows sum to at most 1" if promised.row_sum == "at most one" else "rows may have any sum")
    if not promised.shift_invariant:
        reasons.append("not shift invariant")
    if not promised.permutation_equivariant:
        reasons.append("depends on the order of the keys")
    if isinstance(normalizer.map, Hard) or any(isinstance(selection, TopK) for selection in normalizer.selections):
        reasons.append("it jumps where keys change order, so no Lipschitz constant is finite")
    return "; ".join(reasons) or None


def place_on_frontier(
    lengths: Sequence[int] | None = None,
    weights: Sequence[float] = WEIGHTS,
    progress: Callable[[str], None] = lambda name: None,
) -> Frontier:
    """Every registered normalizer at its defaults; `progress` hears the name of each in turn."""
    lengths = LENGTHS if lengths is None else lengths
    points: list[FrontierPoint] = []
    measured: set[str] = set()
    absent: dict[str, str] = {}
    with one_thread():
        for name, normalizer in _registered():
            reason = outside_the_law(normalizer)
            if reason is not None:
                absent[name] = reason
                continue
            assert isinstance(normalizer, Normalizer)
            progress(name)
            declared = normalizer.lipschitz(max(lengths)) is not None
            found = frontier(
                [_contender(normalizer)], [n for n in lengths if declared or n <= LONGEST_MEASURED], weights
            )
            missed = next((point for point in found if math.isinf(point.gap)), None)
            if missed is not None:
                absent[name] = f"gives a leader among {missed.n} keys less than {missed.weight:g} at any gap"
                continue
            points += found
            if not declared:
                measured.add(name)
    return Frontier(
        lengths=tuple(lengths),
        weights=tuple(weights),
        points=tuple(points),
        measured=frozenset(measured),
        absent=absent,
    )


def _registered() -> Iterator[tuple[str, Normalizer | Mechanism]]:
    for name in available():
        normalizer = get(name)
        yield name, normalizer.double() if isinstance(normalizer, Normalizer) else normalizer


def _contender(normalizer: Normalizer) -> FrontierContender:
    """The normalizer as it runs. The gap is looked for near that of the length before, and K found once a length."""
    gaps: dict[float, float] = {}
    constants: dict[int, float] = {}

    def gap(weight: float, n: int) -> float:
        found = gap_to_keep(normalizer, weight, n, near=1.2 * gaps.get(weight, 1.0))
        if 0 < found < math.inf:
            gaps[weight] = found
        return found

    def constant(n: int) -> float:
        if n not in constants:
            declared = normalizer.lipschitz(n)
            constants[n] = measured_lipschitz(normalizer, n) if declared is None else declared
        return constants[n]

    return FrontierContender(normalizer.name, gap, constant)
