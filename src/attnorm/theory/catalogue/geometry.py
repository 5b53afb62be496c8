"""Claims on how many selected keys stay distinguishable: Theorem 2, on the sphere and beyond it."""

import itertools
from functools import partial

import torch
from torch import Tensor

from attnorm.theory import anisotropy, geometry
from attnorm.theory.catalogue.claim import Case, Claim, at_least, at_most, between
from attnorm.theory.selection import SelectedRows, select

claim = partial(Claim, family="geometry", proof="docs/theory/geometry.md")
on_sphere = partial(claim, domain="x_i independent and uniform on a sphere, r fixed in advance", most_keys=6)

FEW_ROWS = 4  # an exact law, or all permutations, for each


def _sphere(case: Case) -> tuple[SelectedRows, Tensor]:
    """The rows with vectors of length 1, and a radius of the size of the selected mass."""
    rows = select(case.weights, geometry.on_sphere(case.vectors), case.top_n)
    return rows, case.dial * rows.mass[..., 0]


def _printed(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """N_s/N with the printed bounds, for vectors whose own smallest distance is delta."""
    rows, radius = _sphere(case)
    separation = geometry.minimum_separation(rows.vectors)
    bounds = geometry.theorem2_printed(rows, radius, 1.0, separation)
    return geometry.separability(rows, radius), bounds.lower, bounds.upper


def _lower_is_negative(case: Case) -> Tensor:
    """1 where it is, in the paper's setting: N of 5 or more, r the distance of the nearest key not selected."""
    if case.top_n < 5:
        return torch.full_like(case.dial, torch.nan)
    rows, _ = _sphere(case)
    separation = geometry.minimum_separation(rows.vectors)
    return (geometry.theorem2_printed(rows, geometry.nearest_outsider(rows), 1.0, separation).lower <= 0).double()


def _lower_printed(case: Case) -> Tensor:
    found, lower, _ = _printed(case)
    return at_least(found, lower)


def _upper_printed(case: Case) -> Tensor:
    """Only where r >= every xi_i, so that N_s = N for certain and no expectation is needed."""
    rows, radius = _sphere(case)
    xi = geometry.xi(rows, 1.0, geometry.minimum_separation(rows.vectors))
    found, _, upper = _printed(case)
    return torch.where((radius > xi.amax(-1)) & (case.vectors.shape[-1] > 1), found / upper, torch.nan)


def _exact_law(case: Case) -> Tensor:
    """Corrected bounds against the exact law, its own error allowed for."""
    if case.vectors.shape[-1] < 2:
        return torch.full_like(case.dial, torch.nan)
    few = _few(case)
    rows, radius = _sphere(few)
    bounds = geometry.theorem2_bounds(rows, radius, 1.0)
    law = geometry.theorem2_exact(rows, radius, 1.0, tolerance=1e-4)
    exact, error = (torch.as_tensor(values) for values in (law.probability, law.error))
    ratio = torch.maximum(at_most(exact - error, bounds.upper), at_least(exact + error, bounds.lower))
    return _padded(ratio, case)


def _permuted(case: Case) -> Tensor:
    """Bounds from moments against all permutations of the vectors."""
    few = _few(case)
    rows = few.selected
    radius = few.dial * rows.distances.mean((-2, -1))
    bounds = anisotropy.anisotropic_bounds(rows, radius)
    shares = [
        geometry.separability(
            SelectedRows(rows.weights, rows.vectors[:, order], rows.visible, rows.indices, True), radius
        )
        for order in itertools.permutations(range(case.keys))
    ]
    return _padded(between(torch.stack(shares).mean(0), bounds.lower, bounds.upper), case)


def _few(case: Case) -> Case:
    rows = slice(0, FEW_ROWS)
    return Case(case.logits[rows], case.vectors[rows], case.temperature, case.top_n, case.dial[rows])


def _padded(ratio: Tensor, case: Case) -> Tensor:
    return torch.nn.functional.pad(ratio, (0, case.dial.shape[0] - ratio.shape[0]), value=torch.nan)


CLAIMS = [
    claim(
        id="theorem-2-lower",
        source="Mudarisov et al., Theorem 2 (lower)",
        form="printed",
        statement="E[N_s]/N >= 1 - mean(xi_i)/r",
        domain="vectors on a sphere, at least delta apart",
        status="vacuous",
        counterexample="negative on ordinary rows: xi_i takes every inner product at its maximum",
        correction="theorem-2-corrected",
        ratio=_lower_printed,
        says_nothing=_lower_is_negative,
        differentiable=False,
    ),
    claim(
        id="theorem-2-upper",
        source="Mudarisov et al., Theorem 2 (upper)",
        form="printed",
        statement="E[N_s]/N <= mean exp(-(r - xi_i)^2 / (16 M^2))",
        domain="vectors on a sphere, at least delta apart",
        status="false",
        counterexample="r > max xi_i: N_s = N for certain, while the bound falls to 0",
        correction="theorem-2-corrected",
        ratio=_upper_printed,
        differentiable=False,
    ),
    on_sphere(
        id="theorem-2-corrected",
        source="Theorem 2, corrected",
        form="corrected",
        statement="Cantelli and Markov on ||Y_i||^2 with mean M^2 S2 and variance (2/d) M^4 (S2^2 - S4)",
        status="holds",
        ratio=_exact_law,
        differentiable=False,
    ),
    claim(
        id="theorem-2-anisotropic",
        source="beyond Theorem 2",
        form="added",
        statement="the same from the first four moments of the row's own vectors, dealt to the weights at random",
        domain="any vectors, r fixed in advance",
        status="holds",
        most_keys=4,
        ratio=_permuted,
        differentiable=False,
    ),
    claim(
        id="at-most-80-percent",
        source="Mudarisov et al., contribution 2",
        form="printed",
        statement="no more than about 80 % of the top-N keys can be distinguished",
        domain="stated as a hard limit",
        status="false",
        counterexample="orthonormal vectors, N = 50: N_s/N = 1",
        correction="judge a head against its own null: geometry.separability_null",
        ratio=lambda case: geometry.separability(case.selected) / 0.85,
        differentiable=False,
    ),
]
