"""Statistics of softmax rows on a GPU, with Triton kernels: one pass over the keys, memory proportional to the rows.

One kernel reads queries and keys and writes sums (kernels/softmax_sums.py). Another converts the sums of a row to its
statistics (kernels/statistics_from_sums.py). On a GPU they replace the logit blocks of rows.py for softmax and rescaled
softmax. The masses of the heaviest keys are measured separately, on some rows only.

`output_and_sums` also computes the output of attention, from the same pass over keys and values, and what a backward
pass needs. metrics/fused_maps.py makes an operator of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnorm.arithmetic import ceil_div
from attnorm.engines.execution import runs_kernels, sent_to
from attnorm.engines.inputs import Inputs, under_transform
from attnorm.kernels.launch import Tile, device_of, empty_rows, fitting, in_rows, padded, product_precision
from attnorm.metrics.call import AttentionCall, LogitBlock, Visibility
from attnorm.metrics.normalized import MeasuredNormalizer
from attnorm.metrics.row_statistics import requested_numbers
from attnorm.normalizers.block import is_exporting

# Passes that refine the Jacobian norm. The first estimate has a relative error of at most 4e-3; a pass turns an error r
# into less than 10 r^2. Enough are made to come below the rounding of the inputs: 4e-3 in bfloat16, 5e-4 in float16.
EXTRA_PASSES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
MIN_KERNEL_ROWS = 65  # for fewer rows, one block of logits is not slower than the kernel
MASS_ROWS = 256  # rows whose heaviest keys are summed; as many of the default 512 sampled rows are long
MASS_LOGITS = 2**23  # limit for the logits per head of these rows; above 32,768 keys there are fewer rows
_LOG2E = 1.4426950408889634
_BLOCK = 128  # rows per program of the kernels that read sums, one row per thread
_MASK_TILE = (16, 256)  # rows and keys whose mask a program counts at a time

# Rows, keys, warps and stages by bytes of a number and padded width, which is at most the key of this table. For half
# precision of width 128 the fastest of five on an H200: 13.2 ms, with tiles of 128 x 128 logits 13.3. The others were
# compiled for it and not timed: a thread holds its part of the output, of a tile of logits and of the sums in 255
# registers, and with larger tiles it spills more. float32 of width 256 spills 0.5 to 0.9 KB per thread.
OUTPUT_TILES: dict[tuple[int, int], Tile] = {
    (2, 64): (64, 64, 4, 3),
    (2, 128): (64, 64, 4, 2),
    (2, 256): (128, 32, 8, 2),
    (4, 64): (64, 32, 4, 2),
    (4, 128): (64, 32, 4, 2),
    (4, 256): (16, 64, 8, 2),
}
# Softmax up to width 64 without a mask: 8.9 ms, with 64 x 64 9.9. With a mask, or with the weights of another map, this
# tile spills about 0.4 KB per thread. 64 x 64 spills nothing with a mask; without one 140 bytes (sigmoid) or 68 (relu,
# softpick). Triton 3.6 for sm_90a.
WIDE_TILE: Tile = (64, 128, 4, 2)
SMALL_OUTPUT_TILES: dict[tuple[int, int], Tile] = {  # instead, where 114,688 bytes of shared memory do not fit
    (2, 256): (64, 32, 8, 2),
    (4, 128): (32, 32, 8, 2),
}


def applies(call: AttentionCall) -> bool:
    """Whether the kernel supports this call: device, dtype, width, and no bias on the logits."""
    return call.bias is None and runs_kernels(call.query_BHQD)


def visible_keys(call: AttentionCall, rows: Tensor) -> Tensor:
    """Return the number of visible keys of each query, (B, H, R)."""
    visibility = Visibility.of(call)
    shape = (*call.query_BHQD.shape[:2], len(rows))
    rows = _indices(call, rows)
    if visibility.mask is not None:
        return _counted(visibility.mask, visibility, rows).expand(shape)
    reach = rows + (visibility.keys - visibility.queries + 1) if visibility.causal else rows * 0 + visibility.keys
    return reach.clamp(0, visibility.keys).long().expand(shape)


def _counted(mask: Tensor, visibility: Visibility, rows: Tensor) -> Tensor:
    """Return how many keys the mask (b, h, 1 or Q, K) leaves visible, (b, h, R)."""
    from attnorm.kernels.statistics_from_sums import visible_keys

    queries, keys = visibility.queries, visibility.keys
    mask = mask.expand(*mask.shape[:2], queries, keys)
    n = torch.empty((*mask.shape[:2], len(rows)), dtype=torch.int64, device=mask.device)
    if n.numel():
        row_tile, key_tile = _MASK_TILE
        programs = ceil_div(len(rows), row_tile) * mask.shape[0] * mask.shape[1]
        with device_of(mask):
            visible_keys[(programs,)](
                mask.view(torch.uint8), rows, n, *mask.stride(), mask.shape[1], len(rows), keys, keys - queries,
                CAUSAL=visibility.causal, ROWS=row_tile, KEYS=key_tile,
            )  # fmt: skip
    return n


def _indices(call: AttentionCall, rows: Tensor | None) -> Tensor:
    """The indices of the queries on their device, in int32. rows: None for all of them."""
    query = call.query_BHQD
    if rows is None or len(rows) == query.shape[2]:
        return torch.arange(query.shape[2], dtype=torch.int32, device=query.device)
    return sent_to(query.device, rows).to(torch.int32)


def factors(one: MeasuredNormalizer, call: AttentionCall, rows: Tensor, n: Tensor) -> Tensor:
    """Return the factor by which a rescaled softmax multiplies the logits of these queries, (B, H, R, 1)."""
    batch, heads = call.query_BHQD.shape[:2]
    mask = Visibility.of(call).mask
    counted = n if mask is not None and mask.shape[1] > 1 else n[:, :1]  # as in a block of logits
    none = torch.empty((heads, len(rows), 0), device=n.device)
    queries = sent_to(n.device, rows)
    row_factors = []
    for item in range(batch):
        block = LogitBlock(
            none, 0, none > 0, counted[item], item, slice(0, heads), slice(0, len(rows)), queries, first_key=0
        )
        factor = one.factor(call, block)
        assert factor is not None
        row_factors.append(factor.expand(heads, len(rows), 1))
    return torch.stack(row_factors)


@dataclass(frozen=True)
class FusedRows:
    """Statistics of each row, (B, H, R); NaN if a row has none."""

    n: Tensor  # number of visible keys
    values: dict[str, Tensor]  # by name
    largest_share: Tensor  # of the weight of the keys, without the learned sink
    broken: Tensor  # boolean: logits or weights are not finite


def fused_rows(
    call: AttentionCall,
    rows: Tensor,
    names: Sequence[str],
    factor: Tensor | None = None,
    learned_sink: Tensor | None = None,
) -> FusedRows:
    """Return the named statistics (of catalogue.PER_ROW) of queries (sorted indices).

    factor: multiplies the logits, broadcastable to (B, H, R, 1). learned_sink (H,): one more logit of each head that
    takes weight.
    """
    launch = RowsLaunch.of(call, rows, factor)
    return rows_of_sums(launch, launch.softmax_sums(), names, learned_sink)


def rows_of_sums(launch: "RowsLaunch", sums: Tensor, names: Sequence[str], learned_sink: Tensor | None) -> FusedRows:
    """Return the named statistics of the rows with these sums, (COLUMNS, B, H, R)."""
    from attnorm.kernels.statistics_from_sums import (
        MORE_NUMBERS,
        NUMBERS,
        WIDE_NUMBERS,
        softmax_root,
        softmax_statistics,
    )

    sink = None if learned_sink is None else learned_sink.to(sums).contiguous()
    roots = poles = None
    for _ in range(EXTRA_PASSES[launch.q.dtype]):
        roots = sums.new_empty(sums.shape[1:], dtype=torch.float64) if roots is None else roots
        _run_on_rows(softmax_root, sums, launch.factor, sink, roots, poles)
        poles = launch.pole_sums(sums, roots)
    more = not {*names} <= {*NUMBERS}
    numbers = sums.new_empty((len(NUMBERS), *sums.shape[1:]))
    others = sums.new_empty((len(MORE_NUMBERS) if more else 0, *sums.shape[1:]))
    wide = sums.new_empty((len(WIDE_NUMBERS) if more else 0, *sums.shape[1:]), dtype=torch.float64)
    n = sums.new_empty(sums.shape[1:], dtype=torch.int64)
    broken = sums.new_empty(sums.shape[1:], dtype=torch.bool)
    _run_on_rows(
        softmax_statistics, sums, launch.factor, sink, roots, poles, numbers, others, wide, n, broken.view(torch.uint8),
        MORE=more,
    )  # fmt: skip
    values = dict(zip(NUMBERS, numbers.unbind(), strict=True))
    if more:
        values |= zip(MORE_NUMBERS, others.unbind(), strict=True)
        values |= zip(WIDE_NUMBERS, wide.unbind(), strict=True)
    requested = requested_numbers(values, names, "MORE_NUMBERS of kernels/statistics_from_sums.py")
    return FusedRows(n, requested, values["largest_share"], broken)


def _run_on_rows(
    kernel: Any,
    sums: Tensor,
    factor: Tensor | None,
    sink: Tensor | None,
    roots: Tensor | None,
    poles: Tensor | None,
    *outputs: Tensor,
    **constants: bool,
) -> None:
    """Launch a kernel that reads sums, one row per thread. `sums` is passed for missing tensors, which are not read."""
    _, batch, heads, rows = sums.shape
    total = batch * heads * rows
    if total == 0:
        return
    with device_of(sums):
        kernel[(ceil_div(total, _BLOCK),)](
            *(sums if t is None else t for t in (sums, factor, sink, roots, poles)), *outputs, rows, heads, total,
            FACTORED=factor is not None, SINK=sink is not None, IMPROVE=poles is not None, BLOCK=_BLOCK,
            num_warps=_BLOCK // 32, **constants,
        )  # fmt: skip


@dataclass(frozen=True)
class RowsLaunch:
    """Arguments that all kernels share that read queries and keys."""

    q: Tensor
    key: Tensor
    mask: Tensor | None
    factor: Tensor | None  # (B, H, R, 1)
    rows: Tensor
    causal: bool
    queries: int
    scale: float
    softcap: float | None

    @classmethod
    def of(cls, call: AttentionCall, rows: Tensor | None, factor: Tensor | None) -> "RowsLaunch":
        """rows: sorted indices of queries, None for all of them."""
        visibility = Visibility.of(call)
        query, key = call.query_BHQD, call.key_BGKD
        batch, heads, queries, _ = query.shape
        rows = _indices(call, rows)
        q = query if len(rows) == queries else query[:, :, rows]
        q, key = in_rows(q), in_rows(key)
        if factor is not None:
            factor = factor.float().expand(batch, heads, len(rows), 1).contiguous()
        mask = visibility.mask
        if mask is not None:
            mask = mask.expand(batch, heads, queries, visibility.keys)
        return cls(q, key, mask, factor, rows, visibility.causal, queries, call.scale, call.softcap)

    def softmax_sums(self) -> Tensor:
        """Return the sums of each row, (COLUMNS, B, H, R)."""
        from attnorm.kernels.softmax_sums import COLUMNS, softmax_sums

        return self._run(softmax_sums, len(COLUMNS), in_levels=True)

    def pole_sums(self, sums: Tensor, roots: Tensor) -> Tensor:
        """Return the two sums over poles of each row, (2, B, H, R). sums: the result of softmax_sums."""
        from attnorm.kernels.softmax_sums import COLUMNS, pole_sums

        return self._run(pole_sums, 2, sums[COLUMNS.index("level")], roots)

    def _run(self, kernel: Any, columns: int, *numbers: Tensor, in_levels: bool = False) -> Tensor:
        out, tile = self.empty(columns), _tile(self.q.dtype, padded(self.q))
        levels = {"LEVELS": levels_of(tile)} if in_levels else {}
        self.launch(kernel, tile, *self.tensors, self.rows, *numbers, out, *self.sizes, **levels)
        return out

    def launch(self, kernel: Any, tile: Tile, *arguments: Any, **constants: Any) -> None:
        """Launch a kernel, unless there is no row. constants: beyond those of `constants`."""
        if programs := self.programs(tile):
            with device_of(self.q):
                kernel[(programs,)](*arguments, **self.constants(tile), **constants)

    def empty(self, columns: int) -> Tensor:
        return torch.empty((columns, *self.q.shape[:3]), dtype=torch.float32, device=self.q.device)

    def programs(self, tile: Tile) -> int:
        return ceil_div(self.q.shape[2], tile[0]) * self.q.shape[0] * self.q.shape[1]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """q, k, mask, factor. If one is None, q is passed instead: the kernel does not read it."""
        q, mask, factor = self.q, self.mask, self.factor
        return q, self.key, q if mask is None else mask.view(torch.uint8), q if factor is None else factor

    @property
    def sizes(self) -> tuple[int | float, ...]:
        """Strides, lengths, scale and cap in bits."""
        q, key, mask = self.q, self.key, self.mask
        heads, rows, width = q.shape[1:]
        keys = key.shape[-2]
        return (
            *q.stride()[:3], *key.stride()[:3], *((0, 0, 0, 0) if mask is None else mask.stride()),
            heads, heads // key.shape[1], rows, self.queries, keys, keys - self.queries, width,
            self.scale * _LOG2E, (self.softcap or 1.0) * _LOG2E,
        )  # fmt: skip

    def constants(self, tile: Tile) -> dict[str, Any]:
        rows, keys, warps, stages = tile
        width = padded(self.q)
        return {
            "CAUSAL": self.causal, "MASKED": self.mask is not None, "CAPPED": self.softcap is not None,
            "FACTORED": self.factor is not None, "PRECISION": product_precision(self.q.dtype), "ROWS": rows,
            "KEYS": keys, "WIDTH": width, "FULL": width == self.q.shape[-1], "num_warps": warps, "num_stages": stages,
        }  # fmt: skip


def levels_of(tile: Tile) -> int:
    """Return how often the columns of a tile are halved in pairs until four classes are left."""
    return (tile[1] // 8).bit_length() - 1


def _tile(dtype: torch.dtype, width: int) -> Tile:
    """Wide float32 spills 0.3 to 0.4 KB of registers; why it has 16 rows: `launch.tile_without_values`."""
    if dtype == torch.float32:
        return (64, 64, 4, 2) if width <= 64 else (32, 64, 4, 2) if width <= 128 else (16, 64, 8, 2)
    return (64, 128, 4, 3) if width <= 128 else (64, 64, 4, 2)


def measures(inputs: Inputs) -> bool:
    """Whether the kernels measure these inputs, for a normalizer that has one, and have enough rows for it."""
    q = inputs.q_BHQD
    plain = inputs.bias is None and q.numel() > 0 and inputs.queries >= MIN_KERNEL_ROWS
    return plain and _on_gpu(q) and not is_exporting() and not under_transform()


def output_applies(inputs: Inputs) -> bool:
    """Whether the kernels can also compute the output of inputs that they measure."""
    return inputs.q_BHQD.shape[-1] == inputs.v_BGKE.shape[-1] and inputs.dropout == 0


def _on_gpu(q: Tensor) -> bool:
    return q.is_cuda and runs_kernels(q)


def output_and_sums(launch: RowsLaunch, value: Tensor, learned_sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output (B, H, R, D), the sums (COLUMNS, B, H, R), and log2 of what each row is divided by."""
    from attnorm.kernels.softmax_sums import COLUMNS, softmax_output

    q, v = launch.q, in_rows(value)
    output, sums, reference = empty_rows(q), launch.empty(len(COLUMNS)), launch.empty(1)[0]
    sink = q if learned_sink is None else learned_sink.to(sums).contiguous()
    narrow = q.element_size() == 2 and padded(q) <= 64 and launch.mask is None
    tile = WIDE_TILE if narrow else output_tile(q)
    launch.launch(
        softmax_output, tile, *launch.tensors, launch.rows, v, sink, output, reference, sums, *launch.sizes,
        *v.stride()[:3], *output.stride()[:3], SINK=learned_sink is not None, LEVELS=levels_of(tile),
    )  # fmt: skip
    return output, sums, reference


def output_tile(q: Tensor) -> Tile:
    size = q.element_size()
    width = min(width for known, width in OUTPUT_TILES if known == size and padded(q) <= width)
    tile, small = OUTPUT_TILES[size, width], SMALL_OUTPUT_TILES.get((size, width))
    return tile if small is None else fitting(q, tile, 114_688, small)
