"""Calls are stacked only if they agree in all but queries, keys, values and sinks."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from attnorm.metrics import call as call_module
from attnorm.metrics.call import AttentionCall
from attnorm.normalizers.registry import get

MASK = torch.ones(5, 7, dtype=torch.bool)


def call(seed: int = 0, **more: Any) -> AttentionCall:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(2, heads, n, 3, generator=generator) for heads, n in ((4, 5), (2, 7), (2, 7)))
    return AttentionCall(seed, "decoder", query, key, value, scale=0.5, causal=True, **more)


@pytest.mark.parametrize(
    ("more", "fits"),
    [
        ({}, True),
        ({"mask": MASK}, True),
        ({"mask": MASK.expand(2, 1, 5, 7)}, True),
        ({"mask": MASK.expand(1, 4, 5, 7)}, False),
        ({"mask": MASK.expand(4, 5, 7)}, False),
        ({"bias": torch.zeros(1, 1, 5, 7)}, False),
        ({"normalizer": get("softmax")}, False),
        ({"inputs_BKC": torch.zeros(2, 7, 6)}, False),
    ],
)
def test_what_differs_between_layers_keeps_a_call_alone(
    more: dict[str, Any], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not call_module.can_be_stacked(call(**more))  # on a CPU it saves no time
    monkeypatch.setattr(call_module, "saves_time", lambda call: True)
    assert call_module.can_be_stacked(call(**more)) == fits


def test_calls_are_alike_if_all_but_the_numbers_agree() -> None:
    one, other = call(0, mask=MASK), call(1, mask=MASK)
    assert call_module.same_shape(one, other)
    sinks = torch.zeros(4)
    for change in (
        {"mask": MASK.clone()}, {"kind": "encoder"}, {"scale": 0.25}, {"causal": False}, {"softcap": 30.0},
        {"dropout": 0.1}, {"sinks_H": sinks}, {"query_BHQD": other.query_BHQD[:, :, 1:]},
        {"key_BGKD": other.key_BGKD.double()}, {"value_BGKE": other.value_BGKE[..., :2]},
    ):  # fmt: skip
        assert not call_module.same_shape(one, replace(other, **change)), change  # type: ignore[arg-type]
    assert call_module.same_shape(replace(one, sinks_H=sinks), replace(other, sinks_H=sinks + 1))


def test_heads_follow_each_other_call_by_call() -> None:
    calls = [call(seed, sinks_H=torch.arange(4.0) + 10 * seed) for seed in range(3)]
    whole = call_module.stack_calls(calls)
    for i, one in enumerate(calls):
        assert torch.equal(whole.query_BHQD[:, 4 * i : 4 * i + 4], one.query_BHQD)
        assert torch.equal(whole.key_BGKD[:, 2 * i : 2 * i + 2], one.key_BGKD)
        assert torch.equal(whole.value_BGKE[:, 2 * i : 2 * i + 2], one.value_BGKE)
    assert whole.sinks_H is not None
    assert whole.sinks_H.tolist() == [0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23]
    assert call_module.stack_calls([call(), call(1)]).sinks_H is None
    assert call_module.stack_calls(calls[1:2]) is calls[1]


def test_the_size_is_that_of_queries_keys_and_values_and_the_outline_has_none() -> None:
    assert call_module.call_bytes(call()) == 4 * 3 * 2 * (4 * 5 + 2 * 7 + 2 * 7)
    outline = call_module.without_data(call(mask=MASK, sinks_H=torch.zeros(4), bias=torch.zeros(1, 1, 5, 7)))
    assert outline.query_BHQD.shape == (2, 4, 5, 3)
    assert all(part.is_meta for part in (outline.query_BHQD, outline.key_BGKD, outline.value_BGKE))
    assert (outline.mask, outline.sinks_H, outline.bias, outline.scale) == (None, None, None, 0.5)


def test_a_normalizer_with_numbers_for_each_head_fits_one_layer_alone() -> None:
    assert not call_module.has_parameters_per_head(get("softmax"))
    assert not call_module.has_parameters_per_head(nn.PReLU())  # one number
    assert call_module.has_parameters_per_head(get("ssmax", heads=2))
    assert call_module.has_parameters_per_head(nn.BatchNorm1d(2, affine=False))  # buffers count
