"""Every default of the theory, by a call without it and one with its value."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnorm.theory import dispersion, distance, geometry, gradient
from attnorm.theory.selection import select
from attnorm_lab.errata import frontier, search
from attnorm_lab.errata.catalogue.claim import at_least, at_most, between
from tests_lab.errata.test_search import claim_of

DRAWN = torch.Generator().manual_seed(0)
WEIGHTS = torch.softmax(torch.randn(2, 6, generator=DRAWN, dtype=torch.float64), -1)
LOGITS = torch.randn(2, 6, generator=DRAWN, dtype=torch.float64)
ROWS = select(WEIGHTS, torch.randn(2, 6, 3, generator=DRAWN, dtype=torch.float64), 2)
MATRICES = torch.randn(2, 2, 3, 4, generator=DRAWN, dtype=torch.float64)
INPUTS = torch.randn(5, 4, generator=DRAWN, dtype=torch.float64)
LENGTHS, VALUES = torch.tensor([1.0, 2.0, 4.0, 9.0]), torch.tensor([1.0, 3.0, 5.0, 11.0])
ONE, TWO = (torch.tensor([value], dtype=torch.float64) for value in (1.0, 2.0))


def softmax(z: Tensor) -> Tensor:
    return torch.softmax(z, -1)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


CALLS: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
    (dispersion.corollary1_bounds, (2.0, 1.5, 7.0), {"temperature": 1.0}),
    (dispersion.lemma21_bounds, (2.0, 7.0), {"temperature": 1.0}),
    (dispersion.sharp_weight_bounds, (2.0, 7.0), {"temperature": 1.0}),
    (dispersion.horizon, (2.0,), {"temperature": 1.0}),
    (dispersion.horizon, (2.0,), {"weight": 0.5}),
    (dispersion.entropy_floor, (2.0, 7.0), {"temperature": 1.0}),
    (dispersion.entropy_floor_deficit, (2.0,), {"temperature": 1.0}),
    (dispersion.effective_gap_from_logits, (LOGITS,), {"temperature": 1.0}),
    (lambda **o: distance.fit_power_law(LENGTHS, VALUES, **o).exponent_interval, (), {"confidence": 0.95}),
    (distance.ks_resolution, (7,), {"level": 0.01}),
    (frontier.kneemax_gap, (0.6, 7), {"share": 1.0}),
    (gradient.threshold_jacobian_norm, (WEIGHTS,), {"temperature": 1.0}),
    (gradient.entmax_slopes, (WEIGHTS,), {"alpha": 1.0}),
    (gradient.entmax_jacobian_norm, (WEIGHTS,), {"alpha": 1.0}),
    (gradient.entmax_jacobian_norm, (WEIGHTS,), {"temperature": 1.0}),
    (gradient.entmax_norm_bracket, (WEIGHTS,), {"alpha": 1.0}),
    (gradient.entmax_norm_bracket, (WEIGHTS,), {"temperature": 1.0}),
    (gradient.corollary3_local, (WEIGHTS,), {"temperature": 1.0}),
    (lambda **o: gradient.finite_difference_gain(softmax, LOGITS, 0.1, generator=seeded(), **o), (),
     {"temperature": 1.0}),
    (lambda **o: gradient.finite_difference_gain(softmax, LOGITS, 0.1, generator=seeded(), **o), (), {"samples": 1}),
    (gradient.finite_difference_corrected, (0.1,), {"temperature": 1.0}),
    (lambda **o: gradient.swap_example(1.0, 0.1, **o).corrected, (), {"temperature": 1.0}),
    (lambda **o: gradient.swap_example(1.0, 0.1, **o).weight_distance, (), {"keys": 16}),
    (distance.theorem1_random_bounds, (ROWS,), {"heaviest": 0}),
    (dispersion.proposition31_bound, (MATRICES[0], MATRICES[1], INPUTS, INPUTS), {"scaling": 1.0}),
    (dispersion.proposition31_tight, (MATRICES[0], MATRICES[1], INPUTS, INPUTS), {"scaling": 1.0}),
    (at_most, (ONE, TWO), {"rounding": 0.0}),
    (at_least, (TWO, ONE), {"rounding": 0.0}),
    (between, (ONE, ONE / 2, TWO), {"rounding": 0.0}),
]  # fmt: skip


@pytest.mark.parametrize(("function", "arguments", "default"), CALLS)
def test_a_call_without_an_argument_uses_its_default(
    function: Callable[..., Any], arguments: tuple[Any, ...], default: dict[str, Any]
) -> None:
    found, expected = (torch.as_tensor(_flat(function(*arguments, **o))) for o in ({}, default))
    assert found.shape == expected.shape
    assert torch.equal(found, expected)
    ((name, value),) = default.items()
    other = function(*arguments, **{name: value + 1 if isinstance(value, int) else 1.02 * value + 1e-3})
    assert not torch.equal(torch.as_tensor(_flat(other)), expected)  # the argument matters


def _flat(found: Any) -> list[float]:
    if isinstance(found, Tensor):
        return [float(number) for number in found.flatten()]
    return [number for part in found for number in _flat(part)] if isinstance(found, tuple | list) else [float(found)]


def test_how_often_the_power_iteration_steps_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product that grows by more than any tolerance never ends it earlier; one that grows by less does."""
    sizes: list[float] = []

    class Growing:
        def __init__(self, growth: float) -> None:
            self.size, self.growth = 1.0, growth

        def jvp(self, v: Tensor) -> Tensor:
            self.size *= self.growth
            sizes.append(self.size)
            return self.size * v

        def vjp(self, v: Tensor) -> Tensor:
            return v

    for growth, steps in ((1.01, 200), (1 + 1.005e-9, 200), (1 + 0.995e-9, 2)):
        sizes.clear()
        at = Growing(growth)
        found = gradient.Linearization(LOGITS[:1], at.jvp, at.vjp)
        monkeypatch.setattr(gradient, "linearize", lambda *_, found=found: found)
        gradient.power_iteration_norm(softmax, LOGITS[:1], generator=seeded())
        assert len(sizes) == steps


def test_how_many_sets_and_permutations_are_drawn_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, function, draws in (
        (geometry, geometry.separability_null, 200),
        (distance, distance.random_set_monte_carlo, 1000),
    ):
        monkeypatch.setattr(module, "monte_carlo", lambda draw, draws: distance.MonteCarlo(ONE, ONE, draws))
        assert function(ROWS).draws == draws


def test_the_grid_on_which_a_range_is_looked_for_by_default() -> None:
    shapes: list[torch.Size] = []

    def function(x: Tensor) -> Tensor:
        shapes.append(x.shape)
        return x.square()

    dispersion.range_on_interval(function, -1.0, 1.0)
    assert shapes == [(4097,), *[(8, 65)] * 8] * 2


def test_up_to_200_000_sets_are_counted_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for sets, counted in ((200_000, True), (200_001, False)):
        monkeypatch.setattr(distance.math, "comb", lambda *_, sets=sets: sets)
        if counted:
            distance.random_set_exact(ROWS)
        else:
            with pytest.raises(ValueError, match="200001"):
                distance.random_set_exact(ROWS)


def test_the_random_seed_of_a_search_is_0_by_default() -> None:
    (found,) = search.verify([claim_of([2.0])], budget_seconds=1e-9, first_rounds=1)
    assert found.counterexample is not None
    assert found.counterexample.seed == 0
    nothing = search.Finding(claim_of([2.0]))
    assert (nothing.tried, nothing.rounds, nothing.violations) == (0, 0, 0)
