"""Errors of normalizers name the offending value."""

import pytest
import torch

from attnorm.normalizers import get
from attnorm.normalizers.block import Positions, check_mask


def test_positions_that_do_not_fit_are_named_with_both_sizes() -> None:
    positions = Positions(torch.arange(4), torch.arange(6))
    with pytest.raises(ValueError, match=r"4 queries and 6 keys.*3 queries and 5 keys"):
        get("scale_invariant")(torch.zeros(2, 3, 5), positions=positions)


@pytest.mark.parametrize(
    ("mask", "logits", "padding"),
    [
        ((2, 5), (2, 3, 4, 5), True),
        ((3, 5), (2, 3, 4, 5), False),
        ((2, 4), (2, 3, 4, 5), False),
        ((2, 3, 5), (2, 3, 4, 5), False),
        ((2, 5), (2, 4, 5), False),  # three dimensions: no heads to leave room for
    ],
)
def test_a_mask_of_padding_is_answered_with_the_index_that_makes_it_fit(
    mask: tuple[int, ...], logits: tuple[int, ...], padding: bool
) -> None:
    with pytest.raises(ValueError, match="broadcast") as refused:
        check_mask(torch.ones(mask, dtype=torch.bool), torch.Size(logits))
    assert ("mask[:, None, None, :]" in str(refused.value)) is padding
    assert str(mask) in str(refused.value)
    assert str(logits) in str(refused.value)
