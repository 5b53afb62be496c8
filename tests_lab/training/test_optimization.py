"""The learning rate climbs, turns once and ends near 0; only matrices decay."""

import pytest

from attnorm_lab.training.lm.model import build_model
from attnorm_lab.training.run import learning_rate, make_optimizer
from tests_lab.training.conftest import tiny


def test_the_learning_rate_climbs_and_then_falls_to_almost_nothing() -> None:
    settings = tiny(steps=100, warmup=10, learning_rate=0.5)
    rates = [learning_rate(step, settings) for step in range(100)]
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert max(rates) == rates[10] == pytest.approx(0.5, rel=1e-3)
    assert 0 < rates[-1] < 0.5 * 1e-3
    assert rates[55] == pytest.approx(0.25, rel=0.05)


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 100), (5, 5), (5, 4)])
def test_short_runs_move_at_every_step(steps: int, warmup: int) -> None:
    settings = tiny(steps=steps, warmup=warmup)
    assert all(0 < learning_rate(step, settings) <= settings.learning_rate for step in range(steps))


def test_biases_and_layer_norms_do_not_decay() -> None:
    model = build_model(tiny(weight_decay=0.3), vocabulary=300, end_of_text=0)
    decaying, free = make_optimizer(model, tiny(weight_decay=0.3)).param_groups
    assert decaying["weight_decay"] == 0.3
    assert free["weight_decay"] == 0.0
    assert {parameter.dim() for parameter in free["params"]} == {1}
    assert len(decaying["params"]) + len(free["params"]) == len(list(model.parameters()))
