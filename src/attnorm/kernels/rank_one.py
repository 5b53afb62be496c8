"""The largest eigenvalue of diag(u) - u u^T / sum u, which is the norm of a Jacobian: theory/rank_one_eigenvalues.py.

Its first estimate takes three of the u and the moments of the others; each pass over all u squares its error. The
formulas need the range of float64.
"""

import triton
import triton.language as tl

_TINY = tl.constexpr(1e-300)
_MOMENT_PASSES = tl.constexpr(3)


@triton.jit
def _positive(x):
    return tl.maximum(x, _TINY)


@triton.jit
def rational_step(first, width, d, value, slope):
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
def root_of_moments(first, second, third, m0, m1, m2, m3, at_zero):
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
        d = rational_step(first, width, d, own + a + b + c + s, slope)
    root = tl.where(second < first, second + d, first)
    return tl.where(second + at_zero > 0, root, 0.0)
