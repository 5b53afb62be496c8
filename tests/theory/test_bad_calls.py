"""Calls that cannot be answered raise an error that names what is wrong."""

from collections.abc import Callable

import pytest
import torch

from attnorm.theory import dispersion, gradient
from attnorm.theory.gradient import entmax_worst_norm, linearize, power_iteration_norm
from attnorm_lab.errata import frontier as fr
from attnorm_lab.errata import replay, verify
from tests_lab.errata.test_search import CLAIMS

BAD_CALLS: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: dispersion.sharp_weight_bounds(1.0, 5, temperature=0.0), ValueError, "temperature.*0"),
    (lambda: dispersion.lemma21_bounds(1.0, 0), ValueError, "got 0"),
    (lambda: dispersion.entropy_floor(-1.0, 5), ValueError, "got -1"),
    (lambda: dispersion.horizon(1.0, weight=1.0), ValueError, "got 1"),
    (lambda: dispersion.range_on_interval(torch.exp, 1.0, 0.0), ValueError, "empty interval"),
    (lambda: dispersion.range_on_interval(lambda z: 1 / z.abs(), -1.0, 1.0), ValueError, "bounded F"),
    (
        lambda: entmax_worst_norm(0, 1.5, 1.0),
        ValueError,
        "at least one key|alpha must lie in|temperature must be positive",
    ),
    (
        lambda: entmax_worst_norm(3, 0.9, 1.0),
        ValueError,
        "at least one key|alpha must lie in|temperature must be positive",
    ),
    (
        lambda: entmax_worst_norm(3, 2.1, 1.0),
        ValueError,
        "at least one key|alpha must lie in|temperature must be positive",
    ),
    (
        lambda: entmax_worst_norm(3, 1.5, 0.0),
        ValueError,
        "at least one key|alpha must lie in|temperature must be positive",
    ),
    (lambda: dispersion.horizon(torch.tensor([1.0, -2.0, -1.0])), ValueError, r"got -2\.0"),
    (lambda: dispersion.lemma21_bounds(1.0, torch.tensor([0.25, 0.5, 0.0])), ValueError, r"got 0\.5"),
    (lambda: fr.frontier_weight(1, 0.5), ValueError, "at least 2, got 1"),
    (lambda: fr.frontier_weight(5, -0.5), ValueError, "must not be negative, got -0.5"),
    (lambda: fr.frontier_effort(10, 0.05), ValueError, r"\[0.1, 1\], got 0.05"),
    (lambda: fr.softmax_gap(1.2, 10), ValueError, "got 1.2"),
    (lambda: fr.kneemax_weight(-1.0, 10), ValueError, "got -1.0"),
    (lambda: gradient.corollary3_printed(0.0), ValueError, "temperature must be positive, got 0"),
    (lambda: gradient.corollary3_corrected(-1), ValueError, "got -1"),
    (
        lambda: gradient.entmax_jacobian_norm(torch.tensor([0.5, 0.2])),
        ValueError,
        "sum to 1 in every row.*got the sum 0.7",
    ),
    (lambda: gradient.entmax_jacobian_norm(torch.tensor([1.5, -0.5])), ValueError, "must not be negative, found -0.5"),
    (lambda: gradient.entmax_jacobian_norm(torch.tensor([0.5, 0.5]), 2.5), ValueError, r"alpha.*\[1, 2\]"),
    (lambda: gradient.threshold_jacobian_norm(torch.tensor([0.5, -0.1])), ValueError, "slopes of at least 0"),
    (lambda: gradient.kernel_jacobian_norm(torch.zeros(3), torch.ones(3)), ValueError, "positive sum"),
    (lambda: gradient.kernel_jacobian_norm(-torch.ones(3), torch.ones(3)), ValueError, "non-negative"),
    (lambda: gradient.swap_example(1.0, 0.1, keys=1), ValueError, "at least two keys, got 1"),
    (
        lambda: gradient.finite_difference_gain(torch.sigmoid, torch.zeros(1, 3), 0.0),
        ValueError,
        "epsilon must be positive",
    ),
    (lambda: linearize(lambda z: z[..., :1], torch.zeros(1, 3)), ValueError, "of the shape"),
    (lambda: power_iteration_norm(torch.sigmoid, torch.zeros(1, 3), iterations=0), ValueError, "at least 1, got 0"),
    (lambda: verify([], budget_seconds=0), ValueError, "budget_seconds must be positive, got 0"),
    (lambda: verify([], first_rounds=0), ValueError, "first_rounds must be at least 1, got 0"),
    (lambda: replay(CLAIMS["theorem-2.2"], 0, 0), ValueError, "theorem-2.2 is proved by an argument"),
    (lambda: replay(CLAIMS["lemma-1"], 0, -1), ValueError, "round of at least 0, got -1"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD_CALLS)
def test_a_bad_call_is_named(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
