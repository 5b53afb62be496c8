"""Half precision at large logits on CUDA: no engine errs more than FlashAttention may.

`auto` errs by a rounding or two, unless it has chosen to round q.

FlashAttention's rule: at most twice the error of the plain computation in the same dtype, both against float64.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import attnorm
from attnorm.attention import _computation, choose_engine
from attnorm.engines.fused import is_worth_rounding
from attnorm.engines.inputs import validate_inputs
from attnorm.normalizers.contract import Normalizer
from tests.cuda.on_device import DEVICE, NEEDS_DEVICE

pytestmark = NEEDS_DEVICE

DEVIATION = 4.0
KEYS = 64
# Factors of ordinary size: at temperature 0.01 the rounding of engine="fused" passes twice the plain error.
NAMES: dict[str, dict[str, Any]] = {
    "ssmax": {"s": 0.43},
    "softmax": {"temperature": 0.3},
    "log_scaled": {"train_length": 8},
    "adaptive_temperature": {},
    "sink": {},
    "entmax15": {},
    "asentmax": {"gamma": 1.0},
}
RESCALED = ["ssmax", "softmax", "log_scaled", "adaptive_temperature"]
every_dtype = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


def draw(dtype: torch.dtype, queries: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, rows, 64, generator=generator) for rows in (queries, KEYS, KEYS))
    return (DEVIATION * q).to(DEVICE, dtype), (DEVIATION * k).to(DEVICE, dtype), v.to(DEVICE, dtype)


def made(name: str) -> Normalizer:
    found = attnorm.get(name, **NAMES[name])
    assert isinstance(found, Normalizer)
    return found.to(DEVICE)


def exactly(q: Tensor, k: Tensor, v: Tensor, one: Normalizer) -> Tensor:
    return attnorm.attention(*(t.double() for t in (q, k, v)), one, causal=True, engine="blocked")


def plainly(q: Tensor, k: Tensor, v: Tensor, one: Normalizer) -> Tensor:
    logits = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
    rows, keys = logits.shape[-2:]
    causal = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(keys - rows)
    return attnorm.normalize(logits, one, causal) @ v


def largest(error: Tensor) -> float:
    return error.abs().max().item()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("queries", [1, KEYS])
@every_dtype
@torch.no_grad()
def test_large_logits_on_every_engine(name: str, queries: int, dtype: torch.dtype) -> None:
    q, k, v = draw(dtype, queries)
    one = made(name)
    exact = exactly(q, k, v, one)
    rounding = torch.finfo(dtype).eps * largest(exact)
    plain = largest(plainly(q, k, v, one).double() - exact)
    inputs = validate_inputs(q, k, v, mask=None, causal=True, scale=None, positions=None)
    for engine in ("fused", "triton", "sparse", "blocked"):
        if _computation(engine, inputs, one) is not None:
            error = largest(attnorm.attention(q, k, v, one, causal=True, engine=engine).double() - exact)
            assert error <= 2 * max(plain, rounding), engine
    error = largest(attnorm.attention(q, k, v, one, causal=True).double() - exact)
    most = 2 * max(plain, rounding) if is_worth_rounding(inputs, one) else 4 * rounding
    assert error <= most, choose_engine(inputs, one)


@pytest.mark.parametrize("name", RESCALED)
@pytest.mark.parametrize("queries", [1, KEYS])
@every_dtype
@torch.no_grad()
def test_weights_that_dropout_keeps_have_the_error_of_one_rounding(name: str, queries: int, dtype: torch.dtype) -> None:
    """The values are one unit vector per key, so that the output shows each weight."""
    q, k, _ = draw(dtype, queries)
    v = torch.eye(KEYS, dtype=dtype, device=DEVICE).expand(1, 4, KEYS, KEYS).contiguous()
    one = made(name)
    torch.manual_seed(0)
    found = attnorm.attention(q, k, v, one, causal=True, dropout_p=0.5).double()
    exact = 2 * exactly(q, k, v, one)
    kept = found != 0
    assert kept.any()
    assert largest((found - exact)[kept]) <= 4 * torch.finfo(dtype).eps
    if queries > 1:
        assert (~kept[exact > 0.2]).any()
