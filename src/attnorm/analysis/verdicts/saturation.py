"""Is a head saturated? Judged apart from its verdict, and only with evidence for the answer.

The excess is separability minus its null (the same weights on permuted keys), over the sampled rows of all windows. Two
one-sided tests of 5 % each give its 90 % interval:

    saturated       the whole interval lies below the margin: no better than the null, shown
    distinguishes   most keys are distinguishable (separability >= separable), or the whole interval lies above 0
    not judged      anything else: not measured, a single key in use, or too few rows to show either

The power is the chance that a head without any excess is shown to be saturated, given the error of these rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy.special import ndtr, stdtrit

from attnorm.analysis.verdicts.rows import Row, number
from attnorm.analysis.verdicts.rules import judged_keys
from attnorm.analysis.verdicts.thresholds import Thresholds

LEVEL = 0.95  # one-sided


@dataclass(frozen=True)
class Saturation:
    saturation: str
    words: str  # why, without a full stop
    saturation_top_n: int | None = None
    saturation_excess: float = math.nan
    saturation_low: float = math.nan
    saturation_high: float = math.nan
    saturation_power: float = math.nan


def saturation(row: Row, top_n: Sequence[Row], thresholds: Thresholds) -> Saturation:
    """row: of the heads table. top_n: the head's rows of the top-N table."""
    by_n = {one["top_n"]: one for one in top_n if number(one, "separability") is not None}
    used = number(row, f"effective_keys{judged_keys(row, thresholds)}")
    if used is None or not by_n:
        return Saturation("not judged", "separability was not measured")
    # A single key is always distinguishable, and keys without weight are not selected.
    judged = [N for N in by_n if 1 < N <= min(used, thresholds.saturation_top_n)]
    if not judged:
        return Saturation("not judged", f"it uses {used:.2g} keys, fewer than any measured N above 1")
    N = max(judged)
    found = by_n[N]
    measured, null = number(found, "separability"), number(found, "separability_null")
    error, rows = number(found, "separability_excess_error"), int(found.get("rows") or 0)
    if measured is None or null is None:
        return Saturation("not judged", "separability has no null", N)
    shares = f"{measured:.0%} of its top {N} keys are distinguishable, {null:.0%} with permuted values"
    excess = measured - null
    if error is None:
        if measured >= thresholds.separable:
            return Saturation("distinguishes", shares, N, excess)
        return Saturation("not judged", f"{shares}; too few rows for an interval", N, excess)
    width = float(stdtrit(max(rows - 1, 1), LEVEL)) * error
    low, high = excess - width, excess + width
    power = float(ndtr((thresholds.saturation_margin - width) / error)) if error > 0 else 1.0
    interval = f"{shares}: an excess of {excess:.2f} ({low:.2f} to {high:.2f})"
    numbers = (N, excess, low, high, power)
    if measured >= thresholds.separable:
        return Saturation("distinguishes", interval, *numbers)
    if high < thresholds.saturation_margin:
        return Saturation("saturated", f"{interval}, below the margin of {thresholds.saturation_margin:g}", *numbers)
    if low > 0:
        return Saturation("distinguishes", interval, *numbers)
    return Saturation("not judged", f"{interval}; the power of these rows is {power:.0%}", *numbers)
