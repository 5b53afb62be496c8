"""What the measured rows of a layer add to the tables `heads`, `by_length`, `top_n` and `blocks`.

Neighbouring rows see nearly the same keys, so resampling single rows would overstate the confidence of a verdict. The
longest rows are therefore cut into blocks of consecutive rows, and `blocks` keeps the medians of each block.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from attnorm.analysis.tables import BLOCK_METRICS, BLOCK_NORM, QUANTILES, Columns
from attnorm.metrics.catalogue import PER_ROW
from attnorm.metrics.rows import RowStatistics
from attnorm.metrics.summary import Summary, summarise, summarise_all
from attnorm.theory.dispersion import effective_gap_slope

SHORTEST_IN_SLOPE = 16  # keys; with fewer, the gap is not yet linear in log n
FEWEST_BINS = 3  # a line through two points has no error
SUMMARISED_AT_ONCE = 2**21  # numbers
BLOCKS = 8  # largest number per window
FEWEST_BLOCK_ROWS = 2

_SHARES = tuple(q / 100 for q in QUANTILES)
_QUARTILES = {"q25": QUANTILES.index(25), "q50": QUANTILES.index(50), "q75": QUANTILES.index(75)}
_MEDIAN = _QUARTILES["q50"]


def pool_rows(parts: Sequence[RowStatistics]) -> RowStatistics:
    """Join the rows of several sequences."""
    if len(parts) == 1:
        return parts[0]
    return RowStatistics(
        n=torch.cat([part.n for part in parts], 2),
        values={name: torch.cat([part.values[name] for part in parts], 2) for name in parts[0].values},
        top_mass=torch.cat([part.top_mass for part in parts], 2),
        broken=torch.cat([part.broken for part in parts], 2),
    )


def row_columns(
    rows: RowStatistics, bins: list[tuple[int, int]], top_n: tuple[int, ...], kv_heads: int
) -> dict[str, Columns]:
    """Return the columns of one normalizer by table. bins: (n_low, n_high), the longest rows first."""
    heads = rows.n.shape[1]
    summaries = _summaries(rows, bins)
    n = summarise(rows.n, rows.n, bins, rows.broken, quantiles=())
    return {
        "heads": {
            "head": np.arange(heads),
            "kv_head": np.arange(heads) // (heads // kv_heads),
            "rows": n.rows[:, 0],
            "broken_rows": rows.broken.sum((0, 2)).cpu().numpy(),
            "n_low": bins[0][0],
            "n_high": bins[0][1],
            **_of_longest(summaries),
            **_slopes(summaries, n.mean),
            "forced_share": _forced_share(rows, bins[0]),
        },
        "by_length": _by_length(summaries, n, bins),
        "top_n": _masses(rows, bins[0], top_n, n.rows[:, 0]),
        "blocks": _blocks(rows, bins[0]),
    }


def by_head(values: Tensor) -> np.ndarray:
    """(B, H, R, ...) -> (H, B x R, ...)"""
    return np.asarray(values.double().cpu().transpose(0, 1).flatten(1, 2).numpy())


def _summaries(rows: RowStatistics, bins: list[tuple[int, int]]) -> dict[str, Summary]:
    """Summarise every metric, several at once for speed, but not all at once: a long layer has gigabytes of them."""
    at_once = max(1, SUMMARISED_AT_ONCE // max(1, rows.n.numel()))
    found: dict[str, Summary] = {}
    for start in range(0, len(PER_ROW), at_once):
        values = {name: rows.values[name] for name in PER_ROW[start : start + at_once]}
        found |= summarise_all(values, rows.n, bins, rows.broken, quantiles=_SHARES)
    return found


def _of_longest(summaries: Mapping[str, Summary]) -> Columns:
    columns: Columns = {}
    for name, summary in summaries.items():
        columns[name] = summary.quantiles[:, 0, _MEDIAN]
        columns[f"{name}_mean"] = summary.mean[:, 0]
        columns |= {f"{name}_q{q:02d}": summary.quantiles[:, 0, i] for i, q in enumerate(QUANTILES)}
    return columns


def _by_length(summaries: Mapping[str, Summary], n: Summary, bins: list[tuple[int, int]]) -> Columns:
    """Return one row per head and bin that has rows, shortest first."""
    heads = len(n.rows)
    low, high = np.array(bins).T
    columns: Columns = {
        "head": np.repeat(np.arange(heads), len(bins)),
        "n_low": np.tile(low, heads),
        "n_high": np.tile(high, heads),
        "rows": n.rows.ravel(),
        "n": n.mean.ravel(),
    }
    for name, summary in summaries.items():
        columns[name] = summary.quantiles[:, :, _MEDIAN].ravel()
        columns[f"{name}_mean"] = summary.mean.ravel()
        columns |= {f"{name}_{q}": summary.quantiles[:, :, i].ravel() for q, i in _QUARTILES.items()}
    order = np.lexsort((columns["n_low"], columns["head"]))
    order = order[columns["rows"][order] > 0]
    return {name: column[order] for name, column in columns.items()}


def _slopes(summaries: Mapping[str, Summary], n: np.ndarray) -> Columns:
    """Fit the slope of the gap on log n to the medians of the bins; a mean would be infinite if one gap is."""
    columns: Columns = {}
    usable = n >= SHORTEST_IN_SLOPE
    for suffix in ("", "_without_sink"):
        gap = summaries[f"effective_gap{suffix}"].quantiles[:, :, _MEDIAN]
        gap = np.where(usable & np.isfinite(gap), gap, np.nan)
        fit = effective_gap_slope(torch.from_numpy(gap), torch.from_numpy(np.where(usable, n, 1.0)))
        enough = fit.points >= FEWEST_BINS
        columns[f"gap_slope{suffix}"] = torch.where(enough, fit.slope, torch.nan).numpy()
        if not suffix:
            columns["gap_slope_error"] = torch.where(enough, fit.slope_standard_error, torch.nan).numpy()
    return columns


def _forced_share(rows: RowStatistics, longest_bin: tuple[int, int]) -> np.ndarray:
    horizon = rows.values["horizon"]
    beyond = torch.where(horizon.isnan(), torch.nan, (rows.n > horizon).double())
    return summarise(beyond, rows.n, [longest_bin], rows.broken, quantiles=()).mean[:, 0]


def _masses(rows: RowStatistics, longest_bin: tuple[int, int], top_n: tuple[int, ...], count: np.ndarray) -> Columns:
    heads = rows.n.shape[1]
    mass = np.stack(
        [
            summarise(rows.top_mass[..., i], rows.n, [longest_bin], rows.broken, quantiles=()).mean[:, 0]
            for i in range(len(top_n))
        ],
        axis=1,
    )
    return {
        "head": np.repeat(np.arange(heads), len(top_n)),
        "top_n": np.tile(top_n, heads),
        "rows": np.repeat(count, len(top_n)),
        "mass": mass.ravel(),
    }


def _blocks(rows: RowStatistics, longest_bin: tuple[int, int]) -> Columns:
    """Return one entry per head and block of the rows with n in the bin; none if there are too few for two blocks."""
    n, broken = by_head(rows.n), by_head(rows.broken).astype(bool)
    heads = by_head(rows.values[BLOCK_METRICS[0]]).shape[0]
    inside = np.broadcast_to((n >= longest_bin[0]) & (n <= longest_bin[1]) & ~broken, (heads, n.shape[1]))
    used = np.flatnonzero(inside.any(0))
    count = min(BLOCKS, len(used) // FEWEST_BLOCK_ROWS)
    chunks = np.array_split(used, count) if count > 1 else []

    def over_chunks(measure: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """(heads x chunks,), heads outermost."""
        return np.stack([measure(chunk) for chunk in chunks], axis=1).ravel() if chunks else np.zeros(0)

    columns: Columns = {
        "head": np.repeat(np.arange(heads), len(chunks)),
        "block": np.tile(np.arange(len(chunks)), heads),
        "rows": over_chunks(lambda chunk: inside[:, chunk].sum(1)).astype(np.int64),
    }
    for name in BLOCK_METRICS:
        values = np.where(inside, by_head(rows.values[name]), np.nan)
        columns[name] = over_chunks(partial(_quantile, values, 0.5))
        if name == "jacobian_norm":
            columns[BLOCK_NORM] = over_chunks(partial(_quantile, values, 0.75))
    return columns


def _quantile(values: np.ndarray, share: float, chunk: np.ndarray) -> np.ndarray:
    """Return the linear quantile of each head's numbers in the chunk without NaN; NaN if none is left."""
    ordered = np.sort(values[:, chunk], axis=1)  # NaN comes last
    count = (~np.isnan(ordered)).sum(1)
    position = share * np.maximum(count - 1, 0)
    low, high = np.floor(position).astype(int), np.ceil(position).astype(int)
    heads = np.arange(len(ordered))
    below, above = ordered[heads, low], ordered[heads, high]
    with np.errstate(invalid="ignore"):  # inf - inf: the quantile is infinite
        between = np.where(below == above, below, below + (position - low) * (above - below))
    return np.where(count > 0, between, np.nan)
