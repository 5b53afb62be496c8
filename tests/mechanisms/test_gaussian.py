"""SOFT's exact kernel: exp(-||q - k||^2 / (2 sqrt D)), summed or divided by its sum."""

import pytest
import torch
from torch import Tensor

import attnorm
from attnorm.mechanisms.soft import Gaussian
from tests.attention.calls import CALLS, Call, assert_all_close, outputs_and_gradients
from tests.attention.reference import HEADS, seen
from tests.mechanisms import reference


@pytest.mark.parametrize("name", [name for name in CALLS if "scale" not in name])
@pytest.mark.parametrize("normalised", [False, True], ids=["summed", "normalised"])
def test_outputs_and_gradients_equal_the_definition(
    name: str, normalised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = CALLS[name]
    monkeypatch.setattr("attnorm.engines.blocked.BLOCK_ELEMENTS", call.batch * HEADS * call.keys * 2)
    mechanism = Gaussian(normalised=normalised)

    def definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        visible = seen(q, k, call.options.get("mask"), call.options.get("causal", False))
        k, v = (t.repeat_interleave(HEADS // t.shape[1], dim=1) for t in (k, v))
        output = reference.gaussian(q, k, v, visible)
        total = reference.gaussian(q, k, torch.ones_like(v[..., :1]), visible)
        return output / torch.where(total > 0, total, 1.0) if normalised else output

    tensors = call.tensors()[:3]
    assert_all_close(
        outputs_and_gradients(lambda q, k, v: attnorm.attention(q, k, v, mechanism, **call.options), tensors),
        outputs_and_gradients(definition, tensors),
    )


def test_a_query_that_is_its_own_key_has_weight_one_there_and_a_finite_gradient() -> None:
    x = torch.randn(1, 1, 6, 4, dtype=torch.float64, requires_grad=True)
    weights = attnorm.attention(x, x, torch.eye(6, dtype=torch.float64)[None, None], "gaussian")
    torch.testing.assert_close(weights[0, 0].diagonal(), torch.ones(6, dtype=torch.float64))
    assert weights.max() <= 1
    (gradient,) = torch.autograd.grad(weights.diagonal(dim1=-2, dim2=-1).sum(), x)
    torch.testing.assert_close(gradient, torch.zeros_like(x), atol=1e-12, rtol=0)


@pytest.mark.parametrize("offset", [0.0, 10.0, 1000.0])
def test_an_offset_of_all_points_costs_no_precision(offset: float) -> None:
    """Steps of 1/64 survive the offset exactly, so that only the kernel can lose digits."""
    q, k, v = ((64 * t).round() / 64 for t in Call(queries=31, keys=31, width=16).tensors(torch.float32)[:3])
    exact = reference.gaussian(q.double(), k.double(), v.double(), torch.ones(31, 31))
    assert (attnorm.attention(q + offset, k + offset, v, "gaussian") - exact).abs().max() < 2e-6


def test_an_offset_behind_left_padding_costs_no_precision() -> None:
    q, k, v = ((64 * t).round() / 64 for t in Call(queries=31, keys=31, width=16).tensors(torch.float32)[:3])
    mask = torch.arange(31) >= 5
    exact = reference.gaussian(q.double(), k.double(), v.double(), mask.expand(31, 31))
    assert (attnorm.attention(q + 1000, k + 1000, v, "gaussian", mask=mask) - exact).abs().max() < 2e-6


def test_the_scale_is_that_of_the_paper() -> None:
    q, k = torch.zeros(1, 9), torch.ones(1, 9)
    assert attnorm.attention(q, k, torch.ones(1, 1), "gaussian").item() == pytest.approx(2.718281828 ** (-9 / (2 * 3)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_errors_are_at_most_twice_those_of_the_plain_computation(dtype: torch.dtype) -> None:
    q, k, v, _ = Call(queries=61, keys=61, width=16).tensors(dtype)
    exact = reference.gaussian(q.double(), k.double(), v.double(), torch.ones(61, 61))
    plain = reference.gaussian(q, k, v, torch.ones(61, 61, dtype=torch.bool))
    ours = attnorm.attention(q, k, v, "gaussian")
    assert ours.dtype == dtype
    assert (ours - exact).abs().max() <= 2 * (plain - exact).abs().max()


def test_garbage_in_padding_reaches_nothing() -> None:
    q, k, v, _ = Call().tensors()
    mask = torch.tensor([False, True, True, True, False])
    expected = outputs_and_gradients(lambda *t: attnorm.attention(*t, "gaussian", mask=mask), [q, k, v])
    for t in (k, v):
        t[..., ~mask, :] = float("nan")
    actual = outputs_and_gradients(lambda *t: attnorm.attention(*t, "gaussian", mask=mask), [q, k, v])
    assert_all_close(actual, expected, atol=1e-12)
