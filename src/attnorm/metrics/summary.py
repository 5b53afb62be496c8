"""Per-row numbers summarised per head: mean and quantiles over the rows whose n lies in a bin, the batch pooled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from attnorm.engines.device_sync import sent_to_cpu
from attnorm.metrics.binned import bin_ids, binned

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class Summary:
    """Per head and bin; NaN where no row of the bin has a number."""

    mean: np.ndarray  # (H, bins)
    quantiles: np.ndarray  # (H, bins, len(quantiles))
    rows: np.ndarray  # (H, bins): rows in the bin that are not broken, with or without a number


def summarise_all(
    values: Mapping[str, Tensor],
    n: Tensor,
    bins: Sequence[tuple[int, int]],
    broken: Tensor,
    *,
    quantiles: Sequence[float] = QUANTILES,
) -> dict[str, Summary]:
    """`summarise` for several numbers of the same rows at once.

    Numbers on a GPU are summarised there. Their summary is complete once device_sync.arrival has been waited for.
    """
    names = list(values)
    if n.device.type != "cpu":
        return _summarise_on_device(values, n, bins, broken, quantiles)
    many = len(names)
    stacked = torch.cat([values[name].double() for name in names], 1)
    keys, bad = (t.expand(stacked.shape[0], stacked.shape[1] // many, -1).repeat(1, many, 1) for t in (n, broken))
    every = summarise(stacked, keys, bins, bad, quantiles=quantiles)
    parts = (np.split(part, many) for part in (every.mean, every.quantiles, every.rows))
    return {name: Summary(*part) for name, part in zip(names, zip(*parts, strict=True), strict=True)}


def summarise(
    values: Tensor,
    n: Tensor,
    bins: Sequence[tuple[int, int]],
    broken: Tensor,
    *,
    quantiles: Sequence[float] = QUANTILES,
) -> Summary:
    """values, n and broken: (B, H, R). NaN is left out; an infinite value stays one, and makes the mean infinite.

    Bins do not overlap.
    """
    numbers, keys, bad = (_per_head(t) for t in (values.double(), n.expand_as(values), broken.expand_as(values)))
    heads = len(numbers)
    mean = np.full((heads, len(bins)), np.nan)
    found = np.full((heads, len(bins), len(quantiles)), np.nan)
    rows = np.zeros((heads, len(bins)), dtype=np.int64)
    for index, (low, high) in enumerate(bins):
        inside = (keys >= low) & (keys <= high) & ~bad
        used = inside.any(0)
        rows[:, index] = inside.sum(1)
        ordered = np.sort(np.where(inside[:, used], numbers[:, used], np.nan), axis=1)  # NaN comes last
        count = (~np.isnan(ordered)).sum(1)
        some = count > 0
        mean[some, index] = np.nansum(ordered[some], 1) / count[some]
        found[some, index] = _quantiles(ordered[some], count[some], quantiles)
    return Summary(mean, found, rows)


def _summarise_on_device(
    values: Mapping[str, Tensor],
    n: Tensor,
    bins: Sequence[tuple[int, int]],
    broken: Tensor,
    quantiles: Sequence[float],
) -> dict[str, Summary]:
    """What travels to the CPU is the summary alone; see device_sync.arrival."""
    shape = next(iter(values.values())).shape
    heads = shape[1]
    keys, left_out = (t.expand(shape).transpose(0, 1).flatten(1) for t in (n, broken))
    ids = bin_ids(keys, bins, left_out)
    found: dict[str, Summary] = {}
    for dtype in {value.dtype for value in values.values()}:
        names = [name for name, value in values.items() if value.dtype == dtype]
        numbers = torch.stack([values[name] for name in names]).transpose(1, 2).flatten(0, 1).flatten(1)
        parts = binned(numbers, ids, len(bins), quantiles)
        mean, shares, rows = (sent_to_cpu(t).numpy() for t in (parts.mean, parts.quantiles, parts.members.long()))
        for index, name in enumerate(names):
            of_name = slice(index * heads, (index + 1) * heads)
            found[name] = Summary(mean[of_name], shares[of_name], rows[of_name])
    return {name: found[name] for name in values}


def _per_head(values: Tensor) -> np.ndarray:
    """(B, H, R) -> (H, B R)."""
    return np.asarray(values.transpose(0, 1).flatten(1).cpu().numpy())


def _quantiles(ordered: np.ndarray, count: np.ndarray, shares: Sequence[float]) -> np.ndarray:
    """Between the two nearest of the first `count` numbers of each row; infinite ones are not interpolated."""
    last = count[:, None] - 1
    rank = np.asarray(shares) * last
    below = np.floor(rank).astype(np.int64)
    low = np.take_along_axis(ordered, below, 1)
    high = np.take_along_axis(ordered, np.minimum(below + 1, last), 1)
    with np.errstate(invalid="ignore"):
        between = low + (high - low) * (rank - below)
    return np.where((low == high) | (rank == below), low, between)
