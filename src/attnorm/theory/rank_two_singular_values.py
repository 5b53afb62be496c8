"""Largest singular values of diagonal matrices with a correction of rank two, in O(L) per row.

F/sum F has the Jacobian (I - a 1^T) diag(F') / sum F. Its squared norm is the root of a secular equation, which the
solver approaches from above (proof in docs/theory/gradient.md), so it needs no bracket. The Jacobian of softpick has a
correction of rank two as well; its solver keeps a bracket. Rows are solved together, and each pass reads every row
once.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from attnorm.engines.execution import runs_asynchronously
from attnorm.theory.rank_one_eigenvalues import ENOUGH_FLOAT32, ENOUGH_FLOAT64, in_blocks, sum_of_squares

# The rank-two solver converges quadratically, or by halves while two eigenvalues look like one.
MAX_PASSES = 100
# Softpick: largest relative error after 0, 1, 2 passes over 4,000 adversarial rows in float32: 1.2e-2, 2e-4, 3e-6.
PICK_PASSES_FLOAT32 = 2
PICK_PASSES_FLOAT64 = 5
PICK_STEPS = 16  # evaluations of the model of a row, from which the next pass starts; in float64 twice as many
PICK_BLOCK = 1 << 20  # with smaller blocks, half of the time is in these steps
_LARGEST_EXPONENT = 700.0
_LOG2 = 0.6931471805599453
_TINY = 1e-300


def rank_two_singular_value(
    weights: Float[Tensor, "*rows L"], slopes: Float[Tensor, "*rows L"]
) -> Float[Tensor, "*rows"]:
    """Largest singular value of (I - a 1^T) diag(f) for weights a that sum to 1 and any slopes f; no gradient.

    Hidden keys have a = f = 0. Relative error a few units in the last place, also for values far below max |f|.
    """
    return in_blocks(_rank_two, weights.detach(), slopes.detach())


def _rank_two(a: Tensor, f: Tensor) -> Tensor:
    """The squared singular value x is approached from above by Newton's method on a function whose zeros are simple."""
    scale = f.abs().amax(-1, keepdim=True)
    e = (f / torch.where(scale > 0, scale, 1.0)).square()
    e1, top = e.max(-1, keepdim=True)
    a1 = a.gather(-1, top)
    others = torch.ones_like(a, dtype=torch.bool).scatter(-1, top, False)
    a, e = torch.where(others, a, 0.0), torch.where(others, e, 0.0)
    e2 = e.amax(-1, keepdim=True)
    A1, A2 = a.sum(-1, keepdim=True), a.square().sum(-1, keepdim=True)
    # Squared column norms: their maximum is below the squared singular value, their sum above.
    first_column = e1 * (A1.square() + A2)
    columns = e * (1 - 2 * a + a1.square() + A2)
    low = torch.maximum(torch.maximum(e2, first_column), columns.amax(-1, keepdim=True))
    keys = ((a != 0) | (e != 0)).sum(-1, keepdim=True) + 1
    high = torch.minimum(e1 * keys * (a1.square() + A2), first_column + columns.sum(-1, keepdim=True))
    x = torch.maximum(low, high)
    enough = 4 * torch.finfo(x.dtype).eps
    for _ in range(MAX_PASSES):
        step = _rank_two_step(x, a, e, a1, e1, e2, A1, A2)
        new = torch.maximum(x - torch.nan_to_num(step, nan=0.0, posinf=0.0, neginf=0.0).clamp(min=0), low)
        settled = bool((x - new <= enough * x).all())
        x = new
        if settled:
            break
    return (scale * x.sqrt()).squeeze(-1)


def _rank_two_step(
    x: Tensor, a: Tensor, e: Tensor, a1: Tensor, e1: Tensor, e2: Tensor, A1: Tensor, A2: Tensor
) -> Tensor:
    """Newton's step for (x - e_2) P(x) = 0, P = -prod (x - x_i) / prod_{j>=2} (x - e_j), x_i the eigenvalues but 0."""
    w = e / (x - e)
    aw, aaw = a * w, a.square() * w
    w0, w1, w2 = (term.sum(-1, keepdim=True) for term in (w, aw, aaw))
    # x times the derivatives of w0, w1, w2
    w0_, w1_, w2_ = (-(s + (t * w).sum(-1, keepdim=True)) for s, t in ((w0, w), (w1, aw), (w2, aaw)))
    k, k_ = 1 - e1 / x, e1 / x
    B, E = A1 + w1, A2 + w2
    D = a1.square() + k * E
    P = (w0 - 1) * D + E - 2 * a1 * B - k * B.square()
    P_ = w0_ * D + (w0 - 1) * (k_ * E + k * w2_) + w2_ - 2 * a1 * w1_ - k_ * B.square() - 2 * k * B * w1_
    return x * P * (x - e2) / (P_ * (x - e2) + P * x)


def softpick_singular_value(
    logits: Float[Tensor, "*rows L"], log_floor: Float[Tensor, "*#rows 1"]
) -> Float[Tensor, "*rows"]:
    """Largest singular value of the Jacobian of [e^z - 1]_+ / (sum |e^z - 1| + floor) at these logits; no gradient.

    A hidden key has the logit 0, which is without effect. The norm of a row without a positive logit is 0. Relative
    error at most 1e-5 in float32 and 1e-8 in float64 (found: 3e-6 and 4e-11).
    """
    log_floor = log_floor.detach().expand(*logits.shape[:-1], 1)
    return in_blocks(_softpick, logits.detach(), log_floor, block=PICK_BLOCK)


class _PickRow(NamedTuple):
    """Numbers of each row, (rows, 1) in float64, with slopes in units of the second: docs/theory/gradient.md."""

    near: Tensor  # slope of the first key, at most 2
    inverse: Tensor  # of its square, without that limit
    g1: Tensor  # slope of the first key, not in units
    g2: Tensor  # the unit
    u1: Tensor
    u2: Tensor
    shift: Tensor  # lambda: u = w - lambda e
    own: Tensor  # sum of e over the negative keys and the positive ones but the first two
    base: Tensor  # rest - lambda * (sum of e over the negative keys) + sum of u
    squares: Tensor  # sum of e over all keys but the first


def _softpick(z: Tensor, log_floor: Tensor) -> Tensor:
    """The first two keys exactly, the others by a matrix of poles that each pass improves."""
    dtype = z.dtype
    z1, first = z.max(-1, keepdim=True)
    z = z.scatter(-1, first, 0.0)
    z2, second = z.max(-1, keepdim=True)
    z.scatter_(-1, second, 0.0)
    unit = z2.clamp(min=0)
    y, share, negative = torch.exp(z - unit), torch.expm1(-z.abs()).neg_(), z < 0
    outside = sum_of_squares(torch.where(negative, y, 0.0)).double()
    below = _total(torch.where(negative, share, 0.0))
    y = torch.where(z > 0, y, 0.0)
    z1, unit = z1.double(), unit.double()
    rest = below * torch.exp(-unit) + torch.exp((log_floor.double() - unit).clamp(max=_LARGEST_EXPONENT / 2))
    shift = _pick_shift(z1, unit)
    e, gap = y.square(), (1 - y) * (1 + y)
    u = torch.addcmul(y.mul_(share), e, shift.to(dtype), value=-1)
    products = (e * e, e * u, u * u)
    sums = [_total(product) for product in products]
    row, low, high = _pick_row(z1, unit, rest, outside, _total(e), _total(u), sums)
    poles = _matrix_of_poles(sums, [_total(product * e) for product in products], None, dtype)
    alone, d = low, _pick_root(poles, row, low, high, dtype)
    passes, enough = (
        (PICK_PASSES_FLOAT64, ENOUGH_FLOAT64) if dtype == torch.float64 else (PICK_PASSES_FLOAT32, ENOUGH_FLOAT32)
    )
    for _ in range(passes):
        at = d.to(dtype)
        d = at.double()
        inverse = torch.add(gap, at).reciprocal_()
        terms = [product * inverse for product in products]
        sums = [_total(term) for term in terms]
        above = _pick_secular(d, row, *sums) > 0
        low, high = torch.where(above, low, d), torch.where(above, d, high)
        slopes = [_total(term.mul_(inverse)) for term in terms]
        poles = _matrix_of_poles(sums, slopes, d, dtype)
        before, d = d, _pick_root(poles, row, low, high, dtype)
        if not runs_asynchronously(d) and not bool(((d - before).abs() > enough * (1 + d)).any()):
            break
    x = torch.where(unit > 0, 1 + d, alone)
    return torch.where(z1 > 0, row.g2 * x.sqrt(), 0.0 * z1).squeeze(-1).to(dtype)


def _total(terms: Tensor) -> Tensor:
    return terms.sum(-1, keepdim=True).double()


def _pick_shift(z1: Tensor, z2: Tensor) -> Tensor:
    """lambda: the second key has u = 0 where the two largest slopes are close, so that no pole cancels another."""
    return torch.where(z1 - z2 < _LOG2, -torch.expm1(-z2), 0.0)


def _pick_row(
    z1: Tensor, z2: Tensor, rest: Tensor, outside: Tensor, e: Tensor, u: Tensor, squares: Sequence[Tensor]
) -> tuple[_PickRow, Tensor, Tensor]:
    """The numbers of a row, and a lower and an upper bound of d = x - 1 (of x if there is no second key: z2 = 0)."""
    shift = _pick_shift(z1, z2)
    has_second = (z2 > 0).double()
    y1 = torch.exp((z1 - z2).clamp(min=0, max=_LARGEST_EXPONENT))
    share1, w2 = -torch.expm1(-z1), -torch.expm1(-z2)
    others = rest + w2 + (u + shift * e)
    total = y1 * share1 + others
    g1, g2, w1 = y1 / total, 1 / total, y1 / total * share1
    own = e + outside
    near = y1.clamp(max=2)
    row = _PickRow(
        near=near, inverse=1 / y1.square(), g1=g1, g2=g2, u1=w1 - shift * g1 * near, u2=w2 - shift, shift=shift,
        own=own, base=rest - shift * outside + u, squares=has_second + own,
    )  # fmt: skip
    first = (g1 * others).square() + w1.square() * row.squares
    second = has_second * ((1 - g2 * w2).square() + (g2 * w2).square() * own + (g1 * w2).square())
    ww = squares[2] + shift * (2 * squares[1] + shift * squares[0])
    trace = first + second + e + ww * (g2.square() * row.squares + g1.square())
    low = torch.maximum(first, second) - has_second
    return row, low, torch.maximum(trace - has_second, low)


def _pick_secular(d: Tensor, row: _PickRow, ee: Tensor, eu: Tensor, uu: Tensor) -> Tensor:
    """The secular function at x = 1 + d times d, positive above the largest root and negative, or made so, below it.

    ee, eu, uu: the sums of e^2, e u and u^2, each over x - e, of the positive keys but the first two.
    """
    x = 1 + d
    A = row.own + ee + x / d
    B = row.base + eu + x * row.u2 / d
    C = uu + row.u2.square() / d + row.shift.square() * row.squares
    constant = row.shift * (row.shift * row.g1.square() - 2 * row.g2)
    e1, g1 = row.near.square(), row.g1.square()
    value = (
        (x * row.g2.square() - g1) * (B.square() - A * C) - x * g1 * C - ((x - e1) * A + x * e1) * constant
        + row.u1 * (2 * x * row.g2 * B + row.u1 * (x - A))
    )  # fmt: skip
    below = A * (1 - x * row.inverse) >= x  # two roots are larger: the value is positive again
    return torch.where(below, -value.abs(), value) * d


class _Poles(NamedTuple):
    """A 2x2 matrix of poles with the same sums and slopes as those of the keys, in the basis e, u - tilt e."""

    tilt: Tensor
    weights: tuple[Tensor, Tensor]
    matrix: tuple[Tensor, Tensor, Tensor]
    at: Tensor | None  # d; None: infinity

    def sums(self, d: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The sums of e^2, e u and u^2, each over x - e, at x = 1 + d."""
        k11, k12, k22 = self.matrix
        if self.at is None:
            a11, a12, a22 = 1 + d - k11, -k12, 1 + d - k22
        else:
            move = d - self.at
            a11, a12, a22 = 1 + move * k11, move * k12, 1 + move * k22
        determinant = (a11 * a22 - a12.square()).clamp(min=_TINY)
        n1, n2 = self.weights
        ee, pp = n1 * a22 / determinant, n2 * a11 / determinant
        ep = -n1.sqrt() * n2.sqrt() * a12 / determinant
        eu = ep + self.tilt * ee
        return ee, eu, pp + self.tilt * (ep + eu)


def _matrix_of_poles(sums: Sequence[Tensor], slopes: Sequence[Tensor], at: Tensor | None, dtype: torch.dtype) -> _Poles:
    """The matrix N (N + (x - x') S)^-1 N with the sums N and the slopes S at x'; of moments, M (x M - M')^-1 M."""
    ee, eu, uu = sums
    zero = torch.zeros_like(ee)  # limits of the eigenvalues of S relative to N, which rounding must not leave
    lowest, highest = (zero, zero + 1) if at is None else (1 / (1 + at), 1 / at)
    some = ee > 0
    safe = torch.where(some, ee, 1.0)
    tilt = torch.where(some, eu / safe, 0.0)
    left = uu - tilt * eu
    two = some & (left > 8 * torch.finfo(dtype).eps * uu)  # else u is a multiple of e, up to rounding
    left = torch.where(two, left, 0.0)
    safe_left = torch.where(two, left, 1.0)
    see, seu, suu = slopes
    k11 = torch.where(some, see / safe, lowest).clamp(lowest, highest)
    k22 = torch.where(two, (suu - tilt * (2 * seu - tilt * see)) / safe_left, lowest).clamp(lowest, highest)
    k12 = torch.where(two, (seu - tilt * see) / (safe.sqrt() * safe_left.sqrt()), 0.0)
    limit = torch.minimum((highest - k11) * (highest - k22), (k11 - lowest) * (k22 - lowest)).sqrt()
    return _Poles(tilt, (torch.where(some, ee, 0.0), left), (k11, k12.clamp(-limit, limit), k22), at)


def _pick_root(poles: _Poles, row: _PickRow, low: Tensor, high: Tensor, dtype: torch.dtype) -> Tensor:
    """The root of the secular function between two d, the sums over poles being those of the model."""
    a, b = (limit.clamp(min=torch.finfo(dtype).eps / 4) for limit in (low, high))  # less does not show in 1 + d
    lowest, d = a, b
    at_a, at_b = (_pick_secular(limit, row, *poles.sums(limit)) for limit in (a, b))
    found = at_a >= 0
    before = torch.zeros_like(found)
    for step in range(PICK_STEPS if dtype != torch.float64 else 2 * PICK_STEPS):
        weight = (at_a / (at_a - at_b)).nan_to_num(0.5, 0.5, 0.5).clamp(0, 1)
        last, d = d, (a * b).sqrt() if step % 4 == 1 else a + weight * (b - a)
        value = _pick_secular(d, row, *poles.sums(d))
        above = value > 0
        a, b = torch.where(above, a, d), torch.where(above, d, b)
        # Illinois: an end that stays twice counts half, so that both move.
        half = torch.where((above == before) & (step > 0), 0.5, 1.0)
        at_a, at_b = torch.where(above, half * at_a, value), torch.where(above, value, half * at_b)
        before = above
        if not runs_asynchronously(d) and not bool(((d - last).abs() > torch.finfo(dtype).eps * (1 + d)).any()):
            break
    return torch.where(found, lowest, d)
