"""Addresses of cases name the same rows, with the same ratios, as when replayed.json was written."""

import json

import pytest
import torch

from attnorm_lab.errata import claims
from tests_lab.errata.replayed import ROUNDS, STORED, outlines, ratios

STORED_NUMBERS = json.loads(STORED.read_text(encoding="utf-8"))
EXACT = 1e-5  # of a bound: where all stored ratios are below, the bound is an equation and they are its rounding,
ROUNDING = 1e-4  # which is below this, by another amount on another CPU or with another LAPACK
CLAIMS = {claim.id: claim for claim in claims() if claim.searched}


def test_cases_are_drawn_as_they_were() -> None:
    for found, stored in zip(outlines(), STORED_NUMBERS["cases"], strict=True):
        assert found.keys() == stored.keys()
        for name, numbers in stored.items():
            assert found[name] == pytest.approx(numbers, rel=1e-5, abs=1e-5), name


def test_every_claim_is_stored() -> None:
    assert STORED_NUMBERS["ratios"].keys() == CLAIMS.keys(), "run python -m tests_lab.errata.replayed"


@pytest.mark.parametrize("name", CLAIMS)
def test_an_address_names_the_same_row_and_ratio_as_before(name: str) -> None:
    for round_number, stored in zip(ROUNDS, STORED_NUMBERS["ratios"][name], strict=True):
        compare(ratios(CLAIMS[name], round_number), stored)


def compare(found: torch.Tensor, stored: list[list[float | None]]) -> None:
    """Where the stored ratio does not depend on rounding."""
    known = torch.tensor([[x is not None for x in row] for row in stored])
    expected = torch.tensor([[0.0 if x is None else x for x in row] for row in stored], dtype=torch.float64)
    rounding = ROUNDING * (expected.abs().nan_to_num().amax(0) < EXACT)
    found, expected = (torch.where(ratio.abs() < rounding, 0.0, ratio) for ratio in (found, expected))
    torch.testing.assert_close(found[known], expected[known], rtol=1e-5, atol=1e-8, equal_nan=True)
