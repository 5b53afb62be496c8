"""The frontier record - what every normalizer pays to keep a weight on one of n keys - and its terminal table."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from scipy.optimize import brentq

from attnorm.normalizers.contract import Normalizer
from attnorm.theory.catalogue.normalizers import on_frontier, with_lipschitz
from attnorm.theory.frontier import Contender, FrontierPoint, frontier, frontier_effort, two_level_weight
from attnorm.theory.search import one_thread

LENGTHS = (16, 64, 256, 1024, 4096, 32_768, 1_000_000)
WEIGHTS = (0.5, 0.9)
MOST = 1e4  # gap beyond which a weight counts as out of reach


@dataclass(frozen=True, kw_only=True)
class Frontier:
    """Points of every normalizer, all lengths and weights; the law's own effort for each length and weight."""

    lengths: tuple[int, ...]
    weights: tuple[float, ...]
    points: tuple[FrontierPoint, ...]

    @property
    def names(self) -> list[str]:
        """From the least to the most effort at the longest row and largest weight, the law's own order."""
        last = {p.name: p.effort for p in self.points if p.n == self.lengths[-1] and p.weight == self.weights[-1]}
        return sorted(last, key=lambda name: last[name])

    def efforts(self, name: str, weight: float) -> list[float]:
        return [p.effort for p in self.points if p.name == name and p.weight == weight]

    def least(self, weight: float) -> list[float]:
        return [frontier_effort(n, weight) for n in self.lengths]

    def as_dict(self) -> dict[str, Any]:
        law = [
            {"n": n, "weight": weight, "effort": frontier_effort(n, weight)}
            for weight in self.weights
            for n in self.lengths
        ]
        return {"law": law, "points": [asdict(point) for point in self.points]}


def measure_frontier(
    lengths: Sequence[int] | None = None,
    weights: Sequence[float] = WEIGHTS,
    progress: Callable[[str], None] = lambda name: None,
) -> Frontier:
    """Every registered row normalizer about which the law speaks, run on rows with one leader; K as it declares it."""
    lengths = LENGTHS if lengths is None else lengths
    points: list[FrontierPoint] = []
    with one_thread():
        for normalizer in filter(on_frontier, with_lipschitz()):
            progress(normalizer.name)
            points += frontier([_contender(normalizer)], lengths, weights)
    return Frontier(lengths=tuple(lengths), weights=tuple(weights), points=tuple(points))


def _contender(normalizer: Normalizer) -> Contender:
    """The normalizer as it runs; root finding starts at the gap found for the length before, which is close."""
    known: dict[float, float] = {}

    def gap(weight: float, n: int) -> float:
        def missing(g: float) -> float:
            return two_level_weight(normalizer, g, n) - weight

        low = high = known.get(weight, 1.0)
        while missing(low) > 0:
            low /= 1.25
        while missing(high) < 0:
            high *= 1.25
            if high > MOST:
                raise ValueError(f"{normalizer.name} gives a leader among {n} keys less than {weight} at any gap")
        known[weight] = low if low == high else float(brentq(missing, low, high, xtol=1e-6, rtol=1e-6))
        return known[weight]

    def constant(n: int) -> float:
        value = normalizer.lipschitz(n)
        assert value is not None
        return value

    return Contender(normalizer.name, gap, constant)


def frontier_table(measured: Frontier) -> Table:
    table = Table(
        title="Effort K g needed to keep a weight w on one of n keys",
        caption="g: how far its logit leads n-1 equal ones; K: the declared Lipschitz constant. A temperature changes "
        "nothing. No shift-invariant, permutation-equivariant map with row sum 1 lies below the law (n w - 1)/(n - 1).",
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
    )
    table.add_column("normalizer", no_wrap=True)
    table.add_column("w", justify="right")
    for n in measured.lengths:
        table.add_column(f"{n:,}", justify="right", no_wrap=True)
    for weight in measured.weights:
        table.add_section()
        table.add_row("the law", f"{weight:g}", *(f"{effort:.3f}" for effort in measured.least(weight)), style="bold")
        for name in measured.names:
            table.add_row(name, f"{weight:g}", *(f"{effort:.3f}" for effort in measured.efforts(name, weight)))
    return table
