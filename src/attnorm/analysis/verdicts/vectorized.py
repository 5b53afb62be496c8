"""The rules of rules.py for arrays of heads: the same verdicts as codes, for windows and bootstrap resamples.

rules.py is the reference, head by head and with words; tests compare the two on random heads.
"""

from collections.abc import Mapping

import numpy as np
import torch

from attnorm.analysis.verdicts.rules import BEYOND_NUMBERS, GATE_OPEN
from attnorm.analysis.verdicts.thresholds import VERDICTS, Thresholds
from attnorm.theory.dispersion import entropy_floor

Arrays = Mapping[str, np.ndarray]  # arrays that broadcast against each other
NOTHING = -1  # the code of a head that has nothing to be judged by
CODE = {name: code for code, name in enumerate(VERDICTS)}


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
    smeared &= ~(_above_floor(heads, hidden, ratio, horizon, n) <= t.near_floor)
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


def _above_floor(
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
