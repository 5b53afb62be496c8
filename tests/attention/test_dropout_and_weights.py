"""dropout_p drops weights as torch does; return_weights=True returns the weights that made the output."""

from importlib import import_module

import pytest
import torch
from torch import Tensor

import attnorm
from attnorm.engines import blocked as blocked_engine
from tests.attention.calls import Call

NAMES = ["softmax", "ssmax", "sink", "entmax15", "topk", "sigmoid"]


def tensors(queries: int = 7, keys: int = 7) -> list[Tensor]:
    return Call(queries=queries, keys=keys, key_heads=2).tensors()[:3]


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_that_made_the_output(name: str) -> None:
    q, k, v = tensors()
    output, weights = attnorm.attention(q, k, v, name, causal=True, return_weights=True)
    assert weights.shape == (2, 4, 7, 7)
    assert torch.equal(weights @ v.repeat_interleave(2, 1), output)
    logits = q @ k.repeat_interleave(2, 1).transpose(-1, -2) / 2
    expected = attnorm.normalize(logits, name, torch.ones(7, 7, dtype=torch.bool).tril())
    torch.testing.assert_close(weights, expected, atol=1e-13, rtol=0)
    torch.testing.assert_close(output, attnorm.attention(q, k, v, name, causal=True), atol=1e-12, rtol=0)


def test_weights_of_half_precision_come_in_float32_and_without_missing_dimensions() -> None:
    q, k, v = (t[0, 0].bfloat16() for t in tensors(5, 9))
    output, weights = attnorm.attention(q, k, v, "softmax1", return_weights=True)
    assert output.shape == (5, 4)
    assert weights.shape == (5, 9)
    assert weights.dtype == torch.float32
    assert (weights.sum(-1) < 1).all(), "the share of the sink is dropped"


def test_weights_after_dropout_made_the_output() -> None:
    q, k, v = tensors()
    output, weights = attnorm.attention(q, k, v, dropout_p=0.5, return_weights=True)
    assert torch.equal(weights @ v.repeat_interleave(2, 1), output)
    assert (weights == 0).any()


def test_weights_that_are_too_large_are_an_error_with_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_module("attnorm.attention"), "MAX_WEIGHT_BYTES", 2 * 4 * 7 * 7 * 8 - 1)
    with pytest.raises(ValueError, match=r"3,135.*3,136.*\(2, 4, 7, 7\)"):
        attnorm.attention(*tensors(), return_weights=True)
    with pytest.raises(ValueError, match="'linear'"):
        attnorm.attention(*tensors(), "linear", return_weights=True)


@pytest.mark.parametrize("engine", ["fused", "blocked", "many blocks"])
@pytest.mark.parametrize("name", ["softmax", "ssmax", "sink"])
def test_dropout_follows_torchs_seed_and_has_the_mean_of_no_dropout(
    name: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if engine == "many blocks":
        monkeypatch.setattr(blocked_engine, "BLOCK_ELEMENTS", 1)
        engine = "blocked"
    p, draws, keys = 0.3, 4000, 5
    q, k = torch.randn(1, 1, 3, 4), torch.randn(1, 1, keys, 4)
    normalizer = attnorm.get(name)

    def weights(seed: int, count: int = draws, dropout_p: float = p) -> Tensor:
        """With the unit vectors as values the output is the weights."""
        torch.manual_seed(seed)
        q_, k_ = (t.expand(count, -1, -1, -1) for t in (q, k))
        values = torch.eye(keys).expand(count, 1, keys, keys)
        return attnorm.attention(q_, k_, values, normalizer, dropout_p=dropout_p, engine=engine)  # type: ignore[arg-type]

    with torch.no_grad():
        dropped, kept = weights(0), weights(0, 1, 0.0)
        assert torch.equal(dropped, weights(0))
        assert not torch.equal(dropped, weights(1))
        zero = dropped == 0
        torch.testing.assert_close(dropped[~zero], (kept / (1 - p)).expand_as(dropped)[~zero])
        deviation = (p * (1 - p) / draws) ** 0.5
        assert (zero.double().mean(0) - p).abs().max() < 5 * deviation
        together = zero.double().flatten(1)  # drawn independently for every weight
        correlation = torch.corrcoef(together.T) - torch.eye(together.shape[1])
        assert correlation.abs().max() < 5 / draws**0.5


def test_backward_sees_the_weights_that_forward_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked_engine, "BLOCK_ELEMENTS", 1)
    q, k, _ = tensors()
    values = torch.eye(7, dtype=torch.float64).expand(2, 2, 7, 7).clone().requires_grad_()
    output = attnorm.attention(q, k, values, "entmax15", dropout_p=0.4)
    (grad,) = torch.autograd.grad(output[..., 0].sum(), values)
    torch.testing.assert_close(grad[..., 0], output.sum(2).unflatten(1, (2, 2)).sum(2))
