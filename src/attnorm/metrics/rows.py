"""`measure_rows`: the statistics of every row of an attention call (catalogue.PER_ROW), for several normalizers.

On a CPU, one pass over blocks of logits measures all normalizers. On a GPU, Triton kernels measure softmax, rescaled
softmax (fused_rows.py) and the maps that have a kernel (fused_maps.py). A row without visible keys is NaN everywhere.
So is a row with logits or weights that are not finite; it is also marked as broken.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from threading import Lock

import torch
from torch import Tensor

from attnorm.engines.execution import in_threads, sent_to
from attnorm.metrics import fused_maps, fused_rows
from attnorm.metrics.call import LOW, AttentionCall, LogitBlock, LogitWorkspace, logit_blocks
from attnorm.metrics.catalogue import PER_ROW
from attnorm.metrics.normalized import Choice, MeasuredNormalizer, resolve_normalizers, rows_block
from attnorm.metrics.row_statistics import (
    SplitRows,
    largest_numbers,
    requested_numbers,
    row_sums,
    softmax_statistics,
    split_rows,
    sums_of_first,
    weight_rows,
)
from attnorm.metrics.sampling import evenly_spaced
from attnorm.metrics.sensitivity import POWER_ROWS, jacobian_norm, sampled_norm
from attnorm.normalizers.contract import Normalizer
from attnorm.theory.dispersion import entropy_floor, horizon, sharp_weight_bounds
from attnorm.theory.selection import at_least_float32

OnWeights = Callable[[LogitBlock, Tensor], None]


@dataclass(frozen=True)
class RowStatistics:
    """Statistics of R rows of each head, (B, H, R)."""

    n: Tensor  # number of visible keys
    values: dict[str, Tensor]  # by requested name; NaN if a number is undefined
    top_mass: Tensor  # (B, H, R, len(top_n)): share of the row's weight on its N heaviest keys
    broken: Tensor  # boolean: logits or weights are not finite


@torch.no_grad()
def measure_rows(
    call: AttentionCall,
    normalizers: Sequence[Choice | MeasuredNormalizer],
    rows: Tensor,
    top_n: Sequence[int],
    *,
    names: Sequence[str] = PER_ROW,
    block_elements: int | None = None,
    mass_rows: int | None = fused_rows.MASS_ROWS,
    on_weights: OnWeights | None = None,
) -> dict[str, RowStatistics]:
    """Return the statistics of these queries (sorted indices) by the normalizers' names; None is named "model".

    Entropy, effective keys, largest weight and masses are those of |w| / sum |w|. Numbers without the sink leave out
    the first visible key of the row. Limits (ceiling, floor, horizon) exist for softmax and rescaled softmax; they are
    NaN for other maps. Spread and largest logit are those of the model's logits.

    names: statistics to return (default: all). mass_rows: see `measure_by_kernel`. on_weights: function that gets the
    weights (h, r, w) of each block of a map that is not softmax.
    """
    if top_n and min(top_n) < 1:
        raise ValueError(f"expected top_n as whole numbers of at least 1, got {tuple(top_n)}.")
    resolved = resolve_normalizers(call, normalizers)
    by_kernel = call.query_BHQD.is_cuda and len(rows) >= fused_rows.MIN_KERNEL_ROWS and fused_rows.applies(call)
    softmaxes = [normalizer for normalizer in resolved if normalizer.scaled_softmax] if by_kernel else []
    maps = [
        normalizer
        for normalizer in resolved
        if normalizer not in softmaxes and fused_maps.kernel_form(normalizer.normalizer) is not None
    ]
    maps = maps if by_kernel and on_weights is None else []
    others = [normalizer for normalizer in resolved if normalizer not in softmaxes and normalizer not in maps]
    statistics = {}
    if others:
        statistics = _measure_in_blocks(call, others, rows, top_n, names, block_elements, on_weights)
    if softmaxes:
        statistics |= measure_by_kernel(call, softmaxes, rows, top_n, names, mass_rows)
    for normalizer in maps:
        map_ = fused_maps.row_map_of(normalizer, call, rows)
        statistics[normalizer.name] = measure_map_by_kernel(call, map_, rows, top_n, names, mass_rows)
    return statistics


@torch.no_grad()
def measure_map_by_kernel(
    call: AttentionCall,
    map_: fused_maps.RowMap,
    rows: Tensor,
    top_n: Sequence[int],
    names: Sequence[str] = PER_ROW,
    mass_rows: int | None = fused_rows.MASS_ROWS,
) -> RowStatistics:
    """Measure rows of a map that is not softmax with its Triton kernel. mass_rows: as in measure_by_kernel."""
    fused = fused_maps.fused_map(call, rows, names, map_)
    top_mass = fused.largest_share.new_empty((*fused.n.shape, 0))
    if top_n:
        summed_rows = _choose_mass_rows(call, rows, mass_rows)
        top_mass = fused_maps.heaviest_masses(call, rows, summed_rows, map_, fused, top_n)
        top_mass = top_mass.masked_fill((fused.broken | (fused.n < 1)).unsqueeze(-1), torch.nan)
    return RowStatistics(fused.n, fused.values, top_mass, fused.broken)


def measure_by_kernel(
    call: AttentionCall,
    chosen: Sequence[MeasuredNormalizer],
    rows: Tensor,
    top_n: Sequence[int],
    names: Sequence[str] = PER_ROW,
    mass_rows: int | None = fused_rows.MASS_ROWS,
) -> dict[str, RowStatistics]:
    """Measure rows of softmax and rescaled softmax with the Triton kernel.

    mass_rows: number of rows for which the masses of the heaviest keys are computed; NaN for the others. They are taken
    from the later half, whose rows are the longest in a causal call, or from all rows if each has its own mask. With
    more than 32,768 keys they are fewer (see MASS_LOGITS). None: every row.
    """
    n = fused_rows.visible_keys(call, rows) if any(normalizer.rescales for normalizer in chosen) else None
    statistics = {}
    tops = []  # for the masses of the heaviest keys: the factor of the logits, and the share of the largest key
    for normalizer in chosen:
        factor = None if n is None or not normalizer.rescales else fused_rows.factors(normalizer, call, rows, n)
        sink = normalizer.learned_sink(call, slice(0, call.query_BHQD.shape[1]))
        fused = fused_rows.fused_rows(call, rows, names, factor, sink)
        statistics[normalizer.name] = RowStatistics(
            fused.n, fused.values, fused.largest_share.new_empty((*fused.n.shape, 0)), fused.broken
        )
        tops.append((factor, fused.largest_share))
    if top_n:
        summed_rows = _choose_mass_rows(call, rows, mass_rows)
        masses = _top_masses(call, rows, summed_rows, tops, top_n)
        statistics = {
            name: replace(
                row_statistics,
                top_mass=mass.masked_fill((row_statistics.broken | (row_statistics.n < 1)).unsqueeze(-1), torch.nan),
            )
            for (name, row_statistics), mass in zip(statistics.items(), masses, strict=True)
        }
    return statistics


def _choose_mass_rows(call: AttentionCall, rows: Tensor, mass_rows: int | None) -> Tensor:
    """Return the indices of the rows whose heaviest keys are summed."""
    indices = torch.arange(len(rows))
    if mass_rows is None:
        return indices
    ordered = call.mask is None or call.mask.shape[-2] == 1  # a mask per query may hold several documents
    most = max(1, min(mass_rows, fused_rows.MASS_LOGITS // call.key_BGKD.shape[-2]))
    return evenly_spaced(indices[len(rows) // 2 :] if ordered else indices, most)


def _top_masses(
    call: AttentionCall,
    rows: Tensor,
    summed_rows: Tensor,
    tops: Sequence[tuple[Tensor | None, Tensor]],
    top_n: Sequence[int],
) -> list[Tensor]:
    """Return the share of the N heaviest keys, (B, H, R, N), for some of the rows (indices); NaN for the others.

    tops, one per softmax: the factor of its logits (B, H, R, 1), and the share of the largest key (B, H, R). The other
    shares follow from differences of the logits here, which round in another way than those of the kernel.
    """
    device = call.query_BHQD.device
    shape = (*call.query_BHQD.shape[:2], len(rows), len(top_n))
    masses_per_softmax = [torch.full(shape, torch.nan, device=device) for _ in tops]
    at_rows = sent_to(device, summed_rows)
    for block in logit_blocks(call, rows[summed_rows], all_heads=True):
        row_indices = at_rows[block.rows]
        for (factor, share), masses in zip(tops, masses_per_softmax, strict=True):
            z = block.logits
            if factor is not None:
                z = block.hide(z * factor[block.item, block.heads][:, row_indices])
            largest = largest_numbers(z, max(top_n))
            largest_share = share[block.item, block.heads][:, row_indices].unsqueeze(-1)
            shares = largest_share * torch.exp(largest - largest[..., :1])
            masses[block.item, block.heads, row_indices] = sums_of_first(shares, top_n).clamp(max=1)
    return masses_per_softmax


def _measure_in_blocks(
    call: AttentionCall,
    normalizers: Sequence[MeasuredNormalizer],
    rows: Tensor,
    top_n: Sequence[int],
    names: Sequence[str],
    block_elements: int | None,
    on_weights: OnWeights | None,
) -> dict[str, RowStatistics]:
    """Measure all normalizers in one pass over blocks of logits; on a CPU, heads are divided among threads."""
    if call.query_BHQD.shape[0] * len(rows) == 0:
        return {normalizer.name: _no_rows(call, len(rows), top_n, names) for normalizer in normalizers}
    if not top_n:
        with_mass = _measure_in_blocks(call, normalizers, rows, (1,), names, block_elements, on_weights)
        return {
            name: replace(statistics, top_mass=statistics.top_mass[..., :0]) for name, statistics in with_mass.items()
        }
    # Softmax of unchanged logits comes last, because it overwrites them.
    normalizers = sorted(normalizers, key=lambda normalizer: normalizer.scaled_softmax and not normalizer.rescales)
    together = _mask_per_head(call) or not all(normalizer.scaled_softmax for normalizer in normalizers)
    query = at_least_float32(call.query_BHQD)
    limits, *arrays_per_normalizer = (_RowArrays((*query.shape[:2], len(rows))) for _ in range(1 + len(normalizers)))

    def measure(key_heads: range) -> None:
        workspace = LogitWorkspace(query)
        blocks = logit_blocks(call, rows, all_heads=together, key_heads=key_heads, block_elements=block_elements)
        for block in blocks:
            logits = block.logits.view(-1, block.logits.shape[-1])
            split = split_rows(logits, block)
            limits.put(block, n=block.n, logits=torch.cat([split.sink, split.largest, split.smallest], -1))
            for normalizer, arrays in zip(normalizers, arrays_per_normalizer, strict=True):
                if normalizer.scaled_softmax:
                    last = normalizer is normalizers[-1]
                    values = _statistics_of_softmax(normalizer, call, block, logits, split, top_n, workspace, last=last)
                else:
                    assert normalizer.normalizer is not None
                    values = _statistics_of_weights(normalizer.normalizer, call, block, len(rows), top_n, on_weights)
                arrays.put(block, **values)

    in_threads(measure, call.key_BGKD.shape[1], query.device, whole=together)
    return {
        normalizer.name: _finish_statistics(limits.values, arrays.values, top_n, names)
        for normalizer, arrays in zip(normalizers, arrays_per_normalizer, strict=True)
    }


def _no_rows(call: AttentionCall, rows: int, top_n: Sequence[int], names: Sequence[str]) -> RowStatistics:
    empty = at_least_float32(call.query_BHQD.new_empty((*call.query_BHQD.shape[:2], rows)))
    masses = empty.new_empty((*empty.shape, len(top_n)))
    return RowStatistics(empty.long(), dict.fromkeys(names, empty), masses, empty.bool())


def _mask_per_head(call: AttentionCall) -> bool:
    return call.mask is not None and call.mask.dim() > 2 and call.mask.shape[-3] > 1


class _RowArrays:
    """Arrays (B, H, R, c) by name, filled block by block."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        self._lock = Lock()  # each thread fills the numbers of its own heads
        self.values: dict[str, Tensor] = {}

    def put(self, block: LogitBlock, **values: Tensor) -> None:
        """Store the values of a block: (h r, c), or (1 or h, r)."""
        shape = block.logits.shape[:-1]
        for name, value in values.items():
            value = value.reshape(*shape, -1) if len(value) == shape.numel() else value.expand(shape).unsqueeze(-1)
            with self._lock:
                if name not in self.values:
                    self.values[name] = value.new_empty((*self._shape, value.shape[-1]))
            self.values[name][block.item, block.heads, block.rows] = value


def _statistics_of_softmax(
    normalizer: MeasuredNormalizer,
    call: AttentionCall,
    block: LogitBlock,
    logits: Tensor,
    split: SplitRows,
    top_n: Sequence[int],
    workspace: LogitWorkspace,
    *,
    last: bool,
) -> dict[str, Tensor]:
    factor = normalizer.factor(call, block)
    sink = normalizer.learned_sink(call, block.heads)
    if factor is None:
        return {"sums": row_sums(logits if last else logits.clone(), block, split, top_n, workspace, sink)}
    scaled = block.hide(block.logits * factor).view_as(logits)
    sums = row_sums(scaled, block, split_rows(scaled, block), top_n, workspace, sink)
    return {"sums": sums, "gain": factor.abs().expand(*block.logits.shape[:-1], 1).reshape(-1, 1)}


def _statistics_of_weights(
    normalizer: Normalizer,
    call: AttentionCall,
    block: LogitBlock,
    rows: int,
    top_n: Sequence[int],
    on_weights: OnWeights | None,
) -> dict[str, Tensor]:
    view = rows_block(call, block)
    weights = normalizer.weights(view)
    if on_weights is not None:
        on_weights(block, weights[0])
    sink = normalizer.sink is not None and normalizer.map.properties.row_sum == "one"
    values = weight_rows(weights[0], block, top_n, rest_is_sink=sink)
    norm = jacobian_norm(normalizer, view, weights)
    if norm is None:
        norm = torch.full_like(weights[..., 0], torch.nan)
        few = _power_rows(block, rows)
        if len(few):
            norm[..., few] = sampled_norm(normalizer, view.select_rows(few)).to(norm.dtype)
    return values | {"jacobian_norm": norm.expand(weights.shape[:-1]).reshape(-1, 1)}


def _power_rows(block: LogitBlock, rows: int) -> Tensor:
    """Return which rows of the block are among POWER_ROWS rows, evenly spaced over all rows."""
    few = evenly_spaced(torch.arange(rows, device=block.queries.device), POWER_ROWS)
    return few[(few >= block.rows.start) & (few < block.rows.stop)].sub(block.rows.start)


def _finish_statistics(
    limits: dict[str, Tensor], collected: dict[str, Tensor], top_n: Sequence[int], names: Sequence[str]
) -> RowStatistics:
    """Combine sums or weights of the rows with their extreme logits, and add ratios and limits."""
    n = limits["n"].squeeze(-1)
    sink, largest, smallest = limits["logits"].unbind(-1)
    if "sums" in collected:
        values, top_mass = softmax_statistics(collected["sums"], n, top_n)
        if "gain" in collected:
            values["jacobian_norm"] = values["jacobian_norm"] * collected["gain"].squeeze(-1)
    else:
        values = {name: value.squeeze(-1) for name, value in collected.items() if name != "top_mass"}
        values["logsumexp"] = torch.full_like(values["row_sum"], torch.nan)
        top_mass = collected["top_mass"]
    max_logit = torch.maximum(sink, largest)
    distance = max_logit - torch.minimum(sink, smallest)
    finite = (max_logit - distance + values["row_sum"]).isfinite()  # whether all three are finite
    finite &= max_logit > LOW  # else hidden keys would take weight
    unsound = ~finite | (n < 1)
    distance = distance.masked_fill(unsound, torch.nan)
    rest = (largest - smallest).masked_fill(n <= 1, torch.nan)
    keys = n.to(distance.dtype).clamp(min=1)
    entropy_rest = values.pop("entropy_nats_without_sink")
    values |= {
        "max_logit": max_logit,
        "min_logit": torch.minimum(sink, smallest),
        "logit_spread": distance,
        "logit_spread_without_sink": rest,
        "entropy_ratio": (values["entropy_nats"] / torch.log(keys)).masked_fill(n <= 1, torch.nan),
        "entropy_ratio_without_sink": (entropy_rest / torch.log(keys - 1)).masked_fill(n <= 2, torch.nan),
    }
    if not {*names} <= {*values}:
        # The limits are those of the rescaled logits. A map that is not softmax has no such limits.
        gain: float | Tensor = 1.0 if "sums" in collected else torch.nan
        if "gain" in collected:
            gain = collected["gain"].squeeze(-1)
        values |= _softmax_limits(distance * gain, rest * gain, keys)
    values = requested_numbers(values, names, "_finish_statistics of metrics/rows.py")
    return RowStatistics(
        n=n,
        values={name: value.masked_fill(unsound, torch.nan) for name, value in values.items()},
        top_mass=top_mass.masked_fill(unsound.unsqueeze(-1), torch.nan),
        broken=~finite & (n > 0),
    )


def _softmax_limits(reach: Tensor, rest: Tensor, keys: Tensor) -> dict[str, Tensor]:
    """Return the limits of softmax for logits of the spread `reach` over n keys; rest: the spread without the sink."""
    return {
        "weight_ceiling": sharp_weight_bounds(reach, keys).upper,
        "entropy_floor": entropy_floor(reach, keys).masked_fill(reach.isnan(), torch.nan),
        "horizon": horizon(reach.double()),  # e^spread leaves float32 at 89
        "horizon_without_sink": horizon(rest.double()),
    }
