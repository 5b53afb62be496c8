"""Masses of the heaviest keys beside a kernel's sums, against weights row by row."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from attnorm.metrics import call as call_module
from attnorm.metrics.call import AttentionCall, logit_blocks
from attnorm.metrics.row_statistics import LISTED, largest_numbers
from attnorm.metrics.rows import _top_masses


@pytest.mark.parametrize("top_n", [(1, 3), (2,), (40, 1)])
def test_masses_are_sums_of_the_largest_weights_and_other_rows_are_nan(top_n: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 18, 4, generator=generator) for heads in (4, 2, 2))
    call = AttentionCall(0, "decoder", query, key, value, scale=0.7, causal=True, mask=torch.ones(18, 18).tril().bool())
    rows = torch.tensor([2, 5, 11, 16, 17])
    some = torch.tensor([1, 3, 4])
    logits = (query @ key.repeat_interleave(2, 1).mT * 0.7)[:, :, rows]
    visible = torch.ones(18, 18).tril().bool()[rows]
    factor = torch.rand(2, 4, len(rows), 1, generator=generator) + 0.5
    tops, expected = [], []
    for by in (None, factor):
        z = (logits if by is None else logits * by).masked_fill(~visible, -torch.inf)
        weights = z.softmax(-1).sort(-1, descending=True).values
        tops.append((by, weights[..., 0]))
        expected.append(torch.stack([weights[..., :N].sum(-1) for N in top_n], -1))
    found = _top_masses(call, rows, some, tops, top_n)
    for one, exact in zip(found, expected, strict=True):
        assert one.shape == (2, 4, 5, len(top_n))
        assert one[:, :, [0, 2]].isnan().all()
        torch.testing.assert_close(one[:, :, some], exact[:, :, some], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("length", [4 * LISTED * 7, 4 * LISTED * 7 - LISTED, 600, 5])
def test_the_largest_numbers_are_those_of_topk(length: int) -> None:
    z = 2 * torch.randn(4, 3, length, generator=torch.Generator().manual_seed(length))
    z[1] = z[1].round()  # equal numbers
    z[2, :, 5:] = -1e30  # hidden keys
    z[3, :, ::50] = torch.inf
    z[3, 1, 3] = torch.nan
    found, expected = largest_numbers(z, 7), z.topk(min(7, length)).values
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_products_of_half_precision_are_added_up_in_float32_without_converting_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, heads, 40, 8, generator=generator).bfloat16() for heads in (4, 2))
    call = AttentionCall(0, "decoder", query, key, key, scale=0.3, causal=True, softcap=5.0)
    rows = torch.tensor([3, 20, 39])
    expected = [block.logits.clone() for block in logit_blocks(call, rows)]
    dtypes, bmm = [], torch.bmm

    def bmm_of_cuda(a: Tensor, b: Tensor, *, out: Tensor, out_dtype: Any) -> Tensor:
        dtypes.append((a.dtype, b.dtype, out_dtype))
        return bmm(a.float(), b.float(), out=out)

    monkeypatch.setattr(call_module, "_multiplies_halves", lambda query, key: True)
    monkeypatch.setattr(torch, "bmm", bmm_of_cuda)
    found = [block.logits.clone() for block in logit_blocks(call, rows)]
    assert set(dtypes) == {(torch.bfloat16, torch.bfloat16, torch.float32)}
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_only_what_torch_can_multiply_in_half_precision_is_not_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under autocast a model may have queries in float32 and keys in half precision."""
    multiplies = call_module._multiplies_halves
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with FakeTensorMode():
        full, half, other = (
            torch.empty(1, device="cuda", dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)
        )
        assert multiplies(half, half)
        assert multiplies(other, other)
        for query, key in ((full, half), (half, other), (full, full), (half.cpu(), half.cpu())):
            assert not multiplies(query, key)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(allow_fp16_accumulation=True))
        assert not multiplies(half, half)
        assert not multiplies(other, other)
