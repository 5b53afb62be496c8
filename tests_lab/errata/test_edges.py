"""Rows without a number, and numbers on a limit: equality belongs to the side that the docstring says."""

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attnorm.normalizers.registry import get
from attnorm.theory import dispersion, distance, geometry, gradient, rank_one_eigenvalues, rank_two_singular_values
from attnorm.theory.gradient import entmax_worst_weights
from attnorm.theory.selection import safe_sqrt, select
from attnorm_lab.errata import Claim, frontier, search
from attnorm_lab.errata.catalogue import claims
from attnorm_lab.errata.catalogue import normalizers as kneemax_claims
from attnorm_lab.errata.catalogue.claim import EXACTLY, NEARLY, ClaimCase, draw_case
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


def two_cases() -> tuple[ClaimCase, ClaimCase]:
    moved = {name: getattr(CASE, name) + 1 for name in ("logits", "vectors", "dial", "matrices")}
    return CASE, dataclasses.replace(CASE, **moved)


def test_a_case_is_replaced_only_by_one_with_a_higher_ratio() -> None:
    best, trial = two_cases()
    rows = len(best.dial)
    before = torch.tensor([1.0, 1.0, 1.0, math.nan, math.nan, -math.inf], dtype=torch.float64).repeat(rows)[:rows]
    found = torch.tensor([1.0, 1.5, 0.5, math.nan, -2.0, math.nan], dtype=torch.float64).repeat(rows)[:rows]
    gain = torch.tensor([False, True, False, False, True, False]).repeat(rows)[:rows]
    merged, ratio = search._better(best, before, trial, found)
    for name in ("logits", "vectors", "dial", "matrices"):
        old, new, got = getattr(best, name), getattr(trial, name), getattr(merged, name)
        assert torch.equal(got[gain], new[gain])
        assert torch.equal(got[~gain], old[~gain])
    assert ratio[gain].tolist() == found[gain].tolist()
    assert torch.equal(ratio[~gain].nan_to_num(), before[~gain].nan_to_num())


def test_a_ratio_at_the_limit_of_rounding_is_no_violation() -> None:
    for ratio, violated in ((1 + search.ROUNDING, False), (1 + 2 * search.ROUNDING, True)):
        one = search._Search(claim_of([ratio]), seed=0)
        one.run_round()
        assert (one.violations > 0) is violated
    assert search.ROUNDING == 1e-9


def test_a_claim_is_left_alone_once_it_has_enough_violations(monkeypatch: pytest.MonkeyPatch) -> None:
    for broken, rounds in ((25, 40), (24, 42)):  # of 32 rows; 1000 are enough
        claim = claim_of([2.0] * broken + [0.5] * (32 - broken))
        monkeypatch.setattr(search, "draw_case", lambda *_, **__: CASE)
        monkeypatch.setattr(search, "_climb", lambda *_: CASE)
        (finding,) = search.verify([claim], budget_seconds=60.0, first_rounds=1)
        assert (finding.rounds, finding.violations) == (rounds, rounds * broken)


@pytest.mark.parametrize(("mean", "radius"), [(0.0, 0.0), (1.0, 1.0), (1.0, 0.0)])
def test_bounds_of_a_fixed_number_are_differentiable_at_that_number(mean: float, radius: float) -> None:
    given = [torch.tensor(value, dtype=torch.float64, requires_grad=True) for value in (mean, 0.0, radius)]
    bounds = geometry.cantelli_bounds(*given)
    assert [bound.item() for bound in bounds] == [0.0, 1.0 if mean == radius else 0.0]
    (bounds.lower + bounds.upper).backward()
    assert all(value.grad is None or value.grad.isfinite() for value in given)


def test_what_a_search_must_reach_lies_just_below_the_bound() -> None:
    assert math.isclose(EXACTLY, 0.999999, abs_tol=1e-9)
    assert NEARLY == 0.995
    for each in claims():
        if each.searched:
            assert all(least is None or 0.9 <= least < 1 for least in each.attained), each.id


def test_heads_that_agree_are_not_above_the_bounds_of_their_union_by_rounding() -> None:
    (claim,) = [each for each in claims() if each.id == "head-coverage-bounds"]
    assert claim.ratio is not None
    same = dataclasses.replace(CASE, logits=CASE.logits[:1].expand_as(CASE.logits))
    assert claim.ratio(same).max() <= 1


@pytest.mark.parametrize("points", [5, 12])
def test_where_the_range_of_a_function_is_looked_for(points: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Tensor] = []

    def bump(x: Tensor) -> Tensor:
        tried.append(x)
        return -(x - 0.3).square()

    low, high, rounds = -1.0, 3.0, 4
    monkeypatch.setattr(dispersion, "ZOOMS", rounds)
    found = dispersion._maximum(bump, low, high, points)
    grid, *windows = tried
    step = (high - low) / (points - 1)
    assert grid.tolist() == pytest.approx([low + step * k for k in range(points)])
    centers = sorted(grid.tolist(), key=lambda x: abs(x - 0.3))[:8]
    assert len(windows) == rounds
    for window in windows:
        around = [[min(max(c + step * (k - 32) / 32, low), high) for k in range(65)] for c in centers]
        assert window.shape == (len(centers), 65)
        for row, expected in zip(window.tolist(), around, strict=True):
            assert row == pytest.approx(expected, abs=1e-12)
        centers = [min(row, key=lambda x: abs(x - 0.3)) for row in around]
        step /= 32
    assert found == max(float(values) for values in (-(x - 0.3).square().min() for x in tried))


def test_the_lengths_and_weights_of_the_frontier_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontier, "_registered", lambda: iter(()))
    found = frontier.place_on_frontier()
    assert found.lengths == (2**4, 2**6, 2**8, 2**10, 2**12, 2**15, 10**6)
    assert found.weights == (0.5, 0.9)


@pytest.mark.parametrize("step", [math.inf, -math.inf, math.nan])
def test_a_step_that_is_no_number_is_not_taken(step: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Newton's method then stays where it is: at its start, which is above the singular value."""
    weights = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64)
    slopes = torch.tensor([[1.0, 0.7, 0.4]], dtype=torch.float64)
    jacobian = (torch.eye(3, dtype=torch.float64) - weights[0][:, None]) * slopes[0]
    exact = torch.linalg.matrix_norm(jacobian, 2)
    assert rank_two_singular_values.rank_two_singular_value(weights, slopes).item() == pytest.approx(exact.item())
    starts: list[Tensor] = []

    def fails(x: Tensor, *_: Tensor) -> Tensor:
        starts.append(x)
        return torch.full_like(x, step)

    monkeypatch.setattr(rank_two_singular_values, "_rank_two_step", fails)
    found = rank_two_singular_values.rank_two_singular_value(weights, slopes)
    assert len(starts) == 1
    assert found.item() == starts[0].sqrt().item() > exact.item()


def test_time_is_given_to_the_claim_that_had_least_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        now = 100.0

        def monotonic(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(search, "time", clock)
    monkeypatch.setattr(search, "draw_case", lambda *_, **__: CASE)
    monkeypatch.setattr(search, "_climb", lambda *_: CASE)

    def slow(claim: Claim, seconds: float) -> Claim:
        def ratio(case: ClaimCase) -> Tensor:
            clock.now += seconds
            return torch.full_like(case.dial, 0.5)

        return dataclasses.replace(claim, ratio=ratio)

    claims_ = [slow(claim_of([0.5]), seconds) for seconds in (1.0, 0.25)]
    one, other = search.verify(claims_, budget_seconds=10.0, first_rounds=1)
    assert (one.rounds, other.rounds) == (5, 20)


@pytest.mark.parametrize("top_n", [2, 3, 7])
@pytest.mark.parametrize("separable", [True, False])
def test_the_vectors_of_the_example_of_separability(top_n: int, separable: bool) -> None:
    vectors = geometry.separability_example(top_n, separable=separable).vectors.reshape(top_n + 1, top_n + 1)
    torch.testing.assert_close(vectors.norm(dim=-1), torch.ones(top_n + 1, dtype=torch.float64))
    assert torch.equal(vectors[:-1], torch.eye(top_n + 1, dtype=torch.float64)[:-1])
    along = vectors[:-1] @ vectors[-1]
    expected = 0.0 if separable else top_n**-0.5
    torch.testing.assert_close(along, torch.full((top_n,), expected, dtype=torch.float64))


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_singular_values_of_blocks_of_two_rows(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the last block has a single row."""
    monkeypatch.setattr(rank_one_eigenvalues, "BLOCK", 2 * 4)
    generator = torch.Generator().manual_seed(0)
    weights = torch.softmax(torch.randn(rows, 4, generator=generator, dtype=torch.float64), -1)
    slopes = torch.rand(rows, 4, generator=generator, dtype=torch.float64)
    found = rank_two_singular_values.rank_two_singular_value(weights, slopes)
    jacobians = (torch.eye(4, dtype=torch.float64) - weights[:, :, None]) * slopes[:, None, :]
    torch.testing.assert_close(found, torch.linalg.matrix_norm(jacobians, 2))


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


def test_a_map_is_run_on_one_row_with_one_leader() -> None:
    seen: list[Tensor] = []

    def row_map(logits: Tensor) -> Tensor:
        seen.append(logits)
        return torch.softmax(logits, -1)

    assert frontier.two_level_weight(row_map, 1.5, 4) == pytest.approx(1 / (1 + 3 * math.exp(-1.5)))
    assert seen[0].tolist() == [[1.5, 0.0, 0.0, 0.0]]


def test_an_ascent_moves_a_number_by_a_tenth_in_each_step() -> None:
    """Adam with a gradient that stays the same takes steps of its learning rate."""
    tried: list[Tensor] = []

    def ratio(case: ClaimCase) -> Tensor:
        tried.append(case.dial.detach())
        return case.dial

    start = dataclasses.replace(CASE, dial=torch.full_like(CASE.dial, 0.01))
    best = search._ascend(ratio, start)
    steps = torch.stack(tried).log().diff(dim=0)
    torch.testing.assert_close(steps, torch.full_like(steps, 0.1), rtol=1e-5, atol=0.0)
    assert torch.equal(best.dial, tried[-1])


def test_the_norm_of_kneemax_may_be_below_its_bound_by_a_millionth(monkeypatch: pytest.MonkeyPatch) -> None:
    lower: list[Tensor] = []
    monkeypatch.setattr(kneemax_claims, "between", lambda _, bound, above: lower.append(bound) or above)  # type: ignore[func-returns-value]
    case = case_of([[2.4, 0.0, 0.0], [0.3, 0.0, -0.2]], [[1.0]] * 3, 1)
    kneemax_claims._norm(case)
    largest = get("kneemax", share=1.0)(case.logits).amax(-1)
    torch.testing.assert_close(lower[0], (1 - largest).sqrt() - 1e-6, rtol=0.0, atol=1e-12)


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
