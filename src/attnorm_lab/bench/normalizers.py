"""Benchmark normalizers: kneemax next to three others, and the sparse maps against the entmax package
(https://github.com/deep-spin/entmax).
"""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnorm.normalizers.contract import Normalizer
from attnorm.normalizers.registry import get
from attnorm_lab.bench.results import Ratio
from attnorm_lab.bench.timing import Call, time_alternating

Map = Callable[[Tensor], Tensor]

EAGER, BACKWARD, COMPILED = 4.0, 3.0, 10.0  # promised speedups


@dataclass(frozen=True)
class Rival:
    """One of our maps, and the equivalent function of the entmax package."""

    name: str
    alpha: float
    function: str
    options: dict[str, Any]
    compiles: bool = True  # in reasonable time: the bisection unrolls into fifty steps and takes minutes


RIVALS = [
    Rival("sparsemax", 2.0, "sparsemax", {}),
    Rival("entmax15", 1.5, "entmax15", {}),
    Rival("entmax", 1.5, "entmax_bisect", {"alpha": 1.5}, compiles=False),
]


BESIDE_KNEEMAX = ("ssmax", "entmax15", "asentmax")


def compare_normalizers(*, quick: bool = False, notes: list[str]) -> Iterator[Ratio]:
    """Yield ratios: eager, forward and backward, compiled; append to `notes` what could not be compared."""
    for rows, keys in [(64, 128)] if quick else [(1024, 1024), (64, 16_384)]:
        yield from _compare_kneemax(rows, keys, quick)
    yield from _compare_with_entmax(quick, notes)


def _compare_kneemax(rows: int, keys: int, quick: bool) -> Iterator[Ratio]:
    topic = f"{rows} rows of {keys:,} keys, float32, normal logits, among our own"
    logits = torch.randn(rows, keys, generator=torch.Generator().manual_seed(0))
    leaf, upstream = logits.clone().requires_grad_(), torch.randn_like(logits)

    def forward(name: str) -> Call:
        return partial(_without_gradient, _row_normalizer(name), logits)

    def forward_and_backward(name: str) -> Call:
        return partial(_gradient, _row_normalizer(name), leaf, upstream)

    for way, call in (("forward", forward), ("forward + backward", forward_and_backward)):
        for name in BESIDE_KNEEMAX:
            timed = time_alternating(call("kneemax"), call(name), rounds=1 if quick else 11)
            yield Ratio(topic=topic, what=f"kneemax, {way}", against=name, **asdict(timed))


def _row_normalizer(name: str) -> Map:
    normalizer = get(name)
    assert isinstance(normalizer, Normalizer)
    return normalizer


def _compare_with_entmax(quick: bool, notes: list[str]) -> Iterator[Ratio]:
    try:
        package = importlib.import_module("entmax")
    except ImportError:
        notes.append("the entmax package is not installed, so there is no comparison: pip install entmax")
        return
    rows, keys = (64, 128) if quick else (1024, 1024)
    topic = f"{rows} rows of {keys} keys, float32, normal logits, against entmax"
    logits = torch.randn(rows, keys, generator=torch.Generator().manual_seed(0))
    for rival in RIVALS:
        theirs = _on_last_dimension(getattr(package, rival.function), rival.options)
        yield from _compare(topic, rival, _row_normalizer(rival.name), theirs, logits, quick)


def _on_last_dimension(function: Callable[..., Tensor], options: dict[str, Any]) -> Map:
    return lambda logits: function(logits, dim=-1, **options)


def _compare(topic: str, rival: Rival, ours: Map, theirs: Map, logits: Tensor, quick: bool) -> Iterator[Ratio]:
    peer = f"entmax.{rival.function}"
    exact = by_bisection(logits.double(), rival.alpha)

    def ratio(
        way: str, against: str, a: Call, b: Call, target: float | None, errors: tuple[float | None, ...]
    ) -> Ratio:
        timed = time_alternating(a, b, rounds=1 if quick else 11)
        return Ratio(
            topic=topic, what=f"{rival.name}, {way}", against=against, target=None if quick else target,
            error=errors[0], their_error=errors[1], **asdict(timed),
        )  # fmt: skip

    def forward(way: str, against: str, a: Map, b: Map, target: float | None) -> Ratio:
        with torch.no_grad():
            errors = tuple((function(logits) - exact).abs().max().item() for function in (a, b))
            return ratio(way, against, partial(a, logits), partial(b, logits), target, errors)

    yield forward("forward", peer, ours, theirs, EAGER)
    leaf, upstream = logits.clone().requires_grad_(), torch.randn_like(logits)
    a, b = (partial(_gradient, function, leaf, upstream) for function in (ours, theirs))
    yield ratio("forward + backward", peer, a, b, BACKWARD, (None, None))
    if quick:
        return
    torch.compiler.reset()
    compiled: Map = torch.compile(ours)
    yield forward("forward, compiled", peer, compiled, theirs, COMPILED)
    if rival.compiles:
        yield forward("forward, compiled", f"{peer}, compiled", compiled, torch.compile(theirs), None)


@torch.no_grad()
def _without_gradient(function: Map, logits: Tensor) -> Tensor:
    return function(logits)


def _gradient(function: Map, leaf: Tensor, upstream: Tensor) -> Tensor:
    return torch.autograd.grad(function(leaf), leaf, upstream)[0]


def by_bisection(z: Tensor, alpha: float) -> Tensor:
    """Compute alpha-entmax by bisection of the threshold in float64: slow and exact."""
    scaled = (alpha - 1) * z.double()
    high = scaled.amax(-1, keepdim=True)
    low = high - 1
    for _ in range(80):
        middle = (low + high) / 2
        mass = (scaled - middle).relu().pow(1 / (alpha - 1)).sum(-1, keepdim=True)
        low, high = torch.where(mass >= 1, middle, low), torch.where(mass >= 1, high, middle)
    weights = (scaled - low).relu().pow(1 / (alpha - 1))
    return weights / weights.sum(-1, keepdim=True)
