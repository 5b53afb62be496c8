"""Judge every head: its verdict by the rules, the evidence as a sentence, its confidence, and its saturation.

`judge_all` is the entry point. `judge_head` applies the rules (rules.py) to one head, `assess_certainty` (certainty.py)
gives the confidence, `saturation` answers whether a head distinguishes its keys.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from scipy.special import ndtr, stdtrit

from attnorm.analysis.collect_rows import SHORTEST_IN_SLOPE
from attnorm.analysis.tables import BLOCKS, HEAD_KEY, VERDICT_COLUMNS, WINDOW_NUMBERS, WINDOWS
from attnorm.analysis.verdicts.certainty import Certainty, HeadArrays, assess_certainty
from attnorm.analysis.verdicts.reach import circuit_words
from attnorm.analysis.verdicts.rows import head_rows, sees_fewer_keys
from attnorm.analysis.verdicts.rules import (
    OPEN,
    RULES,
    HeadCase,
    always_near_worst,
    describe_selection,
    judged_suffix,
    silent,
)
from attnorm.analysis.verdicts.thresholds import UNDECIDED, Thresholds
from attnorm.report_data import VERDICTS, Row, number
from attnorm.text import format_keys, format_percent, minus_sign

ONE_SIDED = 0.95  # level of each of the two tests for saturation

_HEAD = tuple(name for name, _ in HEAD_KEY)
_OVER_LENGTHS = tuple(name for name in _HEAD if name != "length")


@dataclass(frozen=True)
class Judgment:
    """The verdict on one head, before its confidence is considered."""

    verdict: str | None  # None: the head has no number to judge by
    flags: tuple[str, ...]  # every verdict that applies, in the order of VERDICTS
    evidence: str


def judge_all(
    heads: pa.Table,
    by_length: pa.Table,
    top_n: pa.Table,
    thresholds: Thresholds = Thresholds(),  # noqa: B008  # frozen
    *,
    windows: pa.Table | None = None,
    blocks: pa.Table | None = None,
    model_runs: str | None = "softmax",
) -> tuple[pa.Table, pa.Table]:
    """Return `heads` with VERDICT_COLUMNS, and `windows` with the verdict of each window.

    windows, blocks: tables from which confidence is computed; without them it is NaN and no head is undecided.
    model_runs: name of the normalizer that the model runs, which is not softmax in a patched model; None if unknown.
    A head has a ceiling if its row has a horizon.
    """
    slopes, sets = _slopes_over_lengths(by_length), _rows_by_head(top_n)
    rows = head_rows(heads)
    models = {_key_of(row, _OVER_LENGTHS[:1]) for row in rows if row["normalizer"] == "model"}
    cases = [
        HeadCase(
            row=row,
            thresholds=thresholds,
            runs=model_runs if row["normalizer"] == "model" else row["normalizer"],
            slope_over_lengths=slopes.get(_key_of(row, _OVER_LENGTHS)),
            what_if=row["normalizer"] != "model" and _key_of(row, _OVER_LENGTHS[:1]) in models,
            windowed=behind,
        )
        for row, behind in zip(rows, sees_fewer_keys(rows, rows), strict=True)
    ]
    windows = WINDOWS.empty_table() if windows is None or not rows else windows
    blocks = BLOCKS.empty_table() if blocks is None else blocks
    certainties, by_window = assess_certainty(rows, _as_arrays(heads, cases), windows, blocks, thresholds)
    judged = [
        _verdict_columns(case, certainty, saturation(case.row, sets.get(_key_of(case.row, _HEAD), ()), thresholds))
        for case, certainty in zip(cases, certainties, strict=True)
    ]
    present = set(heads.column_names)
    plain = heads.drop_columns([name for name, _ in VERDICT_COLUMNS if name in present])
    for name, kind in VERDICT_COLUMNS:
        plain = plain.append_column(name, pa.array([verdict_columns[name] for verdict_columns in judged], type=kind))
    index = windows.schema.get_field_index("verdict")
    return plain, windows.set_column(index, WINDOWS.field("verdict"), pa.array(by_window, pa.string()))


def judge_head(case: HeadCase) -> Judgment:
    """Judge one head by its numbers, without regard to their uncertainty."""
    broken = case.row.get("broken_rows") or 0
    if broken:
        rows = f"{broken:,} measured row{'s' * (broken != 1)}"
        words = f"{rows} had logits or weights that are not finite; all means leave out such rows."
        return Judgment("broken", ("broken",), words)
    for verdict, evidence in silent(case):
        return Judgment(verdict, (verdict,), _sentence(case, evidence))
    if case.number("entropy_ratio") is None:
        return Judgment(None, (), "Not judged: no row with at least two visible keys.")
    findings = [finding for rule in RULES for finding in rule(case)]
    words_by_verdict = {name: words for name, words in findings if name != OPEN}
    flags = tuple(name for name in VERDICTS if name in words_by_verdict and name != "healthy")
    verdict = flags[0] if flags else "healthy"
    unknown = "; ".join(words for name, words in findings if name == OPEN)
    evidence = words_by_verdict.get(verdict) or describe_selection(case)
    return Judgment(verdict, flags, _sentence(case, f"{evidence}{'. Not judged: ' if unknown else ''}{unknown}"))


def _sentence(case: HeadCase, evidence: str) -> str:
    circuit = circuit_words(case.row)
    return f"{circuit[0].upper()}{circuit[1:]}. {evidence}." if circuit else f"{evidence}."


@dataclass(frozen=True)
class Saturation:
    """Whether a head is saturated, and the numbers of the test."""

    saturation: str  # "saturated", "distinguishes" or "not judged"
    words: str  # the reason, without a full stop
    saturation_top_n: int | None = None
    saturation_excess: float = math.nan
    saturation_low: float = math.nan
    saturation_high: float = math.nan
    saturation_power: float = math.nan


def saturation(row: Row, top_n: Sequence[Row], thresholds: Thresholds) -> Saturation:
    """Test whether a head is saturated. The answer is independent of its verdict.

    The excess is separability minus its null (permuted weights) over the sampled rows of all windows.
    Two one-sided tests of 5 % each give its 90 % interval:

        saturated       the whole interval lies below the margin: shown to be no better than the null
        distinguishes   most keys are distinguishable (separability >= separable), or the whole interval lies above 0
        not judged      anything else: not measured, a single key in use, or too few rows to show either

    The power is the probability that a head without excess is shown to be saturated, given the error of these rows.
    row: the head's row of the heads table. top_n: the head's rows of the top-N table.
    """
    by_n = {top_n_row["top_n"]: top_n_row for top_n_row in top_n if number(top_n_row, "separability") is not None}
    used = number(row, f"effective_keys{judged_suffix(row, thresholds)}") if by_n else None
    if used is None:
        return Saturation("not judged", "separability was not measured")
    # A single key is always distinguishable, and keys without weight are not selected.
    judged = [N for N in by_n if 1 < N <= min(used, thresholds.saturation_top_n)]
    if not judged:
        return Saturation("not judged", f"it uses {used:.2g} keys, fewer than any measured N above 1")
    N = max(judged)
    top_n_row = by_n[N]
    measured, null = number(top_n_row, "separability"), number(top_n_row, "separability_null")
    error, rows = number(top_n_row, "separability_excess_error"), int(top_n_row.get("rows") or 0)
    if measured is None or null is None:
        return Saturation("not judged", "separability has no null", N)
    by_chance = f"{format_percent(null)} with permuted weights"
    shares = f"{format_percent(measured)} of its top {N} keys are distinguishable, {by_chance}"
    excess = measured - null
    # A mean of shares such as 4/5 may round to either side of a threshold that it equals.
    most = round(measured, 6) >= thresholds.separable
    if error is None:
        if most:
            return Saturation("distinguishes", shares, N, excess)
        return Saturation("not judged", f"{shares}; too few rows for an interval", N, excess)
    width = float(stdtrit(max(rows - 1, 1), ONE_SIDED)) * error
    low, high = excess - width, excess + width
    power = float(ndtr((thresholds.saturation_margin - width) / error)) if error > 0 else 1.0
    interval = f"{shares}: an excess of {excess:.2f} ({low:.2f} to {high:.2f})"
    numbers = (N, excess, low, high, power)
    if most:
        return Saturation("distinguishes", interval, *numbers)
    if high < thresholds.saturation_margin:
        return Saturation("saturated", f"{interval}, below the margin of {thresholds.saturation_margin:g}", *numbers)
    if low > 0:
        return Saturation("distinguishes", interval, *numbers)
    return Saturation("not judged", f"{interval}; the power of these rows is {format_percent(power)}", *numbers)


def _verdict_columns(case: HeadCase, certainty: Certainty, saturated: Saturation) -> dict[str, Any]:
    """Return the values of VERDICT_COLUMNS for one head."""
    judgment, thresholds = judge_head(case), case.thresholds
    if "silent" in judgment.flags:
        saturated = Saturation("not judged", "its weights sum to almost nothing")
    settled = judgment.verdict in (None, "broken")
    unsure = certainty.confidence < thresholds.confidence or certainty.agreement < thresholds.agreement  # False for NaN
    verdict = UNDECIDED if unsure and not settled else judgment.verdict
    words = "" if settled else _describe_certainty(judgment.verdict, certainty, undecided=verdict == UNDECIDED)
    evidence = judgment.evidence
    if verdict == UNDECIDED:
        evidence = f"Undecided, leaning to {judgment.verdict}. {evidence}"
    evidence += words
    return {
        "verdict": verdict,
        "flags": list(judgment.flags),
        "evidence": evidence,
        "leaning": judgment.verdict,
        "confidence": 1.0 if judgment.verdict == "broken" else certainty.confidence,
        "agreement": certainty.agreement,
        "deciding": None if settled else certainty.deciding,
        "deciding_value": certainty.value,
        "deciding_low": certainty.low,
        "deciding_high": certainty.high,
        "deciding_threshold": certainty.threshold,
        **{name: value for name, value in vars(saturated).items() if name != "words"},
    }


def _describe_certainty(verdict: str | None, certainty: Certainty, *, undecided: bool) -> str:
    if math.isnan(certainty.confidence):
        return ""
    parts = []
    if certainty.windows > 1:
        judged = verdict if undecided else "this verdict"
        parts.append(f"{certainty.agreeing} of {certainty.windows} windows give {judged}")
    if undecided and certainty.other:
        share = f"{format_percent(certainty.confidence)} of the bootstrap resamples give {verdict}"
        parts.append(f"{share}; the most frequent other verdict is {certainty.other}")
    if math.isfinite(certainty.low):
        shown = format_keys if certainty.deciding.startswith("horizon") else _format_number
        bounds = f"{shown(certainty.low)} to {shown(certainty.high)}"
        limit = f" (threshold {shown(certainty.threshold)})" if math.isfinite(certainty.threshold) else ""
        parts.append(f"95 % bootstrap interval of {_deciding_words(certainty.deciding)}: {bounds}{limit}")
    return "".join(f" {part}." for part in parts)


_DECIDING_WORDS = {
    "sink_mass": "the weight on the sink",
    "max_weight": "the largest weight",
    "row_sum": "the sum of the weights",
    "horizon": "the horizon",
    "entropy_ratio": "entropy / log n",
    "gap_slope": "the slope of the gap",
}


def _deciding_words(column: str) -> str:
    """Describe the number in a column of `deciding_numbers`."""
    metric, is_quantile, quantile = column.partition("_q")
    if is_quantile:
        return f"the Jacobian norm that {100 - int(quantile)} % of the rows reach"
    words = _DECIDING_WORDS[metric.removesuffix("_without_sink")]
    return f"{words} without the sink" if metric.endswith("_without_sink") else words


def _format_number(value: float) -> str:
    return minus_sign(f"{value:.2f}" if abs(value) >= 0.005 else f"{value:.1g}")


def _as_arrays(heads: pa.Table, cases: Sequence[HeadCase]) -> HeadArrays:
    present = set(heads.column_names)

    def column(name: str) -> np.ndarray:
        """Return the values of the median row; not finite ones become NaN, except infinite horizons."""
        if name not in present:
            return np.full(len(cases), np.nan)
        values = heads[name].to_numpy(zero_copy_only=False).astype(np.float64)
        return values if name.startswith("horizon") else np.where(np.isfinite(values), values, np.nan)

    quantiles = {f"jacobian_norm_q{case.thresholds.sensitive_quantile:02d}" for case in cases}
    numbers = {name: column(name) for name in dict.fromkeys([*WINDOW_NUMBERS, *sorted(quantiles)])}
    fixed: dict[str, list[Any]] = {
        "n_high": [case.row["n_high"] or 0 for case in cases],
        "n_low": [case.row.get("n_low") or 0 for case in cases],
        "broken_rows": [case.row.get("broken_rows") or 0 for case in cases],
        "worst_norm": [_none_to_nan(case.worst_norm) for case in cases],
        "gated_sink_mass": [_none_to_nan(case.number("gated_sink_mass")) for case in cases],
        "near_worst": [always_near_worst(case.runs, case.thresholds.sensitive_norm) for case in cases],
        "what_if": [case.what_if for case in cases],
        "signed": [case.signed for case in cases],
        "sums_to_one": [case.sums_to_one for case in cases],
        "reads_on_average": [case.reads_on_average for case in cases],
        "slope_over_lengths": [_none_to_nan(case.slope_over_lengths) for case in cases],
    }
    return HeadArrays(numbers, {name: np.array(values) for name, values in fixed.items()})


def _none_to_nan(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _key_of(row: Mapping[str, Any], names: Sequence[str]) -> tuple[Any, ...]:
    return tuple(row[name] for name in names)


def _rows_by_head(top_n: pa.Table) -> dict[tuple[Any, ...], list[Row]]:
    """Return the rows of each head with a separability."""
    columns = [*_HEAD, "top_n", "rows", "separability", "separability_null", "separability_excess_error"]
    rows: dict[tuple[Any, ...], list[Row]] = {}
    present = set(top_n.column_names)
    if "separability" not in present:
        return rows
    measured = top_n.select([name for name in columns if name in present]).filter(pc.is_finite(top_n["separability"]))
    for row in measured.to_pylist():
        rows.setdefault(_key_of(row, _HEAD), []).append(row)
    return rows


def _slopes_over_lengths(by_length: pa.Table) -> dict[tuple[Any, ...], float]:
    """Return each head's slope of the gap over the longest rows of several lengths.

    A bidirectional model has no other slope, because all its rows see equally many keys.
    """
    if len(pc.unique(by_length["length"])) < 2:
        return {}
    longest: dict[tuple[Any, ...], dict[int, tuple[float, float]]] = {}
    for row in by_length.select([*_HEAD, "n", "effective_gap"]).to_pylist():
        n, gap = number(row, "n"), number(row, "effective_gap")
        if n is None or gap is None or n < SHORTEST_IN_SLOPE:
            continue
        points = longest.setdefault(_key_of(row, _OVER_LENGTHS), {})
        points[row["length"]] = max(points.get(row["length"], (0.0, 0.0)), (math.log(n), gap))
    slopes = {}
    for key, points in longest.items():
        x, y = np.array(list(points.values())).T
        if np.ptp(x) > math.log(1.4):  # a range below half an octave shows no growth
            slopes[key] = float(np.polyfit(x, y, 1)[0])
    return slopes
