"""How far heads reach: from which length the ceiling of softmax binds, and up to how many keys a circuit is sharp.

If the logits of a row have the spread d, softmax can give no key more than half of the weight among more than 1 + e^d
keys. This number of keys is the horizon. The spread grows with the context, for normal tails like sqrt(log n). We fit
spread = a + b sqrt(log n) over the bins of one pass. The ceiling binds where log n overtakes the spread:

    log n = a + b sqrt(log n)

This is an extrapolation, and every text that shows it says so. Bounded logits, such as those of a finite vocabulary,
grow more slowly in the end, so the true length is not larger in the long run.

The scores of circuits come from analysis/circuits.py: the mean weight on the key that the circuit needs. A head is
named by its largest score. It is sharp while that key has at least half of the weight, as a horizon is defined.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnorm.analysis.verdicts.rules import judged_horizon, judged_suffix
from attnorm.analysis.verdicts.thresholds import Thresholds
from attnorm.report_data import Row, number
from attnorm.text import format_keys, format_percent

FARTHEST = 1e10  # longer lengths are not printed as numbers


@dataclass(frozen=True)
class Ceiling:
    """How many of the measured heads are beyond their horizon, and at which length the others will be."""

    heads: int
    beyond: int  # heads whose longest rows have more keys than their horizon
    length: int  # keys of the longest rows
    horizons: tuple[float, float, float]  # 10, 50 and 90 % over heads
    binding: tuple[float, float, float]  # 10, 50 and 90 % of the extrapolated lengths


@dataclass(frozen=True)
class Rate:
    """Slopes of the effective gap on log n over heads: 0 disperses as theory predicts, 1 keeps up."""

    heads: int
    quartiles: tuple[float, float, float]
    below_half: int  # closer to dispersing
    keeping_up: int  # at least 0.9
    without_sink: float | None  # median among the keys other than the first


def ceiling(heads: Sequence[Row], by_length: Iterable[Row], thresholds: Thresholds) -> Ceiling | None:
    """Compare the longest rows of each head with its horizon; None if no head has a horizon.

    by_length: curves of the spread to extrapolate; empty if the normalizer multiplies logits by a factor of n. If a
    sink holds much weight, the spread is that of the other keys.
    """
    curves: dict[tuple[Any, ...], list[Row]] = {}
    for row in by_length:
        curves.setdefault(_head_key(row), []).append(row)
    horizons, lengths, beyond, longest = [], [], 0, 0
    for row in heads:
        horizon = judged_horizon(row, thresholds)
        if horizon is None:
            continue
        horizons.append(horizon)
        n, column = row["n_high"], f"logit_spread{judged_suffix(row, thresholds)}"
        beyond += n > horizon
        longest = max(longest, n)
        lengths.append(horizon if n > horizon else binding_length(curves.get(_head_key(row), ()), column, horizon))
    if not horizons:
        return None
    return Ceiling(len(horizons), beyond, longest, _quantiles(horizons), _quantiles(lengths))


def binding_length(curve: Iterable[Row], column: str, horizon: float) -> float:
    """Return the n at which log n overtakes the growing spread; at least the horizon, and the horizon without a fit."""
    points = [
        (math.sqrt(math.log(row["n"])), spread)
        for row in curve
        if (spread := number(row, column)) is not None and row["n"] > 1
    ]
    if len(points) < 3:
        return horizon
    x, y = np.array(points).T
    b, a = np.polyfit(x, y, 1)
    if b <= 0 or b * b + 4 * a < 0:  # the spread does not grow, or the line is below log n at every length
        return horizon
    root = (b + math.sqrt(b * b + 4 * a)) / 2
    return max(horizon, math.exp(min(root * root, 700.0)))


def rate(heads: Iterable[Row]) -> Rate | None:
    rows = [row for row in heads if row.get("verdict") != "silent"]  # the gap is that of rescaled weights
    slopes = [slope for row in rows if (slope := number(row, "gap_slope")) is not None]
    if not slopes:
        return None
    content = [slope for row in rows if (slope := number(row, "gap_slope_without_sink")) is not None]
    low, middle, high = np.quantile(slopes, (0.25, 0.5, 0.75))
    return Rate(
        heads=len(slopes),
        quartiles=(float(low), float(middle), float(high)),
        below_half=sum(slope < 0.5 for slope in slopes),
        keeping_up=sum(slope >= 0.9 for slope in slopes),
        without_sink=float(np.median(content)) if content else None,
    )


def _quantiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the quantiles 10, 50 and 90 % without interpolation, since values may be infinite."""
    low, middle, high = np.quantile(values, (0.1, 0.5, 0.9), method="inverted_cdf")
    return float(low), float(middle), float(high)


def _head_key(row: Row) -> tuple[Any, ...]:
    return row["text"], row["length"], row["kind"], row["layer"], row["head"]


CIRCUITS = {
    "induction": "an induction head",
    "previous_token": "a previous-token head",
    "retrieval": "a retrieval head",
}
NAMED_FROM = 0.3  # mean weight on the right key from which a head is named; uniform attention gives 1/n
SHARP = 0.5


def circuit_of(row: Mapping[str, Any]) -> str | None:
    """Return the circuit with the largest score, or None if no score reaches NAMED_FROM."""
    scores = {name: number(row, name) or 0.0 for name in CIRCUITS}
    best = max(scores, key=lambda name: scores[name])
    return best if scores[best] >= NAMED_FROM else None


def reach(n: Sequence[float], weights: Sequence[float], level: float = SHARP) -> float:
    """Return the number of keys up to which the weight is at least `level`, interpolated in log n.

    n: visible keys, increasing. 0 if the weight is below the level from the start, the last n if it never falls below.
    """
    if not n or weights[0] < level:
        return 0.0
    for index in range(1, len(n)):
        if weights[index] < level:
            share = (weights[index - 1] - level) / (weights[index - 1] - weights[index])
            return math.exp(math.log(n[index - 1]) + share * math.log(n[index] / n[index - 1]))
    return float(n[-1])


def circuit_words(row: Row) -> str:
    """Return "an induction head; its key has half of the weight up to 2,300 keys", or "" without a circuit."""
    name = circuit_of(row)
    if name is None:
        return ""
    sharp = number(row, "circuit_reach") or 0.0
    if not sharp:
        return f"{CIRCUITS[name]}; its key has at most {format_percent(number(row, name))} of the weight"
    end = ", the longest probe" if _still_sharp(row) else ""
    return f"{CIRCUITS[name]}; its key has half of the weight or more up to {format_keys(sharp)} keys{end}"


def circuit_sentences(heads: Sequence[Row]) -> list[str]:
    """Count the heads of each circuit and say where they stop being sharp."""
    if all(number(row, "circuit_probed") is None for row in heads):
        return []
    by_circuit: dict[str, list[Row]] = {}
    for row in heads:
        if name := circuit_of(row):
            by_circuit.setdefault(name, []).append(row)
    probed = max(number(row, "circuit_probed") or 0.0 for row in heads)
    parts = []
    for name in CIRCUITS:
        rows = by_circuit.get(name, [])
        word = f"{CIRCUITS[name].split(' ', 1)[1]}{'s' * (len(rows) != 1)}"
        still = sum(_still_sharp(row) for row in rows)
        listed = ", ".join(f"L{row['layer']}H{row['head']}" for row in _best(rows, name)[:3])
        parts.append(f"{len(rows)} {word}" + (f" ({listed}; {still} sharp at all lengths)" if rows else ""))
    sharp = "Sharp: the key that the circuit needs has at least half of the weight."
    return [f"Circuits, tested up to {format_keys(probed)} keys: {', '.join(parts)}. {sharp}"]


def _still_sharp(row: Row) -> bool:
    sharp, probed = number(row, "circuit_reach"), number(row, "circuit_probed")
    return sharp is not None and probed is not None and sharp >= probed


def _best(rows: Sequence[Row], name: str) -> list[Row]:
    return sorted(rows, key=lambda row: -(number(row, name) or 0.0))
