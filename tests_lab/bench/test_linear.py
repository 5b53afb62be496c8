"""Cost against tokens and the error of SOFT's low rank."""

import pytest
import torch

from attnorm_lab.bench import linear
from attnorm_lab.bench.linear import cost_numbers, independent_tokens, means_of_squares, measure_errors, smooth_tokens
from attnorm_lab.bench.timing import Bench

LENGTHS = (1024, 2048, 4096, 8192)


def costs(power: float, factor: float = 1.0, lengths: tuple[int, ...] = LENGTHS) -> dict[int, float]:
    return {length: factor * length**power for length in lengths}


@pytest.mark.parametrize(
    ("ms", "power"),
    [
        (costs(1), 1),
        (costs(2), 2),
        (costs(2, lengths=(1024, 2048)), 2),
        (costs(2, lengths=(1024,)), None),
        (costs(2, lengths=(128, 256, 512)), None),  # --quick
        ({n: max(900.0, n) for n in (128, 256, 512, 1024, 2048, 4096)}, 1),  # constants at short lengths
    ],
)
def test_the_power_is_the_slope_over_the_longer_half(ms: dict[int, float], power: float | None) -> None:
    numbers = cost_numbers(ms, ms)
    assert [numbers[f"{length:,}"] for length in ms] == list(ms.values())
    assert numbers.get("power") == (power if power is None else pytest.approx(power))
    assert "faster_from" not in numbers  # than itself


@pytest.mark.parametrize(("factor", "start"), [(3000.0, 4096), (9000.0, None), (0.5, 1024)])
def test_the_crossing_is_where_it_stays_faster(factor: float, start: int | None) -> None:
    assert cost_numbers(costs(1, factor), costs(2))["faster_from"] == start


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
    errors = list(measure_errors(Bench(quick=True)))
    for kind in ("smooth image", "independent tokens"):
        inverse = [result.numbers["inverse_error"] or 0 for result in errors if kind in result.table]
        after_all_steps, after_one = inverse[-2:]
        assert after_one > 0.1
        assert after_all_steps < 1e-10
    few, many = [result.numbers["error"] or 0 for result in errors if "means of squares" in result.what][:2]
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
