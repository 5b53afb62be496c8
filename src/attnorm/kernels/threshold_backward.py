"""Backward kernels of attention by a threshold map: gradients of q (backward_queries), and of k and v (backward_keys).

Weights are computed again from the peak and the threshold of each row. With dp_j = <dO, v_j>, the gradient of a logit
is slope u (dp - delta). delta is the mean of dp under u, which equals <dO, mean of the values under u>; this mean is a
second output of the forward pass. Both kernels read only tiles that hold a weight. No two programs add to the same
number, so results are deterministic.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from attnorm.arithmetic import ceil_div
from attnorm.kernels.blocks import (
    Constants,
    Sight,
    block_of_keys,
    key_range,
    load_row,
    load_tile_at,
    matrix_of_head,
    queries_keys_values,
    query_range,
    sight_of_head,
    store_tile,
    tile_of_head,
)
from attnorm.kernels.launch import empty_numbers, empty_rows, in_rows
from attnorm.kernels.linear_algebra import row_dots
from attnorm.kernels.threshold import Saved, ThresholdLaunch, list_of_tiles, tiles
from attnorm.kernels.threshold_maps import MAPS, ThresholdConstants, list_tiles, minus_penalty, seen_above_threshold


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None,
    parameter: Tensor | None, penalties: Tensor | None, saved: Saved, causal: bool, scale: float, map: str,
    learned: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v, factor and parameter; the last two are empty if there is none."""
    call = ThresholdLaunch.of(q, k, v, mask, factor, parameter, penalties, causal, scale, map)
    grad, saved = in_rows(grad), Saved(saved.mean_u, saved.threshold.contiguous(), saved.live.contiguous())
    grad_q, grad_k, grad_v = (empty_rows(t) for t in (q, k, v))
    grad_factor, grad_parameter = empty_numbers(q, factor is not None), empty_numbers(q, learned)
    delta = row_dots(grad, saved.mean_u)
    one = MAPS[map]
    slope, scaled_delta = scale * one.slope, delta
    if call.factor is not None:  # multiplied here, not once per row and tile
        scaled = call.factor * (scale * one.unit)
        call, slope, scaled_delta = replace(call, factor=scaled), one.slope / one.unit, delta * scaled
    batch, heads, queries, keys = *q.shape[:3], k.shape[2]
    strides = (*call.strides, *grad.stride()[:3])
    own_tiles = tiles(q, v)
    live_rows, live_columns, *_ = own_tiles.forward
    constants = {**call.constants, "LIVE_ROWS": live_rows, "LIVE_COLUMNS": live_columns}
    tile = own_tiles.queries_on(q)
    rows, columns, *_ = tile
    listed = list_of_tiles(batch * heads * ceil_div(queries, rows) * ceil_div(keys, columns), q)
    call.launch(
        backward_queries, tile, *call.tensors, saved.threshold, delta, grad, saved.live, listed, grad_q, grad_factor,
        grad_parameter, *strides, *grad_q.stride()[:3], *call.sizes, slope, **constants, LEARNED=learned,
        **own_tiles.limit(q),
    )  # fmt: skip
    tile = own_tiles.keys if factor is None else own_tiles.keys_with_factor or own_tiles.keys
    rows, columns, *_ = tile
    listed = list_of_tiles(batch * k.shape[1] * ceil_div(queries, rows) * ceil_div(keys, columns), q)
    call.launch(
        backward_keys, tile, *call.tensors, saved.threshold, scaled_delta, grad, saved.live, listed, grad_k, grad_v,
        *strides, *grad_k.stride()[:3], *grad_v.stride()[:3], *call.sizes, slope, over_keys=True, **constants,
    )  # fmt: skip
    return grad_q, grad_k, grad_v, grad_factor, grad_parameter


ONES = tl.constexpr(8)  # columns of the narrowest product of the matrix units


class RowPointers(NamedTuple):
    """Pointers to the numbers of the rows of a head."""

    factor: Any
    parameter: Any
    peak: Any
    threshold: Any
    delta: Any  # times the factor, if there is one


@triton.jit
def backward_queries(
    q, k, v, mask, row_factor, parameter, penalties, threshold, delta, grad, live, listed, grad_q, grad_factor,
    grad_parameter, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, mask_batch, mask_head,
    mask_row, mask_column, o_batch, o_head, o_row, gq_batch, gq_head, gq_row, heads, groups, queries, keys, offset,
    width, v_width, unit, slope, WEIGHTS: tl.constexpr, DEFORMED: tl.constexpr, PARAMETER: tl.constexpr,
    LEARNED: tl.constexpr, EXACT: tl.constexpr, FAST: tl.constexpr, LIFT: tl.constexpr, CAUSAL: tl.constexpr,
    MASKED: tl.constexpr, FACTORED: tl.constexpr, PENALIZED: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, FULL: tl.constexpr, V_FULL: tl.constexpr,
    LIVE_ROWS: tl.constexpr, LIVE_COLUMNS: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = Constants(CAUSAL, False, MASKED, PRECISION, ROWS, COLUMNS, WIDTH, FULL, V_WIDTH, V_FULL)
    T: tl.constexpr = ThresholdConstants(WEIGHTS, DEFORMED, FAST, EXACT)
    own, rows, inside, q_tile, k, v, sight = queries_keys_values(
        q, k, v, mask, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, mask_batch, mask_head,
        mask_row, mask_column, heads, groups, queries, keys, offset, 0, width, v_width, C,
    )  # fmt: skip
    row_at = own.batch_head * queries + rows
    grad_tile = tile_of_head(grad, own, o_batch, o_head, o_row, queries, v_width, rows, V_WIDTH, V_FULL)
    factor = load_row(row_factor, row_at, inside, FACTORED, 1.0)
    a = load_row(parameter, row_at, inside, PARAMETER, 0.5)
    penalty = tl.load(penalties + own.head) if PENALIZED else 0.0
    at_peak = 2 * own.batch_head * queries + rows
    peak = load_row(threshold, at_peak, inside, FACTORED or EXACT, 0.0)
    t = tl.load(threshold + at_peak + queries, mask=inside, other=0.0)
    mean = tl.load(delta + row_at, mask=inside, other=0.0)

    _first, _low, high, last = key_range(own.index, sight, C)
    whole, some = high // COLUMNS, tl.cdiv(last, COLUMNS)
    JOIN: tl.constexpr = COLUMNS // LIVE_COLUMNS if COLUMNS > LIVE_COLUMNS else 1
    SPLIT: tl.constexpr = LIVE_COLUMNS // COLUMNS if LIVE_COLUMNS > COLUMNS else 1
    ACROSS: tl.constexpr = ROWS // LIVE_ROWS if ROWS > LIVE_ROWS else 1
    flags, row_blocks = tl.cdiv(keys, LIVE_COLUMNS), tl.cdiv(queries, LIVE_ROWS)
    above = own.index * ROWS // LIVE_ROWS
    live += (own.batch_head * row_blocks + above) * flags
    listed += (own.batch_head * tl.cdiv(queries, ROWS) + own.index) * tl.cdiv(keys, COLUMNS)
    number = list_tiles(live, 1, flags, flags, row_blocks - above, listed, 0, 0, whole, 0, SPLIT, JOIN, ACROSS)
    edges = list_tiles(
        live, 1, flags, flags, row_blocks - above, listed + whole, 0, whole, some, 0, SPLIT, JOIN, ACROSS
    )
    tl.debug_barrier()

    found = tl.zeros([ROWS, WIDTH], tl.float32)
    SHARED: tl.constexpr = q.dtype.element_ty != tl.float32 and not PENALIZED
    found_factor = tl.zeros([ROWS, ONES] if SHARED else [ROWS], tl.float32)
    found_parameter = tl.zeros([ROWS], tl.float32)
    factor_of = factor[:, None] if FACTORED else unit
    # The gradient of a row's factor is the sum of ds (product - middle). The gradients ds of a row sum to 0 except for
    # the rounding of delta, which products far from 0 would amplify. SHARED: the sum of ds product is <q, found>, whose
    # ds are rounded; so are those that are summed, or the middle would amplify the difference.
    middle = tl.where(factor == 0, 0.0, peak / tl.where(factor == 0, 1.0, factor))[:, None]
    for edge in tl.static_range(2):
        found, found_factor, found_parameter = _fold_queries(
            found, found_factor, found_parameter, listed + whole if edge else listed, edges if edge else number,
            q_tile, grad_tile, k, v, rows, factor_of, peak[:, None] if EXACT else None, t[:, None], a[:, None],
            mean[:, None], middle, sight, penalty, FACTORED, SHARED, LEARNED, PENALIZED, C, T, edge,
        )  # fmt: skip
    if FACTORED:
        if SHARED:
            total = tl.sum(found_factor, 1) * (1.0 / ONES)
            found_factor = tl.sum(q_tile.to(tl.float32) * found, 1) - tl.sum(middle, 1) * total
        tl.store(grad_factor + row_at, found_factor * (slope * unit), mask=inside)
    if LEARNED:
        tl.store(grad_parameter + row_at, -found_parameter / (a * a), mask=inside)
    found = (found * (factor * slope)[:, None]).to(grad_q.dtype.element_ty)
    grad_q = matrix_of_head(grad_q, own.batch, own.head, gq_batch, gq_head, gq_row, queries, width)
    store_tile(grad_q, found, rows, WIDTH)


@triton.jit
def _fold_queries(
    grad_q, grad_factor, grad_parameter, listed, number, q_tile, grad_tile, k, v, rows, factor, peak, t, a, delta,
    middle, sight, penalty, FACTORED: tl.constexpr, SHARED: tl.constexpr, LEARNED: tl.constexpr,
    PENALIZED: tl.constexpr, C: tl.constexpr, T: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    tile = tl.load(listed)
    for index in range(number):
        following = tl.load(listed + index + 1)
        first = tile * C.COLUMNS
        i, j = rows[:, None], first + tl.arange(0, C.COLUMNS)[None, :]
        k_tile = load_tile_at(k, first, C.COLUMNS, C.WIDTH, EDGE, C.FULL)
        v_tile = load_tile_at(v, first, C.COLUMNS, C.V_WIDTH, EDGE, C.V_FULL)
        dot = tl.dot(q_tile, tl.trans(k_tile), input_precision=C.PRECISION)
        dot = minus_penalty(dot, penalty, i, j, sight.offset, PENALIZED)
        dp = tl.dot(grad_tile, tl.trans(v_tile), input_precision=C.PRECISION)
        x = seen_above_threshold(dot, i, j, factor, peak, t, a, sight, C, T, EDGE)
        _p, u = T.WEIGHTS(x, a, T.FAST)
        ds = u * (dp - delta)
        rounded = ds.to(k_tile.dtype)
        if FACTORED:
            if SHARED:  # the matrix units need no conversion back to float32
                ones = tl.full([C.COLUMNS, ONES], 1.0, k_tile.dtype)
                grad_factor = tl.dot(rounded, ones, grad_factor, input_precision=C.PRECISION)
            else:
                grad_factor += tl.sum(ds * (dot - middle), 1)
        if LEARNED:
            grad_parameter += tl.sum(_by_alpha(x, u, a) * (dp - delta), 1)
        grad_q = tl.dot(rounded, k_tile, grad_q, input_precision=C.PRECISION)
        tile = following
    return grad_q, grad_factor, grad_parameter


@triton.jit
def backward_keys(
    q, k, v, mask, row_factor, parameter, penalties, threshold, delta, grad, live, listed, grad_k, grad_v,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    mask_batch, mask_head, mask_row, mask_column, o_batch, o_head, o_row,
    gk_batch, gk_head, gk_row, gv_batch, gv_head, gv_row,
    heads, groups, queries, keys, offset, width, v_width, unit, slope,
    WEIGHTS: tl.constexpr, DEFORMED: tl.constexpr, PARAMETER: tl.constexpr,
    EXACT: tl.constexpr, FAST: tl.constexpr, LIFT: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, FACTORED: tl.constexpr, PENALIZED: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    FULL: tl.constexpr, V_FULL: tl.constexpr, LIVE_ROWS: tl.constexpr, LIVE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one block of keys of a key head, from all query heads that share it."""
    C: tl.constexpr = Constants(CAUSAL, False, MASKED, PRECISION, ROWS, COLUMNS, WIDTH, FULL, V_WIDTH, V_FULL)
    T: tl.constexpr = ThresholdConstants(WEIGHTS, DEFORMED, FAST, EXACT)
    own = block_of_keys(keys, heads, groups, COLUMNS)
    columns = own.index * COLUMNS + tl.arange(0, COLUMNS)
    k_tile = tile_of_head(k, own, k_batch, k_head, k_row, keys, width, columns, WIDTH, FULL)
    v_tile = tile_of_head(v, own, v_batch, v_head, v_row, keys, v_width, columns, V_WIDTH, V_FULL)
    first, low, high, last = query_range(
        own.index * COLUMNS, Sight(mask, mask_row, mask_column, queries, keys, offset, 0), C
    )  # fmt: skip
    JOIN: tl.constexpr = ROWS // LIVE_ROWS if ROWS > LIVE_ROWS else 1
    SPLIT: tl.constexpr = LIVE_ROWS // ROWS if LIVE_ROWS > ROWS else 1
    ACROSS: tl.constexpr = COLUMNS // LIVE_COLUMNS if COLUMNS > LIVE_COLUMNS else 1
    flags, row_blocks = tl.cdiv(keys, LIVE_COLUMNS), tl.cdiv(queries, LIVE_ROWS)
    across = own.index * COLUMNS // LIVE_COLUMNS
    listed += (own.batch_head * tl.cdiv(keys, COLUMNS) + own.index) * tl.cdiv(queries, ROWS)
    found_k = tl.zeros([COLUMNS, WIDTH], tl.float32)
    found_v = tl.zeros([COLUMNS, V_WIDTH], tl.float32)
    for member in range(groups):
        head = own.head * groups + member
        at_head = own.batch * heads + head
        marks = live + at_head * row_blocks * flags + across
        tl.debug_barrier()
        number = list_tiles(
            marks, flags, row_blocks, 1, flags - across, listed, 0, low // ROWS, high // ROWS, 0, SPLIT, JOIN, ACROSS
        )
        edges = list_tiles(
            marks, flags, row_blocks, 1, flags - across, listed + number, 0, first // ROWS, low // ROWS, 0,
            SPLIT, JOIN, ACROSS,
        )  # fmt: skip
        edges = list_tiles(
            marks, flags, row_blocks, 1, flags - across, listed + number, edges, high // ROWS, tl.cdiv(last, ROWS), 0,
            SPLIT, JOIN, ACROSS,
        )  # fmt: skip
        tl.debug_barrier()
        q_here = matrix_of_head(q, own.batch, head, q_batch, q_head, q_row, queries, width)
        grad_here = matrix_of_head(grad, own.batch, head, o_batch, o_head, o_row, queries, v_width)
        sight = sight_of_head(
            mask, own.batch, head, mask_batch, mask_head, mask_row, mask_column, queries, keys, offset, 0
        )
        penalty = tl.load(penalties + head) if PENALIZED else 0.0
        at_row = at_head * queries
        row = RowPointers(
            row_factor + at_row, parameter + at_row, threshold + 2 * at_row, threshold + 2 * at_row + queries,
            delta + at_row,
        )  # fmt: skip
        for edge in tl.static_range(2):
            found_k, found_v = _fold_keys(
                found_k, found_v, listed + number if edge else listed, edges if edge else number, k_tile, v_tile,
                q_here, grad_here, columns, row, sight, penalty, unit, PARAMETER, LIFT, FACTORED,
                PENALIZED, C, T, edge,
            )  # fmt: skip
    found_k = (found_k * slope).to(grad_k.dtype.element_ty)
    found_v = (found_v * (1.0 / LIFT)).to(grad_v.dtype.element_ty)
    grad_k = matrix_of_head(grad_k, own.batch, own.head, gk_batch, gk_head, gk_row, keys, width)
    store_tile(grad_k, found_k, columns, WIDTH)
    grad_v = matrix_of_head(grad_v, own.batch, own.head, gv_batch, gv_head, gv_row, keys, v_width)
    store_tile(grad_v, found_v, columns, V_WIDTH)


@triton.jit
def _fold_keys(
    grad_k, grad_v, listed, number, k_tile, v_tile, q, grad, columns, row, sight, penalty, unit,
    PARAMETER: tl.constexpr, LIFT: tl.constexpr, FACTORED: tl.constexpr, PENALIZED: tl.constexpr,
    C: tl.constexpr, T: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Add the gradients of a block of keys from the listed tiles; here the keys are the rows of a tile."""
    tile = tl.load(listed)
    for index in range(number):
        following = tl.load(listed + index + 1)
        first = tile * C.ROWS
        i, j = first + tl.arange(0, C.ROWS)[None, :], columns[:, None]
        left = sight.queries - first
        q_tile = load_tile_at(q, first, C.ROWS, C.WIDTH, EDGE, C.FULL)
        grad_tile = load_tile_at(grad, first, C.ROWS, C.V_WIDTH, EDGE, C.V_FULL)
        factor = _numbers(row.factor, first, left, True, 1.0, C.ROWS, EDGE) if FACTORED else unit
        a = _numbers(row.parameter, first, left, PARAMETER, 0.5, C.ROWS, EDGE)
        peak = _numbers(row.peak, first, left, True, 0.0, C.ROWS, EDGE) if T.EXACT else None
        t = _numbers(row.threshold, first, left, True, 0.0, C.ROWS, EDGE)
        mean = _numbers(row.delta, first, left, True, 0.0, C.ROWS, EDGE)
        dot = tl.dot(k_tile, tl.trans(q_tile), input_precision=C.PRECISION)
        dot = minus_penalty(dot, penalty, i, j, sight.offset, PENALIZED)
        dp = tl.dot(v_tile, tl.trans(grad_tile), input_precision=C.PRECISION)
        x = seen_above_threshold(dot, i, j, factor, peak, t, a, sight, C, T, EDGE)
        p, u = T.WEIGHTS(x, a, T.FAST)
        if LIFT != 1.0:
            p = p * LIFT
        grad_v = tl.dot(p.to(grad_tile.dtype), grad_tile, grad_v, input_precision=C.PRECISION)
        ds = u * (dp * factor - mean if FACTORED else dp - mean)
        grad_k = tl.dot(ds.to(q_tile.dtype), q_tile, grad_k, input_precision=C.PRECISION)
        tile = following
    return grad_k, grad_v


@triton.jit
def _numbers(pointer, first, left, HAS: tl.constexpr, other: tl.constexpr, ROWS: tl.constexpr, EDGE: tl.constexpr):
    """Load numbers of rows from `first` on, as a row of a tile; `left` of them exist."""
    rows = tl.arange(0, ROWS)[None, :]
    if HAS and EDGE:
        return tl.load(pointer + first + rows, mask=rows < left, other=other)
    elif HAS:
        return tl.load(pointer + first + rows)
    else:
        return tl.full([1, ROWS], other, tl.float32)


@triton.jit
def _by_alpha(x, u, a):
    """Return dp / d alpha at a fixed threshold, times -a^2: u (1 - x + x log x); as a series near x = 1."""
    e = x - 1.0
    series = e * e * (0.5 - e * (1.0 / 6.0 - e * (1.0 / 12.0 - e * 0.05)))
    logarithm = tl.log(tl.where(x > 0, x, 1.0)) * x - e
    return u * tl.where(tl.abs(e) < 0.05, series, logarithm)
