"""Per-row numbers summarised per head: mean and quantiles over the rows whose n lies in a bin, the batch pooled."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

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
    """`summarise` for several numbers of the same rows at once."""
    names = list(values)
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
    if values.device.type != "cpu":
        return _summarise_on_device(values, n, bins, broken, quantiles)
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
        for which, share in enumerate(quantiles):
            found[some, index, which] = _quantile(ordered[some], count[some], share)
    return Summary(mean, found, rows)


def _summarise_on_device(
    values: Tensor, n: Tensor, bins: Sequence[tuple[int, int]], broken: Tensor, quantiles: Sequence[float]
) -> Summary:
    """One sort of all rows by bin and value, in torch: what travels to the CPU is the summary alone."""
    numbers, keys, bad = (t.expand_as(values).transpose(0, 1).flatten(1) for t in (values.double(), n, broken))
    count = len(bins)
    bin_of = torch.full_like(keys, count)  # of rows outside all bins
    for index, (fewest, most) in enumerate(bins):
        bin_of = torch.where((keys >= fewest) & (keys <= most) & ~bad, index, bin_of)
    rows = _per_bin(bin_of, torch.ones_like(numbers), count)
    missing = numbers.isnan()
    numbers, bin_of = torch.where(missing, 0.0, numbers), torch.where(missing, count, bin_of)
    found = _per_bin(bin_of, torch.ones_like(numbers), count)
    mean = _per_bin(bin_of, numbers, count) / found  # 0 / 0 where there is no number
    ordered, order = numbers.sort(dim=1)
    by_bin = bin_of.gather(1, order).sort(dim=1, stable=True).indices
    ordered = ordered.gather(1, by_bin)
    start = found.cumsum(1) - found
    parts = []
    last = (found - 1).clamp(min=0)
    for share in quantiles:
        at = share * last
        below = at.floor()
        low, high = (
            ordered.gather(1, (start + place).long().clamp(max=ordered.shape[1] - 1))
            for place in (below, torch.minimum(below + 1, last))
        )
        between = torch.where((low == high) | (at == below), low, low + (high - low) * (at - below))
        parts.append(torch.where(found > 0, between, torch.nan))
    stacked = torch.stack(parts, -1) if parts else numbers.new_zeros(*found.shape, 0)
    return Summary(mean.cpu().numpy(), stacked.cpu().numpy(), rows.long().cpu().numpy())


def _per_bin(bin_of: Tensor, values: Tensor, bins: int) -> Tensor:
    """Sums of values (H, M) over the members of each bin, (H, bins)."""
    return values.new_zeros(len(values), bins + 1).scatter_add_(1, bin_of, values)[:, :bins]


def _per_head(values: Tensor) -> np.ndarray:
    """(B, H, R) -> (H, B R)."""
    return np.asarray(values.transpose(0, 1).flatten(1).cpu().numpy())


def _quantile(ordered: np.ndarray, count: np.ndarray, share: float) -> np.ndarray:
    """Between the two nearest of the first `count` numbers of each row; infinite ones are not interpolated."""
    rank = share * (count - 1)
    below = np.floor(rank).astype(np.int64)
    low = np.take_along_axis(ordered, below[:, None], 1)[:, 0]
    high = np.take_along_axis(ordered, np.minimum(below + 1, count - 1)[:, None], 1)[:, 0]
    with np.errstate(invalid="ignore"):
        between = low + (high - low) * (rank - below)
    return np.where((low == high) | (rank == below), low, between)
