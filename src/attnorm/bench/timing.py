"""Time two calls in alternation, so that changes of the machine's speed affect both."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

Call = Callable[[], object]

LEAST_SECONDS = 0.01  # shorter calls are repeated within one sample


@dataclass(frozen=True)
class Timed:
    ours_ms: float
    theirs_ms: float
    speedup: float  # median over the rounds of theirs / ours


def time_alternating(ours: Call, theirs: Call, *, rounds: int) -> Timed:
    """Return the medians of both over the rounds, after one warm-up call of each; the order alternates.

    A single round times one call of each, as a test that it runs.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    for call in (ours, theirs):
        call()
    calls = [(call, _loops(call) if rounds > 1 else 1) for call in (ours, theirs)]
    pairs: list[tuple[float, float]] = []
    for number in range(rounds):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        taken = {which: _seconds(*calls[which]) for which in order}
        pairs.append((taken[0], taken[1]))
    return Timed(
        1e3 * median(ours for ours, _ in pairs),
        1e3 * median(theirs for _, theirs in pairs),
        median(theirs / ours for ours, theirs in pairs),
    )


def _loops(call: Call) -> int:
    """Return how often to repeat the call within one sample."""
    return max(1, min(1000, round(LEAST_SECONDS / max(_seconds(call, 1), 1e-6))))


def _seconds(call: Call, loops: int) -> float:
    start = time.perf_counter()
    for _ in range(loops):
        call()
    return (time.perf_counter() - start) / loops
