"""Benchmark normalizers: kneemax next to three others, and the sparse maps against the entmax package
(https://github.com/deep-spin/entmax).
"""

import importlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from attnorm.normalizers.contract import Normalizer
from attnorm.normalizers.registry import get
from attnorm_lab.bench.promises import SPEEDUPS
from attnorm_lab.bench.results import Result
from attnorm_lab.bench.timing import Bench, Call

Map = Callable[[Tensor], Tensor]

# Our name -> alpha, and the function of the entmax package with its options.
RIVALS: dict[str, tuple[float, str, dict[str, float]]] = {
    "sparsemax": (2.0, "sparsemax", {}),
    "entmax15": (1.5, "entmax15", {}),
    "entmax": (1.5, "entmax_bisect", {"alpha": 1.5}),
}
NOT_COMPILED = "entmax_bisect"  # compiling it takes minutes: the bisection unrolls into fifty steps


def compare_normalizers(bench: Bench) -> Iterator[Result]:
    """Yield ratios: eager, forward and backward, compiled."""
    for rows, keys in [(64, 128)] if bench.quick else [(1024, 1024), (64, 16_384)]:
        table = f"{rows} rows of {keys:,} keys, float32, normal logits, among our own"
        ways = _ways(_logits(rows, keys))
        for way in ("forward", "forward + backward"):
            for name in ("ssmax", "entmax15", "asentmax"):
                theirs: dict[str, tuple[Call, None]] = {name: (ways[way](_row_normalizer(name)), None)}
                ours = ways[way](_row_normalizer("kneemax"))
                yield from bench.compare(table, f"kneemax, {way}", ours, theirs, rounds=11)
    try:
        package = importlib.import_module("entmax")
    except ImportError:
        bench.notes.append("the entmax package is not installed, so there is no comparison: pip install entmax")
        return
    rows, keys = (64, 128) if bench.quick else (1024, 1024)
    table = f"{rows} rows of {keys} keys, float32, normal logits, against entmax"
    for name, (alpha, function, options) in RIVALS.items():
        theirs_map: Map = partial(getattr(package, function), dim=-1, **options)
        yield from _compare(bench, table, name, alpha, function, theirs_map, _logits(rows, keys))


def _logits(rows: int, keys: int) -> Tensor:
    return torch.randn(rows, keys, generator=torch.Generator().manual_seed(0))


def _row_normalizer(name: str) -> Map:
    normalizer = get(name)
    assert isinstance(normalizer, Normalizer)
    return normalizer


def _ways(logits: Tensor) -> dict[str, Callable[[Map], Call]]:
    leaf, upstream = logits.clone().requires_grad_(), torch.randn_like(logits)
    return {
        "forward": lambda function: partial(_without_gradient, function, logits),
        "forward + backward": lambda function: lambda: torch.autograd.grad(function(leaf), leaf, upstream),
    }


@torch.no_grad()
def _without_gradient(function: Map, logits: Tensor) -> Tensor:
    return function(logits)


def _compare(
    bench: Bench, table: str, name: str, alpha: float, function: str, theirs: Map, logits: Tensor
) -> Iterator[Result]:
    ours, peer, ways = _row_normalizer(name), f"entmax.{function}", _ways(logits)
    exact = by_bisection(logits.double(), alpha)
    cases = [(way, way, ours, theirs, peer) for way in ways]
    if not bench.quick:
        torch.compiler.reset()
        compiled: Map = torch.compile(ours)
        cases.append(("forward", "forward, compiled", compiled, theirs, peer))
        if function != NOT_COMPILED:
            cases.append(("forward", "forward, compiled", compiled, torch.compile(theirs), f"{peer}, compiled"))
    for way, what, a, b, against in cases:
        values = {"error": a, "their_error": b} if way == "forward" else {}
        errors = {side: (_without_gradient(it, logits) - exact).abs().max().item() for side, it in values.items()}
        least = None if against.endswith("compiled") else SPEEDUPS[f"entmax, {what}"]
        rivals = {against: (ways[way](b), least)}
        yield from bench.compare(table, f"{name}, {what}", ways[way](a), rivals, rounds=11, numbers=errors)


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
