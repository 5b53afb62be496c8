"""Linear attention: the sums of O(L) equal the quadratic formula, for every mask."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import elu

import attnorm
from attnorm.mechanisms import linear as linear_module
from attnorm.mechanisms.linear import Linear
from tests.attention.calls import CALLS, Call, Tensors, assert_all_close, mask_per_head, outputs_and_gradients
from tests.attention.reference import HEADS, seen
from tests.mechanisms import reference


def elu_plus_one(x: Tensor) -> Tensor:
    return elu(x) + 1


def quadratic(
    tensors: Tensors,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float = 1.0,
    feature_map: Any = elu_plus_one,
) -> Tensors:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        visible = seen(q, k, mask, causal)
        k, v = (t.repeat_interleave(HEADS // t.shape[1], dim=1) for t in (k, v))
        return reference.linear(q * scale, k, v, visible, feature_map)

    return outputs_and_gradients(attend, tensors)


def ours(tensors: Tensors, mechanism: Linear | None = None, **options: Any) -> Tensors:
    return outputs_and_gradients(lambda q, k, v: attnorm.attention(q, k, v, mechanism or Linear(), **options), tensors)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("chunk", [1, 3, 128])
def test_outputs_and_gradients_equal_the_quadratic_formula(
    name: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = CALLS[name]
    monkeypatch.setattr(linear_module, "CHUNK", chunk)
    monkeypatch.setattr(linear_module, "_chunks_at_once", lambda q: 2)
    monkeypatch.setattr("attnorm.engines.blocked.BLOCK_ELEMENTS", call.batch * HEADS * call.keys * chunk)
    tensors = call.tensors()[:3]
    assert_all_close(ours(tensors, **call.options), quadratic(tensors, **call.options))


@settings(max_examples=40)
@given(
    queries=st.integers(1, 9),
    keys=st.integers(1, 9),
    chunk=st.integers(1, 4),
    causal=st.booleans(),
    hidden=st.integers(0, 2**9 - 1),
)
def test_any_lengths_chunks_and_padding(queries: int, keys: int, chunk: int, causal: bool, hidden: int) -> None:
    mask = torch.tensor([hidden >> j & 1 == 0 for j in range(keys)])
    tensors = Call(batch=1, key_heads=2, queries=queries, keys=keys, value_width=3).tensors()[:3]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_module, "CHUNK", chunk)
        actual = ours(tensors, mask=mask, causal=causal)
    assert_all_close(actual, quadratic(tensors, mask=mask, causal=causal))


@pytest.mark.parametrize("mask", [None, mask_per_head()[:, :, :, :5], mask_per_head()[:, :, :1, :5]])
def test_a_feature_map_of_ones_own(mask: Tensor | None) -> None:
    tensors = Call().tensors()[:3]
    actual = ours(tensors, Linear(torch.exp), mask=mask, causal=True, scale=0.5)
    assert_all_close(actual, quadratic(tensors, mask, True, 0.5, torch.exp))


def test_a_feature_map_may_widen() -> None:
    tensors = Call().tensors()[:3]
    assert_all_close(ours(tensors, Linear(both_signs)), quadratic(tensors, feature_map=both_signs))


def both_signs(x: Tensor) -> Tensor:
    return torch.cat([torch.exp(x), torch.exp(-x)], dim=-1)


def test_weights_sum_to_one_and_are_positive() -> None:
    q, k, _, _ = Call(queries=7, keys=7).tensors()
    weights = attnorm.attention(q, k, torch.eye(7, dtype=torch.float64).expand(2, HEADS, 7, 7), "linear", causal=True)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, HEADS, 7, dtype=torch.float64))
    assert weights.tril().gt(0).sum() == 2 * HEADS * 28
    assert weights.triu(1).eq(0).all()


def test_token_by_token_with_a_cache_equals_the_full_sequence() -> None:
    q, k, v, _ = Call(queries=7, keys=7).tensors()
    full = attnorm.attention(q, k, v, "linear", causal=True)
    for t in range(7):
        last = attnorm.attention(q[..., t : t + 1, :], k[..., : t + 1, :], v[..., : t + 1, :], "linear", causal=True)
        torch.testing.assert_close(last, full[..., t : t + 1, :], atol=1e-12, rtol=0)


def test_the_last_token_changes_no_earlier_output() -> None:
    tensors = Call(queries=7, keys=7).tensors()[:3]
    before = attnorm.attention(*tensors, "linear", causal=True)
    for t in tensors:
        t[..., -1, :] += 3
    after = attnorm.attention(*tensors, "linear", causal=True)
    assert torch.equal(before[..., :-1, :], after[..., :-1, :])


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize("rows", [1, 5], ids=["by sums", "by blocks"])
def test_garbage_in_padding_reaches_nothing_and_empty_rows_are_zeros(causal: bool, rows: int) -> None:
    mask = torch.tensor([False, False, True, True, False]).expand(rows, 5)
    clean = Call().tensors()[:3]
    dirty = [t.clone() for t in clean]
    for t in dirty[1:]:
        t[..., ~mask[0], :] = float("nan")
    if causal:
        dirty[0][..., :2, :] = float("nan")
    expected, actual = (ours(tensors, mask=mask, causal=causal) for tensors in (clean, dirty))
    assert_all_close(actual, expected, atol=1e-12)
    assert not causal or actual[0][..., :2, :].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_errors_are_at_most_twice_those_of_the_plain_computation(dtype: torch.dtype, causal: bool) -> None:
    q, k, v, _ = Call(queries=61, keys=61, width=16).tensors(dtype)
    exact = attnorm.attention(q.double(), k.double(), v.double(), "linear", causal=causal)
    visible = torch.ones(61, 61, dtype=torch.bool)
    visible = visible.tril() if causal else visible
    plain = reference.linear(q, k, v, visible, elu_plus_one)
    output = attnorm.attention(q, k, v, "linear", causal=causal)
    assert output.dtype == dtype
    assert (output - exact).abs().max() <= 2 * (plain - exact).abs().max()


def test_autocast_rounds_nothing_inside() -> None:
    tensors = Call(queries=33, keys=33, width=16).tensors(torch.float32)[:3]
    expected = attnorm.attention(*tensors, "linear", causal=True)
    with torch.autocast("cpu", torch.bfloat16):
        actual = attnorm.attention(*tensors, "linear", causal=True)
    assert torch.equal(actual, expected)
