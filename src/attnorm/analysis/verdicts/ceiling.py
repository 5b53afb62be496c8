"""Is the ceiling binding, from which length will it be, and do heads keep up with a growing context?

With spread d softmax can give no key more than half of a row of more than 1 + e^d keys. The spread itself grows with
the context, as the extremes of more logits: for logits of normal tails like sqrt(log n). Per head a line through the
spread against sqrt(log n) over the bins of one pass, spread = a + b sqrt(log n), says at which length it is overtaken:

    log n = a + b sqrt(log n)

That is an extrapolation, and is named so wherever it is shown. Logits that are bounded, as those of every finite
vocabulary are, grow more slowly in the end, so the true length is no larger in the long run.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from attnorm.analysis.verdicts.rows import Row, number
from attnorm.analysis.verdicts.rules import judged_horizon, judged_keys
from attnorm.analysis.verdicts.thresholds import Thresholds

FARTHEST = 1e10  # longer lengths are not printed as numbers


@dataclass(frozen=True)
class Ceiling:
    """Over the heads that were measured: how many are beyond their horizon, and where the others will be."""

    heads: int
    beyond: int  # the longest rows have more keys than their horizon
    length: int  # of those rows
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
    """None where no head has a horizon. Beside a sink that matters, the spread is that of the other keys.

    by_length: the curves to extrapolate; none where a factor changes with n, so that the spread alone says nothing.
    """
    curves: dict[tuple[Any, ...], list[Row]] = {}
    for row in by_length:
        curves.setdefault(_head(row), []).append(row)
    horizons, lengths, beyond, longest = [], [], 0, 0
    for row in heads:
        horizon = judged_horizon(row, thresholds)
        if horizon is None:
            continue
        horizons.append(horizon)
        n, column = row["n_high"], f"logit_spread{judged_keys(row, thresholds)}"
        beyond += n > horizon
        longest = max(longest, n)
        lengths.append(horizon if n > horizon else binding_length(curves.get(_head(row), ()), column, horizon))
    if not horizons:
        return None
    return Ceiling(len(horizons), beyond, longest, _three(horizons), _three(lengths))


def binding_length(curve: Iterable[Row], column: str, horizon: float) -> float:
    """The n at which a growing spread is overtaken: at the horizon or later, and there where no line can be drawn."""
    points = [
        (math.sqrt(math.log(row["n"])), spread)
        for row in curve
        if (spread := number(row, column)) is not None and row["n"] > 1
    ]
    if len(points) < 3:
        return horizon
    x, y = np.array(points).T
    b, a = np.polyfit(x, y, 1)
    if b <= 0 or b * b + 4 * a < 0:  # it falls in the sample, or a line below log n at every length: as it is now
        return horizon
    root = (b + math.sqrt(b * b + 4 * a)) / 2
    return max(horizon, math.exp(min(root * root, 700.0)))


def rate(heads: Iterable[Row]) -> Rate | None:
    rows = list(heads)
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


def _three(values: Sequence[float]) -> tuple[float, float, float]:
    """10, 50 and 90 %, each one of the values: an infinite one cannot be averaged."""
    low, middle, high = np.quantile(values, (0.1, 0.5, 0.9), method="inverted_cdf")
    return float(low), float(middle), float(high)


def _head(row: Row) -> tuple[Any, ...]:
    return row["text"], row["length"], row["kind"], row["layer"], row["head"]
