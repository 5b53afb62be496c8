"""Rows without a number, and numbers on a limit: equality belongs to the side that the docstring says."""

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attnorm.theory import dispersion, distance, geometry, gradient, rank_one_eigenvalues
from attnorm.theory.gradient import entmax_worst_weights
from attnorm.theory.selection import safe_sqrt, select
from attnorm_lab.errata import Claim, search
from attnorm_lab.errata.catalogue import claims
from attnorm_lab.errata.catalogue.claim import ClaimCase, draw_case
from tests_lab.errata.test_search import claim_of

NOTHING: list[tuple[Callable[[Tensor], Tensor], list[list[float]]]] = [
    (dispersion.entropy_nats, [[0.5, 0.3, 0.2], [0.0, 0.0, 0.0]]),
    (dispersion.effective_gap, [[0.5, 0.3, 0.2], [0.0, 0.0, 0.0]]),
    (lambda z: dispersion.effective_gap_from_logits(z, torch.tensor([[True] * 3, [True, False, False]])),
     [[0.5, 0.3, 0.2], [0.1, 0.0, 0.0]]),
    (lambda w: distance.relative_distance(select(w, torch.eye(3, dtype=torch.float64).expand(2, 3, 3), 1)),
     [[0.5, 0.3, 0.2], [0.0, 0.0, 0.0]]),
    (lambda w: distance.relative_distance_bounds(select(w, torch.eye(3, dtype=torch.float64).expand(2, 3, 3), 1)).upper,
     [[0.5, 0.3, 0.2], [0.0, 0.0, 0.0]]),
    (lambda w: distance.relative_distance_bounds(select(w, torch.eye(3, dtype=torch.float64).expand(2, 3, 3), 1)).lower,
     [[0.5, 0.1, 0.1], [0.0, 0.0, 0.0]]),
]  # fmt: skip


@pytest.mark.parametrize(("number", "rows"), NOTHING)
def test_a_row_without_a_number_is_nan_and_has_the_gradient_0(
    number: Callable[[Tensor], Tensor], rows: list[list[float]]
) -> None:
    given = torch.tensor(rows, dtype=torch.float64, requires_grad=True)
    found = number(given)
    assert found.isnan().tolist() == [False, True]
    found[0].backward()
    assert given.grad is not None
    assert given.grad[0].any()
    assert given.grad.isfinite().all()
    assert not given.grad[1].any()


def test_a_context_of_vectors_that_cancel_has_no_relative_distance() -> None:
    vectors = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    rows = select(torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64), vectors, 2)
    assert distance.relative_distance(rows).isnan()
    bounds = distance.relative_distance_bounds(rows)
    assert bounds.lower.isnan()
    assert bounds.upper.isnan()


def test_a_zero_vector_stays_at_zero_on_a_sphere() -> None:
    vectors = torch.tensor([[0.0, 0.0], [3.0, 4.0]], dtype=torch.float64)
    assert geometry.on_sphere(vectors, 10.0).tolist() == [[0.0, 0.0], [6.0, 8.0]]


def test_a_key_on_the_rim_of_the_ball_is_inside() -> None:
    """Weights 1/2, 1/4, ... of unit vectors along one line: every distance is exact."""
    weights, ones = torch.tensor([0.5, 0.25, 0.125], dtype=torch.float64), torch.ones(3, 1, dtype=torch.float64)
    rows = select(weights, ones, 2)  # s = 3/4, so the selected keys lie 1/4 and 1/2 from it
    for radius, share in ((0.5, 1.0), (0.4999, 0.5), (0.25, 0.5), (0.2499, 0.0)):
        assert float(geometry.separability(rows, radius)) == share
    assert geometry.distinguishable(rows, 0.25).tolist() == [True, False, False]


def test_the_root_of_zero_has_the_gradient_0() -> None:
    squared = torch.tensor([0.0, 4.0, -1e-20], requires_grad=True)
    found = safe_sqrt(squared)
    found.sum().backward()
    assert found.tolist() == [0.0, 2.0, 0.0]
    assert squared.grad is not None
    assert squared.grad.tolist() == [0.0, 0.25, 0.0]


@pytest.mark.parametrize("alpha", [1.0, 2.0])
def test_of_equally_bad_rows_the_one_of_two_keys_is_given(alpha: float) -> None:
    assert entmax_worst_weights(5, alpha).tolist() == [0.5, 0.5, 0.0, 0.0, 0.0]


CASE = draw_case(0, next(each for each in claims() if each.searched).sizes, structured=False)


def test_a_ratio_at_the_limit_of_rounding_is_no_violation() -> None:
    for ratio, violated in ((1 + search.ROUNDING, False), (1 + 2 * search.ROUNDING, True)):
        one = search._Search(claim_of([ratio]), seed=0)
        one.run_round()
        assert (one.violations > 0) is violated
    assert search.ROUNDING == 1e-9


@pytest.mark.parametrize(("mean", "radius"), [(0.0, 0.0), (1.0, 1.0), (1.0, 0.0)])
def test_bounds_of_a_fixed_number_are_differentiable_at_that_number(mean: float, radius: float) -> None:
    given = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (mean, 0.0, radius)]
    bounds = geometry.cantelli_bounds(*given)
    assert [bound.item() for bound in bounds] == [0.0, 1.0 if mean == radius else 0.0]
    (bounds.lower + bounds.upper).backward()
    assert all(value.grad is None or value.grad.isfinite() for value in given)


def test_heads_that_agree_are_not_above_the_bounds_of_their_union_by_rounding() -> None:
    (claim,) = [each for each in claims() if each.id == "head-coverage-bounds"]
    assert claim.ratio is not None
    same = dataclasses.replace(CASE, logits=CASE.logits[:1].expand_as(CASE.logits))
    assert claim.ratio(same).max() <= 1


def case_of(logits: list[list[float]], vectors: list[list[float]], top_n: int) -> ClaimCase:
    """Rows over the same vectors, at a temperature of 1."""
    rows = len(logits)
    ones, numbers = torch.ones(rows, dtype=torch.float64), torch.arange(rows)
    x = torch.tensor(vectors, dtype=torch.float64).expand(rows, -1, -1)
    square = torch.eye(x.shape[-1], dtype=torch.float64).expand(rows, 2, -1, -1)
    return ClaimCase(torch.tensor(logits, dtype=torch.float64), x, 1.0, top_n, ones, numbers, square)


def claim_named(name: str) -> Claim:
    (found,) = [each for each in claims() if each.id == name]
    return found


def test_a_row_that_is_uniform_up_to_rounding_says_nothing_about_the_limit() -> None:
    """Of two keys with logits d apart the distance from uniform is d/4; eight copies of each do not change it."""
    claim = claim_named("dispersed-is-uniform")
    assert claim.ratio is not None
    found = claim.ratio(case_of([[4 * d, 0.0] for d in (1.2e-12, 0.9e-12, 0.0)], [[1.0], [1.0]], 1))
    assert found[0].item() == pytest.approx(2, rel=1e-2)
    assert found.isnan().tolist() == [False, True, True]


def test_a_lower_bound_on_separability_that_is_positive_says_something() -> None:
    """Five equal vectors and an opposite one: xi_i = s - a_i, and the outsider lies s + a_6 away.

    Where the five nearly cancel, s is short and the outsider near, while xi_i stays the sum of the others.
    """
    claim = claim_named("theorem-2-lower")
    assert claim.says_nothing is not None
    apart = case_of([[5.0] * 5 + [0.0]], [[1.0, 0.0]] * 5 + [[-1.0, 0.0]], 5)
    near = case_of([[5.0] * 5 + [0.0]], [[1.0, 0.0], [-1.0, 0.0]] * 2 + [[1.0, 0.0], [0.0, 1.0]], 5)
    assert (claim.says_nothing(apart).item(), claim.says_nothing(near).item()) == (0.0, 1.0)


def test_random_directions_are_zero_at_hidden_keys_and_have_length_1_over_the_others() -> None:
    mask = torch.tensor([[True, False, True], [False, False, False]])
    found = gradient.random_directions(torch.zeros(2, 3, dtype=torch.float64), 4, mask)
    assert not found[:, ~mask].any()
    torch.testing.assert_close(found[:, 0].norm(dim=-1), torch.ones(4, dtype=torch.float64))


def test_vectors_far_from_0_keep_the_digits_of_their_distances() -> None:
    generator = torch.Generator().manual_seed(0)
    near = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    weights = torch.softmax(torch.arange(6.0, dtype=torch.float64), -1)
    exact = (near[:4, None] - near[4:]).norm(dim=-1).max()
    for offset in (0.0, 1e3, 1e6):
        found = distance.largest_gaps(select(weights, near + offset, 2), (2,))
        assert float(found) == pytest.approx(float(exact), rel=1e-8)


def test_a_key_of_kneemax_is_put_a_thousandth_beyond_its_first_zero() -> None:
    claim = claim_named("kneemax-zeros-none")
    assert claim.ratio is not None
    case = case_of([[0.0, 0.0, 0.0]], [[1.0]] * 3, 1)
    found = claim.ratio(dataclasses.replace(case, dial=torch.tensor([math.e], dtype=torch.float64)))
    assert found.item() == pytest.approx(1 / 1.001, rel=1e-9)


@pytest.mark.parametrize("mass", [0.05, 0.5, 1.0, 4.0])
def test_the_entropy_is_that_of_the_weights_over_their_sum(mass: float) -> None:
    found = dispersion.entropy_nats(mass * torch.tensor([0.25, 0.75], dtype=torch.float64))
    assert float(found) == pytest.approx(-0.25 * math.log(0.25) - 0.75 * math.log(0.75))


def test_the_gradient_of_the_eigenvalue_of_several_rows_with_a_sink() -> None:
    """Of diag(u) - u u^T / (s + sum u), by eigenvalues of whole matrices."""
    generator = torch.Generator().manual_seed(0)
    u = torch.rand(3, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    sink = torch.rand(3, 1, generator=generator, dtype=torch.float64)
    matrices = torch.diag_embed(u) - u[:, :, None] * u[:, None, :] / (sink + u.sum(-1, keepdim=True))[..., None]
    expected = torch.linalg.eigvalsh(matrices)[:, -1]
    (wanted,) = torch.autograd.grad(expected.sum(), u)
    found = rank_one_eigenvalues.rank_one_eigenvalue(u, sink)
    (gradient,) = torch.autograd.grad(found.sum(), u)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, wanted)
