"""Theorem 2: separability, the printed bounds, the moment bounds, the exact law, and vectors of any shape."""

import itertools
import math

import jaxtyping
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate
from torch import Tensor

from attnorm.theory import geometry, isotropic_law
from attnorm.theory.selection import SelectedRows, select
from tests.theory.strategies import ClaimCase, cases

SLACK = 1e-9


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def on_sphere_rows(L: int, N: int, d: int, rows: int = 1, scale: float = 1.0, seed: int = 0) -> SelectedRows:
    rng = generator(seed)
    weights = torch.softmax(scale * torch.randn(rows, L, generator=rng, dtype=torch.float64), -1)
    return select(weights, geometry.on_sphere(torch.randn(rows, L, d, generator=rng, dtype=torch.float64)), N)


def sampled_norms(coefficients: np.ndarray, d: int, draws: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    total = np.zeros((draws, d))
    for coefficient in coefficients:
        direction = rng.standard_normal((draws, d))
        total += coefficient * direction / np.linalg.norm(direction, axis=1, keepdims=True)
    return np.linalg.norm(total, axis=1)


# Separability itself


@given(case=cases(), radius=st.none() | st.floats(0.01, 3))
def test_separability_equals_definition_10(case: ClaimCase, radius: float | None) -> None:
    rows = case.rows
    y = case.weights[:, None] * case.vectors
    chosen = rows.indices[0].tolist()
    s = y[chosen].sum(0)
    outside = [i for i in range(len(y)) if i not in chosen]
    r = min(float((y[i] - s).norm()) for i in outside) if radius is None else radius
    apart = [float((y[i] - s).norm()) - r for i in chosen]
    if all(abs(gap) > 1e-7 for gap in apart):  # no key on the rim, where rounding decides
        inside = [gap < 0 for gap in apart]
        assert float(geometry.separability(rows, radius)) == pytest.approx(sum(inside) / case.top_n)
        assert geometry.distinguishable(rows, radius)[chosen].tolist() == inside
        assert not geometry.distinguishable(rows, radius)[outside].any()
    if radius is None:
        assert float(geometry.nearest_outsider(rows)) == pytest.approx(r, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("N", [2, 5, 50])
def test_eighty_percent_is_no_limit_in_either_direction(N: int) -> None:
    assert geometry.separability(geometry.separability_example(N, separable=True)) == 1
    assert geometry.separability(geometry.separability_example(N, separable=False)) == 0


def test_orthonormal_vectors_are_always_fully_separable() -> None:
    weights = torch.softmax(3 * torch.randn(6, 80, dtype=torch.float64), -1)
    assert (geometry.separability(select(weights, torch.eye(80, dtype=torch.float64), 50)) == 1).all()


def test_minimum_separation_is_the_smallest_pairwise_distance() -> None:
    vectors = torch.randn(2, 1500, 3, dtype=torch.float64)
    mask = torch.rand(2, 1500) < 0.02
    for b in range(2):
        seen = vectors[b][mask[b]]
        brute = min(float((x - y).norm()) for x, y in itertools.combinations(seen, 2))
        assert float(geometry.minimum_separation(vectors, mask)[b]) == pytest.approx(brute)
    assert geometry.minimum_separation(torch.ones(1, 2)) == math.inf


# Theorem 2 as printed


def brute_force_xi(a: list[float], M: float, delta: float) -> list[float]:
    result = []
    for i in range(len(a)):
        others = [j for j in range(len(a)) if j != i]
        total = M**2 * sum(a[j] ** 2 for j in others)
        total += (M**2 - delta**2 / 2) * sum(a[j] * a[k] for j in others for k in others if j != k)
        result.append(math.sqrt(total))
    return result


@pytest.mark.parametrize("N", [1, 2, 5])
def test_xi_equals_eq_12_and_bounds_the_norm_of_the_others(N: int) -> None:
    rows = on_sphere_rows(9, N, 3, rows=20, scale=2.0)
    delta = geometry.minimum_separation(rows.vectors)
    each = geometry.xi(rows, 1.0, delta)
    assert each[3].tolist() == pytest.approx(brute_force_xi(rows.chosen_weights[3, 0].tolist(), 1.0, float(delta[3])))
    norms = rows.distances.squeeze(1).gather(-1, rows.indices.squeeze(1))
    assert (norms <= each * (1 + SLACK) + 1e-12).all()
    # So the printed lower bound needs no chance at all: N_s/N is at least the share of keys with xi_i <= r.
    for r in (0.05, 0.2, 0.6):
        share = (each <= r).double().mean(-1)
        assert (geometry.separability(rows, r) >= share - SLACK).all()
        assert (geometry.theorem2_printed(rows, r, 1.0, delta).lower <= share + SLACK).all()


def test_the_printed_theorem2_equals_its_formula() -> None:
    rows = on_sphere_rows(9, 4, 3)
    each = brute_force_xi(rows.chosen_weights[0, 0].tolist(), 2.0, 0.5)
    lower, upper = geometry.theorem2_printed(rows, 0.7, 2.0, 0.5)
    assert float(lower[0]) == pytest.approx(1 - sum(each) / (0.7 * 4))
    assert float(upper[0]) == pytest.approx(sum(math.exp(-((0.7 - xi) ** 2) / (16 * 4)) for xi in each) / 4)


def test_the_printed_theorem2_contradicts_itself_for_a_large_radius() -> None:
    rows = on_sphere_rows(20, 5, 8)
    delta = geometry.minimum_separation(rows.vectors)
    lower, upper = geometry.theorem2_printed(rows, 10.0, 1.0, delta)
    assert lower > 0.9
    assert upper < 0.01
    assert geometry.separability(rows, 10.0) == 1


def test_the_printed_upper_bound_is_false_below_xi_as_well() -> None:
    N, d = 100, 768
    vectors = geometry.on_sphere(torch.randn(N + 1, d, generator=generator(), dtype=torch.float64))
    rows = select(torch.full((N + 1,), 1 / (N + 1), dtype=torch.float64), vectors, N)
    delta = geometry.minimum_separation(vectors)
    r = 0.11
    assert (geometry.xi(rows, 1.0, delta) > 3 * r).all()
    printed = geometry.theorem2_printed(rows, r, 1.0, delta)
    exact = geometry.theorem2_exact(rows, r, 1.0)
    assert exact.reached
    assert printed.upper < 0.997 < 0.9999 < float(exact.probability)
    assert printed.lower < -2  # true, and says nothing


# Moments and exact law under Assumption 1


def test_isotropic_moments_equal_sampled_ones() -> None:
    rows = on_sphere_rows(12, 5, 4)
    mean, variance = geometry.isotropic_moments(rows, 2.0)
    for i in range(5):
        others = np.delete(rows.chosen_weights[0, 0].numpy(), i)
        squared = (2.0 * sampled_norms(others, 4, 200_000, seed=i)) ** 2
        assert float(mean[0, 0, i]) == pytest.approx(squared.mean(), rel=0.01)
        assert float(variance[0, 0, i]) == pytest.approx(squared.var(), rel=0.03)


@given(
    weights=st.lists(st.floats(0.01, 1), min_size=1, max_size=6),
    d=st.sampled_from([2, 3, 5, 16, 64, 768]),
    radius=st.floats(0.01, 1.5),
)
@settings(max_examples=25)
def test_the_moment_bounds_bracket_the_exact_law(weights: list[float], d: int, radius: float) -> None:
    a = torch.tensor([*weights, 0.005], dtype=torch.float64)
    rows = select(a, torch.zeros(len(a), d, dtype=torch.float64), len(weights))
    law = geometry.theorem2_exact(rows, radius, 1.0, tolerance=1e-4)
    lower, upper = geometry.theorem2_bounds(rows, radius, 1.0)
    assert float(lower) <= float(law.probability) + float(law.error) + 1e-12
    assert float(law.probability) <= float(upper) + float(law.error) + 1e-12


def test_cantelli_and_markov_are_attained() -> None:
    """Two-point laws reach the bounds: nothing better follows from mean and variance."""
    for low, high, chance in ((0.5, 3.0, 0.3), (0.0, 2.0, 0.6)):
        mean = chance * high + (1 - chance) * low
        variance = chance * (1 - chance) * (high - low) ** 2
        below = geometry.cantelli_bounds(torch.tensor(mean), torch.tensor(variance), torch.tensor(low).sqrt())
        assert float(below.upper) == pytest.approx(1 - chance, rel=1e-5)
        just_below_high = torch.tensor(high - 1e-6).sqrt()
        above = geometry.cantelli_bounds(torch.tensor(mean), torch.tensor(variance), just_below_high)
        assert float(above.lower) == pytest.approx(1 - chance, rel=1e-5)


def test_with_the_radius_of_the_data_the_bounds_are_only_a_heuristic() -> None:
    L, N, draws = 100, 20, 600
    vectors = geometry.on_sphere(torch.randn(draws, L, 2, generator=generator(), dtype=torch.float64))
    rows = select(torch.full((draws, L), 1 / L, dtype=torch.float64), vectors, N)
    true = geometry.separability(rows)
    plug_in = geometry.theorem2_bounds(rows, geometry.nearest_outsider(rows), 1.0).lower
    assert true.mean() + 5 * true.std() / draws**0.5 < 0.03
    assert plug_in.mean() - 5 * plug_in.std() / draws**0.5 > 0.05
    null = geometry.separability_null(
        select(rows.weights[0, 0], vectors[0], N), 100, "isotropic", generator=generator()
    )
    assert abs(float(null.mean - true.mean())) < 5 * float(null.standard_error)


@pytest.mark.parametrize("steps", [2, 3, 4, 5, 8])
def test_the_law_gives_kluyvers_one_over_n_plus_one(steps: int) -> None:
    """A plane walk of n unit steps ends within the unit circle with chance 1/(n+1)."""
    law = isotropic_law.isotropic_norm_cdf(1.0, np.ones(steps), 2)
    assert law.reached
    assert abs(float(law.probability) - 1 / (steps + 1)) <= float(law.error)


@pytest.mark.parametrize("N", [3, 4, 6])
def test_the_law_in_space_equals_the_piecewise_polynomial(N: int) -> None:
    """In d = 3 the density of R is -r f'(r) 2 with f the density of a sum of independent uniform steps."""
    b = np.linspace(0.3, 1.0, N)
    # P(R <= r) = F(r) - F(-r) - 2 r f(r), F and f of the projection, a sum of uniforms on [-b_j, b_j].
    r = np.array([0.4, 0.9, 1.6])
    signs = np.array(list(itertools.product([-1, 1], repeat=N)))
    scale = np.prod(2 * b)

    def truncated(power: int, x: np.ndarray) -> np.ndarray:
        shifted = np.maximum(x[:, None] + signs @ b, 0) ** power
        return (shifted * signs.prod(1)).sum(1) / (math.factorial(power) * scale)

    expected = truncated(N, r) - truncated(N, -r) - 2 * r * truncated(N - 1, r)
    law = isotropic_law.isotropic_norm_cdf(r, b, 3, tolerance=1e-7)
    assert law.reached
    assert (np.abs(law.probability - expected) <= law.error + 1e-12).all()


# P(R <= r) for N equal coefficients 1/N, by the trapezoid rule (exact for odd d) with 80 digits.
EIGHTY_DIGITS = [
    (7, 6, 0.4, 0.524099311079395),
    (65, 10, 0.33, 0.715485020352739),
    (769, 4, 0.49, 0.185532136068427),
    (769, 100, 0.098, 0.219453491156218),
    (769, 100, 0.104, 0.943333621771724),
]


@pytest.mark.parametrize(("d", "N", "r", "expected"), EIGHTY_DIGITS)
def test_the_law_is_right_up_to_its_own_error_bound(d: int, N: int, r: float, expected: float) -> None:
    law = isotropic_law.isotropic_norm_cdf(r, np.full(N, 1 / N), d)
    assert law.reached
    assert abs(float(law.probability) - expected) <= float(law.error)
    assert float(law.error) <= 1e-6


@pytest.mark.parametrize(
    ("d", "N"),
    [
        pytest.param(d, N, marks=() if (i + j) % 2 == 0 else pytest.mark.nightly)
        for i, d in enumerate([2, 3, 4, 7, 12, 30, 100, 768])
        for j, N in enumerate([2, 3, 20, 5])
    ],
)
def test_the_law_agrees_with_sampling(d: int, N: int) -> None:
    rng = np.random.default_rng(d * N)
    b = rng.random(N) ** 2 + 0.05
    draws = 40_000 if d < 50 else 3000
    norms = sampled_norms(b, d, draws, seed=d)
    radii = np.quantile(norms, [0.02, 0.3, 0.5, 0.8, 0.99])
    law = isotropic_law.isotropic_norm_cdf(radii, b, d, tolerance=1e-5)
    sampled = np.array([(norms <= r).mean() for r in radii])
    noise = np.sqrt(law.probability * (1 - law.probability) / draws)
    assert law.reached
    assert (np.abs(sampled - law.probability) <= 5 * noise + law.error).all()


@pytest.mark.parametrize("d", [2, 3, 6])
def test_the_rest_of_the_integral_is_bounded_by_that_of_its_bessel_functions_envelopes(d: int) -> None:
    """|J_m(x)| <= envelope / sqrt(x) where x >= 2 m, and <= 1 below: integrated from T on by quadrature."""
    v, T, b = d / 2 - 1, 20.0, np.array([1.0, 0.9, 0.7, 0.5])
    r = np.array([0.05, 0.4, 2.0])

    def envelope(order: float) -> float:
        return math.sqrt(2 / math.pi) * (1 if order <= 0.5 else (4 / 3) ** 0.25)

    def integrand(t: float, radius: float) -> float:
        product = np.prod(math.gamma(v + 1) * 2**v * envelope(v) * (b * t) ** (-v - 0.5))
        outer = envelope(v + 1) / math.sqrt(radius * t) if radius * T >= 2 * (v + 1) else 1.0
        return float(radius * (radius * t / 2) ** v / math.gamma(v + 1) * outer * product)

    expected = [integrate.quad(integrand, T, np.inf, args=(radius,), epsabs=0)[0] for radius in r]
    assert isotropic_law._hankel_tail(T, r, b, v) == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("d", [6, 10, 16, 40])
def test_the_two_numerical_methods_agree_within_their_error_bounds(d: int) -> None:
    b = np.array([1.0, 0.8, 0.5, 0.5, 0.1])
    r = np.array([0.3, 0.9, 1.5, 2.2])
    hankel, hankel_error = isotropic_law._hankel(r, b, d, 1e-8)
    recursion, recursion_error = isotropic_law._recursion(r, b, d, 1e-8)
    assert (np.abs(hankel - recursion) <= hankel_error + recursion_error).all()
    assert max(hankel_error.max(), recursion_error.max()) < 1e-5


def test_outside_its_support_and_for_few_vectors_the_law_is_certain() -> None:
    law = isotropic_law.isotropic_norm_cdf([0.0, 0.19, 0.5, 0.79, 0.81], [0.5, 0.3], 4)
    assert law.probability[[0, 1, 4]].tolist() == [0, 0, 1]
    assert 0 < law.probability[2] < law.probability[3] <= 1
    assert isotropic_law.isotropic_norm_cdf([0.49, 0.5], [0.5, 0.0], 4).probability.tolist() == [0, 1]
    assert isotropic_law.isotropic_norm_cdf([0.0, 1.0], [], 4).probability.tolist() == [1, 1]


def test_the_law_says_so_when_it_misses_the_tolerance() -> None:
    with pytest.warns(RuntimeWarning, match=r"1\.0e-16"):
        law = isotropic_law.isotropic_norm_cdf(1.3, [1.0, 0.9, 0.8, 0.7, 0.6, 0.5], 4, tolerance=1e-16)
    assert not law.reached
    assert 1e-16 < float(law.error) < 1e-6


def test_the_expected_separability_is_that_of_the_isotropic_null() -> None:
    rows = on_sphere_rows(30, 4, 6, rows=2)
    radius = torch.tensor([0.1, 0.2], dtype=torch.float64)
    exact = geometry.theorem2_exact(rows, radius, 1.0)
    null = geometry.separability_null(rows, 400, "isotropic", radius, generator())
    assert exact.reached
    assert (np.abs(exact.probability - null.mean.numpy()) < 4.5 * null.standard_error.numpy() + 1e-9).all()


# Vectors of any shape


def power_sums(a: Tensor) -> tuple[Tensor, ...]:
    return tuple((a**p).sum() for p in range(1, 5))


def all_norms(vectors: Tensor, a: Tensor, choices: list[tuple[int, ...]]) -> Tensor:
    return (vectors[torch.tensor(choices)] * a[:, None]).sum(1).square().sum(-1)


@given(case=cases(most_keys=6), size=st.integers(1, 4), shift=st.floats(-3, 3))
@settings(max_examples=30)
def test_norm_moments_equal_those_over_all_assignments(case: ClaimCase, size: int, shift: float) -> None:
    n = len(case.logits)
    size = min(size, n)
    a, vectors = case.weights[:size], case.vectors + shift
    rows = select(case.weights, vectors, 1)
    moments = geometry.population_moments(rows)
    for function, choices in (
        (geometry.permuted_norm_moments, list(itertools.permutations(range(n), size))),
        (geometry.independent_norm_moments, list(itertools.product(range(n), repeat=size))),
    ):
        norms = all_norms(vectors, a, choices)
        mean, variance = function(power_sums(a), moments)
        scale = float(norms.max()) + 1e-9
        assert float(mean) == pytest.approx(float(norms.mean()), abs=1e-9 * scale)
        assert float(variance) == pytest.approx(float(norms.var(unbiased=False)), abs=1e-8 * scale**2)


def test_population_moments_equal_their_definitions_for_masked_rows() -> None:
    vectors = torch.randn(9, 4, dtype=torch.float64) * torch.tensor([3.0, 1, 1, 0.1]) + torch.tensor([5.0, 0, 0, 0])
    mask = torch.ones(3, 9, dtype=torch.bool).tril(5)
    rows = select(torch.rand(3, 9, dtype=torch.float64), vectors, 2, mask)
    moments = geometry.population_moments(rows)
    for q in range(3):
        x = vectors[mask[q]]
        m = x.mean(0)
        z = x - m
        covariance = z.mT @ z / len(x)
        squared = z.square().sum(-1)
        assert float(moments.n[q]) == len(x)
        assert torch.allclose(moments.mean_squared[q], m.square().sum())
        assert torch.allclose(moments.variance[q], covariance.trace())
        assert torch.allclose(moments.overlap[q], covariance.square().sum())
        assert torch.allclose(moments.fourth[q], squared.square().mean())
        assert torch.allclose(moments.along_mean[q], m @ covariance @ m)
        assert torch.allclose(moments.skew[q], ((z @ m) * squared).mean())
        assert torch.allclose(moments.effective_rank[q], covariance.trace() ** 2 / covariance.square().sum())


@given(case=cases(most_keys=6), radius=st.floats(0.01, 4))
@settings(max_examples=30)
def test_the_anisotropic_bounds_bracket_the_expectation_over_all_permutations(case: ClaimCase, radius: float) -> None:
    n, N = len(case.logits), case.top_n
    a = case.weights.sort(descending=True).values[:N]
    inside = []
    for chosen in itertools.permutations(range(n), N):
        y = a[:, None] * case.vectors[list(chosen)]
        inside.append(((y.sum(0) - y).norm(dim=-1) <= radius).double().mean())
    expected = float(torch.stack(inside).mean())
    lower, upper = geometry.anisotropic_bounds(case.rows, radius, "permuted")
    assert float(lower) <= expected + 1e-7
    assert expected <= float(upper) + 1e-7


@given(case=cases(most_keys=5), radius=st.floats(0.01, 4))
@settings(max_examples=20)
def test_the_anisotropic_bounds_bracket_the_expectation_over_independent_draws(case: ClaimCase, radius: float) -> None:
    n, N = len(case.logits), min(case.top_n, 3)
    a = case.weights.sort(descending=True).values[:N]
    draws = case.vectors[torch.tensor(list(itertools.product(range(n), repeat=N)))] * a[:, None]
    expected = float(((draws.sum(1, keepdim=True) - draws).norm(dim=-1) <= radius).double().mean())
    rows = select(case.weights, case.vectors, N)
    lower, upper = geometry.anisotropic_bounds(rows, radius, "independent")
    assert float(lower) <= expected + 1e-7
    assert expected <= float(upper) + 1e-7


def test_on_the_sphere_the_anisotropic_bounds_become_those_of_theorem2() -> None:
    d = 5
    vectors = torch.cat([torch.eye(d), -torch.eye(d)]).double()  # mean 0, covariance I/d, unit length
    weights = torch.softmax(torch.randn(2 * d, dtype=torch.float64), -1)
    rows = select(weights, vectors, 4)
    for radius in (0.1, 0.3, 0.6):
        general = geometry.anisotropic_bounds(rows, radius, "independent")
        isotropic = geometry.theorem2_bounds(rows, radius, 1.0)
        assert float(general.lower) == pytest.approx(float(isotropic.lower), abs=1e-12)
        assert float(general.upper) == pytest.approx(float(isotropic.upper), abs=1e-12)


def test_the_isotropic_bounds_are_wrong_for_anisotropic_vectors_and_the_general_ones_are_not() -> None:
    """All vectors near one direction: Y is as long as the sum of the weights, not as their root sum of squares."""
    rng = generator()
    vectors = torch.randn(200, 32, generator=rng, dtype=torch.float64) * 0.2
    vectors[:, 0] += 1
    vectors = geometry.on_sphere(vectors)
    rows = select(torch.full((200,), 1 / 200, dtype=torch.float64), vectors, 40)
    radius = 0.06
    null = geometry.separability_null(rows, 100, "permuted", radius, rng)
    assert null.mean == 0
    assert geometry.theorem2_bounds(rows, radius, 1.0).lower > 0.9
    assert geometry.anisotropic_bounds(rows, radius).upper < 0.05


# Nulls, batches, gradients, refusals


def test_the_permuted_null_equals_the_mean_over_all_permutations() -> None:
    weights = torch.tensor([0.4, 0.25, 0.15, 0.12, 0.08], dtype=torch.float64)
    vectors = torch.randn(5, 2, generator=generator(), dtype=torch.float64)
    mask = torch.ones(7, dtype=torch.bool)
    mask[[1, 4]] = False
    exact = torch.stack(
        [geometry.separability(select(weights, vectors[list(p)], 2)) for p in itertools.permutations(range(5))]
    ).mean()
    wide_weights = torch.full((7,), 0.9, dtype=torch.float64).masked_scatter(mask, weights)
    wide_vectors = torch.full((7, 2), torch.nan, dtype=torch.float64).masked_scatter(mask[:, None], vectors)
    null = geometry.separability_null(
        select(wide_weights, wide_vectors, 2, mask), 600, "permuted", generator=generator(1)
    )
    assert abs(float(null.mean - exact)) < 4.5 * float(null.standard_error)


def test_batched_rows_equal_rows_one_by_one() -> None:
    Q, L, N = 3, 8, 3
    mask = torch.ones(Q, L, dtype=torch.bool).tril(5)
    weights = torch.softmax(torch.where(mask, torch.randn(Q, L, dtype=torch.float64), -torch.inf), -1)
    vectors = torch.randn(L, 4, dtype=torch.float64)
    radius = torch.tensor([0.2, 0.4, 0.6], dtype=torch.float64)
    rows = select(weights, vectors, N, mask)
    for q in range(Q):
        alone = select(weights[q][mask[q]], vectors[mask[q]], N)
        r = float(radius[q])
        assert torch.allclose(geometry.separability(rows)[q], geometry.separability(alone))
        assert torch.allclose(geometry.nearest_outsider(rows)[q], geometry.nearest_outsider(alone))
        assert torch.allclose(geometry.xi(rows, 1.0, 0.1)[q], geometry.xi(alone, 1.0, 0.1))
        for function in (
            lambda x, r: geometry.theorem2_printed(x, r, 1.0, 0.1),
            lambda x, r: geometry.theorem2_bounds(x, r, 1.0),
            lambda x, r: geometry.anisotropic_bounds(x, r, "permuted"),
            lambda x, r: geometry.anisotropic_bounds(x, r, "independent"),
        ):
            for many, one in zip(function(rows, radius), function(alone, r), strict=True):
                assert torch.allclose(many[q], one)
        exact = geometry.theorem2_exact(alone, r, 1.0).probability
        assert float(geometry.theorem2_exact(rows, radius, 1.0).probability[q]) == pytest.approx(float(exact), abs=1e-6)


def test_rows_too_short_are_nan_among_others() -> None:
    mask = torch.tensor([[True] * 5, [True, True, False, False, False]])
    rows = select(torch.rand(2, 5, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64), 2, mask)
    found = (
        geometry.separability(rows),
        geometry.nearest_outsider(rows),
        *geometry.theorem2_printed(rows, 0.3, 1.0, 0.1),
        *geometry.theorem2_bounds(rows, 0.3, 1.0),
        *geometry.anisotropic_bounds(rows, 0.3),
        torch.from_numpy(geometry.theorem2_exact(rows, 0.3, 1.0).probability),
    )
    for values in found:
        assert values.isnan().tolist() == [False, True]
    assert geometry.theorem2_exact(rows, 0.3, 1.0).reached


def test_gradients_of_xi_moments_and_bounds() -> None:
    logits = torch.randn(7, dtype=torch.float64, requires_grad=True)
    vectors = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)

    def quantities(z: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        rows = select(torch.softmax(z, -1), x, 3)
        bounds = geometry.theorem2_bounds(rows, 0.9, 1.0).lower, geometry.anisotropic_bounds(rows, 0.1).upper
        return geometry.nearest_outsider(rows), geometry.xi(rows, 1.0, 0.3), *bounds

    assert torch.autograd.gradcheck(quantities, (logits, vectors))


def test_impossible_input_is_refused_by_name() -> None:
    rows = on_sphere_rows(6, 2, 3)
    with pytest.raises(ValueError, match=r"radius.*-1"):
        geometry.separability(rows, -1.0)
    with pytest.raises(ValueError, match=r"dimension.*got 1"):
        isotropic_law.isotropic_norm_cdf(0.5, [0.5, 0.5], 1)
    with pytest.raises(ValueError, match=r"\b2\b"):
        geometry.separability_example(1, separable=True)


def test_unknown_kinds_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # it checks the names too
    rows = on_sphere_rows(6, 2, 3)
    with pytest.raises(ValueError, match="'shuffled'"):
        geometry.separability_null(rows, 2, "shuffled")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'both'"):
        geometry.anisotropic_bounds(rows, 0.1, "both")  # type: ignore[arg-type]
