"""The audit of one row: its four numbers against attention computed row by row, and where it gives up."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from attnorm.metrics.call import AttentionCall
from attnorm.models import observe
from attnorm.models.dispatch import UnsupportedModel
from attnorm.models.observe import TOLERANCE, _compare_outputs, check_output

B, H, G, Q, K, D, E = 2, 4, 2, 3, 6, 5, 3


def call_of(**more: Any) -> AttentionCall:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (
        torch.randn(B, heads, n, width, generator=generator, dtype=torch.float64)
        for heads, n, width in ((H, Q, D), (G, K, D), (G, K, E))
    )
    return AttentionCall(0, "decoder", query, key, value, scale=0.8, causal=False, **more)


def some(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


CALLS = {
    "plain": {},
    "softcap": {"softcap": 1.5},
    "bias": {"bias": some(B, H, Q, K)},
    "sinks": {"sinks_H": some(H)},
    "mask": {"mask": (some(B, 1, Q, K) > -0.3)},
    "one entry sees nothing": {"mask": torch.tensor([True, False])[:, None, None, None].expand(B, 1, Q, K)},
}


def by_rows(call: AttentionCall) -> tuple[Tensor, float, float]:
    """The outputs of the last query, the largest value that it sees and its largest logit."""
    output, size, largest = torch.zeros(B, H, E, dtype=torch.float64), 0.0, 0.0
    for b in range(B):
        for h in range(H):
            g = h // (H // G)
            z = torch.stack([call.query_BHQD[b, h, -1] @ call.key_BGKD[b, g, j] for j in range(K)]) * call.scale
            z = z if call.softcap is None else call.softcap * torch.tanh(z / call.softcap)
            z = z if call.bias is None else z + call.bias[b, h, -1]
            seen = torch.ones(K, dtype=torch.bool) if call.mask is None else call.mask[b, 0, -1]
            if not seen.any():
                continue
            e = torch.exp(z) * seen
            rest = 0.0 if call.sinks_H is None else math.exp(float(call.sinks_H[h]))
            output[b, h] = (e[:, None] * call.value_BGKE[b, g]).sum(0) / (e.sum() + rest)
            size = max(size, float(call.value_BGKE[b, g][seen].abs().max()))
            largest = max(largest, float(z[seen].abs().max()))
    return output, size, largest


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("parts", [1, 2])
def test_the_four_numbers_are_those_of_attention_row_by_row(
    name: str, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if parts > 1:  # as on a GPU
        monkeypatch.setattr(observe, "runs_asynchronously", lambda tensor: True)
    call = call_of(**CALLS[name])
    output, size, largest = by_rows(call)
    off = 0.25 * torch.eye(H, E, dtype=torch.float64).expand(B, H, E) * torch.tensor([1.0, 0.5])[:, None, None]
    whole = torch.full((B, Q, H, E), 99.0, dtype=torch.float64)  # of other queries: not looked at
    whole[:, -1] = output + off
    seen, error, found_size, found_largest = _compare_outputs(call, whole).tolist()
    assert (seen, error) == (1.0, pytest.approx(0.25))
    assert found_size == pytest.approx(size)
    assert found_largest == pytest.approx(largest)


def test_rows_that_are_not_finite_or_see_nothing_are_not_compared() -> None:
    call = call_of()
    whole = torch.full((B, Q, H, E), math.nan, dtype=torch.float64)
    assert _compare_outputs(call, whole)[:2].tolist() == [0, 0]
    hidden = call_of(mask=torch.zeros(B, 1, Q, K, dtype=torch.bool))
    assert _compare_outputs(hidden, torch.ones(B, Q, H, E, dtype=torch.float64))[:2].tolist() == [0, 0]
    check_output(hidden, torch.ones(B, Q, H, E, dtype=torch.float64), "layer", "eager")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_audit_gives_up_right_above_its_tolerance(dtype: torch.dtype) -> None:
    """An error of TOLERANCE of the largest value, more where the dtype rounds a logit by more."""
    call = call_of()
    output, size, largest = by_rows(call)
    step = torch.finfo(dtype).eps
    call = AttentionCall(
        0, "decoder", *(part.to(dtype) for part in (call.query_BHQD, call.key_BGKD, call.value_BGKE)), scale=0.8,
        causal=False,
    )  # fmt: skip
    numbers = torch.tensor([1.0, 0.0, size, largest], dtype=torch.float64)
    limit = (TOLERANCE + math.expm1(2 * largest * step)) * size
    for share, passes in ((0.999, True), (1.001, False)):
        numbers[1] = share * limit
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(observe, "_compare_outputs", lambda call, output: numbers)
            if passes:
                check_output(call, output[:, None].to(dtype), "layer", "eager")
            else:
                with pytest.raises(UnsupportedModel, match="layer"):
                    check_output(call, output[:, None].to(dtype), "layer", "eager")
    assert TOLERANCE == 0.02
