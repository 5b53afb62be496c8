"""Every default of the theory, by a call without it and one with its value."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from attnorm.theory import dispersion, distance, gradient
from attnorm.theory.selection import select
from attnorm_lab.errata import frontier
from attnorm_lab.errata.catalogue.claim import at_least, at_most, between

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
