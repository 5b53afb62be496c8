"""Selectivity against gradient: the largest weight on one token that a map with Lipschitz constant K can keep.

Law. A shift-invariant, permutation-equivariant map with row sum 1 and Lipschitz constant K gives a token whose logit is
g above n-1 otherwise equal ones the weight

    w <= 1/n + K g (n-1)/n,        so keeping w at n keys needs an effort K g >= (n w - 1)/(n - 1).

Sparsemax attains it. A temperature scales g and 1/K alike, so the effort K g compares maps at equal selectivity and not
at equal temperature. Proof: docs/theory/frontier.md.

Every registered normalizer is run on rows with one leader to find the gap g that keeps a weight. K is the Lipschitz
constant that it declares; where it declares none, the largest Jacobian norm found (`measured_lipschitz`), so that its
effort K g is a lower bound and the point is marked as measured.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from scipy.optimize import brentq
from torch import Tensor

from attnorm.engines.execution import one_thread
from attnorm.normalizers.contract import Mechanism, Normalizer
from attnorm.normalizers.registry import available, get
from attnorm.normalizers.topk import Hard, TopK
from attnorm.theory.gradient import RowMap, power_iteration_norm

# (weight w, keys n) -> the gap g at which the map gives the leading token exactly w
GapForWeight = Callable[[float, int], float]
# keys n -> Lipschitz constant of the map
Lipschitz = Callable[[int], float]
LENGTHS = (16, 64, 256, 1024, 4096, 32_768, 1_000_000)
WEIGHTS = (0.5, 0.9)
LONGEST_MEASURED = 4096  # keys up to which a Lipschitz constant is measured in seconds


@dataclass(frozen=True)
class FrontierContender:
    """A map on the frontier: the gap it needs for a weight, and how fast it may move."""

    name: str
    gap: GapForWeight
    lipschitz: Lipschitz


@dataclass(frozen=True)
class FrontierPoint:
    """The cost for a map to keep `weight` on the largest of n keys."""

    name: str
    n: int
    weight: float
    gap: float
    lipschitz: float
    effort: float  # lipschitz * gap
    least_effort: float  # by the law
    excess: float  # effort / least_effort, 1 on the frontier


def frontier_weight(n: int, effort: float) -> float:
    """Return the largest weight that any such map can give at effort K g: min(1, 1/n + K g (n-1)/n)."""
    _check_keys(n)
    if not effort >= 0:
        raise ValueError(f"the effort K g must not be negative, got {effort}")
    return min(1.0, 1 / n + effort * (n - 1) / n)


def frontier_effort(n: int, weight: float) -> float:
    """Return the smallest effort K g with which any such map can keep this weight at n keys: (n w - 1)/(n - 1)."""
    _check(n, weight)
    return (n * weight - 1) / (n - 1)


def frontier(
    contenders: Iterable[FrontierContender], lengths: Iterable[int], weights: Iterable[float]
) -> list[FrontierPoint]:
    """Return one point per contender, length and weight, in that order."""
    lengths, weights = list(lengths), list(weights)
    return [_point(contender, n, weight) for contender in contenders for n in lengths for weight in weights]


def _point(contender: FrontierContender, n: int, weight: float) -> FrontierPoint:
    least = frontier_effort(n, weight)
    gap, constant = contender.gap(weight, n), contender.lipschitz(n)
    effort = gap * constant
    return FrontierPoint(contender.name, n, weight, gap, constant, effort, least, effort / least if least else 1.0)


def softmax_gap(weight: float, n: int) -> float:
    """Return the gap that softmax needs, logit(w) + log(n-1): it grows with log n; infinite for w = 1."""
    _check(n, weight)
    return math.inf if weight == 1 else math.log(weight / (1 - weight)) + math.log(n - 1)


def threshold_gap(inverse: Callable[[float], float], weight: float, n: int) -> float:
    """Return the gap that a map p_j = phi(z_j - tau) needs: phi^-1(w) - phi^-1((1-w)/(n-1))."""
    _check(n, weight)
    return inverse(weight) - inverse((1 - weight) / (n - 1))


def entmax_gap(weight: float, n: int, alpha: float) -> float:
    """(w^(alpha-1) - ((1-w)/(n-1))^(alpha-1)) / (alpha-1); softmax_gap at alpha = 1."""
    if alpha == 1:
        return softmax_gap(weight, n)
    return threshold_gap(lambda p: p ** (alpha - 1) / (alpha - 1), weight, n)


def kneemax_gap(weight: float, n: int, share: float = 1.0) -> float:
    """The gap kneemax needs at T = 1: phi^-1(p) = p + k above its knee k = share/n, 2 sqrt(k p) below, for z/2."""
    knee = share / n
    return 2 * threshold_gap(lambda p: p + knee if p >= knee else 2 * math.sqrt(knee * p), weight, n)


def kneemax_weight(gap: float, n: int) -> float:
    """The weight kneemax (share 1, T = 1) keeps on a token with this gap: min(1, g/2) up to 1/n."""
    _check_keys(n)
    if not gap >= 0:
        raise ValueError(f"the gap must not be negative, got {gap}")
    b = 1 / math.sqrt(n * (n - 1))
    return 1 - (math.sqrt(b * b + max(0.0, 1 + 1 / n - gap / 2)) - b) ** 2 if gap < 2 + 2 / n else 1.0


def two_level_weight(row_map: RowMap, gap: float, n: int, dtype: torch.dtype = torch.float64) -> float:
    """Return the weight of a token with logit `gap` among n-1 with logit 0, by running the map on that row."""
    _check_keys(n)
    logits = torch.zeros(1, n, dtype=dtype)
    logits[0, 0] = gap
    with torch.no_grad():
        return float(row_map(logits)[0, 0])


def gap_to_keep(
    row_map: RowMap, weight: float, n: int, dtype: torch.dtype = torch.float64, *, near: float = 1.0
) -> float:
    """Return the smallest gap that gives the leading one of n keys at least `weight`; infinite if none does.

    By root finding on g, which is the shorter the closer `near` lies to the answer.
    """
    _check(n, weight)
    if two_level_weight(row_map, 0.0, n, dtype) >= weight:
        return 0.0
    low, high = 0.0, near
    while two_level_weight(row_map, high, n, dtype) < weight:
        low, high = high, 2 * high
        if high > 2.0**20:
            return math.inf
    if weight == 1:  # a plateau: no sign change to follow, so halve instead
        while high - low > 1e-12 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if two_level_weight(row_map, middle, n, dtype) >= 1 - 1e-15 else (middle, high)
        return high
    return float(brentq(lambda gap: two_level_weight(row_map, gap, n, dtype) - weight, low, high, xtol=1e-12))


def measured_lipschitz(row_map: RowMap, n: int, *, widest: float = 32.0, points: int = 25, rounds: int = 3) -> float:
    """Return a lower bound of the Lipschitz constant at n keys: the largest norm over rows with one or two leaders.

    A grid of gaps up to `widest`, then zooms around its best point. These rows hold the maximum for softmax, entmax and
    sparsemax; for other maps it may lie elsewhere, so give a proved constant where there is one.
    """
    _check_keys(n)

    def norms(leaders: int, gaps: Tensor) -> Tensor:
        logits = torch.where(torch.arange(n) < leaders, gaps[:, None], 0.0)
        return power_iteration_norm(row_map, logits, tolerance=1e-6, generator=torch.Generator().manual_seed(0))

    best = 0.0
    for leaders in (1, 2):
        grid = torch.logspace(-4, math.log10(widest), points - 1, dtype=torch.float64)
        gaps = torch.cat([torch.zeros(1, dtype=torch.float64), grid])
        for _ in range(rounds):
            gap_norms = norms(leaders, gaps)
            top = int(gap_norms.argmax())
            best = max(best, float(gap_norms[top]))
            low, high = gaps[max(0, top - 1)], gaps[min(len(gaps) - 1, top + 1)]
            gaps = low + (high - low) * torch.linspace(0, 1, 7, dtype=torch.float64)
    return best


def _check_keys(n: int) -> None:
    if n < 2:
        raise ValueError(f"n (keys, the leading one included) must be at least 2, got {n}")


def _check(n: int, weight: float) -> None:
    _check_keys(n)
    if not 1 / n <= weight <= 1:
        raise ValueError(f"expected a weight of the leading token in [1/n, 1] = [{1 / n:.4g}, 1], got {weight}")


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
        effort_by_length = {
            point.n: point.effort for point in self.points if point.name == name and point.weight == weight
        }
        return [effort_by_length.get(n, math.nan) for n in self.lengths]

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
    """Return the reason why the law of docs/theory/frontier.md does not apply; None if it does."""
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
        reasons.append("it jumps where keys change order, so it has no finite Lipschitz constant")
    return "; ".join(reasons) or None


def place_on_frontier(
    lengths: Sequence[int] | None = None,
    weights: Sequence[float] = WEIGHTS,
    progress: Callable[[str], None] = lambda name: None,
) -> Frontier:
    """Measure every registered normalizer at its defaults. progress: called with each name before its measurement."""
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
            new_points = frontier(
                [_contender(normalizer)], [n for n in lengths if declared or n <= LONGEST_MEASURED], weights
            )
            missed = next((point for point in new_points if math.isinf(point.gap)), None)
            if missed is not None:
                absent[name] = f"gives none of {missed.n} keys a weight of {missed.weight:g}, however large its gap"
                continue
            points += new_points
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
        needed_gap = gap_to_keep(normalizer, weight, n, near=1.2 * gaps.get(weight, 1.0))
        if 0 < needed_gap < math.inf:
            gaps[weight] = needed_gap
        return needed_gap

    def constant(n: int) -> float:
        if n not in constants:
            declared = normalizer.lipschitz(n)
            constants[n] = measured_lipschitz(normalizer, n) if declared is None else declared
        return constants[n]

    return FrontierContender(normalizer.name, gap, constant)
