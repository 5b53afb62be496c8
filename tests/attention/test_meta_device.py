"""Tensors without numbers: paths that only a GPU takes, and the shapes of outputs and gradients."""

from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from attnorm import attention
from attnorm.engines import fused
from attnorm.engines.inputs import validate_inputs
from attnorm.normalizers.registry import BUILT_IN, get

CALLS = [
    (torch.float32, None, True),
    (torch.float32, (1, 1, 5, 7), False),
    (torch.float32, (2, 3, 5, 7), False),
    (torch.float16, (2, 1, 1, 7), False),
    (torch.float16, None, True),
    (torch.bfloat16, None, False),
]


@pytest.mark.parametrize(("dtype", "mask", "causal"), CALLS, ids=str)
def test_attention_with_its_logsumexp(
    dtype: torch.dtype, mask: tuple[int, ...] | None, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k = (torch.empty(2, 3, n, 16, dtype=dtype, device="meta") for n in (5, 7))
    additive = None if mask is None else torch.empty(mask, dtype=dtype, device="meta")
    calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def operator(name: str, rows: int) -> Any:
        def run(*arguments: Any, **options: Any) -> tuple[torch.Tensor, ...]:
            calls.append((name, arguments, options))
            query, _, value = arguments[:3]
            log_sum = torch.empty(*query.shape[:2], rows, device="meta")
            return torch.empty(*query.shape[:3], value.shape[-1], device="meta"), log_sum, log_sum

        return run

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_flash_attention", operator("flash", 5), raising=False)
    monkeypatch.setattr(
        torch.ops.aten, "_scaled_dot_product_efficient_attention", operator("efficient", 32), raising=False
    )
    out, log_sum = fused.attention_and_logsumexp(q, k, k, additive, causal, 0.25)
    assert out.shape == (2, 3, 5, 16)
    assert log_sum.shape == (2, 3, 5)
    ((name, arguments, options),) = calls
    half = dtype in (torch.float16, torch.bfloat16)
    assert name == ("flash" if half and mask is None else "efficient")
    assert options == {"scale": 0.25}
    if name == "flash":
        assert arguments[3:] == (0.0, causal)
    else:
        bias = arguments[3]
        assert arguments[4:] == (True, 0.0, causal)
        assert (bias is None) == (mask is None)
        if bias is not None:
            assert bias.shape == (2, 3, 5, 7)
            assert bias.stride(-2) % 16 == 0


@pytest.mark.parametrize(
    ("width", "values", "padded"), [(16, 16, 16), (5, 9, 16), (8, 17, 24), (9, 5, 16), (24, 8, 24)]
)
def test_widths_on_cuda_are_padded_to_a_multiple_of_8(
    width: int, values: int, padded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, ...]] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
        seen.append((q.shape[-1], k.shape[-1], v.shape[-1]))
        return torch.empty(*q.shape[:-1], v.shape[-1], device="cpu")

    monkeypatch.setattr(fused, "scaled_dot_product_attention", attend)
    for device, expected in (("cuda", padded), ("cpu", max(width, values))):
        with FakeTensorMode(allow_non_fake_inputs=True):
            shapes = ((2, 4, 3, width), (2, 2, 7, width), (2, 2, 7, values))
            q, k, v = (torch.empty(shape, device=device) for shape in shapes)
            inputs = validate_inputs(q, k, v, mask=None, causal=False, scale=None, positions=None)
            output = fused._sdpa(inputs, None)
        assert seen.pop() == (expected, expected, expected)
        assert output.shape == (2, 4, 3, values)


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name not in ("differential", "differential_v2", "tda")])
@pytest.mark.parametrize("length", [7, 300])  # threshold maps put the keys of long rows in groups
def test_every_normalizer_has_an_output_and_a_gradient_without_numbers(name: str, length: int) -> None:
    normalizer = get(name, **({"learned": 4} if name == "soft" else {})).to("meta")
    q, k, v = (torch.empty(2, heads, length, 4, device="meta", requires_grad=True) for heads in (6, 3, 3))
    mask = torch.empty(2, 1, 1, length, dtype=torch.bool, device="meta")
    output = attention(q, k, v, normalizer, mask=mask, causal=True)
    assert (output.shape, output.device.type) == (q.shape, "meta")
    for tensor, gradient in zip((q, k, v), torch.autograd.grad(output.sum(), (q, k, v)), strict=True):
        assert (gradient.shape, gradient.device.type) == (tensor.shape, "meta")


@pytest.mark.parametrize("name", ["entmax15", "kneemax"])
@pytest.mark.parametrize("length", [7, 300])
def test_threshold_maps_take_fake_tensors_as_meta_tensors(name: str, length: int) -> None:
    with FakeTensorMode():
        q = torch.empty(2, 3, length, 4, requires_grad=True)
        output = attention(q, q, q, name, causal=True)
        (gradient,) = torch.autograd.grad(output.sum(), q)
    assert output.shape == gradient.shape == q.shape
