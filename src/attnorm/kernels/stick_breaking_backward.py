"""Gradients of stick-breaking attention.

With dp_j = <dO, v_j>, w = p dp and W_j the sum of w over the keys up to j, the gradient of a logit is

    w_j - sigmoid(z_j) W_j

since a key takes its share from all keys before it. What the query's own key receives with REST counts as a key before
all others.

One kernel walks the keys of a block of queries twice: from the last to the first for the costs (unless the forward pass
has kept them), then back for W and the gradient of q. It keeps the costs behind and the W before every tile for the
kernel of k and v. Those numbers take memory of queries x tiles, so that the queries are taken in chunks. No two
programs add to the same number: results are deterministic.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnorm.arithmetic import ceil_div
from attnorm.kernels.blocks import (
    Constants,
    Sight,
    block_from_last,
    block_of_keys,
    keys_of_head,
    load_row,
    load_tile,
    matrix_of_head,
    query_range,
    sight_of_head,
    store_tile,
    tile_of_head,
)
from attnorm.kernels.launch import device_of, empty_numbers, empty_rows, in_rows
from attnorm.kernels.stick_breaking import (
    GROUP,
    NOTHING_LEFT,
    SPENT,
    Stick,
    StickConstants,
    StickLaunch,
    backward_tile,
    own_key,
    stick_range,
    sum_up_to,
    taken_and_cost,
    weights_of,
)

CHUNK = tl.constexpr(128)
MAX_CARRIED = 2**24  # numbers between the tiles of a chunk, two arrays of them in float32


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, factor: Tensor | None, spent: Tensor,
    kept_later: Tensor, kept_live: Tensor, stick: Stick,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v and factor; the last is empty where there is none."""
    call = StickLaunch.of(q, k, v, mask, factor, stick)
    grad, spent = in_rows(grad), spent.contiguous()
    rows, columns, warps, stages = backward_tile(q, v)
    heads, queries, tiles = q.shape[0] * q.shape[1], q.shape[2], ceil_div(k.shape[2], columns)
    kept = kept_later.numel() > 0  # by the forward pass, for all queries
    most = queries if kept else MAX_CARRIED // (heads * tiles * rows)
    chunk = min(ceil_div(queries, rows), max(1, most)) * rows
    earlier = torch.empty((heads, tiles, chunk), dtype=torch.float32, device=q.device)
    later = kept_later.contiguous() if kept else torch.empty_like(earlier)
    live = torch.empty((heads, chunk // rows), dtype=torch.int32, device=q.device)
    live = kept_live.contiguous() if kept else live
    summed = torch.float32 if chunk < queries else k.dtype  # over chunks
    grad_q, grad_factor = empty_rows(q), empty_numbers(q, factor is not None)
    grad_k, grad_v = (empty_rows(t, dtype=summed) for t in (k, v))
    given, strides = (*call.tensors, grad), (*call.strides, *grad.stride()[:3])
    options = {**call.constants, "ROWS": rows, "COLUMNS": columns, "num_warps": warps, "num_stages": stages}
    with device_of(q):
        for begin in range(0, queries, chunk):
            backward_queries[(chunk // rows * heads,)](
                *given, spent, later, earlier, live, grad_q, grad_factor, *strides, *grad_q.stride()[:3], *call.sizes,
                stick.scale, begin, chunk, KEPT=kept, **options,
            )  # fmt: skip
            backward_keys[(tiles * k.shape[0] * k.shape[1],)](
                *given, spent, later, earlier, live, grad_k, grad_v, *strides, *grad_k.stride()[:3],
                *grad_v.stride()[:3], *call.sizes, stick.scale, begin, chunk, ADD=begin > 0, **options,
            )  # fmt: skip
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype), grad_factor


@triton.jit
def backward_queries(
    q, k, v, mask, factor, grad, spent_in, later, earlier, live_out, grad_q, grad_factor,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    mask_batch, mask_head, mask_row, mask_column, o_batch, o_head, o_row, gq_batch, gq_head, gq_row,
    heads, groups, queries, keys, offset, window, width, v_width, scale, plain_scale, begin, chunk,
    FAST: tl.constexpr, FACTORED: tl.constexpr, REST: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr, FULL: tl.constexpr, V_FULL: tl.constexpr, LIFT: tl.constexpr, PART: tl.constexpr,
    KEPT: tl.constexpr,
):  # fmt: skip
    """The queries from begin to begin + chunk, both multiples of ROWS. later, earlier: (B, H, key tiles, chunk).

    KEPT: the forward pass has stored later and live.
    """
    C: tl.constexpr = Constants(CAUSAL, WINDOWED, MASKED, PRECISION, ROWS, COLUMNS, WIDTH, FULL, V_WIDTH, V_FULL)
    S: tl.constexpr = StickConstants(FAST, FACTORED, REST, LIFT, PART, False)
    blocks = chunk // ROWS
    own = block_from_last(tl.program_id(0), blocks, heads)  # of the chunk
    block = begin // ROWS + own.index
    k = keys_of_head(k, own, groups, k_batch, k_head, k_row, keys, width)
    v = keys_of_head(v, own, groups, v_batch, v_head, v_row, keys, v_width)
    sight = sight_of_head(
        mask, own.batch, own.head, mask_batch, mask_head, mask_row, mask_column, queries, keys, offset, window
    )
    rows = block * ROWS + tl.arange(0, ROWS)
    inside = rows < queries
    q_tile = tile_of_head(q, own, q_batch, q_head, q_row, queries, width, rows, WIDTH, FULL)
    grad_tile = tile_of_head(grad, own, o_batch, o_head, o_row, queries, v_width, rows, V_WIDTH, V_FULL)
    row_at = own.batch_head * queries + rows
    row_factor = load_row(factor, row_at, inside, FACTORED, 1.0)
    place = own.batch_head * tl.cdiv(keys, COLUMNS) * chunk + own.index * ROWS + tl.arange(0, ROWS)
    later += place
    earlier += place

    borders = stick_range(block, sight, C, REST)
    live_out += own.batch_head * blocks + own.index
    if KEPT:
        spent = load_row(spent_in, row_at, inside, REST, 0.0)
        live = tl.load(live_out)
    else:
        spent = tl.where(inside, 0.0, SPENT)
        live = tl.cdiv(borders[3], COLUMNS)
        for part in tl.static_range(2, -1, -1):
            if part == 2 or (WINDOWED if part == 0 else CAUSAL or not REST):  # as in forward
                spent, live = _spend(
                    spent, live, borders[part], borders[part + 1], q_tile, k, rows, row_factor, later, chunk, sight,
                    scale, C, S, part != 1,
                )  # fmt: skip
        tl.store(live_out, live)
    for tile in range(borders[0] // COLUMNS, live):  # the stick does not reach them
        if not KEPT:
            tl.store(later + chunk.to(tl.int64) * tile, tl.full([ROWS], NOTHING_LEFT, tl.float32))
        tl.store(earlier + chunk.to(tl.int64) * tile, tl.zeros([ROWS], tl.float32))
    tl.debug_barrier()  # the same program reads what it stored

    before = tl.zeros([ROWS], tl.float32)
    if REST:
        values, seen = own_key(v, rows, sight, C)
        dp = tl.sum(grad_tile.to(tl.float32) * values.to(tl.float32), 1)
        before = tl.where(seen, tl.exp2(-spent), 0.0) * dp
    found = tl.zeros([ROWS, WIDTH], tl.float32)
    found_factor = tl.zeros([ROWS], tl.float32)
    reached = live * COLUMNS
    for part in tl.static_range(0 if WINDOWED else 1, 3):
        found, found_factor, before = _fold_queries(
            found, found_factor, before, tl.maximum(borders[part], reached), borders[part + 1], q_tile, grad_tile,
            k, v, rows, row_factor, later, earlier, chunk, sight, scale, C, S, part != 1,
        )  # fmt: skip
    found = (found * (row_factor * plain_scale)[:, None]).to(grad_q.dtype.element_ty)
    grad_q = matrix_of_head(grad_q, own.batch, own.head, gq_batch, gq_head, gq_row, queries, width)
    store_tile(grad_q, found, rows, WIDTH)
    if FACTORED:
        tl.store(grad_factor + row_at, found_factor * plain_scale, mask=inside)


@triton.jit
def _spend(
    spent, live, start, stop, q_tile, k, rows, factor, later, stride, sight, scale,
    C: tl.constexpr, S: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """The cost with the keys from stop down to start added, and the first tile that was reached."""
    tiles = tl.cdiv(stop - start, C.COLUMNS)
    while (tiles > 0) & (tl.min(spent, 0) < SPENT):
        group = tl.minimum(tiles, GROUP)
        for index in range(group):
            tile = start // C.COLUMNS + tiles - 1 - index
            tl.store(later + stride.to(tl.int64) * tile, spent)
            columns = tile * C.COLUMNS + tl.arange(0, C.COLUMNS)
            k_tile = load_tile(k, columns, C.WIDTH, EDGE, C.FULL)
            dot = tl.dot(q_tile, tl.trans(k_tile), input_precision=C.PRECISION)
            _taken, cost = taken_and_cost(dot, rows[:, None], columns[None, :], factor, sight, scale, C, S, EDGE)
            spent += tl.sum(cost, 1)
        tiles -= group
        live = start // C.COLUMNS + tiles
    return spent, live


@triton.jit
def _fold_queries(
    grad_q, grad_factor, before, start, stop, q_tile, grad_tile, k, v, rows, factor, later, earlier, stride, sight,
    scale, C: tl.constexpr, S: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    for at in range(start, stop, C.COLUMNS):
        columns = at + tl.arange(0, C.COLUMNS)
        k_tile = load_tile(k, columns, C.WIDTH, EDGE, C.FULL)
        v_tile = load_tile(v, columns, C.V_WIDTH, EDGE, C.V_FULL)
        place = stride.to(tl.int64) * (at // C.COLUMNS)
        behind = tl.load(later + place)
        tl.store(earlier + place, before)
        dot = tl.dot(q_tile, tl.trans(k_tile), input_precision=C.PRECISION)
        dp = tl.dot(grad_tile, tl.trans(v_tile), input_precision=C.PRECISION)
        taken, cost = taken_and_cost(dot, rows[:, None], columns[None, :], factor, sight, scale, C, S, EDGE)
        w = weights_of(taken, cost, behind[:, None], S.PART) * dp
        dz = w - tl.exp2(taken) * (sum_up_to(w, S.PART) + before[:, None])
        before += tl.sum(w, 1)
        if S.FACTORED:
            grad_factor += tl.sum(dz * dot, 1)
        grad_q = tl.dot(dz.to(k_tile.dtype), k_tile, grad_q, input_precision=C.PRECISION)
    return grad_q, grad_factor, before


@triton.jit
def backward_keys(
    q, k, v, mask, factor, grad, spent, later, earlier, live, grad_k, grad_v,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    mask_batch, mask_head, mask_row, mask_column, o_batch, o_head, o_row,
    gk_batch, gk_head, gk_row, gv_batch, gv_head, gv_row,
    heads, groups, queries, keys, offset, window, width, v_width, scale, plain_scale, begin, chunk,
    FAST: tl.constexpr, FACTORED: tl.constexpr, REST: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr, FULL: tl.constexpr, V_FULL: tl.constexpr, LIFT: tl.constexpr, PART: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """A tile of keys of one key head, for the queries of a chunk in all heads that share it; ADD: to what is there."""
    C: tl.constexpr = Constants(CAUSAL, WINDOWED, MASKED, PRECISION, ROWS, COLUMNS, WIDTH, FULL, V_WIDTH, V_FULL)
    S: tl.constexpr = StickConstants(FAST, FACTORED, REST, LIFT, PART, False)
    own = block_of_keys(keys, heads, groups, COLUMNS)
    tiles = tl.cdiv(keys, COLUMNS)
    columns = own.index * COLUMNS + tl.arange(0, COLUMNS)
    k_tile = tile_of_head(k, own, k_batch, k_head, k_row, keys, width, columns, WIDTH, FULL)
    v_tile = tile_of_head(v, own, v_batch, v_head, v_row, keys, v_width, columns, V_WIDTH, V_FULL)
    found_k = tl.zeros([COLUMNS, WIDTH], tl.float32)
    found_v = tl.zeros([COLUMNS, V_WIDTH], tl.float32)
    first, low, high, last = query_range(
        own.index * COLUMNS, Sight(mask, mask_row, mask_column, queries, keys, offset, window), C
    )
    if REST:
        if CAUSAL:
            low = tl.maximum(low, tl.cdiv(tl.maximum((own.index + 1) * COLUMNS - offset, 0), ROWS) * ROWS)
            low = tl.minimum(low, last)
            high = tl.maximum(high, low)
        else:
            low, high = last, last
    borders = first, low, high, last
    end = tl.minimum(begin + chunk, queries)
    for member in range(groups):
        head = own.head * groups + member
        at_head = own.batch * heads + head
        alive = _last_live(live + at_head * (chunk // ROWS), own.index, chunk // ROWS)
        reached = tl.minimum(begin + alive * ROWS, end)
        q_here = matrix_of_head(q, own.batch, head, q_batch, q_head, q_row, queries, width)
        grad_here = matrix_of_head(grad, own.batch, head, o_batch, o_head, o_row, queries, v_width)
        sight = sight_of_head(
            mask, own.batch, head, mask_batch, mask_head, mask_row, mask_column, queries, keys, offset, window
        )
        later_here = later + (at_head * tiles + own.index) * chunk
        earlier_here = earlier + (at_head * tiles + own.index) * chunk
        for part in tl.static_range(3):
            found_k, found_v = _fold_keys(
                found_k, found_v, tl.maximum(borders[part], begin), tl.minimum(borders[part + 1], reached), k_tile,
                v_tile, q_here, grad_here, columns, at_head * queries, factor, spent, later_here, earlier_here, begin,
                sight, scale, C, S, part != 1,
            )  # fmt: skip
    grad_k = matrix_of_head(grad_k, own.batch, own.head, gk_batch, gk_head, gk_row, keys, width)
    grad_v = matrix_of_head(grad_v, own.batch, own.head, gv_batch, gv_head, gv_row, keys, v_width)
    found_k = found_k * plain_scale
    found_v = found_v * (1.0 / LIFT)
    if ADD:
        found_k += load_tile(grad_k, columns, WIDTH, True, FULL)
        found_v += load_tile(grad_v, columns, V_WIDTH, True, V_FULL)
    store_tile(grad_k, found_k, columns, WIDTH)
    store_tile(grad_v, found_v, columns, V_WIDTH)


@triton.jit
def _fold_keys(
    grad_k, grad_v, start, stop, k_tile, v_tile, q, grad, columns, at_row, factor, spent, later, earlier, begin, sight,
    scale, C: tl.constexpr, S: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    for at in range(start, stop, C.ROWS):
        rows = at + tl.arange(0, C.ROWS)
        inside = rows < sight.queries
        q_tile = load_tile(q, rows, C.WIDTH, EDGE, C.FULL)
        grad_tile = load_tile(grad, rows, C.V_WIDTH, EDGE, C.V_FULL)
        row_factor = load_row(factor, at_row + rows, inside, S.FACTORED, 1.0)
        behind = tl.load(later + (rows - begin))
        before = tl.load(earlier + (rows - begin))
        dot = tl.dot(q_tile, tl.trans(k_tile), input_precision=C.PRECISION)
        dp = tl.dot(grad_tile, tl.trans(v_tile), input_precision=C.PRECISION)
        i, j = rows[:, None], columns[None, :]
        taken, cost = taken_and_cost(dot, i, j, row_factor, sight, scale, C, S, EDGE)
        p = weights_of(taken, cost, behind[:, None], S.PART)
        w = p * dp
        dz = w - tl.exp2(taken) * (sum_up_to(w, S.PART) + before[:, None])
        if S.FACTORED:
            dz = dz * row_factor[:, None]
        if S.REST and EDGE:
            rest = tl.exp2(-load_row(spent, at_row + rows, inside, True, 0.0))
            at_mask = sight.mask + rows.to(tl.int64) * sight.mask_row
            at_mask += (rows + sight.offset).to(tl.int64) * sight.mask_column
            own = inside & (rows + sight.offset >= 0)
            if C.MASKED:
                own = own & (tl.load(at_mask, mask=own & (rows + sight.offset < sight.keys), other=0) != 0)
            p = tl.where((j == i + sight.offset) & own[:, None], rest[:, None], p)
        grad_v = tl.dot(tl.trans((p * S.LIFT).to(grad_tile.dtype)), grad_tile, grad_v, input_precision=C.PRECISION)
        grad_k = tl.dot(tl.trans(dz.to(q_tile.dtype)), q_tile, grad_k, input_precision=C.PRECISION)
    return grad_k, grad_v


@triton.jit
def _last_live(live, tile, blocks):
    """One more than the last block of queries of the chunk that reached a tile of keys."""
    last = tl.zeros([CHUNK], tl.int32)
    for at in range(0, blocks, CHUNK):
        block = at + tl.arange(0, CHUNK)
        reached = tl.load(live + block, mask=block < blocks, other=tile + 1) <= tile
        last = tl.maximum(last, tl.where(reached, block + 1, 0))
    return tl.max(last, 0)
