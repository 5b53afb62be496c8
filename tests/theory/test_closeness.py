"""Separability on sharp rows: every implementation agrees with arithmetic of thousands of bits."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attnorm.metrics.nested_sets import NestedSets
from attnorm.metrics.separability import separability_and_null
from attnorm.theory.geometry import distinguishable, separability, separability_null
from attnorm.theory.selection import near_one, relative_weights, select
from tests.theory.reference.separability import in_the_ball, rounding

KEYS, WIDTH, TOP_N, ROWS = 24, 4, 6, 3
DTYPES = [torch.float32, torch.float64]
Measure = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def of_theory(weights: Tensor, x: Tensor, logs: Tensor | None) -> Tensor:
    return separability(select(weights, x, TOP_N, log_weights=logs))


def of_metrics(weights: Tensor, x: Tensor, logs: Tensor | None) -> Tensor:
    """A null that permutes nothing, for two N."""
    sizes, visible = (TOP_N, 2 * TOP_N), torch.ones(1, len(weights), KEYS, dtype=torch.bool)
    rows = NestedSets.of(weights[None], x[None], visible, sizes, None if logs is None else logs[None])
    ranked = rows.ranked_keys()
    return separability_and_null(rows, ranked, ranked[:, None, None])[0, 1, :, 0, 0]


MEASURES = pytest.mark.parametrize("measure", [of_theory, of_metrics])


def rows_with_lead(lead: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits whose winner is that many nats ahead of most others, with a few keys in between, and vectors."""
    generator = torch.Generator().manual_seed(int(lead))
    logits = 0.2 * (1 + lead) * torch.randn(ROWS, KEYS, generator=generator, dtype=torch.float64)
    logits[:, 5] = logits.amax(-1) + lead
    x = torch.randn(KEYS, WIDTH, generator=generator, dtype=torch.float64) + 0.5
    return logits.to(dtype), x.to(dtype)


def check(found: Tensor, given: Tensor, x: Tensor, *, logarithms: bool = False) -> list[int]:
    """Within what rounding of the inputs leaves open, which is little; returns the exact counts."""
    exact, undecided = [], 0
    for share, row in zip(found.tolist(), given, strict=True):
        count = in_the_ball(row, x, TOP_N, eps=rounding(x.dtype), logarithms=logarithms)
        assert count.surely <= round(share * TOP_N) <= count.at_most, count
        undecided += count.at_most - count.surely
        exact.append(count.exact)
    assert undecided <= 1
    return exact


@MEASURES
@pytest.mark.parametrize("lead", [0.0, 3.0, 10.0, 17.0, 30.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_share_is_exact_whatever_the_lead_of_the_winner(measure: Measure, lead: float, dtype: torch.dtype) -> None:
    logits, x = rows_with_lead(lead, dtype)
    weights = torch.softmax(logits, -1)
    exact = check(measure(weights, x, None), weights, x)
    # Distances that round to the same number would count every key.
    assert min(exact) < TOP_N


@MEASURES
@pytest.mark.parametrize("lead", [30.0, 300.0, 3000.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_that_underflow_keep_their_order(measure: Measure, lead: float, dtype: torch.dtype) -> None:
    logits, x = rows_with_lead(lead, dtype)
    weights = torch.softmax(logits, -1)
    if lead == 3000.0:
        assert (weights == 0).sum(-1).min() > KEYS - TOP_N
    check(measure(weights, x, logits), logits, x, logarithms=True)


@MEASURES
@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_negative_and_unnormalised_weights(measure: Measure, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(8)  # without near ties, which metrics counts in part
    x = (torch.randn(KEYS, WIDTH, generator=generator, dtype=torch.float64) + 0.3).to(dtype)
    signed = torch.randn(ROWS, KEYS, generator=generator, dtype=torch.float64).to(dtype)
    sparse = signed.clamp(min=0) * (torch.arange(KEYS) % 3 == 0)
    assert (sparse > 0).sum(-1).min() < TOP_N
    for weights in (signed, signed.exp() * 1e5, signed.exp() * 1e-30, sparse, -signed.exp()):
        check(measure(weights, x, None), weights, x)


@MEASURES
def test_keys_of_weight_0_are_on_the_rim_when_all_others_are(measure: Measure) -> None:
    """The nearest key left out is as far from s as the selected ones of weight 0, which therefore count."""
    weights = torch.zeros(1, KEYS)
    weights[0, :2] = torch.tensor([0.75, 0.25])
    x = torch.eye(KEYS)
    assert measure(weights, x, None) == 1
    x[1] = -x[0]  # q of key 1 is negative: farther than all keys of weight 0
    assert measure(weights, x, None) == pytest.approx(1 - 1 / TOP_N)


@MEASURES
@pytest.mark.parametrize("dtype", DTYPES)
def test_neither_the_size_of_weights_nor_of_vectors_matters(measure: Measure, dtype: torch.dtype) -> None:
    logits, x = rows_with_lead(10.0, dtype)
    weights = torch.softmax(logits, -1)
    expected = measure(weights, x, None)
    for factor in (2.0**-90, 2.0**90):
        torch.testing.assert_close(measure(weights * factor, x, None), expected)
        torch.testing.assert_close(measure(weights, x * factor, None), expected)


def test_the_permuted_null_of_underflowing_weights_is_that_of_their_logarithms() -> None:
    logits, x = rows_with_lead(300.0, torch.float64)
    rows = select(torch.softmax(logits.float(), -1), x.float(), TOP_N, log_weights=logits.float())
    wide = select(torch.softmax(logits, -1), x, TOP_N)
    assert (rows.weights == 0).sum() > (wide.weights == 0).sum()
    found, expected = (
        separability_null(one, 20, generator=torch.Generator().manual_seed(0)).mean for one in (rows, wide)
    )
    torch.testing.assert_close(found.double(), expected)


def test_a_vector_that_is_not_finite_leaves_no_share() -> None:
    logits, x = rows_with_lead(3.0, torch.float64)
    x[2] = torch.nan
    assert separability(select(torch.softmax(logits, -1), x, TOP_N)).isnan().all()
    assert not distinguishable(select(torch.softmax(logits, -1), x, TOP_N)).any()


def test_relative_weights_keep_zeros_signs_and_never_reach_zero_or_infinity() -> None:
    weights = torch.tensor([[1.0, -1e-40, 0.0, 1e-12]])
    reference = torch.tensor([[False, False, True, True]])
    found = relative_weights(weights, reference)[0]
    assert found[2] == 0
    assert found[3] == 1
    assert found[1] < 0
    assert found[0] == pytest.approx(1e12)
    extreme = relative_weights(torch.tensor([[1.0, 1e-44]]), torch.tensor([[False, True]]))
    assert extreme.isfinite().all()
    nothing = relative_weights(torch.tensor([[1.0, 0.0]]), torch.tensor([[False, True]]))
    assert nothing[0, 0] > 1e20
    assert nothing[0, 1] == 0


def test_scaling_vectors_rounds_nothing() -> None:
    x = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-30, 1e30])[:, None, None]
    near = near_one(x)
    assert near.abs().amax((1, 2)).tolist() == pytest.approx([0.75, 0.75], abs=0.25)
    ratio = x.double() / near.double()
    assert torch.equal(torch.log2(ratio), torch.log2(ratio).round())
