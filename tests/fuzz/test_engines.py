"""Random calls of attention on every engine equal the naive formula in float64: outputs, gradients, compiled code.

A few examples run with every commit. Many, with totals: python -m tests.fuzz --examples 2000
"""

import hypothesis
import pytest
import torch

from tests.fuzz.__main__ import fuzz
from tests.fuzz.calls import ENGINES, Example, check, examples

# The kernels compute values that they do not take, as an exponential that overflows beside its series.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning")


@pytest.fixture
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnorm.engines import blocked

    monkeypatch.setattr(blocked, "BLOCK_ELEMENTS", 2**9)


@pytest.mark.usefixtures("_small_blocks")
@hypothesis.settings(max_examples=60, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(examples().filter(lambda example: example.mode != "compile"))
def test_every_engine_equals_the_naive_formula_or_says_why_not(example: Example) -> None:
    hypothesis.event(f"{example.engine}: {check(example)}")


def test_a_wrong_formula_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.fuzz import calls

    right = calls.naive
    monkeypatch.setattr(calls, "naive", lambda *given: 1.001 * right(*given))
    example = Example(
        name="ssmax", engine="blocked", dtype=torch.float64, batch=1, groups=1, key_heads=1, queries=5, keys=7, width=8,
        value_width=4, layout="contiguous", mask="none", causal=True, mode="eval", deviation=1.0, seed=0,
    )  # fmt: skip
    with pytest.raises(AssertionError):
        check(example)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("_small_blocks")
def test_many_random_calls_equal_the_naive_formula() -> None:
    totals = fuzz(2000, seed=1)
    assert {engine: one.failures for engine, one in totals.items() if one.failed} == {}
    assert all(totals[engine].ran > 20 for engine in ENGINES)
