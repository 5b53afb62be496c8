"""Calls that cannot be answered raise an error that names what is wrong."""

from collections.abc import Callable
from pathlib import Path

import pytest

from attnorm_lab.experiments.clrs_text.results import results_of
from attnorm_lab.experiments.experiment import ExperimentSubject

BAD_CALLS: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: results_of([]), ValueError, "--stage train"),
    (lambda: ExperimentSubject(others=("bundled",)).identity(with_model=True), ValueError, "'bundled'"),
    (lambda: ExperimentSubject(texts=(Path("missing.txt"),)).identity(with_model=True), ValueError, r"missing\.txt"),
    (
        lambda: ExperimentSubject(model="./no-such-folder").identity(with_model=True),
        ValueError,
        r"'\./no\-such\-folder'",
    ),
    (lambda: ExperimentSubject(device="abacus").identity(with_model=True), ValueError, "'abacus'"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD_CALLS)
def test_a_bad_call_is_named(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
