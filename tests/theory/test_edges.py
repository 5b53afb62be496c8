"""Rows without a number, and numbers on a limit: equality belongs to the side that the docstring says."""

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attnorm.theory import dispersion, distance, geometry, search
from attnorm.theory.catalogue import claims
from attnorm.theory.catalogue.claim import ClaimCase, draw_case
from attnorm.theory.entmax_worst_case import entmax_worst_weights
from attnorm.theory.selection import safe_sqrt, select
from tests.theory.test_search import claim_of

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


def two_cases() -> tuple[ClaimCase, ClaimCase]:
    (claim, *_) = [each for each in claims() if each.searched]
    first = draw_case(0, claim.sizes, structured=False)
    moved = {name: getattr(first, name) + 1 for name in ("logits", "vectors", "dial", "matrices")}
    return first, dataclasses.replace(first, **moved)


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
    one = search._Search(claim_of([2.0]), seed=0)
    one.run_round()
    each = one.violations
    for enough, rounds in ((2 * each, 2), (2 * each + 1, 3)):
        monkeypatch.setattr(search, "ENOUGH_VIOLATIONS", enough)
        (finding,) = search.verify([claim_of([2.0])], budget_seconds=60.0, first_rounds=1)
        assert (finding.rounds, finding.violations) == (rounds, rounds * each)
