"""Output and statistics of softmax attention on a GPU from one pass over keys and values (kernels/softmax_sums.py).

The output has no gradient: its backward pass would cost more than the pass that is saved, since SDPA's is faster.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from attnorm.engines.inputs import Inputs, under_transform
from attnorm.engines.triton_support import runs_kernels
from attnorm.kernels.launch import device_of, in_rows, padded
from attnorm.metrics.call import AttentionCall
from attnorm.metrics.fused_rows import FusedRows, RowsLaunch, Tile, factors, levels_of, rows_of_sums, visible_keys
from attnorm.metrics.normalized import MeasuredNormalizer
from attnorm.metrics.rows import MIN_KERNEL_ROWS
from attnorm.normalizers.block import is_exporting

# Rows, keys, warps and stages by bytes of a number and padded width, which is at most the key of this table. For half
# precision up to width 128 the fastest of five or six on an H200: at width 128 12.7 ms, with 128 x 128 logits in a tile
# 14.1. The others were compiled for it and not timed: a thread holds its part of the output, of a tile of logits and of
# the sums in 255 registers, and with larger tiles it spills more.
TILES: dict[tuple[int, int], Tile] = {
    (2, 64): (64, 64, 4, 3),
    (2, 128): (64, 64, 4, 2),
    (2, 256): (128, 32, 8, 2),
    (4, 64): (64, 32, 4, 2),
    (4, 128): (64, 32, 4, 2),
}


def applies(inputs: Inputs) -> bool:
    """Whether the kernel supports these inputs, and whether they have enough rows for it."""
    q, v = inputs.q_BHQD, inputs.v_BGKE
    plain = q.shape[-1] == v.shape[-1] and inputs.bias is None and inputs.dropout == 0 and q.numel() > 0
    return plain and inputs.queries >= MIN_KERNEL_ROWS and _on_gpu(q) and not is_exporting() and not under_transform()


def _on_gpu(q: Tensor) -> bool:
    return q.is_cuda and runs_kernels(q)


@torch.no_grad()
def output_and_rows(call: AttentionCall, one: MeasuredNormalizer, names: Sequence[str]) -> tuple[Tensor, FusedRows]:
    """Return the output (B, H, Q, D) and the named statistics of a rescaled softmax with or without a learned sink."""
    rows = torch.arange(call.query_BHQD.shape[2])
    factor = factors(one, call, rows, visible_keys(call, rows)) if one.rescales else None
    sink = one.learned_sink(call, slice(0, call.query_BHQD.shape[1]))
    launch = RowsLaunch.of(call, rows, factor)
    output, sums = _output_and_sums(launch, call.value_BGKE, sink)
    return output, rows_of_sums(launch, sums, names, sink)


def _output_and_sums(launch: RowsLaunch, value: Tensor, learned_sink: Tensor | None) -> tuple[Tensor, Tensor]:
    from attnorm.kernels.softmax_sums import COLUMNS, softmax_output

    q, v = launch.q, in_rows(value)
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    sums = launch.empty(len(COLUMNS))
    sink = q if learned_sink is None else learned_sink.to(sums).contiguous()
    tile = _tile(q)
    with device_of(q):
        softmax_output[(launch.programs(tile),)](
            *launch.tensors, launch.rows, v, sink, output, sums, *launch.sizes, *v.stride()[:3], *output.stride()[:3],
            **launch.constants(tile), SINK=learned_sink is not None, LEVELS=levels_of(tile),
        )  # fmt: skip
    return output, sums


def _tile(q: Tensor) -> Tile:
    return next(tile for (size, width), tile in TILES.items() if size == q.element_size() and padded(q) <= width)
