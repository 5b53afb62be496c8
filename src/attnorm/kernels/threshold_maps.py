"""The threshold maps of the Triton kernels: a few device functions and one row of the table MAPS for each.

A weight p(x) depends on how far a logit lies above the threshold t of its row, and t makes the row sum to 1. With s the
logit in the map's unit and y = s - (largest s of the row):

    x = [y - t]_+, or [1 + a (y - t)]_+ for a deformed map
    weights(x, a)              -> p and u: dp/dt = -decline * u, and the gradient of p by its logit is slope * u
    newton(P, U, C, a, early)  -> P - 1, and the step of t. P and U are the sums of p and u, C counts the weights
    start(a)                   -> a threshold at or below the solution

a is the parameter of each row: the knee of kneemax, alpha - 1 of entmax. FAST allows approximate instructions.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl


@triton.jit
def positive(x):
    """max(x, 0), and NaN where x is NaN."""
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _minus_one(a):
    return a * 0.0 - 1.0


@triton.jit
def sparsemax_weights(x, a, FAST: tl.constexpr):
    return x, tl.where(x == 0, 0.0, 1.0)


@triton.jit
def convex_newton(P, U, C, a, early):
    """Newton's step for a sum that is convex in t: from the left, it never passes the solution."""
    return P - 1.0, (P - 1.0) / tl.where(U > 0, U, 1.0)


@triton.jit
def entmax15_weights(x, a, FAST: tl.constexpr):
    return x * x, x


@triton.jit
def entmax15_newton(P, U, C, a, early):
    """Solve P - 2 U e + C e^2 = 1 for the step e. It is exact if no key loses its weight.

    Otherwise it may pass the solution; the next step returns to the left of it. Late steps are Newton's for the norm of
    x, which never passes the solution.
    """
    excess = P - 1.0
    root = tl.sqrt(tl.maximum(U * U - C * excess, 0.0))
    size = tl.where(U > 0, U, 1.0)
    step = excess / (size + root)
    careful = (P - tl.sqrt(P)) / size
    return excess, tl.where((excess > 0) & (early == 0), careful, step)


@triton.jit
def kneemax_start(a):
    """Return the threshold at which the key at the peak alone has the weight 1."""
    return -tl.where(a <= 1.0, 1.0 + a, 2.0 * tl.sqrt(a))


@triton.jit
def kneemax_weights(x, a, FAST: tl.constexpr):
    w = tl.minimum(x, 2.0 * a, propagate_nan=tl.PropagateNan.ALL)
    u = w * (0.5 / a)
    return u * (x - 0.5 * w), u


@triton.jit
def entmax_start(a):
    return a * 0.0


@triton.jit
def _power(x, exponent, FAST: tl.constexpr):
    """x^exponent for x >= 0. FAST: three approximate GPU instructions, which flush numbers below 1e-38 to 0."""
    if FAST:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1; mul.ftz.f32 $0, $0, $2; ex2.approx.ftz.f32 $0, $0;",
            "=&f,f,f", [x, exponent], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return tl.exp2(tl.log2(x) * exponent)


@triton.jit
def entmax_weights(x, a, FAST: tl.constexpr):
    """x^(1/a) and x^(1/a - 1)."""
    u = _power(x, (1.0 - a) / a, FAST)
    return u * x, u


@triton.jit
def entmax_newton(P, U, C, a, early):
    """Newton's step for (P^a - 1) / a, a norm of the x: convex and nearly linear."""
    shrunk = tl.exp2(-a * tl.log2(tl.where(P > 0, P, 1.0)))
    return P - 1.0, P * (1.0 - shrunk) / (a * tl.where(U > 0, U, 1.0))


class ThresholdMap(NamedTuple):
    """Device functions and constants of a map; the module docstring defines them."""

    weights: Any
    newton: Any
    start: Any
    unit: float = 1.0  # factor from logits to s
    decline: float = 1.0
    slope: float = 1.0
    deformed: bool = False
    counted: bool = False  # whether newton reads C
    parameter: bool = False  # whether a is read


MAPS: dict[str, ThresholdMap] = {
    "sparsemax": ThresholdMap(sparsemax_weights, convex_newton, _minus_one),
    "entmax15": ThresholdMap(entmax15_weights, entmax15_newton, _minus_one, unit=0.5, decline=2.0, counted=True),
    "entmax": ThresholdMap(entmax_weights, entmax_newton, entmax_start, deformed=True, parameter=True),
    "kneemax": ThresholdMap(kneemax_weights, convex_newton, kneemax_start, unit=0.5, slope=0.5, parameter=True),
}
