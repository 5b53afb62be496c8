"""Attention by a threshold map such as entmax, whose matrix of weights never leaves the chip: the forward pass.

The kernel computes the logits in two or more passes over the keys:

1. The first pass collects the leaders of each row (kernels/threshold_maps.py), and for each tile how close its logits
   come to the peaks of its rows (`gaps`). The threshold of the leaders is that of all keys or slightly below it.
2. If the leaders may have left out much weight, passes of Newton's method over all keys follow.
3. The last pass computes the output and the sums of each row. A small excess of the sum over 1 is removed to first
   order (CORRECTED: in training and in half precision), or the output is divided by the sum. If the excess is large,
   steps 2 and 3 are repeated.

All passes but the first skip tiles without a weight: they read a list of the other tiles. So does the backward pass
(kernels/threshold_backward.py). Thresholds are relative to the largest logit of their row, the peak.
kernels/threshold_maps.py defines the maps.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnorm.arithmetic import ceil_div
from attnorm.kernels.blocks import (
    Constants,
    key_range,
    load_row,
    load_tile_at,
    matrix_of_head,
    queries_keys_values,
    seen_keys,
    store_tile,
)
from attnorm.kernels.launch import Launch, Tile, empty_rows, fitting, in_rows, padded
from attnorm.kernels.threshold_maps import (
    MAPS,
    ThresholdConstants,
    add_tile,
    below_peak,
    list_tiles,
    lowest_weight,
    minus_penalty,
    newton_step,
    no_leaders,
    seen_above_threshold,
    threshold_of_leaders,
    weight_left_out,
)


class Tiles(NamedTuple):
    forward: Tile
    queries: Tile  # gradients of q
    keys: Tile  # gradients of k and v
    keys_with_factor: Tile | None = None  # instead of keys, if rows have a factor
    query_registers: int | None = None  # most registers of a thread of the queries' kernel
    small_queries: Tile | None = None  # instead of queries, where they do not fit: with a mask they take 139,264 bytes

    def queries_on(self, q: Tensor) -> Tile:
        """Return the tile for the gradients of q on its GPU."""
        return fitting(q, self.queries, 139_264, self.small_queries) if self.small_queries else self.queries

    def limit(self, q: Tensor) -> dict[str, Any]:
        """Return the option for the compiler, where it has one."""
        nvidia = q.is_cuda and torch.version.hip is None
        return {"maxnreg": self.query_registers} if self.query_registers and nvidia else {}


# By the padded width of a head. In half precision the fastest of 8 forward tiles, 5 tiles of queries and 8 of keys:
# entmax15 in bfloat16 on an H200, 4,096 x 64 and 8,192 x 128. 128 forward rows cost 4 to 7 %, 128 columns 15 % or
# more: the leaders, one set per pair of columns, stay in registers. Width 128: 128 keys gain 2 %, but do not fit in
# registers with a factor. With 168 registers three blocks run at once on a multiprocessor. Width 256 and float32: what
# fits in shared memory. float32 of width 256 has 16 rows (see launch.tile_without_values). For sm_90 a thread
# spills 0.4 to 1.5 KB of registers there, and as forward kernel of width 128 1.5 to 2.6 KB.
HALF_TILES = {
    64: Tiles((64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 3), query_registers=168),
    128: Tiles((64, 64, 4, 3), (128, 64, 8, 3), (32, 64, 4, 3), (32, 64, 4, 4), small_queries=(64, 64, 8, 2)),
    256: Tiles((64, 32, 8, 2), (32, 32, 4, 2), (32, 32, 4, 2)),
}
FLOAT32_TILES = {
    64: Tiles((64, 32, 4, 2), (32, 32, 4, 2), (32, 32, 4, 2)),
    128: Tiles((32, 32, 4, 2), (32, 32, 4, 2), (32, 32, 4, 2)),
    256: Tiles((16, 32, 8, 2), (16, 32, 8, 2), (32, 16, 8, 1)),
}

# Keys from which on tiles far below the peaks are not compared with the leaders. Where 70 % of the tiles are empty this
# saves 15 % of the forward pass; where none is, the question costs 1 to 8 %.
LONG_ROWS = 16384
MAX_STEPS = 100  # rows built against Newton need 24, ordinary ones one or two
EARLY_STEPS = 6
ENTMAX_TOLERANCES = {torch.bfloat16: (0.2, 0.15, 0.22), torch.float16: (0.1, 0.04, 0.1)}  # see `_tolerances`


class Saved(NamedTuple):
    """Tensors that the backward pass needs; empty if nothing is trained, but for a threshold that is asked for."""

    mean_u: Tensor  # (B, H, Q, E), with the strides of the output: the mean of the values under u
    threshold: Tensor  # (B, H, 2, Q): peak, and threshold relative to it (in bfloat16 their sum)
    live: Tensor  # (B, H, row blocks, key tiles): which tiles of the forward pass hold a weight


def saved_shapes(q: Tensor, k: Tensor, v: Tensor, trains: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of `threshold` and `live`."""
    if not trains:
        return (0,), (0,)
    rows, columns, *_ = tiles(q, v).forward
    blocks = ceil_div(q.shape[2], rows), ceil_div(k.shape[2], columns)
    return (*q.shape[:2], 2, q.shape[2]), (*q.shape[:2], *blocks)


def relative_threshold(saved: Tensor, dtype: torch.dtype) -> Tensor:
    """Return thresholds relative to the peaks, (B, H, Q), from `threshold` of Saved."""
    peak, t = saved.unbind(2)
    return t - peak if dtype == torch.bfloat16 else t.contiguous()


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None, parameter: Tensor | None,
    penalties: Tensor | None, causal: bool, scale: float, map: str, trains: bool, *, with_threshold: bool = False,
) -> tuple[Tensor, Saved]:  # fmt: skip
    """Return the output, and what the backward pass needs. with_threshold: its threshold, even if nothing is trained.

    mask: boolean (B, H, Q, K) or None; factor, parameter: (B, H, Q) in float32 or None; penalties: (H,) in
    float32 or None, subtracted from the product <q, k> per position of distance; causal: bottom-right.
    """
    call = ThresholdLaunch.of(q, k, v, mask, factor, parameter, penalties, causal, scale, map)
    output = empty_rows(q, v.shape[-1])
    tile = tiles(q, v).forward
    rows, columns, *_ = tile
    threshold_shape, live_shape = saved_shapes(q, k, v, trains)
    if with_threshold:
        threshold_shape = saved_shapes(q, k, v, True)[0]
    saved = Saved(
        torch.empty_like(output) if trains else output.new_empty(0),
        torch.empty(threshold_shape, dtype=torch.float32, device=q.device),
        torch.zeros(live_shape, dtype=torch.uint8, device=q.device),
    )
    blocks, across = ceil_div(q.shape[2], rows), ceil_div(k.shape[2], columns)
    gaps = torch.empty((*q.shape[:2], blocks, across), dtype=torch.float32, device=q.device)
    listed = list_of_tiles(gaps.numel(), q)
    one = MAPS[map]
    corrected = trains or q.dtype != torch.float32
    enough, tolerance, doubt = _tolerances(q.dtype, corrected, one.deformed)
    call.launch(
        forward_kernel, tile, *call.tensors, output, saved.mean_u, saved.threshold, gaps, listed, saved.live,
        *call.strides, *output.stride()[:3], *call.sizes, enough, tolerance, doubt,
        2 if trains else int(with_threshold), **call.constants, NEWTON=one.newton, START=one.start, DECLINE=one.decline,
        COUNTED=one.counted, SIGNED=factor is not None or scale < 0, SKIPS=k.shape[2] >= LONG_ROWS,
        CORRECTED=corrected, MAX_STEPS=MAX_STEPS, EARLY=EARLY_STEPS,
    )  # fmt: skip
    return output, saved


@dataclass(frozen=True)
class ThresholdLaunch(Launch):
    parameter: Tensor | None
    penalties: Tensor | None
    scale: float
    map: str

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None, parameter: Tensor | None,
        penalties: Tensor | None, causal: bool, scale: float, map: str,
    ) -> "ThresholdLaunch":  # fmt: skip
        factor, parameter, penalties = (None if t is None else t.contiguous() for t in (factor, parameter, penalties))
        return cls(in_rows(q), in_rows(k), in_rows(v), mask, factor, causal, parameter, penalties, scale, map)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*super().tensors, *(self.q if t is None else t for t in (self.parameter, self.penalties)))

    @property
    def sizes(self) -> tuple[int | float, ...]:
        return (*self.lengths, self.q.shape[-1], self.v.shape[-1], self.scale * MAPS[self.map].unit)

    @cached_property
    def constants(self) -> dict[str, Any]:
        one = MAPS[self.map]
        return {
            **super().constants,
            "PENALIZED": self.penalties is not None,
            "WEIGHTS": one.weights, "DEFORMED": one.deformed, "PARAMETER": one.parameter,
            "EXACT": self.q.dtype != torch.bfloat16,
            # float16 loses digits below 6e-5, where the weights of long rows lie
            "LIFT": 1024.0 if self.q.dtype == torch.float16 else 1.0,
        }  # fmt: skip


def list_of_tiles(count: int, q: Tensor) -> Tensor:
    """Allocate memory for lists of tiles, with one more entry: kernels read one entry beyond the end of a list."""
    return torch.empty(count + 1, dtype=torch.int32, device=q.device)


def tiles(q: Tensor, v: Tensor) -> Tiles:
    table = FLOAT32_TILES if q.dtype == torch.float32 else HALF_TILES
    width = max(padded(q), padded(v))
    return table[min(known for known in table if width <= known)]


def _tolerances(dtype: torch.dtype, corrected: bool, deformed: bool) -> tuple[float, float, float]:
    """Return three tolerances.

    How far the sum of a row may be from 1 before the last Newton step; how far in the output pass; and how much weight
    the leaders may leave out before a Newton step is needed.

    Entmax in half precision: a pass of Newton's method costs more than to remove the excess to first order. With the
    excesses allowed here this leaves errors of 1e-3 in bfloat16, 1e-4 in float16 (in outputs, twice that in gradients).
    Random logits with alpha = 1.3 have an excess of 1 % at 2,048 keys and 6 % at 32,768.
    """
    if deformed and dtype in ENTMAX_TOLERANCES:
        return ENTMAX_TOLERANCES[dtype]
    enough, tolerance = {torch.float32: (1e-3, 4e-6), torch.float16: (0.1, 5e-3)}.get(dtype, (0.2, 1e-2))
    return enough, tolerance * (2 if corrected else 1), 4 * tolerance


@triton.jit(do_not_specialize=["saves"])
def forward_kernel(
    q, k, v, mask, row_factor, parameter, penalties, out, out_u, threshold, gaps, listed, live,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    mask_batch, mask_head, mask_row, mask_column, o_batch, o_head, o_row,
    heads, groups, queries, keys, offset, width, v_width, unit, enough, tolerance, doubt, saves,
    WEIGHTS: tl.constexpr, NEWTON: tl.constexpr, START: tl.constexpr, DECLINE: tl.constexpr, COUNTED: tl.constexpr,
    DEFORMED: tl.constexpr, PARAMETER: tl.constexpr, EXACT: tl.constexpr, FAST: tl.constexpr, LIFT: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, FACTORED: tl.constexpr, PENALIZED: tl.constexpr,
    CORRECTED: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    FULL: tl.constexpr, V_FULL: tl.constexpr, SIGNED: tl.constexpr, SKIPS: tl.constexpr,
    MAX_STEPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """saves: nothing, the threshold, or all that training needs. Not a constant: all run the same compiled kernel."""
    C: tl.constexpr = Constants(CAUSAL, False, MASKED, PRECISION, ROWS, COLUMNS, WIDTH, FULL, V_WIDTH, V_FULL)
    T: tl.constexpr = ThresholdConstants(WEIGHTS, DEFORMED, FAST, EXACT, NEWTON, COUNTED, MAX_STEPS, EARLY)
    own, rows, inside, q_tile, k, v, sight = queries_keys_values(
        q, k, v, mask, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, mask_batch, mask_head,
        mask_row, mask_column, heads, groups, queries, keys, offset, 0, width, v_width, C,
    )  # fmt: skip
    tiles = tl.cdiv(keys, COLUMNS)
    first_tile = (own.batch_head * tl.cdiv(queries, ROWS) + own.index) * tiles
    gaps += first_tile
    listed += first_tile
    live += first_tile
    trains = saves > 1
    row_at = own.batch_head * queries + rows
    factor = load_row(row_factor, row_at, inside, FACTORED, 1.0) * unit
    penalty = tl.load(penalties + own.head) if PENALIZED else 0.0
    sign = tl.where(factor < 0, -1.0, 1.0)
    size = tl.abs(factor)
    a = load_row(parameter, row_at, inside, PARAMETER, 0.5)
    _first, _low, high, last = key_range(own.index, sight, C)
    whole, some = high // COLUMNS, tl.cdiv(last, COLUMNS)

    level = lowest_weight(START(a), tl.zeros_like(a), inside == 0, a, DEFORMED)
    leaders = no_leaders(ROWS, COLUMNS // 2)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    leaders, peak = _collect_leaders(
        leaders, peak, high, last, q_tile, k, rows, sign, size, level, gaps, sight, penalty, SIGNED, PENALIZED, SKIPS,
        C, True,
    )  # fmt: skip
    leaders, peak = _collect_leaders(
        leaders, peak, 0, high, q_tile, k, rows, sign, size, level, gaps, sight, penalty, SIGNED, PENALIZED, SKIPS, C,
        False,
    )  # fmt: skip
    empty = (peak == float("-inf")) | (inside == 0)
    broken = tl.max(tl.where(leaders.one == leaders.one, 0, 1), 1) != 0
    settled = empty | broken
    peak = tl.where(empty, 0.0, peak * size)
    leaders = below_peak(leaders, size, peak)
    t, count, leaders_u = threshold_of_leaders(leaders, peak, START(a), a, settled, tolerance, T, False)
    doubtful = (weight_left_out(leaders, t, a, settled, T) > doubt) & (some > 1)
    t = tl.where(broken, float("nan"), t)
    steps, left = 0, tl.where(doubtful, enough + 1, 0.0)

    output = tl.zeros([ROWS, V_WIDTH], tl.float32)
    unused = tl.full([], 0.0, tl.float32)
    sum_p = tl.zeros([ROWS], tl.float32)
    step = tl.zeros([ROWS], tl.float32)
    output_u = tl.zeros([ROWS, V_WIDTH], tl.float32) if CORRECTED else unused
    sum_u = tl.zeros([ROWS], tl.float32) if CORRECTED else unused
    factor_of, peak_of, a_of = factor[:, None], peak[:, None], a[:, None]
    bound = enough
    attempts = 0
    while attempts < 2:
        steps = 0
        while (left > bound) & (steps < MAX_STEPS):
            number, edges = _lists(gaps, listed, whole, some, peak, t, a, empty, DEFORMED)
            cell_p = tl.zeros([ROWS, COLUMNS], tl.float32)
            cell_u = tl.zeros([ROWS, COLUMNS], tl.float32)
            cells = tl.zeros([ROWS, COLUMNS], tl.float32) if COUNTED else unused
            for edge in tl.static_range(2):
                cell_p, cell_u, cells = _sum_weights(
                    cell_p, cell_u, cells, listed + whole if edge else listed, edges if edge else number, q_tile, k,
                    rows, factor_of, peak_of, t[:, None], a_of, sight, penalty, PENALIZED, C, T, edge,
                )  # fmt: skip
            if COUNTED:
                count = tl.sum(cells, 1)
            # A step after a small excess nearly squares it: it is taken and checked by the sums of the last pass.
            t, left = newton_step(tl.sum(cell_p, 1), tl.sum(cell_u, 1), count, t, a, settled, steps < EARLY, T)
            steps += 1
        number, edges = _lists(gaps, listed, whole, some, peak, t, a, empty, DEFORMED)
        output = tl.zeros([ROWS, V_WIDTH], tl.float32)
        output_u = tl.zeros([ROWS, V_WIDTH], tl.float32) if CORRECTED else unused
        sum_p = tl.zeros([ROWS], tl.float32)
        sum_u = tl.zeros([ROWS], tl.float32) if CORRECTED else unused
        for edge in tl.static_range(2):
            output, output_u, sum_p, sum_u = _attend(
                output, output_u, sum_p, sum_u, listed + whole if edge else listed, edges if edge else number, q_tile,
                k, v, rows, factor_of, peak_of, t[:, None], a_of, live, trains, sight, penalty, LIFT, CORRECTED,
                PENALIZED, C, T, edge,
            )  # fmt: skip
        attempts += 1
        bad = tl.where(settled, 0.0, tl.abs(sum_p - 1.0))
        if CORRECTED:
            _excess, step = NEWTON(sum_p, sum_u, count, a, 1)
            step = tl.where(settled, 0.0, step)
            if DEFORMED:  # where the step is large for keys that are no leaders, the first order is not enough
                bad = tl.maximum(bad, 10.0 * a * tl.abs(step) * tl.maximum(sum_u - leaders_u, 0.0))
            if COUNTED:  # u of every weight changes by the step
                bad = tl.maximum(bad, tl.abs(step) * count / tl.where(sum_u > 0, sum_u, 1.0))
        if tl.max(bad, 0) <= tolerance:
            attempts += 2
        bound = 0.1 * tolerance
        left = bound + 1
    if CORRECTED:
        output -= (DECLINE * LIFT) * step[:, None] * output_u
        sum_p -= DECLINE * step * sum_u
    output = output / (tl.where(sum_p == 0, 1.0, sum_p) * LIFT)[:, None]
    out = matrix_of_head(out, own.batch, own.head, o_batch, o_head, o_row, queries, v_width)
    store_tile(out, output, rows, V_WIDTH)
    if CORRECTED:
        means = matrix_of_head(out_u, own.batch, own.head, o_batch, o_head, o_row, queries, v_width)
        _save_means(means, output_u / tl.where(sum_u == 0, 1.0, sum_u)[:, None], rows, trains, V_WIDTH)
        t = t + step
    _save_threshold(threshold + 2 * own.batch_head * queries + rows, queries, peak, t, inside, saves, EXACT)


@triton.jit
def _save_means(means, output_u, rows, trains, V_WIDTH: tl.constexpr):
    if trains:
        store_tile(means, output_u, rows, V_WIDTH)


@triton.jit
def _save_threshold(at_peak, queries, peak, t, inside, saves, EXACT: tl.constexpr):
    if saves:
        tl.store(at_peak, peak, mask=inside)
        tl.store(at_peak + queries, t if EXACT else peak + t, mask=inside)


@triton.jit
def _mark(live, mass, trains):
    """Store whether a tile holds a weight."""
    if trains:
        tl.store(live, tl.max(tl.where(mass == 0, 0, 1), 0).to(tl.uint8))


@triton.jit
def _collect_leaders(
    leaders, peak, start, stop, q_tile, k, rows, sign, size, level, gaps, sight, penalty,
    SIGNED: tl.constexpr, PENALIZED: tl.constexpr, SKIPS: tl.constexpr, C: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Update leaders and peaks with the products of the tiles from start to stop.

    sign: -1 for rows with a negative factor, whose largest logits have the smallest products.
    """
    for at in range(start, stop, C.COLUMNS):
        columns = at + tl.arange(0, C.COLUMNS)
        k_tile = load_tile_at(k, at, C.COLUMNS, C.WIDTH, EDGE, C.FULL)
        dot = tl.dot(q_tile, tl.trans(k_tile), input_precision=C.PRECISION)
        dot = minus_penalty(dot, penalty, rows[:, None], columns[None, :], sight.offset, PENALIZED)
        if SIGNED:
            dot = dot * sign[:, None]
        if EDGE:
            dot = tl.where(seen_keys(rows[:, None], columns[None, :], sight, C), dot, float("-inf"))
        left, right = tl.split(tl.permute(tl.reshape(dot, [dot.shape[0], 2, C.COLUMNS // 2]), (0, 2, 1)))
        leaders, peak = add_tile(leaders, peak, left, right, size, level, gaps, at, C.COLUMNS, SKIPS)
    return leaders, peak


@triton.jit
def _lists(gaps, listed, whole, some, peak, t, a, empty, DEFORMED: tl.constexpr):
    """List the tiles that may hold a weight at the thresholds t.

    Return the length of both lists: tiles that all rows see completely, and tiles at edges.
    """
    level = lowest_weight(t, peak, empty, a, DEFORMED)
    tl.debug_barrier()
    number = list_tiles(gaps, 1, some, 0, 1, listed, 0, 0, whole, level, 1, 1, 1)
    edges = list_tiles(gaps, 1, some, 0, 1, listed + whole, 0, whole, some, level, 1, 1, 1)
    tl.debug_barrier()
    return number, edges


@triton.jit
def _sum_weights(
    sum_p, sum_u, count, listed, number, q_tile, k, rows, factor, peak, t, a, sight, penalty,
    PENALIZED: tl.constexpr, C: tl.constexpr, T: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Add p, u and the number of weights of the listed tiles to the sums, one sum per row and column."""
    tile = tl.load(listed)
    for index in range(number):
        following = tl.load(listed + index + 1)
        first = tile * C.COLUMNS
        i, j = rows[:, None], first + tl.arange(0, C.COLUMNS)[None, :]
        k_tile = load_tile_at(k, first, C.COLUMNS, C.WIDTH, EDGE, C.FULL)
        dot = tl.dot(q_tile, tl.trans(k_tile), input_precision=C.PRECISION)
        dot = minus_penalty(dot, penalty, i, j, sight.offset, PENALIZED)
        x = seen_above_threshold(dot, i, j, factor, peak, t, a, sight, C, T, EDGE)
        p, u = T.WEIGHTS(x, a, T.FAST)
        sum_p += p
        sum_u += u
        if T.COUNTED:
            count += tl.where(x > 0, 1.0, 0.0)
        tile = following
    return sum_p, sum_u, count


@triton.jit
def _attend(
    output, output_u, sum_p, sum_u, listed, number, q_tile, k, v, rows, factor, peak, t, a, live, trains, sight,
    penalty,
    LIFT: tl.constexpr, CORRECTED: tl.constexpr, PENALIZED: tl.constexpr, C: tl.constexpr,
    T: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Add p v LIFT, u v, p and u of the listed tiles to the sums; mark the tiles that hold a weight as live."""
    tile = tl.load(listed)
    for index in range(number):
        following = tl.load(listed + index + 1)
        first = tile * C.COLUMNS
        i, j = rows[:, None], first + tl.arange(0, C.COLUMNS)[None, :]
        k_tile = load_tile_at(k, first, C.COLUMNS, C.WIDTH, EDGE, C.FULL)
        v_tile = load_tile_at(v, first, C.COLUMNS, C.V_WIDTH, EDGE, C.V_FULL)
        dot = tl.dot(q_tile, tl.trans(k_tile), input_precision=C.PRECISION)
        dot = minus_penalty(dot, penalty, i, j, sight.offset, PENALIZED)
        x = seen_above_threshold(dot, i, j, factor, peak, t, a, sight, C, T, EDGE)
        p, u = T.WEIGHTS(x, a, T.FAST)
        mass = tl.sum(p, 1)
        sum_p += mass
        if LIFT != 1.0:
            p = p * LIFT
        output = tl.dot(p.to(v_tile.dtype), v_tile, output, input_precision=C.PRECISION)
        if CORRECTED:
            sum_u += tl.sum(u, 1)
            output_u = tl.dot(u.to(v_tile.dtype), v_tile, output_u, input_precision=C.PRECISION)
        if CORRECTED:
            _mark(live + tile, mass, trains)
        tile = following
    return output, output_u, sum_p, sum_u
