"""The rules behind the verdicts, in two forms: for one head with words, and for arrays of heads as codes.

The rules for one head (RULES) are the reference. Each yields a verdict and the words for it if it applies, or OPEN and
what it could not decide if a number is missing. `verdict_codes` gives the same verdicts for arrays, as windows and
bootstrap resamples need them; tests compare both forms on random heads.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch.autograd.functional import jacobian

from attnorm.analysis.verdicts.thresholds import SELECTING, Thresholds
from attnorm.attention import normalize
from attnorm.normalizers.contract import Normalizer
from attnorm.normalizers.registry import get
from attnorm.report_data import VERDICTS, Row, number
from attnorm.text import format_keys, format_percent, minus_sign
from attnorm.theory.dispersion import entropy_floor

OPEN = "open"
BEYOND_NUMBERS = 1e300  # number of keys that replaces an infinite horizon
NOISE_KEYS = 64  # keys of a random row
ROUNDING = 1e-6  # of row sums in float32
GATE_OPEN = 0.5  # share of the output that must pass the output gate for a sink to count

Findings = Iterator[tuple[str, str]]  # a verdict or OPEN, and the words for it
Arrays = Mapping[str, np.ndarray]  # arrays that broadcast against each other
NOT_JUDGED = -1  # code of a head without a number to judge by
CODE = {name: code for code, name in enumerate(VERDICTS)}


@dataclass(frozen=True, kw_only=True)
class HeadCase:
    """One head, and what is needed to judge it."""

    row: Row  # row of the heads table
    thresholds: Thresholds
    runs: str | None  # name of the normalizer that runs; None: unknown
    slope_over_lengths: float | None = None  # slope of the gap over runs of several lengths
    what_if: bool = False  # whether another normalizer was applied to the model's logits: only its entropy is judged
    windowed: bool = False  # whether the head has a sliding window; then the sink is the first key of the window

    @property
    def n(self) -> int:
        keys_of_longest_row: int = self.row["n_high"]
        return keys_of_longest_row

    @property
    def worst_norm(self) -> float | None:
        """Largest Jacobian norm that the normalizer can have.

        The measured row knows its learned parameters. Without it, the name gives the initial parameters only.
        """
        measured = self.row.get("worst_norm")
        is_known = measured is not None and math.isfinite(measured)
        return float(measured) if is_known else worst_norm(self.runs, self.n)  # type: ignore[arg-type]

    @cached_property
    def suffix(self) -> str:
        """Suffix of the columns to judge by: judged_suffix."""
        return judged_suffix(self.row, self.thresholds)

    @cached_property
    def horizon(self) -> float | None:
        return _limited_horizon(self.row, self.suffix)

    @cached_property
    def signed(self) -> bool:
        """Whether weights may be negative, so that large ones may sum to 0: as declared, or as some sums show."""
        normalizer = _registered(self.runs)
        declared = normalizer is not None and normalizer.properties.signed
        return declared or (self.number("row_sum_q05") or 0.0) < 0

    @cached_property
    def sums_to_one(self) -> bool:
        """Whether the weights of a row sum to one, with that of a learned sink, which is then at least 1 - row sum.

        The numbers show it unless few weights lie mostly on the first key; then the declaration decides.
        """
        normalizer = _registered(self.runs)
        if normalizer is not None and normalizer.map.properties.row_sum != "one":
            return False  # a learned sink beside such a map is not in the sink mass
        row_sum, sink = self.number("row_sum"), self.number("sink_mass")
        return row_sum is not None and sink is not None and sink >= 1 - row_sum - ROUNDING

    @cached_property
    def reads_on_average(self) -> bool:
        """Whether the mean row has weight: softpick may skip most rows and read one key in each of the others."""
        return abs(self.number("row_sum_mean") or 0.0) >= self.thresholds.silent_sum

    @cached_property
    def total_weight(self) -> float | None:
        """Sum of the absolute weights of the median row, with that of a learned sink; None without two keys.

        1 if the mean row has weight, whatever the median row has. Of signed weights only a bound is known: with
        p = |w| / sum |w|, sum |w| is at most max |w| / sum p^2.
        """
        row_sum = self.number("row_sum")
        if row_sum is None or self.n < 2:
            return None
        if self.reads_on_average:
            return 1.0
        if self.signed:
            largest, keys = self.number("max_weight"), self.number("effective_keys")
            return abs(row_sum) if largest is None or keys is None else largest * keys  # neither is known: all are 0
        return 1.0 if self.sums_to_one else row_sum

    def number(self, name: str) -> float | None:
        return number(self.row, name)


def silent(case: HeadCase) -> Findings:
    total, threshold = case.total_weight, case.thresholds.silent_sum
    if total is not None and total < threshold:
        weights, at_most = ("absolute weights", "at most ") if case.signed else ("weights", "")
        words = f"The {weights} of its median row sum to {at_most}{total:.2g}, below {threshold:g}"
        yield "silent", f"{words}, so the head reads no key"


def sink_dominated(case: HeadCase) -> Findings:
    mass = case.number("sink_mass")
    if mass is None:
        yield OPEN, "sink-dominated (no sink mass)"
    elif mass >= case.thresholds.sink_dominated and not _behind_closed_gate(case):
        rest = case.number("effective_keys_without_sink")
        shared = "" if rest is None else f". The rest is spread over {format_keys(rest)} effective keys"
        yield "sink-dominated", f"{format_percent(mass)} of the weight is on {_describe_sink(case)}{shared}"


def _behind_closed_gate(case: HeadCase) -> bool:
    """Whether the model's output gate removes most of what the sink adds; then it does not count as a sink."""
    passed = case.number("gated_sink_mass")
    return passed is not None and passed < case.thresholds.sink_dominated * GATE_OPEN


def frozen(case: HeadCase) -> Findings:
    largest, norm = case.number("max_weight"), case.number("jacobian_norm")
    if largest is None or largest < case.thresholds.frozen_weight:
        return
    if norm is None:
        yield OPEN, "frozen (no Jacobian norm)"
    elif norm <= case.thresholds.frozen_norm * (case.worst_norm or 0.5):
        words = f"The largest weight is {largest:.4f} and the Jacobian norm {norm:.2g}"
        yield "frozen", f"{words}: almost no gradient reaches the logits"


def sensitive(case: HeadCase) -> Findings:
    thresholds, worst = case.thresholds, case.worst_norm
    norm = case.row.get(f"jacobian_norm_q{thresholds.sensitive_quantile:02d}")
    if norm is None or not math.isfinite(norm):
        yield OPEN, "sensitive (no Jacobian norm)"
    elif worst is None:
        yield OPEN, f"sensitive (no worst case is known for {case.runs or 'this normalizer'})"
    elif norm < thresholds.sensitive_norm * worst:
        return
    elif always_near_worst(case.runs, thresholds.sensitive_norm):
        yield OPEN, f"sensitive (even random logits are near the worst case of {case.runs}, {worst:.3g})"
    else:
        share = 100 - thresholds.sensitive_quantile
        words = f"On {share} % of the rows the Jacobian norm is at least {norm:.3g}"
        yield "sensitive", f"{words}, and its worst case is {worst:.3g}"


def dispersed(case: HeadCase) -> Findings:
    """Judge entropy, slope of the gap and horizon.

    For a what-if only the entropy counts: ssmax, for example, increases the slope for any logits.
    """
    thresholds, suffix = case.thresholds, case.suffix
    ratio = case.number(f"entropy_ratio{suffix}")
    if ratio is None or ratio < thresholds.dispersed_entropy:
        return
    slope, error = _gap_slope(case), None if suffix else case.number("gap_slope_error")
    if slope is not None and (slope > thresholds.dispersed_slope or slope + 2 * (error or 0.0) >= 1):
        return
    words = _describe_entropy(case)
    above_floor = _relative_entropy(case, ratio)
    if above_floor is not None and above_floor <= thresholds.near_floor:
        share = format_percent(max(above_floor, 0))
        floor = f"only {share} of the way from the lowest entropy that the logits allow to log n"
        yield "healthy", f"{words}. This is {floor}: the head is about as sharp as it can be"
        return
    if slope is None and not case.what_if:
        yield OPEN, "the slope of the gap (only one length, so entropy alone decides)"
    horizon = case.horizon
    if horizon is None:
        normalizer = case.runs or "this normalizer"
        yield "dispersed", f"{words}. How sharp {normalizer} could be on these logits is not known"
    elif case.n > horizon:
        limit = f"With the logit spread of these rows, its horizon is {_horizon_words(case, horizon)}"
        yield "dispersed-forced", f"{words}. {limit}: no key can get half of the weight"
    else:
        limit = f"With the logit spread of these rows, its horizon is {_horizon_words(case, horizon)}"
        yield "dispersed-by-choice", f"{words}. {limit}: one key could get half of the weight"


RULES = (sink_dominated, frozen, sensitive, dispersed)


def describe_selection(case: HeadCase) -> str:
    """Return the evidence for a head to which no rule applies."""
    largest = case.number(f"max_weight{case.suffix}")
    words = _describe_entropy(case) + ("" if largest is None else f". The largest weight is {largest:.2g}")
    return f"{words}. The head is broad, but it keeps up with the length" if is_broad(case) else words


def is_broad(case: HeadCase) -> bool:
    """Whether a head has a high entropy, also relative to its floor.

    If it is not dispersed, its gap keeps up with n.
    """
    ratio = case.number(f"entropy_ratio{case.suffix}")
    if ratio is None or ratio < case.thresholds.dispersed_entropy:
        return False
    above_floor = _relative_entropy(case, ratio)
    return above_floor is None or above_floor > case.thresholds.near_floor


def is_selecting(row: Row, thresholds: Thresholds) -> bool:
    return row["verdict"] in SELECTING and not is_broad(HeadCase(row=row, thresholds=thresholds, runs=None))


def judged_suffix(row: Row, thresholds: Thresholds) -> str:
    """Return the suffix of the columns to judge by: "" for all keys, "_without_sink" if a sink holds much weight.

    Entropy, slope and horizon use the same keys. Otherwise a sink could make a dispersed head look sharp, or its
    extreme logit could enlarge the spread of the other keys.
    """
    mass = number(row, "sink_mass")
    hides = mass is not None and mass >= thresholds.sink_matters
    return "_without_sink" if hides and number(row, "entropy_ratio_without_sink") is not None else ""


def judged_horizon(row: Row, thresholds: Thresholds) -> float | None:
    """Return the horizon of the median row, at most BEYOND_NUMBERS, among the keys that `judged_suffix` selects.

    None if the normalizer has no horizon: only softmax, also with rescaled logits, has one.
    """
    return _limited_horizon(row, judged_suffix(row, thresholds))


def _limited_horizon(row: Row, suffix: str) -> float | None:
    value = row.get(f"horizon{suffix}")
    return None if value is None or math.isnan(value) else min(float(value), BEYOND_NUMBERS)


@lru_cache(maxsize=4096)
def worst_norm(runs: str | None, n: int) -> float | None:
    """Return the largest Jacobian norm of this normalizer among n keys; None if unknown."""
    normalizer = _registered(runs)
    return None if normalizer is None or n < 2 else normalizer.lipschitz(n)


@lru_cache(maxsize=256)
def _registered(runs: str | None) -> Normalizer | None:
    """Return the row normalizer of this name; None if it is unknown, not registered here, or needs options."""
    try:
        normalizer = None if runs is None else get(runs)
    except (ValueError, TypeError):
        return None
    return normalizer if isinstance(normalizer, Normalizer) else None


@lru_cache(maxsize=4096)
def always_near_worst(runs: str | None, share: float) -> bool:
    """Whether even a random row is as close to the largest Jacobian norm as a sensitive head must be.

    Piecewise linear maps (sparsemax, kneemax, relu) reach their largest norm with any two keys in use. There the norm
    is a property of the map, not of the head.
    """
    worst = worst_norm(runs, NOISE_KEYS)
    if runs is None or not worst:
        return False
    row = torch.randn(NOISE_KEYS, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    try:
        moves = jacobian(lambda logits: normalize(logits, runs), row[None])
    except RuntimeError:  # a map without a gradient
        return False
    return float(torch.linalg.matrix_norm(moves.reshape(NOISE_KEYS, NOISE_KEYS), 2)) >= share * worst


def _describe_sink(case: HeadCase) -> str:
    """Describe the sink: the first key, and a learned sink of the model or the normalizer that took some weight."""
    row_sum = case.number("row_sum")
    first = f"the first of the {case.n:,} keys that it sees" if case.windowed else f"the first of {case.n:,} keys"
    normalizer = _registered(case.runs)
    learned = case.runs == "softmax" or (normalizer is not None and normalizer.sink is not None)
    if not (learned and case.sums_to_one) or row_sum is None or row_sum > 0.995:
        return first
    return f"sinks: {format_percent(1 - row_sum)} on the learned sink, which is not a key, the rest of it on {first}"


def _describe_entropy(case: HeadCase) -> str:
    suffix, slope = case.suffix, _gap_slope(case)
    ratio, mass = case.number(f"entropy_ratio{suffix}"), case.number("sink_mass")
    sink = "the first key of its window" if case.windowed else "the sink"
    among = f"{case.n:,} keys"
    if suffix:
        among = f"the {case.n - 1:,} keys other than {sink} (which has {format_percent(mass)} of the weight)"
    entropy = f"Entropy is {ratio:.2f} of its maximum, log n, among {among}"
    if slope is None:
        return entropy
    rate = minus_sign(f"{slope:z.2f}")
    return f"{entropy}. The effective gap has slope {rate} on log n (1 would keep the largest weight)"


def _horizon_words(case: HeadCase, judged: float) -> str:
    """Describe the judged horizon. If it leaves the sink out, add the one with the sink, which the report shows."""
    if not case.suffix:
        return f"{format_keys(judged)} keys"
    sink, with_sink = "that key" if case.windowed else "the sink", case.number("horizon")
    other = "" if with_sink is None else f" (with it: {format_keys(with_sink)})"
    return f"{format_keys(judged)} keys without {sink}{other}"


def _gap_slope(case: HeadCase) -> float | None:
    """Return the slope to judge by; None for a what-if."""
    slope = None if case.what_if else case.number(f"gap_slope{case.suffix}")
    return case.slope_over_lengths if slope is None and not case.suffix and not case.what_if else slope


def _relative_entropy(case: HeadCase, ratio: float) -> float | None:
    """Return the entropy of the median row on a scale from its floor (0) to log n (1); None if it has no floor."""
    n = _keys_of_median_row(case) - (1 if case.suffix else 0)
    entropy = None if case.suffix else case.number("entropy_nats")
    floor = None if case.suffix else case.number("entropy_floor")
    if case.suffix and case.horizon is not None:
        floor = _entropy_floor(math.log(max(case.horizon - 1, 1.0)), n)
    if floor is None:
        return None
    entropy = ratio * math.log(n) if entropy is None else entropy
    return (entropy - floor) / max(math.log(n) - floor, 1e-12)


def _entropy_floor(spread: float, n: float) -> float:
    """Return `theory.dispersion.entropy_floor` of one head: operations of torch on one number take 0.6 ms in all."""
    if n <= 1:
        return 0.0
    if spread < 1e-2:
        c_minus_one = spread / 2 + spread**2 / 12 - spread**4 / 720
    else:
        c_minus_one = spread / -math.expm1(-spread) - 1
    k = n * c_minus_one * math.exp(-spread) / -math.expm1(-spread) if spread > 0 else n / 2

    def two_level_entropy(at_the_top: int) -> float:
        count = max(min(at_the_top, n - 1), 1)
        low = (n - count) * math.exp(-spread) / count
        return math.log(count) + math.log1p(low) + spread * low / (1 + low)

    return min(two_level_entropy(math.floor(k)), two_level_entropy(math.ceil(k)))


def _keys_of_median_row(case: HeadCase) -> float:
    """Return the keys of the median row, which has fewer than the longest: from its entropy and entropy / log n.

    They are not rounded to a whole number, since rounding would turn a tiny change of the entropy into a jump.
    """
    entropy, ratio = case.number("entropy_nats"), case.number("entropy_ratio")
    if entropy is None or not ratio:
        return case.n
    quotient = math.exp(min(entropy / ratio, 700.0))
    return min(max(quotient, case.row.get("n_low") or 2), case.n)


def verdict_codes(heads: Arrays, thresholds: Thresholds) -> np.ndarray:
    """Return codes of VERDICTS, or NOT_JUDGED; never "undecided".

    heads: the numbers of the median row by column name; n_high, n_low, broken_rows, worst_norm (NaN: unknown);
    near_worst, what_if, signed, sums_to_one and reads_on_average (boolean); slope_over_lengths and gated_sink_mass (NaN
    or missing: none).
    """
    return _codes_by(_Comparison(), heads, thresholds)


def codes_on_both_sides(
    heads: Arrays, thresholds: Thresholds, near: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return `verdict_codes`, the codes beyond the nearest threshold, and the distance to it relative to the threshold.

    The nearest threshold is that of the comparison whose number is closest to it. Where it is farther than `near`, the
    code beyond it is not computed and equals the first.
    """
    comparison = _Comparison()
    codes = _codes_by(comparison, heads, thresholds)
    distance = np.broadcast_to(comparison.nearest, codes.shape)
    close = np.nonzero(distance < near)
    beyond = codes.copy()
    if close[0].size:
        chosen = {name: np.broadcast_to(value, codes.shape)[close] for name, value in heads.items()}
        beyond[close] = _codes_by(_Comparison(reversed_within=distance[close]), chosen, thresholds)
    return codes, beyond, distance


class _Comparison:
    """Compares numbers with thresholds, and keeps the smallest relative distance of any number to its threshold.

    reversed_within: distance up to which comparisons give the opposite answer (default: none does).
    """

    def __init__(self, reversed_within: np.ndarray | None = None) -> None:
        self.nearest = np.array(np.inf)
        self.reversed_within = reversed_within

    def at_least(self, numbers: np.ndarray, threshold: float | np.ndarray) -> np.ndarray:
        return self._answer(numbers >= threshold, numbers, threshold)

    def above(self, numbers: np.ndarray, threshold: float | np.ndarray) -> np.ndarray:
        return self._answer(numbers > threshold, numbers, threshold)

    def _answer(self, holds: np.ndarray, numbers: np.ndarray, threshold: float | np.ndarray) -> np.ndarray:
        distance = np.asarray(numbers - threshold)
        np.abs(distance, out=distance)
        distance *= 1 / np.abs(threshold)  # a division of all resamples takes five times as long
        self.nearest = np.fmin(self.nearest, distance)  # NaN for missing numbers, and for 0 and the threshold 0
        if self.reversed_within is None:
            return np.asarray(holds)
        # Logarithms of the same number may differ in the last bit.
        return np.asarray(holds ^ (distance <= self.reversed_within + 1e-12))


def _codes_by(compare: _Comparison, heads: Arrays, thresholds: Thresholds) -> np.ndarray:
    if not np.size(heads["n_high"]):
        return np.zeros(np.shape(heads["entropy_ratio"]), dtype=np.int64)
    with np.errstate(all="ignore"):
        return _compute_codes({name: np.asarray(value) for name, value in heads.items()}, thresholds, compare)


def _compute_codes(heads: Arrays, t: Thresholds, compare: _Comparison) -> np.ndarray:
    ratio_all, sink = _finite(heads["entropy_ratio"]), _finite(heads["sink_mass"])
    beside = _finite(heads["entropy_ratio_without_sink"])
    hidden = compare.at_least(sink, t.sink_matters) & ~np.isnan(beside)
    ratio = np.where(hidden, beside, ratio_all)
    n = np.asarray(heads["n_high"], dtype=np.float64)
    horizon = np.minimum(np.where(hidden, heads["horizon_without_sink"], heads["horizon"]), BEYOND_NUMBERS)
    norm, worst = _finite(heads["jacobian_norm"]), _finite(heads["worst_norm"])
    high_norm = _finite(heads[f"jacobian_norm_q{t.sensitive_quantile:02d}"])

    gated = _finite(heads.get("gated_sink_mass", np.array(np.nan)))

    above_floor = _relative_entropies(heads, hidden, ratio, horizon, n)
    smeared = compare.at_least(ratio, t.dispersed_entropy) & ~_keeps_up(heads, hidden, t, compare)
    smeared &= compare.above(above_floor, t.near_floor) | np.isnan(above_floor)
    half_if_unknown = np.where(np.isnan(worst) | (worst == 0), 0.5, worst)
    reaches = compare.at_least(horizon, n)
    total = _total_weights(heads, n)
    holds = {
        "broken": heads["broken_rows"] > 0,
        "silent": ~compare.at_least(total, t.silent_sum) & ~np.isnan(total),
        "sink-dominated": compare.at_least(sink, t.sink_dominated) & ~(gated < t.sink_dominated * GATE_OPEN),
        "frozen": compare.at_least(_finite(heads["max_weight"]), t.frozen_weight)
        & ~compare.above(norm, t.frozen_norm * half_if_unknown)
        & ~np.isnan(norm),
        "dispersed-forced": smeared & ~reaches & ~np.isnan(horizon),
        "dispersed-by-choice": smeared & reaches,
        "dispersed": smeared & np.isnan(horizon),
        "sensitive": compare.at_least(high_norm, t.sensitive_norm * worst) & ~heads["near_worst"].astype(bool),
    }
    shape = np.broadcast_shapes(*(value.shape for value in holds.values()))
    codes = np.full(shape, CODE["healthy"])
    for name in reversed(list(holds)):  # the first verdict that applies is written last
        np.copyto(codes, CODE[name], where=holds[name])
    np.copyto(codes, NOT_JUDGED, where=np.isnan(ratio_all) & ~holds["broken"] & ~holds["silent"])
    return codes


def _total_weights(heads: Arrays, n: np.ndarray) -> np.ndarray:
    """Return `HeadCase.total_weight` for arrays; NaN if it is not known."""
    sums = _finite(heads["row_sum"])
    bounds = _finite(heads["max_weight"]) * _finite(heads["effective_keys"])
    absolute = np.where(np.isnan(bounds), np.abs(sums), bounds)
    totals = np.where(heads["signed"].astype(bool), absolute, np.where(heads["sums_to_one"].astype(bool), 1.0, sums))
    totals = np.where(heads["reads_on_average"].astype(bool), 1.0, totals)
    return np.where((n < 2) | np.isnan(sums), np.nan, totals)


def _keeps_up(heads: Arrays, hidden: np.ndarray, t: Thresholds, compare: _Comparison) -> np.ndarray:
    slope_all = _finite(heads["gap_slope"])
    slope_all = np.where(np.isnan(slope_all), heads["slope_over_lengths"], slope_all)
    slope = np.where(hidden, _finite(heads["gap_slope_without_sink"]), slope_all)
    slope = np.where(heads["what_if"].astype(bool), np.nan, slope)
    error = np.where(hidden, 0.0, np.nan_to_num(_finite(heads["gap_slope_error"])))
    return np.asarray(compare.above(slope, t.dispersed_slope) | compare.at_least(slope + 2 * error, 1.0))


def _relative_entropies(
    heads: Arrays, hidden: np.ndarray, ratio: np.ndarray, horizon: np.ndarray, n: np.ndarray
) -> np.ndarray:
    """Return `_relative_entropy` for arrays; NaN if there is no floor."""
    nats, total_ratio = _finite(heads["entropy_nats"]), _finite(heads["entropy_ratio"])
    low = np.maximum(np.asarray(heads["n_low"], dtype=np.float64), 0)
    low = np.where(np.isnan(low) | (low == 0), 2, low)
    unknown = np.isnan(nats) | np.isnan(total_ratio) | (total_ratio == 0)
    log_n = np.log(n)
    log_keys = np.where(unknown, log_n, np.minimum(np.maximum(nats / total_ratio, np.log(low)), log_n))
    floor = _finite(heads["entropy_floor"])
    if hidden.any():
        hidden, horizon, log_keys, floor = map(np.array, np.broadcast_arrays(hidden, horizon, log_keys, floor))
        keys = np.exp(log_keys[hidden]) - 1
        log_keys[hidden] = np.log(keys)
        spreads = np.log(np.maximum(horizon[hidden] - 1, 1.0))
        beside = entropy_floor(torch.from_numpy(spreads), torch.from_numpy(np.fmax(keys, 1.0))).numpy()
        floor[hidden] = np.where(np.isnan(spreads), np.nan, beside)  # of one key it is 0, whatever the spread
    entropy = np.where(hidden | np.isnan(nats), ratio * log_keys, nats)
    return np.asarray((entropy - floor) / np.maximum(log_keys - floor, 1e-12))


def _finite(values: np.ndarray) -> np.ndarray:
    values = np.asarray(values, dtype=np.float64)
    finite = np.isfinite(values)
    return values if finite.all() else np.where(finite, values, np.nan)
