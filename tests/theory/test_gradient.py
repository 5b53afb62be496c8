"""The gradient family: exact norms against dense linear algebra, printed bounds refuted, corrected ones kept."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnorm.theory import gradient
from attnorm.theory import rank_one_eigenvalues as secular
from attnorm.theory.gradient import jacobian_norm, linearize, power_iteration_norm
from tests.metrics.root_reference import rank_one_root_of_moments
from tests.theory.reference.threshold_maps import entmax, kneemax, kneemax_slopes

ALPHAS = (1.0, 1.3, 1.5, 1.8, 2.0)
EPS = torch.finfo(torch.float64).eps

rows_of_logits = st.integers(0, 2**32 - 1).flatmap(
    lambda seed: st.tuples(st.just(seed), st.integers(1, 40), st.floats(0.01, 30))
)


def logits_of(drawn: tuple[int, int, float], rows: int = 3) -> Tensor:
    seed, keys, scale = drawn
    generator = torch.Generator().manual_seed(seed)
    z = scale * torch.randn(rows, keys, generator=generator, dtype=torch.float64)
    z[0] = z[0].round()  # ties
    return z


def dense_norm(u: Tensor) -> Tensor:
    total = u.sum(-1)[..., None, None]
    J = torch.diag_embed(u) - u.unsqueeze(-1) * u.unsqueeze(-2) / torch.where(total > 0, total, 1.0)
    return torch.linalg.matrix_norm(J, 2)


def dense_kernel_norm(F: Tensor, slopes: Tensor) -> Tensor:
    total = F.sum(-1, keepdim=True)
    a, f = F / total, slopes / total
    return torch.linalg.matrix_norm(torch.diag_embed(f) - a.unsqueeze(-1) * f.unsqueeze(-2), 2)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_the_entmax_norm_is_the_spectral_norm_of_the_true_jacobian(alpha: float, scale: float) -> None:
    z = scale * torch.randn(4, 12, dtype=torch.float64)
    T = 0.7
    p = entmax(z / T, alpha)
    step = 1e-5
    differences = [
        (entmax((z + step * e) / T, alpha) - entmax((z - step * e) / T, alpha)) / (2 * step) for e in torch.eye(12)
    ]
    norm = gradient.entmax_jacobian_norm(p, alpha, T)
    # sparsemax and the edge of a support have kinks, where a difference quotient is off by the step
    assert torch.allclose(norm, torch.linalg.matrix_norm(torch.stack(differences, -1), 2), rtol=1e-3, atol=2e-3)
    assert torch.allclose(norm, dense_norm(gradient.entmax_slopes(p, alpha)) / T, rtol=1e-13, atol=1e-15)


@given(rows_of_logits, st.sampled_from(ALPHAS))
@settings(max_examples=30)
def test_the_norm_equals_dense_linear_algebra_on_any_row(drawn: tuple[int, int, float], alpha: float) -> None:
    p = entmax(logits_of(drawn), alpha)
    u = gradient.entmax_slopes(p, alpha)
    norm = gradient.entmax_jacobian_norm(p, alpha)
    assert ((norm - dense_norm(u)).abs() <= 50 * EPS * u.amax(-1)).all()
    low, high = gradient.entmax_norm_bracket(p, alpha)
    assert (low <= norm * (1 + 8 * EPS)).all()
    assert (norm <= high * (1 + 8 * EPS)).all()


@given(st.lists(st.floats(-12, 0), min_size=1, max_size=8), st.lists(st.integers(1, 40), min_size=8, max_size=8))
@settings(max_examples=75)
def test_the_secular_root_has_full_relative_accuracy(exponents: list[float], counts: list[int]) -> None:
    levels = torch.tensor([10.0**e for e in exponents], dtype=torch.float64)
    u = levels.repeat_interleave(torch.tensor(counts[: len(exponents)]))
    x = float(secular.rank_one_eigenvalue(u))
    top = u.sort(descending=True).values
    if len(u) < 2 or top[0] == top[1]:
        assert x == (0.0 if len(u) < 2 else float(top[0]))
        return

    def residual(x: float) -> float:
        return math.fsum(v / (v - x) for v in u.tolist())

    # the residual rises from -inf at u_(2) to +inf at u_(1): the root lies within a few units in the last place
    below, above = x * (1 - 32 * EPS), x * (1 + 32 * EPS)
    assert below <= float(top[1]) or residual(below) <= 0
    assert above >= float(top[0]) or residual(above) >= 0


def test_ties_zeros_and_short_rows() -> None:
    u = torch.tensor(
        [[1, 0, 0, 0], [0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.4, 0.4, 0.2, 0], [1, 1, 1, 1], [1, 1e-300, 0, 0]],
        dtype=torch.float64,
    )
    expected = torch.tensor([0, 0, 0.5, 0.4, 1, 2e-300], dtype=torch.float64)
    assert torch.allclose(secular.rank_one_eigenvalue(u), expected, rtol=1e-14, atol=0)
    assert secular.rank_one_eigenvalue(torch.ones(3, 1)).tolist() == [0, 0, 0]
    assert secular.rank_one_eigenvalue(torch.ones(2, 0, 5)).shape == (2, 0)
    assert secular.rank_one_eigenvalue(torch.tensor([1.0, 1e-30, 0.0])).item() == pytest.approx(2e-30)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 4e-7), (torch.bfloat16, 0.01)])
def test_lower_precision_keeps_the_accuracy_of_its_input(dtype: torch.dtype, tolerance: float) -> None:
    for scale in (0.1, 1.0, 6.0):
        p = torch.softmax(scale * torch.randn(64, 300, dtype=torch.float64), -1)
        norm = gradient.entmax_jacobian_norm(p.to(dtype))
        assert norm.dtype == torch.float32
        assert torch.allclose(norm.double(), gradient.entmax_jacobian_norm(p), rtol=tolerance, atol=0)


def test_batched_equals_looped_and_a_mask_equals_leaving_keys_out() -> None:
    z = torch.randn(2, 3, 5, 17, dtype=torch.float64)
    alpha = torch.tensor([1.0, 1.5, 2.0], dtype=torch.float64)[:, None, None]
    p = torch.stack([entmax(z[:, h], float(a)) for h, a in enumerate(alpha.flatten())], 1)
    together = gradient.entmax_jacobian_norm(p, alpha, torch.full((2, 3, 5), 0.5))
    for index in [(0, 0, 0), (1, 1, 4), (0, 2, 3)]:
        alone = gradient.entmax_jacobian_norm(p[index], float(alpha.flatten()[index[1]]), 0.5)
        assert float(together[index]) == pytest.approx(float(alone), rel=1e-14)
    mask = torch.arange(17) < 9
    short = torch.softmax(z[..., :9], -1)
    padded = torch.cat([short, torch.full((*z.shape[:-1], 8), torch.nan)], -1)
    masked = gradient.entmax_jacobian_norm(padded, mask=mask)
    assert torch.allclose(masked, gradient.entmax_jacobian_norm(short), rtol=1e-14, atol=0)
    F, slopes = torch.rand_like(z) + 0.1, torch.randn_like(z)
    hidden = torch.where(mask, F, torch.nan), torch.where(mask, slopes, torch.nan)
    for claim in (gradient.kernel_jacobian_norm, gradient.lemma2_printed, gradient.lemma2_corrected):
        assert torch.allclose(claim(*hidden, mask), claim(F[..., :9], slopes[..., :9]), rtol=1e-13)
    nothing = torch.zeros(17, dtype=torch.bool)
    assert gradient.entmax_jacobian_norm(padded, mask=nothing).eq(0).all()
    assert gradient.kernel_jacobian_norm(*hidden, nothing).eq(0).all()


def test_the_exact_norm_is_differentiable() -> None:
    u = torch.rand(4, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(secular.rank_one_eigenvalue, (u,))
    z = torch.randn(3, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: gradient.entmax_jacobian_norm(torch.softmax(z, -1), 1.0, 0.3), (z,))
    tied = torch.tensor([[0.5, 0.5], [1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    gradient.entmax_jacobian_norm(tied).sum().backward()
    assert tied.grad is not None
    assert tied.grad.isfinite().all()
    two = torch.full((2,), 0.5, dtype=torch.float64, requires_grad=True)
    value = secular.rank_one_eigenvalue(two)
    assert value.item() == pytest.approx(0.5)
    assert torch.autograd.grad(value, two)[0].tolist() == pytest.approx([0.5, 0.5])


def test_the_root_of_moments_is_exact_where_the_other_keys_have_two_values() -> None:
    """Gauss's quadrature with two nodes then is the sum itself; one value counts as one node."""
    for others in ([0.04] * 3 + [0.01] * 5, [0.02] * 6, [3e-6] * 2 + [1e-6] * 9):
        u = torch.tensor([0.4, 0.2, 0.1, *others, 0.0], dtype=torch.float64)
        first, second, third = u[:3, None]
        moments = [u[3:].pow(power).sum()[None] for power in (1, 2, 3, 4)]
        found = rank_one_root_of_moments(first, second, third, moments)
        assert found.item() == pytest.approx(secular.rank_one_eigenvalue(u).item(), rel=1e-9)


KERNELS = {
    "exp": (torch.exp, torch.exp),
    "linear": (lambda z: z.abs() + 0.01, lambda z: z.sign()),
    "softplus": (torch.nn.functional.softplus, torch.sigmoid),
    "square": (torch.square, lambda z: 2 * z),
    "elu + 1": (lambda z: torch.nn.functional.elu(z) + 1, lambda z: z.clamp(max=0).exp()),
    "1 + cos": (lambda z: 1 + z.cos(), lambda z: -z.sin()),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("keys", [2, 3, 50])
def test_the_kernel_norm_is_the_spectral_norm(kernel: str, keys: int) -> None:
    F, dF = KERNELS[kernel]
    z = 2 * torch.randn(20, keys, dtype=torch.float64)
    norm = gradient.kernel_jacobian_norm(F(z), dF(z))
    assert torch.allclose(norm, dense_kernel_norm(F(z), dF(z)), rtol=1e-12, atol=1e-15)
    uniform = torch.ones_like(z)
    norm_of_any_slopes = gradient.kernel_jacobian_norm(uniform, dF(z))
    assert torch.allclose(norm_of_any_slopes, dense_kernel_norm(uniform, dF(z)), rtol=1e-12, atol=1e-15)
    jacobian = torch.func.vmap(torch.func.jacrev(lambda row: F(row) / F(row).sum()))(z)
    assert torch.allclose(norm, torch.linalg.matrix_norm(jacobian, 2), rtol=1e-8)


@given(rows_of_logits, st.sampled_from(sorted(KERNELS)))
@settings(max_examples=30)
def test_lemma2_corrected_holds_for_every_kernel(drawn: tuple[int, int, float], kernel: str) -> None:
    F, dF = KERNELS[kernel]
    z = logits_of(drawn).clamp(-30, 30) + 1e-3
    norm = gradient.kernel_jacobian_norm(F(z), dF(z))
    assert ((norm - dense_kernel_norm(F(z), dF(z))).abs() <= 1e-9 * dense_kernel_norm(F(z), dF(z)) + 1e-13).all()
    assert (norm <= gradient.lemma2_corrected(F(z), dF(z)) * (1 + 1e-12)).all()


def test_one_key_has_no_jacobian_and_the_corrected_lemma_says_so() -> None:
    F, slopes = torch.tensor([[2.0], [0.5]]), torch.tensor([[3.0], [-1.0]])
    assert gradient.lemma2_corrected(F, slopes).tolist() == [0.0, 0.0]


def test_tiny_kernel_norms_keep_their_relative_accuracy() -> None:
    z = 25 * torch.randn(50, 30, dtype=torch.float64)
    p = torch.softmax(z, -1)
    exact = gradient.entmax_jacobian_norm(p)
    assert exact.min() < 1e-9  # where squaring the Jacobian would lose every digit
    assert torch.allclose(gradient.kernel_jacobian_norm(p, p), exact, rtol=1e-12, atol=0)
    assert gradient.kernel_jacobian_norm(torch.ones(2, 1), torch.ones(2, 1)).tolist() == [0, 0]


def test_lemma2_as_printed_is_false() -> None:
    F = torch.full((256,), 1 / 256, dtype=torch.float64)
    F[0] = 1
    slopes = torch.ones_like(F)  # F(l) = l
    true = float(gradient.kernel_jacobian_norm(F, slopes))
    assert true == pytest.approx(float(dense_kernel_norm(F, slopes)), rel=1e-12)
    assert true == pytest.approx(4.02, abs=0.005)
    assert float(gradient.lemma2_printed(F, slopes)) == pytest.approx(math.sqrt(2))
    first_branch = 1 / (256 / 256) + 1 / (256 / 256) ** 2
    assert first_branch < true
    assert float(gradient.lemma2_corrected(F, slopes)) == pytest.approx(true, rel=1e-12)  # F' constant: equality


def test_corollary3_as_printed_is_false_on_both_branches() -> None:
    equal = torch.tensor([0.5, 0.5], dtype=torch.float64)
    assert float(gradient.entmax_jacobian_norm(equal)) == 0.5 > float(gradient.corollary3_printed(1.0)) == 0.25
    assert (
        float(gradient.entmax_jacobian_norm(equal, temperature=0.01)) == 50 > float(gradient.corollary3_printed(0.01))
    )
    J = torch.diag(equal) - torch.outer(equal, equal)
    assert J.max() == 0.25  # what 1/(4T) does bound: the largest entry


@given(rows_of_logits, st.floats(0.01, 10))
@settings(max_examples=30)
def test_corollary3_corrected_holds_globally_and_locally(drawn: tuple[int, int, float], T: float) -> None:
    p = torch.softmax(logits_of(drawn), -1)
    norm = gradient.entmax_jacobian_norm(p, 1.0, T)
    local = gradient.corollary3_local(p, T)
    assert (norm <= local * (1 + 1e-12)).all()
    assert (local <= gradient.corollary3_corrected(T) * (1 + 1e-12)).all()


@given(rows_of_logits, st.floats(1e-3, 20), st.floats(0.05, 5))
@settings(max_examples=20)
def test_the_corrected_finite_difference_bound_holds(drawn: tuple[int, int, float], epsilon: float, T: float) -> None:
    z = logits_of(drawn)
    gain = gradient.finite_difference_gain(lambda x: torch.softmax(x, -1), z, epsilon, temperature=T, samples=4)
    assert gain.shape == (4, 3)
    assert (gain <= gradient.finite_difference_corrected(epsilon, T) * (1 + 1e-6) + 1e-9).all()


def test_the_curve_of_figure_4_is_exceeded_and_random_directions_hide_it() -> None:
    z = torch.zeros(1, 1024, dtype=torch.float64)
    z[0, :2] = 12.0
    worst = torch.zeros_like(z)
    worst[0, 0], worst[0, 1] = 1, -1

    def softmax(x: Tensor) -> Tensor:
        return torch.softmax(x, -1)

    seen = float(gradient.finite_difference_gain(softmax, z, 1e-3, directions=worst[None]))
    norm = float(gradient.entmax_jacobian_norm(softmax(z)))
    assert seen == pytest.approx(norm, rel=1e-5)
    assert seen > 1.9 * float(gradient.corollary3_printed(1.0))
    random = gradient.finite_difference_gain(softmax, z, 1e-3, samples=20, generator=torch.Generator().manual_seed(0))
    assert random.mean() < norm / 15


def test_the_toy_of_section_2_3() -> None:
    toy = gradient.swap_example(a=30.0, epsilon=1e-3, temperature=0.5)
    assert toy.logit_distance == pytest.approx(math.sqrt(5) * 1e-3)
    assert toy.weight_distance == pytest.approx(toy.corrected, rel=1e-3)
    assert toy.first_order == pytest.approx(toy.corrected, rel=1e-3)
    assert toy.corrected / (1e-3 / 0.5) == pytest.approx(3 * math.sqrt(2) / 4)
    assert toy.printed / toy.weight_distance == pytest.approx(4 / 3, rel=1e-3)


class Cubed(torch.autograd.Function):
    """A custom function with a backward and no forward-mode rule."""

    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


class CubedOnce(Cubed):
    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


def test_products_with_the_jacobian_of_a_custom_function() -> None:
    def row_map(z: Tensor) -> Tensor:
        y = Cubed.apply(z)
        return y / (1 + y.square().sum(-1, keepdim=True))

    z = torch.randn(3, 6, dtype=torch.float64)
    v, w = torch.randn(2, 3, 6, dtype=torch.float64)
    dense = torch.stack([torch.autograd.functional.jacobian(row_map, row) for row in z])
    at = linearize(row_map, z)
    assert torch.allclose(at.weights, row_map(z))
    assert torch.allclose(at.jvp(v), (dense @ v[..., None]).squeeze(-1))
    assert torch.allclose(at.vjp(w), (w[:, None, :] @ dense).squeeze(-2))
    norm = power_iteration_norm(row_map, z)
    assert torch.allclose(norm, torch.linalg.matrix_norm(dense, 2), rtol=1e-6)
    assert (norm <= torch.linalg.matrix_norm(dense, 2) * (1 + 1e-12)).all()
    with pytest.raises(ValueError, match="differentiable"):
        linearize(lambda z: CubedOnce.apply(z), z).jvp(v)


def test_power_iteration_agrees_with_the_secular_equation_and_respects_masks() -> None:
    z = torch.randn(4, 20, dtype=torch.float64)
    mask = torch.arange(20) < 12

    def masked_softmax(z: Tensor) -> Tensor:
        return torch.softmax(z.masked_fill(~mask, -torch.inf), -1)

    norm = power_iteration_norm(masked_softmax, z, mask=mask)
    assert torch.allclose(norm, gradient.entmax_jacobian_norm(masked_softmax(z)), rtol=1e-6)
    assert power_iteration_norm(lambda z: 0 * z, z).eq(0).all()


@pytest.mark.parametrize("size", [1e-6, 1e6])
def test_power_iteration_stops_at_a_relative_gain(size: float) -> None:
    z = torch.randn(6, 20, dtype=torch.float64)
    exact = gradient.entmax_jacobian_norm(torch.softmax(z, -1))

    def norm(tolerance: float, scale: float) -> Tensor:
        generator = torch.Generator().manual_seed(2)
        return power_iteration_norm(lambda z: scale * torch.softmax(z, -1), z, tolerance=tolerance, generator=generator)

    for tolerance, accuracy in ((1e-9, 1e-6), (1e-4, 2e-2)):
        plain, scaled = norm(tolerance, 1.0), norm(tolerance, size)
        assert torch.allclose(scaled, size * plain, rtol=1e-12)
        assert torch.allclose(plain, exact, rtol=accuracy)


def test_threshold_norm_takes_the_slopes_of_any_threshold_map() -> None:
    z = 2 * torch.randn(5, 9, dtype=torch.float64)
    p = kneemax(z, temperature=0.8)
    step = 1e-6
    moved = torch.stack(
        [(kneemax(z + step * e, 0.8) - kneemax(z - step * e, 0.8)) / (2 * step) for e in torch.eye(9)], -1
    )
    norm = gradient.threshold_jacobian_norm(kneemax_slopes(p), 1.6)
    assert torch.allclose(norm, torch.linalg.matrix_norm(moved, 2), rtol=1e-3, atol=1e-5)


def test_the_printed_lemma_does_not_apply_where_F_vanishes() -> None:
    F = torch.tensor([[1.0, 0.0], [1.0, 2.0]])
    printed = gradient.lemma2_printed(F, torch.ones_like(F))
    assert printed[0].isnan()
    assert printed[1].isfinite()


def test_weights_with_a_nan_are_refused_and_not_passed_on() -> None:
    weights = torch.tensor([[0.5, 0.5], [torch.nan, 1.0]])
    with pytest.raises(ValueError, match="sum to 1"):
        gradient.entmax_jacobian_norm(weights)


@pytest.mark.parametrize("keys", [1, 3, 16, 17, 40])
def test_the_norm_of_any_map_is_exact_for_few_keys_and_a_lower_bound_for_more(keys: int) -> None:
    z = torch.randn(5, keys, dtype=torch.float64)
    exact = gradient.entmax_jacobian_norm(torch.softmax(z, -1))
    found = jacobian_norm(lambda z: torch.softmax(z, -1), z)
    assert torch.allclose(found, exact, atol=1e-12) if keys <= 16 else (found <= exact * (1 + 1e-12)).all()
    assert (found > 0.3 * exact - 1e-12).all()
    assert jacobian_norm(lambda z: torch.ones_like(z), z).tolist() == [0.0] * 5


def test_the_local_bound_of_a_row_that_sees_nothing_is_zero() -> None:
    weights = torch.tensor([[0.0, 0.0], [0.5, 0.5]], dtype=torch.float64)
    visible = torch.tensor([[False, False], [True, True]])
    assert gradient.corollary3_local(weights, mask=visible).tolist() == [0.0, 0.5]
