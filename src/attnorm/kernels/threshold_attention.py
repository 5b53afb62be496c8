"""Launch the threshold kernels (kernels/threshold.py, kernels/threshold_backward.py): shapes, tiles, tolerances."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from attnorm.kernels import threshold, threshold_backward
from attnorm.kernels.launch import Launch, in_rows, padded
from attnorm.kernels.row_dots import row_dots
from attnorm.kernels.threshold_maps import MAPS

Tile = tuple[int, int, int, int]  # rows, columns, warps, stages


class Tiles(NamedTuple):
    forward: Tile
    queries: Tile  # gradients of q
    keys: Tile  # gradients of k and v


# By the padded width of a head. In half precision the fastest of 8 forward tiles and of 8 or 9 pairs of backward tiles:
# entmax15 in bfloat16 on an H200, 8,192 x 128 and 32,768 x 64. 128 forward rows cost 4 to 7 %, 128 columns 15 % or
# more: the leaders, one set per pair of columns, stay in registers. Width 256 and float32: what fits in shared memory.
HALF_TILES = {
    64: Tiles((64, 64, 4, 4), (64, 64, 4, 3), (32, 128, 4, 3)),
    128: Tiles((64, 64, 4, 3), (128, 64, 8, 3), (32, 64, 4, 3)),
    256: Tiles((64, 32, 8, 2), (32, 32, 4, 2), (32, 32, 4, 2)),
}
FLOAT32_TILES = {
    64: Tiles((64, 32, 4, 2), (32, 32, 4, 2), (32, 32, 4, 2)),
    128: Tiles((32, 32, 4, 2), (32, 32, 4, 2), (32, 32, 4, 2)),
}

MAX_STEPS = 100  # rows built against Newton need 24, ordinary ones one or two
EARLY_STEPS = 6


class Saved(NamedTuple):
    """Tensors that the backward pass needs; empty if nothing is trained."""

    mean_u: Tensor  # (B, H, Q, E): the mean of the values under u
    threshold: Tensor  # (B, H, Q, 2): peak and threshold
    live: Tensor  # (B, H, row blocks, key tiles): which tiles of the forward pass hold a weight


def saved_shapes(q: Tensor, k: Tensor, v: Tensor, trains: bool) -> tuple[tuple[int, ...], ...]:
    if not trains:
        return (0,), (0,), (0,)
    rows, columns, *_ = tiles(q, v).forward
    blocks = -(-q.shape[2] // rows), -(-k.shape[2] // columns)
    return (*q.shape[:3], v.shape[-1]), (*q.shape[:3], 2), (*q.shape[:2], *blocks)


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None, parameter: Tensor | None,
    penalties: Tensor | None, causal: bool, scale: float, map: str, trains: bool,
) -> tuple[Tensor, Saved]:  # fmt: skip
    """Return the output, and what the backward pass needs.

    mask: boolean (B, H, Q, K) or None; factor, parameter: (B, H, Q) in float32 or None; penalties: (H,) in
    float32 or None, subtracted from the product <q, k> per position of distance; causal: bottom-right.
    """
    call = _ThresholdLaunch.of(q, k, v, mask, factor, parameter, penalties, causal, scale, map)
    batch, heads, queries = q.shape[:3]
    output = q.new_empty(batch, heads, queries, v.shape[-1])
    rows, columns, warps, stages = tiles(q, v).forward
    shapes = saved_shapes(q, k, v, trains)
    saved = Saved(
        torch.empty(shapes[0], dtype=q.dtype, device=q.device),
        torch.empty(shapes[1], dtype=torch.float32, device=q.device),
        torch.zeros(shapes[2], dtype=torch.uint8, device=q.device),
    )
    blocks, across = triton.cdiv(queries, rows), triton.cdiv(k.shape[2], columns)
    gaps = torch.empty((batch, heads, blocks, across), dtype=torch.float32, device=q.device)
    listed = _list(gaps.numel(), q)
    one, (enough, tolerance, doubt) = MAPS[map], _tolerances(q.dtype, trains)
    with call.device:
        threshold.forward[(blocks * batch * heads,)](
            *call.tensors, output, saved.mean_u, saved.threshold, gaps, listed, saved.live, *call.strides,
            *output.stride()[:3], *call.sizes, enough, tolerance, doubt, **call.constants, NEWTON=one.newton,
            START=one.start, DECLINE=one.decline, COUNTED=one.counted, SIGNED=factor is not None or scale < 0,
            TRAINS=trains, ROWS=rows, COLUMNS=columns, MAX_STEPS=MAX_STEPS, EARLY=EARLY_STEPS, num_warps=warps,
            num_stages=stages,
        )  # fmt: skip
    return output, saved


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None,
    parameter: Tensor | None, penalties: Tensor | None, saved: Saved, causal: bool, scale: float, map: str,
    learned: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v, factor and parameter; the last two are empty if there is none."""
    call = _ThresholdLaunch.of(q, k, v, mask, factor, parameter, penalties, causal, scale, map)
    grad, saved = in_rows(grad), Saved(*(t.contiguous() for t in saved))
    grad_q, grad_k, grad_v = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    grad_factor, grad_parameter = call.rows(factor is not None), call.rows(learned)
    delta = row_dots(grad, saved.mean_u)
    batch, heads, queries, keys = *q.shape[:3], k.shape[2]
    given = (*call.tensors, saved.threshold, delta, grad, saved.live)
    strides = (*call.strides, *grad.stride()[:3])
    live_rows, live_columns, *_ = tiles(q, v).forward
    slope = scale * MAPS[map].slope
    shared = {**call.constants, "LIVE_ROWS": live_rows, "LIVE_COLUMNS": live_columns}
    with call.device:
        rows, columns, warps, stages = tiles(q, v).queries
        blocks, across = triton.cdiv(queries, rows), triton.cdiv(keys, columns)
        listed = _list(batch * heads * blocks * across, q)
        threshold_backward.backward_queries[(blocks * batch * heads,)](
            *given, listed, grad_q, grad_factor, grad_parameter, *strides, *grad_q.stride()[:3], *call.sizes, slope,
            **shared, LEARNED=learned, ROWS=rows, COLUMNS=columns, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        rows, columns, warps, stages = tiles(q, v).keys
        blocks, across = triton.cdiv(queries, rows), triton.cdiv(keys, columns)
        listed = _list(batch * k.shape[1] * blocks * across, q)
        threshold_backward.backward_keys[(across * batch * k.shape[1],)](
            *given, listed, grad_k, grad_v, *strides, *grad_k.stride()[:3], *grad_v.stride()[:3], *call.sizes, slope,
            **shared, ROWS=rows, COLUMNS=columns, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    return grad_q, grad_k, grad_v, grad_factor, grad_parameter


@dataclass(frozen=True)
class _ThresholdLaunch(Launch):
    parameter: Tensor | None
    penalties: Tensor | None
    scale: float
    map: str

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None, parameter: Tensor | None,
        penalties: Tensor | None, causal: bool, scale: float, map: str,
    ) -> "_ThresholdLaunch":  # fmt: skip
        factor, parameter, penalties = (None if t is None else t.contiguous() for t in (factor, parameter, penalties))
        return cls(in_rows(q), in_rows(k), in_rows(v), mask, factor, causal, parameter, penalties, scale, map)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*super().tensors, *(self.q if t is None else t for t in (self.parameter, self.penalties)))

    @property
    def sizes(self) -> tuple[int | float, ...]:
        return (*self.lengths, self.q.shape[-1], self.v.shape[-1], self.scale * MAPS[self.map].unit)

    @property
    def constants(self) -> dict[str, object]:
        one = MAPS[self.map]
        return {
            **self.shared_constants,
            "PENALISED": self.penalties is not None,
            "WEIGHTS": one.weights, "DEFORMED": one.deformed, "PARAMETER": one.parameter,
            "EXACT": self.q.dtype != torch.bfloat16, "FAST": self.q.is_cuda and self.q.dtype != torch.float32,
            # float16 loses digits below 6e-5, where the weights of long rows lie
            "LIFT": 1024.0 if self.q.dtype == torch.float16 else 1.0,
            "FULL": padded(self.q) == self.q.shape[-1], "V_FULL": padded(self.v) == self.v.shape[-1],
        }  # fmt: skip


def _list(count: int, q: Tensor) -> Tensor:
    """Allocate memory for lists of tiles, with one more entry: kernels read one entry beyond the end of a list."""
    return torch.empty(count + 1, dtype=torch.int32, device=q.device)


def tiles(q: Tensor, v: Tensor) -> Tiles:
    table = FLOAT32_TILES if q.dtype == torch.float32 else HALF_TILES
    width = max(padded(q), padded(v))
    return table[min(known for known in table if width <= known)]


def _tolerances(dtype: torch.dtype, trains: bool) -> tuple[float, float, float]:
    """Return three tolerances.

    How far the sum of a row may be from 1 before the last Newton step; how far in the output pass; and how much weight
    the leaders may leave out before a Newton step is needed.
    """
    enough, tolerance = {torch.float32: (1e-3, 4e-6), torch.float16: (0.1, 5e-3)}.get(dtype, (0.2, 1e-2))
    return enough, tolerance * (2 if trains else 1), 4 * tolerance
