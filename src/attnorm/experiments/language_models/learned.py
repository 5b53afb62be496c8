"""What the normalizers themselves learned in the main runs: one number per head for each of their parameters.

The names are those of the modules that hold them; what is trained freely and bent into a range is given as it acts.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean

from attnorm.experiments.language_models.results import Line

Heads = dict[str, list[float]]
AS_IT_ACTS: dict[str, tuple[str, Callable[[float], float]]] = {
    "s": ("s", lambda raw: raw),
    "logit": ("sink logit", lambda raw: raw),
    "raw_beta": ("beta", lambda raw: math.log1p(math.exp(raw))),
    "raw_gamma": ("gamma", lambda raw: 2 * math.tanh(raw)),
}


@dataclass(frozen=True)
class Learned:
    """A parameter of a normalizer over all heads of a model."""

    normalizer: str
    seed: int
    what: str
    mean: float
    smallest: float
    largest: float


def learned_parameters(lines: Sequence[Line], lengths: Sequence[int] = ()) -> list[Learned]:
    """In the order of the runs; with lengths also the factor on the logits of rows with so many keys."""
    found = []
    for run in (line for line in lines if line["stage"] == "main" and line.get("learned")):
        heads = _by_parameter(run["learned"])
        heads |= {f"factor at {n:,} keys": factors for n in lengths if (factors := _factors(heads, n))}
        found += [
            Learned(run["normalizer"], run["seed"], what, mean(values), min(values), max(values))
            for what, values in heads.items()
        ]
    return found


def _by_parameter(learned: Heads) -> Heads:
    found: Heads = {}
    for name, values in learned.items():
        last = name.rpartition(".")[2]
        what, acting = AS_IT_ACTS.get(last, (last, float))
        found.setdefault(what, []).extend(acting(value) for value in values)
    return found


def _factors(heads: Heads, n: int) -> list[float]:
    """Of ssmax s log n, of asentmax 1 + beta log(n + 1)^gamma; of others none."""
    if "s" in heads:
        return [s * math.log(n) for s in heads["s"]]
    pairs = zip(heads.get("beta", []), heads.get("gamma", []), strict=True)
    return [1 + beta * math.log(n + 1) ** gamma for beta, gamma in pairs]
