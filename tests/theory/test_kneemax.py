"""The theorems on kneemax: what weight it keeps, how far it moves, when zeros appear, and where it loses."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnorm.normalizers.registry import get
from attnorm.theory.gradient import entmax_worst_norm, threshold_jacobian_norm
from attnorm_lab.errata import frontier as fr
from tests.theory.reference.threshold_maps import entmax, kneemax, kneemax_slopes

LENGTHS = (10**2, 10**3, 10**4, 10**5, 10**6)


def rows(seed: int, keys: int, scale: float) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(4, keys, generator=generator, dtype=torch.float64)


any_rows = st.builds(rows, st.integers(0, 2**32 - 1), st.integers(2, 60), st.floats(0.001, 10))


def norm(p: Tensor, T: float = 1.0, share: float = 1.0) -> Tensor:
    return threshold_jacobian_norm(kneemax_slopes(p, share), 2 * T)


@given(any_rows, st.floats(0.1, 5))
@settings(max_examples=40)
def test_the_jacobian_norm_lies_between_bounds_free_of_n(z: Tensor, T: float) -> None:
    p = kneemax(z, T)
    size = norm(p, T)
    assert (size <= 1 / (2 * T) * (1 + 1e-12)).all()
    assert (size >= (1 - p.amax(-1)).sqrt() / (2 * T) - 1e-6).all()


def test_the_norm_is_exactly_one_half_when_two_weights_reach_the_uniform_share() -> None:
    for n in (2, 5, 1000):
        assert norm(torch.full((n,), 1 / n, dtype=torch.float64)).item() == pytest.approx(0.5, rel=1e-12)
    p = kneemax(torch.tensor([1.0, 0.9, -3.0, -5.0]))
    assert p[1] > 1 / 4
    assert norm(p).item() == 0.5


def test_other_maps_lose_their_gradient_on_uniform_rows_of_many_keys() -> None:
    n = 10**4
    uniform = torch.full((n,), 1 / n, dtype=torch.float64)
    assert norm(uniform).item() == pytest.approx(0.5)
    assert threshold_jacobian_norm(uniform).item() == pytest.approx(1 / n)  # softmax
    assert threshold_jacobian_norm(uniform.sqrt()).item() == pytest.approx(n**-0.5)  # entmax15
    # a knee that shrinks more slowly than 1/n loses it too
    assert norm(uniform, share=n**0.5).item() == pytest.approx(0.5 * n**-0.25)


@given(st.integers(2, 10**6), st.floats(0, 3))
@settings(max_examples=100)
def test_the_weight_kept_is_half_the_gap_up_to_one_nth(n: int, gap: float) -> None:
    weight = fr.kneemax_weight(gap, n)
    assert abs(weight - min(1.0, gap / 2)) <= 1 / n + 1e-12
    assert weight <= fr.frontier_weight(n, gap / 2) + 1e-12
    if gap <= 1.5:
        assert weight >= gap / 2 - 1e-12


@pytest.mark.parametrize("n", [2, 3, 10, 500])
def test_the_closed_form_is_what_the_map_gives(n: int) -> None:
    for gap in (0.0, 0.01, 0.4, 1.3, 1.97, 2.0, 2 + 2 / n, 3.0):
        assert fr.two_level_weight(kneemax, gap, n) == pytest.approx(fr.kneemax_weight(gap, n), abs=1e-9)


@given(any_rows)
@settings(max_examples=30)
def test_among_unequal_keys_the_leader_keeps_at_least_as_much(z: Tensor) -> None:
    top = z.topk(2, dim=-1).values
    weights = kneemax(z).amax(-1)
    for weight, gap in zip(weights.tolist(), (top[:, 0] - top[:, 1]).tolist(), strict=True):
        assert weight >= fr.kneemax_weight(gap, z.shape[-1]) - 1e-9


@given(any_rows, st.floats(0.2, 3))
@settings(max_examples=30)
def test_zeros_appear_exactly_where_the_keys_above_fill_the_row(z: Tensor, T: float) -> None:
    p = kneemax(z, T)
    n = z.shape[-1]
    k = 1 / n
    above = ((z.unsqueeze(-2) - z.unsqueeze(-1)) / (2 * T)).clamp(min=0)  # (row, key, other)
    filled = torch.where(above <= 2 * k, above.square() / (4 * k), above - k).sum(-1)
    assert (p[filled > 1 + 1e-9] <= 1e-12).all()
    assert (p[filled < 1 - 1e-9] > 0).all()
    behind = z.amax(-1, keepdim=True) - z
    assert (p[behind >= 2 * T * (1 + 1 / n) + 1e-9] == 0).all()
    if (behind.amax(-1) < 2 * T * (1 / n + 1 / (n - 1)) - 1e-9).all():
        assert (p > 0).all()


def test_both_zero_thresholds_are_tight() -> None:
    for n in (3, 20):
        far = torch.zeros(n, dtype=torch.float64)
        far[0] = 2 * (1 + 1 / n) - 1e-3
        assert kneemax(far)[1] > 0
        near = torch.zeros(n, dtype=torch.float64)
        near[0] = -2 * (1 / n + 1 / (n - 1)) - 1e-6
        assert kneemax(near)[0] <= 1e-12


def test_the_gradients_in_logits_temperature_and_knee() -> None:
    z = torch.randn(3, 8, dtype=torch.float64)
    T, share, step = 0.7, 1.3, 1e-6
    p, n = kneemax(z, T, share), z.shape[-1]
    u = kneemax_slopes(p, share)
    grad = torch.randn_like(p)

    def loss(z: Tensor, T: float, share: float) -> Tensor:
        return (grad * kneemax(z, T, share)).sum(-1)

    dz = u * (grad - (u * grad).sum(-1, keepdim=True) / u.sum(-1, keepdim=True)) / (2 * T)
    for j in range(n):
        e = step * torch.eye(n, dtype=torch.float64)[j]
        assert torch.allclose((loss(z + e, T, share) - loss(z - e, T, share)) / (2 * step), dz[:, j], atol=1e-4)
    dT = -(dz * z).sum(-1) / T
    assert torch.allclose((loss(z, T + step, share) - loss(z, T - step, share)) / (2 * step), dT, atol=1e-4)
    dk = (grad * u * (u.square().sum(-1, keepdim=True) / u.sum(-1, keepdim=True) - u)).sum(-1)
    assert torch.allclose((loss(z, T, share + n * step) - loss(z, T, share - n * step)) / (2 * step), dk, atol=1e-4)


def test_it_joins_sparsemax_and_entmax15() -> None:
    z = 2 * torch.randn(5, 30, dtype=torch.float64)
    assert torch.allclose(kneemax(z, share=1e-9), entmax(z / 2, 2.0), atol=1e-6)
    assert torch.allclose(kneemax(z, share=30.0), entmax(z / 2, 1.5), atol=1e-12)
    assert torch.allclose(kneemax(z, share=120.0), entmax(z / 4, 1.5), atol=1e-12)
    assert kneemax(torch.randn(4, 1)).eq(1).all()


def test_it_solves_its_variational_problem() -> None:
    """p = argmax <p, z/2T> - sum psi(p) with psi'' = 1/u: no feasible move improves the objective."""
    z = torch.randn(12, dtype=torch.float64)
    k = 1 / 12

    def objective(p: Tensor) -> Tensor:
        low = 4 / 3 * k**0.5 * p**1.5
        return (p * z / 2).sum(-1) - torch.where(p <= k, low, p.square() / 2 + k * p - k**2 / 6).sum(-1)

    best = objective(kneemax(z))
    others = torch.distributions.Dirichlet(torch.full((12,), 0.5, dtype=torch.float64)).sample((500,))
    for towards in (1e-4, 1e-2, 1.0):
        assert (objective((1 - towards) * kneemax(z) + towards * others) <= best + 1e-12).all()


def default_rivals(gap: float, n: int) -> dict[str, float]:
    """The weight each rival keeps at its default: ssmax s = 0.168, entmax15, asentmax beta = 0.55, gamma = 0."""

    def entmax15_weight(gap: float) -> float:
        if gap >= 2:
            return 1.0
        low, high = 1 / n, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if fr.entmax_gap(middle, n, 1.5) < gap else (low, middle)
        return low

    ssmax = 1 / (1 + (n - 1) * n ** (-0.168 * gap))
    return {"ssmax": ssmax, "entmax15": entmax15_weight(gap), "asentmax": entmax15_weight(1.55 * gap)}


@pytest.mark.parametrize("n", LENGTHS)
def test_at_defaults_the_weight_is_never_the_smallest(n: int) -> None:
    for gap in [0.01, 0.1, 0.5, 1.0, 1.5, 1.9, 1.99, 2.0, 2 + 2 / n, 3.0, 6.0, 9.0]:
        ours, rivals = fr.kneemax_weight(gap, n), default_rivals(gap, n)
        assert ours >= rivals["ssmax"]
        assert ours >= rivals["entmax15"] or ours >= 1 - 8 / n  # loses to entmax15 only this close to 1
        assert ours > min(rivals.values()) or ours == 1


@pytest.mark.parametrize("n", LENGTHS)
def test_at_equal_lipschitz_constant_it_keeps_more_than_all_three(n: int) -> None:
    for gap in [0.05, 0.5, 1.0, 1.5, 1.9]:
        softmax_like = 1 / (1 + (n - 1) * math.exp(-gap))  # softmax and ssmax scaled to 1/2
        scale = 0.5 / entmax_worst_norm(n, 1.5)
        entmax_like = default_rivals(gap * scale, n)["entmax15"]  # entmax15 and asentmax scaled to 1/2
        assert fr.kneemax_weight(gap, n) > max(softmax_like, entmax_like)


def test_where_it_loses() -> None:
    # to asentmax, for the same gap, once its larger constant pays: 0.7 < g < 2
    assert fr.kneemax_weight(1.5, 1000) < default_rivals(1.5, 1000)["asentmax"]
    assert 1.55 * entmax_worst_norm(1000, 1.5) > 0.5
    # to entmax15 among few keys, and within 8/n of weight 1
    assert fr.kneemax_weight(1.0, 5) < default_rivals(1.0, 5)["entmax15"]
    assert fr.kneemax_weight(1.99, 100) < default_rivals(1.99, 100)["entmax15"]
    # to ssmax, whose constant s log(n)/2 is below 1/2 up to n = e^(1/s)
    assert 0.168 * math.log(384) / 2 < 0.5 < 0.168 * math.log(385) / 2
    # to sparsemax(z/2), on the frontier, by less than 2/n
    for n in (10, 1000):
        lost = fr.frontier_weight(n, 0.95) - fr.kneemax_weight(1.9, n)
        assert 0 < lost < 2 / n


def test_on_random_rows_it_has_more_zeros_than_entmax15() -> None:
    for scale in (0.3, 1.0, 3.0):
        for n in (100, 3000):
            z = scale * torch.randn(10, n, dtype=torch.float64)
            assert (kneemax(z) > 1e-12).sum() < (entmax(z, 1.5) > 1e-12).sum()


FIXED = st.floats(0.01, 0.5)


def huber(t: float, knee: float) -> float:
    return t * t / (4 * knee) if t <= 2 * knee else t - knee


@given(st.integers(2, 3000), st.floats(0, 3), FIXED)
@settings(max_examples=40)
def test_with_a_fixed_knee_a_leader_keeps_its_part_at_every_length(n: int, gap: float, knee: float) -> None:
    row = torch.zeros(1, n, dtype=torch.float64)
    row[0, 0] = gap
    weight = get("kneemax", knee=knee)(row)[0, 0].item()
    assert weight >= min(1.0, huber(gap / 2, knee)) - 1e-9
    assert weight >= fr.frontier_weight(n, gap / 2) - knee - 1 / n - 1e-9
    if gap / 2 >= 1 + knee:
        assert weight == 1


def test_with_a_fixed_knee_that_part_is_what_is_left_among_many() -> None:
    row = torch.zeros(1, 10**6, dtype=torch.float64)
    for gap in (0.3, 1.0, 1.8):
        row[0, 0] = gap
        assert get("kneemax", knee=0.25)(row)[0, 0].item() == pytest.approx(huber(gap / 2, 0.25), abs=2e-3)


@given(any_rows, FIXED)
@settings(max_examples=20)
def test_with_a_fixed_knee_the_bound_and_both_zero_thresholds_hold(z: Tensor, knee: float) -> None:
    n = z.shape[-1]
    p = get("kneemax", knee=knee)(z)
    assert (norm(p, share=knee * n) <= 0.5 + 1e-12).all()
    behind = z.amax(-1, keepdim=True) - z
    assert (p[behind >= 2 * (1 + knee) + 1e-9] == 0).all()
    least = 1 / (n - 1)
    reach = least + knee if least >= knee else 2 * (knee * least) ** 0.5
    calm = behind.amax(-1) < 2 * reach - 1e-9
    assert (p[calm] > 0).all()


@pytest.mark.parametrize("T", [0.75, 1.0, 4.0])
def test_the_knee_1_over_4T2_moves_undecided_rows_as_entmax15_does(T: float) -> None:
    n, knee = 400, 1 / (4 * T * T)
    z = 0.04 * torch.rand(3, n, dtype=torch.float64)
    p = kneemax(z, T, share=knee * n)
    assert p.max() < knee
    assert torch.allclose(p, entmax(z, 1.5), atol=1e-12)
    uniform = torch.full((n,), 1 / n, dtype=torch.float64)
    assert norm(uniform, T, share=knee * n).item() == pytest.approx(n**-0.5)
    assert norm(uniform, n**0.5 / 2).item() == pytest.approx(n**-0.5)  # or by temperature alone
