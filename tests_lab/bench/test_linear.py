"""Cost against tokens and the error of SOFT's low rank."""

import pytest
import torch

from attnorm_lab.bench import linear
from attnorm_lab.bench.linear import independent_tokens, means_of_squares, measure_errors, smooth_tokens
from attnorm_lab.bench.results import Benchmarks, CostCurve, CostPoint
from tests_lab.bench.test_results import MACHINE


def curve(power: float, factor: float = 1.0, lengths: tuple[int, ...] = (1024, 2048, 4096, 8192)) -> CostCurve:
    points = tuple(CostPoint(length=length, ms=factor * length**power, extra_mb=None) for length in lengths)
    return CostCurve(what="x", setting="here", points=points)


@pytest.mark.parametrize("power", [1.0, 2.0])
def test_the_exponent_is_the_slope(power: float) -> None:
    assert curve(power).exponent == pytest.approx(power)
    assert curve(power, lengths=(1024, 2048)).exponent == pytest.approx(power)
    assert curve(power, lengths=(1024,)).exponent is None
    assert curve(power, lengths=(128, 256, 512)).exponent is None  # --quick


def test_constants_at_short_lengths_do_not_count() -> None:
    points = tuple(CostPoint(length=n, ms=max(900.0, n), extra_mb=None) for n in (128, 256, 512, 1024, 2048, 4096))
    assert CostCurve(what="x", setting="here", points=points).exponent == pytest.approx(1)


def test_the_crossing_is_where_it_stays_faster() -> None:
    assert curve(1, factor=3000.0).cheaper_from(curve(2)) == 4096
    assert curve(1, factor=9000.0).cheaper_from(curve(2)) is None
    assert curve(1, factor=0.5).cheaper_from(curve(2)) == 1024


@pytest.mark.parametrize(("limit", "calls"), [(-1.0, 1), (1e9, 2)])
def test_a_long_call_on_a_cpu_is_measured_once(limit: float, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "ONCE_SECONDS", limit)
    made: list[int] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        made.append(q.shape[-2])
        return q

    linear._cost(attend, 8, torch.device("cpu"), torch.float32, backward=False, quick=True)
    assert made == [8] * calls


def test_more_landmarks_and_steps_lose_less() -> None:
    errors = list(measure_errors(quick=True))
    for kind in ("smooth image", "independent tokens"):
        after_all_steps, after_one = [error.inverse_error for error in errors if error.setting.startswith(kind)][-2:]
        assert after_one > 0.1
        assert after_all_steps < 1e-10
    few, many = [error.error for error in errors if error.pooling == "squares"][:2]
    assert many < few


def test_every_token_as_its_own_landmark_loses_only_the_ridge() -> None:
    tokens = smooth_tokens(8)
    assert torch.allclose(means_of_squares(tokens, 64), tokens)
    assert torch.allclose(means_of_squares(tokens, 1), tokens.mean(-2, keepdim=True))


def test_neighbors_of_a_smooth_image_are_closer_than_independent_tokens() -> None:
    smooth, independent = (
        (t[0, 0, 1:] - t[0, 0, :-1]).norm(dim=-1).median() for t in (smooth_tokens(32), independent_tokens(32))
    )
    assert smooth < independent / 8


def test_json_has_the_exponent_of_each_curve() -> None:
    results = Benchmarks(machine=MACHINE, results=(curve(2),))
    assert results.as_dict()["costs"][0]["exponent"] == pytest.approx(2)
