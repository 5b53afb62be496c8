"""Statistics of rows of weights from the sums of map_sums.py and threshold_sums.py: each row by one thread.

The formulas are those of `weight_rows` in metrics/row_statistics.py and of metrics/rows.py, in float64.
"""

import triton
import triton.language as tl

from attnorm.kernels import softmax_statistics
from attnorm.kernels.blocks import load_row
from attnorm.kernels.maps import LN2
from attnorm.kernels.one_pass import reference_of
from attnorm.kernels.softmax_statistics import store_numbers
from attnorm.kernels.threshold_tiles import above_threshold

# The columns of the results, NaN where a row has no such number.
NUMBERS = (
    "max_logit",
    "min_logit",
    "entropy_nats",
    "effective_keys",
    "max_weight",
    "sink_mass",
    "row_sum",
    "jacobian_norm",
)
MORE_NUMBERS = softmax_statistics.MORE_NUMBERS[:8]  # the others are of softmax alone


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
def weight_statistics(sums, out, more, count, broken, total, MORE: tl.constexpr, BLOCK: tl.constexpr):
    """All statistics of BLOCK rows.

    sums: (columns, B, H, R). out: (NUMBERS, B, H, R); more: (MORE_NUMBERS, ...) if MORE. count, broken: (B, H, R).
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
    missing = (n < 1) | (sound == 0)
    tl.store(count + at, n.to(tl.int64), mask=inside)
    tl.store(broken + at, ((sound == 0) & (n > 0)).to(tl.uint8), mask=inside)
    winner = tl.maximum(sink, top)
    store_numbers(
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
        store_numbers(
            more, at, inside, total, missing,
            (
                max_logit - min_logit, _only(one == 0, largest - smallest),
                _only(has_any & (one == 0), entropy / log_n), _only(has_rest & (two == 0), entropy_rest / log_rest),
                _only(has_any & (one == 0), gap), _only(has_rest & (two == 0), gap_rest),
                _only(has_rest, 1.0 / squares_rest), _only(has_rest, 1.0 / (1.0 + others)),
            ),
        )  # fmt: skip


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
        if REFERENCE == 0:
            reference = reference * 0.0
        p, _b = WEIGHTS((z + moved) / LN2, reference, P, FAST)
    tl.store(out + at, p, mask=inside)
