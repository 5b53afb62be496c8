"""Thresholds under torch.compile: a number of steps fixed in advance reaches the weights of the eager solver."""

import pytest
import torch

from attnorm.normalizers.registry import get


@pytest.mark.parametrize("keys", [2, 9, 255, 256, 700])
@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0])
def test_fixed_steps_reach_the_threshold(keys: int, spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    z = spread * torch.randn(3, 2, 4, keys, generator=torch.Generator().manual_seed(keys), dtype=torch.float64)
    mask = torch.rand(3, 2, 4, keys, generator=torch.Generator().manual_seed(1)) < 0.8
    mask[..., 0] = True
    for name, options in (("entmax", {"alpha": 1.3}), ("entmax", {"alpha": 1.75}), ("kneemax", {})):
        normalizer = get(name, **options).double()
        eager = normalizer(z, mask)
        with monkeypatch.context() as patched:
            patched.setattr(torch.compiler, "is_compiling", lambda: True)
            fixed = normalizer(z, mask)
        torch.testing.assert_close(fixed, eager, rtol=1e-9, atol=1e-12)
