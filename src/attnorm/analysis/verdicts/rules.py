"""When a verdict holds: rule by rule for one head, with the numbers that say so, and for arrays of heads at once.

A rule that lacks a number yields OPEN and what it could not decide: nothing is guessed from what was not measured.

The rules for one head, with words, are the reference. The form for arrays gives the same verdicts as codes, for windows
and bootstrap resamples; tests compare the two on random heads.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch.autograd.functional import jacobian

from attnorm.analysis.verdicts.rows import Row, keys, number
from attnorm.analysis.verdicts.thresholds import SELECTING, VERDICTS, Thresholds
from attnorm.attention import normalize
from attnorm.normalizers.contract import Normalizer
from attnorm.normalizers.registry import get
from attnorm.theory.dispersion import entropy_floor

OPEN = "open"
BEYOND_NUMBERS = 1e300  # keys
NOISE = 64  # keys of a row in which nothing stands out
GATE_OPEN = 0.5  # share of the output that must pass for a sink to count

Findings = Iterator[tuple[str, str]]  # a verdict or OPEN, and the words for it
Arrays = Mapping[str, np.ndarray]  # arrays that broadcast against each other
NOTHING = -1  # the code of a head that has nothing to be judged by
CODE = {name: code for code, name in enumerate(VERDICTS)}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One head, and what is needed to judge it."""

    row: Row  # of the heads table
    thresholds: Thresholds
    runs: str | None  # the normalizer's name; None: not known
    slope_over_lengths: float | None = None  # of the gap, over runs of several lengths
    what_if: bool = False  # another normalizer on the model's logits: judged by its sharpness alone
    windowed: bool = False  # behind a sliding window, whose first key is then what the sink columns are about

    @property
    def n(self) -> int:
        keys_of_longest_row: int = self.row["n_high"]
        return keys_of_longest_row

    @property
    def worst_norm(self) -> float | None:
        """By its name alone a normalizer has the parameters that it starts with, not those that it learned."""
        measured = self.row.get("worst_norm")
        known = measured is not None and math.isfinite(measured)
        return float(measured) if known else worst_norm(self.runs, self.n)  # type: ignore[arg-type]

    def number(self, name: str) -> float | None:
        return number(self.row, name)


def sink_dominated(case: Case) -> Findings:
    mass = case.number("sink_mass")
    if mass is None:
        yield OPEN, "sink-dominated (no sink mass)"
    elif mass >= case.thresholds.sink_dominated and not _behind_closed_gate(case):
        rest = case.number("effective_keys_without_sink")
        shared = "" if rest is None else f"; the rest is shared by {keys(rest)} others"
        yield "sink-dominated", f"{mass:.0%} of the weight lies on {_sink(case)}{shared}"


def _behind_closed_gate(case: Case) -> bool:
    """Whether the model's output gate keeps most of the sink's share out: then it is none."""
    passed = case.number("gated_sink_mass")
    return passed is not None and passed < case.thresholds.sink_dominated * GATE_OPEN


def frozen(case: Case) -> Findings:
    largest, norm = case.number("max_weight"), case.number("jacobian_norm")
    if largest is None or largest < case.thresholds.frozen_weight:
        return
    if norm is None:
        yield OPEN, "frozen (no Jacobian norm)"
    elif norm <= case.thresholds.frozen_norm * (case.worst_norm or 0.5):
        words = f"The largest weight is {largest:.4f} and the Jacobian norm {norm:.2g}"
        yield "frozen", f"{words}: no gradient reaches the logits"


def sensitive(case: Case) -> Findings:
    thresholds, worst = case.thresholds, case.worst_norm
    norm = case.row.get(f"jacobian_norm_q{thresholds.sensitive_quantile:02d}")
    if norm is None or not math.isfinite(norm):
        yield OPEN, "sensitive (no Jacobian norm)"
    elif worst is None:
        yield OPEN, f"sensitive (no worst case known for {case.runs or 'what the model runs'})"
    elif norm < thresholds.sensitive_norm * worst:
        return
    elif always_near_worst(case.runs, thresholds.sensitive_norm):
        yield OPEN, f"sensitive (a row of noise is near the worst case of {case.runs}, {worst:.3g}, as well)"
    else:
        share = 100 - thresholds.sensitive_quantile
        yield "sensitive", f"The Jacobian norm is {norm:.3g} or more, of at most {worst:.3g}, on {share}% of the rows"


def dispersed(case: Case) -> Findings:
    """A what-if is judged by its entropy alone: ssmax adds to the slope of the gap whatever the logits are."""
    thresholds, suffix = case.thresholds, judged_keys(case.row, case.thresholds)
    ratio, slope = case.number(f"entropy_ratio{suffix}"), None if case.what_if else _slope(case, suffix)
    error = None if suffix else case.number("gap_slope_error")
    if ratio is None or ratio < thresholds.dispersed_entropy:
        return
    if slope is not None and (slope > thresholds.dispersed_slope or slope + 2 * (error or 0.0) >= 1):
        return
    words = _selectivity(case)
    above_floor = _above_floor(case, suffix, ratio)
    if above_floor is not None and above_floor <= thresholds.near_floor:
        share = f"{max(above_floor, 0):.0%}"
        yield "healthy", f"{words}, but only {share} of the way from its floor to log n: as sharp as its logits allow"
        return
    if slope is None and not case.what_if:
        yield OPEN, "the rate (one length only, so that entropy alone decides)"
    horizon = judged_horizon(case.row, thresholds)
    if horizon is None:
        yield (
            "dispersed",
            f"{words}; whether its logits would allow sharper weights is not known for {case.runs or 'what it runs'}",
        )
    elif case.n > horizon:
        yield (
            "dispersed-forced",
            f"{words}; beyond its horizon of {keys(horizon)} keys its logits let none have half of the weight",
        )
    else:
        yield "dispersed-by-choice", f"{words}, although its horizon is {keys(horizon)} keys"


RULES = (sink_dominated, frozen, sensitive, dispersed)


def selects(case: Case) -> str:
    """The words for a head to which no rule applies."""
    largest = case.number(f"max_weight{judged_keys(case.row, case.thresholds)}")
    words = _selectivity(case) + ("" if largest is None else f"; the largest weight is {largest:.2g}")
    return f"{words}: broad, but it keeps up with the length" if broad(case.row, case.thresholds) else words


def broad(row: Row, thresholds: Thresholds) -> bool:
    """Smeared by its entropy and not sharp by its floor: if it is not dispersed, then only because it keeps up."""
    case = Case(row=row, thresholds=thresholds, runs=None)
    suffix = judged_keys(row, thresholds)
    ratio = case.number(f"entropy_ratio{suffix}")
    if ratio is None or ratio < thresholds.dispersed_entropy:
        return False
    above_floor = _above_floor(case, suffix, ratio)
    return above_floor is None or above_floor > thresholds.near_floor


def is_selecting(row: Row, thresholds: Thresholds) -> bool:
    return row["verdict"] in SELECTING and not broad(row, thresholds)


def judged_keys(row: Row, thresholds: Thresholds) -> str:
    """The suffix of the columns about the keys that count: all, or those beside a sink that holds a part that matters.

    Entropy, slope and horizon are taken from the same keys, so that a sink can neither make a smear look sharp nor
    lend its extreme logit to the spread that content has to work with.
    """
    mass = number(row, "sink_mass")
    hides = mass is not None and mass >= thresholds.sink_matters
    return "_without_sink" if hides and number(row, "entropy_ratio_without_sink") is not None else ""


def judged_horizon(row: Row, thresholds: Thresholds) -> float | None:
    """That of the median row among the keys that count, finite also where it is beyond all numbers.

    None where the normalizer has none: it is that of softmax and of softmax with rescaled logits, and bounds no other.
    """
    name = f"horizon{judged_keys(row, thresholds)}"
    for column in (f"{name}_q50", name):
        value = row.get(column)
        if value is not None and not math.isnan(value):
            return min(float(value), BEYOND_NUMBERS)
    return None


@lru_cache(maxsize=4096)
def worst_norm(runs: str | None, n: int) -> float | None:
    """The largest Jacobian norm that this normalizer can have among n keys; None where it is not known."""
    if runs is None or n < 2:
        return None
    try:
        normalizer = get(runs)
    except (ValueError, TypeError):  # one of the user's own, or one that its name alone does not make
        return None
    return normalizer.lipschitz(n) if isinstance(normalizer, Normalizer) else None


@lru_cache(maxsize=4096)
def always_near_worst(runs: str | None, share: float) -> bool:
    """Whether a row of noise is as near to the worst case of the Jacobian norm as a sensitive head must be.

    Maps with straight pieces (sparsemax, kneemax, relu) reach theirs with any two keys in use: the norm there belongs
    to the map and says nothing about a head.
    """
    worst = worst_norm(runs, NOISE)
    if runs is None or not worst:
        return False
    row = torch.randn(NOISE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    try:
        moves = jacobian(lambda logits: normalize(logits, runs), row[None])
    except RuntimeError:  # a map without a gradient
        return False
    return float(torch.linalg.matrix_norm(moves.reshape(NOISE, NOISE), 2)) >= share * worst


def _sink(case: Case) -> str:
    """What the mass lies on: with softmax a row sums to less than 1 only beside a learned sink of the model."""
    row_sum = case.number("row_sum")
    first = f"the first of the {case.n:,} keys in its window" if case.windowed else f"the first of {case.n:,} keys"
    if case.runs != "softmax" or row_sum is None or row_sum > 0.995:
        return first
    return f"its sinks, {1 - row_sum:.0%} on the learned one that is no key and the rest on {first}"


def _selectivity(case: Case) -> str:
    suffix = judged_keys(case.row, case.thresholds)
    ratio, mass = case.number(f"entropy_ratio{suffix}"), case.number("sink_mass")
    slope = None if case.what_if else _slope(case, suffix)
    sink = "the first of its window" if case.windowed else "the sink"
    among = f"the {case.n - 1:,} keys beside {sink} (which holds {mass:.0%})" if suffix else f"{case.n:,} keys"
    change = "shrinks" if slope is not None and round(slope, 2) < 0 else "grows"
    rate = "" if slope is None else f" and the gap {change} by {abs(slope):.2f} per e-fold of n"
    return f"Entropy is {ratio:.2f} of log n among {among}{rate}"


def _slope(case: Case, suffix: str) -> float | None:
    slope = case.number(f"gap_slope{suffix}")
    return case.slope_over_lengths if slope is None and not suffix else slope


def _above_floor(case: Case, suffix: str, ratio: float) -> float | None:
    """Where the entropy lies between its floor, 0, and log n, 1: all three of the median row."""
    n = _median_n(case) - (1 if suffix else 0)
    entropy = None if suffix else case.number("entropy_nats")
    floor = None if suffix else case.number("entropy_floor")
    horizon = judged_horizon(case.row, case.thresholds)
    if suffix and horizon is not None:
        floor = float(entropy_floor(math.log(max(horizon - 1, 1.0)), n))
    if floor is None:
        return None
    entropy = ratio * math.log(n) if entropy is None else entropy
    return (entropy - floor) / max(math.log(n) - floor, 1e-12)


def _median_n(case: Case) -> int:
    """Keys of the median row, by its entropy and its share of log n: fewer than those of the longest row."""
    entropy, ratio = case.number("entropy_nats"), case.number("entropy_ratio")
    if entropy is None or not ratio:
        return case.n
    quotient = math.exp(min(entropy / ratio, 700.0))
    return round(min(max(quotient, case.row.get("n_low") or 2), case.n))


def verdict_codes(heads: Arrays, thresholds: Thresholds) -> np.ndarray:
    """Codes of VERDICTS, never "undecided".

    heads: the numbers of the median row by their column names, n_high, n_low, broken_rows, worst_norm (NaN: unknown),
    near_worst and what_if (boolean), slope_over_lengths and gated_sink_mass (NaN or left out: none).
    """
    if not np.size(heads["n_high"]):
        return np.zeros(np.shape(heads["entropy_ratio"]), dtype=np.int64)
    with np.errstate(all="ignore"):
        return _codes({name: np.asarray(value) for name, value in heads.items()}, thresholds)


def _codes(heads: Arrays, t: Thresholds) -> np.ndarray:
    ratio_all, sink = _finite(heads["entropy_ratio"]), _finite(heads["sink_mass"])
    beside = _finite(heads["entropy_ratio_without_sink"])
    hidden = (sink >= t.sink_matters) & ~np.isnan(beside)
    ratio = np.where(hidden, beside, ratio_all)
    n = np.asarray(heads["n_high"], dtype=np.float64)
    horizon = np.minimum(np.where(hidden, heads["horizon_without_sink"], heads["horizon"]), BEYOND_NUMBERS)
    norm, worst = _finite(heads["jacobian_norm"]), _finite(heads["worst_norm"])
    high_norm = _finite(heads[f"jacobian_norm_q{t.sensitive_quantile:02d}"])

    gated = _finite(heads.get("gated_sink_mass", np.array(np.nan)))

    smeared = (ratio >= t.dispersed_entropy) & ~_keeps_up(heads, hidden, t)
    smeared &= ~(_above_floors(heads, hidden, ratio, horizon, n) <= t.near_floor)
    half_if_unknown = np.where(np.isnan(worst) | (worst == 0), 0.5, worst)
    holds = {
        "broken": heads["broken_rows"] > 0,
        "sink-dominated": (sink >= t.sink_dominated) & ~(gated < t.sink_dominated * GATE_OPEN),
        "frozen": (_finite(heads["max_weight"]) >= t.frozen_weight) & (norm <= t.frozen_norm * half_if_unknown),
        "dispersed-forced": smeared & (n > horizon),
        "dispersed-by-choice": smeared & (n <= horizon),
        "dispersed": smeared & np.isnan(horizon),
        "sensitive": (high_norm >= t.sensitive_norm * worst) & ~heads["near_worst"].astype(bool),
    }
    shape = np.broadcast_shapes(*(value.shape for value in holds.values()))
    codes = np.full(shape, CODE["healthy"])
    for name in reversed(list(holds)):  # the first that holds is set last
        codes = np.where(holds[name], CODE[name], codes)
    return np.where(np.isnan(ratio_all) & ~(heads["broken_rows"] > 0), NOTHING, codes)


def _keeps_up(heads: Arrays, hidden: np.ndarray, t: Thresholds) -> np.ndarray:
    slope_all = _finite(heads["gap_slope"])
    slope_all = np.where(np.isnan(slope_all), heads["slope_over_lengths"], slope_all)
    slope = np.where(hidden, _finite(heads["gap_slope_without_sink"]), slope_all)
    slope = np.where(heads["what_if"].astype(bool), np.nan, slope)
    error = np.where(hidden, 0.0, np.nan_to_num(_finite(heads["gap_slope_error"])))
    return np.asarray((slope > t.dispersed_slope) | (slope + 2 * error >= 1))


def _above_floors(
    heads: Arrays, hidden: np.ndarray, ratio: np.ndarray, horizon: np.ndarray, n: np.ndarray
) -> np.ndarray:
    """Where the entropy lies between its floor, 0, and log n, 1; NaN where no floor is known."""
    nats, whole = _finite(heads["entropy_nats"]), _finite(heads["entropy_ratio"])
    low = np.maximum(np.asarray(heads["n_low"], dtype=np.float64), 0)
    low = np.where(np.isnan(low) | (low == 0), 2, low)
    quotient = np.exp(np.minimum(nats / whole, 700.0))
    middle = np.where(
        np.isnan(nats) | ~(whole != 0) | np.isnan(whole), n, np.rint(np.minimum(np.maximum(quotient, low), n))
    )
    keys = middle - hidden
    floor = _finite(heads["entropy_floor"])
    if hidden.any():
        spread, counted, where = np.broadcast_arrays(
            np.log(np.maximum(horizon - 1, 1.0)), np.maximum(keys, 1.0), hidden
        )
        where = where & ~np.isnan(spread)
        beside = np.full(where.shape, np.nan)
        if where.any():
            spreads, n_beside = np.nan_to_num(spread[where]), np.nan_to_num(counted[where], nan=1.0)
            beside[where] = entropy_floor(torch.from_numpy(spreads), torch.from_numpy(n_beside)).numpy()
        floor = np.where(hidden, beside, floor)
    entropy = np.where(hidden | np.isnan(nats), ratio * np.log(keys), nats)
    return np.asarray((entropy - floor) / np.maximum(np.log(keys) - floor, 1e-12))


def _finite(values: np.ndarray) -> np.ndarray:
    values = np.asarray(values, dtype=np.float64)
    return np.where(np.isfinite(values), values, np.nan)
