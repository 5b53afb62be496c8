"""What bounded logits leave possible: Lemma 1, Corollary 1, Lemma 2.1, the entropy floor, the horizon, the gap."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats
from torch import Tensor

from attnorm.theory import dispersion
from tests.theory.strategies import ClaimCase, cases, floats

FUNCTIONS = {
    "exp": torch.exp,
    "softplus": torch.nn.functional.softplus,
    "bowl": lambda z: z**2 + 0.1,
    "bump": lambda z: torch.exp(-(z**2) / 2) + 0.01,
    "wave": lambda z: 1.5 + torch.sin(3 * z),
}
SLACK = 1e-9


def within(bounds: dispersion.Bounds, value: Tensor, slack: float = SLACK) -> bool:
    return bool((bounds.lower <= value * (1 + slack)).all() and (value <= bounds.upper * (1 + slack)).all())


@pytest.mark.parametrize("name", FUNCTIONS)
@given(logits=st.lists(floats(4), min_size=1, max_size=9))
@settings(max_examples=20)
def test_lemma1_holds_with_observed_and_with_interval_constants(name: str, logits: list[float]) -> None:
    values = FUNCTIONS[name](torch.tensor(logits, dtype=torch.float64))
    weights = values / values.sum()
    F_min, F_max = dispersion.observed_range(values)
    observed = dispersion.lemma1_bounds(F_min, F_max, len(logits))
    assert within(observed, weights)
    interval = dispersion.lemma1_bounds(*dispersion.range_on_interval(FUNCTIONS[name], -4, 4), len(logits))
    assert interval.lower <= observed.lower * (1 + SLACK)
    assert observed.upper <= interval.upper * (1 + SLACK)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_range_of_a_function_is_found_whether_or_not_it_is_monotone(name: str) -> None:
    low, high = dispersion.range_on_interval(FUNCTIONS[name], -3.3, 2.9)
    dense = FUNCTIONS[name](torch.linspace(-3.3, 2.9, 2_000_001, dtype=torch.float64))
    assert low == pytest.approx(float(dense.min()), abs=1e-11)
    assert high == pytest.approx(float(dense.max()), abs=1e-11)
    assert low <= float(dense.min()) + 1e-15
    assert high >= float(dense.max()) - 1e-15


def test_no_better_constants_serve_all_lengths_in_lemma1() -> None:
    C1, C2 = dispersion.lemma1_constants(0.5, 2.0)
    L = 10**7
    heaviest, lightest = 2.0 / (2.0 + (L - 1) * 0.5), 0.5 / (0.5 + (L - 1) * 2.0)
    assert L * heaviest == pytest.approx(float(C2), rel=1e-6)
    assert L * lightest == pytest.approx(float(C1), rel=1e-6)


def test_lemma1_does_not_cover_scales_that_know_the_length_or_maps_that_reach_zero() -> None:
    L = torch.tensor([10.0, 1e3, 1e6], dtype=torch.float64)
    ssmax = L / (L + L - 1)  # softmax(log(L) z) at z = (1, 0, ..., 0): the logits z stay in [0, 1]
    assert (ssmax > 0.5).all()
    with pytest.raises(ValueError, match="does not cover"):
        dispersion.lemma1_constants(0.0, 1.0)  # sparsemax gives the winner weight 1 at every length


@given(case=cases(most_dimensions=3), temperature=st.floats(0.2, 5))
def test_corollary1_holds_and_is_wider_than_lemma21(case: ClaimCase, temperature: float) -> None:
    query = torch.ones(case.vectors.shape[-1], dtype=torch.float64)
    logits = case.vectors @ query
    weights, n = torch.softmax(logits / temperature, -1), len(logits)
    outer = dispersion.corollary1_bounds(query.norm(), case.vectors.norm(dim=-1).max(), n, temperature)
    inner = dispersion.lemma21_bounds(dispersion.logit_spread(logits), n, temperature)
    assert within(outer, weights)
    assert outer.lower <= inner.lower * (1 + SLACK)
    assert inner.upper <= outer.upper * (1 + SLACK)


@given(logits=st.lists(floats(30), min_size=1, max_size=8), temperature=st.floats(0.2, 5))
def test_lemma21_holds_and_the_sharp_form_lies_inside_it(logits: list[float], temperature: float) -> None:
    z = torch.tensor(logits, dtype=torch.float64)
    weights, n = torch.softmax(z / temperature, -1), len(logits)
    printed = dispersion.lemma21_bounds(dispersion.logit_spread(z), n, temperature)
    sharp = dispersion.sharp_weight_bounds(dispersion.logit_spread(z), n, temperature)
    assert within(sharp, weights)
    assert printed.lower <= sharp.lower * (1 + SLACK)
    assert sharp.upper <= printed.upper * (1 + SLACK)


@pytest.mark.parametrize("n", [2, 3, 50])
@pytest.mark.parametrize("d", [0.0, 0.7, 12.0])
def test_the_sharp_weight_bounds_are_attained(n: int, d: float) -> None:
    one_up, one_down = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    one_up[0], one_down[0] = d, -d
    sharp = dispersion.sharp_weight_bounds(d, n)
    assert torch.softmax(one_up, -1)[0] == pytest.approx(float(sharp.upper), rel=1e-12)
    assert torch.softmax(one_down, -1)[0] == pytest.approx(float(sharp.lower), rel=1e-12)


def test_dispersion_is_not_convergence_to_the_uniform_distribution() -> None:
    """Half of the logits at 1, half at 0: all weights vanish like 1/n, the distance from uniform does not."""
    distances = []
    for n in (10, 1000, 100_000):
        weights = torch.softmax(torch.arange(n, dtype=torch.float64) % 2, -1)
        distances.append(float((weights - 1 / n).abs().sum() / 2))
    assert distances == pytest.approx([math.tanh(0.5) / 2] * 3)


@given(logits=st.lists(floats(20), min_size=1, max_size=8), temperature=st.floats(0.3, 3))
def test_no_softmax_row_has_less_entropy_than_the_floor(logits: list[float], temperature: float) -> None:
    z = torch.tensor(logits, dtype=torch.float64)
    entropy = dispersion.entropy_nats(torch.softmax(z / temperature, -1))
    floor = dispersion.entropy_floor(dispersion.logit_spread(z), len(logits), temperature)
    assert floor <= entropy + 1e-12


@pytest.mark.parametrize("d", [0.0, 1e-12, 1e-4, 0.5, 1.0, 3.0, 10.0, 50.0, 800.0])
def test_the_floor_is_the_best_two_level_row(d: float) -> None:
    for n in (1, 2, 3, 7, 50, 1000):
        levels = torch.tensor([[d] * k + [0.0] * (n - k) for k in range(1, n)], dtype=torch.float64)
        best = dispersion.entropy_nats(torch.softmax(levels, -1)).min() if n > 1 else torch.tensor(0.0)
        floor = dispersion.entropy_floor(d, n)
        assert float(floor) == pytest.approx(float(best), rel=1e-11, abs=1e-15)
        assert math.log(n) - float(floor) <= float(dispersion.entropy_floor_deficit(d)) + 1e-12


def test_an_infinite_spread_leaves_no_entropy() -> None:
    spread = torch.tensor([1e300, math.inf], dtype=torch.float64)
    assert torch.equal(dispersion.entropy_floor(spread, 7), torch.zeros(2, dtype=torch.float64))
    assert dispersion.entropy_floor(math.inf, 1) == 0
    assert dispersion.entropy_floor_deficit(math.inf) == math.inf


@pytest.mark.parametrize("d", [1e-3, 5e-3, 9.9e-3, 1.1e-2, 0.5, 20.0])
def test_the_deficit_equals_its_formula_on_both_sides_of_its_series(d: float) -> None:
    c = d / (1 - math.exp(-d))
    assert float(dispersion.entropy_floor_deficit(d)) == pytest.approx(c - 1 - math.log(c), rel=1e-6)


def test_the_deficit_below_log_n_is_attained_in_the_limit() -> None:
    floor = dispersion.entropy_floor(5.0, 10**9)
    assert math.log(10**9) - float(floor) == pytest.approx(float(dispersion.entropy_floor_deficit(5.0)), rel=1e-6)


@pytest.mark.parametrize(("n", "d"), [(3, 2.0), (6, 1.0), (8, 4.0)])
def test_direct_optimization_finds_no_entropy_below_the_floor_and_reaches_it(n: int, d: float) -> None:
    def entropy_and_slope(inner: np.ndarray) -> tuple[float, np.ndarray]:
        z = torch.tensor([0.0, d, *inner], dtype=torch.float64, requires_grad=True)
        entropy = dispersion.entropy_nats(torch.softmax(z, -1))
        entropy.backward()
        assert z.grad is not None
        return float(entropy.detach()), z.grad[2:].numpy()

    rng = np.random.default_rng(0)
    found = [
        optimize.minimize(entropy_and_slope, rng.uniform(0, d, n - 2), jac=True, bounds=[(0, d)] * (n - 2)).fun
        for _ in range(12)
    ]
    floor = float(dispersion.entropy_floor(d, n))
    assert min(found) == pytest.approx(floor, rel=1e-9)
    assert min(found) >= floor - 1e-12


def test_the_horizon_is_where_one_half_stops_being_possible() -> None:
    d = torch.tensor([1.0, 3.0, 7.0], dtype=torch.float64)
    for weight in (0.5, 0.9):
        n = dispersion.horizon(2 * d, temperature=2.0, weight=weight)
        assert torch.allclose(dispersion.sharp_weight_bounds(d, n).upper, torch.full_like(d, weight))
    assert torch.allclose(dispersion.horizon(d), 1 + torch.exp(d))


@given(logits=st.lists(floats(10), min_size=2, max_size=9), temperature=st.floats(0.3, 3))
def test_the_effective_gap_of_softmax_lies_between_zero_and_the_spread(logits: list[float], temperature: float) -> None:
    z = torch.tensor(logits, dtype=torch.float64)
    weights = torch.softmax(z / temperature, -1)
    gap = dispersion.effective_gap(weights)
    if weights.max() < 0.99:  # beyond that the definition itself loses digits to 1 - max
        assert float(gap) == pytest.approx(float(torch.logit(weights.max())) + math.log(len(logits) - 1), abs=1e-10)
    assert float(gap) == pytest.approx(
        float(dispersion.effective_gap_from_logits(z, temperature=temperature)), abs=1e-9
    )
    assert -1e-12 <= gap <= dispersion.logit_spread(z) / temperature + 1e-12


def test_the_gap_stays_exact_where_the_largest_weight_has_rounded_to_one() -> None:
    z = torch.zeros(101, dtype=torch.float64)
    z[7] = 60.0
    assert torch.softmax(z, -1)[7] == 1
    assert float(dispersion.effective_gap(torch.softmax(z, -1))) == pytest.approx(60, rel=1e-12)
    z[7] = 5000.0
    assert float(dispersion.effective_gap_from_logits(z)) == pytest.approx(5000, rel=1e-12)
    assert dispersion.effective_gap(torch.softmax(z, -1)) == math.inf


def test_gap_and_entropy_need_no_row_sum_of_one() -> None:
    weights = torch.rand(4, 9, dtype=torch.float64)
    normalised = weights / weights.sum(-1, keepdim=True)
    assert torch.allclose(dispersion.effective_gap(weights), dispersion.effective_gap(normalised))
    assert torch.allclose(dispersion.entropy_nats(weights), dispersion.entropy_nats(normalised))
    signed = weights - 0.5
    assert dispersion.entropy_nats(signed).isnan().all()


def test_rows_to_which_a_statement_does_not_apply_are_nan_and_hidden_nan_never_leaks() -> None:
    mask = torch.tensor([[True] * 4, [True, False, False, False], [False] * 4])
    logits = torch.randn(3, 4, dtype=torch.float64)
    logits[1, 2] = torch.nan
    weights = torch.where(mask, torch.softmax(torch.where(mask, logits, -1e9), -1), torch.nan)
    assert dispersion.effective_gap(weights, mask).isnan().tolist() == [False, True, True]
    assert dispersion.effective_gap_from_logits(logits, mask).isnan().tolist() == [False, True, True]
    assert dispersion.entropy_nats(weights, mask).isnan().tolist() == [False, False, True]
    assert dispersion.logit_spread(logits, mask).isnan().tolist() == [False, False, True]
    n = mask.sum(-1)
    for bounds in (dispersion.lemma21_bounds(1.0, n), dispersion.sharp_weight_bounds(1.0, n)):
        assert bounds.upper.isnan().tolist() == [False, False, True]
    assert dispersion.entropy_floor(1.0, n).isnan().tolist() == [False, False, True]
    assert float(dispersion.entropy_floor(0.0, n)[1]) == 0


def test_batched_rows_equal_rows_one_by_one() -> None:
    logits = torch.randn(2, 3, 8, dtype=torch.float64)
    mask = torch.rand(2, 3, 8) < 0.7
    mask[..., :2] = True
    weights = torch.softmax(torch.where(mask, logits, -torch.inf), -1)
    for function, values in (
        (dispersion.effective_gap, weights),
        (dispersion.effective_gap_from_logits, logits),
        (dispersion.entropy_nats, weights),
        (dispersion.logit_spread, logits),
    ):
        batched = function(values, mask)
        looped = [[function(values[i, j][mask[i, j]]) for j in range(3)] for i in range(2)]
        assert torch.allclose(batched, torch.stack([torch.stack(row) for row in looped]), rtol=1e-12)


def test_gradients_of_the_exact_quantities() -> None:
    mask = torch.tensor([[True] * 5, [True, True, False, True, False]])
    logits = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)

    def of_weights(z: Tensor) -> tuple[Tensor, Tensor]:
        weights = torch.softmax(torch.where(mask, z, -torch.inf), -1)
        return dispersion.entropy_nats(weights, mask), dispersion.effective_gap(weights, mask)

    assert torch.autograd.gradcheck(of_weights, (logits,))
    assert torch.autograd.gradcheck(lambda z: dispersion.effective_gap_from_logits(z, mask), (logits,))
    d = torch.tensor([0.3, 2.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda d: dispersion.sharp_weight_bounds(d, 7).upper, (d,))
    assert torch.autograd.gradcheck(lambda d: dispersion.entropy_floor(d, 9), (d,))


def test_the_slope_fit_is_ordinary_least_squares() -> None:
    x = torch.randn(3, 12, dtype=torch.float64)
    y = 2 * x + torch.randn(3, 12, dtype=torch.float64)
    used = torch.rand(3, 12) < 0.8
    fit = dispersion.least_squares_line(x, torch.where(used, y, torch.nan), used)
    for row in range(3):
        oracle = stats.linregress(x[row][used[row]], y[row][used[row]])
        assert float(fit.slope[row]) == pytest.approx(oracle.slope)
        assert float(fit.intercept[row]) == pytest.approx(oracle.intercept)
        assert float(fit.slope_standard_error[row]) == pytest.approx(oracle.stderr)
    constant = dispersion.least_squares_line(torch.ones(5), torch.randn(5))
    assert constant.slope.isnan()


def test_the_gap_slope_tells_dispersion_from_compensation() -> None:
    n = torch.tensor([16, 64, 256, 1024, 4096], dtype=torch.float64)
    softmax, ssmax = [], []
    for keys in n.int().tolist():
        z = torch.zeros(keys, dtype=torch.float64)
        z[0] = 3.0
        softmax.append(dispersion.effective_gap_from_logits(z))
        ssmax.append(dispersion.effective_gap_from_logits(z * math.log(keys) / 3))
    softmax.append(torch.tensor(torch.nan))  # a row with one key: not applicable, left out
    disperses = dispersion.effective_gap_slope(torch.stack(softmax).double(), torch.cat([n, torch.ones(1).double()]))
    compensates = dispersion.effective_gap_slope(torch.stack(ssmax), n)
    assert float(disperses.slope) == pytest.approx(0, abs=1e-12)
    assert float(compensates.slope) == pytest.approx(1, abs=1e-12)


def rotate(vectors: Tensor, angles: Tensor) -> Tensor:
    first, second = vectors[..., ::2], vectors[..., 1::2]
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([first * cos - second * sin, first * sin + second * cos], -1).flatten(-2)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("rotary", [False, True])
def test_proposition31_bounds_the_spread_of_every_head_and_query(key_heads: int, rotary: bool) -> None:
    H, e, D, L, B, scaling = 4, 6, 5, 11, 3, -0.4
    W_Q, W_K = torch.randn(H, e, D, dtype=torch.float64), torch.randn(key_heads, e, D, dtype=torch.float64)
    b_Q, b_K = torch.randn(H, e, dtype=torch.float64), 5 * torch.randn(key_heads, e, dtype=torch.float64)
    x = torch.randn(B, L, D, dtype=torch.float64) + 2
    mask = torch.ones(L, L, dtype=torch.bool).tril()
    q = torch.einsum("hed,bld->bhle", W_Q, x) + b_Q[:, None]
    k = (torch.einsum("hed,bld->bhle", W_K, x) + b_K[:, None]).repeat_interleave(H // key_heads, 1)
    if rotary:
        angles = torch.arange(L, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.1, 0.01])
        q, k = rotate(q, angles), rotate(k, angles)
    measured = dispersion.logit_spread(scaling * q @ k.mT, mask)
    options = {"query_bias": b_Q, "scaling": scaling, "mask": mask}
    bound = dispersion.proposition31_bound(W_Q, W_K, x, x, key_bias=b_K, **options)
    assert bound.shape == measured.shape == (B, H, L)
    assert (measured <= bound * (1 + SLACK)).all()
    if not rotary:
        tight = dispersion.proposition31_tight(W_Q, W_K, x, x, **options)
        assert (measured <= tight * (1 + SLACK)).all()
        assert (tight <= dispersion.proposition31_bound(W_Q, W_K, x, x, **options) * (1 + SLACK)).all()
    one = dispersion.proposition31_bound(
        W_Q[2:3], W_K[2 * key_heads // H :][:1], x[1, 4:5], x[1, :5], query_bias=b_Q[2:3],
        key_bias=b_K[2 * key_heads // H :][:1], scaling=scaling,
    )  # fmt: skip
    assert torch.allclose(one.squeeze(), bound[1, 2, 4])


def test_the_printed_proposition_is_attained_and_the_tight_one_needs_unrotated_keys() -> None:
    one = torch.ones(1, 2, 1, dtype=torch.float64) * torch.tensor([[1.0], [0.0]], dtype=torch.float64)
    y = torch.tensor([[1.0]], dtype=torch.float64)
    opposite, equal = torch.tensor([[1.0], [-1.0]]).double(), torch.tensor([[1.0], [1.0]]).double()
    assert float(dispersion.proposition31_bound(one, one, y, opposite)) == pytest.approx(2)
    assert float(dispersion.logit_spread(y @ opposite.mT)) == 2
    assert float(dispersion.proposition31_tight(one, one, y, equal)) == pytest.approx(0)
    turned = rotate(torch.tensor([[1.0, 0.0], [1.0, 0.0]]).double(), torch.tensor([[0.0], [math.pi]]).double())
    assert float(dispersion.logit_spread(torch.tensor([[1.0, 0.0]]).double() @ turned.mT)) == pytest.approx(2)


def test_query_heads_must_share_the_key_heads_evenly() -> None:
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"2 key heads, got 3"):
        dispersion.proposition31_bound(torch.ones(3, 4, 3), torch.ones(2, 4, 3), x, x)


def test_two_levels_have_at_least_one_key_each() -> None:
    for k, taken in ((0, 1), (1, 1), (4, 4), (5, 4), (9, 4)):
        assert dispersion.two_level_entropy(2.0, 5, k) == dispersion.two_level_entropy(2.0, 5, taken)
    weights = torch.softmax(torch.tensor([2.0, 2.0, 2.0, 2.0, 0.0], dtype=torch.float64), -1)
    entropy = -(weights * weights.log()).sum()
    assert float(dispersion.two_level_entropy(2.0, 5, 5)) == pytest.approx(float(entropy), rel=1e-6)


def test_a_line_through_two_points_has_no_standard_error() -> None:
    x = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    two = dispersion.least_squares_line(x[:2], 3 * x[:2])
    assert float(two.slope) == pytest.approx(3)
    assert two.slope_standard_error.isnan()
    assert float(dispersion.least_squares_line(x, 3 * x).slope_standard_error) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("points", [9, 4097])
def test_the_range_of_a_function_that_is_not_monotone_is_found_to_the_last_digits(points: int) -> None:
    """Cusps: the value found is as far from the extremum as the place."""
    for low, high, at in ((-1.0, 3.0, 0.123456789), (2.0, 2.5, 2.3), (-4.0, -1.0, -4.0), (0.0, 1.0, 1.0)):
        top = dispersion.range_on_interval(lambda x, c=at: 2 - (x - c).abs(), low, high, points=points)  # type: ignore[misc]
        assert top == pytest.approx((2 - max(at - low, high - at), 2.0), abs=1e-11)
        bottom = dispersion.range_on_interval(lambda x, c=at: 3 * (x - c).abs() - 1, low, high, points=points)  # type: ignore[misc]
        assert bottom == pytest.approx((-1.0, 3 * max(at - low, high - at) - 1), abs=1e-11)
    assert dispersion.range_on_interval(torch.exp, 0.5, 0.5) == pytest.approx((math.exp(0.5),) * 2)
    with pytest.raises(ValueError, match=r"\[1\.0, 0\.5\]"):
        dispersion.range_on_interval(torch.exp, 1.0, 0.5)
    with pytest.raises(ValueError, match="inf"):
        dispersion.range_on_interval(lambda x: 1 / x, 0.0, 1.0)
