"""Limits of arguments: the last allowed value gives a number, the first one beyond raises an error that has one."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnorm.theory import dispersion, distance, geometry, gradient, isotropic_law
from attnorm.theory.gradient import entmax_worst_norm, longest_constant_length, power_iteration_norm, random_directions
from attnorm.theory.selection import select, top_n_set
from attnorm_lab.errata import search
from attnorm_lab.errata.catalogue import claims

WEIGHTS = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
VECTORS = torch.eye(4, dtype=torch.float64)
ZEROS = torch.zeros(1, 3, dtype=torch.float64)
LENGTHS, VALUES = torch.tensor([1.0, 2.0, 4.0, 9.0]), torch.tensor([1.0, 3.0, 5.0, 11.0])
TINY = 5e-324  # the smallest positive number
SLACK = 1e-4 + torch.finfo(torch.float64).eps


def a_claim() -> Any:
    return next(claim for claim in claims() if claim.searched)


def sums_to(total: float) -> Tensor:
    return torch.tensor([0.5, total - 0.5], dtype=torch.float64)


LIMITS: list[tuple[Callable[[Any], Any], list[Any], list[Any]]] = [
    (lambda heads: geometry.independent_coverage(0.5, heads), [1], [0]),
    (lambda share: geometry.independent_coverage(share, 2), [0.0, 1.0], [-1e-9, 1 + 1e-6]),
    (lambda share: geometry.independent_union(torch.tensor([share, 0.5])), [0.0, 1.0], [-1e-9, 1 + 1e-6]),
    (lambda share: geometry.union_bounds(torch.tensor([share, 0.5])).lower, [0.0, 1.0], [-1e-9, 1 + 1e-6]),
    (lambda n: geometry.top_n_coverage(WEIGHTS.expand(2, 4), n).union, [1, 3], [0]),
    (lambda T: dispersion.lemma21_bounds(1.0, 3, T).lower, [1.0], [0.0, -1.0, math.nan]),
    (lambda least: dispersion.lemma1_constants(least, 1.0)[0], [TINY, 1.0], [0.0, 1 + 1e-6]),
    (lambda low: dispersion.range_on_interval(torch.exp, low, 1.0)[0], [1.0, 0.9], [1 + 1e-9, math.nan]),
    (lambda weight: dispersion.horizon(1.0, weight=weight), [1e-9, 1 - 1e-9], [0.0, 1.0]),
    (lambda spread: dispersion.entropy_floor(spread, 3), [0.0], [-TINY, -1.0]),
    (lambda n: dispersion.lemma21_bounds(1.0, n).lower, [1, 1.0], [0, 0.99]),
    (lambda count: distance.fit_power_law(LENGTHS[:count], VALUES[:count]).exponent, [3, 4], [2]),
    (lambda least: distance.fit_power_law(torch.tensor([least, 1, 2]), VALUES[:3]).exponent, [1e-9], [0.0, -1.0]),
    (lambda least: distance.fit_power_law(LENGTHS[:3], torch.tensor([least, 1, 2])).exponent, [1e-9], [0.0, -1.0]),
    (lambda share: distance.fit_power_law(LENGTHS, VALUES, share).exponent, [1e-9, 1 - 1e-9], [0.0, 1.0]),
    (lambda heads: distance.ks_resolution(heads, 0.5), [1], [0]),
    (lambda level: distance.ks_resolution(1, level), [1e-300, 1 - 1e-9], [0.0, 1.0]),
    (lambda total: distance.theorem1_fixed_printed(select(sums_to(total), VECTORS[:2], 1)),
     [1 + 0.99e-4, 1 - 0.99e-4], [1 + 1.01e-4, 1 - 1.01e-4]),
    (lambda n: entmax_worst_norm(n, 1.5), [1], [0]),
    (lambda alpha: entmax_worst_norm(3, alpha), [1, 2], [1 - 1e-9, 2 + 1e-9]),
    (lambda T: entmax_worst_norm(3, 1.5, T), [1e-30], [0.0, math.nan]),
    (lambda alpha: longest_constant_length(alpha) or 0, [1, 2], [1 - 1e-9, 2 + 1e-9]),
    (lambda radius: geometry.separability(select(WEIGHTS, VECTORS, 2), radius), [0.0], [-TINY]),
    (lambda n: geometry.separability_example(n, separable=True).weights, [2], [1]),
    (lambda slope: gradient.threshold_jacobian_norm(torch.tensor([slope, 0.5])), [0.0], [-1e-30]),
    (lambda alpha: gradient.entmax_jacobian_norm(WEIGHTS, alpha), [1.0, 2.0], [1 - 1e-9, 2 + 1e-9]),
    (lambda total: gradient.entmax_jacobian_norm(sums_to(total)),
     [1 + 0.999 * SLACK, 1 - 0.999 * SLACK], [1 + 1.001 * SLACK, 1 - 1.001 * SLACK]),
    (lambda weight: gradient.entmax_jacobian_norm(torch.tensor([weight, 1.0])), [0.0], [-1e-9]),
    (lambda value: gradient.kernel_jacobian_norm(torch.tensor([value, 1.0]), torch.ones(2)), [0.0], [-1e-9]),
    (lambda keys: gradient.swap_example(1.0, 0.1, keys=keys).printed, [2], [1]),
    (lambda eps: gradient.finite_difference_gain(torch.sigmoid, ZEROS, eps), [1e-3], [0.0, math.nan]),
    (lambda count: power_iteration_norm(torch.sigmoid, ZEROS, iterations=count), [1], [0]),
    (lambda count: random_directions(ZEROS, count), [1], [0]),
    (lambda d: isotropic_law.isotropic_norm_cdf(0.5, [0.5, 0.5], d).probability, [2], [1]),
    (lambda tol: isotropic_law.isotropic_norm_cdf(0.5, [0.5, 0.5], 2, tol).probability, [1e-3], [0.0]),
    (lambda count: distance.theorem1_random_bounds(select(WEIGHTS, VECTORS, 1), count).lower, [0, 1], [-1, 13]),
    (lambda draws: distance.monte_carlo(lambda: torch.zeros(()), draws).mean, [2], [1]),
    (lambda most: distance.random_set_exact(select(WEIGHTS, VECTORS, 2), most), [6], [5]),
    (lambda at: search.replay(a_claim(), 0, at)[1].nan_to_num(), [0], [-1]),
    (lambda count: len(search.verify([a_claim()], budget_seconds=1e-9, first_rounds=count)), [1], [0]),
    (lambda budget: len(search.verify([a_claim()], budget_seconds=budget, first_rounds=1)), [1e-9], [0.0, math.nan]),
    (lambda n: select(WEIGHTS, VECTORS, n).weights, [1, 3], [0, 4]),
    (lambda n: top_n_set(WEIGHTS, n), [1], [0]),
    (lambda rows: select(WEIGHTS.expand(*[1] * rows, 4), VECTORS.expand(2, 4, 4), 1).weights, [1, 2], [0]),
]  # fmt: skip


@pytest.mark.parametrize(("call", "allowed", "beyond"), LIMITS)
def test_both_sides_of_a_limit(call: Callable[[Any], Any], allowed: list[Any], beyond: list[Any]) -> None:
    for value in allowed:
        assert torch.as_tensor(call(value)).double().isfinite().all(), value
    for value in beyond:
        with pytest.raises(ValueError, match=r"\d|nan"):
            call(value)


def test_up_to_12_heavy_keys_may_be_counted_singly() -> None:
    rows = select(torch.arange(1.0, 15.0, dtype=torch.float64) / 105, torch.eye(14, dtype=torch.float64), 2)
    exact = distance.random_set_exact(rows)
    bounds = distance.theorem1_random_bounds(rows, 12)
    assert bounds.lower <= exact <= bounds.upper
