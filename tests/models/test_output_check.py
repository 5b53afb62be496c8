"""The audit of one row: half precision may round large logits, another formula is noticed at any size."""

import itertools
import math
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from attnorm.metrics.call import AttentionCall
from attnorm.models import observe
from attnorm.models.dispatch import UnsupportedModel
from attnorm.models.observe import TOLERANCE, check_output


def call_of(dtype: torch.dtype, size: float) -> AttentionCall:
    """One query; two of its four logits are close together at the given size."""
    query = torch.tensor([[[[1.0, 0.0]]]], dtype=dtype)
    key = torch.tensor([[[[size, 0.0], [size - 0.05, 0.0], [-size, 0.0], [0.0, 1.0]]]], dtype=dtype)
    value = torch.tensor([[[[1.0], [-1.0], [0.5], [0.25]]]], dtype=dtype)
    return AttentionCall(0, "decoder", query, key, value, scale=1.0, causal=True)


def output_with(call: AttentionCall, change: float) -> torch.Tensor:
    """The output of softmax with the second logit changed, (B, Q, H, E)."""
    logits = (call.query_BHQD @ call.key_BGKD.mT).float()
    logits[..., 1] += change
    return (logits.softmax(-1) @ call.value_BGKE.float()).transpose(1, 2).to(call.query_BHQD.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_exact_output_passes(dtype: torch.dtype) -> None:
    check_output(call_of(dtype, 10.0), output_with(call_of(dtype, 10.0), 0.0), "layer", "sdpa")


def test_a_changed_logit_is_noticed_in_float32_and_is_rounding_in_bfloat16() -> None:
    """bfloat16 keeps a logit of 40 to 0.16, so that a change by 0.2 shows nothing; float32 keeps it to 4e-6."""
    exact = call_of(torch.float32, 40.0)
    with pytest.raises(UnsupportedModel, match="is not softmax"):
        check_output(exact, output_with(exact, 0.2), "layer", "eager")
    rounded = call_of(torch.bfloat16, 40.0)
    check_output(rounded, output_with(rounded, 0.2), "layer", "eager")


def test_a_changed_logit_is_noticed_where_logits_are_small_in_bfloat16() -> None:
    small = call_of(torch.bfloat16, 1.0)
    with pytest.raises(UnsupportedModel, match="is not softmax"):
        check_output(small, output_with(small, 0.3), "layer", "eager")


def random_call(heads: int = 4, groups: int = 2, queries: int = 3, keys: int = 5, **options: Any) -> AttentionCall:
    generator = torch.Generator().manual_seed(heads)
    query, key, value = (
        torch.randn(2, count, length, width, generator=generator, dtype=torch.float64)
        for count, length, width in ((heads, queries, 3), (groups, keys, 3), (groups, keys, 2))
    )
    return AttentionCall(0, "decoder", query, key, value, scale=0.7, causal=True, **options)


def expected_numbers(call: AttentionCall, output: torch.Tensor) -> list[float]:
    """Whether a row is seen, the largest error, value and logit, by loops over the last row of every head."""
    batch, heads, queries, _ = call.query_BHQD.shape
    groups, keys = call.key_BGKD.shape[1:3]
    errors, sizes, logits = [0.0], [0.0], [0.0]
    seen = False
    for item, head in itertools.product(range(batch), range(heads)):
        group = head // (heads // groups)
        z = [call.scale * float(call.query_BHQD[item, head, -1] @ call.key_BGKD[item, group, k]) for k in range(keys)]
        if call.softcap is not None:
            z = [call.softcap * math.tanh(one / call.softcap) for one in z]
        if call.bias is not None:
            z = [
                one + float(call.bias.expand(batch, heads, queries, keys)[item, head, -1, k]) for k, one in enumerate(z)
            ]
        mask = torch.ones(1, 1, 1, keys, dtype=torch.bool) if call.mask is None else call.mask
        visible = [k for k in range(keys) if mask.expand(batch, heads, queries, keys)[item, head, -1, k]]
        sizes += [float(call.value_BGKE[item, group, k].abs().max()) for k in visible]
        if not visible:
            continue
        total = sum(math.exp(z[k]) for k in visible)
        total += 0.0 if call.sinks_H is None else math.exp(float(call.sinks_H[head]))
        rebuilt = sum(math.exp(z[k]) / total * call.value_BGKE[item, group, k] for k in visible)
        assert isinstance(rebuilt, torch.Tensor)
        seen = True
        errors.append(float((rebuilt - output[item, -1, head]).abs().max()))
        logits.append(max(abs(z[k]) for k in visible))
    return [float(seen), max(errors), max(sizes), max(logits)]


HIDDEN = torch.rand(2, 4, 3, 5, generator=torch.Generator().manual_seed(5)) < 0.6
HIDDEN[0, 1, 2] = False


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"groups": 4},
        {"groups": 1, "queries": 1},
        {"keys": 1},
        {"softcap": 0.8},
        {"bias": torch.randn(1, 4, 3, 5, generator=torch.Generator().manual_seed(3)).double()},
        {"bias": torch.randn(2, 1, 1, 5, generator=torch.Generator().manual_seed(3)).double()},
        {"sinks_H": torch.tensor([0.0, 2.0, -1.0, 1.0])},
        {"mask": HIDDEN},
        {"mask": HIDDEN[:1, :1]},
        {"mask": HIDDEN[:, :1, :1]},
        {"mask": torch.zeros(1, 1, 1, 5, dtype=torch.bool)},
    ],
    ids=str,
)
@pytest.mark.parametrize("by_parts", [False, True])
def test_the_compared_numbers_are_those_of_loops(
    options: dict[str, Any], by_parts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observe, "runs_asynchronously", lambda tensor: by_parts)  # as on a GPU
    call = random_call(**options)
    output = torch.randn(2, call.query_BHQD.shape[2], 4, 2, dtype=torch.float64)
    found = observe._compare_outputs(call, output).tolist()
    assert found == pytest.approx(expected_numbers(call, output), rel=1e-9)


def test_rows_that_are_not_finite_are_not_compared() -> None:
    call, output = random_call(), torch.zeros(2, 3, 4, 2, dtype=torch.float64)
    output[0, -1, 1, 0] = math.nan
    output[1, -1] = math.inf
    rest = random_call()
    expected = expected_numbers(replace(rest, **{n: getattr(rest, n)[:1] for n in PARTS}), torch.zeros_like(output[:1]))
    found = observe._compare_outputs(call, output).tolist()
    assert found[0] == 1.0
    assert 0 < found[1] <= expected[1] * (1 + 1e-12)
    assert observe._compare_outputs(call, torch.full_like(output, math.nan)).tolist()[0] == 0.0


PARTS = ("query_BHQD", "key_BGKD", "value_BGKE")


@pytest.mark.parametrize("size", [1.0, 100.0])
def test_an_error_of_two_percent_of_the_largest_value_is_the_limit(size: float) -> None:
    call = call_of(torch.float64, 1.0)
    call = replace(call, value_BGKE=size * call.value_BGKE)
    exact = output_with(call, 0.0).double()
    logits = (call.query_BHQD @ call.key_BGKD.mT)[0, 0, 0]
    exact[0, 0, 0] = logits.softmax(-1) @ call.value_BGKE[0, 0]
    assert TOLERANCE == 0.02
    check_output(call, exact + 0.0199 * size, "layer", "sdpa")
    with pytest.raises(UnsupportedModel, match=rf"layer.*'sdpa'.*{0.0201 * size:.3g} .*{size:.3g}"):
        check_output(call, exact + 0.0201 * size, "layer", "sdpa")
    with pytest.raises(UnsupportedModel, match="the model"):
        check_output(call, exact - 0.0201 * size, "", "sdpa")


def test_half_precision_may_round_the_largest_logit_twice() -> None:
    """The limit grows by e^(2 |z| eps) - 1, and not beyond all numbers."""
    call = call_of(torch.bfloat16, 8.0)
    values = call.value_BGKE.float()[0, 0]
    exact = ((call.query_BHQD.float() @ call.key_BGKD.float().mT)[0, 0, 0].softmax(-1) @ values).reshape(1, 1, 1, 1)
    limit = TOLERANCE + math.expm1(2 * 8.0 * 2**-7)
    check_output(call, exact + 0.995 * limit, "layer", "sdpa")
    with pytest.raises(UnsupportedModel):
        check_output(call, exact + 1.005 * limit, "layer", "sdpa")
    far = call_of(torch.bfloat16, 1e30)
    check_output(far, torch.ones(1, 1, 1, 1), "layer", "sdpa")


def test_on_a_gpu_the_result_is_read_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "runs_asynchronously", lambda tensor: True)
    call = call_of(torch.float32, 1.0)
    later = check_output(call, output_with(call, 3.0), "layer", "sdpa")
    with pytest.raises(UnsupportedModel):
        later()
    check_output(call, output_with(call, 0.0), "layer", "sdpa")()


def test_values_of_zero_have_no_error() -> None:
    call = call_of(torch.float32, 1.0)
    nothing = replace(call, value_BGKE=torch.zeros_like(call.value_BGKE))
    check_output(nothing, torch.zeros(1, 1, 1, 1), "layer", "sdpa")
    with pytest.raises(UnsupportedModel):
        check_output(nothing, torch.full((1, 1, 1, 1), 1e-3), "layer", "sdpa")


@pytest.mark.parametrize(
    ("dtype", "cuda", "step"),
    [
        (torch.float32, False, 2**-23),
        (torch.float32, True, 2**-10),  # TF32
        (torch.bfloat16, False, 2**-7),
        (torch.bfloat16, True, 2**-7),
        (torch.float64, True, 2**-52),
    ],
)
def test_logits_are_rounded_as_the_device_does(dtype: torch.dtype, cuda: bool, step: float) -> None:
    tensor = Mock(spec=torch.Tensor, dtype=dtype, is_cuda=cuda)
    assert observe._step(tensor) == step
