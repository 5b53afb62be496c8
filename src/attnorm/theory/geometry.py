"""Geometry: which selected keys lie in a ball around the context vector, how many of them chance would put there, and
how much of the context the sets of several heads cover together.

Section 2.2 and Theorem 2 of Mudarisov et al. 2025, https://arxiv.org/abs/2508.17821. N_s counts the i in I with
||y_i - s|| <= r. Since s - y_i = Y_i, the sum of the other selected y_j, it counts the i with ||Y_i|| <= r. Rows with
n <= N give NaN. Theorem 2 and the bounds here hold for a radius fixed in advance; with the paper's own radius, the
distance of the nearest key outside I, they are a heuristic: compare with `separability_null`. Proofs:
docs/theory/geometry.md.

Beyond the sphere, which the paper leaves open, nothing is assumed about the vectors; what is random is which vector
meets which weight. Either the n visible vectors of the row are assigned by a uniform permutation ("permuted": the null
of `separability_null`), or each weight draws its vector from them independently ("independent": also the law of vectors
that come from a distribution with these moments). In both cases mean and variance of ||Y_i||^2 are known exactly from
the first four moments, and Cantelli's inequality does the rest.

Discussion of the same paper: H heads that each cover a share p of the context should cover 1 - (1-p)^H together, so
three heads at p = 0.8 reach 99 %. That needs independent heads. Without it the union lies between the largest p and the
sum of the p, and both ends occur; so it is measured. Proofs: docs/theory/coverage.md.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from attnorm.engines.execution import runs_asynchronously
from attnorm.theory.dispersion import Bounds
from attnorm.theory.distance import MonteCarlo, monte_carlo
from attnorm.theory.isotropic_law import IsotropicLaw, isotropic_norm_cdf
from attnorm.theory.selection import SelectedRows, as_near_as_outsiders, select, top_n_set, visible_keys


def nearest_outsider(rows: SelectedRows) -> Tensor:
    """Return the paper's radius: min ||s - y_i|| over the visible keys outside I.

    That key is on the boundary of the closed ball.
    """
    return rows.per_row(torch.where(rows.outside, rows.distances, torch.inf).amin(-1))


def distinguishable(rows: SelectedRows, radius: Tensor | float | None = None) -> Tensor:
    """Return True at the selected keys with ||y_i - s|| <= r (definition 10; default r: `nearest_outsider`)."""
    return rows.per_key(_inside(rows, radius)[0])


def separability(rows: SelectedRows, radius: Tensor | float | None = None) -> Tensor:
    """Return N_s / N, the distinguishable share of the selected keys; NaN if a weight or vector is not finite."""
    inside, finite = _inside(rows, radius)
    return rows.per_row(inside.sum(-1, dtype=rows.weights.dtype) / rows.top_n, finite)


def _inside(rows: SelectedRows, radius: Tensor | float | None) -> tuple[Tensor, Tensor]:
    """True at the selected keys in the ball, and at the rows where that is known.

    Without a radius nothing is subtracted: on a sharp row, ||y_i - s|| of all light keys rounds to ||s||.
    """
    if radius is None:
        return as_near_as_outsiders(rows)
    distances = rows.distances
    finite = distances.masked_fill(~rows.visible, 0.0).sum(-1).isfinite()
    return rows.chosen & (distances <= _radius(rows, radius).unsqueeze(-1)), finite


def on_sphere(vectors: Float[Tensor, "*sets L d"], sphere_radius: float = 1.0) -> Float[Tensor, "*sets L d"]:
    """Scale the vectors to one length, as the paper does before its Fig. 3; zero vectors stay zero."""
    norms = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return vectors * (sphere_radius / torch.where(norms > 0, norms, 1.0))


def minimum_separation(
    vectors: Float[Tensor, "*sets L d"], mask: Bool[Tensor, "..."] | None = None
) -> Float[Tensor, "*sets"]:
    """Return delta of Assumption 2, the smallest distance of two vectors (infinite for fewer than two): O(L^2 d)."""
    visible = visible_keys(vectors[..., 0], mask)
    smallest = torch.full(visible.shape[:-1], torch.inf, dtype=vectors.dtype, device=vectors.device)
    length = vectors.shape[-2]
    for start in range(0, length, 1024):
        chunk = slice(start, start + 1024)
        distances = torch.cdist(vectors[..., chunk, :], vectors, compute_mode="donot_use_mm_for_euclid_dist")
        indices = torch.arange(length, device=vectors.device)
        pairs = visible[..., chunk, None] & visible[..., None, :] & (indices[chunk, None] != indices)
        smallest = torch.minimum(smallest, torch.where(pairs, distances, torch.inf).amin((-2, -1)))
    return smallest


def xi(rows: SelectedRows, sphere_radius: Tensor | float, separation: Tensor | float) -> Tensor:
    """Return xi_i of eq. 12 for the N selected keys, heaviest first: (..., N).

    ||Y_i|| <= xi_i for every choice of vectors of length M that lie at least delta apart, since then no inner product
    exceeds M^2 - delta^2/2; so xi_i is a worst case, not a typical size.
    """
    squares, _ = without_each(rows.chosen_weights.square())
    _, pairs = without_each(rows.chosen_weights)
    M2 = rows.row_value(sphere_radius).unsqueeze(-1) ** 2
    most = M2 - rows.row_value(separation).unsqueeze(-1) ** 2 / 2
    return rows.per_key((M2 * squares + 2 * most * pairs).clamp(min=0).sqrt())


def theorem2_printed(
    rows: SelectedRows, radius: Tensor | float, sphere_radius: Tensor | float, separation: Tensor | float
) -> Bounds:
    """Return Theorem 2's bounds of E[N_s]/N as printed; the upper one is false.

    1 - mean(xi)/r <= E[N_s]/N <= mean exp(-(r - xi)^2/(16 M^2)). The lower bound holds, but it is weak.
    """
    r, M = _radius(rows, radius).unsqueeze(-1), rows.row_value(sphere_radius).unsqueeze(-1)
    xi_per_key = xi(rows, sphere_radius, separation)
    xi_per_key = xi_per_key.unsqueeze(-2) if rows.one_row_per_set else xi_per_key
    upper = torch.exp(-((r - xi_per_key) ** 2) / (16 * M**2)).mean(-1)
    return Bounds(rows.per_row((1 - xi_per_key / r).mean(-1)), rows.per_row(upper))


def isotropic_moments(rows: SelectedRows, sphere_radius: Tensor | float) -> tuple[Tensor, Tensor]:
    """Mean M^2 S2 and variance (2/d) M^4 (S2^2 - S4) of ||Y_i||^2 for independent uniform directions: (..., Q, N).

    S2 and S4 are the sums of a_j^2 and a_j^4 over j in I, j != i.
    """
    squares, pairs = without_each(rows.chosen_weights.square())
    M2 = rows.row_value(sphere_radius).unsqueeze(-1) ** 2
    return M2 * squares, 4 * M2**2 * pairs / rows.vectors.shape[-1]


def theorem2_bounds(rows: SelectedRows, radius: Tensor | float, sphere_radius: Tensor | float) -> Bounds:
    """Return bounds of E[N_s]/N for independent uniform directions (Assumption 1) and a radius fixed in advance."""
    mean, variance = isotropic_moments(rows, sphere_radius)
    lower, upper = cantelli_bounds(mean, variance, _radius(rows, radius).unsqueeze(-1))
    return Bounds(rows.per_row(lower.mean(-1)), rows.per_row(upper.mean(-1)))


def cantelli_bounds(mean: Tensor, variance: Tensor, radius: Tensor) -> Bounds:
    """Return the best bounds of P(||Y|| <= r) that follow from mean m and variance v of ||Y||^2 alone.

    r^2 < m: P <= v/(v + (m - r^2)^2); r^2 > m: P >= 1 - min(v/(v + (r^2 - m)^2), m/r^2). Cantelli and Markov.
    """
    excess = radius**2 - mean
    scale = variance + excess**2
    cantelli = torch.where(scale > 0, variance / torch.where(scale > 0, scale, 1.0), 1.0)
    markov = mean / torch.where(radius > 0, radius, 1.0) ** 2
    lower = torch.where(excess > 0, 1 - torch.minimum(cantelli, markov), 0.0)
    return Bounds(lower, torch.where(excess < 0, cantelli, 1.0))


def theorem2_exact(
    rows: SelectedRows, radius: Tensor | float, sphere_radius: Tensor | float, tolerance: float = 1e-6
) -> IsotropicLaw:
    """Return E[N_s]/N under Assumption 1 for a radius fixed in advance: the mean of N exact laws for every row."""
    weights = rows.chosen_weights.detach().double().cpu().numpy()
    shape = weights.shape[:-1]
    radii, spheres = (
        torch.broadcast_to(rows.row_value(value), shape).detach().double().cpu().numpy()
        for value in (radius, sphere_radius)
    )
    probability, error = np.full(shape, np.nan), np.full(shape, np.nan)
    methods: set[str] = set()
    for row in map(tuple, rows.applies.nonzero().tolist()):
        coefficients = np.abs(weights[row]) * spheres[row]
        _, first, counts = np.unique(coefficients, return_index=True, return_counts=True)
        others = [np.delete(coefficients, i) for i in first]
        laws = [isotropic_norm_cdf(radii[row], other, rows.vectors.shape[-1], tolerance) for other in others]
        probability[row] = np.average([law.probability for law in laws], weights=counts)
        error[row] = np.average([law.error for law in laws], weights=counts)
        methods.update(law.method for law in laws)
    if rows.one_row_per_set:
        probability, error = probability.squeeze(-1), error.squeeze(-1)
    return IsotropicLaw(probability, error, tolerance, ", ".join(sorted(methods)))


def separability_null(
    rows: SelectedRows,
    draws: int = 200,
    kind: Literal["permuted", "isotropic"] = "permuted",
    radius: Tensor | float | None = None,
    generator: torch.Generator | None = None,
) -> MonteCarlo:
    """N_s/N when the weights are independent of the vectors, with a new radius in every draw unless one is given.

    "permuted" assigns each row's weights to its visible keys at random; "isotropic" gives every vector a uniform
    direction and keeps its length.
    """
    if kind not in ("permuted", "isotropic"):
        raise ValueError(f"kind must be 'permuted' or 'isotropic', got {kind!r}")
    redraw = _permuted if kind == "permuted" else _isotropic
    with torch.no_grad():
        return monte_carlo(lambda: separability(redraw(rows, generator), radius), draws)


def _permuted(rows: SelectedRows, generator: torch.Generator | None) -> SelectedRows:
    # Permuting the weights has the same law as permuting the vectors, which the rows share.
    scores = torch.rand(rows.weights.shape, generator=generator, dtype=torch.float64, device=rows.weights.device)
    in_order = torch.where(rows.visible, 0.0, 1.0).sort(dim=-1, stable=True).indices
    at_random = torch.where(rows.visible, scores, 2.0).argsort(dim=-1)
    target = torch.empty_like(in_order).scatter(-1, in_order, at_random)
    return replace(
        rows,
        weights=torch.zeros_like(rows.weights).scatter(-1, target, rows.weights),
        indices=target.gather(-1, rows.indices),
        log_weights=None if rows.log_weights is None else rows.log_weights.scatter(-1, target, rows.log_weights),
    )


def _isotropic(rows: SelectedRows, generator: torch.Generator | None) -> SelectedRows:
    normal = torch.randn(rows.vectors.shape, generator=generator, dtype=rows.vectors.dtype, device=rows.vectors.device)
    lengths = torch.linalg.vector_norm(rows.vectors, dim=-1, keepdim=True)
    return replace(rows, vectors=on_sphere(normal) * lengths)


def separability_example(top_n: int, *, separable: bool) -> SelectedRows:
    """Return unit vectors and equal weights with N_s/N = 1, or 0: the paper's "80 %" is no limit in either direction.

    The selected vectors are orthonormal. The one left out is orthogonal to them, or their mean direction.
    """
    if top_n < 2:
        raise ValueError(
            f"expected top_n of at least 2, got {top_n}: with one key, the context vector is the key itself and "
            "N_s/N = 1."
        )
    vectors = torch.eye(top_n + 1, dtype=torch.float64)
    if not separable:
        vectors[-1] = torch.ones(top_n + 1, dtype=torch.float64) / top_n**0.5
        vectors[-1, -1] = 0
    return select(torch.full((top_n + 1,), 1 / (top_n + 1), dtype=torch.float64), vectors, top_n)


def _radius(rows: SelectedRows, radius: Tensor | float) -> Tensor:
    value = rows.row_value(radius)
    if bool((value < 0).any()):
        raise ValueError(f"expected a radius of at least 0, got {float(value.min())}.")
    return value


def without_each(values: Tensor) -> tuple[Tensor, Tensor]:
    """For each i the sum of the others, and the sum of products of two others: only additions, so nothing cancels."""
    before, pairs_before = _sums_before(values)
    after, pairs_after = (total.flip(-1) for total in _sums_before(values.flip(-1)))
    return before + after, pairs_before + pairs_after + before * after


def _sums_before(values: Tensor) -> tuple[Tensor, Tensor]:
    """Sums, and sums over pairs of products, of the values that come before each."""
    sums = torch.nn.functional.pad(values, (1, 0))[..., :-1].cumsum(-1)
    return sums, torch.nn.functional.pad(values * sums, (1, 0))[..., :-1].cumsum(-1)


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
    seen_keys = rows.visible.any(-2).to(rows.vectors.dtype).unsqueeze(-1)
    # Moments about any common center give the same; near the mean the subtractions below lose no digits.
    center = (seen_keys * rows.vectors).sum(-2, keepdim=True) / seen_keys.sum(-2, keepdim=True).clamp(min=1)
    x = rows.vectors - center
    share = rows.visible.to(x.dtype) / rows.n.clamp(min=1).unsqueeze(-1)

    def mean(values: Tensor) -> Tensor:
        return (share * values).sum(-1)

    gram = x @ x.mT
    with_mean = share @ gram
    offset = mean(with_mean)
    squared = gram.diagonal(dim1=-2, dim2=-1).unsqueeze(-2) - 2 * with_mean + offset.unsqueeze(-1)
    along_center = (center @ x.mT).expand_as(with_mean)
    along = with_mean - offset.unsqueeze(-1) + along_center - mean(along_center).unsqueeze(-1)
    return PopulationMoments(
        n=rows.n,
        mean_squared=(share @ x + center).square().sum(-1),
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

    centered = S2 * T / n - a11 * T / two
    line = S2 * W / n - a11 * W / two
    cross = S3 * B / n - 3 * a21 * B / two + 2 * a111 * B / three
    square = (
        S4 * A / n
        + (a22 * (T**2 - A) + 2 * a22 * (F - A) - 4 * a31 * A) / two
        + a211 * (2 * (2 * A - T**2) + 4 * (2 * A - F)) / three
        + a1111 * (T**2 + 2 * F - 6 * A) / four
    )
    variance = 4 * S1**2 * line + 4 * S1 * cross + square - centered**2
    return S1**2 * m.mean_squared + centered, variance.clamp(min=0)


def anisotropic_bounds(
    rows: SelectedRows, radius: Tensor | float, draws: Literal["permuted", "independent"] = "permuted"
) -> Bounds:
    """Return bounds of E[N_s]/N for a fixed radius, the row's own vectors assigned at random to its weights."""
    if draws not in ("permuted", "independent"):
        raise ValueError(f"draws must be 'permuted' or 'independent', got {draws!r}")
    moments = population_moments(rows)
    moments_per_key = PopulationMoments(**{name: value.unsqueeze(-1) for name, value in vars(moments).items()})
    power_sums = tuple(without_each(rows.chosen_weights**p)[0] for p in range(1, 5))
    norm_moments = permuted_norm_moments if draws == "permuted" else independent_norm_moments
    mean, variance = norm_moments(power_sums, moments_per_key)
    lower, upper = cantelli_bounds(mean, variance, rows.row_value(radius).unsqueeze(-1))
    return Bounds(rows.per_row(lower.mean(-1)), rows.per_row(upper.mean(-1)))


def independent_coverage(share: Tensor | float, heads: int) -> Tensor:
    """Return the coverage of H independent heads that each cover a share p, as printed: 1 - (1-p)^H."""
    if heads < 1:
        raise ValueError(f"heads must be at least 1, got {heads}")
    share = _shares(torch.as_tensor(share, dtype=None if isinstance(share, Tensor) else torch.float64))
    # log1p and expm1 keep tiny shares and shares near 1 exact.
    return -torch.expm1(heads * torch.log1p(-share))


def independent_union(shares: Float[Tensor, "*rows H"]) -> Float[Tensor, "*rows"]:
    """Return the same for heads that cover different shares: 1 - prod_h (1 - p_h)."""
    return -torch.expm1(torch.log1p(-_shares(shares)).sum(-1))


def union_bounds(shares: Float[Tensor, "*rows H"]) -> Bounds:
    """Return bounds of the coverage of any heads, dependent or not; both ends are attained.

    max_h p_h <= union <= min(1, sum_h p_h)
    """
    shares = _shares(shares)
    return Bounds(shares.amax(-1), shares.sum(-1).clamp(max=1))


@dataclass(frozen=True)
class HeadCoverage:
    """Per row: the share of the reference keys that each head covers, that all cover together, and the prediction."""

    per_head: Tensor
    union: Tensor
    independent: Tensor


def union_coverage(covered: Bool[Tensor, "*rows H L"], reference: Bool[Tensor, "..."]) -> HeadCoverage:
    """Shares of the reference keys (..., L) covered by the heads' sets (..., H, L); NaN for rows that have none.

    The paper's reading: `covered` = the distinguishable keys of each head, `reference` = the keys the heads select.
    """
    reference = reference.expand(*covered.shape[:-2], covered.shape[-1])
    size = reference.sum(-1)
    if not bool((size > 0).any()):
        raise ValueError(
            f"expected a reference with a key to cover in at least one row, got none in shape {tuple(reference.shape)}."
        )
    inside = covered & reference.unsqueeze(-2)
    per_head = inside.sum(-1, dtype=torch.float64) / size.unsqueeze(-1)
    union = inside.any(-2).sum(-1, dtype=torch.float64) / size
    predicted = -torch.expm1(torch.log1p(-per_head).sum(-1))
    return HeadCoverage(per_head, union, predicted)


def top_n_coverage(
    weights: Float[Tensor, "*rows H L"], top_n: int, mask: Bool[Tensor, "..."] | None = None
) -> HeadCoverage:
    """Return the coverage of the visible keys by the top-N sets of H heads. mask (..., L): the same for all heads."""
    visible = torch.ones_like(weights[..., 0, :], dtype=torch.bool)
    visible = visible if mask is None else visible & mask
    return union_coverage(top_n_set(weights, top_n, visible.unsqueeze(-2)), visible)


def _shares(shares: Tensor) -> Tensor:
    if not runs_asynchronously(shares) and bool(((shares < 0) | (shares > 1)).any()):
        raise ValueError(
            f"expected shares between 0 and 1, got values from {float(shares.min())} to {float(shares.max())}"
        )
    return shares
