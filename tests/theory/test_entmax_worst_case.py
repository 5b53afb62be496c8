"""The worst case of the entmax Jacobian: attained, never exceeded, and the steps of its proof on a grid."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from torch import Tensor

from attnorm.theory import gradient
from attnorm.theory.gradient import (
    entmax_jacobian_norm,
    entmax_worst_norm,
    entmax_worst_weights,
    longest_constant_length,
    one_against_equals_norm,
)
from attnorm.theory.rank_one_eigenvalues import rank_one_eigenvalue
from tests.theory.reference.threshold_maps import entmax

ALPHAS = (1.0, 1.05, 1.25, 1.5, 1.75, 1.95, 2.0)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("n", [1, 2, 3, 7, 48, 1000])
def test_the_worst_weights_attain_the_worst_norm(n: int, alpha: float) -> None:
    p = entmax_worst_weights(n, alpha)
    assert float(p.sum()) == pytest.approx(1)
    assert float(entmax_jacobian_norm(p, alpha, 0.5)) == pytest.approx(entmax_worst_norm(n, alpha, 0.5), rel=1e-12)
    if alpha > 1:  # they are the image of a row of logits, not only a limit
        z = torch.where(p > 0, p ** (alpha - 1), p - 9) / (alpha - 1)
        assert torch.allclose(entmax(z, alpha), p, atol=1e-12)


def norm_of_weights(p: Tensor, alpha: float) -> Tensor:
    return rank_one_eigenvalue(p ** (2 - alpha))


@pytest.mark.parametrize(
    ("n", "alpha"),
    [
        (2, 1.5), (3, 1.9), (60, 1.1),
        *(pytest.param(*one, marks=pytest.mark.nightly) for one in ((3, 1.1), (6, 1.5), (60, 1.9))),
    ],
)  # fmt: skip
def test_gradient_ascent_reaches_the_worst_norm_and_does_not_pass_it(n: int, alpha: float) -> None:
    theta = torch.randn(24, n, dtype=torch.float64) * torch.rand(24, 1, dtype=torch.float64) * 4
    theta[0] = entmax_worst_weights(n, alpha).clamp(min=1e-9).log() + 0.05 * theta[0]
    theta.requires_grad_()
    optimizer = torch.optim.Adam([theta], lr=0.1)
    for _ in range(150):
        optimizer.zero_grad()
        norms = norm_of_weights(torch.softmax(theta, -1), alpha)
        (-norms.sum()).backward()
        optimizer.step()
    worst = entmax_worst_norm(n, alpha)
    assert norms.max() <= worst * (1 + 1e-12)
    assert norms.max() >= worst * 0.99


@given(st.integers(0, 2**32 - 1), st.integers(2, 80), st.sampled_from(ALPHAS), st.floats(0, 12))
@settings(max_examples=50)
def test_no_row_exceeds_the_worst_norm(seed: int, n: int, alpha: float, spread: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    p = torch.softmax(spread * torch.randn(8, n, generator=generator, dtype=torch.float64), -1)
    assert (norm_of_weights(p, alpha) <= entmax_worst_norm(n, alpha) * (1 + 1e-12)).all()


@pytest.mark.parametrize("alpha", ALPHAS)
def test_only_two_or_all_keys_can_be_worst(alpha: float) -> None:
    best = 0.0
    for m in range(2, 400):
        best = max(best, one_against_equals_norm(m, alpha))
        assert best == pytest.approx(entmax_worst_norm(m, alpha), rel=1e-14)


def test_the_dual_form_of_the_worst_case() -> None:
    """max_p lambda(p) = max { |w|_2^2 / |w|_s^2 : sum w = 0 }, s = 2/(3 - alpha): each feasible w is a lower bound."""
    for alpha in (1.2, 1.5, 1.8):
        s = 2 / (3 - alpha)
        w = torch.randn(200, 9, dtype=torch.float64)
        w[0] = torch.tensor([8.0] + [-1.0] * 8)
        w[1] = torch.tensor([1.0, -1.0] + [0.0] * 7)
        w = w - w.mean(-1, keepdim=True)
        dual = w.square().sum(-1) / (w.abs() ** s).sum(-1) ** (2 / s)
        assert dual.max() <= entmax_worst_norm(9, alpha) * (1 + 1e-12)
        assert float(dual[0]) == pytest.approx(one_against_equals_norm(9, alpha))
        assert float(dual[1]) == pytest.approx(one_against_equals_norm(2, alpha))
        # the weights that belong to w: p proportional to |w|^s
        p = w.abs() ** s
        assert (dual <= norm_of_weights(p / p.sum(-1, keepdim=True), alpha) * (1 + 1e-12)).all()


def test_the_last_step_of_the_proof() -> None:
    """Between (1, -1, 0, ...) and (n-1, -1, ..., -1) the ratio falls, then rises: no maximum lies inside."""
    rho = torch.logspace(-12, 0, 3000, dtype=torch.float64)[:-1]
    for alpha in (1.02, 1.3, 1.5, 1.7, 1.98):
        sigma = 2 / (3 - alpha) - 1
        theta = torch.expm1(sigma * rho.log()) / (rho - 1)
        for k in (1, 2, 10, 50, 1000, 10**6):
            P = 1 + k * rho
            rises = theta * (1 + P) > 1 + P**sigma
            assert rises.int().diff().min() >= 0


def test_the_inequality_that_closes_the_proof() -> None:
    """On the curve of critical points A + B >= sqrt(P) - gamma/2 > 1, with P >= 1 + 2 gamma."""
    for sigma in (0.2, 0.5, 0.8, 0.97):
        for theta in torch.linspace(sigma, 1, 42, dtype=torch.float64)[1:-1].tolist():
            tau = brentq(lambda t: math.expm1(-sigma * t) - theta * math.expm1(-t), 1e-9, 300 / sigma)  # noqa: B023
            P = brentq(lambda x: 1 + x**sigma - theta * (1 + x), 1 + 1e-13, 1e9)  # noqa: B023
            gamma = (1 - theta) / (1 - sigma)
            A = P * (1 - gamma) / (sigma * gamma) * (P - 1) / (P + 1)
            B = P * (1 - gamma) / (sigma * gamma) / math.expm1(tau)
            assert 1 + 2 * gamma <= P
            assert A + B >= math.sqrt(P) - gamma / 2 > 1


def test_the_tempting_constant_is_false_for_long_rows() -> None:
    assert entmax_worst_norm(47, 1.5) == pytest.approx(2**-0.5, rel=1e-15)
    assert float(entmax_jacobian_norm(entmax_worst_weights(48, 1.5), 1.5)) > 2**-0.5 + 5e-4
    assert longest_constant_length(1.5) == 47
    assert longest_constant_length(1.25) == 1673
    assert longest_constant_length(1.0) is None
    assert longest_constant_length(2.0) is None
    for alpha in (1.3, 1.6, 1.9):
        last = longest_constant_length(alpha)
        assert last is not None
        assert entmax_worst_norm(last, alpha) == 2 ** (alpha - 2) < entmax_worst_norm(last + 1, alpha)


def test_a_length_at_which_both_norms_are_equal_is_still_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient, "one_against_equals_norm", lambda n, alpha: max(1.0, n / 10))
    assert longest_constant_length(1.5) == 10


@pytest.mark.parametrize(("n", "value"), [(2, 0.7071), (65, 0.7267), (1024, 0.8685), (131072, 0.9712)])
def test_published_values_at_alpha_one_and_a_half(n: int, value: float) -> None:
    assert entmax_worst_norm(n, 1.5) == pytest.approx(value, abs=5e-5)


def test_limits() -> None:
    assert entmax_worst_norm(10**9, 1.0) == 0.5
    assert entmax_worst_norm(10**9, 2.0) == pytest.approx(1.0)
    n = 10**12
    assert 1 - entmax_worst_norm(n, 1.5) == pytest.approx(1.5 * n ** (-1 / 3), rel=1e-3)
    assert entmax_worst_norm(1, 1.5) == 0.0
