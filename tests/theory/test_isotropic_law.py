"""The numerical methods behind the law of ||sum b_j u_j||, each against the same sum or integral written out."""

import inspect
import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import special

from attnorm.theory import isotropic_law as law

Law = Callable[[float], np.ndarray]
FOUR = np.array([1.0, 0.7, 0.45, 0.3])


def plain_hankel(r: np.ndarray, b: np.ndarray, d: int, T: float) -> tuple[np.ndarray, np.ndarray]:
    """The integral up to T by 16 nodes per oscillation, with Bessel functions; and the bound on its rounding."""
    v, fastest = d / 2 - 1, float(r.max() + b.sum())
    panels = math.ceil(T * fastest / (2 * math.pi))
    nodes, weights = np.polynomial.legendre.leggauss(16)
    edges = np.linspace(0, T, panels + 1)
    middle, half = (edges[1:] + edges[:-1]) / 2, (edges[1:] - edges[:-1]) / 2
    t = (middle[:, None] + half[:, None] * nodes).ravel()
    step = (half[:, None] * weights).ravel()
    product = np.ones_like(t)
    for one in b:
        product = product * math.gamma(v + 1) * (2 / (one * t)) ** v * special.jv(v, one * t)
    terms = np.stack([R * (R * t / 2) ** v * special.jv(v + 1, R * t) / math.gamma(v + 1) * product * step for R in r])
    rounding = np.finfo(np.float64).eps * (np.abs(terms) * (4 * (len(b) + 4) + fastest * t)).sum(1)
    return terms.sum(1), rounding


def last_node(r: np.ndarray, b: np.ndarray, d: int, tolerance: float, most_nodes: float) -> float:
    """1 / b_1, doubled until the rest is a quarter of the tolerance or there would be too many nodes."""
    T = 1 / b[0]
    while law._hankel_tail(T, r, b, d / 2 - 1).max() > tolerance / 4:
        if 2 * T * (r.max() + b.sum()) * 16 / (2 * math.pi) >= most_nodes:
            break
        T *= 2
    return float(T)


@pytest.mark.parametrize(
    ("d", "b", "r", "tolerance", "most_nodes"),
    [
        (2, [1.0, 0.7, 0.4], [0.5, 1.2], 2e-4, 3_000_000),  # more panels than one block holds
        (2, [1.0, 1.0, 1.0, 1.0], [2.5], 100.0, 3_000_000),  # the first end is far enough
        (3, [2.0, 0.7, 0.45, 0.3], [0.9, 2.1], 1e-6, 3_000_000),
        (4, [0.5, 0.5, 0.5, 0.2], [0.3, 0.9, 1.3], 1e-5, 3_000_000),
        (7, [1.3, 0.9, 0.8, 0.6], [1.0, 2.3], 1e-7, 3_000_000),
        (7, [1.3, 0.9, 0.8, 0.6], [1.0, 2.3], 1e-7, 300),  # the nodes end before the tolerance is reached
    ],
)
def test_the_hankel_integral_is_the_sum_over_its_nodes(
    d: int, b: list[float], r: list[float], tolerance: float, most_nodes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(law, "MAX_HANKEL_NODES", most_nodes)
    vectors, radii = np.array(b), np.array(r)
    value, error = law._hankel(radii, vectors, d, tolerance)
    T = last_node(radii, vectors, d, tolerance, most_nodes)
    expected, rounding = plain_hankel(radii, vectors, d, T)
    assert value == pytest.approx(expected, rel=1e-10)
    tail = law._hankel_tail(T, radii, vectors, d / 2 - 1)
    assert error == pytest.approx(tail + rounding, rel=1e-6)
    assert error - tail == pytest.approx(rounding, rel=1e-3, abs=1e-3 * float(tail.max()) * 1e-9)


def test_the_hankel_integral_counts_nodes_up_to_its_limit_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    r, d, tolerance = np.array([1.1]), 4, 1e-12
    fastest = 1.1 + FOUR.sum()
    for doublings in (3, 5):
        nodes = 2 * (2**doublings / FOUR[0]) * fastest * 16 / (2 * math.pi)  # after one more doubling
        for most, T in ((nodes, 2**doublings), (nodes * 1.001, 2 ** (doublings + 1))):
            monkeypatch.setattr(law, "MAX_HANKEL_NODES", most)
            found, _ = law._hankel(r, FOUR, d, tolerance)
            assert found == pytest.approx(plain_hankel(r, FOUR, d, T)[0], rel=1e-10)


def test_the_hankel_integral_ends_where_the_rest_equals_a_quarter_of_the_tolerance() -> None:
    r, d, T = np.array([1.1]), 4, 8.0
    rest = float(law._hankel_tail(T, r, FOUR, 1.0)[0])
    for tolerance, end in ((4 * rest, T), (3.99 * rest, 2 * T)):
        found, _ = law._hankel(r, FOUR, d, tolerance)
        assert found == pytest.approx(plain_hankel(r, FOUR, d, end)[0], rel=1e-10)


def plain_tail(T: float, r: float, b: list[float], d: int) -> float:
    """The bound on the integral from T on: envelopes of the Bessel functions at x >= 2 m that lie below 1."""
    v = d / 2 - 1

    def envelope(order: float) -> float:
        return math.sqrt(2 / math.pi) * (1 if order <= 0.5 else (4 / 3) ** 0.25)

    power, size = (-v, 1.0) if r * T < 2 * (v + 1) else (0.5 - v, envelope(v + 1) / math.sqrt(r))
    for one in b:
        factor = math.gamma(v + 1) * 2**v * envelope(v) * one ** (-v - 0.5)
        if one * T >= 2 * v and factor * T ** (-v - 0.5) < 1:
            power, size = power + v + 0.5, size * factor
    if power <= 1:
        return math.inf
    return size * r * (r / 2) ** v / math.gamma(v + 1) * T ** (1 - power) / (power - 1)


@pytest.mark.parametrize(
    ("d", "r", "b"),
    [
        (2, 0.1, [1.0, 0.9, 0.5]),  # r T = 2 (v + 1)
        (2, 0.09, [1.0, 0.9, 0.5]),
        (6, 0.35, [2.0, 1.5, 1.0, 0.8, 0.2]),  # the smallest b T = 2 v; r T between 2 (v + 1) and 2 (v + 2)
        (6, 0.5, [2.0, 1.5, 1.0, 0.25, 0.19]),  # b T between 2 v and 3 v, and below 2 v
        (2, 0.5, [1.0, 0.9, 0.5, 0.025]),  # an envelope above 1 is not used
        (3, 0.5, [1.0, 0.01]),  # the rest of one vector in space falls too slowly
        (4, 0.04, [1.0, 0.5]),
    ],
)
def test_the_rest_of_the_integral(d: int, r: float, b: list[float]) -> None:
    found = law._hankel_tail(20.0, np.array([r]), np.array(b), d / 2 - 1)
    assert float(found[0]) == pytest.approx(plain_tail(20.0, r, b, d), rel=1e-9)


COARSE = [
    (12, [1.0, 0.8, 0.5, 0.4, 0.3], 12, 5),
    (400, [1.0, 0.9, 0.8, 0.8, 0.7, 0.7], 14, 6),
    (30, [0.5, 0.4, 0.4, 0.1, 0.1], 9, 4),
]


def plain_recursion(r: np.ndarray, b: np.ndarray, d: int, points: int, angles: int) -> np.ndarray:
    """The mean over the cosine of each further vector, from the last one back: u_j(q) = E u_(j-1)(||q e + b_j u||)."""
    from scipy.interpolate import make_interp_spline

    cosines, weights = special.roots_gegenbauer(angles, d / 2 - 1)

    def mean(before: Law, size: float, q: float) -> np.ndarray:
        norms = np.sqrt(np.maximum(q**2 + size**2 + 2 * q * size * cosines, 0))
        return np.asarray(sum(w * before(n) for w, n in zip(weights, norms, strict=True)) / weights.sum())

    def at_start(q: float) -> np.ndarray:
        return law.two_vector_cdf(r, b[0], q, d)

    before: Law = at_start
    for j in range(1, len(b) - 2):
        rest = b[j + 1 :]
        spread = 1 + 2 * math.sqrt(40 / d) + 2 * 40 / d
        low, high = max(0.0, 2 * rest[0] - sum(rest)), min(sum(rest), math.sqrt(spread * sum(rest**2)))
        grid = np.linspace(low, high, points)
        spline = make_interp_spline(grid, np.stack([mean(before, b[j], q) for q in grid]), k=5)
        before = lambda q, s=spline, a=low, z=high: s(min(max(q, a), z))  # noqa: E731
    return mean(before, b[-2], b[-1])


@pytest.mark.parametrize(("d", "b", "points", "angles"), COARSE)
def test_the_recursion_averages_over_one_vector_after_the_other(
    d: int, b: list[float], points: int, angles: int
) -> None:
    vectors = np.array(b)
    r = np.array([0.4, 0.9, 1.3]) * math.sqrt((vectors**2).sum())
    found = law._recursion_on_grid(r, vectors, d, points, angles)
    assert found == pytest.approx(plain_recursion(r, vectors, d, points, angles), rel=1e-9, abs=1e-13)


def test_the_recursion_refines_its_grid_until_two_agree() -> None:
    r, d = np.array([0.6, 1.4]), 9
    sizes = ((100, 8), (200, 12), (400, 18), (800, 27), (1600, 40))  # points, angles
    grids = [law._recursion_on_grid(r, FOUR, d, *size) for size in sizes]
    errors = [
        np.maximum(2 * np.abs(grids[i] - grids[i - 1]), np.abs(grids[i - 1] - grids[i - 2]) / 8)
        + 4 * (math.exp(-40) + 1e-12)
        for i in range(2, len(grids))
    ]
    assert errors[0].max() > errors[-1].max()
    for tolerance, last in ((1.0, 0), (float(errors[0].max()), 0), (errors[0].max() * 0.999, 1), (0.0, 2)):
        value, error = law._recursion(r, FOUR, d, tolerance)
        assert error == pytest.approx(errors[last], rel=1e-6)
        assert value.tolist() == grids[last + 2].tolist()


@pytest.mark.parametrize(
    ("d", "vectors", "method"),
    [
        (2, 2, "closed form"),
        (40, 2, "closed form"),
        (2, 3, "angle integral"),
        (11, 3, "angle integral"),
        (12, 3, "radial recursion"),
        (4, 4, "Hankel integral"),
        (5, 4, "Hankel integral"),
        (11, 4, "Hankel integral"),
        (12, 4, "radial recursion"),
    ],
)
def test_which_method_computes_the_law(d: int, vectors: int, method: str) -> None:
    found = law.isotropic_norm_cdf([0.9, 1.3], FOUR[:vectors], d, tolerance=1e-4)
    assert found.method == method
    assert found.reached
    assert found.error.max() <= found.tolerance == 1e-4


def test_the_method_with_the_smaller_error_is_taken_where_the_first_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    def fixed(error: float) -> object:
        return lambda r, b, d, tolerance: (np.full_like(r, error), np.full_like(r, error))

    for hankel, recursion, d, expected in (
        (1e-3, 1e-4, 5, "radial recursion"),  # both are tried
        (1e-4, 1e-3, 5, "Hankel integral"),
        (1e-7, 1e-9, 5, "Hankel integral"),  # the first is good enough
        (1e-9, 1e-7, 12, "radial recursion"),
        (1e-3, 1e-4, 4, "Hankel integral"),  # the recursion is not used below five dimensions
        (1e-6, 1e-9, 5, "Hankel integral"),  # an error equal to the tolerance is enough
    ):
        monkeypatch.setattr(law, "_hankel", fixed(hankel))
        monkeypatch.setattr(law, "_recursion", fixed(recursion))
        assert law._inside_support(np.array([1.0, 1.1]), FOUR, d, 1e-6)[0] == expected


def test_the_angle_integral_is_within_its_error_of_the_hankel_integral() -> None:
    b, r = np.array([1.0, 0.7, 0.45]), np.array([0.3, 0.75, 1.25, 2.0])
    for d in (4, 6, 9):
        value, error = law._angle_integral(r, b, d, 1e-9)
        exact = law._hankel(r, b, d, 1e-9)
        assert (np.abs(value - exact[0]) <= error + exact[1]).all()
        assert error.max() < 1e-9


def test_the_angle_integral_is_split_where_its_integrand_leaves_0_or_reaches_1(monkeypatch: pytest.MonkeyPatch) -> None:
    from scipy import integrate

    b, d, seen, quad = np.array([1.0, 0.7, 0.45]), 5, list[tuple[float, float]](), integrate.quad

    def recorded(function: object, low: float, high: float, **options: float) -> object:
        seen.append((low, high))
        return quad(function, low, high, **options)

    monkeypatch.setattr(integrate, "quad", recorded)
    for r, splits in ((0.1, 2), (0.5, 1), (0.8, 0), (1.5, 1), (2.1, 1), (2.14, 1), (2.2, 0)):
        seen.clear()
        law._angle_integral(np.array([r]), b, d, 1e-9)
        assert len(seen) == splits + 1, r
        assert (seen[0][0], seen[-1][1]) == (0, math.pi)
        for (_, end), (start, _) in itertools.pairwise(seen):
            assert end == start
            q = math.sqrt(0.7**2 + 0.45**2 + 2 * 0.7 * 0.45 * math.cos(end))
            assert min(abs(q - abs(r - 1)), abs(q - r - 1)) < 1e-12


def test_the_law_of_one_cosine() -> None:
    c = np.array([-1.5, -1.0, -0.3, 0.0, 0.8, 1.0, 1.5])
    inside = np.clip(c, -1, 1)
    assert law.cosine_cdf(c, 2) == pytest.approx(1 - np.arccos(inside) / math.pi, abs=1e-12)
    assert law.cosine_cdf(c, 3) == pytest.approx((1 + inside) / 2, abs=1e-12)
    assert law.cosine_cdf(c, 5) == pytest.approx(0.5 + 0.75 * inside - 0.25 * inside**3, abs=1e-12)


@pytest.mark.parametrize(("b", "q"), [(0.5, 0.3), (0.3, 0.5), (0.5, 0.5), (1e-9, 0.4), (0.4, 1e-9)])
def test_the_law_of_two_vectors(b: float, q: float) -> None:
    r = np.array([0.0, 0.1, 0.3, 0.41, 0.7, 0.9])
    cosine = (r**2 - b**2 - q**2) / (2 * b * q)
    assert law.two_vector_cdf(r, b, q, 3) == pytest.approx((1 + np.clip(cosine, -1, 1)) / 2, abs=1e-7)
    near = abs(b - q) + 0.25 * 2 * min(b, q)  # between the smallest norm and the largest
    exact = (1 + (near**2 - b**2 - q**2) / (2 * b * q)) / 2
    assert float(law.two_vector_cdf(near, b, q, 3)) == pytest.approx(exact, rel=1e-6)


def test_a_vector_of_length_zero_leaves_the_other_ones_norm() -> None:
    r = np.array([0.29, 0.3, 0.31])
    assert law.two_vector_cdf(r, 0.3, 0.0, 4).tolist() == [0, 1, 1]
    assert law.two_vector_cdf(r, 0.0, 0.3, 4).tolist() == [0, 1, 1]
    assert law.isotropic_norm_cdf(r, [0.3], 4).probability.tolist() == [0, 1, 1]


def test_the_law_near_the_ends_of_its_support() -> None:
    small = law.isotropic_norm_cdf([0.0, 0.004, 0.009], [0.5, 0.45, 0.4, 0.37, 0.3], 2)
    # Close to 0 the density of a walk in the plane is flat: the chance is proportional to the area.
    assert 0 == small.probability[0] < small.probability[1]
    assert small.probability[2] / small.probability[1] == pytest.approx((9 / 4) ** 2, rel=0.02)
    ends = law.isotropic_norm_cdf([0.4, 0.5, 0.51, 0.99, 1.0, 1.1], [0.75, 0.25], 4)
    assert ends.probability[[0, 1, 4, 5]].tolist() == [0, 0, 1, 1]
    assert ends.error.tolist() == [0, 0, 1e-12, 1e-12, 0, 0]
    assert 0 < ends.probability[2] < 0.01 < 0.99 < ends.probability[3] < 1
    assert law.isotropic_norm_cdf([[0.2, 0.5]], [-0.6, 0.0, 0.4], 4).probability.shape == (1, 2)


def test_a_probability_lies_between_0_and_1(monkeypatch: pytest.MonkeyPatch) -> None:
    found = np.array([-0.2, 0.3, 1.2])
    monkeypatch.setattr(law, "_inside_support", lambda r, b, d, tolerance: ("any", found, np.full_like(r, tolerance)))
    computed = law.isotropic_norm_cdf([0.2, 0.4, 0.6], [0.5, 0.5], 3, tolerance=1e-3)
    assert computed.probability.tolist() == [0, 0.3, 1]
    assert computed.reached  # an error equal to the tolerance is within it
    monkeypatch.setattr(law, "_inside_support", lambda r, b, d, tolerance: ("any", found, np.full_like(r, 0.5)))
    with pytest.warns(RuntimeWarning, match=r"2 vectors in dimension 3.*5\.0e-01.*1\.0e-03") as caught:
        inspect.unwrap(law.isotropic_norm_cdf)([0.2, 0.4, 0.6], [0.5, 0.5], 3, tolerance=1e-3)
    assert caught[0].filename == __file__  # names the caller's line


def test_the_law_rejects_what_is_no_number() -> None:
    for arguments in ((0.5, [0.5, 0.5], 1), (math.nan, [0.5], 3), (0.5, [math.inf], 3), (0.5, [0.5], 3, 0.0)):
        with pytest.raises(ValueError, match="got"):
            law.isotropic_norm_cdf(*arguments)  # type: ignore[arg-type]
    assert float(law.isotropic_norm_cdf(math.inf, [0.5, 0.5], 2, 0.5).probability) == 1
    default = law.isotropic_norm_cdf(0.4, [0.5, 0.5], 2)
    assert default.tolerance == 1e-6
