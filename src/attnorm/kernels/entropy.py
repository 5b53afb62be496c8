"""The entropy H of softmax over each row and its gradient: passes over the keys, without values.

With e = exp(z - m), m the largest logit, D = sum e and T = sum e log e, H is log D - T / D. Neither part is negative:
nothing cancels in a peaked row. The gradient of a logit is -p (log p + H) dH. One kernel adds its sum over keys to the
gradient of q; the sum over queries is a part of one_pass_backward.backward_keys.
"""

import triton
import triton.language as tl
from torch import Tensor

from attnorm.kernels.blocks import (
    Constants,
    Matrix,
    key_range,
    load_row,
    load_tile,
    queries_and_keys,
    seen_keys,
    store_tile,
)
from attnorm.kernels.launch import Launch
from attnorm.kernels.maps import LN2, LOG2E


@triton.jit
def _fold(total, e_log_e, peak, start, stop, q_tile, k, rows, unit, sight, C: tl.constexpr, EDGE: tl.constexpr):
    """D and T, in bits, and the largest product of a block of queries, with the keys from start to stop added."""
    for at in range(start, stop, C.COLUMNS):
        columns = at + tl.arange(0, C.COLUMNS)
        k_tile = load_tile(k, columns, C.WIDTH, EDGE, C.FULL)
        dot = tl.dot(q_tile, tl.trans(k_tile), input_precision=C.PRECISION)
        if EDGE:
            seen = seen_keys(rows[:, None], columns[None, :], sight, C)
            largest = tl.maximum(peak, tl.max(tl.where(seen, dot, float("-inf")), 1))
            level = tl.where(largest == float("-inf"), 0.0, largest) * unit
        else:
            largest = tl.maximum(peak, tl.max(dot, 1))
            level = largest * unit
        drop = tl.where(peak == float("-inf"), 0.0, peak * unit - level)  # before the first key both sums are 0
        shrink = tl.exp2(drop)
        e_log_e = shrink * (e_log_e + drop * total)
        total = shrink * total
        peak = largest
        x = dot * unit[:, None] - level[:, None]
        e = tl.exp2(x)
        if EDGE:
            x = tl.where(seen, x, 0.0)
            e = tl.where(seen, e, 0.0)
        total += tl.sum(e, 1)
        e_log_e += tl.sum(e * x, 1)
    return total, e_log_e, peak


@triton.jit
def row_entropy(
    q, k, mask, factor, entropy, reference,
    q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch, mask_head, mask_row, mask_column,
    heads, groups, queries, keys, offset, width, scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, FACTORED: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """(B, H, Q): the entropy in nats and log2 of the denominator, both 0 in rows that see nothing."""
    C: tl.constexpr = Constants(CAUSAL, False, MASKED, PRECISION, ROWS, COLUMNS, WIDTH, FULL)
    own, rows, inside, q_tile, k, sight = queries_and_keys(
        q, k, mask, q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch, mask_head, mask_row, mask_column,
        heads, groups, queries, keys, offset, 0, width, C,
    )  # fmt: skip
    row_at = own.batch_head * queries + rows
    unit = load_row(factor, row_at, inside, FACTORED, 1.0) * scale
    q_tile = tl.where((unit < 0)[:, None], -q_tile, q_tile)  # so that the largest product has the largest logit
    unit = tl.abs(unit)

    total = tl.zeros([ROWS], tl.float32)
    e_log_e = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    borders = key_range(own.index, sight, C)
    for part in tl.static_range(1, 3):
        total, e_log_e, peak = _fold(
            total, e_log_e, peak, borders[part], borders[part + 1], q_tile, k, rows, unit, sight, C, part != 1
        )
    total = tl.where(total == 0, 1.0, total)
    bits = tl.log2(total)
    level = tl.where(peak == float("-inf"), 0.0, peak) * unit
    found = tl.maximum(bits - e_log_e / total, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(entropy + row_at, found * LN2, mask=inside)
    tl.store(reference + row_at, level + bits, mask=inside)


@triton.jit
def entropy_slopes(s, factor, reference, entropy):
    """dH/dz = -p (log p + H) at the logits z = factor * s, for s and the reference in bits."""
    x = s * factor - reference
    return -tl.exp2(x) * (x * LN2 + entropy)


@triton.jit
def _fold_gradient(
    found, found_factor, start, stop, q_tile, k, rows, factor, entropy, reference, sight, scale,
    C: tl.constexpr, FACTORED: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    for at in range(start, stop, C.COLUMNS):
        columns = at + tl.arange(0, C.COLUMNS)
        k_tile = load_tile(k, columns, C.WIDTH, EDGE, C.FULL)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=C.PRECISION) * scale
        slopes = entropy_slopes(s, factor[:, None], reference[:, None], entropy[:, None])
        if EDGE:
            seen = seen_keys(rows[:, None], columns[None, :], sight, C)
            slopes = tl.where(seen, slopes, 0.0)
            s = tl.where(seen, s, 0.0)
        if FACTORED:
            found_factor += tl.sum(slopes * s, 1)
        found = tl.dot(slopes.to(k_tile.dtype), k_tile, found, input_precision=C.PRECISION)
    return found, found_factor


@triton.jit
def backward_queries(
    q, k, mask, factor, entropy, reference, grad_entropy, grad_q, grad_factor,
    q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch, mask_head, mask_row, mask_column,
    heads, groups, queries, keys, offset, width, scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, FACTORED: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """grad_entropy: (B, H, Q); grad_q (B, H, Q, D), contiguous, is added to, grad_factor (B, H, Q) is written."""
    C: tl.constexpr = Constants(CAUSAL, False, MASKED, PRECISION, ROWS, COLUMNS, WIDTH, FULL)
    own, rows, inside, q_tile, k, sight = queries_and_keys(
        q, k, mask, q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch, mask_head, mask_row, mask_column,
        heads, groups, queries, keys, offset, 0, width, C,
    )  # fmt: skip
    row_at = own.batch_head * queries + rows
    row_factor = load_row(factor, row_at, inside, FACTORED, 1.0)
    row_entropy = load_row(entropy, row_at, inside, True, 0.0)
    row_reference = load_row(reference, row_at, inside, True, 0.0)

    found = tl.zeros([ROWS, WIDTH], tl.float32)
    found_factor = tl.zeros([ROWS], tl.float32)
    borders = key_range(own.index, sight, C)
    for part in tl.static_range(1, 3):
        found, found_factor = _fold_gradient(
            found, found_factor, borders[part], borders[part + 1], q_tile, k, rows, row_factor, row_entropy,
            row_reference, sight, scale, C, FACTORED, part != 1,
        )  # fmt: skip
    row_grad = load_row(grad_entropy, row_at, inside, True, 0.0)
    grad_q = Matrix(grad_q + own.batch_head * queries * width, queries, width, width)
    so_far = load_tile(grad_q, rows, WIDTH, True, FULL).to(tl.float32)
    found = so_far + found * (row_grad * row_factor * (scale * LN2))[:, None]
    store_tile(grad_q, found, rows, WIDTH)
    if FACTORED:
        tl.store(grad_factor + row_at, found_factor * row_grad * LN2, mask=inside)


def entropy_of_rows(
    q: Tensor, k: Tensor, mask: Tensor | None, factor: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The entropy of each row in nats and log2 of its denominator, (B, H, Q) in float32."""
    call = Launch.without_values(q, k, mask, factor, causal)
    found = call.rows(True), call.rows(True)
    call.run(row_entropy, scale * LOG2E.value, call.tensors[4], *found)
    return found


def add_gradient_of_queries(
    grad_entropy: Tensor, grad_q: Tensor, q: Tensor, k: Tensor, mask: Tensor | None, factor: Tensor | None,
    entropy: Tensor, reference: Tensor, causal: bool, scale: float,
) -> Tensor:  # fmt: skip
    """Add the gradient of q to grad_q, for the gradient (B, H, Q) of the entropy. Return that of the factor."""
    call = Launch.without_values(q, k, mask, factor, causal)
    grad_factor = call.rows(factor is not None)
    given = call.tensors[4], entropy, reference, grad_entropy
    call.run(backward_queries, scale * LOG2E.value, *given, grad_q, grad_factor)
    return grad_factor
