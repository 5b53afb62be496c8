"""Exact relations between normalizers: limits, equalities and bounds that hold whatever the logits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnorm.normalizers import Block, compose, get, mixture
from attnorm.normalizers.composition import Sink
from attnorm.normalizers.kernel import FUNCTIONS, _log_softplus, polynomial
from attnorm.normalizers.ssmax import critical_s, neutral_s

KEYS = 24


@pytest.fixture
def z() -> Tensor:
    return 2 * torch.randn(3, 5, KEYS, dtype=torch.float64)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


# Length scales.


def test_ssmax_with_s_log_n_equal_to_1_is_softmax(z: Tensor) -> None:
    close(get("ssmax", s=1 / math.log(KEYS))(z), get("softmax")(z), 1e-7)


def test_ssmax_keeps_a_winners_weight_as_the_row_grows() -> None:
    """Figure 1 of the paper: one value 3 among n - 1 values -2, s = 0.43; softmax lets it fall like 1/n."""
    kept = {}
    for n in (10, 1_000, 100_000):
        row = torch.full((1, n), -2.0, dtype=torch.float64)
        row[0, 0] = 3.0
        kept[n] = get("ssmax", s=0.43)(row)[0, 0].item()
        assert kept[n] > 0.9
    assert kept[100_000] > kept[10]
    row = torch.full((1, 100_000), -2.0, dtype=torch.float64)
    row[0, 0] = 3.0
    assert get("softmax")(row)[0, 0] < 0.002


def test_ssmax_starts_neutral_on_average_over_the_training_length() -> None:
    assert neutral_s(1024) == pytest.approx(0.16847, abs=1e-5)
    assert sum(neutral_s(50) * math.log(n) for n in range(1, 51)) / 50 == pytest.approx(1)


def test_ssmax_with_a_bias_and_no_s_is_a_temperature(z: Tensor) -> None:
    normalizer = get("ssmax", s=0.0, bias=True)
    with torch.no_grad():
        normalizer.scale[0].bias.fill_(0.25)
    close(normalizer(z), get("softmax", temperature=4.0)(z), 1e-7)


def test_kneemax_lies_between_sparsemax_and_entmax15_of_half_the_logits(z: Tensor) -> None:
    """A knee at weight 0 is the one, a knee at weight 1 or above the other."""
    close(get("kneemax", share=1e-12)(z), get("sparsemax")(z / 2), 1e-9)
    close(get("kneemax", share=float(KEYS))(z), get("entmax15")(z / 2))


def test_kneemax_with_a_fixed_knee_of_a_quarter_is_entmax15_where_no_weight_is_larger(z: Tensor) -> None:
    flat = z / z.abs().max() * 0.5
    assert get("entmax15")(flat).max() < 0.25
    close(get("kneemax", knee=0.25)(flat), get("entmax15")(flat))
    leader = torch.tensor([[1.8, 0.0, 0.0, 0.0]], dtype=torch.float64)
    assert get("kneemax", knee=0.25)(leader)[0, 0] < get("entmax15")(leader)[0, 0] - 0.1


def test_asentmax_with_beta_to_0_is_entmax_of_delta_z(z: Tensor) -> None:
    close(get("asentmax", beta=1e-30, delta=0.7)(z), get("entmax15")(0.7 * z))


def test_asentmax_scales_by_delta_plus_beta_log_of_n_plus_1_to_gamma(z: Tensor) -> None:
    close(get("asentmax", beta=0.5, gamma=1.0)(z), get("entmax15")((1 + 0.5 * math.log(KEYS + 1)) * z), 1e-6)


def test_the_deployed_rules_act_only_beyond_their_length(z: Tensor) -> None:
    close(get("log_scaled", train_length=KEYS)(z), get("softmax")(z))
    close(get("log_scaled", rule="llama4", floor_scale=KEYS + 1)(z), get("softmax")(z))
    close(get("log_scaled", rule="yarn", extension=1.0)(z), get("softmax")(z))
    beyond = math.log(KEYS) / math.log(5)
    close(get("log_scaled", train_length=5)(z), torch.softmax(beyond * z, -1))
    close(get("log_scaled", rule="llama4", floor_scale=10)(z), torch.softmax((1 + 0.1 * math.log(3)) * z, -1))
    close(get("log_scaled", rule="yarn", extension=4.0)(z), torch.softmax((0.1 * math.log(4) + 1) ** 2 * z, -1))


def test_the_kernels_get_the_scale_of_distances() -> None:
    (rule,) = get("scale_invariant", tau=8.0).rules
    assert rule.kernel_rule() == ("distance", 0.125)


def test_scale_invariant_with_tau_to_infinity_is_softmax(z: Tensor) -> None:
    close(get("scale_invariant", tau=1e15)(z), get("softmax")(z))


def test_scale_invariant_takes_any_tau_above_zero() -> None:
    weights = [get("scale_invariant", tau=tau)(torch.zeros(1, 5))[0] for tau in (1e-3, 0.5, 2.0)]
    assert weights[0][-1] > weights[1][-1] > weights[2][-1]  # the smaller tau, the more counts the nearest key


def test_a_cap_far_above_the_logits_is_no_cap_and_no_logit_passes_it(z: Tensor) -> None:
    close(get("softcap", cap=1e9)(z), get("softmax")(z))
    spread = 1e4 * z
    (rule,) = get("softcap", cap=2.0).rules
    assert rule(Block.of(spread)).abs().max() == 2


def test_a_cap_comes_in_front_of_any_map_in_the_order_given(z: Tensor) -> None:
    capped, scaled = get("softcap", cap=1.5), get("softmax", temperature=0.5)
    close(compose("entmax15", scale=[capped, scaled])(z), get("entmax15")(2 * 1.5 * torch.tanh(z / 1.5)), 1e-7)
    close(compose("entmax15", scale=[scaled, capped])(z), get("entmax15")(1.5 * torch.tanh(2 * z / 1.5)), 1e-7)


def test_ssa_starts_as_softmax_and_ends_as_one_plus_log_n(z: Tensor) -> None:
    close(get("ssa", beta=5.0)(z), get("softmax")(z))
    close(get("ssa", beta=-40.0)(z), torch.softmax((1 + math.log(KEYS)) * z, -1))
    (rule,) = get("ssa").rules
    assert rule.gain(1024) == pytest.approx(1.0043, abs=5e-5)


def test_norm_softmax_does_not_depend_on_the_size_of_the_logits(z: Tensor) -> None:
    for size in (1e-3, 1.0, 1e6):
        close(get("norm_softmax")(size * z), get("norm_softmax")(z), 1e-5)
    unit = (z - z.mean(-1, keepdim=True)) / z.std(-1, keepdim=True, correction=0)
    close(get("norm_softmax", temperature=0.5)(z), torch.softmax(2 * unit, -1), 1e-9)


def test_norm_softmax_gives_all_weight_to_the_only_leader_of_a_long_row_and_none_to_equal_keys() -> None:
    leader = torch.zeros(1, 10_000, dtype=torch.float64).index_fill(1, torch.tensor([7]), 1e-3)
    assert get("norm_softmax")(leader)[0, 7] > 0.999
    even = torch.full((1, 5), 3.0, requires_grad=True)
    weights = get("norm_softmax")(even)
    weights[0, 0].backward()
    close(weights.detach(), torch.full((1, 5), 0.2))
    assert even.grad.isfinite().all()


def test_threshold_relu_of_rms_normed_vectors_is_tdas_formula_of_cosines() -> None:
    """[cos - beta sqrt(2 log n / d)]_+^p with n = i + 1, as in snap-research/TDA."""
    d, beta, power = 24, 0.4, 2.0
    q, k = (torch.nn.functional.rms_norm(torch.randn(9, d, dtype=torch.float64), (d,)) for _ in range(2))
    cosines = torch.nn.functional.normalize(q, dim=-1) @ torch.nn.functional.normalize(k, dim=-1).T
    threshold = beta * torch.sqrt(2 * torch.log(torch.arange(1, 10).double()) / d)
    expected = ((cosines - threshold[:, None]).relu() ** power).tril()
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    found = get("threshold_relu", beta=beta, power=power, width=d)(q @ k.T / d**0.5, causal)
    close(found, expected, 1e-6)
    assert (found > 0).any()


def test_threshold_relu_without_a_threshold_is_relu_without_its_mean(z: Tensor) -> None:
    close(get("threshold_relu", beta=0.0, power=2.0)(z), KEYS * get("relu", power=2.0)(z))


def test_noise_passes_the_threshold_of_its_length_rarely() -> None:
    noise = torch.randn(200, 4096, dtype=torch.float64)
    assert (get("threshold_relu")(noise) > 0).sum(-1).double().mean() < 0.5
    assert (get("threshold_relu", beta=0.5)(noise) > 0).sum(-1).double().mean() > 10


def test_an_odd_polynomial_keeps_signs_and_divides_by_the_root_of_n(z: Tensor) -> None:
    close(get("odd_polynomial")(-z), -get("odd_polynomial")(z))
    close(get("odd_polynomial", power=1)(z), z / KEYS**0.5)
    assert get("odd_polynomial").properties.signed


@pytest.mark.parametrize(("rho", "size"), [(0.0, 1.0), (0.6, 1.0), (0.6, 4.0), (-0.5, 2.0)])
def test_at_the_critical_scale_one_key_balances_all_others_at_every_length(rho: float, size: float) -> None:
    """n^(s size) = n n^(s rho size) at s = 1 / (size (1 - rho)); a tenth below the key vanishes, above it wins."""
    s = critical_s(rho, size)
    for n in (100, 100_000):
        row = torch.full((1, n), rho * size, dtype=torch.float64)
        row[0, 3] = size
        assert get("ssmax", rho=rho, size=size)(row)[0, 3].item() == pytest.approx(0.5, abs=0.01)
    assert get("ssmax", s=0.9 * s)(row)[0, 3] < 0.25
    assert get("ssmax", s=1.1 * s)(row)[0, 3] > 0.75


# Sinks.


def test_softmax1_is_softmax_with_one_more_logit_of_0(z: Tensor) -> None:
    more = torch.cat([z, torch.zeros_like(z[..., :1])], -1)
    close(get("softmax1")(z), torch.softmax(more, -1)[..., :-1])


def test_a_sink_scales_softmax_by_sigmoid_of_logsumexp_minus_sink(z: Tensor) -> None:
    factor = torch.sigmoid(torch.logsumexp(z, -1, keepdim=True) - 1.7)
    close(get("sink", logit=1.7)(z), torch.softmax(z, -1) * factor, 1e-7)


def test_a_sink_at_minus_infinity_is_no_sink(z: Tensor) -> None:
    close(get("sink", logit=-1e30)(z), torch.softmax(z, -1))
    for name in ("sparsemax", "entmax15"):
        close(compose(name, sink=Sink(-1e30))(z), get(name)(z))


def test_softmax1_of_very_negative_logits_has_a_finite_gradient() -> None:
    """Shifting by max z instead of max(0, max z) overflows here: value 0, gradient NaN."""
    z = torch.full((1, 4), -120.0, requires_grad=True)
    weights = get("softmax1")(z)
    weights.sum().backward()
    assert (weights < 1e-30).all()
    assert z.grad.isfinite().all()


# Selections.


def test_topk_of_all_keys_is_softmax_and_topk_1_is_hard(z: Tensor) -> None:
    for k in (KEYS, 10 * KEYS):
        close(get("topk", k=k)(z), get("softmax")(z))
    close(get("topk", k=1)(z), get("hard")(z))


def test_topk_keeps_ties_with_the_kth_key() -> None:
    z = torch.tensor([[3.0, 2.0, 2.0, 2.0, 1.0]], dtype=torch.float64)
    assert (get("topk", k=2)(z) > 0).tolist() == [[True, True, True, True, False]]


def test_topk_counts_by_a_rule_of_the_visible_keys() -> None:
    z = torch.randn(1, 50, dtype=torch.float64)
    mask = torch.arange(50)[None] < 17
    for rule, count in (("sqrt", 5), ("log", 6), (lambda n: n / 4, 4), (lambda n: 0 * n, 1)):
        assert (get("topk", k=rule)(z, mask) > 0).sum() == count


def test_topk_by_a_rule_takes_no_more_keys_than_there_are() -> None:
    many = get("topk", k=lambda n: 5 + 0 * n)
    assert many(torch.tensor([[3.0]])).tolist() == [[1.0]]
    assert many(torch.tensor([[3.0, 3.0]]), torch.tensor([[False, False]])).tolist() == [[0.0, 0.0]]


def test_a_window_as_wide_as_the_row_is_softmax(z: Tensor) -> None:
    close(get("local", window=KEYS)(z), get("softmax")(z))
    weights = get("local", window=3)(z)
    distance = torch.arange(KEYS - 5, KEYS)[:, None] - torch.arange(KEYS)
    assert torch.equal(weights > 0, (distance.abs() < 3).expand(weights.shape))


# Mixtures and kernels.


def test_a_mixture_is_the_weighted_sum_and_its_ends_are_its_parts(z: Tensor) -> None:
    a, b = get("softmax")(z), get("sparsemax")(z)
    close(mixture("softmax", "sparsemax", share=0.25)(z), 0.25 * a + 0.75 * b, 1e-7)
    close(mixture("softmax", "sparsemax", share=1 - 1e-12)(z), a, 1e-10)
    close(mixture("softmax", "sparsemax", share=1e-12)(z), b, 1e-10)


def test_the_exponential_kernel_is_softmax(z: Tensor) -> None:
    close(get("kernel", function="exp")(z), get("softmax")(z))


def test_a_kernel_of_ones_own_equals_the_built_in_one(z: Tensor) -> None:
    own = get("kernel", function=lambda x: x**4, derivative=lambda x: 4 * x**3)
    close(own(z), get("kernel", function="polynomial", power=4)(z))


@pytest.mark.parametrize("name", [*FUNCTIONS, "polynomial 4"])
def test_a_kernels_declared_derivative_and_logarithm_are_those_of_its_function(name: str) -> None:
    function = polynomial(4, offset=0.3) if name == "polynomial 4" else FUNCTIONS[name]
    x = torch.cat([torch.linspace(-8, 8, 101), torch.tensor([-20.0, -15.0, 19.0])]).double().requires_grad_()
    value = function.value(x)
    close(torch.autograd.grad(value.sum(), x)[0], function.derivative(x), 1e-7)
    if function.log is not None:
        close(function.log(x), value.log(), 1e-8)
        far = torch.tensor([-1e4, -200.0], dtype=torch.float64)
        close(function.log(far), far, 1e-12)


def test_lemma_1_bounds_every_kernel(z: Tensor) -> None:
    """With F between F_min and F_max on the row, each weight lies within their ratio of 1/n: the row must disperse."""
    for name, function in FUNCTIONS.items():
        if name != "polynomial":
            value = function.value(z)
            ratio = value.amax(-1, keepdim=True) / value.amin(-1, keepdim=True)
            weights = get("kernel", function=name)(z) * KEYS
            assert (weights <= ratio * (1 + 1e-9)).all()
            assert (weights >= (1 - 1e-9) / ratio).all()


# Bounds that hold for every row.

rows = st.lists(st.floats(-30, 30), min_size=1, max_size=30).map(lambda row: torch.tensor([row], dtype=torch.float64))


@settings(max_examples=50)
@given(rows)
def test_softpick_is_zero_exactly_where_logits_are_not_positive_and_sums_to_1_without_negatives(z: Tensor) -> None:
    weights = get("softpick")(z)
    clearly = z.abs() > 1e-12
    assert torch.equal((weights > 0)[clearly], (z > 0)[clearly])
    if z.min() >= 0 and z.max() > 1e-3:
        assert weights.sum().item() == pytest.approx(1, abs=1e-4)
    if z.min() < -1e-3:
        assert weights.sum() < 1


@settings(max_examples=50)
@given(rows)
def test_stick_breaking_leaves_what_no_key_took(z: Tensor) -> None:
    remainder = torch.prod(1 - torch.sigmoid(z))
    close(get("stick_breaking")(z).sum() + remainder, torch.tensor(1.0, dtype=torch.float64))


@settings(max_examples=50)
@given(rows)
def test_normalised_sa_softmax_is_at_most_softmax_and_equal_at_a_positive_maximum(z: Tensor) -> None:
    weights, softmax = get("sa_softmax")(z), get("softmax")(z)
    assert (weights <= softmax + 1e-15).all()
    if z.max() > 0:
        best = z.argmax()
        assert weights[0, best].item() == pytest.approx(softmax[0, best].item())


@settings(max_examples=50)
@given(rows, st.floats(0.05, 5))
def test_softmax_stays_within_its_sharp_dispersion_bounds(z: Tensor, temperature: float) -> None:
    n, spread = z.shape[-1], (z.max() - z.min()).item() / temperature
    weights = get("softmax", temperature=temperature)(z)
    assert weights.max() <= 1 / (1 + (n - 1) * math.exp(-spread)) + 1e-6
    assert weights.min() >= 1 / (1 + (n - 1) * math.exp(min(spread, 700))) - 1e-6


def test_stick_breaking_to_itself_gives_the_leftover_to_the_query() -> None:
    z = torch.randn(4, 4, dtype=torch.float64)
    causal = torch.ones(4, 4, dtype=torch.bool).tril()
    weights = get("stick_breaking", attend_current=False)(z, causal)
    close(weights.sum(-1), torch.ones(4, dtype=torch.float64))
    assert weights[0].tolist() == [1, 0, 0, 0]
    strict = get("stick_breaking")(z, causal.tril(-1))
    close(weights.tril(-1), strict)


def test_permuting_the_keys_changes_stick_breaking() -> None:
    z = torch.tensor([[0.0, 1.0, 2.0]], dtype=torch.float64)
    assert (get("stick_breaking")(z.flip(-1)).flip(-1) - get("stick_breaking")(z)).abs().max() > 0.1


def test_hard_attention_has_softmaxs_gradient() -> None:
    z, cotangent = torch.randn(3, 7, dtype=torch.float64, requires_grad=True), torch.randn(3, 7, dtype=torch.float64)
    weights = get("hard")(z)
    assert set(weights.unique().tolist()) == {0.0, 1.0}
    hard = torch.autograd.grad((weights * cotangent).sum(), z)[0]
    soft = torch.autograd.grad((torch.softmax(z, -1) * cotangent).sum(), z)[0]
    close(hard, soft)
    assert get("hard")(torch.tensor([[1.0, 1.0, 0.0]])).tolist() == [[0.5, 0.5, 0.0]]


def test_sigmoid_rows_may_hold_any_mass_up_to_n() -> None:
    assert get("sigmoid", bias=0.0)(torch.full((1, 50), 20.0)).sum() == pytest.approx(50)
    assert get("sigmoid")(torch.zeros(1, 1)).item() == 0.5
    assert get("sigmoid")(torch.zeros(1, 1000)).sum() == pytest.approx(1000 / 1001)


@pytest.mark.parametrize("z", [-700.0, -40.0, -16.5, -15.5, -15.0, -14.5, -1.0, 0.0, 3.0, 30.0, 60.0])
def test_the_logarithm_of_softplus_keeps_its_digits(z: float) -> None:
    exact = math.log(z + math.log1p(math.exp(-z))) if z > 0 else math.log(math.log1p(math.exp(z)))
    found = _log_softplus(torch.tensor(z, dtype=torch.float64)).item()
    assert found == pytest.approx(exact, rel=1e-14, abs=1e-14)


@pytest.mark.parametrize("name", ["entmax15", "sparsemax", "relu", "softmax"])
@pytest.mark.parametrize("n", [1, 2, 7])
def test_a_sink_may_count_as_one_more_key_of_a_lipschitz_constant(name: str, n: int) -> None:
    plain = get(name)
    assert compose(name, sink="softmax1").lipschitz(n) == max(plain.lipschitz(n), plain.lipschitz(n + 1))
