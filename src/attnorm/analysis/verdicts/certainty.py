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
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from attnorm.analysis.tables import BLOCK_METRICS, BLOCK_NORM, HEAD_KEY
from attnorm.analysis.verdicts.rules import CODE, NOT_JUDGED, codes_on_both_sides, verdict_codes
from attnorm.analysis.verdicts.thresholds import DISPERSED, Thresholds
from attnorm.engines.execution import each_in_a_thread
from attnorm.report_data import VERDICTS, Row

RESAMPLES = 400
ENOUGH_WINDOWS = 4  # for a bootstrap over windows
HEADS_AT_ONCE = 256
NEAR_THRESHOLD = 1e-3  # relative; 100 times the rounding errors of float32, a small part of what windows differ by
SLOPES = ("gap_slope", "gap_slope_without_sink")
HORIZONS = ("horizon", "horizon_without_sink")
LARGEST_LOG = 690.0

_KEY = tuple(name for name, _ in HEAD_KEY)
Arrays = dict[str, np.ndarray]


class Certainty(NamedTuple):
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
    by_block = _block_medians(blocks, index_of)

    def assess(batch: slice) -> list[Certainty]:
        resampled = _resample(batch, judged, by_window, by_block)
        is_silent, with_sums = codes[batch] == CODE["silent"], _has_row_sums(batch, by_window, by_block)
        known = np.where(is_silent, with_sums, _any_moves(resampled))
        return _certainties(batch, codes, resampled, judged, by_window, known, thresholds)

    batches = [slice(start, start + HEADS_AT_ONCE) for start in range(0, len(rows), HEADS_AT_ONCE)]
    certainties = each_in_a_thread(assess, batches) if batches else []
    return [certainty for of_batch in certainties for certainty in of_batch], by_window.verdicts


def _certainties(
    batch: slice,
    codes: np.ndarray,
    resampled: Arrays,
    judged: HeadArrays,
    windows: "_Windows",
    known: np.ndarray,
    thresholds: Thresholds,
) -> list[Certainty]:
    """Return the certainty of each head of a batch. resampled: numbers of these heads. known: has a confidence."""
    codes, count, agreeing = codes[batch], windows.count[batch], windows.agreeing(codes)[batch]
    fixed = {name: value[batch] for name, value in judged.fixed.items()}
    numbers = {name: value[batch, None] for name, value in judged.numbers.items()}
    resampled_codes, beyond, distances = codes_on_both_sides(
        {**resampled, **{name: value[:, None] for name, value in fixed.items()}}, thresholds, NEAR_THRESHOLD
    )
    other = _most_frequent_other(codes, resampled_codes)
    deciding, limits = deciding_numbers(codes, other, numbers, resampled, fixed, thresholds)
    values = _of_columns(deciding, resampled)
    low, high = (np.where(_moves(values), bound, np.nan) for bound in _quantiles(values, [0.025, 0.975]))
    confidence = _share_of_votes(codes[:, None], resampled_codes, beyond, distances)
    columns = (
        np.where(known, confidence, np.nan),
        np.where(count > 1, agreeing / np.maximum(count, 1), np.nan),
        np.maximum(count, 1),
        agreeing,
        np.array([*VERDICTS, None], dtype=object)[other],  # NOT_JUDGED is -1, the last
        deciding,
        _of_columns(deciding, numbers)[:, 0],
        low,
        high,
        limits,
    )
    return list(map(Certainty, *(column.tolist() for column in columns)))


@dataclass(frozen=True)
class _Windows:
    """The table of windows as arrays, with verdicts."""

    owner: np.ndarray  # index of the head of each row of the table
    codes: np.ndarray  # verdict of each row
    units: Arrays  # (H, W) by column; NaN if a head has fewer windows
    count: np.ndarray  # (H,): windows of each head
    verdicts: list[str | None]

    def agreeing(self, codes: np.ndarray) -> np.ndarray:
        """Return how many windows of each head have the verdict of the head."""
        return np.bincount(self.owner[self.codes == codes[self.owner]], minlength=len(codes))


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


def _block_medians(blocks: pa.Table, index_of: Mapping[Any, int]) -> Arrays:
    """Return the medians of each head's blocks, (heads, blocks) by column; empty without blocks."""
    owner = _head_indices(blocks, index_of)
    slot = _indices_within_heads(owner)
    width = int(slot.max(initial=-1)) + 1
    units = {}
    for name in (*BLOCK_METRICS, BLOCK_NORM):
        units[name] = np.full((len(index_of), width), np.nan)
        units[name][owner, slot] = _column(blocks, name)
    return units


def _resample(batch: slice, judged: HeadArrays, windows: _Windows, blocks: Arrays) -> Arrays:
    """Return the numbers of each head in each resample, (heads, RESAMPLES); (heads, 1) if they are not resampled."""
    generator = np.random.default_rng(0)
    numbers = {name: value[batch] for name, value in judged.numbers.items()}
    blocks = {name: medians[batch] for name, medians in blocks.items()}
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
            within = value[:, None]
        if many.any():
            over_windows = _shift_by_units(value, windows.units[name][batch], draws, logarithmic)
            over_windows = over_windows if name in SLOPES else _clip_at_zero(over_windows)
            within = np.where(many[:, None], over_windows, within)
        resampled[name] = within
    return resampled


def _shift_by_units(value: np.ndarray, units: np.ndarray, counts: np.ndarray, logarithmic: bool) -> np.ndarray:
    """Return the head's value plus the change of its units' mean in each resample."""
    if not units.shape[1]:
        return value[:, None].copy()
    with np.errstate(all="ignore"):
        if logarithmic:
            value, units = (np.minimum(np.log(np.maximum(numbers, 1e-300)), LARGEST_LOG) for numbers in (value, units))
        finite = np.isfinite(units)
        if finite.all() and np.isfinite(value).all():  # the usual case, with one array of all resamples instead of ten
            moved: np.ndarray = (units - units.sum(1, keepdims=True) / units.shape[1]) @ counts.T
            moved /= units.shape[1]  # same order of operations as below, so that results are equal bit for bit
            moved += value[:, None]
            return np.exp(moved, out=moved) if logarithmic else moved
        mean = np.where(finite, units, 0.0).sum(1, keepdims=True) / finite.sum(1, keepdims=True)
        drawn = np.where(finite, units - mean, 0.0) @ counts.T / (finite.astype(float) @ counts.T)
        moved = np.where(np.isfinite(drawn), drawn, 0.0) + value[:, None]
        moved = np.where(np.isfinite(moved), moved, value[:, None])
        return np.exp(moved) if logarithmic else moved


def _clip_at_zero(values: np.ndarray) -> np.ndarray:
    np.copyto(values, 0.0, where=values < 0)  # shares, entropies, norms and horizons; NaN stays
    return values


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


def _most_frequent_other(codes: np.ndarray, resampled: np.ndarray) -> np.ndarray:
    """Return the verdict that most resamples of each head have beside its own; NOT_JUDGED if there is none."""
    heads = np.arange(len(codes))
    judged = resampled >= 0
    owner = np.broadcast_to(heads[:, None], resampled.shape)[judged]
    votes = np.bincount(owner * len(VERDICTS) + resampled[judged], minlength=len(codes) * len(VERDICTS))
    votes = votes.reshape(len(codes), len(VERDICTS))
    votes[heads[codes >= 0], codes[codes >= 0]] = 0
    return np.where(votes.any(1), votes.argmax(1), NOT_JUDGED)


def deciding_numbers(
    codes: np.ndarray, other: np.ndarray, numbers: Arrays, resampled: Arrays, fixed: Arrays, thresholds: Thresholds
) -> tuple[np.ndarray, np.ndarray]:
    """Return the column that decides between the verdict of each head and the nearest other one, and its threshold.

    numbers: (heads, 1) by column. resampled: (heads, RESAMPLES) or (heads, 1). All others: (heads,).
    """
    sink, beside = numbers["sink_mass"][:, 0], numbers["entropy_ratio_without_sink"][:, 0]
    hidden = (sink >= thresholds.sink_matters) & ~np.isnan(beside)  # as judged_suffix

    def either(name: str) -> np.ndarray:
        return np.asarray((codes == CODE[name]) | (other == CODE[name]))

    def suffixed(name: str) -> np.ndarray:
        return np.where(hidden, f"{name}_without_sink", name)

    dispersed = [CODE[name] for name in DISPERSED]
    ratio, slope = suffixed("entropy_ratio"), suffixed("gap_slope")
    signed = fixed["signed"]  # their sum does not decide
    choices = [
        (
            either("silent"),
            np.where(signed, "max_weight", "row_sum"),
            np.where(signed, np.nan, thresholds.silent_sum),
        ),
        (either("sink-dominated"), "sink_mass", thresholds.sink_dominated),
        (either("frozen"), "max_weight", thresholds.frozen_weight),
        (
            either("sensitive"),
            f"jacobian_norm_q{thresholds.sensitive_quantile:02d}",
            thresholds.sensitive_norm * fixed["worst_norm"],
        ),
        (np.isin(codes, dispersed) & np.isin(other, dispersed), suffixed("horizon"), fixed["n_high"]),
    ]
    by_slope = (other >= 0) & ~fixed["what_if"] & ~np.any([decided for decided, _, _ in choices], axis=0)
    by_slope &= np.isfinite(_of_columns(slope, resampled)).any(1)
    (low,) = _quantiles(_of_columns(ratio, resampled)[by_slope], [0.025])
    by_slope[by_slope] = low > thresholds.dispersed_entropy
    choices.append((by_slope, slope, thresholds.dispersed_slope))
    conditions, columns, limits = zip(*choices, strict=True)
    return np.select(conditions, columns, ratio), np.select(conditions, limits, thresholds.dispersed_entropy)


def _of_columns(names: np.ndarray, columns: Arrays) -> np.ndarray:
    """Return for each head its row of the column that `names` has for it."""
    chosen = {name: columns[name] for name in np.unique(names).tolist()}
    rows = np.empty((len(names), max(column.shape[1] for column in chosen.values())))
    for name, column in chosen.items():
        rows[names == name] = column[names == name]
    return rows


def _moves(values: np.ndarray) -> np.ndarray:
    """Return whether the finite numbers of a row differ, those that are not finite counting as 0."""
    finite = np.where(np.isfinite(values), values, 0.0)
    return np.asarray((finite != finite[:, :1]).any(1))


def _any_moves(columns: Arrays) -> np.ndarray:
    """Return which heads have a column that moves."""
    found = np.zeros(len(columns["entropy_ratio"]), dtype=bool)
    for column in columns.values():
        if column.shape[1] > 1 and not found.all():  # the first columns move unless a head has no units
            found[~found] = _moves(column[~found])
    return found


def _has_row_sums(batch: slice, windows: _Windows, blocks: Arrays) -> np.ndarray:
    """Return which heads have row sums to resample. Those of a silent head may all be 0, so that no column moves."""
    of_windows, of_blocks = (np.isfinite(units["row_sum"][batch]).any(1) for units in (windows.units, blocks))
    return np.where(windows.count[batch] >= ENOUGH_WINDOWS, of_windows, of_blocks)


def _quantiles(values: np.ndarray, shares: Sequence[float]) -> list[np.ndarray]:
    """Return the same as numpy.nanquantile over the last axis, but faster, and infinite between infinite numbers."""
    last = np.maximum((~np.isnan(values)).sum(1) - 1, 0)
    positions = [share * last for share in shares]
    below = [position.astype(int) for position in positions]
    above = [np.minimum(low + 1, last) for low in below]
    ordered = np.partition(values, np.unique([below, above])) if len(values) else values  # NaN comes last
    found = []
    for position, *neighbors in zip(positions, below, above, strict=True):
        low, high = (np.take_along_axis(ordered, index[:, None], 1)[:, 0] for index in neighbors)
        with np.errstate(invalid="ignore"):
            found.append(np.where(low == high, low, low + (position - neighbors[0]) * (high - low)))
    return found


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
