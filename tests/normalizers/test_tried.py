"""The checks try the cases and measure the numbers that they did when tried.json was written."""

import json

import pytest

from attnorm.normalizers import Normalizer
from tests.normalizers.test_check import BROKEN
from tests.normalizers.tried import SPIED, STORED, calls, complaints, searched_rows

STORED_NUMBERS = json.loads(STORED.read_text(encoding="utf-8"))


@pytest.mark.parametrize("check", SPIED)
def test_a_check_tries_the_stored_cases(check: str) -> None:
    assert calls(check) == pytest.approx(STORED_NUMBERS["calls"][check], rel=1e-5, abs=1e-5)


def test_lipschitz_constants_are_measured_on_the_stored_rows() -> None:
    for found, stored in zip(searched_rows(), STORED_NUMBERS["rows"], strict=True):
        assert found == pytest.approx(stored, rel=1e-5)


@pytest.mark.parametrize(("index", "check", "normalizer"), [(i, *broken) for i, broken in enumerate(BROKEN)])
def test_a_check_measures_the_stored_numbers(index: int, check: str, normalizer: Normalizer) -> None:
    stored = STORED_NUMBERS["complaints"][index]
    assert complaints(check, normalizer) == pytest.approx(stored, rel=1e-2, abs=1e-9)
