"""Shared device functions of the kernels for row statistics: rows and tiles of a program, and the Jacobian norm.

The first visible key of a row, the sink, is set apart. Tiles that some row may not see whole come first, then those
that all rows see.

The keys of a tile are dealt into four classes per row, one for each thread that holds a part of the row in the layout
of the tensor cores: sums and extremes of a class need no other thread. Classes are counted in pairs of neighbors.

The norm of a Jacobian is the largest eigenvalue of diag(u) - u u^T / sum u: theory/rank_one_eigenvalues.py. Its first
estimate takes three of the u and the moments of the others; each pass over all u squares its error. The formulas need
the range of float64. For softpick's Jacobian, another secular equation is solved in the same way: PickRow.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnorm.kernels.blocks import (
    block_from_last,
    capped,
    keys_of_head,
    load_row,
    load_tile,
    load_tile_at,
    seen_keys,
    sight_of_head,
    tile_of_head,
)
from attnorm.kernels.maps import LN2

CLASSES = tl.constexpr(4)
_TINY = tl.constexpr(1e-300)
_MOMENT_PASSES = tl.constexpr(3)


class RowInputs(NamedTuple):
    """Inputs from which the logits of a block of rows are computed."""

    q_tile: Any
    k: Any
    rows: Any  # indices of the queries
    sight: Any
    scale: Any
    cap: Any


class Span(NamedTuple):
    """Tiles that are read one after the other."""

    start: Any  # key
    tiles: Any
    jump: Any  # keys that are skipped after the first tile


class RowState(NamedTuple):
    """State of a row over the keys so far, which every kernel of row statistics keeps."""

    n: Any  # visible keys, if MASKED
    first: Any  # visible key, the sink
    sink: Any  # its product
    smallest: Any  # product of the others, per class


@triton.jit
def no_keys(keys, ROWS: tl.constexpr):
    n = tl.zeros([ROWS], tl.int32)
    sink, smallest = tl.zeros([ROWS], tl.float32), tl.full([ROWS, CLASSES], float("inf"), tl.float32)
    return RowState(n, n + keys, sink, smallest)


@triton.jit
def key_tile(start, given, first, C: tl.constexpr, EDGE: tl.constexpr):
    """Products, or capped logits in bits; which keys of the tile count, and the first visible key with its product."""
    columns = start + tl.arange(0, C.COLUMNS)
    if C.OUTPUT:  # no register is free for addresses that the tiles have in common
        k_tile = load_tile(given.k, columns, C.WIDTH, EDGE, C.FULL)
    else:
        k_tile = load_tile_at(given.k, start, C.COLUMNS, C.WIDTH, EDGE, C.FULL)
    s = tl.dot(given.q_tile, tl.trans(k_tile), input_precision=C.PRECISION)
    if C.CAPPED:
        s, _slope = capped(s * given.scale, given.cap, C.CAPPED)
    i, j = given.rows[:, None], columns[None, :]
    keys = given.sight.keys
    seen = (i < given.sight.queries) & (j < keys)
    sink = tl.zeros_like(first).to(tl.float32)
    count = tl.zeros_like(first)
    if EDGE:
        seen = seen_keys(i, j, given.sight, C)
        if C.MASKED:
            count = tl.sum(seen.to(tl.int32), 1)
        found = tl.min(tl.where(seen, j, keys), 1)
        new = (first == keys) & (found < keys)
        sink = tl.sum(tl.where(new[:, None] & (j == found[:, None]), s, 0.0), 1)
        first = tl.where(new, found, first)
        seen = seen & (j != first[:, None])
    return s, seen, first, sink, count


@triton.jit
def tile_of_span(span, tile, C: tl.constexpr):
    """The first key of a tile."""
    return span.start + tile * C.COLUMNS + tl.where(tile > 0, span.jump, 0)


@triton.jit
def pairs_of_tile(at, given, state, C: tl.constexpr, EDGE: tl.constexpr):
    """The products of neighbors of a tile, -inf where they do not count, and the state with the tile added."""
    s, seen, first, sink, count = key_tile(at, given, state.first, C, EDGE)
    n, sinks = state.n, state.sink
    if EDGE:
        n += count
        sinks += sink
        low_even, low_odd = neighbors(tl.where(seen, s, float("inf")))
        even, odd = neighbors(tl.where(seen, s, float("-inf")))
        lows = smaller(low_even, low_odd)
    else:
        even, odd = neighbors(s)
        lows = smaller(even, odd)
    smallest = smaller(state.smallest, tl.min(by_class(lows), 1))
    return even, odd, RowState(n, first, sinks, smallest)


@triton.jit
def halves(x):
    """The left and the right half of the columns."""
    return tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@triton.jit
def neighbors(x):
    """The even and the odd columns."""
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def by_class(x):
    return tl.reshape(x, [x.shape[0], x.shape[1] // CLASSES, CLASSES])


@triton.jit
def rows_of_program(
    program, q, k, mask, factor, row_queries, q_batch, q_head, q_row, k_batch, k_head, k_row, mask_batch, mask_head,
    mask_row, mask_column, heads, groups, rows_total, queries, keys, offset, width, scale, cap,
    C: tl.constexpr, FACTORED: tl.constexpr,
):  # fmt: skip
    """Return the rows of a program, which of them exist, and the inputs of their logits.

    unit: what turns the products of a row into its logits z in bits. Where it is negative, q changes its sign instead.
    logit: what turns the products that remain into logits in bits before the factor.
    """
    own = block_from_last(program, tl.cdiv(rows_total, C.ROWS), heads)
    k = keys_of_head(k, own, groups, k_batch, k_head, k_row, keys, width)
    sight = sight_of_head(
        mask, own.batch, own.head, mask_batch, mask_head, mask_row, mask_column, queries, keys, offset, 0
    )
    at = own.index * C.ROWS + tl.arange(0, C.ROWS)
    inside = at < rows_total
    rows = tl.load(row_queries + at, mask=inside, other=queries)
    q_tile = tile_of_head(q, own, q_batch, q_head, q_row, rows_total, width, at, C.WIDTH, C.FULL)
    logit = tl.full([C.ROWS], 1.0, tl.float32)
    if not C.CAPPED:
        logit = logit * scale
    unit = logit * load_row(factor, own.batch_head * rows_total + at, inside, FACTORED, 1.0)
    turned = unit < 0
    q_tile = tl.where(turned[:, None], -q_tile, q_tile)
    given = RowInputs(q_tile, k, rows, sight, scale, cap)
    return own, at, inside, given, tl.abs(unit), tl.where(turned, -logit, logit)


@triton.jit
def spans_of_rows(row_queries, block, rows_total, sight, C: tl.constexpr):
    """Tiles with keys that some row of the block may not see, tiles that all rows see, and where the latter end.

    The first tile, which has the sink, counts among the former. It comes first, then those that all see follow.
    """
    keys = sight.keys
    high, last = keys // C.COLUMNS * C.COLUMNS, keys
    if C.CAUSAL:
        earliest = tl.load(row_queries + block * C.ROWS)
        latest = tl.load(row_queries + tl.minimum((block + 1) * C.ROWS, rows_total) - 1)
        high = tl.maximum(tl.minimum(earliest + sight.offset + 1, keys), 0) // C.COLUMNS * C.COLUMNS
        last = tl.maximum(tl.minimum(latest + sight.offset + 1, keys), 0)
    if C.MASKED:
        high = 0
    high = tl.maximum(high, C.COLUMNS)
    some = (last > 0).to(tl.int32)
    outer_tiles = some + tl.cdiv(tl.maximum(last - high, 0), C.COLUMNS)
    inner = Span(C.COLUMNS, high // C.COLUMNS - 1, 0)
    return Span(0, outer_tiles, high - C.COLUMNS), inner, high


@triton.jit
def visible_keys(n, given, C: tl.constexpr):
    if not C.MASKED:
        n = n + given.sight.keys
        if C.CAUSAL:
            n = tl.maximum(tl.minimum(given.rows + given.sight.offset + 1, given.sight.keys), 0)
    return n


@triton.jit
def sink_values(v, first, C: tl.constexpr):
    """The values of the first visible key of each row; 0 for rows that see nothing."""
    return load_tile(v, first, C.WIDTH, True, C.FULL).to(tl.float32)


@triton.jit
def extreme_logits(peak, smallest, logit):
    """The largest and the smallest natural logit of the keys but the sink, of products with the peak the largest."""
    extremes = peak * logit, tl.min(smallest, 1) * logit
    largest, least = larger(extremes[0], extremes[1]), smaller(extremes[0], extremes[1])
    empty = peak == float("-inf")
    return tl.where(empty, float("-inf"), largest) * LN2, tl.where(empty, float("inf"), least) * LN2


@triton.jit
def store_columns(out, column, inside, values):
    for index in tl.static_range(len(values)):
        tl.store(out + index * column, values[index], mask=inside)


@triton.jit
def _positive(x):
    return tl.maximum(x, _TINY)


@triton.jit
def rational_step(first, width, d, value, slope):
    """theory.rank_one_eigenvalues.rational_step."""
    A = tl.maximum(value - slope, 0.0)
    B = d * slope
    b = B + first - A * width
    twice = 2.0 * B * width
    q = tl.abs(b) + tl.sqrt(b * b + 2.0 * A * twice)
    up = b >= 0
    return tl.where(up, twice, q) / tl.where(up, q, 2.0 * A)


@triton.jit
def _gauss_nodes(m0, m1, m2, m3):
    """tests/metrics/root_reference.py: _gauss_nodes. Return two nodes, then their weights."""
    some = m0 > 0
    scale = _positive(tl.where(some, m1 / _positive(m0), 1.0))
    unit = m0 * scale
    a1 = tl.where(some, m1 / _positive(unit), 1.0)
    a2 = tl.where(some, m2 / _positive(unit * scale), 1.0)
    a3 = tl.where(some, m3 / _positive(unit * scale * scale), 1.0)
    spread = a2 - a1 * a1
    one = spread <= 1e-6 * a2  # below the rounding of sums in float32
    spread = tl.where(one, 1.0, spread)
    a, b = (a3 - a1 * a2) / spread, (a1 * a3 - a2 * a2) / spread
    half = tl.sqrt(tl.maximum(a * a * 0.25 - b, 0.0))
    high, low = a * 0.5 + half, tl.maximum(a * 0.5 - half, 0.0)
    share = tl.where(one, 1.0, (a1 - low) / _positive(high - low))
    share = tl.minimum(tl.maximum(share, 0.0), 1.0)
    high = tl.where(one, a1, high)
    return scale * high, scale * low, m0 * share, m0 * (1.0 - share)


@triton.jit
def root_of_moments(first, second, third, m0, m1, m2, m3, at_zero):
    """tests/metrics/root_reference.py: rank_one_root_of_moments."""
    high, low, high_weight, low_weight = _gauss_nodes(m0, m1, m2, m3)
    high, low = tl.minimum(high, second), tl.minimum(low, second)
    width = first - second
    total = second + third + high_weight + low_weight + at_zero
    center = (second * second + third * third + high * high_weight + low * low_weight) / _positive(total)
    d = (total * width - first * (second - center)) / _positive(first + total)
    d = tl.maximum(d, second * (width / _positive(first + second)))
    for _ in tl.static_range(_MOMENT_PASSES):
        x = second + d
        to_third, to_high, to_low = _positive(x - third), _positive(x - high), _positive(x - low)
        a, b, c, s = third / to_third, high_weight / to_high, low_weight / to_low, at_zero / _positive(x)
        own = second / _positive(d)
        slope = own + d * (a / to_third + b / to_high + c / to_low + s / _positive(x))
        d = rational_step(first, width, d, own + a + b + c + s, slope)
    root = tl.where(second < first, second + d, first)
    return tl.where(second + at_zero > 0, root, 0.0)


class PickRow(NamedTuple):
    """theory.rank_two_singular_values._PickRow."""

    near: Any
    inverse: Any
    g1: Any
    g2: Any
    u1: Any
    u2: Any
    shift: Any
    own: Any
    base: Any
    squares: Any


class Poles(NamedTuple):
    """theory.rank_two_singular_values._Poles. far: whether its sums are moments."""

    tilt: Any
    n1: Any
    n2: Any
    k11: Any
    k12: Any
    k22: Any
    at: Any
    far: Any


@triton.jit
def share_of(z):
    """1 - 2^-|z|, with a series where the difference has few digits."""
    x = tl.abs(z) * LN2
    series = x * (1.0 - x * (0.5 - x * (1 / 6 - x * (1 / 24 - x * (1 / 120 - x * (1 / 720))))))
    return tl.where(x < 0.25, series, 1.0 - tl.exp2(-tl.abs(z)))


@triton.jit
def pick_row(z1, z2, w2, shift, outside, below, e, u, ee, eu, uu):
    """theory.rank_two_singular_values._pick_row. z1, z2: in bits.

    below: the sum of shares of negative keys, and floor.
    """
    share1, w2, shift = share_of(z1).to(tl.float64), w2.to(tl.float64), shift.to(tl.float64)
    outside, e, u = outside.to(tl.float64), e.to(tl.float64), u.to(tl.float64)
    has_second = (z2 > 0).to(tl.float64)
    y1 = tl.exp(tl.minimum((z1 - z2).to(tl.float64) * LN2, 300.0))
    rest = below.to(tl.float64) * tl.exp(z2.to(tl.float64) * -LN2)
    others = rest + w2 + (u + shift * e)
    total = y1 * share1 + others
    g1, g2 = y1 / total, 1.0 / total
    w1, w2_true = g1 * share1, g2 * w2
    own, near = e + outside, tl.minimum(y1, 2.0)
    squares = has_second + own
    row = PickRow(
        near, 1.0 / (y1 * y1), g1, g2, w1 - shift * g1 * near, w2 - shift, shift, own, rest - shift * outside + u,
        squares,
    )  # fmt: skip
    first = (g1 * others) * (g1 * others) + w1 * w1 * squares
    second = (1.0 - w2_true) * (1.0 - w2_true) + w2_true * w2_true * own + (g1 * w2) * (g1 * w2)
    second = has_second * second
    ww = uu + shift * (2.0 * eu + shift * ee)
    trace = first + second + e + ww * (g2 * g2 * squares + g1 * g1)
    low = tl.maximum(first, second) - has_second
    return row, low, tl.maximum(trace - has_second, low)


@triton.jit
def pick_secular(d, row, ee, eu, uu):
    """theory.rank_two_singular_values._pick_secular."""
    x = 1.0 + d
    A = row.own + ee + x / d
    B = row.base + eu + x * row.u2 / d
    C = uu + row.u2 * row.u2 / d + row.shift * row.shift * row.squares
    e1, g1 = row.near * row.near, row.g1 * row.g1
    constant = row.shift * (row.shift * g1 - 2.0 * row.g2)
    value = (x * row.g2 * row.g2 - g1) * (B * B - A * C) - x * g1 * C - ((x - e1) * A + x * e1) * constant
    value += row.u1 * (2.0 * x * row.g2 * B + row.u1 * (x - A))
    below = A * (1.0 - x * row.inverse) >= x
    return tl.where(below, -tl.abs(value), value) * d


@triton.jit
def _limited(x, low, high):
    return tl.minimum(tl.maximum(x, low), high)


@triton.jit
def matrix_of_poles(ee, eu, uu, see, seu, suu, lowest, highest, at, far):
    """theory.rank_two_singular_values._matrix_of_poles."""
    some = ee > 0
    safe = tl.where(some, ee, 1.0)
    tilt = tl.where(some, eu / safe, 0.0)
    left = uu - tilt * eu
    two = some & (left > 1e-6 * uu)
    left = tl.where(two, left, 0.0)
    safe_left = tl.where(two, left, 1.0)
    k11 = _limited(tl.where(some, see / safe, lowest), lowest, highest)
    k22 = _limited(tl.where(two, (suu - tilt * (2.0 * seu - tilt * see)) / safe_left, lowest), lowest, highest)
    k12 = tl.where(two, (seu - tilt * see) / tl.sqrt(safe * safe_left), 0.0)
    limit = tl.sqrt(tl.minimum((highest - k11) * (highest - k22), (k11 - lowest) * (k22 - lowest)))
    return Poles(tilt, tl.where(some, ee, 0.0), left, k11, _limited(k12, -limit, limit), k22, at, far)


@triton.jit
def _model_secular(d, poles, row):
    """The secular function with the sums of the model: theory.rank_two_singular_values._Poles.sums."""
    move = tl.where(poles.far, -1.0, d - poles.at)
    start = tl.where(poles.far, 1.0 + d, 1.0)
    a11, a12, a22 = start + move * poles.k11, move * poles.k12, start + move * poles.k22
    inverse = 1.0 / tl.maximum(a11 * a22 - a12 * a12, 1e-300)
    ee, pp = poles.n1 * a22 * inverse, poles.n2 * a11 * inverse
    ep = -tl.sqrt(poles.n1 * poles.n2) * a12 * inverse
    eu = ep + poles.tilt * ee
    return pick_secular(d, row, ee, eu, pp + poles.tilt * (ep + eu))


@triton.jit
def pick_root(poles, row, low, high, STEPS: tl.constexpr):
    """theory.rank_two_singular_values._pick_root."""
    a, b = tl.maximum(low, 3e-8), tl.maximum(high, 3e-8)
    lowest, d = a, b
    at_a, at_b = _model_secular(a, poles, row), _model_secular(b, poles, row)
    found = at_a >= 0
    before = at_a * 0.0
    for step in range(STEPS):
        weight = at_a / tl.where(at_a == at_b, 1.0, at_a - at_b)
        weight = tl.where((weight >= 0) & (weight <= 1), weight, 0.5)
        d = tl.where(step % 4 == 1, tl.sqrt(a * b), a + weight * (b - a))
        value = _model_secular(d, poles, row)
        above = value > 0
        side = tl.where(above, 1.0, -1.0).to(tl.float64)
        half = tl.where(side == before, 0.5, 1.0)
        at_a, at_b = tl.where(above, half * at_a, value), tl.where(above, value, half * at_b)
        a, b = tl.where(above, a, d), tl.where(above, d, b)
        before = side
    return tl.where(found, lowest, d)
