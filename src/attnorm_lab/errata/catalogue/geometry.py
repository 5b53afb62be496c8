"""Claims on how many selected keys stay distinguishable, and on how many several heads cover together.

Theorem 2, on the sphere and beyond it; the Discussion's coverage of H heads.
"""

import itertools
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from attnorm.theory import geometry
from attnorm.theory.selection import SelectedRows, select
from attnorm_lab.errata.catalogue.claim import (
    EXACTLY,
    NEARLY,
    CaseSizes,
    Claim,
    ClaimCase,
    at_least,
    at_most,
    between,
    equals,
)

DOC = "docs/theory/geometry.md"
PRINTED, CORRECTED = f"{DOC}#theorem-2-as-printed", f"{DOC}#corrected-moments-under-assumption-1"
BEYOND = f"{DOC}#beyond-the-sphere-any-vectors-from-four-moments"

claim = partial(Claim, family="geometry", differentiable=False)
added = partial(claim, form="added", status="holds")
on_sphere = partial(claim, domain="x_i independent and uniform on a sphere, r fixed in advance")

ROUNDING = 1e-12
FEW_ROWS = 4  # an exact law, or all permutations, for each


def _sphere(case: ClaimCase) -> tuple[SelectedRows, Tensor]:
    """The rows with vectors of length 1, and a radius of the size of the selected mass."""
    rows = select(case.weights, geometry.on_sphere(case.vectors), case.top_n)
    return rows, case.dial * rows.mass[..., 0]


def _printed(case: ClaimCase) -> tuple[Tensor, Tensor, Tensor]:
    """N_s/N with the printed bounds, for vectors whose own smallest distance is delta."""
    rows, radius = _sphere(case)
    separation = geometry.minimum_separation(rows.vectors)
    bounds = geometry.theorem2_printed(rows, radius, 1.0, separation)
    return geometry.separability(rows, radius), bounds.lower, bounds.upper


def _lower_is_negative(case: ClaimCase) -> Tensor:
    """1 where it is, in the paper's setting: N of 5 or more, r the distance of the nearest key not selected."""
    rows, _ = _sphere(case)
    separation = geometry.minimum_separation(rows.vectors)
    return (geometry.theorem2_printed(rows, geometry.nearest_outsider(rows), 1.0, separation).lower <= 0).double()


def _lower_printed(case: ClaimCase) -> Tensor:
    share, lower, _ = _printed(case)
    return at_least(share, lower)


def _upper_printed(case: ClaimCase) -> Tensor:
    """Only where r >= every xi_i, so that N_s = N for certain and no expectation is needed."""
    rows, radius = _sphere(case)
    xi = geometry.xi(rows, 1.0, geometry.minimum_separation(rows.vectors))
    share, _, upper = _printed(case)
    return torch.where(radius > xi.amax(-1), share / upper, torch.nan)


def _upper_printed_below(case: ClaimCase) -> Tensor:
    """r below every xi_i and delta = 0, which independent vectors respect for certain: the exact law decides."""
    # The more equal the weights, the further ||Y_i|| stays below xi_i.
    few = replace(case.rows(slice(2 * FEW_ROWS)), temperature=8 * case.temperature)
    rows, _ = _sphere(few)
    radius = geometry.xi(rows, 1.0, 0.0).amin(-1) * (0.6 + 0.35 * few.dial / (1 + few.dial))
    law = geometry.theorem2_exact(rows, radius, 1.0, tolerance=1e-7)
    certain = torch.as_tensor(law.probability - law.error)
    return case.padded(at_most(certain, geometry.theorem2_printed(rows, radius, 1.0, 0.0).upper))


def _xi(case: ClaimCase) -> Tensor:
    """||Y_i|| of every selected key against xi_i; the others are added up, as s - y_i would cancel."""
    rows, _ = _sphere(case)
    key_indices = rows.indices[:, 0, :, None].expand(-1, -1, case.width)
    y = rows.chosen_weights[:, 0, :, None] * rows.vectors.gather(-2, key_indices)
    norms = torch.linalg.vector_norm((1 - torch.eye(case.top_n, dtype=y.dtype)) @ y, dim=-1)
    return at_most(norms, geometry.xi(rows, 1.0, geometry.minimum_separation(rows.vectors)), ROUNDING).amax(-1)


def _exact_law(case: ClaimCase) -> Tensor:
    """Corrected bounds against the exact law, its own error allowed for."""
    few = case.rows(slice(FEW_ROWS))
    rows, _ = _sphere(few)
    # Around the typical size of ||Y_i||, where the bounds bend.
    size = geometry.isotropic_moments(rows, 1.0)[0].mean((-2, -1)).sqrt()
    radius = size * few.dial.sqrt()
    bounds = geometry.theorem2_bounds(rows, radius, 1.0)
    law = geometry.theorem2_exact(rows, radius, 1.0, tolerance=1e-4)
    exact, error = (torch.as_tensor(values) for values in (law.probability, law.error))
    sides = [at_least(exact + error, bounds.lower), at_most(exact - error, bounds.upper)]
    return case.padded(torch.stack(sides, -1))


def _cantelli(case: ClaimCase) -> Tensor:
    """Laws of ||Y||^2 that attain each bound: two values for Cantelli, a rare huge value beside them for Markov."""
    share = 0.1 + 0.8 * case.dial / (1 + case.dial)  # of the higher value
    low = 0.1 + case.logits[:, 0].abs().clamp(max=10)
    high = low + 0.1 + case.logits[:, 1].abs().clamp(max=10)
    mean, variance = low + share * (high - low), share * (1 - share) * (high - low) ** 2
    below = geometry.cantelli_bounds(mean, variance, low.sqrt()).upper
    above = geometry.cantelli_bounds(mean, variance, (high * (1 - 1e-9)).sqrt()).lower
    rare, huge = 1e-14, 1e9
    mean, variance = share + rare * huge, torch.full_like(share, rare * huge**2)
    markov = geometry.cantelli_bounds(mean, variance, torch.ones_like(mean)).lower
    return torch.stack([at_most(1 - share, below), at_most(share, 1 - above), at_most(share, 1 - markov)], -1)


def _permuted(case: ClaimCase) -> Tensor:
    """Bounds from moments against all permutations of the vectors."""
    orders = list(itertools.permutations(range(case.keys)))
    return _compare_assignments(case, "permuted", [list(order) for order in orders])


def _independent(case: ClaimCase) -> Tensor:
    """Bounds from moments against all ways to give every selected key one of the vectors, repeats allowed."""
    return _compare_assignments(
        case, "independent", [list(draw) for draw in itertools.product(range(case.keys), repeat=case.keys)]
    )


def _compare_assignments(case: ClaimCase, draws: Literal["permuted", "independent"], ways: list[list[int]]) -> Tensor:
    few = case.rows(slice(FEW_ROWS))
    rows = few.selected
    radius = few.dial.sqrt() * rows.distances.mean((-2, -1))
    bounds = geometry.anisotropic_bounds(rows, radius, draws)
    assigned = SelectedRows(
        rows.weights.expand(len(ways), *rows.weights.shape),
        rows.vectors[:, torch.tensor(ways)].transpose(0, 1),
        rows.visible.expand(len(ways), *rows.visible.shape),
        rows.indices.expand(len(ways), *rows.indices.shape),
        True,
    )
    share = geometry.separability(assigned, radius.expand(len(ways), -1)).mean(0)
    return case.padded(between(share, bounds.lower, bounds.upper, ROUNDING))


def _isotropic_moments(case: ClaimCase) -> Tensor:
    """Against every way to give the N keys one of the 2d unit vectors +-e_k, which have the sphere's second moments."""
    few = case.rows(slice(FEW_ROWS))
    rows, _ = _sphere(few)
    axes = torch.cat([torch.eye(case.width, dtype=torch.float64), -torch.eye(case.width, dtype=torch.float64)])
    ways = torch.tensor(list(itertools.product(range(2 * case.width), repeat=case.top_n)))
    return case.padded(_same_moments(rows, axes[ways].unsqueeze(1), geometry.isotropic_moments(rows, 1.0)))


def _row_moments(case: ClaimCase, *, repeats: bool) -> Tensor:
    """Against every way to give the N keys one of the row's vectors each, with or without repeats."""
    few = case.rows(slice(FEW_ROWS))
    rows, keys = few.selected, range(case.keys)
    draws = itertools.product(keys, repeat=case.top_n) if repeats else itertools.permutations(keys, case.top_n)
    assigned = rows.vectors[:, torch.tensor(list(draws))].transpose(0, 1)
    moments = geometry.population_moments(rows)
    moments_per_key = geometry.PopulationMoments(**{name: value.unsqueeze(-1) for name, value in vars(moments).items()})
    power_sums = tuple(geometry.without_each(rows.chosen_weights**p)[0] for p in range(1, 5))
    formula = geometry.independent_norm_moments if repeats else geometry.permuted_norm_moments
    return case.padded(_same_moments(rows, assigned, formula(power_sums, moments_per_key)))


def _same_moments(rows: SelectedRows, assigned: Tensor, expected: tuple[Tensor, Tensor]) -> Tensor:
    """Mean and variance of ||Y_i||^2 over the ways to assign vectors (ways, rows, N, d) to the selected keys."""
    y = rows.chosen_weights[:, 0, :, None] * assigned
    squares = (y.sum(-2, keepdim=True) - y).square().sum(-1)
    largest = squares.amax((0, -1)).clamp(min=1e-30)
    mean_and_variance = squares.mean(0), squares.var(0, correction=0)
    ratios = [
        equals(value, formula[:, 0], 1e-9 * largest[:, None] ** power)
        for power, value, formula in zip((1, 2), mean_and_variance, expected, strict=True)
    ]
    return torch.stack(ratios).amax((0, -1))


def _more_than_80_percent(case: ClaimCase) -> Tensor:
    return geometry.separability(case.selected) / 0.85


CLAIMS = [
    claim(
        id="theorem-2-lower",
        proof=PRINTED,
        source="Mudarisov et al., Theorem 2 (lower)",
        form="printed",
        statement="E[N_s]/N >= 1 - mean(xi_i)/r",
        domain="vectors on a sphere, at least delta apart (tested: N >= 5; vacuous at the paper's radius)",
        status="vacuous",
        counterexample="negative on ordinary rows: xi_i takes every inner product at its maximum",
        correction="theorem-2-corrected",
        sizes=CaseSizes(least_top_n=5),
        ratio=_lower_printed,
        says_nothing=_lower_is_negative,
    ),
    claim(
        id="theorem-2-upper",
        proof=PRINTED,
        source="Mudarisov et al., Theorem 2 (upper)",
        form="printed",
        statement="E[N_s]/N <= mean exp(-(r - xi_i)^2 / (16 M^2))",
        domain="vectors on a sphere, at least delta apart",
        status="false",
        counterexample="r > max xi_i: N_s = N for certain, while the bound falls to 0",
        correction="theorem-2-corrected",
        sizes=CaseSizes(least_width=2),
        ratio=_upper_printed,
    ),
    on_sphere(
        id="theorem-2-upper-below",
        proof=PRINTED,
        source="Mudarisov et al., Theorem 2 (upper)",
        form="printed",
        statement="the same upper bound for r < min xi_i, where it is weakest",
        status="false",
        counterexample="N = 100, d = 768, r = 0.11: bound 0.9963, exact value 0.999997",
        correction="theorem-2-corrected",
        sizes=CaseSizes(most_keys=6, least_width=8, least_top_n=4),
        ratio=_upper_printed_below,
    ),
    added(
        id="xi-is-a-worst-case",
        proof=PRINTED,
        source="follows from Theorem 2",
        statement="||Y_i|| <= xi_i for every choice of vectors, not only on average",
        domain="vectors on a sphere, at least delta apart",
        ratio=_xi,
        attained=(EXACTLY,),
    ),
    on_sphere(
        id="theorem-2-corrected",
        proof=CORRECTED,
        source="Theorem 2, corrected",
        form="corrected",
        statement="Cantelli and Markov on ||Y_i||^2 with mean M^2 S2 and variance (2/d) M^4 (S2^2 - S4)",
        status="holds",
        sizes=CaseSizes(most_keys=6, least_width=2),
        ratio=_exact_law,
        attained=(EXACTLY, EXACTLY),
    ),
    added(
        id="cantelli-markov",
        proof=CORRECTED,
        source="Theorem 2, corrected",
        statement="r^2 < m: P <= v/(v + (m - r^2)^2); r^2 > m: P >= 1 - min(v/(v + (r^2 - m)^2), m/r^2); attained",
        domain="||Y||^2 with mean m and variance v; searched on the laws that attain them",
        ratio=_cantelli,
        attained=(EXACTLY, EXACTLY, NEARLY),
    ),
    added(
        id="theorem-2-moments",
        proof=CORRECTED,
        source="Theorem 2, corrected",
        statement="||Y_i||^2 has mean M^2 S2 and variance (2/d) M^4 (S2^2 - S4)",
        domain="independent directions with the second moments of the sphere",
        sizes=CaseSizes(most_keys=4, least_top_n=2, most_top_n=3),
        ratio=_isotropic_moments,
    ),
    added(
        id="anisotropic-moments",
        proof=BEYOND,
        source="beyond Theorem 2",
        statement="mean and variance of ||Y_i||^2 of Theorem B",
        domain="any vectors, assigned to the weights at random without repeats",
        sizes=CaseSizes(most_keys=6, least_top_n=2, most_top_n=4),
        ratio=lambda case: _row_moments(case, repeats=False),
    ),
    added(
        id="anisotropic-moments-independent",
        proof=BEYOND,
        source="beyond Theorem 2",
        statement="mean and variance of ||Y_i||^2 of Theorem A",
        domain="any vectors, drawn for every weight independently",
        sizes=CaseSizes(most_keys=6, least_top_n=2, most_top_n=3),
        ratio=lambda case: _row_moments(case, repeats=True),
    ),
    added(
        id="theorem-2-anisotropic",
        proof=BEYOND,
        source="beyond Theorem 2",
        statement="the same bounds from the first four moments of the row's vectors, assigned to the weights at random",
        domain="any vectors, r fixed in advance",
        sizes=CaseSizes(most_keys=4),
        ratio=_permuted,
        attained=(EXACTLY, EXACTLY),
    ),
    added(
        id="theorem-2-anisotropic-independent",
        proof=BEYOND,
        source="beyond Theorem 2",
        statement="the same bounds if every weight draws its vector independently",
        domain="any vectors, r fixed in advance",
        sizes=CaseSizes(most_keys=4, most_top_n=3),
        ratio=_independent,
        attained=(EXACTLY, EXACTLY),
    ),
    claim(
        id="at-most-80-percent",
        proof=f"{DOC}#no-more-than-80-",
        source="Mudarisov et al., contribution 2",
        form="printed",
        statement="no more than about 80 % of the top-N keys can be distinguished",
        domain="stated as a hard limit (tested: 0.85, N >= 5)",
        status="false",
        counterexample="orthonormal vectors, N = 50: N_s/N = 1",
        correction="compare a head with its own null: geometry.separability_null",
        sizes=CaseSizes(least_top_n=5),
        ratio=_more_than_80_percent,
    ),
]


HEADS = 4

on_several_heads = partial(Claim, family="coverage", proof="docs/theory/coverage.md", differentiable=False)


def _coverage(case: ClaimCase) -> geometry.HeadCoverage:
    """Groups of four rows as four heads over one context."""
    return geometry.top_n_coverage(case.weights.unflatten(0, (-1, HEADS)), case.top_n)


def _per_row(ratio: Tensor) -> Tensor:
    return ratio.repeat_interleave(HEADS, 0)


def _independence(case: ClaimCase) -> Tensor:
    measured = _coverage(case)
    return _per_row(at_least(measured.union, measured.independent))


def _union(case: ClaimCase) -> Tensor:
    measured = _coverage(case)
    lower, upper = geometry.union_bounds(measured.per_head)
    rounding = torch.finfo(upper.dtype).eps * 8
    return _per_row(between(measured.union, lower * (1 - rounding), upper * (1 + rounding)))


COVERAGE_CLAIMS = [
    on_several_heads(
        id="head-coverage",
        source="a reading of Mudarisov et al., Discussion",
        form="added",
        statement="H heads cover 1 - (1-p)^H of the keys (three heads at p = 0.8: 99 %)",
        domain="heads of any kind; the paper assumes independent ones, for which it holds",
        status="false",
        counterexample="identical heads cover no more than one of them",
        correction="head-coverage-bounds",
        ratio=_independence,
    ),
    on_several_heads(
        id="head-coverage-bounds",
        source="Discussion, corrected",
        form="corrected",
        statement="max_h p_h <= union <= min(1, sum_h p_h); measure the union itself",
        domain="any heads",
        status="holds",
        ratio=_union,
        attained=(EXACTLY, EXACTLY),
    ),
]
