"""Adaptive temperature: where the printed polynomial acts, its monotone extension, and fitting one's own."""

import math
from itertools import pairwise

import pytest
import torch
from scipy.optimize import brentq
from torch import Tensor

from attnorm.normalizers import get
from attnorm.normalizers.adaptive_temperature import PRINTED, EntropyRule, _turning_points, fit, softmax_entropy
from attnorm.normalizers.block import Block


def betas(entropies: Tensor, **options: object) -> Tensor:
    return EntropyRule(**options).beta(entropies)


def test_the_printed_polynomial_acts_between_0_849_and_5_945_nats() -> None:
    h = torch.linspace(0, 8, 8001, dtype=torch.float64)
    beta = betas(h)
    acting = h[beta > 1]
    assert acting.min().item() == pytest.approx(0.849, abs=2e-3)
    assert acting.max().item() == pytest.approx(5.945, abs=2e-3)
    assert beta.max().item() == pytest.approx(2.42, abs=5e-3)
    assert h[beta.argmax()].item() == pytest.approx(4.41, abs=5e-3)
    assert beta.min() == 1


@pytest.mark.parametrize("n", [2, 400, 1024])
def test_rows_outside_that_range_are_softmax(n: int) -> None:
    """Uniform over 400 keys is 5.99 nats: a row that needs sharpening most is left alone."""
    z = torch.full((1, n), 0.0, dtype=torch.float64)
    z[0, 0] = 0.01 if n > 2 else 3.0
    torch.testing.assert_close(get("adaptive_temperature")(z), torch.softmax(z, -1))


def test_rows_inside_it_are_sharpened() -> None:
    z = torch.randn(10, 100, dtype=torch.float64)
    assert (get("adaptive_temperature")(z).amax(-1) > torch.softmax(z, -1).amax(-1)).all()


@pytest.mark.parametrize("coefficients", [PRINTED, (-1.0, 5.0), (1.0, -6.0, 11.0, -3.0), (2.0,)])
def test_the_monotone_extension_never_falls_and_never_lies_below_the_polynomial(
    coefficients: tuple[float, ...],
) -> None:
    h = torch.linspace(0, 12, 4001, dtype=torch.float64)
    monotone, plain = betas(h, coefficients=coefficients, monotone=True), betas(h, coefficients=coefficients)
    assert (monotone.diff() >= -1e-12).all()
    assert (monotone >= plain - 1e-12).all()


@pytest.mark.parametrize("monotone", [False, True])
@pytest.mark.parametrize("coefficients", [PRINTED, (1.0, -6.0, 11.0, -3.0), (2.0,)])
def test_the_slope_is_the_derivative_of_beta(coefficients: tuple[float, ...], monotone: bool) -> None:
    h = torch.linspace(0, 8, 2001, dtype=torch.float64, requires_grad=True)
    rule = EntropyRule(coefficients, monotone=monotone)
    (expected,) = torch.autograd.grad((rule.beta(h) + 0 * h).sum(), h)
    torch.testing.assert_close(rule.slope(h.detach()), expected)


def test_the_monotone_extension_sharpens_rows_the_printed_polynomial_gives_up_on() -> None:
    z = torch.randn(1, 4096, dtype=torch.float64) / 4
    printed, monotone = get("adaptive_temperature")(z), get("adaptive_temperature", monotone=True)(z)
    highest = betas(torch.linspace(4, 5, 100_001, dtype=torch.float64)).max()
    assert torch.equal(printed, torch.softmax(z, -1))
    torch.testing.assert_close(monotone, torch.softmax(highest * z, -1), rtol=1e-6, atol=0)


def test_entropy_counts_visible_keys_only() -> None:
    z = torch.zeros(3, 10, dtype=torch.float64)
    mask = torch.arange(10)[None] < torch.tensor([[0], [1], [4]])
    found = softmax_entropy(Block.of(z, mask))[:, 0]
    torch.testing.assert_close(found, torch.tensor([0.0, 0.0, math.log(4)], dtype=torch.float64))


def row_that_needs(polynomial: list[float], n: int, keep: float) -> Tensor | None:
    """A row of one key ahead of n - 1 equal ones that needs exactly beta = polynomial(H) to keep that weight."""

    def entropy(gap: float) -> float:
        weight = 1 / (1 + (n - 1) * math.exp(-gap))
        return -weight * math.log(weight) - (1 - weight) * math.log((1 - weight) / (n - 1))

    needed = math.log((n - 1) * keep / (1 - keep))  # beta * gap

    def surplus(gap: float) -> float:
        return sum(c * entropy(gap) ** p for p, c in enumerate(reversed(polynomial))) * gap - needed

    grid = [0.02 * i for i in range(1, 1000)]
    for low, high in pairwise(grid):
        if surplus(low) * surplus(high) < 0:
            gap = brentq(surplus, low, high, xtol=1e-14)
            return torch.tensor([gap] + [0.0] * 199).where(torch.arange(200) < n, 0.0).double()
    return None


def test_fit_recovers_a_known_polynomial() -> None:
    truth = [0.15, 0.2, 1.1]
    found = {n: row_that_needs(truth, n, keep=0.8) for n in range(3, 200, 4)}
    usable = {n: row for n, row in found.items() if row is not None}
    assert len(usable) > 20
    mask = torch.arange(200) < torch.tensor(list(usable))[:, None]
    logits = torch.stack(list(usable.values()))
    assert fit(logits, mask=mask, keep=0.8, degree=2) == pytest.approx(truth, abs=1e-6)
    # Told which key is the target, it finds the same; the rest of the options pass straight to the normalizer.
    targets = torch.zeros(len(logits), dtype=torch.long)
    coefficients = fit(logits, targets, mask, keep=0.8, degree=2)
    weights = get("adaptive_temperature", coefficients=coefficients)(logits, mask)
    torch.testing.assert_close(weights[:, 0], torch.full((len(logits),), 0.8, dtype=torch.float64), atol=1e-5, rtol=0)


def test_fit_leaves_out_rows_whose_target_cannot_win() -> None:
    logits = torch.randn(200, 30, dtype=torch.float64) * torch.rand(200, 1, dtype=torch.float64) * 6
    clean = fit(logits)
    hopeless = torch.zeros(50, 30, dtype=torch.float64)  # tied
    by_a_hair = torch.zeros(50, 30, dtype=torch.float64)
    by_a_hair[:, 0] = 1e-12
    assert fit(torch.cat([logits, hopeless, by_a_hair])) == pytest.approx(clean)


def test_fit_refuses_what_it_cannot_use() -> None:
    for keep in (0.0, 1.0, 1.5):
        with pytest.raises(ValueError, match=f"keep .*{keep}"):
            fit(torch.randn(50, 5), keep=keep)
    with pytest.raises(ValueError, match=r"4.*got 4"):
        fit(torch.randn(4, 5, dtype=torch.float64) * 3)


def test_a_fit_has_degree_four_by_default_and_needs_one_row_more() -> None:
    assert len(fit(torch.randn(5, 5, dtype=torch.float64) * 3)) == 5


@pytest.mark.parametrize(
    ("coefficients", "points"),
    [
        ((1.0, -3.0, 2.0), [1.5]),
        ((0.0, 1.0, -3.0, 2.0), [1.5]),
        ((0.0, 0.0, 1.0, -3.0, 2.0), [1.5]),
        ((1.0, 0.0, -3.0, 5.0), [-1.0, 1.0]),
        ((1.0, 0.0, 3.0, 5.0), []),
        ((2.0, 1.0), []),
        ((3.0,), []),
        ((0.0, 0.0), []),
        ((0.25, -2.0, 5.5, -6.0, 1.0), [1.0, 2.0, 3.0]),
    ],
)
def test_where_a_polynomial_turns(coefficients: tuple[float, ...], points: list[float]) -> None:
    assert _turning_points(coefficients) == pytest.approx(points)


def test_the_monotone_extension_is_found_on_the_cpu_whatever_the_default_device() -> None:
    with torch.device("meta"):
        get("adaptive_temperature:monotone=true")
