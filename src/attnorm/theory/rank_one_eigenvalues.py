"""Largest eigenvalues of diagonal matrices with a correction of rank one or two, in O(L) per row.

Threshold maps (softmax, entmax, sparsemax, ...) have the Jacobian diag(u) - u u^T / sum u, and F/sum F has
(I - a 1^T) diag(F') / sum F. Their norms are roots of a secular equation: a sum of simple poles, one per key. Both
solvers approach the root from one side only (proofs in docs/theory/gradient.md), so they need no bracket. Rows are
solved together, and each pass reads every row once.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from attnorm.engines.execution import runs_asynchronously

# Largest relative error after 0, 1, 2, 3, 4 passes over 200,000 adversarial rows: 8e-2, 1e-3, 3e-7, 2e-14, 7e-16.
PASSES_FLOAT32 = 3
PASSES_FLOAT64 = 4
# Each pass squares the relative error, times less than 10: after a step as small as this no other is needed.
ENOUGH_FLOAT32 = 3e-4
ENOUGH_FLOAT64 = 2e-8
# The rank-two solver converges quadratically, or by halves while two eigenvalues look like one.
MAX_PASSES = 100
MOMENT_PASSES = 3  # the error of the moments themselves is larger from then on
_TINY = 1e-300
# Rows are taken in blocks of about this many numbers, so that temporaries stay in the cache.
BLOCK = 1 << 18
GPU_BLOCK = 1 << 25


def rank_one_eigenvalue(
    u: Float[Tensor, "*rows L"], at_zero: Float[Tensor, "*rows 1"] | None = None
) -> Float[Tensor, "*rows"]:
    """Largest eigenvalue of diag(u) - u u^T / sum u for u >= 0: the root of sum_j u_j / (u_j - x) = 0 below max u.

    0 for a row with fewer than two positive entries; the largest entry itself where it occurs twice. Relative error
    a few units in the last place. Differentiable in u where the eigenvalue is simple. at_zero: see rank_one_root.
    """
    value = _in_blocks(_rank_one, u.detach(), *(() if at_zero is None else (at_zero.detach(),)))
    if not (torch.is_grad_enabled() and u.requires_grad):
        return value
    # The Rayleigh quotient at the eigenvector has the same value and, to first order, the same derivative.
    v = _rank_one_eigenvector(u.detach(), value.unsqueeze(-1))
    total = u.sum(-1) if at_zero is None else u.sum(-1) + at_zero.squeeze(-1)
    mean = (u * v).sum(-1) / total.clamp(min=torch.finfo(u.dtype).tiny)
    return (u * v.square()).sum(-1) - total * mean.square()


def _rank_one(u: Tensor, at_zero: Tensor | None = None) -> Tensor:
    first, largest_index = u.max(-1, keepdim=True)
    rest = u.scatter(-1, largest_index, 0.0)
    return rank_one_root(first, rest.amax(-1, keepdim=True), rest, at_zero).squeeze(-1)


def rank_one_root(
    first: Tensor,
    second: Tensor,
    rest: Tensor,
    at_zero: Tensor | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    """The eigenvalue (rows, 1) from the largest entry, the second largest, and the rows (rows, L) with 0 for the first.

    With at_zero = s it is that of diag(u) - u u^T / (s + sum u): a sink takes the mass s of each row and is no row of
    the matrix. The first three may be of higher precision than the rows.
    `scratch`: an array like the rows to work in.

        u_1 / (u_1 - u_2 - d) = s / (u_2 + d) + sum_{j >= 2} u_j / (d + u_2 - u_j),   u_1, u_2 the largest, x = u_2 + d

    The right side is replaced by A + B/d with its value and derivative at the current d; the quadratic that remains has
    one positive root. A tangent in 1/d lies above the sum, so from the first pass on d falls monotonically to the root.
    """
    dtype = rest.dtype
    terms = torch.empty_like(rest) if scratch is None else scratch
    # A d below the rounding of u_2 does not show in x; a pole must not be hit for that.
    above_pole = second * (1 + 2 * torch.finfo(dtype).eps)
    width = first - second
    total = rest.sum(-1, keepdim=True).to(first.dtype)
    total = total if at_zero is None else total + at_zero
    # Start: all but the largest entry lumped at their mean, and not below the solution for the two largest alone.
    center = _sum_of_squares(rest).to(first.dtype) / total
    d = (total * width - first * (second - center)) / (first + total)
    d = torch.maximum(d, second * (width / (first + second)))
    passes, enough = (PASSES_FLOAT64, ENOUGH_FLOAT64) if dtype == torch.float64 else (PASSES_FLOAT32, ENOUGH_FLOAT32)
    for _ in range(passes):
        x = second + d
        torch.div(rest, torch.sub(torch.maximum(x, above_pole).to(dtype), rest, out=terms), out=terms)
        value = terms.sum(-1, keepdim=True).to(first.dtype)
        value = value if at_zero is None else value + at_zero / x
        # sum u_j/(x - u_j)^2 = (sum q + sum q^2)/x with q = u_j/(x - u_j); a sink has the pole x = 0 and no q^2
        slope = d / x * (value + _sum_of_squares(terms).to(first.dtype))
        before, d = d, _rational_step(first, width, d, value, slope)
        # NaN: the two largest are equal.
        if not runs_asynchronously(d) and not bool(((d - before).abs() > enough * x).any()):
            break
    value = torch.where(second < first, second + d, first)
    return torch.where((second if at_zero is None else second + at_zero) > 0, value, 0.0)


def improved_root(first: Tensor, second: Tensor, x: Tensor, poles: Tensor, squares: Tensor, at_zero: Tensor) -> Tensor:
    """One pass of rank_one_root by whoever sums the poles: sum q and sum q^2 over all entries but the first.

    q = u_j / (x - u_j). The first entry is the largest; at_zero is 0 where there is no sink.
    """
    d = x - second
    value = poles + at_zero / x
    d = _rational_step(first, first - second, d, value, d / x * (value + squares))
    better = (second < first) & (d > 0)  # no step: the two largest are equal, or there is nothing else
    return torch.where(better, second + d, x)


def _rational_step(first: Tensor, width: Tensor, d: Tensor, value: Tensor, slope: Tensor) -> Tensor:
    """The d at which first / (width - d) = A + B/d, where A + B/d has the value at d and -slope/d as its derivative."""
    A = (value - slope).clamp(min=0)
    B = d * slope
    b = torch.addcmul(B + first, A, width, value=-1)
    twice = 2 * B * width
    q = b.abs() + torch.addcmul(b.square(), A, twice, value=2).sqrt()
    return torch.where(b >= 0, twice / q, q / (2 * A))


def _sum_of_squares(rows: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    return norm.square()


def _rank_one_eigenvector(u: Tensor, value: Tensor) -> Tensor:
    """Unit eigenvectors u_j / (u_j - x); the difference of the two tied entries where the largest occurs twice.

    Zero where the value is zero: there the eigenvalue is not differentiable.
    """
    top = u.topk(min(2, u.shape[-1]), dim=-1)
    tied = top.values[..., -1:] == top.values[..., :1]
    difference = torch.zeros_like(u).scatter(-1, top.indices[..., :1], 1.0)
    if u.shape[-1] > 1:
        difference = difference.scatter(-1, top.indices[..., 1:], -1.0)
    v = torch.where(tied, difference, u / torch.where(u == value, torch.finfo(u.dtype).eps * value, u - value))
    v = torch.where(value > 0, v, 0.0)
    return v / _sum_of_squares(v).sqrt().clamp(min=torch.finfo(u.dtype).tiny)


def rank_two_singular_value(
    weights: Float[Tensor, "*rows L"], slopes: Float[Tensor, "*rows L"]
) -> Float[Tensor, "*rows"]:
    """Largest singular value of (I - a 1^T) diag(f) for weights a that sum to 1 and any slopes f; no gradient.

    Hidden keys have a = f = 0. Relative error a few units in the last place, also for values far below max |f|.
    """
    return _in_blocks(_rank_two, weights.detach(), slopes.detach())


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


def _in_blocks(solve: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """solve((rows, L), ...) -> (rows,) applied to a few rows at a time."""
    *leading, keys = tensors[0].shape
    flat = [tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors]
    if flat[0].numel() == 0:
        return tensors[0].new_zeros(leading)
    size = max(1, (GPU_BLOCK if runs_asynchronously(flat[0]) else BLOCK) // keys)
    parts = [solve(*blocks) for blocks in zip(*(tensor.split(size) for tensor in flat), strict=True)]
    return torch.cat(parts).reshape(leading)


def rank_one_root_of_moments(
    first: Tensor, second: Tensor, third: Tensor, moments: Sequence[Tensor], at_zero: Tensor | None = None
) -> Tensor:
    """rank_one_root from three entries of a row and the power sums of the others, which are no larger than the third.

    moments: sums of u, u^2, u^3 and u^4 of the others. Their sum of poles is replaced by Gauss's quadrature with two
    nodes, which has the same four moments. It lies below the sum, so the root lies at or below the exact one. All in
    float64. Largest relative error over adversarial rows: 3e-3.
    """
    # Moments with rounding errors may ask for a node above the second entry.
    nodes = [(third, third), *((torch.minimum(node, second), weight) for node, weight in _gauss_nodes(*moments))]
    if at_zero is not None:
        nodes.append((torch.zeros_like(at_zero), at_zero))
    width = first - second
    total = second + sum(weight for _, weight in nodes)
    center = (second.square() + sum(node * weight for node, weight in nodes)) / total.clamp(min=_TINY)
    d = (total * width - first * (second - center)) / (first + total).clamp(min=_TINY)
    d = torch.maximum(d, second * (width / (first + second).clamp(min=_TINY)))
    for _ in range(MOMENT_PASSES):
        x = second + d
        terms = [weight / (x - node).clamp(min=_TINY) for node, weight in nodes]
        value = second / d.clamp(min=_TINY) + sum(terms)
        slope = second / d.clamp(min=_TINY) + sum(
            d * term / (x - node).clamp(min=_TINY) for term, (node, _) in zip(terms, nodes, strict=True)
        )
        d = _rational_step(first, width, d, value, slope)
    value = torch.where(second < first, second + d, first)
    return torch.where((second if at_zero is None else second + at_zero) > 0, value, 0.0)


def _gauss_nodes(m0: Tensor, m1: Tensor, m2: Tensor, m3: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Two nodes and weights with these moments; one where they are those of a single node."""
    scale = torch.where(m0 > 0, m1 / m0.clamp(min=_TINY), 1.0).clamp(min=_TINY)  # the mean: nodes of order 1
    total = m0
    m1, m2, m3 = (
        torch.where(m0 > 0, moment / (m0 * scale**power).clamp(min=_TINY), 1.0)
        for power, moment in enumerate((m1, m2, m3), start=1)
    )
    spread = m2 - m1.square()
    single_node = spread <= 1e-6 * m2  # below the rounding of sums in float32
    spread = torch.where(single_node, 1.0, spread)
    a, b = (m3 - m1 * m2) / spread, (m1 * m3 - m2.square()) / spread
    half = (a.square() / 4 - b).clamp(min=0).sqrt()
    high, low = a / 2 + half, (a / 2 - half).clamp(min=0)
    share = torch.where(single_node, 1.0, (m1 - low) / (high - low).clamp(min=_TINY)).clamp(0, 1)
    high = torch.where(single_node, m1, high)
    return [(scale * high, total * share), (scale * low, total * (1 - share))]
