"""References of the Triton code that finds the largest eigenvalue of diag(u) - u u^T / sum u from sums over a row.

The kernels start from the root for the moments of a row (`kernels/row_tiles.py`), and improve it with the sums of poles
that one more pass over the keys gives (`kernels/statistics_from_sums.py`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from attnorm.theory.rank_one_eigenvalues import rational_step

MOMENT_PASSES = 3  # the error of the moments themselves is larger from then on
_TINY = 1e-300


def improved_root(first: Tensor, second: Tensor, x: Tensor, poles: Tensor, squares: Tensor, at_zero: Tensor) -> Tensor:
    """One pass of rank_one_root for a caller that has sum q and sum q^2 over all entries but the first.

    q = u_j / (x - u_j). The first entry is the largest; at_zero is 0 where there is no sink.
    """
    d = x - second
    value = poles + at_zero / x
    d = rational_step(first, first - second, d, value, d / x * (value + squares))
    better = (second < first) & (d > 0)  # no step: the two largest are equal, or there is nothing else
    return torch.where(better, second + d, x)


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
        d = rational_step(first, width, d, value, slope)
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
