"""Output, gradients and statistics from one pass, and statistics of other maps, on a GPU against float64."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import attnorm
from attnorm.metrics import fused_rows
from tests.cuda.on_device import DEVICE, NEEDS_DEVICE
from tests.metrics.naive_softmax import KINDS, assert_at_most_twice_the_naive_error, drawn
from tests.metrics.test_fused_maps import MAPS, assert_close_to_float64, call_of, make

pytestmark = NEEDS_DEVICE

# Relative errors of the Jacobian norm: that of the inputs, see EXTRA_PASSES in metrics/fused_rows.py.
NORM_ERROR = {torch.bfloat16: 5e-3, torch.float16: 6e-4, torch.float32: 1e-4}


@pytest.fixture(autouse=True)
def any_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_rows, "MIN_KERNEL_ROWS", 1)


@pytest.mark.parametrize("dtype", NORM_ERROR, ids=str)
@pytest.mark.parametrize("width", [64, 80, 128, 256])
@pytest.mark.parametrize("length", [63, 100, 2000])
@pytest.mark.parametrize("kind", KINDS)
def test_at_most_twice_the_error_of_the_plain_formula(kind: str, length: int, width: int, dtype: torch.dtype) -> None:
    q, k, v, visible = drawn(kind, length, dtype, width=width, device=DEVICE)
    unmasked = kind not in ("padded", "rows that see nothing")
    options = {"causal": unmasked, "mask": None if unmasked else visible}
    output, found = attnorm.attention(q, k, v, return_statistics=True, **options)
    norm = found.jacobian_norm
    exact = attnorm.attention_statistics(q.double(), k.double(), **options).jacobian_norm
    if kind != "huge":  # there the rounding of logits in float32 dominates, which the plain formula has too
        torch.testing.assert_close(norm.double(), exact, rtol=NORM_ERROR[dtype], atol=1e-6, equal_nan=True)
    found = found._replace(jacobian_norm=exact)
    assert_at_most_twice_the_naive_error((output, found), q, k, v, visible)


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("name", ["softmax", "ssmax", "sink", "sigmoid", "softpick", "entmax15", "kneemax"])
def test_the_numbers_of_two_passes(name: str, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 1500, width, generator=generator) for heads in (6, 3, 3))
    q, k, v = (t.to(DEVICE, torch.bfloat16) for t in (2 * q, k, v))
    normalizer = attnorm.get(name).to(DEVICE).requires_grad_(False)
    output, found = attnorm.attention(q, k, v, normalizer, causal=True, return_statistics=True)
    torch.testing.assert_close(output, attnorm.attention(q, k, v, normalizer, causal=True), rtol=2e-2, atol=1e-2)
    two = attnorm.attention_statistics(q, k, normalizer, causal=True)
    torch.testing.assert_close(found, two, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("dtype", NORM_ERROR, ids=str)
@pytest.mark.parametrize("width", [64, 128, 192])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["softmax", "ssmax", "sink", "sigmoid", "relu", "softpick", "entmax15", "asentmax"])
def test_output_gradients_and_statistics(name: str, masked: bool, width: int, dtype: torch.dtype) -> None:
    """Errors of output and gradients relative to float64: at most twice those of plain attention, or a rounding."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, heads, 700, width, generator=generator).to(DEVICE, dtype) for heads in (4, 2, 2)]
    grad = torch.randn(2, 4, 700, width, generator=generator).to(DEVICE, dtype)
    mask = (torch.arange(700, device=DEVICE) >= torch.tensor([0, 90], device=DEVICE)[:, None])[:, None, None]
    options = {"causal": True, "mask": mask if masked else None}

    def results(like: torch.dtype, **more: Any) -> list[Tensor]:
        normalizer = attnorm.get(name).to(DEVICE, torch.float64 if like == torch.float64 else torch.float32)
        inputs = [t.to(like).requires_grad_() for t in tensors]
        output = attnorm.attention(*inputs, normalizer, **options, **more)
        if more.get("return_statistics"):
            two = attnorm.attention_statistics(*inputs[:2], normalizer, **options)
            torch.testing.assert_close(output[1], two, rtol=1e-4, atol=1e-4, equal_nan=True)
            output = output[0]
        return [output, *torch.autograd.grad(output, [*inputs, *normalizer.parameters()], grad.to(like))]

    exact = results(torch.float64, engine="blocked")
    for found, plain, expected in zip(results(dtype, return_statistics=True), results(dtype), exact, strict=True):
        error, usual = ((t.double() - expected).norm() / expected.norm() for t in (found, plain))
        assert error <= 2 * usual + torch.finfo(dtype).eps


@pytest.mark.parametrize("backend", [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
@pytest.mark.parametrize("heads", [2, 4])
def test_gradients_of_softmax_by_each_kernel_of_torch(backend: SDPBackend, heads: int) -> None:
    """Where torch enables neither cuDNN nor FlashAttention, ours computes them."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(2, one, 500, 64, generator=generator) for one in (4, heads, heads)]
    q, k, v = (t.to(DEVICE, torch.bfloat16).transpose(1, 2).contiguous().transpose(1, 2) for t in tensors)
    grad = torch.randn(q.shape, generator=generator).to(q)
    for causal in (True, False):
        inputs = [t.detach().requires_grad_() for t in (q, k, v)]
        with sdpa_kernel(backend):
            output, _ = attnorm.attention(*inputs, causal=causal, return_statistics=True)
            found = torch.autograd.grad(output, inputs, grad)
        exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
        expected = torch.autograd.grad(attnorm.attention(*exact, causal=causal), exact, grad.double())
        for got, one in zip(found, expected, strict=True):
            assert (got.double() - one).norm() <= 1e-2 * one.norm()


def test_every_candidate_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (torch.randn(1, 4, 700, 128, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
    expected = attnorm.attention(q, k, v, causal=True, return_statistics=True)
    for tile in ((64, 64, 4, 2), (128, 64, 8, 3)):
        monkeypatch.setitem(fused_rows.OUTPUT_TILES, (2, 128), tile)
        found = attnorm.attention(q, k, v, causal=True, return_statistics=True)
        torch.testing.assert_close(found[0], expected[0], rtol=2e-2, atol=1e-2)
        torch.testing.assert_close(found[1], expected[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["random", "peaked", "nearly equal", "huge", "padded"])
@pytest.mark.parametrize("name", MAPS)
def test_every_row_of_2000_keys_of_every_map(name: str, kind: str) -> None:
    assert_close_to_float64(call_of(kind, 2000), make(name), exact_logits=kind == "huge")


@pytest.mark.parametrize("dtype", NORM_ERROR, ids=str)
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("kind", ["causal", "window", "padded", "softcap", "rows that see nothing"])
def test_the_norm_of_softpick_is_that_of_the_cpu_in_every_row(kind: str, width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 700, width, generator=generator).to(dtype) for heads in (6, 3))
    order = torch.arange(700)
    distance = order[:, None] - order
    masks = {
        "window": (distance >= 0) & (distance < 90),
        "padded": (order >= torch.tensor([0, 250])[:, None])[:, None, None],
        "rows that see nothing": (distance > 40) | (distance == 3),
    }
    mask = masks.get(kind)
    options: dict[str, Any] = {"causal": kind in ("causal", "padded"), "softcap": 5.0 if kind == "softcap" else None}
    exact = attnorm.attention_statistics(2 * q.double(), k.double(), "softpick", mask=mask, **options)
    given = None if mask is None else mask.to(DEVICE)
    found = attnorm.attention_statistics(2 * q.to(DEVICE), k.to(DEVICE), "softpick", mask=given, **options)
    assert torch.equal(found.jacobian_norm.isnan().cpu(), exact.n == 0)
    torch.testing.assert_close(
        found.jacobian_norm.cpu().double(), exact.jacobian_norm, rtol=NORM_ERROR[dtype], atol=1e-6, equal_nan=True
    )


@pytest.mark.parametrize("dtype", NORM_ERROR, ids=str)
@pytest.mark.parametrize("keys", [40, 700])
@pytest.mark.parametrize("name", ["softmax", "entmax15", "sparsemax", "kneemax", "sigmoid", "relu", "softpick"])
def test_a_window_given_as_a_mask(name: str, keys: int, dtype: torch.dtype) -> None:
    """Rows of such a mask are not aligned, which changes how the compiler spreads tiles over threads."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, keys, 16, generator=generator).to(dtype) for heads in (4, 2))
    distance = torch.arange(keys)[:, None] - torch.arange(keys)
    window = (distance >= 0) & (distance < 5)
    exact = attnorm.attention_statistics(q.double(), k.double(), name, mask=window)
    found = attnorm.attention_statistics(q.to(DEVICE), k.to(DEVICE), name, mask=window.to(DEVICE))
    error = NORM_ERROR[dtype]
    for field in ("entropy", "sink_mass", "max_weight", "row_sum", "jacobian_norm"):
        torch.testing.assert_close(
            getattr(found, field).cpu().double(),
            getattr(exact, field),
            rtol=error,
            atol=error,
            equal_nan=True,
            msg=field,
        )
