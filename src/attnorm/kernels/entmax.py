"""Attention by entmax with alpha = 1.5 or 2 on a GPU, in tiles: the matrix of weights never leaves the chip.

In units of s = (alpha - 1) scale factor <q, k>, with one factor per row (1 without a scale rule), a weight is
[s - t]_+^2 (alpha = 1.5) or [s - t]_+ (alpha = 2), where the threshold t of its row makes them sum to 1. Forward finds
t by Newton's method, each step of which computes the logits again, and then the output. It starts at the threshold of
the leaders, the largest key of each column over all tiles, which is close and needs no new logits. t is relative to the
largest s of its row, the peak, and lies between -1 and 0: an absolute t would lose digits where logits are large.

Backward needs the peak and t alone. With u = p^(2-alpha) the gradient of a logit is u (dp - delta), where delta, the
mean of dp under u, is <dO, mean of the values under u>: that mean is a second output of the forward pass.
"""

import triton
import triton.language as tl

from attnorm.kernels.tiles import block_and_head, keys_of, load_rows, scores, scores_from, store_rows

# Weights are multiplied by this for products with values and gradients: float16 loses digits below 6e-5, where the
# weights of long rows lie.
LIFT = tl.constexpr(1024.0)


@triton.jit
def _above(s, peak, t):
    """[s - peak - t]_+, and NaN where s is NaN."""
    above = s - peak[:, None] - t[:, None]
    return tl.where(above < 0, 0.0, above)


@triton.jit
def _weights_and_slopes(above, SQUARED: tl.constexpr):
    """p and u = p^(2-alpha)."""
    if SQUARED:
        return above * above, above
    return above, tl.where(above == 0, 0.0, 1.0)


@triton.jit
def _newton_step(sum_p, sum_u, SQUARED: tl.constexpr):
    """How far the sum of p is above 1, as the function that the step is taken for, and the step."""
    if SQUARED:  # the norm of the roots, which is convex and nearly linear
        norm = tl.sqrt(sum_p)
        excess, slope = norm - 1, sum_u / norm
    else:
        excess, slope = sum_p - 1, sum_u
    return excess, tl.where(excess > 0, excess / slope, 0.0)


@triton.jit
def _load_threshold(threshold, at, inside):
    """Peaks and thresholds, which lie in pairs."""
    peak = tl.load(threshold + 2 * at, mask=inside, other=0.0)
    return peak, tl.load(threshold + 2 * at + 1, mask=inside, other=0.0)


@triton.jit
def _leaders(
    found, first, last, q_tile, k, rows, mask, k_row, mask_row, mask_column, queries, keys, offset, width, factor,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The largest s of each column over the tiles from first to last."""
    for start in range(first, last, COLUMNS):
        s = scores_from(
            start, q_tile, k, rows, mask, k_row, mask_row, mask_column, queries, keys, offset, width, factor,
            CAUSAL, MASKED, EDGE, PRECISION, COLUMNS, WIDTH,
        )  # fmt: skip
        found = tl.maximum(found, s)
    return found


@triton.jit
def _sums(
    sum_p, sum_u, first, last, peak, t, q_tile, k, rows, mask, k_row, mask_row, mask_column, queries, keys, offset,
    width, factor,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, EDGE: tl.constexpr, SQUARED: tl.constexpr, PRECISION: tl.constexpr,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The sums of p and u at the thresholds t below the peaks over the tiles from first to last."""
    for start in range(first, last, COLUMNS):
        s = scores_from(
            start, q_tile, k, rows, mask, k_row, mask_row, mask_column, queries, keys, offset, width, factor,
            CAUSAL, MASKED, EDGE, PRECISION, COLUMNS, WIDTH,
        )  # fmt: skip
        p, u = _weights_and_slopes(_above(s, peak, t), SQUARED)
        sum_p += tl.sum(p, 1)
        sum_u += tl.sum(u, 1)
    return sum_p, sum_u


@triton.jit
def _outputs(
    output, output_u, sum_p, sum_u, first, last, peak, t, q_tile, k, v, rows, mask, k_row, v_row, mask_row,
    mask_column, queries, keys, offset, width, v_width, factor,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, EDGE: tl.constexpr, SQUARED: tl.constexpr, TRAINS: tl.constexpr,
    PRECISION: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
):  # fmt: skip
    """The sums of p v LIFT, u v, p and u over the tiles from first to last."""
    for start in range(first, last, COLUMNS):
        s = scores_from(
            start, q_tile, k, rows, mask, k_row, mask_row, mask_column, queries, keys, offset, width, factor,
            CAUSAL, MASKED, EDGE, PRECISION, COLUMNS, WIDTH,
        )  # fmt: skip
        v_tile = load_rows(v, start + tl.arange(0, COLUMNS), keys, v_row, v_width, V_WIDTH)
        p, u = _weights_and_slopes(_above(s, peak, t), SQUARED)
        output = tl.dot((p * LIFT).to(v_tile.dtype), v_tile, output, input_precision=PRECISION)
        sum_p += tl.sum(p, 1)
        if TRAINS:
            output_u = tl.dot(u.to(v_tile.dtype), v_tile, output_u, input_precision=PRECISION)
            sum_u += tl.sum(u, 1)
    return output, output_u, sum_p, sum_u


@triton.jit
def forward(
    q, k, v, mask, row_factor, out, out_u, threshold,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    mask_batch, mask_head, mask_row, mask_column, o_batch, o_head, o_row,
    heads, groups, queries, keys, offset, width, v_width, factor, tolerance,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, FACTORED: tl.constexpr, SQUARED: tl.constexpr, TRAINS: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    MOST: tl.constexpr,
):  # fmt: skip
    block, batch_head = block_and_head(queries, ROWS)
    batch, head = batch_head // heads, batch_head % heads
    k += batch * k_batch + head // groups * k_head
    v += batch * v_batch + head // groups * v_head
    mask += batch * mask_batch + head * mask_head
    rows = block * ROWS + tl.arange(0, ROWS)
    q_tile = load_rows(q + batch * q_batch + head * q_head, rows, queries, q_row, width, WIDTH)
    whole, some = keys_of(block, queries, keys, offset, CAUSAL, MASKED, ROWS, COLUMNS)
    if FACTORED:
        own = tl.load(row_factor + batch_head * queries + rows, mask=rows < queries, other=0.0)
        factor = own[:, None] * factor

    leaders = tl.full([ROWS, COLUMNS], float("-inf"), tl.float32)
    leaders = _leaders(
        leaders, 0, whole, q_tile, k, rows, mask, k_row, mask_row, mask_column, queries, keys, offset, width, factor,
        CAUSAL, MASKED, False, PRECISION, COLUMNS, WIDTH,
    )  # fmt: skip
    leaders = _leaders(
        leaders, whole, some, q_tile, k, rows, mask, k_row, mask_row, mask_column, queries, keys, offset, width, factor,
        CAUSAL, MASKED, True, PRECISION, COLUMNS, WIDTH,
    )  # fmt: skip

    # No weight exceeds 1, and some keys alone have a lower threshold than all of them: so t starts below the solution,
    # and Newton's method approaches it from below.
    largest = tl.max(leaders, 1)
    peak = tl.where(largest == float("-inf"), 0.0, largest)
    t = tl.full([ROWS], -1.0, tl.float32)
    steps = 0
    left = tolerance + 1
    while (left > tolerance) & (steps < MOST):
        p, u = _weights_and_slopes(_above(leaders, peak, t), SQUARED)
        excess, step = _newton_step(tl.sum(p, 1), tl.sum(u, 1), SQUARED)
        left = tl.max(tl.where(t + step > t, excess, 0.0), 0)
        t += step
        steps += 1
    steps = 0
    left = tolerance + 1
    while (left > tolerance) & (steps < MOST):
        sum_p = tl.zeros([ROWS], tl.float32)
        sum_u = tl.zeros([ROWS], tl.float32)
        sum_p, sum_u = _sums(
            sum_p, sum_u, 0, whole, peak, t, q_tile, k, rows, mask, k_row, mask_row, mask_column, queries, keys,
            offset, width, factor, CAUSAL, MASKED, False, SQUARED, PRECISION, COLUMNS, WIDTH,
        )  # fmt: skip
        sum_p, sum_u = _sums(
            sum_p, sum_u, whole, some, peak, t, q_tile, k, rows, mask, k_row, mask_row, mask_column, queries, keys,
            offset, width, factor, CAUSAL, MASKED, True, SQUARED, PRECISION, COLUMNS, WIDTH,
        )  # fmt: skip
        excess, step = _newton_step(sum_p, sum_u, SQUARED)
        # The step after a small excess nearly squares it, unless many equal keys lie at the threshold: it is taken and
        # not checked. Where t has no digits left to move by, no step will help.
        left = tl.max(tl.where(t + step > t, excess, 0.0), 0)
        t += step
        steps += 1

    output = tl.zeros([ROWS, V_WIDTH], tl.float32)
    output_u = tl.zeros([ROWS, V_WIDTH], tl.float32)
    sum_p = tl.zeros([ROWS], tl.float32)
    sum_u = tl.zeros([ROWS], tl.float32)
    output, output_u, sum_p, sum_u = _outputs(
        output, output_u, sum_p, sum_u, 0, whole, peak, t, q_tile, k, v, rows, mask, k_row, v_row, mask_row,
        mask_column, queries, keys, offset, width, v_width, factor,
        CAUSAL, MASKED, False, SQUARED, TRAINS, PRECISION, COLUMNS, WIDTH, V_WIDTH,
    )  # fmt: skip
    output, output_u, sum_p, sum_u = _outputs(
        output, output_u, sum_p, sum_u, whole, some, peak, t, q_tile, k, v, rows, mask, k_row, v_row, mask_row,
        mask_column, queries, keys, offset, width, v_width, factor,
        CAUSAL, MASKED, True, SQUARED, TRAINS, PRECISION, COLUMNS, WIDTH, V_WIDTH,
    )  # fmt: skip
    output = output / (tl.where(sum_p == 0, 1.0, sum_p) * LIFT)[:, None]
    at = batch * o_batch + head * o_head
    store_rows(out + at, output.to(out.dtype.element_ty), rows, queries, o_row, v_width, V_WIDTH)
    if TRAINS:
        output_u = output_u / tl.where(sum_u == 0, 1.0, sum_u)[:, None]
        store_rows(out_u + at, output_u, rows, queries, o_row, v_width, V_WIDTH)
        pair = threshold + 2 * (batch_head * queries + rows)
        tl.store(pair, peak, mask=rows < queries)
        tl.store(pair + 1, t, mask=rows < queries)


@triton.jit
def backward_queries(
    q, k, v, mask, row_factor, grad, threshold, delta, grad_q, grad_factor,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    mask_batch, mask_head, mask_row, mask_column, o_batch, o_head, o_row, gq_batch, gq_head, gq_row,
    heads, groups, queries, keys, offset, width, v_width, factor, scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, FACTORED: tl.constexpr, SQUARED: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
):  # fmt: skip
    block, batch_head = block_and_head(queries, ROWS)
    batch, head = batch_head // heads, batch_head % heads
    k += batch * k_batch + head // groups * k_head
    v += batch * v_batch + head // groups * v_head
    mask += batch * mask_batch + head * mask_head
    rows = block * ROWS + tl.arange(0, ROWS)
    q_tile = load_rows(q + batch * q_batch + head * q_head, rows, queries, q_row, width, WIDTH)
    grad_tile = load_rows(grad + batch * o_batch + head * o_head, rows, queries, o_row, v_width, V_WIDTH)
    at = batch_head * queries + rows
    peak, t = _load_threshold(threshold, at, rows < queries)
    mean = tl.load(delta + at, mask=rows < queries, other=0.0)
    if FACTORED:
        own = tl.load(row_factor + at, mask=rows < queries, other=0.0)
        factor = own[:, None] * factor
        found_factor = tl.zeros([ROWS], tl.float32)

    found = tl.zeros([ROWS, WIDTH], tl.float32)
    _whole, some = keys_of(block, queries, keys, offset, CAUSAL, MASKED, ROWS, COLUMNS)
    for start in range(0, some, COLUMNS):
        columns = start + tl.arange(0, COLUMNS)
        k_tile = load_rows(k, columns, keys, k_row, width, WIDTH)
        v_tile = load_rows(v, columns, keys, v_row, v_width, V_WIDTH)
        products = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        s = scores(
            products, rows, columns, mask, mask_row, mask_column, queries, keys, offset, factor, CAUSAL, MASKED, True
        )
        _p, u = _weights_and_slopes(_above(s, peak, t), SQUARED)
        grad_p = tl.dot(grad_tile, tl.trans(v_tile), input_precision=PRECISION)
        grad_s = u * (grad_p - mean[:, None])
        found = tl.dot(grad_s.to(k_tile.dtype), k_tile, found, input_precision=PRECISION)
        if FACTORED:
            found_factor += tl.sum(grad_s * products, 1)
    if FACTORED:
        tl.store(grad_factor + at, found_factor * scale, mask=rows < queries)
        found = found * own[:, None]
    at_q = grad_q + batch * gq_batch + head * gq_head
    store_rows(at_q, (found * scale).to(grad_q.dtype.element_ty), rows, queries, gq_row, width, WIDTH)


@triton.jit
def backward_keys(
    q, k, v, mask, row_factor, grad, threshold, delta, grad_k, grad_v,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    mask_batch, mask_head, mask_row, mask_column, o_batch, o_head, o_row,
    gk_batch, gk_head, gk_row, gv_batch, gv_head, gv_row,
    heads, groups, queries, keys, offset, width, v_width, factor, scale,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, FACTORED: tl.constexpr, SQUARED: tl.constexpr, PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
):  # fmt: skip
    """One block of keys of one key head, for all query heads that share it: each address has one writer."""
    block, batch_head = block_and_head(keys, COLUMNS)
    batch, key_head = batch_head // (heads // groups), batch_head % (heads // groups)
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    k_tile = load_rows(k + batch * k_batch + key_head * k_head, columns, keys, k_row, width, WIDTH)
    v_tile = load_rows(v + batch * v_batch + key_head * v_head, columns, keys, v_row, v_width, V_WIDTH)
    first = 0
    if CAUSAL:  # earlier queries see none of these keys
        first = tl.maximum(block * COLUMNS - offset, 0) // ROWS * ROWS

    found_k = tl.zeros([COLUMNS, WIDTH], tl.float32)
    found_v = tl.zeros([COLUMNS, V_WIDTH], tl.float32)
    for member in range(groups):
        head = key_head * groups + member
        for start in range(first, queries, ROWS):
            rows = start + tl.arange(0, ROWS)
            q_tile = load_rows(q + batch * q_batch + head * q_head, rows, queries, q_row, width, WIDTH)
            grad_tile = load_rows(grad + batch * o_batch + head * o_head, rows, queries, o_row, v_width, V_WIDTH)
            at = (batch * heads + head) * queries + rows
            peak, t = _load_threshold(threshold, at, rows < queries)
            mean = tl.load(delta + at, mask=rows < queries, other=0.0)
            row_scale = factor
            if FACTORED:
                own = tl.load(row_factor + at, mask=rows < queries, other=0.0)
                row_scale = own[:, None] * factor
            products = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
            s = scores(
                products, rows, columns, mask + batch * mask_batch + head * mask_head, mask_row, mask_column,
                queries, keys, offset, row_scale, CAUSAL, MASKED, True,
            )  # fmt: skip
            p, u = _weights_and_slopes(_above(s, peak, t), SQUARED)
            found_v = tl.dot(tl.trans((p * LIFT).to(grad_tile.dtype)), grad_tile, found_v, input_precision=PRECISION)
            grad_p = tl.dot(grad_tile, tl.trans(v_tile), input_precision=PRECISION)
            grad_s = u * (grad_p - mean[:, None])
            if FACTORED:
                grad_s = grad_s * own[:, None]
            found_k = tl.dot(tl.trans(grad_s.to(q_tile.dtype)), q_tile, found_k, input_precision=PRECISION)
    at_k = grad_k + batch * gk_batch + key_head * gk_head
    at_v = grad_v + batch * gv_batch + key_head * gv_head
    store_rows(at_k, (found_k * scale).to(grad_k.dtype.element_ty), columns, keys, gk_row, width, WIDTH)
    store_rows(at_v, (found_v / LIFT).to(grad_v.dtype.element_ty), columns, keys, gv_row, v_width, V_WIDTH)
