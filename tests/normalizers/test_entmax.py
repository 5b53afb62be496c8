"""entmax: exact on ordinary and on hostile rows, true gradients for logits and alpha, under vmap and compiled."""

import math

import entmax as package
import pytest
import torch
from torch import Tensor

from attnorm.normalizers import entmax as entmax_module
from attnorm.normalizers import get, threshold
from attnorm.normalizers.entmax import Entmax, _Entmax, entmax_row, entmax_rows

ALPHAS = (1.1, 1.3, 1.5, 1.7, 2.0)


def exact(z: Tensor, alpha: float) -> Tensor:
    """The reference in float64, row by row."""
    return torch.stack([entmax_row(row.double(), alpha) for row in z.flatten(0, -2)]).reshape(z.shape)


def layers_that_drop_out_one_by_one(keys: int, ratio: float, core: int = 2) -> Tensor:
    """A row built against Newton's method for sparsemax: each step drops only the outermost of many layers of keys.

    Each layer makes the row `ratio` times as long. With T_k the threshold of the first k layers and d_k its distance
    above layer k, adding layer k lowers T by d_k (ratio - 1), and layer k-1 survives if that is at least d_{k-1}.
    """
    sizes, depths, threshold, distance = [core], [0.0], 0.0, None
    while sum(sizes) * ratio <= keys:
        size = max(1, round(sum(sizes) * (ratio - 1)))
        growth = size / sum(sizes)
        distance = 1.0 if distance is None else distance / growth * (1 + 1e-3)
        threshold -= distance * growth
        sizes.append(size)
        depths.append(threshold - distance)
    scale = (1 - 1 / core) * (1 - 1e-6) / -depths[-1]
    levels = [0.0, *(-1 / core + depth * scale for depth in depths[1:])]
    return torch.cat(
        [torch.full((size,), level, dtype=torch.float64) for size, level in zip(sizes, levels, strict=True)]
    )


HOSTILE = {
    "geometric": -(2.0 ** torch.arange(-30, 12, dtype=torch.float64)),
    "power law": -(torch.arange(1, 400, dtype=torch.float64) ** 1.5) / 50,
    "harmonic": 1 / torch.arange(1, 3000, dtype=torch.float64),
    "ties everywhere": torch.tensor([1.0, 1.0, 0.5, 0.5, 0.0, 0.0] * 50, dtype=torch.float64),
    "all equal": torch.full((777,), -1e4, dtype=torch.float64),
    "one far ahead": torch.cat([torch.tensor([1e4]), -torch.arange(300.0)]).double(),
    "denormal differences": torch.arange(200, dtype=torch.float64) * 1e-310,
    "two levels a gap of 1 apart": torch.tensor([0.0] + [-1.0] * 500, dtype=torch.float64),
    "at sparsemax's threshold": torch.tensor([0.0, 0.0] + [-0.5] * 500, dtype=torch.float64),
    "layers": layers_that_drop_out_one_by_one(4096, 1.5),
}


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_rows_are_exact(name: str, alpha: float) -> None:
    z = HOSTILE[name][None]
    expected = exact(z, alpha)
    torch.testing.assert_close(get("entmax", alpha=alpha)(z), expected, rtol=0, atol=1e-9)
    # At 1.5 and 2 keys near the threshold keep all their digits; at other alpha they share the rounding of 1 + d x.
    in_float32, millionths = z.float(), 1 if alpha in (1.5, 2.0) else 5
    error = get("entmax", alpha=alpha)(in_float32).double() - exact(in_float32.double(), alpha)
    assert error.abs().max() < 1e-6 * millionths


@pytest.mark.parametrize("name", ["sparsemax", "entmax15"])
@pytest.mark.parametrize("crowd", ["normal", "crowded threshold", "layers"])
def test_a_hundred_thousand_keys_are_exact_to_a_millionth(name: str, crowd: str) -> None:
    keys = 100_003
    if crowd == "layers":
        row = layers_that_drop_out_one_by_one(keys, 1.5)
    elif crowd == "normal":
        row = 3 * torch.randn(keys, dtype=torch.float64)
    else:  # nearly all keys stand within 2e-4 of the threshold, where each step of the search uncovers more of them
        reach = 1.0 if name == "sparsemax" else 2.0
        row = torch.cat([torch.zeros(1), -reach + 4e-4 * (torch.rand(keys) - 0.5)]).double()
    z = row.float()[None]
    error = (get(name)(z).double() - exact(z, 2.0 if name == "sparsemax" else 1.5)).abs().max()
    assert error < 1e-6


@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0])
@pytest.mark.parametrize("keys", [256, 263, 2111])
def test_a_row_that_sees_only_its_last_keys_is_exact_among_rows_that_see_all(keys: int, alpha: float) -> None:
    """The search starts from the largest key of each group; here a row has no visible key in any group."""
    z = torch.randn(6, keys, dtype=torch.float64)
    for visible in (1, 3, 7):
        mask = torch.ones(6, keys, dtype=torch.bool)
        mask[::4, : keys - visible] = False
        weights = get("entmax", alpha=alpha)(z, mask)
        torch.testing.assert_close(weights[::4, -visible:], get("entmax", alpha=alpha)(z[::4, -visible:]))
        torch.testing.assert_close(weights[1], get("entmax", alpha=alpha)(z[1:2])[0])


@pytest.mark.parametrize("offset", [-1e6, -1e4, 1e3, 1e4, 1e6])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_an_offset_costs_no_digits(alpha: float, offset: float) -> None:
    """The entmax package's bisection loses 2e-4 at 1e4 and 2.6e-2 at 1e6."""
    z = torch.randint(-30, 30, (5, 300)) / 8.0
    torch.testing.assert_close(get("entmax", alpha=alpha)(z + offset), get("entmax", alpha=alpha)(z), rtol=0, atol=2e-7)


@pytest.mark.parametrize("spread", [0.3, 2.0, 10.0])
def test_agrees_with_the_entmax_package(spread: float) -> None:
    z = (spread * torch.randn(20, 150, dtype=torch.float64)).requires_grad_()
    ours = {"sparsemax": get("sparsemax"), "entmax15": get("entmax15"), "1.3": get("entmax", alpha=1.3)}
    theirs = {
        "sparsemax": package.sparsemax,
        "entmax15": package.entmax15,
        "1.3": lambda z: package.entmax_bisect(z, alpha=1.3, n_iter=100),
    }
    cotangent = torch.randn_like(z)
    for name, normalizer in ours.items():
        results = []
        for function in (normalizer, theirs[name]):
            p = function(z)
            results.append((p.detach(), torch.autograd.grad((p * cotangent).sum(), z)[0]))
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-8)


def test_rows_that_break_the_entmax_package_are_fine() -> None:
    """All -inf raises there, all finfo.min gives NaN in its bisection; here a mask says what is hidden."""
    z = torch.full((2, 5), torch.finfo(torch.float32).min)
    for alpha in ALPHAS:
        normalizer = get("entmax", alpha=alpha)
        torch.testing.assert_close(normalizer(z), torch.full((2, 5), 0.2))
        assert torch.equal(
            normalizer(torch.full((2, 5), -math.inf), torch.zeros(5, dtype=torch.bool)), torch.zeros(2, 5)
        )


def test_half_precision_rows_sum_to_one_as_well_as_rounding_allows() -> None:
    """Computed in bfloat16 throughout, as the package does, entmax15 sums are off by 1.8e-2."""
    z = torch.randn(20, 1024, dtype=torch.bfloat16)
    for name in ("sparsemax", "entmax15"):
        assert (get(name)(z).double().sum(-1) - 1).abs().max() < 4e-3


# The limits of the family.


def test_alpha_1_is_softmax_and_alpha_2_is_sparsemax() -> None:
    z = 3 * torch.randn(10, 40, dtype=torch.float64)
    assert torch.equal(get("entmax", alpha=1.0)(z), get("softmax")(z))
    assert torch.equal(get("entmax", alpha=2.0)(z), get("sparsemax")(z))
    assert torch.equal(get("entmax", alpha=1.5)(z), get("entmax15")(z))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_alpha_to_1_tends_to_softmax_at_the_rate_of_its_derivative(dtype: torch.dtype) -> None:
    z = (3 * torch.randn(10, 40, dtype=torch.float64)).to(dtype)
    p = torch.softmax(z.double(), -1)
    log2 = p.log() ** 2
    slope = p * ((p * log2).sum(-1, keepdim=True) - log2) / 2
    for d in (1e-3, 1e-5, 1e-7):
        change = get("entmax", alpha=1 + d)(z).double() - p
        rounding = 1e-6 if dtype == torch.float32 else 1e-12
        assert (change - d * slope).abs().max() < 1e3 * d**2 + rounding


def test_alpha_near_1_is_as_fast_as_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """S^d - 1 as a difference is all rounding at d = 1e-6, and the search would never see that it is done."""
    passes = []
    evaluate = entmax_module._entmax
    monkeypatch.setattr(entmax_module, "_entmax", lambda *args: passes.append(1) or evaluate(*args))
    get("entmax", alpha=1 + 1e-6)(3 * torch.randn(20, 200))
    assert len(passes) < 10


def test_alpha_to_2_tends_to_sparsemax() -> None:
    z = torch.randn(10, 40, dtype=torch.float64)
    for d in (1e-3, 1e-6, 1e-9):
        assert (get("entmax", alpha=2 - d)(z) - get("sparsemax")(z)).abs().max() < 10 * d + 1e-12


def test_a_gap_of_1_makes_sparsemax_one_hot_and_a_gap_of_2_entmax15() -> None:
    for name, gap in (("sparsemax", 1.0), ("entmax15", 2.0)):
        row = torch.zeros(1, 1000, dtype=torch.float64)
        row[0, 3] = gap
        assert torch.equal(get(name)(row), torch.eye(1000, dtype=torch.float64)[3:4])
        row[0, 3] = gap - 1e-3
        assert (get(name)(row) > 0).sum() > 1


# Derivatives.


def kink_free(z: Tensor, alpha: float) -> Tensor:
    """The rows of z with no key within 1e-3 of its threshold, where finite differences would straddle a kink."""
    p = get("entmax", alpha=alpha)(z)
    nudged = get("entmax", alpha=alpha)(z + 1e-3 * torch.randn(z.shape, dtype=z.dtype))
    return z[((p > 0) == (nudged > 0)).all(-1)]


@pytest.mark.parametrize("alpha", [1.0001, 1.01, 1.2, 1.5, 1.8, 1.99])
def test_the_gradient_of_a_learned_alpha_is_the_derivative(alpha: float) -> None:
    z = kink_free(2 * torch.randn(6, 12, dtype=torch.float64), alpha)
    assert len(z) >= 2
    cotangent = torch.randn_like(z)

    def loss(a: float) -> float:
        return (entmax_rows(z, a) * cotangent).sum().item()

    normalizer = get("entmax", alpha=alpha, learned=True).double()
    (normalizer(z) * cotangent).sum().backward()
    theta = normalizer.map.theta
    share = torch.sigmoid(theta).item()
    found = theta.grad.item() / (share * (1 - share))
    h = 1e-5 * (alpha - 1)
    central = (
        8 * (loss(1 + share + h) - loss(1 + share - h)) - (loss(1 + share + 2 * h) - loss(1 + share - 2 * h))
    ) / 12
    assert found == pytest.approx(central / h, rel=1e-4, abs=1e-6)


def test_the_gradient_of_alpha_tends_to_its_limit_at_1() -> None:
    """dp/dalpha -> p (E[log^2 p] - log^2 p) / 2, although every term of the usual formula divides by alpha - 1."""
    z = 3 * torch.randn(6, 30, dtype=torch.float64)
    p = torch.softmax(z, -1)
    log2 = p.log() ** 2
    cotangent = torch.randn_like(z)
    limit = (p * ((p * log2).sum(-1, keepdim=True) - log2) / 2 * cotangent).sum().item()
    alpha = torch.tensor(1 + 1e-6, dtype=torch.float64, requires_grad=True)
    (_Entmax.apply(z, alpha) * cotangent).sum().backward()
    assert alpha.grad.item() == pytest.approx(limit, rel=1e-4)


@pytest.mark.parametrize("t", [-9.9e-3, -3e-3, 9.9e-3])
def test_the_series_for_alpha_near_1_equals_the_formula_where_they_meet(t: float) -> None:
    p = torch.tensor([math.exp(-0.5)], dtype=torch.float64)
    formula = -p * 0.25 * (math.expm1(-t) + t) / t**2
    alpha = torch.tensor(1 - 2 * t, dtype=torch.float64)  # (alpha - 1) log p = t
    torch.testing.assert_close(entmax_module._change_with_alpha(p, alpha), formula, rtol=1e-10, atol=0)


def test_each_head_learns_its_own_alpha() -> None:
    normalizer = get("entmax", alpha=1.5, learned=True, heads=3).double()
    with torch.no_grad():
        normalizer.map.theta.copy_(torch.tensor([-2.0, 0.0, 2.0]))
    z = 2 * torch.randn(2, 3, 4, 9, dtype=torch.float64)
    weights = normalizer(z)
    for head, theta in enumerate((-2.0, 0.0, 2.0)):
        alpha = 1 + 1 / (1 + math.exp(-theta))
        torch.testing.assert_close(weights[:, head], get("entmax", alpha=alpha)(z[:, head]), rtol=0, atol=1e-10)
    (weights**2).sum().backward()
    assert (normalizer.map.theta.grad != 0).all()


def test_a_learned_alpha_stays_inside_its_range_however_far_it_is_pushed() -> None:
    z = torch.randn(4, 10, dtype=torch.float64)
    for push, limit in ((-1e4, "softmax"), (1e4, "sparsemax")):
        normalizer = get("entmax", learned=True).double()
        with torch.no_grad():
            normalizer.map.theta.fill_(push)
        weights = normalizer(z)
        weights.square().sum().backward()
        assert (weights - get(limit)(z)).abs().max() < 1e-4
        assert normalizer.map.theta.grad.isfinite().all()


def steepest_two_level_row(n: int) -> float:
    """Largest norm of entmax15's Jacobian over rows with one key a gap above n - 1 equal ones.

    By symmetry the first line of J lies along its steepest direction, (n-1, -1, ..., -1).
    """
    gaps = torch.linspace(0.0, 2.0, 2001, dtype=torch.float64)
    rows = torch.where(torch.arange(n) < 1, 0.0, -gaps[:, None]).requires_grad_()
    line = torch.autograd.grad(get("entmax15")(rows)[:, 0].sum(), rows)[0]
    return line.norm(dim=-1).max().item() * math.sqrt(n / (n - 1))


def test_the_worst_jacobian_of_entmax15_grows_with_the_keys_and_stays_below_1() -> None:
    """0.7071 up to 47 keys, 0.7267 at 65, 0.868 at 1024: the tempting constant 2^(alpha-2) is false."""
    for n, worst in ((2, 0.7071), (65, 0.7267), (1024, 0.868)):
        assert steepest_two_level_row(n) == pytest.approx(worst, abs=1e-3)
    assert all(steepest_two_level_row(n) < math.sqrt(0.5) for n in (3, 10, 47))
    assert get("entmax15").lipschitz(1024) == pytest.approx(0.868, abs=1e-3)


# Other ways to call it.


@pytest.mark.parametrize("alpha", [1.5, 2.0, 1.3])
def test_vmap_equals_a_loop(alpha: float) -> None:
    z = torch.randn(5, 3, 7, dtype=torch.float64)
    normalizer = get("entmax", alpha=alpha)
    torch.testing.assert_close(torch.vmap(normalizer)(z), normalizer(z))
    torch.testing.assert_close(torch.vmap(normalizer, in_dims=1, out_dims=1)(z), normalizer(z))


def test_vmap_over_gradients_and_learned_alpha() -> None:
    normalizer = get("entmax", learned=True).double()
    z, cotangent = torch.randn(5, 3, 7, dtype=torch.float64), torch.randn(3, 7, dtype=torch.float64)

    def gradient(z: Tensor) -> Tensor:
        return torch.func.grad(lambda z: (normalizer(z) * cotangent).sum())(z)

    torch.testing.assert_close(torch.vmap(gradient)(z), torch.stack([gradient(row) for row in z]))
    jacobian = torch.func.jacrev(lambda z: normalizer(z))(z[0])
    torch.testing.assert_close(jacobian.sum((-2, -1)), torch.zeros(3, 7, dtype=torch.float64), rtol=0, atol=1e-12)


# The inductor needs 15 s for C++ code that is not in its cache.
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_compiled_rows_are_exact_after_a_fixed_number_of_steps(backend: str) -> None:
    """Compiled code cannot ask whether it is done: hostile rows of 16,384 keys still come out exact."""
    hostile = [layers_that_drop_out_one_by_one(16_384, ratio) for ratio in (1.4, 1.5, 1.65, 2.0)]
    z = torch.full((len(hostile) + 1, 16_384), -5.0)
    for i, row in enumerate(hostile):
        z[i, : len(row)] = row.float()
    z[-1] = 3 * torch.randn(16_384)
    compiled = torch.compile(lambda z: entmax_rows(z, 2.0), backend=backend, fullgraph=True)
    assert (compiled(z).double() - exact(z, 2.0)).abs().max() < 1e-6


def test_the_map_says_what_it_is() -> None:
    assert "alpha=1.3" in repr(Entmax(1.3))
    assert "learned" in repr(Entmax(1.3, learned=True))
    assert Entmax(1.0).properties.exact_zeros is False
    assert Entmax(1.0).lipschitz(5) == 0.5
    assert Entmax(1.01).properties.exact_zeros is True


@pytest.mark.parametrize("name", ["sparsemax", "entmax15", "entmax", "kneemax"])
@pytest.mark.parametrize("keys", [256, 263, 1027, 4099])
@pytest.mark.parametrize("scale", [0.02, 1.0, 30.0])
def test_picking_out_the_groups_that_hold_weight_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, name: str, keys: int, scale: float
) -> None:
    """Rows of every sparsity, weight also on the keys that fill no group, against the rows solved whole."""
    z = scale * torch.randn(6, keys, generator=torch.Generator().manual_seed(keys), dtype=torch.float64)
    z[1, -1] = z[1].max() + 0.1
    z[2] = 0.0
    z[3, 7:] = z[3, :7].min() - 100.0
    found = get(name)(z)
    monkeypatch.setattr(threshold, "MIN_GROUPS", 10**9)
    torch.testing.assert_close(found, get(name)(z), rtol=0, atol=1e-14)


def test_a_nan_makes_its_own_row_nan_and_no_other() -> None:
    z = 5 * torch.randn(3, 1000)
    z[1, 500] = torch.nan
    for name in ("sparsemax", "entmax15", "kneemax"):
        assert get(name)(z).isnan().all(-1).tolist() == [False, True, False]
        assert not get(name)(z)[[0, 2]].isnan().any()


def test_the_map_has_the_alpha_of_entmax15_by_default() -> None:
    assert Entmax().alpha == get("entmax").map.alpha == get("entmax15").map.alpha == 1.5


@pytest.mark.parametrize("alpha", [1.485, 1.499, 1.501, 1.515, 1.98, 1.999])
def test_an_alpha_beside_one_with_a_formula_of_its_own_has_its_own_weights(alpha: float) -> None:
    z = torch.linspace(-1, 1, 6, dtype=torch.float64)[None]
    torch.testing.assert_close(entmax_rows(z, alpha), exact(z, alpha), rtol=0, atol=1e-12)
    nearest = 1.5 if alpha < 1.6 else 2.0
    assert (entmax_rows(z, nearest) - exact(z, alpha)).abs().max() > 1e-5


def test_the_reference_has_a_gradient_where_a_weight_just_becomes_0() -> None:
    z = torch.tensor([0.0, -1.0], dtype=torch.float64, requires_grad=True)  # sparsemax's first weight of 1
    entmax_row(z, 2.0)[0].backward()
    assert z.grad is not None
    assert z.grad.isfinite().all()
