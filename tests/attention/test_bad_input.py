"""Bad input is named, with what was expected and what to do."""

from typing import Any

import numpy as np
import pytest
import torch

import attnorm
from attnorm import attention, attention_statistics
from attnorm.attention import ENGINES


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


Q = tensor(2, 4, 5, 8)

CALLS: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "unknown normalizer": ({"normalizer": "sofmax"}, ValueError, ["'sofmax'", "did you mean 'softmax'"]),
    "not a normalizer": ({"normalizer": 3}, TypeError, ["got int", "expected a Normalizer"]),
    "torch's mask": ({"attn_mask": None}, TypeError, ["attn_mask=", "mask=, boolean with True = may attend"]),
    "torch's causal": ({"is_causal": True}, TypeError, ["causal=True", "bottom-right", "torch aligns top-left"]),
    "dropout of all": ({"dropout_p": 1.0}, ValueError, ["dropout_p", "below 1", "1.0"]),
    "negative dropout": ({"dropout_p": -0.1}, ValueError, ["dropout_p", "at least 0", "-0.1"]),
    "no dropout as None": ({"dropout_p": None}, ValueError, ["dropout_p", "None", "Pass 0"]),
    "dropout in words": ({"dropout_p": "0.1"}, ValueError, ["dropout_p", "'0.1'"]),
    "dropout per head": ({"dropout_p": torch.ones(4)}, ValueError, ["dropout_p", "tensor([1., 1., 1., 1.])"]),
    "positions in words": ({"positions": "0,1"}, TypeError, ["positions", "'0,1'", "torch.Tensor"]),
    "positions as a list": ({"positions": [0, 1]}, TypeError, ["positions", "[0, 1]", "torch.Tensor"]),
    "hidden states in words": ({"hidden_states": "x"}, TypeError, ["hidden_states", "'x'", "torch.Tensor"]),
    "soft with a negative scale": (
        {"normalizer": "soft", "scale": -0.5}, ValueError, ["scale", "at least 0", "-0.5", "'gaussian'"],
    ),
    "weights of a fused engine": ({"return_weights": True, "engine": "fused"}, ValueError, ["return_weights", "fused"]),
    "statistics without a bool": ({"return_statistics": "yes"}, TypeError, ["return_statistics=True", "'yes'"]),
    "weights without a bool": ({"return_weights": 1}, TypeError, ["return_weights=True", "got 1"]),
    "causal without a bool": ({"causal": "no"}, TypeError, ["causal=False", "'no'"]),
    "torch's groups": ({"enable_gqa": True}, TypeError, ["enable_gqa=", "shared by groups"]),
    "an option of nobody": ({"masc": None}, TypeError, ["does not take masc=", "help(attnorm.attention)"]),
    "integers": (
        {"q": tensor(2, 4, 5, 8, dtype=torch.long)}, TypeError, ["torch.int64", "one floating dtype", "q.float()"],
    ),
    "numbers of eight bits": (
        dict.fromkeys("qkv", Q.to(torch.float8_e4m3fn)), TypeError, ["torch.float8_e4m3fn", "16 bits", "q.float()"],
    ),
    "no heads": ({"q": tensor(2, 0, 5, 8)}, ValueError, ["at least one head", "(2, 0, 5, 8)", "skip"]),
    "no tensor": ({"k": Q.numpy()}, TypeError, ["torch tensors", "Tensor, ndarray, Tensor"]),
    "no values": ({"v": None}, TypeError, ["torch tensors", "Tensor, Tensor, NoneType"]),
    "two dtypes": ({"k": Q.double()}, TypeError, ["torch.float32, torch.float64", "one floating dtype"]),
    "widths differ": ({"k": tensor(2, 4, 5, 7)}, ValueError, ["8 and 7", "same width", "(2, 4, 5, 7)"]),
    "lengths of k and v differ": ({"v": tensor(2, 4, 6, 8)}, ValueError, ["(2, 4, 6, 8)", "all but the width"]),
    "batches differ": (
        {"k": tensor(3, 4, 5, 8), "v": tensor(3, 4, 5, 8)}, ValueError, ["(3, 4, 5, 8)", "same batch size"],
    ),
    "heads do not divide": (
        {"k": tensor(2, 3, 5, 8), "v": tensor(2, 3, 5, 8)}, ValueError, ["(2, 3, 5, 8)", "multiple of the key heads"],
    ),
    "more key heads than query heads": (
        {"k": tensor(2, 8, 5, 8), "v": tensor(2, 8, 5, 8)}, ValueError, ["(2, 8, 5, 8)", "multiple of the key heads"],
    ),
    "one dimension": (
        {"q": tensor(8), "k": tensor(8), "v": tensor(8)}, ValueError, ["(8,)", "(batch, heads, length, width)"],
    ),
    "five dimensions": (
        {"q": Q[None], "k": Q[None], "v": Q[None]}, ValueError, ["(1, 2, 4, 5, 8)", "(batch, heads, length, width)"],
    ),
    "dimensions differ": ({"k": tensor(4, 5, 8)}, ValueError, ["(4, 5, 8)", "(batch, heads, length, width)"]),
    "no keys": ({"k": tensor(2, 4, 0, 8), "v": tensor(2, 4, 0, 8)}, ValueError, ["(2, 4, 0, 8)", "at least one key"]),
    "no width": ({"q": tensor(2, 4, 5, 0), "k": tensor(2, 4, 5, 0)}, ValueError, ["(2, 4, 5, 0)", "at least one"]),
    "additive mask": (
        {"mask": torch.zeros(5, 5)}, TypeError, ["torch.float32", "must be boolean", "mask > torch.finfo"],
    ),
    "a mask that does not broadcast": (
        {"mask": torch.ones(3, 5, dtype=torch.bool)}, ValueError, ["(3, 5)", "does not broadcast", "(2, 4, 5, 5)"],
    ),
    "a mask on another device": (
        {"mask": torch.ones(5, 5, dtype=torch.bool, device="meta")}, ValueError, ["on cpu", "got meta", "mask.to("],
    ),
    "a mask larger than the call": (
        {"mask": torch.ones(7, 2, 4, 5, 5, dtype=torch.bool)}, ValueError, ["(7, 2, 4, 5, 5)", "(2, 4, 5, 5)"],
    ),
    "a scale that would learn": ({"scale": torch.nn.Parameter(torch.tensor(0.5))}, ValueError, ["scale", "gradient"]),
    "a scale per head": ({"scale": torch.ones(4)}, ValueError, ["finite number", "tensor([1., 1., 1., 1.])"]),
    "a mask without heads": (
        {"mask": torch.ones(2, 5, 5, dtype=torch.bool)}, ValueError, ["(2, 5, 5)", "mask[:, None]"],
    ),
    "a scale in an array": ({"scale": np.array([0.5])}, ValueError, ["finite number", "array([0.5])"]),
    "a scale that is no number": ({"scale": "1/8"}, ValueError, ["'1/8'", "finite number", "Leave it out"]),
    "unknown engine": ({"engine": "flash"}, ValueError, ["'flash'", *ENGINES]),
    "misspelled engine": ({"engine": "tritn"}, ValueError, ["'tritn'", "did you mean 'triton'"]),
    "unknown engine for a mechanism": ({"engine": "flash", "normalizer": "linear"}, ValueError, ["'flash'", "auto"]),
    "an engine for a mechanism": (
        {"engine": "fused", "normalizer": "linear"}, ValueError, ["'linear'", "'fused'", "expected engine='auto'"],
    ),
    "an engine that cannot": (
        {"engine": "fused", "normalizer": "entmax15"}, ValueError, ["'entmax15'", "Use engine='auto' or 'blocked'"],
    ),
    "positions of another length": (
        {"normalizer": "local", "positions": torch.arange(4)}, ValueError, ["4 queries", "5 queries"],
    ),
    "positions of another batch": (
        {"normalizer": "local", "positions": torch.arange(5).expand(3, 5)}, ValueError, ["(3, 5)", "(batch, length)"],
    ),
    "a sink for other heads": (
        {"normalizer": attnorm.get("sink", heads=3)}, ValueError, ["3 heads", "4 heads"],
    ),
    "scales for other heads": (
        {"normalizer": attnorm.get("ssmax", heads=3)}, ValueError, ["(3, ", "the same number of heads"],
    ),
    "alphas for other heads": (
        {"normalizer": attnorm.get("entmax", heads=3, learned=True)}, ValueError, ["3 heads", "got 4 heads", "heads=4"],
    ),
    "biases for other heads": (
        {"normalizer": attnorm.get("sigmoid", heads=3, learned=True)}, ValueError, ["3 heads", "4 heads"],
    ),
    "no hidden states": (
        {"normalizer": attnorm.get("asentmax", heads=4, width=6)}, ValueError, ["Pass hidden_states of shape (batch,"],
    ),
    "hidden states of another width": (
        {"normalizer": attnorm.get("asentmax", heads=4, width=6), "hidden_states": tensor(2, 5, 7)},
        ValueError, ["of width 6", "got width 7", "width=7"],
    ),
    "soft is not causal": ({"normalizer": "soft", "causal": True}, ValueError, ["expected causal=False", "'gaussian'"]),
    "soft with a mask per query": (
        {"normalizer": "soft", "mask": torch.ones(5, 5, dtype=torch.bool)}, ValueError, ["(5, 5)", "'gaussian'"],
    ),
    "selective without the prefix": (
        {"normalizer": "selective", "q": tensor(2, 4, 1, 8)}, ValueError, ["got 1 queries for 5 keys", ".attend("],
    ),
    "differential with unpaired values": ({"normalizer": "differential"}, ValueError, ["pairs", "(2, 4, 5, 8)"]),
    "differential with a mask per pair": (
        {"normalizer": "differential", "v": tensor(2, 2, 5, 8), "mask": torch.ones(2, 2, 5, 5, dtype=torch.bool)},
        ValueError, ["(2, 2, 5, 5)", "(2, 4, 5, 5)"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_the_message_names_the_value_and_what_was_expected(name: str) -> None:
    changes, error, texts = CALLS[name]
    call = {"q": Q, "k": Q, "v": Q, **changes}
    with pytest.raises(error) as raised:
        attnorm.attention(**call)
    for text in texts:
        assert text in str(raised.value)


OPTIONS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "no landmarks": ("soft", {"landmarks": 0}, ["at least 1", "got 0"]),
    "depth below 0": ("differential", {"depth": -1}, ["from 0", "got -1"]),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_mechanism_refuses_options_out_of_range(name: str) -> None:
    normalizer, options, texts = OPTIONS[name]
    with pytest.raises(ValueError, match=r"must|expected") as raised:
        attnorm.get(normalizer, **options)
    for text in texts:
        assert text in str(raised.value)


@pytest.mark.parametrize("shape", [(2, 1, 1, 6), (3, 1, 1, 4), (2, 4, 1, 4), (4,)], ids=str)
def test_selective_refuses_a_penalty_of_another_shape(shape: tuple[int, ...]) -> None:
    mechanism = attnorm.get("selective")
    with pytest.raises(ValueError, match="penalty") as raised:
        mechanism.attend(tensor(2, 4, 1, 8), Q, Q, penalty=torch.zeros(shape))
    assert str(shape) in str(raised.value)
    assert "(2, 1, 1, 5)" in str(raised.value)


def test_normalize_sends_a_mechanism_to_attention() -> None:
    with pytest.raises(TypeError, match=r"'linear'.*attnorm\.attention\("):
        attnorm.normalize(tensor(5, 5), "linear")


def test_flags_of_numpy_are_flags() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 4).unbind()
    for causal in (True, False):
        flag = np.array([causal])[0]
        assert torch.equal(
            attention(q, k, v, "ssmax", causal=flag, return_weights=np.True_)[1],
            attention(q, k, v, "ssmax", causal=causal, return_weights=True)[1],
        )
        assert torch.equal(attention(q, k, v, causal=flag), attention(q, k, v, causal=causal))
        assert torch.equal(
            attention_statistics(q, k, causal=flag).entropy, attention_statistics(q, k, causal=causal).entropy
        )


def test_a_parameter_is_a_scale_where_nothing_learns() -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 4).unbind()
    scale = torch.nn.Parameter(torch.tensor([0.5]))
    expected = attention(q, k, v, "sigmoid", scale=0.5)
    assert torch.equal(attention(q, k, v, "sigmoid", scale=scale.detach()), expected)
    with torch.no_grad():
        assert torch.equal(attention(q, k, v, "sigmoid", scale=scale), expected)


def test_a_tensor_that_requires_a_gradient_is_no_start_value() -> None:
    start = torch.nn.Parameter(torch.tensor(0.5))
    with pytest.raises(ValueError, match=r"s=0\.5"):
        attnorm.get("ssmax", s=start)
    with torch.no_grad():
        assert attnorm.get("ssmax", s=start).rules[0].s.item() == 0.5
