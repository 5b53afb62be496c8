"""What several heads cover together: the printed formula, what holds without independence, and the measured union."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnorm.theory import geometry
from attnorm.theory.selection import select, top_n_set


def test_the_printed_numbers() -> None:
    assert float(geometry.independent_coverage(0.8, 3)) == pytest.approx(0.992)
    assert float(geometry.independent_coverage(1e-12, 10)) == pytest.approx(1e-11, rel=1e-9)
    assert geometry.independent_coverage(torch.tensor([0.0, 1.0]), 4).tolist() == [0, 1]
    assert float(geometry.independent_coverage(0.3, 1)) == pytest.approx(0.3)


@given(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=5))
def test_the_union_lies_between_the_best_head_and_the_sum(heads: list[list[bool]]) -> None:
    covered = torch.tensor(heads)
    found = geometry.union_coverage(covered, torch.ones(6, dtype=torch.bool))
    brute = len({key for head in heads for key in range(6) if head[key]}) / 6
    assert float(found.union) == pytest.approx(brute)
    assert found.per_head.tolist() == pytest.approx([sum(head) / 6 for head in heads])
    lower, upper = geometry.union_bounds(found.per_head)
    assert lower - 1e-12 <= found.union <= upper + 1e-12
    assert float(found.independent) == pytest.approx(float(geometry.independent_union(found.per_head)))


def test_dependent_heads_reach_both_ends_and_refute_the_formula() -> None:
    reference = torch.ones(10, dtype=torch.bool)
    same = (torch.arange(10) < 8).expand(3, 10)
    found = geometry.union_coverage(same, reference)
    assert found.union == geometry.union_bounds(found.per_head).lower == 0.8  # printed: 0.992
    apart = torch.stack([torch.arange(10) // 3 == h for h in range(3)])
    found = geometry.union_coverage(apart, reference)
    assert float(found.union) == pytest.approx(0.9)
    assert float(geometry.union_bounds(found.per_head).upper) == pytest.approx(0.9)
    assert float(found.independent) == pytest.approx(1 - 0.7**3)


def test_independent_heads_follow_the_formula() -> None:
    covered = torch.rand(3, 200_000, generator=torch.Generator().manual_seed(0)) < 0.8
    found = geometry.union_coverage(covered, torch.ones(200_000, dtype=torch.bool))
    assert float(found.union) == pytest.approx(0.992, abs=0.001)


def test_top_n_coverage_is_that_of_the_heads_sets_over_the_visible_keys() -> None:
    weights = torch.rand(2, 3, 8)
    mask = torch.rand(2, 8) < 0.8
    mask[:, :2] = True
    weights = weights.masked_fill(~mask[:, None], torch.nan)
    found = geometry.top_n_coverage(weights, 2, mask)
    for b in range(2):
        keys = [set(torch.where(mask[b], head, -1.0).topk(2).indices.tolist()) for head in weights[b]]
        assert float(found.union[b]) == pytest.approx(len(set.union(*keys)) / int(mask[b].sum()))
        alone = geometry.top_n_coverage(weights[b], 2, mask[b])
        assert torch.equal(alone.per_head, found.per_head[b])


def test_the_papers_reading_distinguishable_keys_of_what_the_heads_select() -> None:
    vectors = torch.eye(6, dtype=torch.float64)
    weights = torch.softmax(torch.randn(4, 6, dtype=torch.float64), -1)
    selected = top_n_set(weights, 3)
    found = geometry.union_coverage(geometry.distinguishable(select(weights, vectors, 3)), selected.any(0))
    assert found.union == 1  # orthonormal vectors: every head distinguishes all it selects


def test_rows_without_a_key_to_cover_are_nan_and_impossible_input_is_refused() -> None:
    covered, reference = torch.ones(2, 3, 4, dtype=torch.bool), torch.tensor([[True] * 4, [False] * 4])
    assert geometry.union_coverage(covered, reference).union.isnan().tolist() == [False, True]
    with pytest.raises(ValueError, match="key"):
        geometry.union_coverage(covered, torch.zeros(4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"heads.*0"):
        geometry.independent_coverage(0.5, 0)
    with pytest.raises(ValueError, match=r"0.*1"):
        geometry.independent_union(torch.tensor([0.5, 1.5]))
    with pytest.raises(ValueError, match=r"top_n.*0"):
        geometry.top_n_coverage(torch.rand(2, 4), 0)


def test_the_formula_has_a_gradient() -> None:
    shares = torch.tensor([0.2, 0.7, 0.9], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(geometry.independent_union, (shares,))
