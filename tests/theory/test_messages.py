"""Errors of theory name the offending value."""

import pytest
import torch

from attnorm.theory import distance, gradient
from attnorm.theory.selection import select
from attnorm_lab.errata import frontier


def test_a_row_that_does_not_sum_to_one_is_named_by_its_sum() -> None:
    rows = select(torch.tensor([[0.5, 0.25, 0.5]]).double(), torch.eye(3).double(), 1)
    with pytest.raises(ValueError, match=r"1\.25"):
        distance.theorem1_fixed_printed(rows)
    with pytest.raises(ValueError, match=r"1\.5\b"):
        gradient._distributions(torch.tensor([0.75, 0.75]), None)


def test_a_weight_outside_what_is_possible_is_named_with_the_least_possible() -> None:
    with pytest.raises(ValueError, match=r"\[0\.25, 1\], got 0\.2$"):
        frontier.frontier_effort(4, 0.2)
    assert frontier.frontier_effort(4, 0.25) == pytest.approx(0, abs=1e-12)
    with pytest.raises(ValueError, match=r"got 1$"):
        frontier.frontier_effort(1, 1.0)


def test_a_top_n_set_of_all_keys_is_named_with_the_longest_row() -> None:
    mask = torch.tensor([[True, True, False, False], [True, True, True, False]])
    with pytest.raises(ValueError, match=r"= 3 .* 3 visible"):
        select(torch.ones(2, 4), torch.ones(4, 2), 3, mask)
    with pytest.raises(ValueError, match=" 0 visible"):
        select(torch.ones(0, 4), torch.ones(4, 2), 3)
