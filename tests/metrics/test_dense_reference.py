"""The dense reference itself: which keys a query sees."""

import math

import pytest
import torch

from attnorm.metrics.call import AttentionCall
from tests.metrics.reference import dense_visible, row_statistics, vector_numbers

ROWS = torch.tensor([[True, True, True], [True, False, True]])  # a mask with a row for each of two queries


@pytest.mark.parametrize(
    ("mask", "seen"),
    [
        (None, [[1, 1, 0], [1, 1, 1]]),
        (torch.tensor([True, False, True]), [[1, 0, 0], [1, 0, 1]]),
        (torch.tensor([[False, True, True]]), [[0, 1, 0], [0, 1, 1]]),
        (ROWS, [[1, 1, 1], [1, 0, 1]]),
        (ROWS[None, None], [[1, 1, 1], [1, 0, 1]]),
    ],
)
def test_causality_is_in_a_mask_that_has_a_row_for_each_query(mask: torch.Tensor | None, seen: list[list[int]]) -> None:
    q, k = torch.zeros(1, 2, 2, 4), torch.zeros(1, 1, 3, 4)
    call = AttentionCall(0, "decoder", q, k, k, scale=1.0, causal=True, mask=mask)
    assert dense_visible(call).int().tolist() == [[seen, seen]]


def test_as_many_queries_as_keys_are_causal_under_any_mask() -> None:
    q = torch.zeros(1, 1, 2, 4)
    call = AttentionCall(0, "decoder", q, q, q, scale=1.0, causal=True, mask=torch.ones(2, 2, dtype=torch.bool))
    assert dense_visible(call)[0, 0].int().tolist() == [[1, 0], [1, 1]]


@pytest.mark.parametrize(("logit", "weight"), [(-math.inf, 0.0), (0.0, math.nan), (math.nan, math.nan)])
def test_a_row_has_numbers_only_where_logits_and_weights_are_finite(logit: float, weight: float) -> None:
    logits, weights = torch.tensor([1.0, logit]), torch.tensor([1.0, weight])
    assert row_statistics(logits, weights, torch.tensor([True, True]), (1,)) == {}
    assert row_statistics(logits, weights, torch.tensor([True, False]), (1,))["row_sum"] == 1.0


def test_a_selected_key_as_close_as_the_closest_of_the_others_is_distinguishable() -> None:
    """Weights 1/2, 1/4, 1/4 of one vector: the last two keys lie equally far from the sum of the first two."""
    found = vector_numbers(torch.tensor([0.5, 0.25, 0.25]), torch.ones(3, 1), 2)
    assert found["separability"] == 1.0
