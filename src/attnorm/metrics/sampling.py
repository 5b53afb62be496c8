"""Which rows of a batch are measured, and how their numbers are summarized: per head and per bin of visible keys n.

In a causal call row i has a context of length i, so one pass gives every curve against length. Bins are half an octave
wide and start at the longest row, so that lengths that differ by a power of two share their bins. Padded rows are not
measured. A summary is the mean and quantiles over all rows of the batch whose n is in a bin. On a GPU with Triton a
kernel finds the quantiles; otherwise the numbers are sorted once.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from attnorm.engines.execution import each_in_a_thread, runs_triton, sent_to, sent_to_cpu
from attnorm.engines.inputs import to_four_dimensions
from attnorm.kernels.launch import device_of
from attnorm.metrics.call import AttentionCall

Rows = Literal["auto", "all", "last"] | int
AUTO_ROWS = 512  # rows per window for "auto"; more would take longer than the model's own pass and change little
# Source of a layer's random numbers: a generator, or numbers that were drawn before, one tensor per item of the batch.
Source = torch.Generator | list[Tensor] | None
SHORTEST = 8  # keys; statistics of shorter rows mean little

# How many numbers of a bin a program keeps in registers, and its warps: 32 per thread, so that what each step of a
# search costs besides is small. Of longer bins it keeps half as many per thread and reads the others again.
KEPT = ((1024, 1), (4096, 4), (8192, 8), (16384, 16))
KEPT_OF_LONGER = (8192, 16)
RANGE_BLOCK = 2048
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def length_bins(longest: int) -> list[tuple[int, int]]:
    """Return bins (n_low, n_high), both inclusive, longest first: (L/sqrt 2, L], (L/2, L/sqrt 2], ... to 8 keys."""
    if longest < 1:
        raise ValueError(f"expected at least one visible key in the longest row, got {longest}.")
    if longest < SHORTEST:
        return [(1, longest)]
    bins = []
    half_octaves = 0
    high = longest
    while high >= SHORTEST:
        half_octaves += 1
        below = math.floor(longest / 2 ** (half_octaves / 2))
        bins.append((max(below + 1, SHORTEST), high))
        high = below
    return bins


def rows_to_measure(rows: Rows, queries: int, *, causal: bool, keys: int | None = None) -> Tensor:
    """Return sorted query indices, always including the last row.

    rows: "all", "last", a number of rows, or "auto" for AUTO_ROWS. In a causal call, a quarter of them are in the
    longest bin of n, which decides verdicts, and the rest is divided evenly among all bins. Otherwise they are evenly
    spaced. keys: number of keys if it differs from the queries (a cache); row i sees i + 1 + keys - queries of them.
    """
    if queries < 1:
        raise ValueError(f"expected at least one query, got {queries}.")
    if rows == "all":
        return torch.arange(queries)
    count = AUTO_ROWS if rows == "auto" else rows
    if rows == "last":
        count = 1
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"expected rows as 'auto', 'all', 'last' or a whole number of at least 1, got {rows!r}.")
    if count >= queries:
        return torch.arange(queries)
    if not causal:
        return evenly_spaced(torch.arange(queries), count)
    n = torch.arange(queries) + 1 + (queries if keys is None else keys) - queries
    bins = [(n >= low) & (n <= high) for low, high in reversed(length_bins(int(n[-1])))]
    members = [inside.nonzero().squeeze(-1) for inside in bins]
    members = [rows_in_bin for rows_in_bin in members if len(rows_in_bin)]
    selected: list[Tensor] = []
    for_longest = count // 4
    left = count - for_longest
    for index, rows_in_bin in enumerate(members):
        last = index == len(members) - 1
        quota = min(len(rows_in_bin), left // (len(members) - index) + (for_longest if last else 0))
        left += (for_longest if last else 0) - quota
        if quota:
            selected.append(evenly_spaced(rows_in_bin, quota))
    if left:  # the bins have fewer rows than wanted: also take rows with fewer than SHORTEST keys
        selected_rows = torch.cat(selected) if selected else n[:0]
        others = torch.arange(queries)[~torch.isin(torch.arange(queries), selected_rows)]
        selected.append(evenly_spaced(others, left))
    return torch.cat(selected).sort().values


def evenly_spaced(rows: Tensor, count: int) -> Tensor:
    """Return `count` of these rows (all if there are fewer), evenly spaced, including the last."""
    if count >= len(rows):
        return rows
    indices = torch.arange(1, count + 1, dtype=torch.float64, device=rows.device) * (len(rows) / count) - 1
    return rows[indices.round().long()]


def sources_of(given: torch.Generator | Sequence[Source] | None) -> list[Source]:
    """Return the sources of random numbers as a list, one per layer."""
    return [given] if given is None or isinstance(given, torch.Generator) else list(given)


def of_each_source(draw: Callable[[Source], Tensor], sources: Sequence[Source]) -> list[Tensor]:
    """Return draw(source) of all sources, in threads if numbers have yet to be drawn."""
    drawn_before = all(isinstance(source, list) for source in sources)
    return [draw(source) for source in sources] if drawn_before else each_in_a_thread(draw, sources)


@dataclass(frozen=True)
class Sequences:
    """Sequences of a call with the same rows: a whole batch, or one item if padding differs."""

    call: AttentionCall
    rows: Tensor  # sorted query indices


def query_masks(model_inputs: Mapping[str, Tensor], *, encoder_decoder: bool) -> dict[str, Tensor]:
    """Return which queries are tokens, (B, Q) boolean, for each kind of attention with padding.

    The masks of attention calls hide padded keys only. Padded queries still see keys and must be ignored.
    """
    decoder = "decoder_attention_mask" if encoder_decoder else "attention_mask"
    names = {"encoder": "attention_mask", "decoder": decoder, "cross": decoder}
    masks = {kind: model_inputs[name].bool() for kind, name in names.items() if name in model_inputs}
    return {kind: mask for kind, mask in masks.items() if mask.dim() == 2 and not bool(mask.all())}


def sequences(call: AttentionCall, tokens_BQ: Tensor | None, rows: Rows) -> Iterator[Sequences]:
    """Yield the batch, or each item of a padded batch, so that every sequence gives the same rows as alone."""
    queries = call.query_BHQD.shape[-2]
    if tokens_BQ is None or tokens_BQ.shape != (call.query_BHQD.shape[0], queries):
        yield Sequences(call, rows_to_measure(rows, queries, causal=call.causal, keys=call.key_BGKD.shape[-2]))
        return
    for item, tokens in enumerate(tokens_BQ.cpu()):
        present = tokens.nonzero().squeeze(-1)
        if len(present):
            yield Sequences(one_sequence(call, item), present[rows_to_measure(rows, len(present), causal=call.causal)])


def one_sequence(call: AttentionCall, item: int) -> AttentionCall:
    """Return the call for one item of the batch; mask and bias get four dimensions."""

    def item_of(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        tensor = to_four_dimensions(tensor)
        return tensor if tensor.shape[0] == 1 else tensor[item : item + 1]  # 1: shared by all items

    item_slice = slice(item, item + 1)
    return replace(
        call,
        query_BHQD=call.query_BHQD[item_slice],
        key_BGKD=call.key_BGKD[item_slice],
        value_BGKE=call.value_BGKE[item_slice],
        mask=item_of(call.mask),
        bias=item_of(call.bias),
        inputs_BKC=None if call.inputs_BKC is None else call.inputs_BKC[item_slice],
    )


def visible_keys(call: AttentionCall) -> Tensor | None:
    """Return which keys any query sees, (B or 1, 1, K); None if all are seen."""
    if call.mask is None:
        return None
    return to_four_dimensions(call.mask).any(-2).any(1, keepdim=True)


@dataclass(frozen=True)
class Summary:
    """Mean and quantiles per head and bin; NaN if no row of the bin has a number."""

    mean: np.ndarray  # (H, bins)
    quantiles: np.ndarray  # (H, bins, len(quantiles))
    rows: np.ndarray  # (H, bins): rows in the bin that are not broken, with or without a number


def summarize_all(
    values: Mapping[str, Tensor],
    n: Tensor,
    bins: Sequence[tuple[int, int]],
    broken: Tensor,
    *,
    quantiles: Sequence[float] = QUANTILES,
) -> dict[str, Summary]:
    """Apply `summarize` to several numbers of the same rows at once.

    Numbers on a GPU are summarized there. Wait with execution.arrival before reading the summaries.
    """
    names = list(values)
    if n.device.type != "cpu":
        return _summarize_on_device(values, n, bins, broken, quantiles)
    many = len(names)
    stacked = torch.cat([values[name].double() for name in names], 1)
    keys, bad = (t.expand(stacked.shape[0], stacked.shape[1] // many, -1).repeat(1, many, 1) for t in (n, broken))
    summary = summarize(stacked, keys, bins, bad, quantiles=quantiles)
    parts = (np.split(part, many) for part in (summary.mean, summary.quantiles, summary.rows))
    return {name: Summary(*part) for name, part in zip(names, zip(*parts, strict=True), strict=True)}


def summarize(
    values: Tensor,
    n: Tensor,
    bins: Sequence[tuple[int, int]],
    broken: Tensor,
    *,
    quantiles: Sequence[float] = QUANTILES,
) -> Summary:
    """Summarize values of rows. values, n and broken: (B, H, R). bins: (low, high), inclusive, not overlapping.

    NaN is left out. An infinite value makes the mean infinite.
    """
    numbers, keys, bad = (_per_head(t) for t in (values.double(), n.expand_as(values), broken.expand_as(values)))
    heads = len(numbers)
    mean = np.full((heads, len(bins)), np.nan)
    quantile_values = np.full((heads, len(bins), len(quantiles)), np.nan)
    rows = np.zeros((heads, len(bins)), dtype=np.int64)
    for index, (low, high) in enumerate(bins):
        inside = (keys >= low) & (keys <= high) & ~bad
        used = inside.any(0)
        rows[:, index] = inside.sum(1)
        ordered = np.sort(np.where(inside[:, used], numbers[:, used], np.nan), axis=1)  # NaN comes last
        count = (~np.isnan(ordered)).sum(1)
        not_empty = count > 0
        mean[not_empty, index] = np.nansum(ordered[not_empty], 1) / count[not_empty]
        quantile_values[not_empty, index] = _quantiles(ordered[not_empty], count[not_empty], quantiles)
    return Summary(mean, quantile_values, rows)


def _summarize_on_device(
    values: Mapping[str, Tensor],
    n: Tensor,
    bins: Sequence[tuple[int, int]],
    broken: Tensor,
    quantiles: Sequence[float],
) -> dict[str, Summary]:
    """Summarize on the GPU and copy only the summaries to the CPU; see execution.arrival."""
    shape = next(iter(values.values())).shape
    heads = shape[1]
    keys, left_out = (t.expand(shape).transpose(0, 1).flatten(1) for t in (n, broken))
    ids = bin_ids(keys, bins, left_out)
    summaries: dict[str, Summary] = {}
    for dtype in {value.dtype for value in values.values()}:
        names = [name for name, value in values.items() if value.dtype == dtype]
        numbers = torch.stack([values[name] for name in names]).transpose(1, 2).flatten(0, 1).flatten(1)
        parts = binned(numbers, ids, len(bins), quantiles)
        mean, shares, rows = (sent_to_cpu(t).numpy() for t in (parts.mean, parts.quantiles, parts.members.long()))
        for index, name in enumerate(names):
            of_name = slice(index * heads, (index + 1) * heads)
            summaries[name] = Summary(mean[of_name], shares[of_name], rows[of_name])
    return {name: summaries[name] for name in values}


def _per_head(values: Tensor) -> np.ndarray:
    """Reshape (B, H, R) to (H, B R)."""
    return np.asarray(values.transpose(0, 1).flatten(1).cpu().numpy())


def _quantiles(ordered: np.ndarray, count: np.ndarray, shares: Sequence[float]) -> np.ndarray:
    """Return quantiles of the first `count` numbers of each row, interpolated unless one of them is infinite."""
    last = count[:, None] - 1
    rank = np.asarray(shares) * last
    below = np.floor(rank).astype(np.int64)
    low = np.take_along_axis(ordered, below, 1)
    high = np.take_along_axis(ordered, np.minimum(below + 1, last), 1)
    with np.errstate(invalid="ignore"):
        between = low + (high - low) * (rank - below)
    return np.where((low == high) | (rank == below), low, between)


@dataclass(frozen=True)
class Binned:
    """Mean and quantiles per list of numbers and bin; NaN if no member of the bin has a number."""

    mean: Tensor  # (lists, bins), float64
    quantiles: Tensor  # (lists, bins, len(shares)), float64
    members: Tensor  # (lists, bins): with or without a number


def bin_ids(keys: Tensor, bins: Sequence[tuple[int, int]], left_out: Tensor) -> Tensor:
    """Return the index of the bin (low, high), inclusive, of each entry; -1 for no bin or for those left out."""
    order = sorted(range(len(bins)), key=lambda index: bins[index])
    columns = torch.tensor([[bins[i][0] for i in order], [bins[i][1] for i in order], order])
    low, high, index = sent_to(keys.device, columns).unbind()
    position = torch.bucketize(keys, low, right=True) - 1
    bin_index = position.clamp(min=0)
    inside = (position >= 0) & (keys <= high[bin_index]) & ~left_out
    return torch.where(inside, index[bin_index], -1).to(torch.int32)


def binned(numbers: Tensor, ids: Tensor, bins: int, shares: Sequence[float]) -> Binned:
    """Summarize lists of numbers (lists, M) by bins. ids (heads, M): bin of each number, -1 for none.

    List i has the ids of head i modulo heads. NaN is left out. Quantiles are interpolated.
    """
    solve = _by_kernel if runs_triton(numbers.device) else _by_sorting
    mean, below, above, count, members = solve(numbers.contiguous(), ids.contiguous(), bins, shares)
    last = (count - 1).clamp(min=0).double().unsqueeze(-1)
    rank = sent_to(numbers.device, torch.tensor(shares, dtype=torch.float64)) * last
    between = torch.where(
        (below == above) | (rank == rank.floor()), below, below + (above - below) * (rank - rank.floor())
    )
    not_empty = (count > 0).unsqueeze(-1)
    return Binned(torch.where(count > 0, mean, torch.nan), torch.where(not_empty, between, torch.nan), members)


def _by_kernel(
    numbers: Tensor, ids: Tensor, bins: int, shares: Sequence[float]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from attnorm.kernels.bin_quantiles import bin_quantiles, bin_ranges

    (lists, length), device = numbers.shape, numbers.device
    begin, end = (torch.empty((len(ids), bins), dtype=torch.int32, device=device) for _ in range(2))
    asked = sent_to(device, torch.tensor(shares, dtype=torch.float64))
    members, counts = (torch.empty((lists, bins), dtype=torch.int32, device=device) for _ in range(2))
    means = torch.empty((lists, bins), dtype=torch.float64, device=device)
    below, above = (torch.empty((lists, bins, len(shares)), dtype=numbers.dtype, device=device) for _ in range(2))
    with device_of(numbers):
        bin_ranges[(len(ids) * bins,)](ids, begin, end, length, bins, BLOCK=RANGE_BLOCK)
        for over, size, longer, warps in _launches(length):
            bin_quantiles[(lists * bins,)](
                numbers, ids, begin, end, asked, members, counts, means, below, above, length, bins, len(ids),
                len(shares), BITS=8 * numbers.element_size(), OVER=over, SIZE=size, LONG=longer, num_warps=warps,
            )  # fmt: skip
    return means, below.double(), above.double(), counts, members


def _launches(length: int) -> Iterator[tuple[int, int, bool, int]]:
    """Yield (over, size, longer, warps): which bins a launch is for, and how many of their numbers it keeps.

    These are bins of more than `over` and up to `size` numbers, or longer ones too. A list has `length` numbers.
    """
    over = -1
    for size, warps in KEPT:
        if over < length:
            yield over, size, False, warps
        over = size
    if over < length:
        yield over, KEPT_OF_LONGER[0], True, KEPT_OF_LONGER[1]


def _by_sorting(
    numbers: Tensor, ids: Tensor, bins: int, shares: Sequence[float]
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Summarize by one sort of all numbers by bin and value."""
    numbers = numbers.double()
    bin_index = (ids.long() % (bins + 1)).repeat(len(numbers) // len(ids), 1)
    ones = torch.ones_like(numbers)
    members = _per_bin(bin_index, ones, bins).int()
    missing = numbers.isnan()
    numbers, bin_index = torch.where(missing, 0.0, numbers), torch.where(missing, bins, bin_index)
    count = _per_bin(bin_index, ones, bins)
    mean = _per_bin(bin_index, numbers, bins) / count
    ordered, order = numbers.sort(dim=1)
    ordered = ordered.gather(1, bin_index.gather(1, order).sort(dim=1, stable=True).indices)
    start = (count.cumsum(1) - count).unsqueeze(-1)
    last = (count - 1).clamp(min=0).unsqueeze(-1)
    low = (torch.tensor(shares, dtype=torch.float64, device=numbers.device) * last).floor()
    below, above = (
        ordered.gather(1, (start + rank).long().clamp(max=ordered.shape[1] - 1).flatten(1)).view(rank.shape)
        for rank in (low, torch.minimum(low + 1, last))
    )
    return mean, below, above, count.int(), members


def _per_bin(bin_index: Tensor, values: Tensor, bins: int) -> Tensor:
    """Return the sum of values (lists, M) over the members of each bin, (lists, bins)."""
    return values.new_zeros(len(values), bins + 1).scatter_add_(1, bin_index, values)[:, :bins]
