"""How far the logits of each row spread: the entropy of softmax and the variance, with gradients, without values.

The factor of a row may depend on one of them. Both are passes over the keys.

Entropy: with e = exp(z - m), m the largest logit, D = sum e and T = sum e log e, H is log D - T / D. Neither part is
negative: nothing cancels in a peaked row. The gradient of a logit is -p (log p + H) dH. One kernel adds its sum over
keys to the gradient of q; the sum over queries is a part of one_pass_backward.backward_keys.

Variance: tiles of keys are merged as Chan, Golub & LeVeque 1983 merge samples, so that a large mean takes no digits
from the variance V. Its gradient by a logit s is 2 (s - mean) / n times that of V: the mean itself carries none, since
the s - mean sum to 0.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnorm.kernels.blocks import (
    Constants,
    Matrix,
    Sight,
    block_of_keys,
    key_range,
    load_row,
    load_tile,
    matrix_of_head,
    queries_and_keys,
    query_range,
    seen_keys,
    sight_of_head,
    store_tile,
    tile_of_head,
)
from attnorm.kernels.launch import Launch, empty_numbers
from attnorm.kernels.maps import LN2, LOG2E


def entropy_of_rows(
    q: Tensor, k: Tensor, mask: Tensor | None, factor: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The entropy of each row in nats and log2 of its denominator, (B, H, Q) in float32."""
    call = Launch.without_values(q, k, mask, factor, causal)
    found = empty_numbers(q), empty_numbers(q)
    call.run(row_entropy, scale * LOG2E.value, call.tensors[4], *found)
    return found


def add_gradient_of_queries(
    grad_entropy: Tensor, grad_q: Tensor, q: Tensor, k: Tensor, mask: Tensor | None, factor: Tensor | None,
    entropy: Tensor, reference: Tensor, causal: bool, scale: float,
) -> Tensor:  # fmt: skip
    """Add the gradient of q to grad_q, for the gradient (B, H, Q) of the entropy. Return that of the factor."""
    call = Launch.without_values(q, k, mask, factor, causal)
    grad_factor = empty_numbers(q, factor is not None)
    given = call.tensors[4], entropy, reference, grad_entropy
    call.run(entropy_backward, scale * LOG2E.value, *given, grad_q, grad_factor, *grad_q.stride()[:3])
    return grad_factor


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
        total, e_log_e, peak = _fold_entropy(
            total, e_log_e, peak, borders[part], borders[part + 1], q_tile, k, rows, unit, sight, C, part != 1
        )
    total = tl.where(total == 0, 1.0, total)
    bits = tl.log2(total)
    level = tl.where(peak == float("-inf"), 0.0, peak) * unit
    found = tl.maximum(bits - e_log_e / total, 0.0, propagate_nan=tl.PropagateNan.ALL)
    tl.store(entropy + row_at, found * LN2, mask=inside)
    tl.store(reference + row_at, level + bits, mask=inside)


@triton.jit
def _fold_entropy(total, e_log_e, peak, start, stop, q_tile, k, rows, unit, sight, C: tl.constexpr, EDGE: tl.constexpr):
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
def entropy_backward(
    q, k, mask, factor, entropy, reference, grad_entropy, grad_q, grad_factor, gq_batch, gq_head, gq_row,
    q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch, mask_head, mask_row, mask_column,
    heads, groups, queries, keys, offset, width, scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, FACTORED: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """grad_entropy: (B, H, Q); grad_q (B, H, Q, D) is added to, grad_factor (B, H, Q) is written."""
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
        found, found_factor = _fold_entropy_gradient(
            found, found_factor, borders[part], borders[part + 1], q_tile, k, rows, row_factor, row_entropy,
            row_reference, sight, scale, C, FACTORED, part != 1,
        )  # fmt: skip
    row_grad = load_row(grad_entropy, row_at, inside, True, 0.0)
    grad_q = matrix_of_head(grad_q, own.batch, own.head, gq_batch, gq_head, gq_row, queries, width)
    so_far = load_tile(grad_q, rows, WIDTH, True, FULL).to(tl.float32)
    found = so_far + found * (row_grad * row_factor * (scale * LN2))[:, None]
    store_tile(grad_q, found, rows, WIDTH)
    if FACTORED:
        tl.store(grad_factor + row_at, found_factor * row_grad * LN2, mask=inside)


@triton.jit
def _fold_entropy_gradient(
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
def entropy_slopes(s, factor, reference, entropy):
    """dH/dz = -p (log p + H) at the logits z = factor * s, for s and the reference in bits."""
    x = s * factor - reference
    return -tl.exp2(x) * (x * LN2 + entropy)


def variance_of_rows(
    q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Variance and mean of the logits of each row, and the number of visible keys, (B, H, Q) in float32."""
    call = Launch.without_values(q, k, mask, None, causal)
    found = empty_numbers(q), empty_numbers(q), empty_numbers(q)
    call.run(row_variance, scale, *found)
    return found


def variance_gradients(
    slope: Tensor, q: Tensor, k: Tensor, mask: Tensor | None, mean: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Gradients of q and k, for the gradient of every logit over its distance from the mean of its row, (B, H, Q)."""
    call = Launch.without_values(q, k, mask, None, causal)
    grad_q, grad_k = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k))
    mean, slope = mean.contiguous(), slope.contiguous()
    lift = slope.abs().amax().clamp(min=torch.finfo(torch.float32).tiny).reshape(1)
    call.run(variance_backward_queries, scale, mean, slope, grad_q)
    call.run(variance_backward_keys, scale, mean, slope / lift, lift, grad_k, over_keys=True)
    return grad_q, grad_k


@triton.jit
def row_variance(
    q, k, mask, variance, mean, count,
    q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch, mask_head, mask_row, mask_column,
    heads, groups, queries, keys, offset, width, scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """(B, H, Q): variance and mean, both 0 in rows that see nothing, and the number of visible keys."""
    C: tl.constexpr = Constants(CAUSAL, False, MASKED, PRECISION, ROWS, COLUMNS, WIDTH, FULL)
    own, rows, inside, q_tile, k, sight = queries_and_keys(
        q, k, mask, q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch, mask_head, mask_row, mask_column,
        heads, groups, queries, keys, offset, 0, width, C,
    )  # fmt: skip
    found_count = tl.zeros([ROWS], tl.float32)
    found_mean = tl.zeros([ROWS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    borders = key_range(own.index, sight, C)
    for part in tl.static_range(1, 3):
        found_count, found_mean, squares = _fold_variance(
            found_count, found_mean, squares, borders[part], borders[part + 1], q_tile, k, rows, sight, scale,
            C, part != 1,
        )  # fmt: skip
    row_at = own.batch_head * queries + rows
    tl.store(variance + row_at, squares / tl.maximum(found_count, 1.0), mask=inside)
    tl.store(mean + row_at, found_mean, mask=inside)
    tl.store(count + row_at, found_count, mask=inside)


@triton.jit
def _fold_variance(
    count, mean, squares, start, stop, q_tile, k, rows, sight, scale, C: tl.constexpr, EDGE: tl.constexpr
):  # fmt: skip
    """Number, mean and squared deviations of the logits of a block of queries, with the keys from start to stop."""
    for at in range(start, stop, C.COLUMNS):
        columns = at + tl.arange(0, C.COLUMNS)
        k_tile = load_tile(k, columns, C.WIDTH, EDGE, C.FULL)
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=C.PRECISION) * scale
        if EDGE:
            seen = seen_keys(rows[:, None], columns[None, :], sight, C)
            more = tl.sum(tl.where(seen, 1.0, 0.0), 1)
            here = tl.sum(tl.where(seen, s, 0.0), 1) / tl.maximum(more, 1.0)
            away = tl.where(seen, s - here[:, None], 0.0)
        else:
            more = tl.full(count.shape, C.COLUMNS, tl.float32)
            here = tl.sum(s, 1) / C.COLUMNS
            away = s - here[:, None]
        step = here - mean
        share = more / tl.maximum(count + more, 1.0)
        squares += tl.sum(away * away, 1) + step * step * count * share
        mean += step * share
        count += more
    return count, mean, squares


@triton.jit
def variance_backward_queries(
    q, k, mask, mean, slope, grad_q,
    q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch, mask_head, mask_row, mask_column,
    heads, groups, queries, keys, offset, width, scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """slope: (B, H, Q), the gradient of a logit over its distance from the mean. grad_q: contiguous."""
    C: tl.constexpr = Constants(CAUSAL, False, MASKED, PRECISION, ROWS, COLUMNS, WIDTH, FULL)
    own, rows, inside, q_tile, k, sight = queries_and_keys(
        q, k, mask, q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch, mask_head, mask_row, mask_column,
        heads, groups, queries, keys, offset, 0, width, C,
    )  # fmt: skip
    row_at = own.batch_head * queries + rows
    row_mean = load_row(mean, row_at, inside, True, 0.0)
    found = tl.zeros([ROWS, WIDTH], tl.float32)
    borders = key_range(own.index, sight, C)
    for part in tl.static_range(1, 3):
        found = _fold_queries(
            found, borders[part], borders[part + 1], q_tile, k, rows, row_mean, sight, scale, C, part != 1
        )
    found = found * (load_row(slope, row_at, inside, True, 0.0) * scale)[:, None]
    store_tile(Matrix(grad_q + own.batch_head * queries * width, queries, width, width), found, rows, WIDTH)


@triton.jit
def _fold_queries(found, start, stop, q_tile, k, rows, mean, sight, scale, C: tl.constexpr, EDGE: tl.constexpr):
    for at in range(start, stop, C.COLUMNS):
        columns = at + tl.arange(0, C.COLUMNS)
        k_tile = load_tile(k, columns, C.WIDTH, EDGE, C.FULL)
        away = tl.dot(q_tile, tl.trans(k_tile), input_precision=C.PRECISION) * scale - mean[:, None]
        if EDGE:
            away = tl.where(seen_keys(rows[:, None], columns[None, :], sight, C), away, 0.0)
        found = tl.dot(away.to(k_tile.dtype), k_tile, found, input_precision=C.PRECISION)
    return found


@triton.jit
def variance_backward_keys(
    q, k, mask, mean, slope, lift, grad_k,
    q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch, mask_head, mask_row, mask_column,
    heads, groups, queries, keys, offset, width, scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """slope: over its largest size, lift (1,), so that half precision can hold it. grad_k: contiguous."""
    C: tl.constexpr = Constants(CAUSAL, False, MASKED, PRECISION, ROWS, COLUMNS, WIDTH, FULL)
    own = block_of_keys(keys, heads, groups, COLUMNS)
    columns = own.index * COLUMNS + tl.arange(0, COLUMNS)
    k_tile = tile_of_head(k, own, k_batch, k_head, k_row, keys, width, columns, WIDTH, FULL)
    found = tl.zeros([COLUMNS, WIDTH], tl.float32)
    borders = query_range(own.index * COLUMNS, Sight(mask, mask_row, mask_column, queries, keys, offset, 0), C)
    for member in range(groups):
        head = own.head * groups + member
        at_row = (own.batch * heads + head) * queries
        q_here = matrix_of_head(q, own.batch, head, q_batch, q_head, q_row, queries, width)
        sight = sight_of_head(
            mask, own.batch, head, mask_batch, mask_head, mask_row, mask_column, queries, keys, offset, 0
        )
        for part in tl.static_range(3):
            found = _fold_keys(
                found, borders[part], borders[part + 1], k_tile, q_here, columns, at_row, mean, slope, sight, scale,
                C, part != 1,
            )  # fmt: skip
    found = found * (tl.load(lift) * scale)
    store_tile(Matrix(grad_k + own.batch_head * keys * width, keys, width, width), found, columns, WIDTH)


@triton.jit
def _fold_keys(
    found, start, stop, k_tile, q, columns, at_row, mean, slope, sight, scale, C: tl.constexpr, EDGE: tl.constexpr
):  # fmt: skip
    """Tiles lie with the keys as rows here."""
    for at in range(start, stop, C.ROWS):
        rows = at + tl.arange(0, C.ROWS)
        inside = rows < sight.queries
        q_tile = load_tile(q, rows, C.WIDTH, EDGE, C.FULL)
        row_mean = load_row(mean, at_row + rows, inside, True, 0.0)
        row_slope = load_row(slope, at_row + rows, inside, True, 0.0)
        s = tl.dot(k_tile, tl.trans(q_tile), input_precision=C.PRECISION) * scale
        ds = (s - row_mean[None, :]) * row_slope[None, :]
        if EDGE:
            ds = tl.where(seen_keys(rows[None, :], columns[:, None], sight, C), ds, 0.0)
        found = tl.dot(ds.to(q_tile.dtype), q_tile, found, input_precision=C.PRECISION)
    return found
