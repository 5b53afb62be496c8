"""Statistics of every row from its sums: few numbers per row are read once, the rest written.

`softmax_statistics` reads the sums of softmax_sums.py, `weight_statistics` those of map_sums.py and threshold_sums.py.
The formulas are those of metrics/row_statistics.py and metrics/rows.py, which hundreds of small operations would
evaluate one after the other. They are computed in float64: exp and log of float32 are approximations on a GPU.

The norm of the Jacobian of softmax is that of diag(e) - e e^T / (sum of all e). Its first estimate takes three keys and
the moments of the others; each pass over the keys (pole_sums) squares its error. The formulas are those of
theory/rank_one_eigenvalues.py, and need the range of float64. The columns of the sums are those of
softmax_sums.COLUMNS and map_sums.COLUMNS.

A rescaled softmax needs the number of visible keys before its logits, since its factor depends on it: `visible_keys` is
one read of the mask, whatever the number of query heads.
"""

import triton
import triton.language as tl

from attnorm.kernels.blocks import load_row
from attnorm.kernels.maps import LN2, NO_REFERENCE
from attnorm.kernels.one_pass import reference_of
from attnorm.kernels.row_tiles import rational_step, root_of_moments
from attnorm.kernels.softmax_sums import COLUMNS
from attnorm.kernels.threshold_maps import above_threshold

# The columns of the results, NaN where a row has no such number.
NUMBERS = (
    "max_logit",
    "min_logit",
    "logsumexp",
    "entropy_nats",
    "effective_keys",
    "max_weight",
    "sink_mass",
    "row_sum",
    "jacobian_norm",
    "largest_share",  # largest weight among the keys alone, without the learned sink
)
# Of weights of any map, in the order in which the kernels store them; softmax has two bounds more.
MORE_WEIGHT_NUMBERS = (
    "logit_spread",
    "logit_spread_without_sink",
    "entropy_ratio",
    "entropy_ratio_without_sink",
    "effective_gap",
    "effective_gap_without_sink",
    "effective_keys_without_sink",
    "max_weight_without_sink",
)
MORE_NUMBERS = (*MORE_WEIGHT_NUMBERS, "weight_ceiling", "entropy_floor")
WIDE_NUMBERS = ("horizon", "horizon_without_sink")  # in float64: e^spread leaves float32 at 89

# The columns of the results, NaN where a row has no such number.
WEIGHT_NUMBERS = (
    "max_logit",
    "min_logit",
    "entropy_nats",
    "effective_keys",
    "max_weight",
    "sink_mass",
    "row_sum",
    "jacobian_norm",
)

# Columns of the sums of softmax.
LARGEST = tl.constexpr(COLUMNS.index("largest"))
SMALLEST = tl.constexpr(COLUMNS.index("smallest"))
LEVEL = tl.constexpr(COLUMNS.index("level"))
SINK_ABOVE = tl.constexpr(COLUMNS.index("sink_above"))
DROP = tl.constexpr(COLUMNS.index("drop"))
FIRST_POWER = tl.constexpr(COLUMNS.index("first_power"))
E_LOG_E = tl.constexpr(COLUMNS.index("e_log_e"))
SECOND_POWER = tl.constexpr(COLUMNS.index("second_power"))
THIRD_POWER = tl.constexpr(COLUMNS.index("third_power"))
FOURTH_POWER = tl.constexpr(COLUMNS.index("fourth_power"))

_LARGEST_EXPONENT = tl.constexpr(300.0)  # exp of more would overflow when it is squared
_LOW = tl.constexpr(-1e30)  # metrics.call.LOW
_FAR = tl.constexpr(60.0)  # metrics.row_statistics.FAR


@triton.jit
def softmax_statistics(
    sums, factor, learned_sink, roots, poles, out, more, wide, count, broken, rows, heads, total,
    FACTORED: tl.constexpr, SINK: tl.constexpr, IMPROVE: tl.constexpr, MORE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """All statistics of BLOCK rows.

    sums: (COLUMNS, B, H, R). factor: (B, H, R). learned_sink: (H,). roots, poles: as in softmax_root. out: (NUMBERS,
    B, H, R); more: (MORE_NUMBERS, ...) and wide: (WIDE_NUMBERS, ...) if MORE. count, broken: (B, H, R).
    """
    total = tl.cast(total, tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    visible, gain, level, sink, drop, learned = _row_logits(
        sums, factor, learned_sink, at, inside, rows, heads, total, FACTORED, SINK
    )
    if IMPROVE:
        root = _next_root(roots, poles, at, inside, total, visible, sink, drop, learned)
    else:
        root = _first_root(sums, at, inside, total, visible, sink, drop, learned)
    alone = visible <= 1
    n = visible.to(tl.float64)

    # Without the sink, relative to the largest of the other keys.
    s1 = tl.load(sums + FIRST_POWER * total + at, mask=inside, other=0.0).to(tl.float64)
    e_log_e = tl.load(sums + E_LOG_E * total + at, mask=inside, other=0.0).to(tl.float64)
    s2 = tl.load(sums + SECOND_POWER * total + at, mask=inside, other=0.0).to(tl.float64)
    some = s1 != 0
    shrink = tl.exp(drop)
    others = shrink * s1
    e_log_e = tl.where(some, shrink * (e_log_e + tl.where(some, drop, 0.0) * s1), 0.0)
    rest = 1.0 + others
    log_rest = _log1p(others)
    entropy_rest = log_rest - e_log_e / rest
    squares_rest = (1.0 + shrink * shrink * s2) / (rest * rest)
    # With it. A sink that is alone has all of the weight.
    odds = tl.where(alone, 1e30, sink - log_rest)
    m, left, log_more = _shares(odds)
    entropy = m * (log_more + tl.maximum(-odds, 0.0)) + left * (log_more + tl.maximum(odds, 0.0) + entropy_rest)
    log_keys = tl.where(alone, sink, tl.maximum(sink, log_rest) + log_more)
    # With a learned sink, which is no key.
    key_share, log_all = tl.full(at.shape, 1.0, tl.float64), log_keys
    learned_share = key_share - 1.0
    if SINK:
        key_share, learned_share, log_added = _shares(log_keys - learned)
        log_all = tl.maximum(log_keys, learned) + log_added

    first = tl.load(sums + total + at, mask=inside, other=0.0)
    largest = tl.load(sums + LARGEST * total + at, mask=inside, other=0.0)
    smallest = tl.load(sums + SMALLEST * total + at, mask=inside, other=0.0)
    max_logit, min_logit = tl.maximum(first, largest), tl.minimum(first, smallest)
    sound = (tl.abs(max_logit - min_logit) < float("inf")) & (log_all == log_all)  # no infinite logit, no NaN
    sound = sound & (max_logit > _LOW)
    missing = (visible < 1) | (sound == 0)
    tl.store(count + at, visible.to(tl.int64), mask=inside)
    tl.store(broken + at, ((sound == 0) & (visible > 0)).to(tl.uint8), mask=inside)
    _store_numbers(
        out, at, inside, total, missing,
        (
            max_logit, min_logit, level + log_all, entropy, 1.0 / (m * m + left * left * squares_rest),
            key_share * tl.maximum(m, left / rest), key_share * m + learned_share, key_share,
            tl.abs(gain) * root * tl.exp(_shared_height(sink, learned) - log_all), tl.maximum(m, left / rest),
        ),
    )  # fmt: skip
    if MORE:
        spread, spread_rest = max_logit.to(tl.float64) - min_logit, largest.to(tl.float64) - smallest
        log_others = tl.where(some, drop + tl.log(tl.where(some, s1, 1.0)), float("-inf"))
        gap = tl.where(sink >= 0, odds, -_add_exp(sink, log_others))
        _store_more(
            more, at, inside, total, missing, n, spread, spread_rest, tl.abs(gain) * spread, entropy, entropy_rest, gap,
            -log_others, 1.0 / squares_rest, 1.0 / rest,
        )  # fmt: skip
        horizon, horizon_rest = 1.0 + tl.exp(tl.abs(gain) * spread), 1.0 + tl.exp(tl.abs(gain) * spread_rest)
        _store_numbers(wide, at, inside, total, missing, (horizon, tl.where(alone, float("nan"), horizon_rest)))


@triton.jit
def _store_more(
    more, at, inside, total, missing, n, spread, spread_rest, reach, entropy, entropy_rest, gap, gap_rest,
    effective_rest, largest_rest,
):  # fmt: skip
    """The columns MORE_NUMBERS. reach: the spread of what the exponential is taken of."""
    one, two, none = n <= 1, n <= 2, float("nan")
    log_n, log_rest = tl.log(tl.where(one, 2.0, n)), tl.log(tl.where(two, 3.0, n) - 1.0)
    _store_numbers(
        more, at, inside, total, missing,
        (
            spread, tl.where(one, none, spread_rest),
            tl.where(one, none, entropy / log_n), tl.where(two, none, entropy_rest / log_rest),
            tl.where(one, none, gap + tl.log(tl.where(one, 2.0, n) - 1.0)),
            tl.where(two, none, gap_rest + tl.log(tl.where(two, 3.0, n) - 2.0)),
            tl.where(one, none, effective_rest), tl.where(one, none, largest_rest),
            1.0 / (1.0 + (n - 1.0) * tl.exp(-reach)), _entropy_floor(reach, n),
        ),
    )  # fmt: skip


@triton.jit
def _store_numbers(out, at, inside, total, missing, values):
    """A column each; NaN in rows that have none."""
    for column in tl.static_range(len(values)):
        tl.store(out + column * total + at, tl.where(missing, float("nan"), values[column]), mask=inside)


@triton.jit
def softmax_root(
    sums, factor, learned_sink, roots, poles, rows, heads, total,
    FACTORED: tl.constexpr, SINK: tl.constexpr, IMPROVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The root that the Jacobian norm is made of, or a better one in its place. roots: (B, H, R) in float64."""
    total = tl.cast(total, tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    n, _gain, _level, sink, drop, learned = _row_logits(
        sums, factor, learned_sink, at, inside, rows, heads, total, FACTORED, SINK
    )
    if IMPROVE:
        root = _next_root(roots, poles, at, inside, total, n, sink, drop, learned)
    else:
        root = _first_root(sums, at, inside, total, n, sink, drop, learned)
    tl.store(roots + at, root, mask=inside)


@triton.jit
def _row_logits(sums, factor, learned_sink, at, inside, rows, heads, total, FACTORED: tl.constexpr, SINK: tl.constexpr):
    """n, factor, level, sink, drop and learned of each row, with logits z = factor * logit, in float64.

    level: the largest z but the first visible key's; sink, drop, learned: z of the first visible key, of the second
    largest of the others and of the learned sink, relative to the level.
    """
    n = tl.load(sums + at, mask=inside, other=1.0)
    z = tl.load(sums + total + at, mask=inside, other=0.0).to(tl.float64)
    gain = tl.full(at.shape, 1.0, tl.float64)
    if FACTORED:
        gain = tl.load(factor + at, mask=inside, other=1.0).to(tl.float64)
        z = z * gain
    largest = tl.load(sums + LEVEL * total + at, mask=inside, other=0.0).to(tl.float64)
    level = tl.where(n > 1, largest, z)
    sink_above = tl.load(sums + SINK_ABOVE * total + at, mask=inside, other=0.0).to(tl.float64)
    some = tl.load(sums + FIRST_POWER * total + at, mask=inside, other=0.0) != 0  # NaN stays
    below = tl.load(sums + DROP * total + at, mask=inside, other=0.0).to(tl.float64)
    drop = tl.where(some, below, float("-inf"))
    learned = tl.full(at.shape, float("-inf"), tl.float64)
    if SINK:
        learned = tl.load(learned_sink + at // rows % heads, mask=inside, other=0.0).to(tl.float64) - level
    return n, gain, level, tl.where(n > 1, sink_above, z - level), drop, learned


@triton.jit
def _first_root(sums, at, inside, total, n, sink, drop, learned):
    """The Jacobian norm times the sum of all e, over e^_shared_height, from three keys and moments of the others."""
    sink_e, largest, runner_up, learned_e = _entries(n, sink, drop, learned)
    smaller = tl.minimum(sink_e, largest)
    m0 = tl.load(sums + FIRST_POWER * total + at, mask=inside, other=0.0).to(tl.float64)
    m1 = tl.load(sums + SECOND_POWER * total + at, mask=inside, other=0.0).to(tl.float64)
    m2 = tl.load(sums + THIRD_POWER * total + at, mask=inside, other=0.0).to(tl.float64)
    m3 = tl.load(sums + FOURTH_POWER * total + at, mask=inside, other=0.0).to(tl.float64)
    square = runner_up * runner_up
    return root_of_moments(
        tl.maximum(sink_e, largest), tl.maximum(smaller, runner_up), tl.minimum(smaller, runner_up),
        tl.maximum(m0 - 1.0, 0.0) * runner_up, tl.maximum(m1 - 1.0, 0.0) * square,
        tl.maximum(m2 - 1.0, 0.0) * square * runner_up, tl.maximum(m3 - 1.0, 0.0) * square * square, learned_e,
    )  # fmt: skip


@triton.jit
def _next_root(roots, poles, at, inside, total, n, sink, drop, learned):
    """tests/metrics/root_reference.py: improved_root, with the sums of poles at the last root."""
    sink_e, largest, runner_up, learned_e = _entries(n, sink, drop, learned)
    smaller = tl.minimum(sink_e, largest)
    first, second = tl.maximum(sink_e, largest), tl.maximum(smaller, runner_up)
    root = tl.load(roots + at, mask=inside, other=1.0)
    x = root.to(tl.float32).to(tl.float64)  # where the poles were summed
    below = sink_e < largest  # the sink, where it is not the first
    ratio = tl.where(below, sink_e / tl.where(below, x - sink_e, 1.0), 0.0)
    value = tl.load(poles + at, mask=inside, other=0.0).to(tl.float64) + ratio + learned_e / x
    squares = tl.load(poles + total + at, mask=inside, other=0.0).to(tl.float64) + ratio * ratio
    d = x - second
    d = rational_step(first, first - second, d, value, d / x * (value + squares))
    improved = tl.where((second < first) & (d > 0), second + d, x)
    # Where both sinks are far above the rest, the first root is exact.
    return tl.where((tl.abs(improved) < float("inf")) & (_shared_height(sink, learned) == 0), improved, root)


@triton.jit
def _entries(n, sink, drop, learned):
    """e = exp(z - level - height) of the sink, the largest other key, the second largest one, and the learned sink."""
    height = _shared_height(sink, learned)
    sink_e = tl.exp(tl.minimum(sink - height, _LARGEST_EXPONENT))
    learned_e = tl.exp(tl.minimum(learned - height, _LARGEST_EXPONENT))
    return sink_e, tl.where(n > 1, tl.exp(-height), 0.0), tl.exp(drop - height), learned_e


@triton.jit
def _shared_height(sink, learned):
    """metrics.row_statistics.shared_height."""
    height = tl.minimum(sink, learned)
    return tl.where(height > _FAR, height, 0.0)


@triton.jit
def _shares(odds):
    """The sigmoid of the log-odds, that of their negative, and log(1 + e^-|odds|)."""
    t = tl.exp(-tl.abs(odds))
    more, less = 1.0 / (1.0 + t), t / (1.0 + t)
    return tl.where(odds >= 0, more, less), tl.where(odds >= 0, less, more), _log1p(t)


@triton.jit
def _add_exp(a, b):
    """log(e^a + e^b) for a finite a."""
    return tl.maximum(a, b) + _log1p(tl.exp(-tl.abs(a - b)))


@triton.jit
def _log1p(x):
    """log(1 + x) for x >= 0, to a relative error of 4e-9."""
    return tl.where(x < 1e-4, x * (1.0 - 0.5 * x), tl.log(1.0 + x))


@triton.jit
def _entropy_floor(d, n):
    """theory.dispersion.entropy_floor."""
    small = d < 1e-6  # any k is as good as the best one there
    safe = tl.where(small, 1.0, d)
    fall = 1.0 - tl.exp(-safe)
    k = tl.where(small, n * 0.5, n * (safe / fall - 1.0) * tl.exp(-safe) / fall)
    lowest = tl.minimum(_two_levels(d, n, tl.floor(k)), _two_levels(d, n, tl.ceil(k)))
    return tl.where(n == 1, 0.0, lowest)


@triton.jit
def _two_levels(d, n, k):
    """theory.dispersion.two_level_entropy."""
    k = tl.maximum(tl.minimum(k, n - 1.0), 1.0)
    low = (n - k) * tl.exp(-d) / k
    return tl.log(k) + _log1p(low) + d * low / (1.0 + low)


@triton.jit
def weight_statistics(sums, out, more, count, broken, total, MORE: tl.constexpr, BLOCK: tl.constexpr):
    """All statistics of BLOCK rows.

    sums: (columns, B, H, R). out: (WEIGHT_NUMBERS, B, H, R); more: (MORE_WEIGHT_NUMBERS, ...) if MORE. count, broken:
    (B, H, R).
    """
    total = tl.cast(total, tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    n = _load(sums, 0, at, inside, total)
    first, largest = _load(sums, 1, at, inside, total), _load(sums, 2, at, inside, total)
    smallest = _load(sums, 3, at, inside, total)
    sink, top = _load(sums, 4, at, inside, total), _load(sums, 5, at, inside, total)
    others, e_log_e = _load(sums, 6, at, inside, total), _load(sums, 7, at, inside, total)
    squares, norm = _load(sums, 8, at, inside, total), _load(sums, 9, at, inside, total)

    rest = top * (1.0 + others)
    has_rest = rest > 0
    entropy_rest = tl.log(1.0 + others) - e_log_e / (1.0 + others)
    squares_rest = (1.0 + squares) / ((1.0 + others) * (1.0 + others))
    whole = sink + rest
    has_any = whole > 0
    safe = tl.where(has_any, whole, 1.0)
    m, left = sink / safe, rest / safe
    entropy = _entropy_term(m) + _entropy_term(left) + tl.where(has_rest, left * entropy_rest, 0.0)
    spread_out = m * m + tl.where(has_rest, left * left * squares_rest, 0.0)

    max_logit = tl.where(n > 1, tl.where(largest > first, largest, first), first)
    max_logit = tl.where((n > 1) & (largest != largest), largest, max_logit)
    min_logit = tl.where((n > 1) & (smallest < first), smallest, first)
    sound = (tl.abs(max_logit - min_logit) < float("inf")) & (tl.abs(whole) < float("inf"))  # no infinity, no NaN
    sound = sound & (max_logit > _LOW)
    missing = (n < 1) | (sound == 0)
    tl.store(count + at, n.to(tl.int64), mask=inside)
    tl.store(broken + at, ((sound == 0) & (n > 0)).to(tl.uint8), mask=inside)
    winner = tl.maximum(sink, top)
    _store_numbers(
        out, at, inside, total, missing,
        (
            max_logit, min_logit, _only(has_any, entropy), _only(has_any, 1.0 / tl.where(has_any, spread_out, 1.0)),
            _only(has_any, winner), _only(has_any, m), whole, norm,
        ),
    )  # fmt: skip
    if MORE:
        one, two = n <= 1, n <= 2
        log_n, log_rest = tl.log(tl.where(one, 2.0, n)), tl.log(tl.where(two, 3.0, n) - 1.0)
        gap = _log(winner) - _log(tl.minimum(sink, top) + top * others) + tl.log(tl.where(one, 2.0, n) - 1.0)
        gap_rest = tl.log(tl.where(two, 3.0, n) - 2.0) - _log(others)
        _store_numbers(
            more, at, inside, total, missing,
            (
                max_logit - min_logit, _only(one == 0, largest - smallest),
                _only(has_any & (one == 0), entropy / log_n), _only(has_rest & (two == 0), entropy_rest / log_rest),
                _only(has_any & (one == 0), gap), _only(has_rest & (two == 0), gap_rest),
                _only(has_rest, 1.0 / squares_rest), _only(has_rest, 1.0 / (1.0 + others)),
            ),
        )  # fmt: skip


@triton.jit
def _load(sums, column: tl.constexpr, at, inside, total):
    return tl.load(sums + column * total + at, mask=inside, other=0.0).to(tl.float64)


@triton.jit
def _log(x):
    """log x, -inf where x is 0."""
    return tl.where(x > 0, tl.log(tl.where(x > 0, x, 1.0)), float("-inf"))


@triton.jit
def _entropy_term(p):
    return tl.where(p > 0, -p * tl.log(tl.where(p > 0, p, 1.0)), 0.0)


@triton.jit
def _only(condition, value):
    return tl.where(condition, value, float("nan"))


@triton.jit
def key_weights(
    logits, shift, parameter, threshold, out, total, columns, unit,
    WEIGHTS: tl.constexpr, P: tl.constexpr, FAST: tl.constexpr, REFERENCE: tl.constexpr, HAS_THRESHOLD: tl.constexpr,
    DEFORMED: tl.constexpr, SHIFTED: tl.constexpr, PARAMETER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The weights of some keys of each row up to a constant of the row.

    logits, out: (rows, columns), the largest first. shift, parameter, threshold: of each row. unit: of a threshold map.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    row = at // columns
    z = tl.load(logits + at, mask=inside, other=0.0)
    top = tl.load(logits + row * columns, mask=inside, other=0.0)
    if HAS_THRESHOLD:
        a = load_row(parameter, row, inside, PARAMETER, 0.5)
        t = tl.load(threshold + row, mask=inside, other=0.0)
        p, _u = WEIGHTS(above_threshold(z - top, unit, 0.0, t, a, DEFORMED, True), a, FAST)
    else:
        moved = load_row(shift, row, inside, SHIFTED, 0.0)
        reference = reference_of((top + moved) / LN2, REFERENCE, False)
        if REFERENCE == NO_REFERENCE:
            reference = reference * 0.0
        p, _b = WEIGHTS((z + moved) / LN2, reference, P, FAST)
    tl.store(out + at, p, mask=inside)


@triton.jit
def visible_keys(
    mask, row_queries, out, mask_batch, mask_head, mask_row, mask_column, heads, rows_total, keys, offset,
    CAUSAL: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """mask: (B, H, Q, K), with its own batch and heads; row_queries: (R,); out: (B, H, R)."""
    blocks = tl.cdiv(rows_total, ROWS)
    program = tl.program_id(0)
    batch_head = (program // blocks).to(tl.int64)
    at = program % blocks * ROWS + tl.arange(0, ROWS)
    inside = at < rows_total
    rows = tl.load(row_queries + at, mask=inside, other=0)
    reach = tl.where(inside, keys, 0)
    if CAUSAL:
        reach = tl.where(inside, tl.maximum(tl.minimum(rows + offset + 1, keys), 0), 0)
    mask += batch_head // heads * mask_batch + batch_head % heads * mask_head
    row = mask + rows.to(tl.int64)[:, None] * mask_row
    n = tl.zeros([ROWS], tl.int32)
    for start in range(0, tl.max(reach, 0), KEYS):
        columns = (start + tl.arange(0, KEYS))[None, :]
        seen = tl.load(row + columns.to(tl.int64) * mask_column, mask=columns < reach[:, None], other=0)
        n += tl.sum((seen != 0).to(tl.int32), 1)
    tl.store(out + batch_head * rows_total + at, n.to(tl.int64), mask=inside)
