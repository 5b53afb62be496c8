"""The engines agree, and one that cannot run a call says so."""

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

import attnorm
from attnorm.engines import blocked as blocked_engine
from attnorm.engines import execution, fused
from attnorm.engines import inputs as engine_inputs
from attnorm.engines.execution import MIN_QUERIES
from attnorm.engines.inputs import Inputs, validate_inputs
from attnorm.normalizers import compose
from tests.attention.calls import CALLS, Call, assert_all_close, calling, learned, outputs_and_gradients
from tests.attention.reference import TYPICAL, Case, seen

every_case = pytest.mark.parametrize("case", TYPICAL, ids=lambda case: case.id)

ON_SDPA = ["softmax", "ssmax", "log_scaled", "softmax1", "sink", "adaptive_temperature", "ssa", "tempered", "composed"]


@every_case
@pytest.mark.parametrize("name", ["causal", "padding, causal", "a mask per head", "more queries than keys"])
@torch.no_grad()
def test_a_forced_engine_agrees_or_says_why_not(case: Case, name: str) -> None:
    normalizer = case.make()
    call = CALLS[name]
    tensors = call.tensors()
    fused_call = calling(case, normalizer, call.options, engine="fused")
    if case.name in (*ON_SDPA, "adaptive behind ssmax") and "map" not in case.options:
        blocked = calling(case, normalizer, call.options, engine="blocked")(*tensors)
        assert_all_close([fused_call(*tensors)], [blocked])
    else:
        with pytest.raises(ValueError, match=f"'{normalizer.name}'.*engine='auto' or 'blocked'"):
            fused_call(*tensors)


@pytest.mark.parametrize("name", ON_SDPA)
def test_rescaled_softmax_runs_fused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken on purpose, the blocked engine is not missed."""
    monkeypatch.setattr(import_module("attnorm.attention"), "blocked", None)
    q, k, v, _ = Call(queries=7, keys=7, key_heads=2).tensors()
    attnorm.attention(q, k, v, name, causal=True)
    attnorm.attention(q, k, v, name, causal=True, mask=torch.rand(7) < 0.8)


def both_engines(name: str, *tensors: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return tuple(attnorm.attention(*tensors, name, engine=e, **options) for e in ("fused", "blocked"))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_adaptive_temperature_in_two_passes_equals_one_row_at_a_time(call: Call) -> None:
    q, k, v, _ = call.tensors()
    two_passes, rows = both_engines("adaptive_temperature", 2 * q, k, v, **call.options)
    torch.testing.assert_close(two_passes, rows, atol=1e-12, rtol=0)


def test_adaptive_temperature_sharpens_rows_in_the_fused_engine_too() -> None:
    """Long enough that the polynomial acts: beta would be 1 everywhere on a few keys."""
    q, k, v, _ = Call(queries=101, keys=101).tensors()
    two_passes, rows = both_engines("adaptive_temperature", q, k, v, causal=True, mask=torch.rand(101) < 0.9)
    torch.testing.assert_close(two_passes, rows, atol=1e-12, rtol=0)
    assert (two_passes - attnorm.attention(q, k, v, causal=True)).abs().max() > 0.1


@pytest.mark.parametrize("offset", [0.0, 1e2, 1e4])
def test_a_large_offset_costs_the_entropy_about_what_it_costs_the_logits(offset: float) -> None:
    q, k, v, _ = Call(batch=1, queries=64, keys=64, width=8).tensors(torch.float32)
    q, k = torch.cat([q, torch.ones_like(q[..., :1])], -1), torch.cat([k, torch.full_like(k[..., :1], offset)], -1)
    two_passes, rows = both_engines("adaptive_temperature", q, k, v)
    exact, _ = both_engines("adaptive_temperature", q.double(), k.double(), v.double())
    assert (two_passes - exact).abs().max() <= 4 * (rows - exact).abs().max() + 1e-6


def test_adaptive_temperature_with_gradients_leaves_the_fused_engine() -> None:
    q, k, v, _ = Call().tensors()
    q.requires_grad_()
    normalizer = attnorm.get("adaptive_temperature")
    inputs = validate_inputs(q, k, v, mask=None, causal=False, scale=None, positions=None)
    assert not fused.applies(inputs, normalizer)
    with pytest.raises(ValueError, match=r"'adaptive_temperature'.*engine='auto'"):
        attnorm.attention(q, k, v, normalizer, engine="fused")
    with torch.no_grad():
        assert fused.applies(inputs, normalizer)


@every_case
@pytest.mark.every_second("case", first=1)
def test_learned_parameters_get_the_same_gradient_in_blocks_as_in_one(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    normalizer = case.make()
    call = Call(key_heads=2, queries=11, keys=13, options={"mask": torch.rand(2, 1, 11, 13) < 0.8})
    tensors = call.tensors()
    attend = calling(case, normalizer, call.options, engine="blocked")
    whole = outputs_and_gradients(attend, tensors, learned(normalizer))
    monkeypatch.setattr(blocked_engine, "BLOCK_ELEMENTS", 1)
    assert_all_close(outputs_and_gradients(attend, tensors, learned(normalizer)), whole, atol=1e-13)


@pytest.mark.parametrize("case", [case for case in TYPICAL if learned(case.make())], ids=lambda case: case.id)
@pytest.mark.parametrize("rows", [1, 7], ids=["blocks", "one block"])
def test_parameters_learn_where_the_inputs_do_not(case: Case, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call(queries=7, keys=7, options={"causal": True})
    monkeypatch.setattr(blocked_engine, "BLOCK_ELEMENTS", call.batch * 4 * 7 * rows)
    normalizer, tensors = case.make(), call.tensors()
    attend = calling(case, normalizer, call.options)
    expected = torch.autograd.grad(attend(*(t.requires_grad_() for t in tensors)).sum(), learned(normalizer))
    actual = torch.autograd.grad(attend(*(t.detach() for t in tensors)).sum(), learned(normalizer))
    assert_all_close(list(actual), list(expected))


def test_frozen_parameters_and_inputs_get_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked_engine, "BLOCK_ELEMENTS", 1)
    normalizer = attnorm.get("asentmax", heads=4).requires_grad_(False)
    q, k, v, _ = Call().tensors()
    v.requires_grad_()
    attnorm.attention(q, k, v, normalizer).sum().backward()
    assert v.grad is not None
    assert q.grad is k.grad is None
    assert all(p.grad is None for p in normalizer.parameters())


@pytest.mark.parametrize("rows", [1, 2, 3, 6])
@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 5), (2, 1, 1, 5), (2, 4, 5, 5)], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
def test_visible_keys_are_counted_without_the_whole_mask(
    rows: int, shape: tuple[int, ...], causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v, _ = Call(queries=5, keys=5).tensors()
    mask = torch.rand(shape) < 0.6
    monkeypatch.setattr(engine_inputs, "MASK_ELEMENTS", rows * 5 * (mask.numel() // mask.shape[-1]))
    inputs = validate_inputs(q, k, v, mask=mask, causal=causal, scale=None, positions=None)
    n = seen(q, k, mask, causal).sum(-1, keepdim=True).double()
    assert torch.equal(inputs.n().expand_as(n), n)
    assert torch.equal(inputs.q_BHQD, torch.where(n > 0, q, 0.0))


@pytest.mark.parametrize("name", ["softmax", "ssmax", "sink", "entmax15", "relu", "asentmax"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [3, 33], ids=["blocks", "one block"])
def test_autocast_keeps_the_dtype_and_rounds_nothing_inside(
    name: str, dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocked_engine, "BLOCK_ELEMENTS", 4 * 33 * 2 * rows)
    normalizer = attnorm.get(name)
    tensors = Call(queries=33, keys=33, width=16).tensors(dtype)[:3]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attnorm.attention(q, k, v, normalizer, causal=True)

    def under_autocast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return attend(q, k, v)

    actual = outputs_and_gradients(under_autocast, tensors, learned(normalizer))
    expected = outputs_and_gradients(attend, tensors, learned(normalizer))
    assert actual[0].dtype == dtype
    assert all(map(torch.equal, actual, expected))


def test_blocks_without_dropout_draw_no_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked_engine, "BLOCK_ELEMENTS", 16)
    q, k, v = (torch.randn(1, 2, 8, 4) for _ in range(3))
    before = torch.get_rng_state()
    attnorm.attention(q, k, v, "entmax15", engine="blocked")
    assert torch.equal(torch.get_rng_state(), before)


def call(queries: int = 4, keys: int = 6, **options: Any) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, queries, 16, generator=generator)
    k, v = (torch.randn(1, 2, keys, 16, generator=generator) for _ in range(2))
    return replace(validate_inputs(q, k, v, mask=None, causal=False, scale=0.3, positions=None), **options)


@pytest.mark.parametrize("queries", [1, 2, 3, 5])
@pytest.mark.parametrize("keys", [1, 2, 3, 5])
@pytest.mark.parametrize("sink", [None, "softmax1"])
def test_causal_attention_of_few_queries_ends_at_the_last_key(queries: int, keys: int, sink: str | None) -> None:
    inputs, normalizer = call(queries, keys, causal=True), compose("softmax", sink=sink)
    seen = torch.arange(keys) <= torch.arange(queries)[:, None] + keys - queries
    z = 0.3 * inputs.q_BHQD.double() @ inputs.k_BGKD.double().repeat_interleave(2, 1).mT
    e = torch.exp(z).masked_fill(~seen, 0.0)
    weights = e / (e.sum(-1, keepdim=True) + (sink is not None)).clamp(min=1e-300)
    expected = weights @ inputs.v_BGKE.double().repeat_interleave(2, 1)
    found = attnorm.attention(
        inputs.q_BHQD, inputs.k_BGKD, inputs.v_BGKE, normalizer, causal=True, scale=0.3, engine="fused"
    )
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_no_kernel_takes_float64_however_narrow() -> None:
    for width in (1, 16):
        assert not execution.runs_kernels(torch.ones(1, width, dtype=torch.float64))


@pytest.mark.parametrize("engine", ["fused", "triton"])
def test_a_sink_has_one_logit_or_one_for_each_head(engine: str) -> None:
    inputs = call(MIN_QUERIES)
    with pytest.raises(ValueError, match="the sink has logits for 3 heads, but q has 4 heads"):
        attnorm.attention(inputs.q_BHQD, inputs.k_BGKD, inputs.v_BGKE, attnorm.get("sink", heads=3), engine=engine)
