"""Gradients of the one-pass kernels.

Tiles are computed again. With w = a / D, dp_j = <dO, v_j> and delta = <dO, O> the gradient of a logit is
(a'(z_j) dp_j - b'(z_j) delta) / D. One kernel sums it over keys into the gradients of q and of a row's factor and
shift, one over queries into those of k and v. No two programs add to the same number: results are deterministic.

ENTROPY: the factor of a row depends on the entropy of softmax with soft_factor, over all keys in front of any window.
The gradient of k then has the entropy's part too, grad_entropy times dH/dz (kernels/entropy.py).
"""

import triton
import triton.language as tl

from attnorm.kernels.entropy import entropy_slopes
from attnorm.kernels.maps import LN2, LOG2E
from attnorm.kernels.tiles import (
    capped,
    key_range,
    load_row,
    load_tile,
    query_range,
    seen_keys,
    selected,
    store_tile,
)


@triton.jit
def _logit_gradient(
    dot, dp, i, j, factor, shift, least, reference, inverse, delta, offset, scale, cap, parameter,
    SLOPES: tl.constexpr, RULE: tl.constexpr, P: tl.constexpr, FAST: tl.constexpr, REFERENCE: tl.constexpr,
    NORMALISED: tl.constexpr, RULED: tl.constexpr, CAPPED: tl.constexpr, FACTORED: tl.constexpr,
    SHIFTED: tl.constexpr, SELECTED: tl.constexpr,
):  # fmt: skip
    """Weights of a tile, the gradients of its logits after factor and shift, and of its products; s capped, in bits."""
    s, cap_slope = capped(dot * scale, cap, CAPPED)
    z = s
    if FACTORED:
        z = z * factor
    if SHIFTED:
        z = z + shift
    rule_slope = 1.0
    if RULED:
        z, rule_slope = RULE(z, tl.abs((i + offset - j).to(tl.float32)), parameter, FAST)
    if SELECTED:
        z = selected(z, least)
    w, slope_a, slope_b = SLOPES(z, reference, P, FAST)
    if NORMALISED:
        dz = slope_a * dp - slope_b * delta
        if REFERENCE == 0:
            dz = dz * inverse
            w = w * inverse
    else:
        dz = slope_a * dp
    if RULED:
        dz = dz * rule_slope
    ds = dz
    if FACTORED:
        ds = ds * factor
    if CAPPED:
        ds = ds * cap_slope
    return w, dz, ds, s


@triton.jit
def _fold_queries(
    grad_q, grad_factor, grad_shift, start, stop, q_tile, grad_tile, k, v, rows, factor, shift, least, reference,
    inverse, delta, mask, k_row, v_row, mask_row, mask_column, queries, keys, offset, window, width, v_width, scale,
    cap, parameter,
    SLOPES: tl.constexpr, RULE: tl.constexpr, P: tl.constexpr, FAST: tl.constexpr, REFERENCE: tl.constexpr,
    NORMALISED: tl.constexpr, RULED: tl.constexpr, CAPPED: tl.constexpr, FACTORED: tl.constexpr,
    SHIFTED: tl.constexpr, SELECTED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr,
    EDGE: tl.constexpr, PRECISION: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    FULL: tl.constexpr, V_FULL: tl.constexpr,
):  # fmt: skip
    for at in range(start, stop, COLUMNS):
        columns = at + tl.arange(0, COLUMNS)
        k_tile = load_tile(k, columns, keys, k_row, width, WIDTH, EDGE, FULL)
        v_tile = load_tile(v, columns, keys, v_row, v_width, V_WIDTH, EDGE, V_FULL)
        dot = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        dp = tl.dot(grad_tile, tl.trans(v_tile), input_precision=PRECISION)
        i, j = rows[:, None], columns[None, :]
        _w, dz, ds, s = _logit_gradient(
            dot, dp, i, j, factor[:, None], shift[:, None], least[:, None], reference[:, None], inverse[:, None],
            delta[:, None], offset, scale, cap, parameter, SLOPES, RULE, P, FAST, REFERENCE, NORMALISED, RULED, CAPPED,
            FACTORED, SHIFTED, SELECTED,
        )  # fmt: skip
        if EDGE:
            seen = seen_keys(i, j, mask, mask_row, mask_column, queries, keys, offset, window, CAUSAL, WINDOWED, MASKED)
            ds = tl.where(seen, ds, 0.0)
            dz = tl.where(seen, dz, 0.0)
            s = tl.where(seen, s, 0.0)
        if FACTORED:
            grad_factor += tl.sum(dz * s, 1)
        if SHIFTED:
            grad_shift += tl.sum(dz, 1)
        grad_q = tl.dot(ds.to(k_tile.dtype), k_tile, grad_q, input_precision=PRECISION)
    return grad_q, grad_factor, grad_shift


@triton.jit
def backward_queries(
    q, k, v, mask, factor, shift, least, parameters, reference, inverse, delta, grad, grad_q, grad_factor, grad_shift,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    mask_batch, mask_head, mask_row, mask_column, o_batch, o_head, o_row, gq_batch, gq_head, gq_row,
    heads, groups, queries, keys, offset, window, width, v_width, scale, cap, plain_scale,
    MAP: tl.constexpr, SLOPES: tl.constexpr, RULE: tl.constexpr, P: tl.constexpr, FAST: tl.constexpr,
    REFERENCE: tl.constexpr, NORMALISED: tl.constexpr, RULED: tl.constexpr,
    CAPPED: tl.constexpr, FACTORED: tl.constexpr, SHIFTED: tl.constexpr, SELECTED: tl.constexpr,
    SINK: tl.constexpr, PLAIN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    FULL: tl.constexpr, V_FULL: tl.constexpr, LIFT: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(queries, ROWS)
    program = tl.program_id(0)
    block = blocks - 1 - program % blocks
    batch_head = (program // blocks).to(tl.int64)
    batch, head = batch_head // heads, batch_head % heads
    k += batch * k_batch + head // groups * k_head
    v += batch * v_batch + head // groups * v_head
    mask += batch * mask_batch + head * mask_head
    rows = block * ROWS + tl.arange(0, ROWS)
    inside = rows < queries
    q_tile = load_tile(q + batch * q_batch + head * q_head, rows, queries, q_row, width, WIDTH, True, FULL)
    grad_tile = load_tile(grad + batch * o_batch + head * o_head, rows, queries, o_row, v_width, V_WIDTH, True, V_FULL)
    row_at = batch_head * queries + rows
    row_factor = load_row(factor, row_at, inside, FACTORED, 1.0)
    row_shift = load_row(shift, row_at, inside, SHIFTED, 0.0) * LOG2E
    row_least = load_row(least, row_at, inside, SELECTED, float("-inf"))
    row_reference = load_row(reference, row_at, inside, REFERENCE != 0, 0.0)
    row_inverse = load_row(inverse, row_at, inside, NORMALISED and REFERENCE == 0, 1.0)
    row_delta = load_row(delta, row_at, inside, NORMALISED, 0.0)
    parameter = tl.load(parameters + head) if RULED else 0.0

    found = tl.zeros([ROWS, WIDTH], tl.float32)
    found_factor = tl.zeros([ROWS], tl.float32)
    found_shift = tl.zeros([ROWS], tl.float32)
    first, low, high, last = key_range(block, queries, keys, offset, window, CAUSAL, WINDOWED, MASKED, ROWS, COLUMNS)
    if WINDOWED or MASKED:
        found, found_factor, found_shift = _fold_queries(
            found, found_factor, found_shift, first, low, q_tile, grad_tile, k, v, rows, row_factor, row_shift,
            row_least, row_reference, row_inverse, row_delta, mask, k_row, v_row, mask_row, mask_column, queries, keys,
            offset, window, width, v_width, scale, cap, parameter, SLOPES, RULE, P, FAST, REFERENCE, NORMALISED,
            RULED, CAPPED, FACTORED, SHIFTED, SELECTED, CAUSAL, WINDOWED, MASKED, True, PRECISION, COLUMNS, WIDTH,
            V_WIDTH, FULL, V_FULL,
        )  # fmt: skip
    found, found_factor, found_shift = _fold_queries(
        found, found_factor, found_shift, low, high, q_tile, grad_tile, k, v, rows, row_factor, row_shift,
        row_least, row_reference, row_inverse, row_delta, mask, k_row, v_row, mask_row, mask_column, queries, keys,
        offset, window, width, v_width, scale, cap, parameter, SLOPES, RULE, P, FAST, REFERENCE, NORMALISED,
        RULED, CAPPED, FACTORED, SHIFTED, SELECTED, CAUSAL, WINDOWED, MASKED, False, PRECISION, COLUMNS, WIDTH, V_WIDTH,
        FULL, V_FULL,
    )  # fmt: skip
    found, found_factor, found_shift = _fold_queries(
        found, found_factor, found_shift, high, last, q_tile, grad_tile, k, v, rows, row_factor, row_shift,
        row_least, row_reference, row_inverse, row_delta, mask, k_row, v_row, mask_row, mask_column, queries, keys,
        offset, window, width, v_width, scale, cap, parameter, SLOPES, RULE, P, FAST, REFERENCE, NORMALISED,
        RULED, CAPPED, FACTORED, SHIFTED, SELECTED, CAUSAL, WINDOWED, MASKED, True, PRECISION, COLUMNS, WIDTH, V_WIDTH,
        FULL, V_FULL,
    )  # fmt: skip
    found = (found * plain_scale).to(grad_q.dtype.element_ty)
    store_tile(grad_q + batch * gq_batch + head * gq_head, found, rows, queries, gq_row, width, WIDTH)
    if FACTORED:
        tl.store(grad_factor + row_at, found_factor * LN2, mask=inside)
    if SHIFTED:
        tl.store(grad_shift + row_at, found_shift, mask=inside)


@triton.jit
def _fold_keys(
    grad_k, grad_v, start, stop, k_tile, v_tile, q, grad, columns, at_row, factor, shift, least, reference,
    inverse, delta, soft_factor, entropy, soft_reference, grad_entropy, mask, q_row, o_row, mask_row, mask_column,
    queries, keys, offset, window, width, v_width, scale, cap, parameter,
    SLOPES: tl.constexpr, RULE: tl.constexpr, P: tl.constexpr, FAST: tl.constexpr, REFERENCE: tl.constexpr,
    NORMALISED: tl.constexpr, RULED: tl.constexpr, CAPPED: tl.constexpr, FACTORED: tl.constexpr,
    SHIFTED: tl.constexpr, SELECTED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    MASKED: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr, FULL: tl.constexpr, V_FULL: tl.constexpr, LIFT: tl.constexpr, ENTROPY: tl.constexpr,
    SOFT_FACTORED: tl.constexpr,
):  # fmt: skip
    """Tiles lie with the keys as rows here."""
    for at in range(start, stop, ROWS):
        rows = at + tl.arange(0, ROWS)
        inside = rows < queries
        q_tile = load_tile(q, rows, queries, q_row, width, WIDTH, EDGE, FULL)
        grad_tile = load_tile(grad, rows, queries, o_row, v_width, V_WIDTH, EDGE, V_FULL)
        row_at = at_row + rows
        row_factor = load_row(factor, row_at, inside, FACTORED, 1.0)
        row_shift = load_row(shift, row_at, inside, SHIFTED, 0.0) * LOG2E
        row_least = load_row(least, row_at, inside, SELECTED, float("-inf"))
        row_reference = load_row(reference, row_at, inside, REFERENCE != 0, 0.0)
        row_inverse = load_row(inverse, row_at, inside, NORMALISED and REFERENCE == 0, 1.0)
        row_delta = load_row(delta, row_at, inside, NORMALISED, 0.0)
        dot = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
        dp = tl.dot(v_tile, tl.trans(grad_tile), input_precision=PRECISION)
        i, j = rows[None, :], columns[:, None]
        w, _dz, ds, s = _logit_gradient(
            dot, dp, i, j, row_factor[None, :], row_shift[None, :], row_least[None, :], row_reference[None, :],
            row_inverse[None, :], row_delta[None, :], offset, scale, cap, parameter, SLOPES, RULE, P, FAST, REFERENCE,
            NORMALISED, RULED, CAPPED, FACTORED, SHIFTED, SELECTED,
        )  # fmt: skip
        if ENTROPY:
            if WINDOWED:
                within = j > i + offset - window
                ds = tl.where(within, ds, 0.0)
                w = tl.where(within, w, 0.0)
            row_soft_factor = load_row(soft_factor, row_at, inside, SOFT_FACTORED, 1.0)
            row_soft_reference = load_row(soft_reference, row_at, inside, True, 0.0)
            row_entropy = load_row(entropy, row_at, inside, True, 0.0)
            row_grad = load_row(grad_entropy, row_at, inside, True, 0.0) * row_soft_factor
            ds += row_grad[None, :] * entropy_slopes(
                s, row_soft_factor[None, :], row_soft_reference[None, :], row_entropy[None, :]
            )
        if EDGE:
            seen = seen_keys(
                i, j, mask, mask_row, mask_column, queries, keys, offset, window,
                CAUSAL, WINDOWED and not ENTROPY, MASKED,
            )  # fmt: skip
            ds = tl.where(seen, ds, 0.0)
            w = tl.where(seen, w, 0.0)
        grad_v = tl.dot((w * LIFT).to(grad_tile.dtype), grad_tile, grad_v, input_precision=PRECISION)
        grad_k = tl.dot(ds.to(q_tile.dtype), q_tile, grad_k, input_precision=PRECISION)
    return grad_k, grad_v


@triton.jit
def backward_keys(
    q, k, v, mask, factor, shift, least, parameters, reference, inverse, delta, grad,
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
    blocks = tl.cdiv(keys, COLUMNS)
    program = tl.program_id(0)
    block = program % blocks  # the first keys are seen by most queries
    batch_head = (program // blocks).to(tl.int64)
    key_heads = heads // groups
    batch, key_head = batch_head // key_heads, batch_head % key_heads
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    k_tile = load_tile(k + batch * k_batch + key_head * k_head, columns, keys, k_row, width, WIDTH, True, FULL)
    v_tile = load_tile(v + batch * v_batch + key_head * v_head, columns, keys, v_row, v_width, V_WIDTH, True, V_FULL)
    found_k = tl.zeros([COLUMNS, WIDTH], tl.float32)
    found_v = tl.zeros([COLUMNS, V_WIDTH], tl.float32)
    first, low, high, last = query_range(
        block * COLUMNS, queries, keys, offset, window, CAUSAL, WINDOWED and not ENTROPY, MASKED, ROWS, COLUMNS
    )
    for member in range(groups):
        head = key_head * groups + member
        at_row = (batch * heads + head) * queries
        q_here = q + batch * q_batch + head * q_head
        grad_here = grad + batch * o_batch + head * o_head
        mask_here = mask + batch * mask_batch + head * mask_head
        parameter = tl.load(parameters + head) if RULED else 0.0
        found_k, found_v = _fold_keys(
            found_k, found_v, first, low, k_tile, v_tile, q_here, grad_here, columns, at_row, factor, shift,
            least, reference, inverse, delta, soft_factor, entropy, soft_reference, grad_entropy, mask_here, q_row,
            o_row, mask_row, mask_column, queries, keys, offset, window, width, v_width, scale, cap, parameter, SLOPES,
            RULE, P, FAST, REFERENCE, NORMALISED, RULED, CAPPED, FACTORED, SHIFTED, SELECTED, CAUSAL, WINDOWED, MASKED,
            True, PRECISION, ROWS, WIDTH, V_WIDTH, FULL, V_FULL, LIFT, ENTROPY, SOFT_FACTORED,
        )  # fmt: skip
        found_k, found_v = _fold_keys(
            found_k, found_v, low, high, k_tile, v_tile, q_here, grad_here, columns, at_row, factor, shift,
            least, reference, inverse, delta, soft_factor, entropy, soft_reference, grad_entropy, mask_here, q_row,
            o_row, mask_row, mask_column, queries, keys, offset, window, width, v_width, scale, cap, parameter, SLOPES,
            RULE, P, FAST, REFERENCE, NORMALISED, RULED, CAPPED, FACTORED, SHIFTED, SELECTED, CAUSAL, WINDOWED, MASKED,
            False, PRECISION, ROWS, WIDTH, V_WIDTH, FULL, V_FULL, LIFT, ENTROPY, SOFT_FACTORED,
        )  # fmt: skip
        found_k, found_v = _fold_keys(
            found_k, found_v, high, last, k_tile, v_tile, q_here, grad_here, columns, at_row, factor, shift,
            least, reference, inverse, delta, soft_factor, entropy, soft_reference, grad_entropy, mask_here, q_row,
            o_row, mask_row, mask_column, queries, keys, offset, window, width, v_width, scale, cap, parameter, SLOPES,
            RULE, P, FAST, REFERENCE, NORMALISED, RULED, CAPPED, FACTORED, SHIFTED, SELECTED, CAUSAL, WINDOWED, MASKED,
            True, PRECISION, ROWS, WIDTH, V_WIDTH, FULL, V_FULL, LIFT, ENTROPY, SOFT_FACTORED,
        )  # fmt: skip
    found_k = (found_k * plain_scale).to(grad_k.dtype.element_ty)
    found_v = (found_v * (1.0 / LIFT)).to(grad_v.dtype.element_ty)
    store_tile(grad_k + batch * gk_batch + key_head * gk_head, found_k, columns, keys, gk_row, width, WIDTH)
    store_tile(grad_v + batch * gv_batch + key_head * gv_head, found_v, columns, keys, gv_row, v_width, V_WIDTH)
