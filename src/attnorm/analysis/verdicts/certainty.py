"""Confidence of a verdict: how many windows agree, and a bootstrap of the numbers that the head is judged by.

The bootstrap draws units with replacement: windows of the text, or blocks of consecutive rows if there are fewer than
four windows. Every resample is judged by the same rules as the head. The confidence of a verdict is the share of
resamples that have it. The interval of a number is between its 2.5 % and 97.5 % quantiles over resamples.

A resample on a threshold would have either verdict by rounding alone, so half of its vote is for the verdict on the
other side. That part falls to 0 where every number is NEAR_THRESHOLD or more, relative to the threshold, away from the
threshold that it is compared with. So confidence is continuous: rounding errors, such as those between a CPU and a GPU,
cannot move it by a whole vote.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from attnorm.analysis.tables import BLOCK_METRICS, BLOCK_NORM, HEAD_KEY
from attnorm.analysis.verdicts.rows import Row
from attnorm.analysis.verdicts.rules import NOT_JUDGED, codes_on_both_sides, judged_suffix, verdict_codes
from attnorm.analysis.verdicts.thresholds import DISPERSED, VERDICTS, Thresholds

RESAMPLES = 400
ENOUGH_WINDOWS = 4  # for a bootstrap over windows
HEADS_AT_ONCE = 256
NEAR_THRESHOLD = 1e-3  # relative; 100 times the rounding errors of float32, a small part of what windows differ by
SLOPES = ("gap_slope", "gap_slope_without_sink")
HORIZONS = ("horizon", "horizon_without_sink")
LARGEST_LOG = 690.0

_KEY = tuple(name for name, _ in HEAD_KEY)
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Certainty:
    """Confidence of one head's verdict, and the number that decides between it and the nearest other verdict."""

    confidence: float  # NaN if nothing could be resampled
    agreement: float  # share of windows with the same verdict; NaN with one window
    windows: int
    agreeing: int
    other: str | None  # most frequent other verdict of the resamples
    deciding: str  # column of the deciding number; value, interval and threshold follow
    value: float
    low: float
    high: float
    threshold: float


@dataclass(frozen=True)
class HeadArrays:
    """The arguments of `verdict_codes` for all heads, (H,) each."""

    numbers: Arrays  # columns that are resampled
    fixed: Arrays  # everything else, such as n_high, worst_norm and what_if


def assess_certainty(
    rows: Sequence[Row], judged: HeadArrays, windows: pa.Table, blocks: pa.Table, thresholds: Thresholds
) -> tuple[list[Certainty], list[str | None]]:
    """Return the certainty of each head, and the verdict of each row of `windows`."""
    index_of = {tuple(row[name] for name in _KEY): index for index, row in enumerate(rows)}
    codes = verdict_codes({**judged.numbers, **judged.fixed}, thresholds)
    by_window = _judge_windows(windows, index_of, judged, thresholds)
    certainties: list[Certainty] = []
    for start in range(0, len(rows), HEADS_AT_ONCE):
        batch = slice(start, start + HEADS_AT_ONCE)
        resampled = _resample(batch, judged, by_window, _block_medians(blocks, index_of, batch, len(rows)))
        part_codes, beyond, distances = codes_on_both_sides(
            {**resampled, **{k: v[batch, None] for k, v in judged.fixed.items()}}, thresholds, NEAR_THRESHOLD
        )
        confidences = _share_of_votes(codes[batch, None], part_codes, beyond, distances)
        for offset, row in enumerate(rows[batch]):
            head_numbers = {name: value[offset] for name, value in resampled.items()}
            certainties.append(
                _certainty_of_head(
                    row,
                    start + offset,
                    codes,
                    part_codes[offset],
                    float(confidences[offset]),
                    head_numbers,
                    by_window,
                    judged,
                    thresholds,
                )
            )
    return certainties, by_window.verdicts


@dataclass(frozen=True)
class _Windows:
    """The table of windows as arrays, with verdicts."""

    owner: np.ndarray  # index of the head of each row of the table
    codes: np.ndarray  # verdict of each row
    units: Arrays  # (H, W) by column; NaN if a head has fewer windows
    count: np.ndarray  # (H,): windows of each head
    verdicts: list[str | None]


def _judge_windows(
    windows: pa.Table, index_of: Mapping[Any, int], judged: HeadArrays, thresholds: Thresholds
) -> _Windows:
    heads = len(index_of)
    owner = _head_indices(windows, index_of)
    numbers = {name: _column(windows, name, judged.numbers[name][owner]) for name in judged.numbers}
    fixed = {name: value[owner] for name, value in judged.fixed.items()}
    for name in ("broken_rows", "n_low", "n_high", "worst_norm"):
        fixed[name] = _column(windows, name, fixed[name])
    codes = verdict_codes({**numbers, **fixed}, thresholds) if len(owner) else np.zeros(0, dtype=int)
    slot = _indices_within_heads(owner)
    width = int(slot.max(initial=-1)) + 1
    units = {name: np.full((heads, width), np.nan) for name in numbers}
    for name, value in numbers.items():
        units[name][owner, slot] = value
    verdicts = [None if code == NOT_JUDGED else VERDICTS[code] for code in codes.tolist()]
    return _Windows(owner, codes, units, np.bincount(owner, minlength=heads), verdicts)


def _block_medians(blocks: pa.Table, index_of: Mapping[Any, int], batch: slice, heads: int) -> Arrays:
    """Return the medians of each head's blocks, (heads, blocks) by column; empty without blocks."""
    owner = _head_indices(blocks, index_of)
    slot = _indices_within_heads(owner)
    width = int(slot.max(initial=-1)) + 1
    units = {}
    for name in (*BLOCK_METRICS, BLOCK_NORM):
        values = np.full((heads, width), np.nan)
        values[owner, slot] = _column(blocks, name)
        units[name] = values[batch]
    return units


def _resample(batch: slice, judged: HeadArrays, windows: _Windows, blocks: Arrays) -> Arrays:
    """Return the numbers of each head in each resample, (heads, RESAMPLES); unchanged if there are no units."""
    generator = np.random.default_rng(0)
    numbers = {name: value[batch] for name, value in judged.numbers.items()}
    many = windows.count[batch] >= ENOUGH_WINDOWS
    width = next(iter(windows.units.values())).shape[1]
    depth = next(iter(blocks.values())).shape[1]
    times = RESAMPLES if depth or many.any() else 1
    draws = _draw_counts(generator, width, times)
    block_draws = _draw_counts(generator, depth, times)
    noise = generator.standard_normal(times)
    has_blocks = np.isfinite(blocks["entropy_ratio"]).any(1) if depth else np.zeros(len(many), dtype=bool)
    error = np.where(has_blocks, np.nan_to_num(numbers["gap_slope_error"]), 0.0)
    resampled = {}
    for name, value in numbers.items():
        logarithmic = name in HORIZONS
        if many.all():
            within = np.zeros(1)  # not used
        elif name in SLOPES:
            within = value[:, None] + error[:, None] * noise
        elif name in blocks:
            within = _clip_at_zero(_shift_by_units(value, blocks[name], block_draws, logarithmic))
        else:
            within = np.repeat(value[:, None], times, axis=1)
        if many.any():
            over_windows = _shift_by_units(value, windows.units[name][batch], draws, logarithmic)
            over_windows = over_windows if name in SLOPES else _clip_at_zero(over_windows)
            within = np.where(many[:, None], over_windows, within)
        resampled[name] = within
    return resampled


def _shift_by_units(value: np.ndarray, units: np.ndarray, counts: np.ndarray, logarithmic: bool) -> np.ndarray:
    """Return the head's value plus the change of its units' mean in each resample."""
    if not units.shape[1]:
        return np.repeat(value[:, None], counts.shape[0], axis=1)
    with np.errstate(all="ignore"):
        if logarithmic:
            value, units = (np.minimum(np.log(np.maximum(numbers, 1e-300)), LARGEST_LOG) for numbers in (value, units))
        finite = np.isfinite(units)
        if (
            finite.all() and np.isfinite(value).all()
        ):  # the usual case, with three arrays of all resamples instead of ten
            moved: np.ndarray = units @ counts.T
            moved /= units.shape[1]
            moved += value[:, None]  # same order of operations as below, so that results are equal bit for bit
            moved -= (units.sum(1) / units.shape[1])[:, None]
            return np.exp(moved, out=moved) if logarithmic else moved
        filled = np.where(finite, units, 0.0)
        mean = filled.sum(1) / finite.sum(1)
        drawn = (filled @ counts.T) / (finite.astype(float) @ counts.T)
        moved = value[:, None] + np.where(np.isfinite(drawn), drawn, mean[:, None]) - mean[:, None]
        moved = np.where(np.isfinite(moved), moved, value[:, None])
        return np.exp(moved) if logarithmic else moved


def _clip_at_zero(values: np.ndarray) -> np.ndarray:
    return np.where(values < 0, 0.0, values)  # shares, entropies, norms and horizons; NaN stays


def _draw_counts(generator: np.random.Generator, units: int, times: int) -> np.ndarray:
    """Return how often each unit is drawn in each resample, (times, units)."""
    if not units:
        return np.zeros((times, 0))
    return generator.multinomial(units, [1 / units] * units, size=times).astype(np.float64)


def _share_of_votes(verdict: np.ndarray, codes: np.ndarray, beyond: np.ndarray, distances: np.ndarray) -> np.ndarray:
    """Return the share of votes for each head's verdict over its resamples.

    codes, beyond, distances: as `codes_on_both_sides` returns them. The square keeps a vote near one half around the
    threshold, for numbers of many resamples that equal it.
    """
    for_other = (1 - np.minimum(distances / NEAR_THRESHOLD, 1.0) ** 2) / 2
    votes = np.where(codes == verdict, 1 - for_other, 0.0) + np.where(beyond == verdict, for_other, 0.0)
    return np.asarray(votes.mean(1))


def _certainty_of_head(
    row: Row,
    index: int,
    codes: np.ndarray,
    resampled: np.ndarray,
    confidence: float,
    numbers: Arrays,
    windows: _Windows,
    judged: HeadArrays,
    thresholds: Thresholds,
) -> Certainty:
    """Compute the certainty of one head.

    resampled, numbers: its verdict code in each resample, and its numbers. confidence: share of their votes.
    """
    code = int(codes[index])
    window_codes = windows.codes[windows.owner == index] if len(windows.owner) else np.zeros(0, dtype=int)
    agreeing, count = int((window_codes == code).sum()), len(window_codes)
    others = resampled[resampled != code]
    other = VERDICTS[int(np.bincount(others[others >= 0]).argmax())] if (others >= 0).any() else None
    deciding, threshold = deciding_number(
        VERDICTS[code] if code >= 0 else None, other, row, numbers, judged, index, thresholds
    )
    values = numbers[deciding]
    moved = bool(np.ptp(np.nan_to_num(values, posinf=0.0, neginf=0.0)) > 0)
    low, high = (_quantile(values, share) for share in (0.025, 0.975)) if moved else (np.nan, np.nan)
    resampling = any(np.ptp(np.nan_to_num(value, posinf=0.0, neginf=0.0)) > 0 for value in numbers.values())
    return Certainty(
        confidence=confidence if resampling else float("nan"),
        agreement=agreeing / count if count > 1 else float("nan"),
        windows=max(count, 1),
        agreeing=agreeing,
        other=other,
        deciding=deciding,
        value=float(judged.numbers[deciding][index]),
        low=float(low),
        high=float(high),
        threshold=threshold,
    )


def deciding_number(
    verdict: str | None,
    other: str | None,
    row: Row,
    numbers: Arrays,
    judged: HeadArrays,
    index: int,
    thresholds: Thresholds,
) -> tuple[str, float]:
    """Return the column that decides between a verdict and the nearest other one, and its threshold."""
    verdicts, suffix = (verdict, other), judged_suffix(row, thresholds)
    if "sink-dominated" in verdicts:
        return "sink_mass", thresholds.sink_dominated
    if "frozen" in verdicts:
        return "max_weight", thresholds.frozen_weight
    if "sensitive" in verdicts:
        worst = float(judged.fixed["worst_norm"][index])
        return f"jacobian_norm_q{thresholds.sensitive_quantile:02d}", thresholds.sensitive_norm * worst
    if verdict in DISPERSED and other in DISPERSED:
        return f"horizon{suffix}", float(judged.fixed["n_high"][index])
    ratio = f"entropy_ratio{suffix}"
    slope = f"gap_slope{suffix}"
    by_slope = other is not None and not judged.fixed["what_if"][index] and np.isfinite(numbers[slope]).any()
    if by_slope and _quantile(numbers[ratio], 0.025) > thresholds.dispersed_entropy:
        return slope, thresholds.dispersed_slope
    return ratio, thresholds.dispersed_entropy


def _quantile(values: np.ndarray, share: float) -> float:
    """Return the same as numpy.nanquantile, ten times as fast for a few hundred numbers."""
    ordered = np.sort(values[~np.isnan(values)])
    if not len(ordered):
        return float("nan")
    position = share * (len(ordered) - 1)
    below = int(position)
    low, high = float(ordered[below]), float(ordered[min(below + 1, len(ordered) - 1)])
    return low if low == high else low + (position - below) * (high - low)


def _head_indices(table: pa.Table, index_of: Mapping[Any, int]) -> np.ndarray:
    if not table.num_rows:
        return np.zeros(0, dtype=np.int64)
    keys = zip(*(table[name].to_pylist() for name in _KEY), strict=True)
    return np.array([index_of[key] for key in keys], dtype=np.int64)  # every window and block belongs to a head


def _indices_within_heads(owner: np.ndarray) -> np.ndarray:
    """Return the index of each row among the rows of the same head."""
    order = np.argsort(owner, kind="stable")
    slot = np.zeros(len(owner), dtype=np.int64)
    slot[order] = np.arange(len(owner)) - np.searchsorted(owner[order], owner[order])
    return slot


def _column(table: pa.Table, name: str, otherwise: np.ndarray | None = None) -> np.ndarray:
    if name not in table.column_names:
        return np.full(table.num_rows, np.nan) if otherwise is None else otherwise
    return np.asarray(table[name].to_numpy(zero_copy_only=False), dtype=np.float64)
