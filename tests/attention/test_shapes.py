"""Inputs of any layout: fewer dimensions, other strides, nothing in the batch, and every dtype kept."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import attnorm
from tests.attention.calls import Call, calling, learned
from tests.attention.reference import HEADS, TYPICAL, Case, typical

one_headed = pytest.mark.parametrize(
    "case",
    [case for case in TYPICAL if not any(p.dim() for p in case.make().state_dict().values())],
    ids=lambda case: case.id,
)


@typical(0)
def test_three_dimensions_are_heads_length_and_width(case: Case) -> None:
    normalizer = case.make()
    q, k, v, hidden = Call(batch=1, key_heads=2, value_width=3).tensors()
    attend = calling(case, normalizer, {"causal": True, "mask": torch.rand(HEADS, 5, 5) < 0.7})
    torch.testing.assert_close(attend(q[0], k[0], v[0], hidden[0]), attend(q, k, v, hidden)[0], atol=1e-12, rtol=0)


@one_headed
def test_two_dimensions_are_length_and_width(case: Case) -> None:
    normalizer = case.make()
    q, k, v, _ = (t[:, :1] for t in Call(batch=1, keys=3, value_width=3).tensors())
    mask = torch.rand(5, 3) < 0.7
    actual = attnorm.attention(q[0, 0], k[0, 0], v[0, 0], normalizer, mask=mask)
    assert actual.shape == (5, 3)
    torch.testing.assert_close(actual, attnorm.attention(q, k, v, normalizer, mask=mask)[0, 0], atol=1e-12, rtol=0)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "length before heads": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "width before length": lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
    "every second number": lambda t: t.repeat_interleave(2, dim=-1)[..., ::2],
    "every second token": lambda t: t.repeat_interleave(2, dim=-2)[..., ::2, :],
    "one sequence for all": lambda t: t[:1].expand_as(t),
}


@typical(1)
@pytest.mark.parametrize("grad", [True, False], ids=["with gradients", "without"])
def test_strides_do_not_matter(case: Case, grad: bool) -> None:
    normalizer = case.make()
    call = Call(key_heads=2, queries=7, keys=7, options={"causal": True})
    attend = calling(case, normalizer, call.options)
    for layout in LAYOUTS.values():
        *tensors, hidden = call.tensors()
        strided = [layout(t) for t in tensors]
        with torch.set_grad_enabled(grad):
            actual, expected = attend(*strided, hidden), attend(*(t.contiguous() for t in strided), hidden)
        torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)


@typical(0)
@pytest.mark.parametrize(("batch", "queries"), [(0, 5), (2, 0)], ids=["no sequences", "no queries"])
def test_an_empty_call_gives_an_empty_output(case: Case, batch: int, queries: int) -> None:
    normalizer = case.make()
    for causal in (True, False):
        for mask in (None, torch.ones(batch, 1, 1, 5, dtype=torch.bool)):
            tensors = [t.requires_grad_() for t in Call(batch=batch, queries=queries, value_width=3).tensors()]
            output = calling(case, normalizer, {"causal": causal, "mask": mask})(*tensors)
            assert output.shape == (batch, HEADS, queries, 3)
            output.sum().backward()
            assert all(p.grad is None or p.grad.eq(0).all() for p in [*tensors, *learned(normalizer)])


@pytest.mark.parametrize("name", ["softmax", "sink", "adaptive_temperature"])
@pytest.mark.parametrize(("batch", "queries"), [(0, 5), (2, 0)])
def test_empty_calls_survive_without_gradients(name: str, batch: int, queries: int) -> None:
    q, k, v, _ = Call(batch=batch, queries=queries).tensors(torch.float32)
    with torch.no_grad():
        assert attnorm.attention(q, k, v, name, causal=True).shape == q.shape


@typical(1)
def test_the_output_has_the_dtype_of_the_input(case: Case) -> None:
    """The parameters stay float32, as they do in mixed-precision training."""
    normalizer = case.make().float()
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        tensors = Call(key_heads=2).tensors(dtype)
        assert calling(case, normalizer, {"causal": True})(*tensors).dtype == dtype


@pytest.mark.parametrize("length", [2, 3, 13, 31, 127, 257])
@pytest.mark.parametrize("name", ["softmax", "sink", "ssmax", "entmax15", "sigmoid", "adaptive_temperature"])
def test_prime_lengths_in_blocks_equal_one_block(name: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, _ = Call(batch=1, queries=length, keys=length).tensors()
    mask = torch.rand(length) < 0.8
    whole = attnorm.attention(q, k, v, name, mask=mask, causal=True)
    monkeypatch.setattr("attnorm.engines.blocked.BLOCK_ELEMENTS", HEADS * length * 11)
    monkeypatch.setattr("attnorm.engines.inputs.MASK_ELEMENTS", length * 11)
    torch.testing.assert_close(attnorm.attention(q, k, v, name, mask=mask, causal=True), whole, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", ["softmax", "ssmax", "sink", "entmax15"])
@pytest.mark.parametrize("shape", [(0, 5), (2, 1, 0, 5), (1, 5), (5,), (2, 1, 1, 5)], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_zero_queries_with_a_mask_give_an_empty_output(name: str, shape: tuple[int, ...], causal: bool) -> None:
    q, k, v = torch.randn(2, 2, 0, 4, requires_grad=True), torch.randn(2, 2, 5, 4), torch.randn(2, 2, 5, 3)
    output = attnorm.attention(q, k, v, name, mask=torch.ones(shape, dtype=torch.bool), causal=causal)
    assert output.shape == (2, 2, 0, 3)
