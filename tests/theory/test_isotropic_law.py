"""The numerical methods behind the law of ||sum b_j u_j||, each against the same sum or integral written out."""

import math

import numpy as np
import pytest

from attnorm.theory import isotropic_law as law

FOUR = np.array([1.0, 0.7, 0.45, 0.3])


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


def test_the_angle_integral_is_within_its_error_of_the_hankel_integral() -> None:
    b, r = np.array([1.0, 0.7, 0.45]), np.array([0.3, 0.75, 1.25, 2.0])
    for d in (4, 6, 9):
        value, error = law._angle_integral(r, b, d, 1e-9)
        exact = law._hankel(r, b, d, 1e-9)
        assert (np.abs(value - exact[0]) <= error + exact[1]).all()
        assert error.max() < 1e-9


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


def test_the_law_rejects_what_is_no_number() -> None:
    for arguments in ((0.5, [0.5, 0.5], 1), (math.nan, [0.5], 3), (0.5, [math.inf], 3), (0.5, [0.5], 3, 0.0)):
        with pytest.raises(ValueError, match="got"):
            law.isotropic_norm_cdf(*arguments)  # type: ignore[arg-type]
    assert float(law.isotropic_norm_cdf(math.inf, [0.5, 0.5], 2, 0.5).probability) == 1
    default = law.isotropic_norm_cdf(0.4, [0.5, 0.5], 2)
    assert default.tolerance == 1e-6
