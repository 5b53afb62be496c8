"""The audit of one row: half precision may round large logits, another formula is noticed at any size."""

import pytest
import torch

from attnorm.metrics.call import AttentionCall
from attnorm.models.dispatch import UnsupportedModel
from attnorm.models.output_check import check_output


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
