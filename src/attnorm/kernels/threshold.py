"""Attention by a threshold map (kernels/threshold_maps.py) on a GPU: the matrix of weights never leaves the chip.

Forward computes the logits twice, or more often where rows spread their weight over many keys. The first pass keeps the
leaders: of each pair of columns (a tile's left half beside its right half) the five largest of the better logits over
all tiles, and the largest of the others. Their threshold is that of all keys or slightly below it. The pass also notes
how close each tile comes to the peaks of its rows. Where the leaders may have left out much, passes of Newton's method
follow. The last pass computes the output and the sums of the row once more: what is left of the excess is removed to
first order, or the passes are repeated where it is large. Tiles without a weight are left out of all passes but the
first, and of backward, by lists of the others.

Thresholds are relative to the largest logit of their row, the peak.
"""

import triton
import triton.language as tl

from attnorm.kernels.tiles import key_range, list_tiles, load_row, load_tile, rise, seen_keys, store_tile, tilted


@triton.jit
def _insert(leader, candidate):
    """The larger of both, and the other, which competes for the next place."""
    return tl.maximum(leader, candidate), tl.minimum(leader, candidate)


@triton.jit
def _lead(
    first, second, third, fourth, fifth, other, peak, start, stop, q_tile, k, rows, sign, size, gaps, mask, k_row,
    mask_row, mask_column, queries, keys, offset, tilt, width,
    SIGNED: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, TILTED: tl.constexpr, EDGE: tl.constexpr,
    PRECISION: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Leaders and peaks among the products of the tiles from start to stop; those of least logit where the factor is
    negative, with the opposite sign."""
    for at in range(start, stop, COLUMNS):
        columns = at + tl.arange(0, COLUMNS)
        k_tile = load_tile(k, columns, keys, k_row, width, WIDTH, EDGE, FULL)
        dot = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        dot = tilted(dot, tilt, rows[:, None], columns[None, :], offset, TILTED)
        if SIGNED:
            dot = dot * sign[:, None]
        if EDGE:
            i, j = rows[:, None], columns[None, :]
            seen = seen_keys(i, j, mask, mask_row, mask_column, queries, keys, offset, 0, CAUSAL, False, MASKED)
            dot = tl.where(seen, dot, float("-inf"))
        left, right = tl.split(tl.permute(tl.reshape(dot, [dot.shape[0], 2, COLUMNS // 2]), (0, 2, 1)))
        better = tl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL)
        other = tl.maximum(other, tl.minimum(left, right))
        largest = tl.max(better, 1)
        peak = tl.maximum(peak, largest)
        gap = tl.where(largest == float("-inf"), float("-inf"), (largest - peak) * size)
        tl.store(gaps + at // COLUMNS, tl.max(gap, 0))
        loser = tl.minimum(first, better)
        first = tl.maximum(first, better, propagate_nan=tl.PropagateNan.ALL)
        second, loser = _insert(second, loser)
        third, loser = _insert(third, loser)
        fourth, loser = _insert(fourth, loser)
        fifth = tl.maximum(fifth, loser)
    return first, second, third, fourth, fifth, other, peak


@triton.jit
def _below_peak(leaders, size, peak):
    return tl.where(leaders == float("-inf"), float("-inf"), leaders * size[:, None]) - peak[:, None]


@triton.jit
def _add(
    cell_p, cell_u, cells, y, t, a,
    WEIGHTS: tl.constexpr, COUNTED: tl.constexpr, DEFORMED: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    x = rise(y, 1.0, 0.0, t[:, None], a[:, None], DEFORMED, True)
    p, u = WEIGHTS(x, a[:, None], FAST)
    if COUNTED:
        cells += tl.where(x > 0, 1.0, 0.0)
    return cell_p + p, cell_u + u, cells


@triton.jit
def _measure(
    sum_p, sum_u, count, listed, number, q_tile, k, rows, factor, peak, t, a, mask, k_row, mask_row, mask_column,
    queries, keys, offset, tilt, width,
    WEIGHTS: tl.constexpr, COUNTED: tl.constexpr, DEFORMED: tl.constexpr, EXACT: tl.constexpr, FAST: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, TILTED: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """The sums of p and u, and the number of weights, over the listed tiles; still apart by column."""
    tile = tl.load(listed)
    for index in range(number):
        following = tl.load(listed + index + 1)
        columns = tile * COLUMNS + tl.arange(0, COLUMNS)
        k_tile = load_tile(k, columns, keys, k_row, width, WIDTH, EDGE, FULL)
        dot = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        dot = tilted(dot, tilt, rows[:, None], columns[None, :], offset, TILTED)
        x = rise(dot, factor, peak, t, a, DEFORMED, EXACT)
        if EDGE:
            i, j = rows[:, None], columns[None, :]
            seen = seen_keys(i, j, mask, mask_row, mask_column, queries, keys, offset, 0, CAUSAL, False, MASKED)
            x = tl.where(seen, x, 0.0)
        p, u = WEIGHTS(x, a, FAST)
        sum_p += p
        sum_u += u
        if COUNTED:
            count += tl.where(x > 0, 1.0, 0.0)
        tile = following
    return sum_p, sum_u, count


@triton.jit
def _attend(
    output, output_u, sum_p, sum_u, listed, number, q_tile, k, v, rows, factor, peak, t, a, live, mask, k_row, v_row,
    mask_row, mask_column, queries, keys, offset, tilt, width, v_width,
    WEIGHTS: tl.constexpr, DEFORMED: tl.constexpr, EXACT: tl.constexpr, FAST: tl.constexpr, LIFT: tl.constexpr,
    TRAINS: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, TILTED: tl.constexpr, EDGE: tl.constexpr,
    PRECISION: tl.constexpr,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, FULL: tl.constexpr, V_FULL: tl.constexpr,
):  # fmt: skip
    """The sums of p v LIFT, u v, p and u over the listed tiles; marks those that hold a weight."""
    tile = tl.load(listed)
    for index in range(number):
        following = tl.load(listed + index + 1)
        columns = tile * COLUMNS + tl.arange(0, COLUMNS)
        k_tile = load_tile(k, columns, keys, k_row, width, WIDTH, EDGE, FULL)
        v_tile = load_tile(v, columns, keys, v_row, v_width, V_WIDTH, EDGE, V_FULL)
        dot = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        dot = tilted(dot, tilt, rows[:, None], columns[None, :], offset, TILTED)
        x = rise(dot, factor, peak, t, a, DEFORMED, EXACT)
        if EDGE:
            i, j = rows[:, None], columns[None, :]
            seen = seen_keys(i, j, mask, mask_row, mask_column, queries, keys, offset, 0, CAUSAL, False, MASKED)
            x = tl.where(seen, x, 0.0)
        p, u = WEIGHTS(x, a, FAST)
        mass = tl.sum(p, 1)
        sum_p += mass
        if LIFT != 1.0:
            p = p * LIFT
        output = tl.dot(p.to(v_tile.dtype), v_tile, output, input_precision=PRECISION)
        if TRAINS:
            sum_u += tl.sum(u, 1)
            output_u = tl.dot(u.to(v_tile.dtype), v_tile, output_u, input_precision=PRECISION)
            tl.store(live + tile, tl.max(tl.where(mass == 0, 0, 1), 0).to(tl.uint8))
        tile = following
    return output, output_u, sum_p, sum_u


@triton.jit
def forward(
    q, k, v, mask, row_factor, parameter, tilts, out, out_u, threshold, gaps, listed, live,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    mask_batch, mask_head, mask_row, mask_column, o_batch, o_head, o_row,
    heads, groups, queries, keys, offset, width, v_width, unit, enough, tolerance, doubt,
    WEIGHTS: tl.constexpr, NEWTON: tl.constexpr, START: tl.constexpr, DECLINE: tl.constexpr, COUNTED: tl.constexpr,
    DEFORMED: tl.constexpr, PARAMETER: tl.constexpr, EXACT: tl.constexpr, FAST: tl.constexpr, LIFT: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, FACTORED: tl.constexpr, TILTED: tl.constexpr, TRAINS: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, V_WIDTH: tl.constexpr,
    FULL: tl.constexpr, V_FULL: tl.constexpr, SIGNED: tl.constexpr, MOST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(queries, ROWS)
    program = tl.program_id(0)
    block = blocks - 1 - program % blocks  # the longest causal rows first, or they would run alone at the end
    batch_head = (program // blocks).to(tl.int64)
    batch, head = batch_head // heads, batch_head % heads
    k += batch * k_batch + head // groups * k_head
    v += batch * v_batch + head // groups * v_head
    mask += batch * mask_batch + head * mask_head
    tiles = tl.cdiv(keys, COLUMNS)
    own = (batch_head * blocks + block) * tiles
    gaps += own
    listed += own
    live += own
    rows = block * ROWS + tl.arange(0, ROWS)
    inside = rows < queries
    row_at = batch_head * queries + rows
    q_tile = load_tile(q + batch * q_batch + head * q_head, rows, queries, q_row, width, WIDTH, True, FULL)
    factor = load_row(row_factor, row_at, inside, FACTORED, 1.0) * unit
    tilt = tl.load(tilts + head) if TILTED else 0.0
    sign = tl.where(factor < 0, -1.0, 1.0)
    size = tl.abs(factor)
    a = load_row(parameter, row_at, inside, PARAMETER, 0.5)
    _first, _low, high, last = key_range(block, queries, keys, offset, 0, CAUSAL, False, MASKED, ROWS, COLUMNS)
    whole, some = high // COLUMNS, tl.cdiv(last, COLUMNS)

    none = tl.full([ROWS, COLUMNS // 2], float("-inf"), tl.float32)
    first, second, third, fourth, fifth, other = none, none, none, none, none, none
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    first, second, third, fourth, fifth, other, peak = _lead(
        first, second, third, fourth, fifth, other, peak, high, last, q_tile, k, rows, sign, size, gaps, mask, k_row,
        mask_row, mask_column, queries, keys, offset, tilt, width, SIGNED, CAUSAL, MASKED, TILTED, True, PRECISION,
        COLUMNS, WIDTH, FULL,
    )  # fmt: skip
    first, second, third, fourth, fifth, other, peak = _lead(
        first, second, third, fourth, fifth, other, peak, 0, high, q_tile, k, rows, sign, size, gaps, mask, k_row,
        mask_row, mask_column, queries, keys, offset, tilt, width, SIGNED, CAUSAL, MASKED, TILTED, False, PRECISION,
        COLUMNS, WIDTH, FULL,
    )  # fmt: skip

    # Some keys alone have a lower threshold than all of them: first the best of each pair, then all leaders.
    empty = peak == float("-inf")
    broken = tl.max(tl.where(first == first, 0, 1), 1) != 0
    settled = empty | broken
    peak = tl.where(empty, 0.0, peak * size)
    first, second, third = (
        _below_peak(first, size, peak),
        _below_peak(second, size, peak),
        _below_peak(third, size, peak),
    )
    fourth, fifth, other = (
        _below_peak(fourth, size, peak),
        _below_peak(fifth, size, peak),
        _below_peak(other, size, peak),
    )
    t = START(a)
    count = tl.zeros([ROWS], tl.float32)
    zeros = tl.zeros([ROWS, COLUMNS // 2], tl.float32)
    for together in tl.static_range(2):
        steps = 0
        left = tolerance + 1
        while (left > tolerance) & (steps < MOST):
            lead_p, lead_u, leads = _add(zeros, zeros, zeros, first, t, a, WEIGHTS, COUNTED, DEFORMED, FAST)
            if together:
                lead_p, lead_u, leads = _add(lead_p, lead_u, leads, second, t, a, WEIGHTS, COUNTED, DEFORMED, FAST)
                lead_p, lead_u, leads = _add(lead_p, lead_u, leads, third, t, a, WEIGHTS, COUNTED, DEFORMED, FAST)
                lead_p, lead_u, leads = _add(lead_p, lead_u, leads, fourth, t, a, WEIGHTS, COUNTED, DEFORMED, FAST)
                lead_p, lead_u, leads = _add(lead_p, lead_u, leads, fifth, t, a, WEIGHTS, COUNTED, DEFORMED, FAST)
                lead_p, lead_u, leads = _add(lead_p, lead_u, leads, other, t, a, WEIGHTS, COUNTED, DEFORMED, FAST)
            if COUNTED:
                count = tl.sum(leads, 1)
            excess, step = NEWTON(tl.sum(lead_p, 1), tl.sum(lead_u, 1), count, a, steps < EARLY)
            step = tl.where(settled, 0.0, step)
            left = tl.max(tl.where(t + step != t, tl.abs(excess), 0.0), 0)
            t += step
            steps += 1
    # What the leaders have left out is of the size of the last ones. Both keys of a pair rarely count.
    lead_p, _u, _n = _add(zeros, zeros, zeros, other, t, a, WEIGHTS, False, DEFORMED, FAST)
    lead_p, _u, _n = _add(0.25 * lead_p, zeros, zeros, fifth, t, a, WEIGHTS, False, DEFORMED, FAST)
    left_out = tl.where(settled, 0.0, tl.sum(lead_p, 1))
    if DEFORMED:  # below alpha = 1.4 many more weights follow; a Newton pass costs less than the output pass repeated
        left_out = tl.where(a < 0.4, 4.0 * left_out, left_out)
    doubtful = (tl.max(left_out, 0) > doubt) & (some > 1)
    t = tl.where(broken, float("nan"), t)

    output = tl.zeros([ROWS, V_WIDTH], tl.float32)
    unused = tl.full([], 0.0, tl.float32)
    sum_p = tl.zeros([ROWS], tl.float32)
    step = tl.zeros([ROWS], tl.float32)
    output_u = tl.zeros([ROWS, V_WIDTH], tl.float32) if TRAINS else unused
    sum_u = tl.zeros([ROWS], tl.float32) if TRAINS else unused
    factor_of, peak_of, a_of = factor[:, None], peak[:, None], a[:, None]
    bound = enough
    left = tl.where(doubtful, enough + 1, 0.0)
    attempts = 0
    while attempts < 2:
        steps = 0
        while (left > bound) & (steps < MOST):
            number, edges = _lists(gaps, listed, whole, some, peak, t, a, empty, DEFORMED)
            cell_p = tl.zeros([ROWS, COLUMNS], tl.float32)
            cell_u = tl.zeros([ROWS, COLUMNS], tl.float32)
            cells = tl.zeros([ROWS, COLUMNS], tl.float32) if COUNTED else unused
            cell_p, cell_u, cells = _measure(
                cell_p, cell_u, cells, listed, number, q_tile, k, rows, factor_of, peak_of, t[:, None], a_of,
                mask, k_row, mask_row, mask_column, queries, keys, offset, tilt, width, WEIGHTS, COUNTED, DEFORMED,
                EXACT, FAST, CAUSAL, MASKED, TILTED, False, PRECISION, COLUMNS, WIDTH, FULL,
            )  # fmt: skip
            cell_p, cell_u, cells = _measure(
                cell_p, cell_u, cells, listed + whole, edges, q_tile, k, rows, factor_of, peak_of, t[:, None], a_of,
                mask, k_row, mask_row, mask_column, queries, keys, offset, tilt, width, WEIGHTS, COUNTED, DEFORMED,
                EXACT, FAST, CAUSAL, MASKED, TILTED, True, PRECISION, COLUMNS, WIDTH, FULL,
            )  # fmt: skip
            if COUNTED:
                count = tl.sum(cells, 1)
            excess, move = NEWTON(tl.sum(cell_p, 1), tl.sum(cell_u, 1), count, a, steps < EARLY)
            move = tl.where(settled, 0.0, move)
            # A step after a small excess nearly squares it: it is taken and checked by the sums of the last pass. Where
            # t has no digits left to move by, no step will help.
            left = tl.max(tl.where(t + move != t, tl.abs(excess), 0.0), 0)
            t += move
            steps += 1
        number, edges = _lists(gaps, listed, whole, some, peak, t, a, empty, DEFORMED)
        output = tl.zeros([ROWS, V_WIDTH], tl.float32)
        output_u = tl.zeros([ROWS, V_WIDTH], tl.float32) if TRAINS else unused
        sum_p = tl.zeros([ROWS], tl.float32)
        sum_u = tl.zeros([ROWS], tl.float32) if TRAINS else unused
        output, output_u, sum_p, sum_u = _attend(
            output, output_u, sum_p, sum_u, listed, number, q_tile, k, v, rows, factor_of, peak_of, t[:, None], a_of,
            live, mask, k_row, v_row, mask_row, mask_column, queries, keys, offset, tilt, width, v_width,
            WEIGHTS, DEFORMED, EXACT, FAST, LIFT, TRAINS, CAUSAL, MASKED, TILTED, False, PRECISION, COLUMNS, WIDTH,
            V_WIDTH, FULL, V_FULL,
        )  # fmt: skip
        output, output_u, sum_p, sum_u = _attend(
            output, output_u, sum_p, sum_u, listed + whole, edges, q_tile, k, v, rows, factor_of, peak_of, t[:, None],
            a_of, live, mask, k_row, v_row, mask_row, mask_column, queries, keys, offset, tilt, width, v_width,
            WEIGHTS, DEFORMED, EXACT, FAST, LIFT, TRAINS, CAUSAL, MASKED, TILTED, True, PRECISION, COLUMNS, WIDTH,
            V_WIDTH, FULL, V_FULL,
        )  # fmt: skip
        attempts += 1
        bad = tl.where(settled, 0.0, tl.abs(sum_p - 1.0))
        if TRAINS:
            excess, step = NEWTON(sum_p, sum_u, count, a, 1)
            step = tl.where(settled, 0.0, step)
            if COUNTED:  # u of every weight changes by the step
                bad = tl.maximum(bad, tl.abs(step) * count / tl.where(sum_u > 0, sum_u, 1.0))
        if tl.max(bad, 0) <= tolerance:
            attempts += 2
        bound = 0.1 * tolerance
        left = bound + 1
    if TRAINS:
        output -= (DECLINE * LIFT) * step[:, None] * output_u
        sum_p -= DECLINE * step * sum_u
        output_u = output_u / tl.where(sum_u == 0, 1.0, sum_u)[:, None]
    output = output / (tl.where(sum_p == 0, 1.0, sum_p) * LIFT)[:, None]
    at = batch * o_batch + head * o_head
    store_tile(out + at, output.to(out.dtype.element_ty), rows, queries, o_row, v_width, V_WIDTH)
    if TRAINS:
        store_tile(out_u + at, output_u.to(out_u.dtype.element_ty), rows, queries, o_row, v_width, V_WIDTH)
        tl.store(threshold + 2 * row_at, peak, mask=inside)
        tl.store(threshold + 2 * row_at + 1, t + step, mask=inside)


@triton.jit
def _lists(gaps, listed, whole, some, peak, t, a, empty, DEFORMED: tl.constexpr):
    """List the tiles that may hold a weight at the thresholds t: their numbers among those seen whole, and at edges."""
    floor = t - 1.0 / a if DEFORMED else t
    floor = floor - 1e-6 * (1.0 + tl.abs(peak))  # of rounding
    level = tl.min(tl.where(empty, float("inf"), tl.where(floor == floor, floor, float("-inf"))), 0)
    tl.debug_barrier()
    number = list_tiles(gaps, 1, some, 0, 1, listed, 0, 0, whole, level, 1, 1, 1)
    edges = list_tiles(gaps, 1, some, 0, 1, listed + whole, 0, whole, some, level, 1, 1, 1)
    tl.debug_barrier()
    return number, edges
