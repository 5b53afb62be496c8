"""How sure a verdict is: windows that agree, and the bootstrap of what the head is judged by.

Units are the windows of the text, or blocks of consecutive rows where there are fewer than four windows. Units are
drawn with replacement; every resample is judged by the same rules as the head itself. The confidence of a verdict is
the share of resamples that give it, the interval of a number is that of its 2.5 % and 97.5 % quantiles over resamples.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from attnorm.analysis.tables import BLOCK_METRICS, BLOCK_NORM, HEAD_KEY
from attnorm.analysis.verdicts.rows import Row
from attnorm.analysis.verdicts.rules import NOTHING, judged_keys, verdict_codes
from attnorm.analysis.verdicts.thresholds import DISPERSED, VERDICTS, Thresholds

RESAMPLES = 400
ENOUGH_WINDOWS = 4  # for a bootstrap over windows
HEADS_AT_ONCE = 256
SLOPES = ("gap_slope", "gap_slope_without_sink")
HORIZONS = ("horizon", "horizon_without_sink")
LARGEST_LOG = 690.0

_KEY = tuple(name for name, _ in HEAD_KEY)
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Certainty:
    confidence: float  # NaN where nothing could be resampled
    agreement: float  # NaN with one window
    windows: int
    agreeing: int
    other: str | None  # the most frequent other verdict of the resamples
    deciding: str  # column
    value: float
    low: float
    high: float
    threshold: float


@dataclass(frozen=True)
class Judged:
    """All heads as arrays: what is judged, and what does not change between windows."""

    numbers: Arrays  # (H,)
    fixed: (
        Arrays  # (H,): n_high, n_low, broken_rows, worst_norm, near_worst, what_if, slope_over_lengths, gated_sink_mass
    )


def certainties(
    rows: Sequence[Row], judged: Judged, windows: pa.Table, blocks: pa.Table, thresholds: Thresholds
) -> tuple[list[Certainty], list[str | None]]:
    """One for each head, and the verdict of each row of `windows`."""
    index_of = {tuple(row[name] for name in _KEY): index for index, row in enumerate(rows)}
    codes = verdict_codes({**judged.numbers, **judged.fixed}, thresholds)
    by_window = _of_windows(windows, index_of, judged, thresholds)
    found: list[Certainty] = []
    for start in range(0, len(rows), HEADS_AT_ONCE):
        here = slice(start, start + HEADS_AT_ONCE)
        resampled = _resampled(here, judged, by_window, _units(blocks, index_of, here, len(rows)))
        part_codes = verdict_codes({**resampled, **{k: v[here, None] for k, v in judged.fixed.items()}}, thresholds)
        for at, row in enumerate(rows[here]):
            own = {name: value[at] for name, value in resampled.items()}
            found.append(_certainty(row, start + at, codes, part_codes[at], own, by_window, judged, thresholds))
    return found, by_window.verdicts


@dataclass(frozen=True)
class _Windows:
    owner: np.ndarray  # head of each row of the table, -1 for none
    codes: np.ndarray
    units: Arrays  # (H, W), NaN where a head has fewer windows
    count: np.ndarray  # (H,)
    verdicts: list[str | None]


def _of_windows(windows: pa.Table, index_of: Mapping[Any, int], judged: Judged, thresholds: Thresholds) -> _Windows:
    heads = len(index_of)
    owner = _owners(windows, index_of)
    numbers = {name: _column(windows, name, judged.numbers[name][owner]) for name in judged.numbers}
    fixed = {name: value[owner] for name, value in judged.fixed.items()}
    for name in ("broken_rows", "n_low", "n_high", "worst_norm"):
        fixed[name] = _column(windows, name, fixed[name])
    codes = verdict_codes({**numbers, **fixed}, thresholds) if len(owner) else np.zeros(0, dtype=int)
    slot = _slots(owner)
    width = int(slot.max(initial=-1)) + 1
    units = {name: np.full((heads, width), np.nan) for name in numbers}
    for name, value in numbers.items():
        units[name][owner, slot] = value
    verdicts = [None if code == NOTHING else VERDICTS[code] for code in codes.tolist()]
    return _Windows(owner, codes, units, np.bincount(owner, minlength=heads), verdicts)


def _units(blocks: pa.Table, index_of: Mapping[Any, int], here: slice, heads: int) -> Arrays:
    """Medians of blocks, (heads here, blocks); empty where there are none."""
    owner = _owners(blocks, index_of)
    slot = _slots(owner)
    width = int(slot.max(initial=-1)) + 1
    units = {}
    for name in (*BLOCK_METRICS, BLOCK_NORM):
        values = np.full((heads, width), np.nan)
        values[owner, slot] = _column(blocks, name)
        units[name] = values[here]
    return units


def _resampled(here: slice, judged: Judged, windows: _Windows, blocks: Arrays) -> Arrays:
    """Numbers of each head in each resample, (heads here, RESAMPLES): as they are, where they cannot be resampled."""
    generator = np.random.default_rng(0)
    numbers = {name: value[here] for name, value in judged.numbers.items()}
    many = windows.count[here] >= ENOUGH_WINDOWS
    width = next(iter(windows.units.values())).shape[1]
    depth = next(iter(blocks.values())).shape[1]
    times = RESAMPLES if depth or many.any() else 1
    draws = _counts(generator, width, times)
    block_draws = _counts(generator, depth, times)
    noise = generator.standard_normal(times)
    has_blocks = np.isfinite(blocks["entropy_ratio"]).any(1) if depth else np.zeros(len(many), dtype=bool)
    error = np.where(has_blocks, np.nan_to_num(numbers["gap_slope_error"]), 0.0)
    found = {}
    for name, value in numbers.items():
        logarithmic = name in HORIZONS
        if many.all():
            within = np.zeros(1)  # not used
        elif name in SLOPES:
            within = value[:, None] + error[:, None] * noise
        elif name in blocks:
            within = _not_negative(_shifted(value, blocks[name], block_draws, logarithmic))
        else:
            within = np.repeat(value[:, None], times, axis=1)
        if many.any():
            over_windows = _shifted(value, windows.units[name][here], draws, logarithmic)
            over_windows = over_windows if name in SLOPES else _not_negative(over_windows)
            within = np.where(many[:, None], over_windows, within)
        found[name] = within
    return found


def _shifted(value: np.ndarray, units: np.ndarray, counts: np.ndarray, logarithmic: bool) -> np.ndarray:
    """The head's value moved as the mean of its units moves between resamples."""
    if not units.shape[1]:
        return np.repeat(value[:, None], counts.shape[0], axis=1)
    with np.errstate(all="ignore"):
        if logarithmic:
            value, units = (np.minimum(np.log(np.maximum(one, 1e-300)), LARGEST_LOG) for one in (value, units))
        known = np.isfinite(units)
        if known.all() and np.isfinite(value).all():  # nearly always: three arrays of all resamples instead of ten
            moved: np.ndarray = units @ counts.T
            moved /= units.shape[1]
            moved += value[:, None]  # in the order of the general case: other heads must not change a bit
            moved -= (units.sum(1) / units.shape[1])[:, None]
            return np.exp(moved, out=moved) if logarithmic else moved
        filled = np.where(known, units, 0.0)
        mean = filled.sum(1) / known.sum(1)
        drawn = (filled @ counts.T) / (known.astype(float) @ counts.T)
        moved = value[:, None] + np.where(np.isfinite(drawn), drawn, mean[:, None]) - mean[:, None]
        moved = np.where(np.isfinite(moved), moved, value[:, None])
        return np.exp(moved) if logarithmic else moved


def _not_negative(values: np.ndarray) -> np.ndarray:
    return np.where(values < 0, 0.0, values)  # shares, entropies, norms and horizons; NaN stays


def _counts(generator: np.random.Generator, units: int, times: int) -> np.ndarray:
    """How often each unit is drawn, (times, units)."""
    if not units:
        return np.zeros((times, 0))
    return generator.multinomial(units, [1 / units] * units, size=times).astype(np.float64)


def _certainty(
    row: Row,
    index: int,
    codes: np.ndarray,
    resampled: np.ndarray,
    numbers: Arrays,
    windows: _Windows,
    judged: Judged,
    thresholds: Thresholds,
) -> Certainty:
    code = int(codes[index])
    own = windows.codes[windows.owner == index] if len(windows.owner) else np.zeros(0, dtype=int)
    agreeing, count = int((own == code).sum()), len(own)
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
        confidence=float((resampled == code).mean()) if resampling else float("nan"),
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
    judged: Judged,
    index: int,
    thresholds: Thresholds,
) -> tuple[str, float]:
    """The column between a verdict and the nearest other one, and its threshold."""
    both, suffix = (verdict, other), judged_keys(row, thresholds)
    if "sink-dominated" in both:
        return "sink_mass", thresholds.sink_dominated
    if "frozen" in both:
        return "max_weight", thresholds.frozen_weight
    if "sensitive" in both:
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
    """As numpy.nanquantile, ten times as fast for a few hundred numbers."""
    ordered = np.sort(values[~np.isnan(values)])
    if not len(ordered):
        return float("nan")
    at = share * (len(ordered) - 1)
    below = int(at)
    low, high = float(ordered[below]), float(ordered[min(below + 1, len(ordered) - 1)])
    return low if low == high else low + (at - below) * (high - low)


def _owners(table: pa.Table, index_of: Mapping[Any, int]) -> np.ndarray:
    if not table.num_rows:
        return np.zeros(0, dtype=np.int64)
    keys = zip(*(table[name].to_pylist() for name in _KEY), strict=True)
    return np.array([index_of[key] for key in keys], dtype=np.int64)  # every window and block is of a head in `heads`


def _slots(owner: np.ndarray) -> np.ndarray:
    """The index of each row among the rows of its head."""
    order = np.argsort(owner, kind="stable")
    slot = np.zeros(len(owner), dtype=np.int64)
    slot[order] = np.arange(len(owner)) - np.searchsorted(owner[order], owner[order])
    return slot


def _column(table: pa.Table, name: str, otherwise: np.ndarray | None = None) -> np.ndarray:
    if name not in table.column_names:
        return np.full(table.num_rows, np.nan) if otherwise is None else otherwise
    return np.asarray(table[name].to_numpy(zero_copy_only=False), dtype=np.float64)
