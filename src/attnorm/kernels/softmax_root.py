"""The norm of a softmax Jacobian from the sums of a row (softmax_sums.py): that of diag(e) - e e^T / (sum of all e).

The first estimate takes three keys and the moments of the others. Each pass over the keys (pole_sums) squares its
error. The formulas are those of theory/rank_one_eigenvalues.py, in float64, whose range they need. The columns of the
sums are read by their index in softmax_sums.COLUMNS.
"""

import triton
import triton.language as tl

_LARGEST_EXPONENT = tl.constexpr(300.0)  # exp of more would overflow when it is squared
_TINY = tl.constexpr(1e-300)
_MOMENT_PASSES = tl.constexpr(3)


@triton.jit
def _positive(x):
    return tl.maximum(x, _TINY)


@triton.jit
def row_logits(sums, factor, learned_sink, at, inside, rows, heads, total, FACTORED: tl.constexpr, SINK: tl.constexpr):
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
    largest = tl.load(sums + 4 * total + at, mask=inside, other=0.0).to(tl.float64)
    level = tl.where(n > 1, largest, z)
    some = tl.load(sums + 6 * total + at, mask=inside, other=0.0) != 0  # NaN stays
    second = tl.load(sums + 5 * total + at, mask=inside, other=0.0).to(tl.float64)
    drop = tl.where(some, second - level, float("-inf"))
    learned = tl.full(at.shape, float("-inf"), tl.float64)
    if SINK:
        learned = tl.load(learned_sink + at // rows % heads, mask=inside, other=0.0).to(tl.float64) - level
    return n, gain, level, z - level, drop, learned


@triton.jit
def _entries(n, sink, drop, learned):
    """e = exp(z - level) of the sink, the largest other key, the second largest one, and the learned sink."""
    sink_e = tl.exp(tl.minimum(sink, _LARGEST_EXPONENT))
    learned_e = tl.exp(tl.minimum(learned, _LARGEST_EXPONENT))
    return sink_e, tl.where(n > 1, 1.0, 0.0).to(tl.float64), tl.exp(drop), learned_e


@triton.jit
def _rational_step(first, width, d, value, slope):
    """theory.rank_one_eigenvalues._rational_step."""
    A = tl.maximum(value - slope, 0.0)
    B = d * slope
    b = B + first - A * width
    twice = 2.0 * B * width
    q = tl.abs(b) + tl.sqrt(b * b + 2.0 * A * twice)
    up = b >= 0
    return tl.where(up, twice, q) / tl.where(up, q, 2.0 * A)


@triton.jit
def _gauss_nodes(m0, m1, m2, m3):
    """theory.rank_one_eigenvalues._gauss_nodes: two nodes, then their weights."""
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
def _root_of_moments(first, second, third, m0, m1, m2, m3, at_zero):
    """theory.rank_one_eigenvalues.rank_one_root_of_moments."""
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
        d = _rational_step(first, width, d, own + a + b + c + s, slope)
    root = tl.where(second < first, second + d, first)
    return tl.where(second + at_zero > 0, root, 0.0)


@triton.jit
def first_root(sums, at, inside, total, n, sink, drop, learned):
    """The Jacobian norm times the sum of all e, from three keys and the moments of the others."""
    sink_e, largest, runner_up, learned_e = _entries(n, sink, drop, learned)
    smaller = tl.minimum(sink_e, largest)
    m0 = tl.load(sums + 6 * total + at, mask=inside, other=0.0).to(tl.float64)
    m1 = tl.load(sums + 8 * total + at, mask=inside, other=0.0).to(tl.float64)
    m2 = tl.load(sums + 9 * total + at, mask=inside, other=0.0).to(tl.float64)
    m3 = tl.load(sums + 10 * total + at, mask=inside, other=0.0).to(tl.float64)
    square = runner_up * runner_up
    return _root_of_moments(
        tl.maximum(sink_e, largest), tl.maximum(smaller, runner_up), tl.minimum(smaller, runner_up),
        tl.maximum(m0 - 1.0, 0.0) * runner_up, tl.maximum(m1 - 1.0, 0.0) * square,
        tl.maximum(m2 - 1.0, 0.0) * square * runner_up, tl.maximum(m3 - 1.0, 0.0) * square * square, learned_e,
    )  # fmt: skip


@triton.jit
def next_root(roots, poles, at, inside, total, n, sink, drop, learned):
    """theory.rank_one_eigenvalues.improved_root, with the sums of poles at the last root."""
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
    d = _rational_step(first, first - second, d, value, d / x * (value + squares))
    improved = tl.where((second < first) & (d > 0), second + d, x)
    return tl.where(tl.abs(improved) < float("inf"), improved, root)  # a sink far above the rest leaves float32


@triton.jit
def softmax_root(
    sums, factor, learned_sink, roots, poles, rows, heads, total,
    FACTORED: tl.constexpr, SINK: tl.constexpr, IMPROVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The root that the Jacobian norm is made of, or a better one in its place. roots: (B, H, R) in float64."""
    total = tl.cast(total, tl.int64)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    n, _gain, _level, sink, drop, learned = row_logits(
        sums, factor, learned_sink, at, inside, rows, heads, total, FACTORED, SINK
    )
    if IMPROVE:
        root = next_root(roots, poles, at, inside, total, n, sink, drop, learned)
    else:
        root = first_root(sums, at, inside, total, n, sink, drop, learned)
    tl.store(roots + at, root, mask=inside)
