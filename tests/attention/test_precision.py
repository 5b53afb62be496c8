"""Errors in half and single precision are at most twice those of the plain computation in the same dtype.

In double precision nothing is lost in parameters that have single precision, as those of a usual module.

Both are measured against float64 on the same rounded inputs. Plain: logits, weights and output as whole arrays of the
dtype, the weights computed in float32, as attention is usually written. One allowance: the backward pass of torch's
fused kernel in float32 makes up to four times the plain error (root mean square), and we cannot repair it.
"""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import attnorm
from attnorm.attention import ENGINES, Engine
from attnorm.engines import fused
from attnorm.engines.inputs import validate_inputs
from attnorm.normalizers.registry import BUILT_IN
from tests.attention import reference
from tests.attention.calls import Call, assert_all_close, calling, learned, outputs_and_gradients
from tests.attention.reference import CASES, HEADS, TYPICAL, WIDTH, Case

every_case = pytest.mark.parametrize("case", TYPICAL, ids=lambda case: case.id)

LONG = Call(batch=1, queries=40, keys=40, width=32, value_width=32)


def plain(case: Case, normalizer: attnorm.Normalizer, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    logits = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
    causal = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
    states = hidden if case.hidden_width else None
    return attnorm.normalize(logits, normalizer, causal, hidden_states=states) @ v


def runs_fused(normalizer: attnorm.Normalizer, q: Tensor, k: Tensor, v: Tensor) -> bool:
    inputs = validate_inputs(q.requires_grad_(), k, v, mask=None, causal=True, scale=None, positions=None)
    return fused.applies(inputs, normalizer)


def largest(error: Tensor) -> float:
    return error.abs().max().item()


def root_mean_square(error: Tensor) -> float:
    return error.square().mean().sqrt().item()


@every_case
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.every_second("case", first=1)
def test_errors_are_at_most_twice_those_of_the_plain_computation(
    case: Case, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnorm.engines.blocked.BLOCK_ELEMENTS", HEADS * 40 * 7)
    normalizer = case.make().float()
    parameters = learned(normalizer)
    tensors = LONG.tensors(dtype)
    attend = calling(case, normalizer, {"causal": True})
    exact = outputs_and_gradients(attend, [t.double() for t in tensors], parameters)
    ours = outputs_and_gradients(attend, tensors, parameters)
    naive = outputs_and_gradients(lambda *t: plain(case, normalizer, *t), tensors, parameters)
    our_errors, naive_errors = (
        [got.double() - wanted for got, wanted in zip(results, exact, strict=True)] for results in (ours, naive)
    )
    assert largest(our_errors[0]) <= 2 * largest(naive_errors[0])
    factor = 4 if dtype == torch.float32 and runs_fused(normalizer, *tensors[:3]) else 2
    for which in (1, 2, 3):
        assert root_mean_square(our_errors[which]) <= factor * root_mean_square(naive_errors[which])
    for error, naive_error, size in zip(our_errors[5:], naive_errors[5:], exact[5:], strict=True):
        # A single number, where the plain error may be 0 by chance.
        rounding = max(1e-5, 2 * torch.finfo(dtype).eps) * max(1.0, largest(size))
        assert largest(error) <= 2 * largest(naive_error) + rounding


LARGE = {
    "ssmax": {"s": 0.43},
    "softmax": {"temperature": 0.01},
    "log_scaled": {"train_length": 8},
    "adaptive_temperature": {},
    "sink": {},
    "entmax15": {},
    "asentmax": {"gamma": 1.0},
}


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("deviation", [1.0, 4.0])
@torch.no_grad()
def test_large_logits_in_half_precision_lose_one_rounding_of_the_output(
    name: str, dtype: torch.dtype, deviation: float
) -> None:
    """Every engine that takes the call; FlashAttention's rule holds, and so does the stricter one of float32 inside."""
    q, k, v = (torch.randn(1, HEADS, 61, 64) for _ in range(3))
    q, k, v = (deviation * q).to(dtype), (deviation * k).to(dtype), v.to(dtype)
    case = Case(name, LARGE[name], lambda row: row.z)
    normalizer = attnorm.get(name, **LARGE[name])
    assert isinstance(normalizer, attnorm.Normalizer)
    exact = attnorm.attention(*(t.double() for t in (q, k, v)), normalizer, causal=True, engine="blocked")
    naive = largest(plain(case, normalizer, q, k, v, v).double() - exact)
    engines = ["auto", "blocked", *(["fused"] if runs_fused(normalizer, q, k, v) else [])]
    for engine in engines:
        error = largest(attnorm.attention(q, k, v, normalizer, causal=True, engine=engine).double() - exact)
        assert error <= 2 * naive, engine
        assert error <= 2 * torch.finfo(dtype).eps * largest(exact), engine


@pytest.mark.parametrize("name", ["softmax", "sink"])
@pytest.mark.parametrize("engine", ["fused", "blocked"])
@torch.no_grad()
def test_factors_past_the_end_of_float16_stay_finite(name: str, engine: Engine) -> None:
    q, k, v = ((100 * torch.randn(1, 2, 9, 8)).half() for _ in range(3))
    normalizer = attnorm.compose(
        scale=attnorm.get("softmax", temperature=1e-4), sink=None if name == "softmax" else name
    )
    found = attnorm.attention(q, k, v, normalizer, engine=engine)
    exact = attnorm.attention(*(t.double() for t in (q, k, v)), normalizer, engine="blocked")
    torch.testing.assert_close(found.double(), exact, rtol=2 * torch.finfo(torch.float16).eps, atol=0)


LEARNING = [case for case in CASES if learned(case.make())]
# Options with which a mechanism has parameters, and how many heads the keys and the values have.
MECHANISMS: list[tuple[str, dict[str, Any], int, int]] = [
    ("differential", {"width": 6}, HEADS, HEADS // 2),
    ("differential_v2", {"heads": HEADS // 2}, HEADS // 2, HEADS // 2),
    ("differential_v2", {"heads": HEADS // 2, "width": WIDTH}, HEADS // 2, HEADS // 2),
    ("tda", {"heads": HEADS // 2}, HEADS, HEADS // 2),
    ("forget", {"heads": HEADS}, HEADS, HEADS),
    ("forget", {"heads": HEADS, "width": WIDTH}, HEADS, HEADS),
    ("soft", {"landmarks": 3, "learned": 6, "heads": HEADS}, HEADS, HEADS),
    ("laser", {"normalizer": "ssmax"}, HEADS, HEADS),
]
# The scale 1/sqrt(6) is no power of two, so that a division by it rounds.
DOUBLE = {
    "causal": Call(queries=7, keys=7, width=6, options={"causal": True}),
    "one query": Call(queries=1, keys=7, width=6, options={"causal": True}),
}
# Far below a rounding of float32, and above what definitions by bisection leave in float64.
NO_DIGIT_LOST = torch.finfo(torch.float32).eps / 1000


def in_both_dtypes(module: torch.nn.Module) -> tuple[Any, Any]:
    """The module with random parameters in float32, and with the same values in float64."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    single = module.float()
    return single, copy.deepcopy(single).double()


def test_everything_that_learns_is_called_in_double_precision() -> None:
    tried = {case.name for case in LEARNING} | {name for name, *_ in MECHANISMS}
    assert {name for name in BUILT_IN if learned(attnorm.get(name))} <= tried


@pytest.mark.parametrize("case", LEARNING, ids=lambda case: case.id)
@pytest.mark.parametrize("name", DOUBLE)
def test_float64_calls_lose_no_digits_in_float32_parameters(case: Case, name: str) -> None:
    call = DOUBLE[name]
    normalizer, exact = in_both_dtypes(case.make())
    tensors, ran = call.tensors(), set()

    def definition(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        states = hidden if case.hidden_width else None
        return reference.attention(case, exact, q, k, v, **call.options, hidden_states=states)

    expected = outputs_and_gradients(definition, tensors)
    for engine in ENGINES:
        try:
            found = outputs_and_gradients(calling(case, normalizer, call.options, engine=engine), tensors)
        except ValueError:  # the engine does not take this call
            continue
        assert_all_close(found, expected, atol=NO_DIGIT_LOST)
        ran.add(engine)
    assert {"auto", "blocked"} <= ran
    q, k, _, hidden = tensors
    states = hidden if case.hidden_width else None
    options = {**call.options, "hidden_states": states}
    ours, theirs = (attnorm.attention_statistics(q, k, n, **options).jacobian_norm for n in (normalizer, exact))
    torch.testing.assert_close(ours, theirs, rtol=NO_DIGIT_LOST, atol=NO_DIGIT_LOST, equal_nan=True)


@pytest.mark.parametrize(("name", "options", "key_heads", "value_heads"), MECHANISMS, ids=lambda value: str(value))
def test_float64_mechanisms_lose_no_digits_in_float32_parameters(
    name: str, options: dict[str, Any], key_heads: int, value_heads: int
) -> None:
    mechanism, exact = in_both_dtypes(attnorm.get(name, **options))
    q, k, v, hidden = DOUBLE["causal"].tensors()
    tensors = [q, k[:, :key_heads], v[:, :value_heads], hidden]

    def calling_it(mechanism: Any) -> Any:
        def call(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
            states = hidden if mechanism.reads_hidden_states else None
            return attnorm.attention(q, k, v, mechanism, causal=True, hidden_states=states)

        return call

    found, expected = (outputs_and_gradients(calling_it(each), tensors) for each in (mechanism, exact))
    assert_all_close(found, expected, atol=NO_DIGIT_LOST)
