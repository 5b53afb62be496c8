"""Numbers that break careless formulas: tiny, huge, tied, alone, and far below zero."""

import pytest
import torch

from attnorm.normalizers import get
from attnorm.normalizers.declaration import HEADS
from tests.normalizers.variants import TYPICAL, Variant

HOSTILE = {
    "all zero": [0.0] * 9,
    "all equal": [3.0] * 9,
    "all at -1e4": [-1e4] * 9,
    "all at -120": [-120.0] * 9,
    "all at 100": [100.0] * 9,
    "one far ahead": [0.0] * 8 + [1e4],
    "one far behind": [0.0] * 8 + [-1e4],
    "denormal": [1e-310, -1e-310, 5e-324, 0.0, 1e-308, -1e-308, 1e-300, 0.0, 2e-310],
    "huge spread": [-1e30, 1e30, 0.0, 1.0, -1.0, 1e15, -1e15, 5.0, 5.0],
    "alternating ties": [1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 1.0],
}
# Powers of 1e30 are no longer finite numbers in float32.
POWERS = (
    "relu,power=2.0", "kernel,function=polynomial", "kernel,function=polynomial,power=4", "threshold_relu",
    "threshold_relu,beta=0.5,power=3.0,width=16", "odd_polynomial", "odd_polynomial,power=5",
)  # fmt: skip
CASES = [
    (v, name)
    for name in HOSTILE
    for v in TYPICAL
    if v.width is None and (name, str(v)) not in {("huge spread", power) for power in POWERS}
]


@pytest.mark.parametrize(("variant", "name"), CASES, ids=lambda x: str(x))
def test_hostile_rows_give_finite_weights_and_gradients(variant: Variant, name: str) -> None:
    for dtype in (torch.float64, torch.float32):
        normalizer = variant.make().to(dtype)
        logits = torch.tensor(HOSTILE[name], dtype=dtype).expand(1, HEADS, 3, 9).clone().requires_grad_()
        weights = normalizer(logits)
        weights.sum().backward()
        gradients = [logits.grad, *(p.grad for p in normalizer.parameters() if p.grad is not None)]
        assert weights.isfinite().all()
        assert all(g.isfinite().all() for g in gradients)
        if normalizer.properties.row_sum == "one":
            torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights.sum(-1)))


def test_softpick_keeps_the_digits_of_small_logits() -> None:
    """e^z - 1 written as a difference has none left at 1e-7; freshly initialized attention starts near there."""
    for spread in (1e-2, 1e-4, 1e-6):
        z = spread * torch.randn(4, 50)
        error = (get("softpick")(z).double() - get("softpick")(z.double())).abs().max()
        assert error < 1e-7


def test_softpick_survives_rows_far_below_zero() -> None:
    z = torch.full((1, 5), -1e4, requires_grad=True)
    weights = get("softpick")(z)
    weights.sum().backward()
    assert torch.equal(weights, torch.zeros(1, 5))
    assert torch.equal(z.grad, torch.zeros(1, 5))


def test_stick_breaking_keeps_its_digits_beside_a_large_logit() -> None:
    """A running sum that includes the key itself, subtracted again, leaves the rounding of the largest term."""
    z = torch.randn(4, 40)
    z[:, 38] = 1000.0
    error = (get("stick_breaking")(z).double() - get("stick_breaking")(z.double())).abs().max()
    assert error < 1e-6
    assert get("stick_breaking")(z)[:, :38].abs().max() == 0


def test_log_softplus_is_exact_on_both_sides_of_its_switch() -> None:
    z = torch.tensor([[-15.1, -15.0, -14.9, -30.0]], dtype=torch.float64)
    exact = torch.log1p(torch.exp(z))
    torch.testing.assert_close(get("kernel")(z), exact / exact.sum(), rtol=1e-13, atol=0)


def test_sa_softmax_takes_its_range_from_visible_keys_only() -> None:
    """-inf masks make it NaN elsewhere, finfo.min ruins the row's minimum."""
    z = torch.tensor([[1.0, -2.0, 3.0, torch.finfo(torch.float32).min, -torch.inf]])
    mask = torch.tensor([[True, True, True, False, False]])
    weights = get("sa_softmax")(z, mask)
    torch.testing.assert_close(weights[:, :3], get("sa_softmax")(z[:, :3]))
    assert torch.equal(weights[:, 3:], torch.zeros(1, 2))


def test_maps_that_count_keys_do_not_count_hidden_ones() -> None:
    """With finfo.min for hidden keys, softpick's denominator gains 1 for each, and relu and sigmoid miscount n."""
    z = torch.randn(1, 12, dtype=torch.float64)
    mask = torch.arange(12)[None] < 5
    for name in ("softpick", "relu", "sigmoid"):
        torch.testing.assert_close(get(name)(z, mask)[:, :5], get(name)(z[:, :5]))


def test_parameters_in_bfloat16_are_computed_with_in_float32() -> None:
    """Casting a model to bfloat16 rounds its parameters once; what follows from them is not rounded again."""
    z = 3 * torch.randn(2, HEADS, 6, 50)
    for variant in (v for v in TYPICAL if v.options.get("heads") == HEADS and v.width is None):
        low = variant.make().bfloat16()
        exact = variant.make().bfloat16().double()
        error = (low(z).double() - exact(z.double())).abs().max()
        assert error < 3e-6, variant
