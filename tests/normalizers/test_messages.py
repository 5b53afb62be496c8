"""Errors of normalizers name the offending value."""

import pytest
import torch

from attnorm.normalizers import compose, get
from attnorm.normalizers.block import Positions, check_mask
from attnorm.normalizers.contract import per_head


@pytest.mark.parametrize(
    ("mask", "advice"),
    [(torch.zeros(3, 5), r"float32.*finfo"), (torch.zeros(3, 5, dtype=torch.int64), r"int64.*\.bool\(\)")],
)
def test_a_mask_of_numbers_is_named_with_what_makes_it_boolean(mask: torch.Tensor, advice: str) -> None:
    with pytest.raises(TypeError, match=advice):
        get("softmax")(torch.zeros(2, 3, 5), mask)


def test_positions_that_do_not_fit_are_named_with_both_sizes() -> None:
    positions = Positions(torch.arange(4), torch.arange(6))
    with pytest.raises(ValueError, match=r"4 queries and 6 keys.*3 queries and 5 keys"):
        get("scale_invariant")(torch.zeros(2, 3, 5), positions=positions)


def test_parameters_for_other_heads_are_named_with_both_sizes() -> None:
    with pytest.raises(ValueError, match=r"\(\.\.\., 3, queries, keys\).*for 3 heads.*got 2 heads.*heads=2"):
        per_head(torch.ones(3), torch.zeros(2, 4, 5))


def test_a_part_that_is_more_than_asked_for_is_named_with_the_option_it_fits() -> None:
    with pytest.raises(ValueError, match=r"'ssmax'.*compose\(scale='ssmax'\)"):
        compose("softmax", sink="ssmax")


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
