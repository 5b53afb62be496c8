"""The audit of one row: half precision may round large logits, another formula is noticed at any size."""

import math
from dataclasses import replace

import pytest
import torch

from attnorm.metrics.call import AttentionCall
from attnorm.models import observe
from attnorm.models.dispatch import UnsupportedModel
from attnorm.models.observe import TOLERANCE, check_output
from tests.models.families import tiny, tiny_inputs


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


HIDDEN = torch.rand(2, 4, 3, 5, generator=torch.Generator().manual_seed(5)) < 0.6
HIDDEN[0, 1, 2] = False


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


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "gpt_oss", "t5"])
def test_on_a_gpu_what_a_model_computes_passes_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its products are summed in parts of the keys."""
    monkeypatch.setattr(observe, "runs_asynchronously", lambda tensor: True)
    with torch.no_grad(), observe.observe(model := tiny(name, "eager"), lambda call: None):
        model(**tiny_inputs(name))


def test_rows_that_are_not_finite_are_not_compared() -> None:
    call = call_of(torch.float32, 1.0)
    check_output(call, torch.full_like(output_with(call, 0.0), torch.inf), "layer", "sdpa")
