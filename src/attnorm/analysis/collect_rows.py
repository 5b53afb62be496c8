"""Summarize the measured rows of a layer for the tables `heads`, `by_length`, `top_n` and `blocks`.

Neighboring rows see nearly the same keys, so resampling single rows would overstate the confidence of a verdict.
Therefore the longest rows are divided into blocks of consecutive rows, and `blocks` has the medians of each block.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from attnorm.analysis.tables import BLOCK_METRICS, BLOCK_NORM, QUANTILES, Columns
from attnorm.engines.execution import sent_to_cpu
from attnorm.metrics.catalogue import PER_ROW
from attnorm.metrics.rows import RowStatistics
from attnorm.metrics.sampling import Summary, binned, summarize_all
from attnorm.theory.dispersion import effective_gap_slope

SHORTEST_IN_SLOPE = 16  # keys; with fewer, the gap is not yet linear in log n
MIN_BINS = 3  # a line through two points has no error
SUMMARIZED_AT_ONCE = {True: 2**21, False: 2**26}  # numbers, on a CPU or a GPU
BLOCKS = 8  # largest number per window
MIN_BLOCK_ROWS = 2

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


@dataclass(frozen=True)
class RowSummaries:
    """Summaries of the measured rows of one normalizer. Wait for a GPU before reading them: execution.arrival."""

    bins: list[tuple[int, int]]  # (n_low, n_high), the longest rows first
    metrics: dict[str, Summary]
    means: dict[str, Summary]
    broken: np.ndarray  # rows of each head
    blocks: Callable[[], Columns]


def summarize_rows(
    rows: RowStatistics, bins: list[tuple[int, int]], top_n: tuple[int, ...], layers: int
) -> RowSummaries:
    """Summarize rows per head and bin. layers: number of layers that the heads belong to, equally many heads each."""
    on_cpu = rows.n.device.type == "cpu"
    return RowSummaries(
        bins,
        _summaries(rows, bins),
        _means(rows, bins, top_n),
        sent_to_cpu(rows.broken.sum((0, 2))).numpy(),
        partial(_blocks, rows, bins[0]) if on_cpu and layers == 1 else _blocks_on_device(rows, bins[0], layers),
    )


def row_columns(found: RowSummaries, top_n: tuple[int, ...], kv_heads: int) -> dict[str, Columns]:
    """Return the columns of one normalizer by table."""
    n, bins = found.means["n"], found.bins
    heads = len(n.rows)
    return {
        "heads": {
            "head": np.arange(heads),
            "kv_head": np.arange(heads) // (heads // kv_heads),
            "rows": n.rows[:, 0],
            "broken_rows": found.broken,
            "n_low": bins[0][0],
            "n_high": bins[0][1],
            **_longest_bin_columns(found.metrics),
            **_slopes(found.metrics, n.mean),
            "forced_share": found.means["forced"].mean[:, 0],
        },
        "by_length": _length_columns(found.metrics, n, bins),
        "top_n": _masses(found.means, top_n),
        "blocks": found.blocks(),
    }


def by_head(values: Tensor) -> np.ndarray:
    """Reshape (B, H, R, ...) to (H, B x R, ...)."""
    return np.asarray(values.double().cpu().transpose(0, 1).flatten(1, 2).numpy())


def _summaries(rows: RowStatistics, bins: list[tuple[int, int]]) -> dict[str, Summary]:
    """Summarize every metric, several at once for speed, but not all at once: a long layer has gigabytes of them."""
    at_once = max(1, SUMMARIZED_AT_ONCE[rows.n.device.type == "cpu"] // max(1, rows.n.numel()))
    summaries: dict[str, Summary] = {}
    for start in range(0, len(PER_ROW), at_once):
        values = {name: rows.values[name] for name in PER_ROW[start : start + at_once]}
        summaries |= summarize_all(values, rows.n, bins, rows.broken, quantiles=_SHARES)
    return summaries


def _longest_bin_columns(summaries: Mapping[str, Summary]) -> Columns:
    columns: Columns = {}
    for name, summary in summaries.items():
        columns[name] = summary.quantiles[:, 0, _MEDIAN]
        columns[f"{name}_mean"] = summary.mean[:, 0]
        columns |= {f"{name}_q{q:02d}": summary.quantiles[:, 0, i] for i, q in enumerate(QUANTILES)}
    return columns


def _length_columns(summaries: Mapping[str, Summary], n: Summary, bins: list[tuple[int, int]]) -> Columns:
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
        enough = fit.points >= MIN_BINS
        columns[f"gap_slope{suffix}"] = torch.where(enough, fit.slope, torch.nan).numpy()
        if not suffix:
            columns["gap_slope_error"] = torch.where(enough, fit.slope_standard_error, torch.nan).numpy()
    return columns


def _means(rows: RowStatistics, bins: list[tuple[int, int]], top_n: tuple[int, ...]) -> dict[str, Summary]:
    """Summarize what is reported as a mean alone: n, rows beyond the horizon, masses of the N heaviest keys."""
    horizon = rows.values["horizon"]
    values = {
        "n": rows.n.double(),
        "forced": torch.where(horizon.isnan(), torch.nan, (rows.n > horizon).double()),
        "measured": (~rows.top_mass[..., 0].isnan()).double(),  # on a GPU not all rows have masses
        **{f"mass {N}": rows.top_mass[..., index].double() for index, N in enumerate(top_n)},
    }
    return summarize_all(values, rows.n, bins, rows.broken, quantiles=())


def _masses(means: Mapping[str, Summary], top_n: tuple[int, ...]) -> Columns:
    heads = len(means["n"].rows)
    count = np.rint(means["measured"].rows[:, 0] * np.nan_to_num(means["measured"].mean[:, 0])).astype(np.int64)
    return {
        "head": np.repeat(np.arange(heads), len(top_n)),
        "top_n": np.tile(top_n, heads),
        "rows": np.repeat(count, len(top_n)),
        "mass": np.stack([means[f"mass {N}"].mean[:, 0] for N in top_n], axis=1).ravel(),
    }


def _blocks_on_device(rows: RowStatistics, longest_bin: tuple[int, int], layers: int) -> Callable[[], Columns]:
    """The same as _blocks for several layers; only medians travel to the CPU, and the columns are made there."""
    shape = rows.values[BLOCK_METRICS[0]].shape
    heads = shape[1]
    n, broken = (t.expand(shape).transpose(0, 1).flatten(1) for t in (rows.n, rows.broken))
    inside = (n >= longest_bin[0]) & (n <= longest_bin[1]) & ~broken
    used = inside.unflatten(0, (layers, -1)).any(1)
    total = used.sum(1, keepdim=True)
    count = (total // MIN_BLOCK_ROWS).clamp(max=BLOCKS)
    # As numpy.array_split does it: the first `longer` blocks have one row more than the others.
    size, longer = total // count.clamp(min=1), total % count.clamp(min=1)
    rank = used.cumsum(1) - 1
    beyond = rank - longer * (size + 1)
    block = torch.where(beyond < 0, rank // (size + 1), longer + beyond // size.clamp(min=1))
    block, many = ((t.repeat_interleave(heads // layers, 0)) for t in (block, count > 1))
    ids = torch.where(inside & many, block, -1).int()
    quantiles_and_members = {
        name: tuple(sent_to_cpu(t).numpy() for t in (quantiles, members))
        for name, quantiles, members in _summarize_blocks(rows, ids, heads)
    }
    counts = sent_to_cpu(count)

    def columns() -> Columns:
        blocks = np.where(counts.numpy() > 1, counts.numpy(), 0).repeat(heads // layers, 0)  # (heads, 1)
        exists = np.arange(BLOCKS) < blocks
        head, block = np.nonzero(exists)
        columns: Columns = {
            "head": head,
            "block": block,
            "rows": quantiles_and_members[BLOCK_METRICS[0]][1][exists].astype(np.int64),
        }
        for name in BLOCK_METRICS:
            columns[name] = quantiles_and_members[name][0][exists, 0]
            if name == "jacobian_norm":
                columns[BLOCK_NORM] = quantiles_and_members[name][0][exists, 1]
        return columns

    return columns


def _summarize_blocks(rows: RowStatistics, ids: Tensor, heads: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield for each metric its median and upper quartile, (heads, BLOCKS, 2), and the rows of each block."""
    for dtype in {rows.values[name].dtype for name in BLOCK_METRICS}:
        names = [name for name in BLOCK_METRICS if rows.values[name].dtype == dtype]
        numbers = torch.stack([rows.values[name] for name in names])
        block_summary = binned(numbers.transpose(1, 2).flatten(0, 1).flatten(1), ids, BLOCKS, (0.5, 0.75))
        for index, name in enumerate(names):
            rows_of_metric = slice(index * heads, (index + 1) * heads)
            yield name, block_summary.quantiles[rows_of_metric], block_summary.members[rows_of_metric]


def _blocks(rows: RowStatistics, longest_bin: tuple[int, int]) -> Columns:
    """Return one entry per head and block of the rows with n in the bin; none if there are too few for two blocks."""
    n, broken = by_head(rows.n), by_head(rows.broken).astype(bool)
    heads = by_head(rows.values[BLOCK_METRICS[0]]).shape[0]
    inside = np.broadcast_to((n >= longest_bin[0]) & (n <= longest_bin[1]) & ~broken, (heads, n.shape[1]))
    used = np.flatnonzero(inside.any(0))
    count = min(BLOCKS, len(used) // MIN_BLOCK_ROWS)
    chunks = np.array_split(used, count) if count > 1 else []

    def over_chunks(measure: Callable[[np.ndarray], np.ndarray], values: np.ndarray) -> np.ndarray:
        """Return one number per head and chunk, (..., heads x chunks), heads outermost."""
        found = [measure(values[..., chunk]) for chunk in chunks]
        return np.stack(found, axis=-1).reshape(*values.shape[:-2], -1) if chunks else np.zeros((*values.shape[:-2], 0))

    values = np.where(inside, np.stack([by_head(rows.values[name]) for name in BLOCK_METRICS]), np.nan)
    norms = values[BLOCK_METRICS.index("jacobian_norm")]
    return {
        "head": np.repeat(np.arange(heads), len(chunks)),
        "block": np.tile(np.arange(len(chunks)), heads),
        "rows": over_chunks(lambda chunk: chunk.sum(-1), inside).astype(np.int64),
        **dict(zip(BLOCK_METRICS, over_chunks(partial(_quantile, share=0.5), values), strict=True)),
        BLOCK_NORM: over_chunks(partial(_quantile, share=0.75), norms),
    }


def _quantile(values: np.ndarray, share: float) -> np.ndarray:
    """Return the linear quantile of the last axis without NaN; NaN if none is left."""
    ordered = np.sort(values, axis=-1)  # NaN comes last
    count = (~np.isnan(ordered)).sum(-1)
    position = share * np.maximum(count - 1, 0)
    low, high = np.floor(position).astype(int), np.ceil(position).astype(int)
    below, above = (np.take_along_axis(ordered, index[..., None], -1)[..., 0] for index in (low, high))
    with np.errstate(invalid="ignore"):  # inf - inf: the quantile is infinite
        between = np.where(below == above, below, below + (position - low) * (above - below))
    return np.where(count > 0, between, np.nan)
