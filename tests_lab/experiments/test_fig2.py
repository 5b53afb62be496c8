"""Figure 2: the expectations it compares, the critical N, and what decides it."""

import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from scipy import stats

from attnorm.theory.distance import PowerLaw
from attnorm_lab.experiments.experiment import ExperimentSubject
from attnorm_lab.experiments.fig2.experiment import QUICK
from attnorm_lab.experiments.fig2.findings import explained_variance, findings
from attnorm_lab.experiments.fig2.measure import (
    PAIRS,
    PRINTED,
    Distances,
    Point,
    Result,
    at_point,
    bootstrap_heads,
    compare,
    critical_n,
    fewer_heads,
    interval,
    is_accepted,
    ks_p_value,
    ks_statistic,
    ks_threshold,
    layers_with_all_keys,
    n_grid,
    over_grid,
    power_law_over_heads,
    rejection_rates,
    resampled_critical_n,
    subsampled_heads,
)
from attnorm_lab.experiments.model_runs import LastRows, join_layers, last_rows


def synthetic(heads: int, keys: int, sharpness: float = 2.0, dimension: int = 8, seed: int = 0) -> list[LastRows]:
    """One layer of heads, each with vectors of its own, whose weights know nothing of them."""
    generator = torch.Generator().manual_seed(seed)
    scale = sharpness * torch.linspace(0.5, 1.5, heads, dtype=torch.float64)[:, None, None]
    logits = scale * torch.randn(heads, 1, keys, generator=generator, dtype=torch.float64)
    vectors = torch.randn(heads, keys, dimension, generator=generator, dtype=torch.float64)
    vectors = vectors + torch.randn(heads, 1, dimension, generator=generator, dtype=torch.float64)
    return [LastRows(0, logits.softmax(-1), vectors, torch.ones(heads, 1, keys, dtype=torch.bool))]


def silent(*_: object) -> None:
    pass


@pytest.fixture(scope="module")
def at_200() -> Distances:
    return over_grid(synthetic(60, 200, sharpness=4.0), n_grid(200, 1.2), silent)


def test_the_corrected_expectation_is_the_mean_over_random_sets_and_the_printed_one_is_not() -> None:
    point = at_point(synthetic(6, 120, sharpness=0.7), 5, 500, torch.Generator().manual_seed(1))
    slack = 5 * point.expected_error
    assert (point.lower <= point.expected + slack).all()
    assert (point.expected <= point.upper + slack).all()
    assert (point.upper < 2 * point.lower).all()
    assert (point.printed > 2 * point.expected).all()


def test_the_grid_has_every_small_n_and_ends_where_all_but_one_key_is_selected() -> None:
    grid = n_grid(1024, 1.06)
    assert grid[:16] == tuple(range(1, 17))
    assert grid[-1] == 1023
    steps = np.diff(grid)
    assert (steps > 0).all()
    assert (np.array(grid[17:]) / np.array(grid[16:-1]) < 1.1).all()
    assert n_grid(3, 1.06) == (1, 2)


@pytest.mark.parametrize("heads", [3, 12, 36, 144])
def test_statistic_threshold_and_p_value_are_those_of_the_exact_test(heads: int) -> None:
    generator = np.random.default_rng(heads)
    for shift in (0.0, 0.4, 1.0):
        first, second = generator.normal(size=(heads, 1)), generator.normal(size=(heads, 1)) + shift
        exact = stats.ks_2samp(first[:, 0], second[:, 0], method="exact")
        statistic = ks_statistic(first, second)[0]
        assert statistic == pytest.approx(exact.statistic)
        assert ks_p_value(round(statistic * heads), heads) == pytest.approx(exact.pvalue, rel=1e-9)
        assert is_accepted(first, second)[0] == (exact.pvalue >= 0.01)


def test_equal_samples_have_no_gap_and_three_heads_can_tell_nothing_apart() -> None:
    values = np.array([[1.0, 2.0], [1.0, 3.0], [5.0, 3.0]])
    assert ks_statistic(values, values[::-1]).tolist() == [0.0, 0.0]
    assert ks_threshold(3) == math.inf
    assert is_accepted(values, values + 100).all()


def test_critical_n_is_the_first_n_at_which_two_laws_meet() -> None:
    generator = np.random.default_rng(0)
    grid = (1, 2, 4, 8, 16)
    first = generator.normal(size=(200, 5))
    second = generator.normal(size=(200, 5)) + np.array([3.0, 1.0, 0.6, 0.0, 2.0])
    assert critical_n(first, second, grid) == 8
    assert math.isnan(critical_n(first, second + 5, grid))
    resampled = resampled_critical_n(first, second, grid, bootstrap_heads(200, 200, 20, 0))
    assert interval(resampled)[0] >= 8
    power = rejection_rates(first, second, bootstrap_heads(200, 200, 50, 0))
    assert power[0] == 1
    assert power[3] < 0.5
    fewer = rejection_rates(first, second, bootstrap_heads(200, 20, 50, 0))
    assert fewer[2] < power[2]


def test_subsamples_take_no_head_twice_and_the_seed_decides() -> None:
    which = subsampled_heads(30, 12, 5, 3)
    assert all(len(set(draw)) == 12 for draw in which.tolist())
    assert (which == subsampled_heads(30, 12, 5, 3)).all()
    assert (which != subsampled_heads(30, 12, 5, 4)).any()


def test_the_power_law_leaves_out_lengths_without_a_critical_n() -> None:
    lengths = (32, 64, 128, 256, 512)
    critical = np.array([math.nan, *(0.5 * length**0.7 for length in lengths[1:])])
    resampled = np.stack([critical * 1.1, critical * np.array([1, 1, 1.2, 1.4, 1.6]), np.full(5, math.nan)])
    law = power_law_over_heads(lengths, critical, resampled)
    assert law is not None
    assert law.exponent == pytest.approx(0.7)
    assert law.coefficient == pytest.approx(0.5)
    assert law.exponent_interval[0] == pytest.approx(0.7, abs=0.02)
    assert law.exponent_interval[1] > 0.85
    assert power_law_over_heads(lengths, np.full(5, math.nan), resampled) is None


def test_the_printed_critical_n_is_that_of_the_norms_and_not_of_random_sets(at_200: Distances) -> None:
    critical = {name: critical_n(*pair(at_200), at_200.grid) for name, pair in PAIRS.items()}
    assert critical["printed"] == pytest.approx(critical["||s|| against ||x_bar||"], rel=0.25)
    assert critical["corrected, upper end"] > 5 * critical["printed"]
    assert explained_variance(at_200, critical["printed"]) > 0.95
    assert math.isnan(explained_variance(at_200, math.nan))


def test_random_sets_differ_from_the_printed_expectation_and_lie_close_to_the_corrected_one() -> None:
    """The control that the printed expectation fails: sets drawn at random are what E is about."""
    for N in (2, 100):
        point = at_point(synthetic(60, 200, sharpness=0.7), N, 100, torch.Generator().manual_seed(0))
        drawn = point.expected[:, None]
        assert (point.upper < 1.4 * point.expected).all()
        assert not is_accepted(drawn, point.printed[:, None]).any()


def test_fewer_heads_give_a_smaller_critical_n(at_200: Distances) -> None:
    rows = [row for row in fewer_heads(at_200, QUICK.resamples, 0) if row["compared"] == "corrected, upper end"]
    assert [row["heads"] for row in rows] == [18, 36, 60]
    critical = [float(row["critical_n"]) for row in rows]
    assert critical == sorted(critical)
    assert critical[0] < critical[-1]


def test_lengths_without_any_critical_n_have_none(at_200: Distances) -> None:
    apart = Distances(**{**vars(at_200), "printed": at_200.measured * 1000})
    (one,) = compare("printed", [apart], QUICK.resamples, 0).critical
    assert math.isnan(one.top_n)
    assert one.last_accepted == 0


def test_permuting_keeps_the_weights_and_hidden_keys_hidden() -> None:
    (layer,) = synthetic(1, 12)
    visible = layer.visible.clone()
    visible[..., [0, 7]] = False
    hidden = LastRows(0, torch.where(visible, layer.weights, 0.0), layer.vectors, visible)
    permuted = hidden.permuted(torch.Generator().manual_seed(0))
    assert permuted.weights[~visible].eq(0).all()
    assert torch.equal(permuted.weights.sort(-1).values, hidden.weights.sort(-1).values)
    assert not torch.equal(permuted.weights, hidden.weights)


def test_layers_put_together_give_the_same_numbers() -> None:
    layers = [*synthetic(2, 40), *synthetic(3, 40, dimension=4), *synthetic(2, 40, seed=1)]
    together = join_layers(layers)
    assert [one.heads for one in together] == [4, 3]
    grid = (1, 5, 30)
    apart, one = over_grid([layers[0], layers[2]], grid, silent), over_grid([together[0]], grid, silent)
    for name in ("measured", "printed", "lower", "upper", "mass"):
        assert getattr(one, name) == pytest.approx(getattr(apart, name)), name


def test_rows_that_do_not_see_everything_are_left_out_or_refused() -> None:
    layers = [*synthetic(1, 40), *synthetic(1, 40, seed=1)]
    assert layers_with_all_keys(layers, 40) == layers
    broken = LastRows(0, layers[0].weights * math.nan, layers[0].vectors, layers[0].visible)
    assert layers_with_all_keys([broken, layers[1]], 40) == [layers[1]]
    with pytest.raises(ValueError, match="64 tokens"):
        layers_with_all_keys(layers, 64)


def test_the_last_row_is_the_models_own() -> None:
    """Weights sum to 1, and weights times values are what the head gives out, in every layer."""
    from attnorm.models.forward_pass import run
    from attnorm.models.observe import observe

    subject = ExperimentSubject()
    layers = last_rows(subject, 40)
    outputs = []

    def look(call: object) -> None:
        out = torch.nn.functional.scaled_dot_product_attention(
            call.query_BHQD,
            call.key_BGKD,
            call.value_BGKE,
            is_causal=True,
            scale=call.scale,  # type: ignore[attr-defined]
        )
        outputs.append(out[0, :, -1])

    with observe(subject.loaded().model, look):
        run(subject.loaded(), subject.model_inputs(40))
    assert len(layers) == len(outputs) == 6
    for layer, output in zip(layers, outputs, strict=True):
        assert layer.keys == 40
        assert layer.weights.sum(-1).numpy() == pytest.approx(1.0)
        mixed = (layer.weights @ layer.vectors).flatten(0, 1)
        assert torch.allclose(mixed.float(), output, atol=1e-5)


def test_a_window_of_the_text_starts_where_it_is_asked_to() -> None:
    first, later = last_rows(ExperimentSubject(), 24), last_rows(ExperimentSubject(), 24, start=24)
    assert later[0].keys == 24
    assert not torch.allclose(first[0].weights, later[0].weights)
    inputs = last_rows(ExperimentSubject(), 24, vectors="inputs")
    assert inputs[0].vectors.shape == (1, 24, 192)
    assert torch.allclose(inputs[0].weights.flatten(0, 1), first[0].weights.flatten(0, 1))


@cache
def points() -> tuple[tuple[Point, ...], tuple[Point, ...]]:
    """By length, and by N."""

    def one(keys: int, N: int) -> Point:
        return at_point(synthetic(60, keys, sharpness=4.0), N, 20, torch.Generator().manual_seed(0))

    return tuple(one(keys, 5) for keys in (50, 100, 200)), tuple(one(200, N) for N in (1, 20, 100))


def result_of(distances: Distances) -> Result:
    by_length, by_n = points()
    return Result(
        distances=(distances,), at_panel=distances, by_length=by_length, by_n=by_n,
        comparisons={name: compare(name, [distances], QUICK.resamples, 0) for name in PAIRS},
        permuted_critical=dict.fromkeys(PAIRS, 5.0), fewer_heads=fewer_heads(distances, QUICK.resamples, 0), choices=(),
    )  # fmt: skip


@pytest.fixture(scope="module")
def result(at_200: Distances) -> Result:
    return result_of(at_200)


def judge_claims(result: Result, exponent: float = 0.5, low: float = 0.3, high: float = 0.8) -> dict[str, str]:
    """Verdicts by claim, for a printed critical N that grows with this exponent."""
    law = PowerLaw(0.06, exponent, (low, high), math.nan)
    comparisons = {**result.comparisons, PRINTED: replace(result.comparisons[PRINTED], law=law)}
    return {finding.claim: finding.verdict for finding in findings(replace(result, comparisons=comparisons))}


def verdict(verdicts: dict[str, str], claim: str) -> str:
    return next(verdict for name, verdict in verdicts.items() if claim in name)


@pytest.mark.parametrize(
    ("exponent", "low", "high", "expected"),
    [
        (0.5, 0.3, 0.8, "reproduces"),
        (0.0, -0.2, 0.56, "partly"),  # below 1, and not known to grow
        (0.9, 0.6, 1.2, "partly"),
        (0.5, -0.3, 1.3, "not decided"),
        (1.4, 1.1, 1.7, "does not"),
        (-0.5, -0.9, -0.1, "does not"),
    ],
)
def test_sub_linear_growth_is_growth_and_below_linear(
    exponent: float, low: float, high: float, expected: str, result: Result
) -> None:
    assert verdict(judge_claims(result, exponent, low, high), "sub-linearly") == expected


def test_verdicts_follow_the_numbers(at_200: Distances, result: Result) -> None:
    found = judge_claims(result)
    critical = critical_n(at_200.measured, at_200.printed, at_200.grid) / 200
    assert verdict(found, "about 0.06 L (Fig. 2c)") == ("reproduces" if 0.03 <= critical <= 0.12 else "does not")
    assert verdict(found, "no better than chance") == "does not"
    # A distance that is what random sets give: chance selection, for once.
    random = replace(at_200, measured=at_200.upper, printed=at_200.upper * np.linspace(0.99, 1.01, 60)[:, None])
    chance = judge_claims(result_of(random))
    assert verdict(chance, "no better than chance") == "partly"
    assert verdict(chance, "about 0.06 L (Fig. 2c)") == "does not"  # the same from N = 1 on
    never = judge_claims(result_of(replace(at_200, printed=at_200.measured * 1000)))
    assert verdict(never, "no better than chance") == "not decided"
    assert verdict(never, "0.06 L") == "does not"
