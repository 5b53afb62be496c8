"""Parts of how calls of torch functions are read, each against a definition by pairs of queries and keys."""

from itertools import product

import pytest
import torch
from torch import Tensor

from attnorm.models.hf_call import VisibleKeys
from attnorm.models.torch_functions import (
    _autocast,
    _combine,
    _four_dimensional,
    _hidden_to_visible,
    _with_extra_keys,
    kind_of,
)

SEEN = torch.tensor([[True, True, False], [False, True, True]])[None, None]
OTHER = torch.tensor([[True, False, True]])[None, None]
ADDED, MORE = torch.tensor([[[[1.0, 2.0, 3.0]]]]), torch.tensor([[[[10.0, 20.0, 30.0]]]])


def same(found: Tensor | None, expected: Tensor | None) -> bool:
    return found is expected if found is None or expected is None else torch.equal(found, expected)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("first", "second"), list(product([None, SEEN], [None, OTHER])))
def test_both_masks_hide(first: Tensor | None, second: Tensor | None, causal: bool) -> None:
    found = _combine(VisibleKeys(causal=causal, mask=first), VisibleKeys(causal=not causal, mask=second))
    expected = torch.tensor([[True, False, False], [False, False, True]])[None, None]
    assert same(
        found.mask, expected if first is not None and second is not None else second if first is None else first
    )
    assert found.bias is None
    assert found.causal is causal


@pytest.mark.parametrize(("first", "second"), list(product([None, ADDED], [None, MORE])))
def test_both_biases_are_added(first: Tensor | None, second: Tensor | None) -> None:
    found = _combine(VisibleKeys(causal=False, bias=first), VisibleKeys(causal=False, bias=second))
    sums = torch.tensor([[[[11.0, 22.0, 33.0]]]])
    assert same(found.bias, sums if first is not None and second is not None else second if first is None else first)
    assert found.mask is None


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (2, 2), (3, 3), (2, 4), (4, 2)])
def test_a_mask_is_a_decoders_where_no_query_sees_a_later_key(queries: int, keys: int) -> None:
    for bits in range(2 ** (queries * keys)):
        mask = torch.tensor([bool(bits >> at & 1) for at in range(queries * keys)]).reshape(1, 1, queries, keys)
        later = any(mask[0, 0, i, j] and j > i + keys - queries for i in range(queries) for j in range(keys))
        ordered = queries > 1 and not later
        for itself in (True, False):
            expected = "decoder" if ordered else "encoder" if itself else "cross"
            assert kind_of(VisibleKeys(causal=False, mask=mask), queries, keys, itself=itself) == expected
            if bits in (0, 1, 5):
                assert kind_of(VisibleKeys(causal=True, mask=mask), queries, keys, itself=itself) == "decoder"


def test_a_call_without_a_mask_is_a_decoders_if_it_is_causal() -> None:
    assert kind_of(VisibleKeys(causal=True), 3, 3, itself=False) == "decoder"
    assert kind_of(VisibleKeys(causal=False), 3, 3, itself=True) == "encoder"
    assert kind_of(VisibleKeys(causal=False), 3, 3, itself=False) == "cross"


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("mask", [None, SEEN, OTHER])
@pytest.mark.parametrize("bias", [None, ADDED])
def test_every_query_sees_the_keys_that_torch_appends(causal: bool, mask: Tensor | None, bias: Tensor | None) -> None:
    given = VisibleKeys(causal=causal, mask=mask, bias=bias)
    assert _with_extra_keys(given, 0, 2, 3) is given
    for extra in (1, 2):
        found = _with_extra_keys(given, extra, 2, 3)
        assert not found.causal
        expected = [
            [j >= 3 or ((mask is None or bool(mask.expand(1, 1, 2, 3)[0, 0, i, j])) and (not causal or j <= i + 1))
             for j in range(3 + extra)]
            for i in range(2)
        ]  # fmt: skip
        if mask is None and not causal:
            assert found.mask is None
        else:
            assert found.mask is not None
            assert found.mask.expand(1, 1, 2, 3 + extra)[0, 0].tolist() == expected
        if bias is None:
            assert found.bias is None
        else:
            assert found.bias is not None
            assert found.bias.flatten().tolist() == [1.0, 2.0, 3.0, *[0.0] * extra]


SHAPES = [
    ((5, 4), (7, 4), (7, 3), None),
    ((2, 5, 4), (2, 7, 4), (2, 7, 3), (5, 7)),
    ((6, 5, 4), (2, 7, 4), (3, 7, 3), (5, 7)),
    ((1, 5, 4), (3, 7, 4), (3, 7, 3), None),
    ((3, 2, 5, 4), (1, 2, 7, 4), (3, 2, 7, 3), (3, 1, 5, 7)),
    ((2, 3, 2, 5, 4), (3, 2, 7, 4), (2, 1, 2, 7, 3), (3, 1, 5, 7)),
    ((2, 3, 4, 5, 4), (2, 3, 2, 7, 4), (2, 3, 4, 7, 3), (2, 3, 1, 5, 7)),
]


@pytest.mark.parametrize(("query", "key", "value", "mask"), SHAPES)
def test_tensors_become_four_dimensional_as_torch_broadcasts_them(
    query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...], mask: tuple[int, ...] | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator) for shape in (query, key, value))
    m = None if mask is None else torch.rand(mask, generator=generator) < 0.7
    found = _four_dimensional(q, k, v, m)
    assert [t.dim() for t in found[:3]] == [4, 4, 4]
    padded = [torch.Size([1] * (5 - len(shape))) + torch.Size(shape) for shape in (query, key, value)]
    heads = max(shape[-3] for shape in padded)
    full = [
        t.reshape(shape).repeat_interleave(heads // shape[-3], -3).expand(
            *torch.broadcast_shapes(*(each[:2] for each in padded)), heads, -1, -1
        )
        for t, shape in zip((q, k, v), padded, strict=True)
    ]  # fmt: skip
    batch = full[0].shape[0] * full[0].shape[1]
    for one, whole in zip(found[:3], full, strict=True):
        assert one is not None
        assert one.shape[0] == batch
        expected = whole.flatten(0, 1)
        assert torch.equal(one.repeat_interleave(heads // one.shape[1], 1), expected)
    if m is None:
        assert found[3] is None
    else:
        assert found[3] is not None
        whole_mask = m.expand(*full[0].shape[:-1], 7)
        assert torch.equal(found[3].expand(batch, heads, 5, 7), whole_mask.flatten(0, 1))


def test_what_torch_hides_is_not_visible() -> None:
    hidden = torch.tensor([True, False])
    assert _hidden_to_visible(hidden).tolist() == [False, True]
    assert _hidden_to_visible(ADDED) is ADDED


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("other", [torch.float32, torch.float64])
def test_autocast_rounds_all_inputs_unless_the_queries_are_float64(dtype: torch.dtype, other: torch.dtype) -> None:
    tensors = torch.ones(2, dtype=dtype), torch.ones(3, dtype=other)
    assert [t.dtype for t in _autocast(*tensors)] == [dtype, other]
    with torch.autocast("cpu", torch.bfloat16):
        found = [t.dtype for t in _autocast(*tensors)]
    assert found == ([dtype, other] if dtype == torch.float64 else [torch.bfloat16, torch.bfloat16])
