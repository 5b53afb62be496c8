"""Theorem 2 beyond the sphere: bounds on E[N_s]/N for vectors of any shape, from their first four moments.

The paper (Mudarisov et al. 2025, https://arxiv.org/abs/2508.17821) leaves this open. Nothing is assumed about the
vectors; what is random is which vector meets which weight. Either the n visible vectors of the row are assigned by a
uniform permutation ("permuted": the null of `separability_null`), or each weight draws its vector from them
independently ("independent": also the law of vectors that come from a distribution with these moments). In both
cases mean and variance of ||Y_i||^2 are known exactly, and Cantelli's inequality does the rest. Proofs:
docs/theory/geometry.md.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from attnorm.theory.dispersion import Bounds
from attnorm.theory.geometry import cantelli_bounds, without_each
from attnorm.theory.selection import SelectedRows


@dataclass(frozen=True)
class PopulationMoments:
    """Moments of n vectors x = m + z, m their mean, one number per row. Means are over the n vectors.

    On the sphere of radius M, uniformly: m = 0, variance = M^2, fourth = M^4, overlap = M^4/d, the rest 0.
    """

    n: Tensor
    mean_squared: Tensor
    """||m||^2"""
    variance: Tensor
    """mean of ||z||^2, the trace of the covariance C"""
    overlap: Tensor
    """tr C^2, the mean of (z.z')^2 over all ordered pairs; variance^2 / overlap is the effective rank"""
    fourth: Tensor
    """mean of ||z||^4"""
    along_mean: Tensor
    """m^T C m"""
    skew: Tensor
    """mean of (m.z) ||z||^2"""

    @property
    def effective_rank(self) -> Tensor:
        return self.variance**2 / self.overlap


def population_moments(rows: SelectedRows) -> PopulationMoments:
    """Moments of the visible vectors of each row, from inner products: O(L^2) numbers, whatever the number of rows."""
    seen = rows.visible.any(-2).to(rows.vectors.dtype).unsqueeze(-1)
    # Moments about any common centre give the same; near the mean the subtractions below lose no digits.
    centre = (seen * rows.vectors).sum(-2, keepdim=True) / seen.sum(-2, keepdim=True).clamp(min=1)
    x = rows.vectors - centre
    share = rows.visible.to(x.dtype) / rows.n.clamp(min=1).unsqueeze(-1)

    def mean(values: Tensor) -> Tensor:
        return (share * values).sum(-1)

    gram = x @ x.mT
    with_mean = share @ gram
    offset = mean(with_mean)
    squared = gram.diagonal(dim1=-2, dim2=-1).unsqueeze(-2) - 2 * with_mean + offset.unsqueeze(-1)
    along_centre = (centre @ x.mT).expand_as(with_mean)
    along = with_mean - offset.unsqueeze(-1) + along_centre - mean(along_centre).unsqueeze(-1)
    return PopulationMoments(
        n=rows.n,
        mean_squared=(share @ x + centre).square().sum(-1),
        variance=mean(squared),
        overlap=(mean(share @ gram**2) - 2 * mean(with_mean**2) + offset**2).clamp(min=0),
        fourth=mean(squared**2),
        along_mean=mean(along**2),
        skew=mean(along * squared),
    )


def independent_norm_moments(power_sums: tuple[Tensor, ...], moments: PopulationMoments) -> tuple[Tensor, Tensor]:
    """Mean and variance of ||sum_j a_j x_j||^2 for independent draws x_j; power_sums[p-1] = sum_j a_j^p, p = 1..4."""
    S1, S2, S3, S4 = power_sums
    m = moments
    mean = S1**2 * m.mean_squared + S2 * m.variance
    variance = (
        S4 * (m.fourth - m.variance**2)
        + 2 * (S2**2 - S4) * m.overlap
        + 4 * S1**2 * S2 * m.along_mean
        + 4 * S1 * S3 * m.skew
    )
    return mean, variance.clamp(min=0)


def permuted_norm_moments(power_sums: tuple[Tensor, ...], moments: PopulationMoments) -> tuple[Tensor, Tensor]:
    """Mean and variance of ||sum_j a_j x_j||^2 when the x_j are drawn from the n vectors without replacement."""
    S1, S2, S3, S4 = power_sums
    m = moments
    n = m.n
    # Sums over the population: T of ||z||^2, A of ||z||^4, F of (z.z')^2 over pairs, B of (m.z)||z||^2, W of (m.z)^2.
    T, A, F, B, W = n * m.variance, n * m.fourth, n**2 * m.overlap, n * m.skew, n * m.along_mean
    # Sums of products of weights of different keys, and the number of ways to draw 2, 3, 4 different vectors.
    a11, a22, a21, a31 = S1**2 - S2, S2**2 - S4, S1 * S2 - S3, S1 * S3 - S4
    a111 = S1**3 - 3 * S1 * S2 + 2 * S3
    a211 = S1**2 * S2 - S2**2 - 2 * S1 * S3 + 2 * S4
    a1111 = S1**4 - 6 * S1**2 * S2 + 3 * S2**2 + 8 * S1 * S3 - 6 * S4
    two = (n * (n - 1)).clamp(min=1)
    three = (two * (n - 2)).clamp(min=1)
    four = (three * (n - 3)).clamp(min=1)

    centred = S2 * T / n - a11 * T / two
    line = S2 * W / n - a11 * W / two
    cross = S3 * B / n - 3 * a21 * B / two + 2 * a111 * B / three
    square = (
        S4 * A / n
        + (a22 * (T**2 - A) + 2 * a22 * (F - A) - 4 * a31 * A) / two
        + a211 * (2 * (2 * A - T**2) + 4 * (2 * A - F)) / three
        + a1111 * (T**2 + 2 * F - 6 * A) / four
    )
    variance = 4 * S1**2 * line + 4 * S1 * cross + square - centred**2
    return S1**2 * m.mean_squared + centred, variance.clamp(min=0)


def anisotropic_bounds(
    rows: SelectedRows, radius: Tensor | float, draws: Literal["permuted", "independent"] = "permuted"
) -> Bounds:
    """Bounds on E[N_s]/N for a radius fixed in advance, the row's own vectors assigned at random to its weights."""
    if draws not in ("permuted", "independent"):
        raise ValueError(f"draws must be 'permuted' or 'independent', got {draws!r}")
    moments = population_moments(rows)
    each = PopulationMoments(**{name: value.unsqueeze(-1) for name, value in vars(moments).items()})
    power_sums = tuple(without_each(rows.chosen_weights**p)[0] for p in range(1, 5))
    norm_moments = permuted_norm_moments if draws == "permuted" else independent_norm_moments
    mean, variance = norm_moments(power_sums, each)
    lower, upper = cantelli_bounds(mean, variance, rows.row_value(radius).unsqueeze(-1))
    return Bounds(rows.per_row(lower.mean(-1)), rows.per_row(upper.mean(-1)))
