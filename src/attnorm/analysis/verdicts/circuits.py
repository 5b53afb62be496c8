"""Circuits of heads: to which circuit a head belongs, up to how many keys it is sharp, and sentences about both.

The scores come from analysis/circuits.py: the mean weight on the key that the circuit needs. A head is named by its
largest score. It is sharp while that key has at least half of the weight, as a horizon is defined.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from attnorm.analysis.verdicts.rows import Row, format_keys, number

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
    """Return "an induction head, sharp to 2,300 keys", or "" for a head without a circuit."""
    name = circuit_of(row)
    if name is None:
        return ""
    sharp = number(row, "circuit_reach") or 0.0
    if not sharp:
        return f"{CIRCUITS[name]}, never sharp ({number(row, name):.0%} of the weight on its key at most)"
    end = "or more, the longest probe" if _still_sharp(row) else ""
    return f"{CIRCUITS[name]}, sharp to {format_keys(sharp)} keys {end}".strip()


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
        parts.append(f"{len(rows)} {word}" + (f" ({listed}; {still} still sharp)" if rows else ""))
    return [f"Circuits, probed to {format_keys(probed)} keys: {', '.join(parts)}."]


def _still_sharp(row: Row) -> bool:
    sharp, probed = number(row, "circuit_reach"), number(row, "circuit_probed")
    return sharp is not None and probed is not None and sharp >= probed


def _best(rows: Sequence[Row], name: str) -> list[Row]:
    return sorted(rows, key=lambda row: -(number(row, name) or 0.0))
