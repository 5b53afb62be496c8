"""Kneemax in float32: at most twice the error of the plain formula in the same dtype, and exact zeros stay exact."""

import pytest
import torch
from torch import Tensor

from attnorm.normalizers.kneemax import kneemax_rows

ROWS = 200


def plain(z: Tensor, knee: Tensor) -> Tensor:
    """By bisection on the threshold, all in the dtype of z."""
    z = (z - z.amax(-1, keepdim=True)) / 2

    def weights(tau: Tensor) -> Tensor:
        t = (z - tau).clamp(min=0)
        return torch.where(t <= 2 * knee, t**2 / (4 * knee), t - knee)

    low = (-1 - knee - 2 * knee.sqrt()).expand(len(z), 1).clone()
    high = torch.zeros_like(low)
    for _ in range(70):
        middle = (low + high) / 2
        above = weights(middle).sum(-1, keepdim=True) >= 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return weights(low)


@pytest.mark.parametrize("spread", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("keys", [11, 257, 1000])
def test_float32_errs_at_most_twice_as_much_as_the_plain_formula(keys: int, spread: float) -> None:
    z = spread * torch.randn(ROWS, keys, generator=torch.Generator().manual_seed(keys))
    knee = torch.full((ROWS, 1), 1 / keys)
    exact = plain(z.double(), knee.double())
    error = (kneemax_rows(z, knee).double() - exact).abs().max()
    assert error <= 2 * (plain(z, knee).double() - exact).abs().max()
    torch.testing.assert_close(kneemax_rows(z.double(), knee.double()), exact, atol=1e-15, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_keys_clearly_below_the_threshold_have_weight_zero(dtype: torch.dtype) -> None:
    z = torch.randn(ROWS, 300, generator=torch.Generator().manual_seed(0), dtype=dtype)
    knee = torch.full((ROWS, 1), 1 / 300, dtype=dtype)
    weights = kneemax_rows(z, knee)
    out = z < torch.where(weights > 0, z, torch.inf).amin(-1, keepdim=True)
    assert (weights[out] == 0).all()
    assert (out.sum(-1) > 100).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(ROWS, dtype=dtype))


def test_rows_that_are_all_equal_or_hold_a_nan() -> None:
    z = torch.zeros(2, 40)
    z[1, 3] = torch.nan
    weights = kneemax_rows(z, torch.full((2, 1), 1 / 40))
    torch.testing.assert_close(weights[0], torch.full((40,), 1 / 40))
    assert weights[1].isnan().all()
