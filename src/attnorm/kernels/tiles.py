"""Device functions for the logits of a tile of queries and keys: softcap, factor, shift, rule and cutoff."""

from collections import namedtuple
from typing import Any, NamedTuple

import triton
import triton.language as tl

from attnorm.kernels.blocks import load_row, load_tile
from attnorm.kernels.maps import LOG2E


@triton.jit
def capped(s, cap, CAPPED: tl.constexpr):
    """Return cap tanh(s / cap) and its slope, for s and cap in bits."""
    slope = 1.0
    if CAPPED:
        x = s / cap
        square = x * x
        series = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0))))
        e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
        size = (1.0 - e) / (1.0 + e)
        tanh = tl.where(square < 0.01, series, tl.where(s < 0, -size, size))  # 1 - e has few digits near 0
        s = cap * tanh
        slope = 1.0 - tanh * tanh
    return s, slope


class LogitRows(NamedTuple):
    """Numbers of each row of a block, or pointers to those of all rows."""

    factor: Any  # multiplies the logits
    shift: Any  # is added, in bits
    cutoff: Any  # logits below it are hidden


# Compile-time constants of a map and of the logits before it.
MapConstants = namedtuple(
    "MapConstants",
    "MAP SLOPES RULE P FAST REFERENCE NORMALISED RULED CAPPED FACTORED SHIFTED SELECTED PLAIN LIFT",
)


@triton.jit
def logit_rows(pointers, at, inside, M: tl.constexpr):
    factor = load_row(pointers.factor, at, inside, M.FACTORED, 1.0)
    shift = load_row(pointers.shift, at, inside, M.SHIFTED, 0.0) * LOG2E
    return LogitRows(factor, shift, load_row(pointers.cutoff, at, inside, M.SELECTED, float("-inf")))


@triton.jit
def factored(dot, s, factor, scale, CAPPED: tl.constexpr, FACTORED: tl.constexpr):
    """Return factor * s for the capped logits s of products; without a cap, one multiplication per logit."""
    if FACTORED and not CAPPED:
        return dot * (factor * scale)
    if FACTORED:
        return s * factor
    return s


@triton.jit
def logits(dot, i, j, offset, row, scale, cap, parameter, M: tl.constexpr, AXIS: tl.constexpr):
    """Return z of products in bits, the capped logits before it, and the slopes of cap and rule.

    AXIS: dimension of the keys.
    """
    s, cap_slope = capped(dot * scale, cap, M.CAPPED)
    z = factored(dot, s, tl.expand_dims(row.factor, AXIS), scale, M.CAPPED, M.FACTORED)
    if M.SHIFTED:
        z = z + tl.expand_dims(row.shift, AXIS)
    rule_slope = 1.0
    if M.RULED:
        z, rule_slope = M.RULE(z, tl.abs((i + offset - j).to(tl.float32)), parameter, M.FAST)
    return z, s, cap_slope, rule_slope


@triton.jit
def plain_logits(
    q_tile, k, columns, factor, scale, cap,
    CAPPED: tl.constexpr, FACTORED: tl.constexpr, C: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """Return z in bits for a tile of keys, without shift and rule."""
    k_tile = load_tile(k, columns, C.WIDTH, EDGE, C.FULL)
    dot = tl.dot(q_tile, tl.trans(k_tile), input_precision=C.PRECISION)
    s, _slope = capped(dot * scale, cap, CAPPED)
    return factored(dot, s, factor[:, None], scale, CAPPED, FACTORED)


@triton.jit
def selected(z, cutoff):
    """Return the logits, -inf for those below the cutoff: softmax gives them weight 0 and slope 0."""
    return tl.where(z < cutoff, float("-inf"), z)
