"""Means and quantiles of numbers on a device, bin by bin: without sorting where Triton runs, else by one sort."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnorm.engines.device_sync import sent_to
from attnorm.engines.triton_support import runs_triton
from attnorm.kernels.launch import device_of

BLOCK, WARPS = 2048, 16  # numbers per step of a program: its steps wait for each other, so few and wide ones


@dataclass(frozen=True)
class Binned:
    """Per list and bin; NaN where no member of the bin has a number."""

    mean: Tensor  # (lists, bins), float64
    quantiles: Tensor  # (lists, bins, len(shares)), float64
    members: Tensor  # (lists, bins): with or without a number


def bin_ids(keys: Tensor, bins: Sequence[tuple[int, int]], left_out: Tensor) -> Tensor:
    """The index of the bin (low, high), both included, that each of the keys falls into; -1 for none or left out."""
    order = sorted(range(len(bins)), key=lambda index: bins[index])
    columns = torch.tensor([[bins[i][0] for i in order], [bins[i][1] for i in order], order])
    low, high, index = sent_to(keys.device, columns).unbind()
    place = torch.bucketize(keys, low, right=True) - 1
    at = place.clamp(min=0)
    inside = (place >= 0) & (keys <= high[at]) & ~left_out
    return torch.where(inside, index[at], -1).to(torch.int32)


def binned(numbers: Tensor, ids: Tensor, bins: int, shares: Sequence[float]) -> Binned:
    """Lists of numbers (lists, M) divided by ids (heads, M) into bins from 0 to bins - 1, -1 for none.

    List i has the ids of head i modulo heads. NaN is left out. Quantiles lie between the two nearest numbers.
    """
    solve = _by_kernel if runs_triton(numbers.device) else _by_sorting
    mean, below, above, count, members = solve(numbers.contiguous(), ids.contiguous(), bins, shares)
    last = (count - 1).clamp(min=0).double().unsqueeze(-1)
    at = sent_to(numbers.device, torch.tensor(shares, dtype=torch.float64)) * last
    between = torch.where((below == above) | (at == at.floor()), below, below + (above - below) * (at - at.floor()))
    some = (count > 0).unsqueeze(-1)
    return Binned(torch.where(count > 0, mean, torch.nan), torch.where(some, between, torch.nan), members)


def _by_kernel(
    numbers: Tensor, ids: Tensor, bins: int, shares: Sequence[float]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    import triton

    from attnorm.kernels.order_statistics import bin_ranges, order_statistics

    (lists, length), device = numbers.shape, numbers.device
    begin, end = (torch.empty((len(ids), bins), dtype=torch.int32, device=device) for _ in range(2))
    places = int(triton.next_power_of_2(max(len(shares), 1)))
    wanted = torch.zeros(places, dtype=torch.float64)
    wanted[: len(shares)] = torch.tensor(shares, dtype=torch.float64)
    wanted = sent_to(device, wanted)
    members, counts = (torch.empty((lists, bins), dtype=torch.int32, device=device) for _ in range(2))
    means = torch.empty((lists, bins), dtype=torch.float64, device=device)
    below, above = (torch.empty((lists, bins, places), dtype=numbers.dtype, device=device) for _ in range(2))
    with device_of(numbers):
        bin_ranges[(len(ids) * bins,)](ids, begin, end, length, bins, BLOCK=BLOCK)
        order_statistics[(lists * bins,)](
            numbers, ids, begin, end, wanted, members, counts, means, below, above, length, bins, len(ids),
            ASKED=len(shares), SHARES=places, BITS=8 * numbers.element_size(), BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    asked = slice(len(shares))
    return means, below[..., asked].double(), above[..., asked].double(), counts, members


def _by_sorting(
    numbers: Tensor, ids: Tensor, bins: int, shares: Sequence[float]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """One sort of all numbers by bin and value."""
    numbers = numbers.double()
    where = (ids.long() % (bins + 1)).repeat(len(numbers) // len(ids), 1)
    ones = torch.ones_like(numbers)
    members = _per_bin(where, ones, bins).int()
    missing = numbers.isnan()
    numbers, where = torch.where(missing, 0.0, numbers), torch.where(missing, bins, where)
    count = _per_bin(where, ones, bins)
    mean = _per_bin(where, numbers, bins) / count
    ordered, order = numbers.sort(dim=1)
    ordered = ordered.gather(1, where.gather(1, order).sort(dim=1, stable=True).indices)
    start = (count.cumsum(1) - count).unsqueeze(-1)
    last = (count - 1).clamp(min=0).unsqueeze(-1)
    low = (torch.tensor(shares, dtype=torch.float64, device=numbers.device) * last).floor()
    below, above = (
        ordered.gather(1, (start + place).long().clamp(max=ordered.shape[1] - 1).flatten(1)).view(place.shape)
        for place in (low, torch.minimum(low + 1, last))
    )
    return mean, below, above, count.int(), members


def _per_bin(where: Tensor, values: Tensor, bins: int) -> Tensor:
    """Sums of values (lists, M) over the members of each bin, (lists, bins)."""
    return values.new_zeros(len(values), bins + 1).scatter_add_(1, where, values)[:, :bins]
