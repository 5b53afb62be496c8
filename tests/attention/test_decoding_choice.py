"""Which calls of few queries run on the decoding kernel: each condition alone, on both sides of its limit."""

from typing import Any

import pytest
import torch

from attnorm.engines import one_pass
from attnorm.engines.inputs import Inputs
from attnorm.normalizers import get


def decodes(name: str = "softmax", *, keys: int = 256, queries: int = 1, heads: int = 1, **options: Any) -> bool:
    q = torch.empty(1, heads, queries, 8, requires_grad=options.pop("grad", False))
    k = torch.empty(1, 1, keys, 8)
    inputs, normalizer = Inputs(q, k, k, None, causal=False, scale=1.0), get(name, **options)
    assert one_pass.lower(normalizer, inputs) is not None
    return one_pass._can_decode(inputs, normalizer)


@pytest.mark.parametrize(
    ("call", "possible"),
    [
        ({}, True),
        ({"keys": 255}, False),
        ({"keys": 256}, True),
        ({"heads": 128}, True),
        ({"heads": 129}, False),
        ({"heads": 32, "queries": 4}, True),
        ({"heads": 33, "queries": 4}, False),
        ({"grad": True}, False),
        ({"name": "ssmax"}, False),  # learned
        ({"name": "topk"}, False),  # searched: engines/decoding.py
        ({"name": "adaptive_temperature"}, False),
    ],
)
def test_few_queries_of_many_keys_are_decoded(call: dict[str, Any], possible: bool) -> None:
    assert decodes(**call) is possible


def test_learned_parameters_do_not_matter_without_gradients() -> None:
    with torch.no_grad():
        assert decodes("ssmax")
        assert not decodes("ssmax", keys=255)
