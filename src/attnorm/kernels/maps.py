"""The maps of the one-pass kernels: two device functions and one row of the table MAPS for each.

A row of weights is w_j = a(z_j) / D, where D is the sum of b(z_j) over the row, or 1 for maps without a denominator. A
map defines

    weights(z, r, P, FAST) -> a, b                     numerator and denominator
    slopes(z, r, P, FAST)  -> a, da/dz, db/dz          for the backward pass

z is in bits (natural logits times log2 e, so that exp is exp2); slopes are with respect to natural logits. Scaled maps
return everything divided by 2^r, so that nothing overflows or underflows. In the forward pass r follows the largest
logit of the row; in the backward pass it is log2 of D, so that a is the weight itself. P is a compile-time constant of
the map. FAST allows approximate instructions, in half precision.

A rule changes logits before the map: rule(z, t, p, FAST) -> its value and its derivative by z, where t is the distance
to the key and p a number.
"""

from enum import IntEnum
from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
INVERTIBLE = tl.constexpr(1.2e-38)  # smaller numbers count as 0 where 1 / x or log x might be infinite


@triton.jit
def log2(x, FAST: tl.constexpr):
    """log2. FAST: one GPU instruction, exact to 2^-22, of numbers from 1.2e-38; tl.log2 takes a dozen instructions."""
    if FAST:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
def times_log2(e, FAST: tl.constexpr):
    """e log2(e) of numbers that are at least 0."""
    return e * log2(tl.maximum(e, INVERTIBLE), FAST)


@triton.jit
def softmax_weights(z, r, P: tl.constexpr, FAST: tl.constexpr):
    p = tl.exp2(z - r)
    return p, p


@triton.jit
def softmax_slopes(z, r, P: tl.constexpr, FAST: tl.constexpr):
    p = tl.exp2(z - r)
    return p, p, p


@triton.jit
def softpick_weights(z, r, P: tl.constexpr, FAST: tl.constexpr):
    above = tl.exp2(z - r) - tl.exp2(-r)
    return tl.maximum(above, 0.0, propagate_nan=tl.PropagateNan.ALL), tl.abs(above)


@triton.jit
def softpick_digits(z, r, P: tl.constexpr, FAST: tl.constexpr):
    """softpick_weights with a series for small logits, where the difference of two exponentials has few digits."""
    x = z * LN2
    series = x * (1.0 + x * (0.5 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x * (1 / 720))))))
    above = tl.where(tl.abs(x) < 0.25, series * tl.exp2(-r), tl.exp2(z - r) - tl.exp2(-r))
    return tl.maximum(above, 0.0, propagate_nan=tl.PropagateNan.ALL), tl.abs(above)


@triton.jit
def softpick_slopes(z, r, P: tl.constexpr, FAST: tl.constexpr):
    e = tl.exp2(z - r)
    above = e - tl.exp2(-r)
    positive = z > 0
    return tl.where(positive, above, 0.0), tl.where(positive, e, 0.0), tl.where(positive, e, tl.where(z == 0, 0.0, -e))


@triton.jit
def _reciprocal(x, FAST: tl.constexpr):
    """1 / x. FAST: one GPU instruction, exact to 2^-23; a division takes five. Below 1.2e-38 the result is 0."""
    if FAST:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return 1.0 / x


@triton.jit
def sigmoid_weights(z, r, P: tl.constexpr, FAST: tl.constexpr):
    p = _reciprocal(1.0 + tl.exp2(-z), FAST)
    return p, p


@triton.jit
def sigmoid_slopes(z, r, P: tl.constexpr, FAST: tl.constexpr):
    p = _reciprocal(1.0 + tl.exp2(-z), FAST)
    return p, p * (1.0 - p), p


@triton.jit
def exp_weights(z, r, P: tl.constexpr, FAST: tl.constexpr):
    """exp of -(a squared distance), which rounding must not make positive."""
    p = tl.exp2(tl.minimum(z, 0.0, propagate_nan=tl.PropagateNan.ALL))
    return p, p


@triton.jit
def exp_slopes(z, r, P: tl.constexpr, FAST: tl.constexpr):
    p, _ = exp_weights(z, r, P, FAST)
    return p, p, p


@triton.jit
def _power(x, P: tl.constexpr):
    result = x
    for _ in tl.static_range(P - 1):
        result = result * x
    return result


@triton.jit
def relu_weights(z, r, P: tl.constexpr, FAST: tl.constexpr):
    x = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL) * LN2
    p = _power(x, P)
    return p, p


@triton.jit
def relu_slopes(z, r, P: tl.constexpr, FAST: tl.constexpr):
    x = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL) * LN2
    if P == 1:
        slope = tl.where(z > 0, 1.0, 0.0)
        return x, slope, slope
    slope = _power(x, P - 1) * P
    return _power(x, P), slope, slope


@triton.jit
def polynomial_weights(z, r, P: tl.constexpr, FAST: tl.constexpr):
    p = _power(z * LN2, P)
    return p, p


@triton.jit
def polynomial_slopes(z, r, P: tl.constexpr, FAST: tl.constexpr):
    x = z * LN2
    if P == 1:
        slope = tl.where(x == x, 1.0, x)
        return x, slope, slope
    slope = _power(x, P - 1) * P
    return _power(x, P), slope, slope


@triton.jit
def softplus_weights(z, r, P: tl.constexpr, FAST: tl.constexpr):
    """softplus(x) 2^-r with x = z log 2: its series where e^x is small, x where it is large."""
    scaled = tl.exp2(z - r)
    e = scaled * tl.exp2(r)
    series = scaled * (1.0 - e * (0.5 - e * 0.33333333))
    logarithm = tl.where(z > 40.0, z, log2(1.0 + e, FAST)) * (tl.exp2(-r) * LN2)
    p = tl.where(e < 1e-2, series, logarithm)
    return p, p


@triton.jit
def softplus_slopes(z, r, P: tl.constexpr, FAST: tl.constexpr):
    p, _ = softplus_weights(z, r, P, FAST)
    scaled = tl.exp2(z - r)
    slope = tl.where(z > 40.0, tl.exp2(-r), scaled / (1.0 + scaled * tl.exp2(r)))
    return p, slope, slope


@triton.jit
def elu1_weights(z, r, P: tl.constexpr, FAST: tl.constexpr):
    """(elu(x) + 1) 2^-r: 1 + x above 0, e^x below."""
    p = tl.where(z > 0, (1.0 + z * LN2) * tl.exp2(-r), tl.exp2(z - r))
    return p, p


@triton.jit
def elu1_slopes(z, r, P: tl.constexpr, FAST: tl.constexpr):
    p, _ = elu1_weights(z, r, P, FAST)
    slope = tl.where(z > 0, tl.exp2(-r), p)
    return p, slope, slope


@triton.jit
def self_adjusted_weights(z, r, P: tl.constexpr, FAST: tl.constexpr):
    """Softmax times the logit. P = 2: softmax times the distance from the smallest logit."""
    p = tl.exp2(z - r)
    x = z * LN2
    if P == 2:
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    return p * x, p


@triton.jit
def self_adjusted_slopes(z, r, P: tl.constexpr, FAST: tl.constexpr):
    a, p = self_adjusted_weights(z, r, P, FAST)
    return a, a + p, p


@triton.jit
def no_rule(z, t, p, FAST: tl.constexpr):
    return z, 1.0


@triton.jit
def distance_rule(z, t, p, FAST: tl.constexpr):
    """a_t z + m_t and a_t, with a_t = sqrt(2 log(1 + t p) + 1), m_t = -2 log(1 + t p), p = 1 / tau."""
    bits = log2(1.0 + t * p, FAST)
    slope = tl.sqrt(bits * (2.0 * LN2) + 1.0)
    return slope * z - 2.0 * bits, slope


@triton.jit
def linear_rule(z, t, p, FAST: tl.constexpr):
    """z - p t and 1: a penalty on the distance."""
    return z - t * (p * LOG2E), 1.0


class Reference(IntEnum):
    """How a scaled map computes r from the largest logit m of its row."""

    NONE = 0  # not scaled
    LARGEST = 1  # m
    AT_LEAST_ZERO = 2  # max(m, 0), for maps that compare with e^0
    AT_MOST_ZERO = 3  # min(m, 0), for maps that are exponential below 0 and linear above


# The same for the kernels.
NO_REFERENCE = tl.constexpr(int(Reference.NONE))
AT_LEAST_ZERO = tl.constexpr(int(Reference.AT_LEAST_ZERO))
AT_MOST_ZERO = tl.constexpr(int(Reference.AT_MOST_ZERO))


class TileMap(NamedTuple):
    weights: Any
    slopes: Any
    reference: Reference
    normalised: bool  # divided by the sum of b
    lift: float = 1.0  # float16 loses digits below 6e-5; weights above 65,504 / lift overflow there


MAPS: dict[str, TileMap] = {
    "softmax": TileMap(softmax_weights, softmax_slopes, Reference.LARGEST, normalised=True, lift=1024.0),
    "softpick": TileMap(softpick_weights, softpick_slopes, Reference.AT_LEAST_ZERO, normalised=True, lift=1024.0),
    "softplus": TileMap(softplus_weights, softplus_slopes, Reference.AT_MOST_ZERO, normalised=True),
    "elu+1": TileMap(elu1_weights, elu1_slopes, Reference.AT_MOST_ZERO, normalised=True),
    "self_adjusted": TileMap(
        self_adjusted_weights, self_adjusted_slopes, Reference.LARGEST, normalised=True, lift=16.0
    ),
    "polynomial": TileMap(polynomial_weights, polynomial_slopes, Reference.NONE, normalised=True),
    "sigmoid": TileMap(sigmoid_weights, sigmoid_slopes, Reference.NONE, normalised=False, lift=1024.0),
    "exp": TileMap(exp_weights, exp_slopes, Reference.NONE, normalised=False),
    "relu": TileMap(relu_weights, relu_slopes, Reference.NONE, normalised=False, lift=32.0),
    "power": TileMap(polynomial_weights, polynomial_slopes, Reference.NONE, normalised=False),
}

RULES: dict[str, Any] = {"none": no_rule, "distance": distance_rule, "linear": linear_rule}
