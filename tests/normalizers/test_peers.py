"""Normalizers against other people's implementations, where those are installed."""

import pytest
import torch

from attnorm.normalizers import get


def test_softcap_equals_x_transformers() -> None:
    peer = pytest.importorskip("x_transformers.attend", reason="x-transformers is not installed")
    attend = peer.Attend(causal=True, softclamp_logits=True, logit_softclamp_value=2.0)
    q, k, v = torch.randn(3, 2, 4, 9, 8, dtype=torch.float64).unbind()
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    weights = get("softcap", cap=2.0)(3 * q @ k.transpose(-1, -2) / 8**0.5, causal)
    torch.testing.assert_close(weights @ v, attend(3 * q, k, v)[0], rtol=0, atol=1e-6)
