"""Gradients of the one-pass kernels.

Tiles are computed again. With w = a / D, dp_j = <dO, v_j> and delta = <dO, O> the gradient of a logit is
(a'(z_j) dp_j - b'(z_j) delta) / D. One kernel sums it over keys into the gradients of q and of a row's factor and
shift, one over queries into those of k and v. No two programs add to the same number: results are deterministic.

ENTROPY: the factor of a row depends on the entropy of softmax with soft_factor, over all keys in front of any window.
The gradient of k then has the entropy's part too, grad_entropy times dH/dz (kernels/row_spread.py).
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnorm.kernels.blocks import (
    Constants,
    LogitRows,
    MapConstants,
    Sight,
    block_of_keys,
    key_range,
    load_row,
    load_tile,
    logit_rows,
    logits,
    matrix_of_head,
    queries_keys_values,
    query_range,
    seen_keys,
    selected,
    sight_of_head,
    store_tile,
    tile_of_head,
)
from attnorm.kernels.launch import Form, empty_numbers, empty_rows, in_rows, padded
from attnorm.kernels.linear_algebra import row_dots
from attnorm.kernels.maps import LN2, LOG2E, MAPS, NO_REFERENCE
from attnorm.kernels.one_pass import OnePassLaunch, Saved
from attnorm.kernels.row_spread import add_gradient_of_queries, entropy_slopes


class RowEntropy(NamedTuple):
    """Entropy of softmax over each row, of which the row's factor is a function. All (B, H, Q) in float32."""

    factor: Tensor | None  # of the logits of this softmax
    entropy: Tensor
    reference: Tensor  # log2 of its denominator
    slope: Tensor  # the derivative of the row's factor


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None, shift: Tensor | None,
    sink: Tensor | None, cutoff: Tensor | None, parameters: Tensor | None, out: Tensor, saved: Saved, form: Form,
    sharpened: RowEntropy | None = None, *, grad_of_factor: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return gradients of q, k, v, factor, shift, sink and the factor of the entropy; empty if there is none.

    grad_of_factor: whether to compute the gradient of the factor.
    """
    call = OnePassLaunch.of(q, k, v, mask, factor, shift, sink, cutoff, parameters, form)
    grad = in_rows(grad)
    grad_in = grad if grad.dtype == q.dtype else grad.to(q.dtype)  # the gradient of a precise output is float32
    map_ = MAPS[form.map]
    grad_q, grad_k, grad_v = (empty_rows(t) for t in (q, k, v))
    grad_of_factor = grad_of_factor and factor is not None
    grad_factor, grad_shift = empty_numbers(q, grad_of_factor), empty_numbers(q, shift is not None)
    delta = row_dots(grad, out) if map_.normalised else empty_numbers(q, False)
    rows_of = (*(t.contiguous() for t in saved), delta)
    given, strides = (*call.tensors, *rows_of, grad_in), (*call.strides, *grad_in.stride()[:3])
    call.launch(
        backward_queries, _queries_tile(q, v), *given, grad_q, grad_factor, grad_shift, *strides,
        *grad_q.stride()[:3], *call.sizes, form.scale, **call.constants,
        GRAD_OF_FACTOR=grad_of_factor,
    )  # fmt: skip
    grad_soft, softmax = empty_numbers(q, False), (call.q,) * 4
    rows, columns, warps, stages = _keys_tile(q, v)
    if sharpened is not None:
        soft = None if sharpened.factor is None else sharpened.factor.contiguous()
        entropies, references = sharpened.entropy.contiguous(), sharpened.reference.contiguous()
        grad_entropy = (grad_factor * sharpened.slope).contiguous()
        grad_soft = add_gradient_of_queries(
            grad_entropy, grad_q, q, k, mask, soft, entropies, references, form.causal, form.scale
        )
        softmax = (call.q if soft is None else soft, entropies, references, grad_entropy)
        stages = min(stages, 2)  # with three, registers are spilled
    call.launch(
        backward_keys, (rows, columns, warps, stages), *given, *softmax, grad_k, grad_v, *strides,
        *grad_k.stride()[:3], *grad_v.stride()[:3], *call.sizes, form.scale, over_keys=True, **call.constants,
        ENTROPY=sharpened is not None, SOFT_FACTORED=sharpened is not None and sharpened.factor is not None,
    )  # fmt: skip
    grad_sink = empty_numbers(q, False)
    if sink is not None:
        weight = torch.exp2(sink[None, :, None] * LOG2E.value - saved.reference)
        grad_sink = -(weight * delta).sum((0, 2))
    return grad_q, grad_k, grad_v, grad_factor, grad_shift, grad_sink, grad_soft


def _keys_tile(q: Tensor, v: Tensor) -> tuple[int, int, int, int]:
    """Rows, columns, warps, stages of `backward_keys`.

    Wide float32: compiled for sm_90, a thread spills 0.7 to 1.4 KB of registers, and twice as much with 64 rows.
    """
    wide = q.dtype == torch.float32 and max(padded(q), padded(v)) > 128
    return (32, 16, 8, 1) if wide else _queries_tile(q, v)


def _queries_tile(q: Tensor, v: Tensor) -> tuple[int, int, int, int]:
    """Rows, columns, warps, stages, chosen as in the forward pass.

    Backward holds two tiles of logits at once and spills registers with larger ones. Wide float32: 0.2 to 0.3 KB per
    thread on sm_90, 0.3 to 1.0 KB on sm_80, and 187,392 bytes of shared memory.
    """
    width = max(padded(q), padded(v))
    if q.dtype == torch.float32:
        return (32, 32, 4, 2) if width <= 128 else (16, 64, 8, 2)
    return (64, 64, 4, 3) if width <= 64 else (64, 64, 4, 2) if width <= 128 else (32, 32, 4, 2)


class SumRows(NamedTuple):
    """Numbers of each row, or pointers to those of all rows."""

    reference: Any  # log2 of the denominator of a scaled map
    inverse: Any  # 1 / denominator of another normalised map
    delta: Any


class SoftRows(NamedTuple):
    """Pointers to numbers of all rows: the softmax whose entropy the factor depends on."""

    factor: Any
    entropy: Any
    reference: Any
    grad: Any  # of the entropy


@triton.jit
def backward_queries(
    q, k, v, mask, factor, shift, cutoff, parameters, reference, inverse, delta, grad, grad_q, grad_factor, grad_shift,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    mask_batch, mask_head, mask_row, mask_column, o_batch, o_head, o_row, gq_batch, gq_head, gq_row,
    heads, groups, queries, keys, offset, window, width, v_width, scale, cap, plain_scale,
    MAP: tl.constexpr, SLOPES: tl.constexpr, RULE: tl.constexpr, P: tl.constexpr, FAST: tl.constexpr,
    REFERENCE: tl.constexpr, NORMALISED: tl.constexpr, RULED: tl.constexpr,
    CAPPED: tl.constexpr, FACTORED: tl.constexpr, SHIFTED: tl.constexpr, SELECTED: tl.constexpr,
    SINK: tl.constexpr, PLAIN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    FULL: tl.constexpr, V_FULL: tl.constexpr, LIFT: tl.constexpr, GRAD_OF_FACTOR: tl.constexpr,
):  # fmt: skip
    """GRAD_OF_FACTOR: compute the gradient of the factor of each row."""
    C: tl.constexpr = Constants(CAUSAL, WINDOWED, MASKED, PRECISION, ROWS, COLUMNS, WIDTH, FULL, V_WIDTH, V_FULL)
    M: tl.constexpr = MapConstants(
        MAP, SLOPES, RULE, P, FAST, REFERENCE, NORMALISED, RULED, CAPPED, FACTORED, SHIFTED, SELECTED, PLAIN, LIFT
    )  # fmt: skip
    own, rows, inside, q_tile, k, v, sight = queries_keys_values(
        q, k, v, mask, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, mask_batch, mask_head,
        mask_row, mask_column, heads, groups, queries, keys, offset, window, width, v_width, C,
    )  # fmt: skip
    grad_tile = tile_of_head(grad, own, o_batch, o_head, o_row, queries, v_width, rows, V_WIDTH, V_FULL)
    row_at = own.batch_head * queries + rows
    row = logit_rows(LogitRows(factor, shift, cutoff), row_at, inside, M)
    sums = _sum_rows(SumRows(reference, inverse, delta), row_at, inside, M)
    parameter = tl.load(parameters + own.head) if RULED else 0.0

    found = tl.zeros([ROWS, WIDTH], tl.float32)
    found_factor = tl.zeros([ROWS], tl.float32)
    found_shift = tl.zeros([ROWS], tl.float32)
    borders = key_range(own.index, sight, C)
    for part in tl.static_range(0 if WINDOWED or MASKED else 1, 3):
        found, found_factor, found_shift = _fold_queries(
            found, found_factor, found_shift, borders[part], borders[part + 1], q_tile, grad_tile, k, v, rows, row,
            sums, sight, scale, cap, parameter, C, M, part != 1, GRAD_OF_FACTOR,
        )  # fmt: skip
    found = (found * (row.factor * plain_scale)[:, None]).to(grad_q.dtype.element_ty)
    grad_q = matrix_of_head(grad_q, own.batch, own.head, gq_batch, gq_head, gq_row, queries, width)
    store_tile(grad_q, found, rows, WIDTH)
    if GRAD_OF_FACTOR:
        tl.store(grad_factor + row_at, found_factor * LN2, mask=inside)
    if SHIFTED:
        tl.store(grad_shift + row_at, found_shift, mask=inside)


@triton.jit
def _fold_queries(
    grad_q, grad_factor, grad_shift, start, stop, q_tile, grad_tile, k, v, rows, row, sums, sight, scale, cap,
    parameter, C: tl.constexpr, M: tl.constexpr, EDGE: tl.constexpr, GRAD_OF_FACTOR: tl.constexpr,
):  # fmt: skip
    for at in range(start, stop, C.COLUMNS):
        columns = at + tl.arange(0, C.COLUMNS)
        k_tile = load_tile(k, columns, C.WIDTH, EDGE, C.FULL)
        v_tile = load_tile(v, columns, C.V_WIDTH, EDGE, C.V_FULL)
        dot = tl.dot(q_tile, tl.trans(k_tile), input_precision=C.PRECISION)
        dp = tl.dot(grad_tile, tl.trans(v_tile), input_precision=C.PRECISION)
        i, j = rows[:, None], columns[None, :]
        _w, dz, ds, s = _logit_gradient(dot, dp, i, j, row, sums, sight.offset, scale, cap, parameter, M, 1)
        if EDGE:
            seen = seen_keys(i, j, sight, C)
            ds = tl.where(seen, ds, 0.0)
            dz = tl.where(seen, dz, 0.0)
            s = tl.where(seen, s, 0.0)
        if GRAD_OF_FACTOR:
            grad_factor += tl.sum(dz * s, 1)
        if M.SHIFTED:
            grad_shift += tl.sum(dz, 1)
        grad_q = tl.dot(ds.to(k_tile.dtype), k_tile, grad_q, input_precision=C.PRECISION)
    return grad_q, grad_factor, grad_shift


@triton.jit
def backward_keys(
    q, k, v, mask, factor, shift, cutoff, parameters, reference, inverse, delta, grad,
    soft_factor, entropy, soft_reference, grad_entropy, grad_k, grad_v,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    mask_batch, mask_head, mask_row, mask_column, o_batch, o_head, o_row,
    gk_batch, gk_head, gk_row, gv_batch, gv_head, gv_row,
    heads, groups, queries, keys, offset, window, width, v_width, scale, cap, plain_scale,
    MAP: tl.constexpr, SLOPES: tl.constexpr, RULE: tl.constexpr, P: tl.constexpr, FAST: tl.constexpr,
    REFERENCE: tl.constexpr, NORMALISED: tl.constexpr, RULED: tl.constexpr,
    CAPPED: tl.constexpr, FACTORED: tl.constexpr, SHIFTED: tl.constexpr, SELECTED: tl.constexpr,
    SINK: tl.constexpr, PLAIN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    FULL: tl.constexpr, V_FULL: tl.constexpr, LIFT: tl.constexpr, ENTROPY: tl.constexpr, SOFT_FACTORED: tl.constexpr,
):  # fmt: skip
    C: tl.constexpr = Constants(
        CAUSAL, WINDOWED and not ENTROPY, MASKED, PRECISION, ROWS, COLUMNS, WIDTH, FULL, V_WIDTH, V_FULL
    )  # fmt: skip
    M: tl.constexpr = MapConstants(
        MAP, SLOPES, RULE, P, FAST, REFERENCE, NORMALISED, RULED, CAPPED, FACTORED, SHIFTED, SELECTED, PLAIN, LIFT
    )  # fmt: skip
    own = block_of_keys(keys, heads, groups, COLUMNS)
    columns = own.index * COLUMNS + tl.arange(0, COLUMNS)
    k_tile = tile_of_head(k, own, k_batch, k_head, k_row, keys, width, columns, WIDTH, FULL)
    v_tile = tile_of_head(v, own, v_batch, v_head, v_row, keys, v_width, columns, V_WIDTH, V_FULL)
    logit_pointers = LogitRows(factor, shift, cutoff)
    sum_pointers = SumRows(reference, inverse, delta)
    soft = SoftRows(soft_factor, entropy, soft_reference, grad_entropy)
    found_k = tl.zeros([COLUMNS, WIDTH], tl.float32)
    found_v = tl.zeros([COLUMNS, V_WIDTH], tl.float32)
    borders = query_range(own.index * COLUMNS, Sight(mask, mask_row, mask_column, queries, keys, offset, window), C)
    for member in range(groups):
        head = own.head * groups + member
        at_row = (own.batch * heads + head) * queries
        q_here = matrix_of_head(q, own.batch, head, q_batch, q_head, q_row, queries, width)
        grad_here = matrix_of_head(grad, own.batch, head, o_batch, o_head, o_row, queries, v_width)
        sight = sight_of_head(
            mask, own.batch, head, mask_batch, mask_head, mask_row, mask_column, queries, keys, offset, window
        )
        parameter = tl.load(parameters + head) if RULED else 0.0
        for part in tl.static_range(3):
            found_k, found_v = _fold_keys(
                found_k, found_v, borders[part], borders[part + 1], k_tile, v_tile, q_here, grad_here, columns, at_row,
                logit_pointers, sum_pointers, soft, sight, scale, cap, parameter, C, M, part != 1, WINDOWED, ENTROPY,
                SOFT_FACTORED,
            )  # fmt: skip
    found_k = (found_k * plain_scale).to(grad_k.dtype.element_ty)
    found_v = (found_v * (1.0 / LIFT)).to(grad_v.dtype.element_ty)
    grad_k = matrix_of_head(grad_k, own.batch, own.head, gk_batch, gk_head, gk_row, keys, width)
    store_tile(grad_k, found_k, columns, WIDTH)
    grad_v = matrix_of_head(grad_v, own.batch, own.head, gv_batch, gv_head, gv_row, keys, v_width)
    store_tile(grad_v, found_v, columns, V_WIDTH)


@triton.jit
def _fold_keys(
    grad_k, grad_v, start, stop, k_tile, v_tile, q, grad, columns, at_row, logit_pointers, sum_pointers, soft, sight,
    scale, cap, parameter, C: tl.constexpr, M: tl.constexpr, EDGE: tl.constexpr, WINDOWED: tl.constexpr,
    ENTROPY: tl.constexpr, SOFT_FACTORED: tl.constexpr,
):  # fmt: skip
    """Tiles lie with the keys as rows here."""
    for at in range(start, stop, C.ROWS):
        rows = at + tl.arange(0, C.ROWS)
        inside = rows < sight.queries
        q_tile = load_tile(q, rows, C.WIDTH, EDGE, C.FULL)
        grad_tile = load_tile(grad, rows, C.V_WIDTH, EDGE, C.V_FULL)
        row_at = at_row + rows
        row = logit_rows(logit_pointers, row_at, inside, M)
        sums = _sum_rows(sum_pointers, row_at, inside, M)
        dot = tl.dot(k_tile, tl.trans(q_tile), input_precision=C.PRECISION)
        dp = tl.dot(v_tile, tl.trans(grad_tile), input_precision=C.PRECISION)
        i, j = rows[None, :], columns[:, None]
        w, _dz, ds, s = _logit_gradient(dot, dp, i, j, row, sums, sight.offset, scale, cap, parameter, M, 0)
        if M.FACTORED:
            ds = ds * row.factor[None, :]
        if ENTROPY:
            if WINDOWED:
                within = j > i + sight.offset - sight.window
                ds = tl.where(within, ds, 0.0)
                w = tl.where(within, w, 0.0)
            soft_factor = load_row(soft.factor, row_at, inside, SOFT_FACTORED, 1.0)
            soft_reference = load_row(soft.reference, row_at, inside, True, 0.0)
            entropy = load_row(soft.entropy, row_at, inside, True, 0.0)
            row_grad = load_row(soft.grad, row_at, inside, True, 0.0) * soft_factor
            ds += row_grad[None, :] * entropy_slopes(
                s, soft_factor[None, :], soft_reference[None, :], entropy[None, :]
            )  # fmt: skip
        if EDGE:
            seen = seen_keys(i, j, sight, C)
            ds = tl.where(seen, ds, 0.0)
            w = tl.where(seen, w, 0.0)
        grad_v = tl.dot((w * M.LIFT).to(grad_tile.dtype), grad_tile, grad_v, input_precision=C.PRECISION)
        grad_k = tl.dot(ds.to(q_tile.dtype), q_tile, grad_k, input_precision=C.PRECISION)
    return grad_k, grad_v


@triton.jit
def _logit_gradient(dot, dp, i, j, row, sums, offset, scale, cap, parameter, M: tl.constexpr, AXIS: tl.constexpr):
    """Weights of a tile, the gradients of its logits after and in front of factor and shift; s capped, in bits.

    The latter without the factor itself: it is one number per row. AXIS: of the keys.
    """
    z, s, cap_slope, rule_slope = logits(dot, i, j, offset, row, scale, cap, parameter, M, AXIS)
    if M.SELECTED:
        z = selected(z, tl.expand_dims(row.cutoff, AXIS))
    w, slope_a, slope_b = M.SLOPES(z, tl.expand_dims(sums.reference, AXIS), M.P, M.FAST)
    if M.NORMALISED:
        dz = slope_a * dp - slope_b * tl.expand_dims(sums.delta, AXIS)
        if M.REFERENCE == NO_REFERENCE:
            inverse = tl.expand_dims(sums.inverse, AXIS)
            dz = dz * inverse
            w = w * inverse
    else:
        dz = slope_a * dp
    if M.RULED:
        dz = dz * rule_slope
    ds = dz
    if M.CAPPED:
        ds = ds * cap_slope
    return w, dz, ds, s


@triton.jit
def _sum_rows(pointers, at, inside, M: tl.constexpr):
    reference = load_row(pointers.reference, at, inside, M.REFERENCE != NO_REFERENCE, 0.0)
    inverse = load_row(pointers.inverse, at, inside, M.NORMALISED and M.REFERENCE == NO_REFERENCE, 1.0)
    return SumRows(reference, inverse, load_row(pointers.delta, at, inside, M.NORMALISED, 0.0))
