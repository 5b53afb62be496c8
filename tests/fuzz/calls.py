"""Random calls of attention on every engine against a naive formula in float64: outputs, gradients, compiled code.

A few examples run with every commit. Many: HYPOTHESIS_PROFILE=explore pytest -m nightly tests/fuzz/test_engines.py
"""

import math
import os
from dataclasses import dataclass
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import attnorm
from attnorm.attention import Engine
from attnorm.engines import blocked as blocked_engine
from attnorm.normalizers import Normalizer

pytestmark = pytest.mark.as_installed

EXAMPLES = int(os.environ.get("ATTNORM_FUZZ_EXAMPLES", "2000"))

NAMES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax at temperature 0.3": {"temperature": 0.3},
    "ssmax": {"s": 0.43},
    "log_scaled": {"train_length": 3},
    "sink": {"logit": 0.7},
    "softmax1": {},
    "adaptive_temperature": {},
    "entmax15": {},
    "sparsemax": {},
    "kneemax": {},
    "asentmax": {},
    "sigmoid": {},
    "relu": {},
    "softpick": {},
    "stick_breaking": {},
    "topk": {"k": 3},
    "local": {"window": 3},
    "scale_invariant": {},
}
# A key that falls just below a cut has weight 0, just above it not: rounding decides, and no tolerance covers it.
DISCONTINUOUS = ("topk", "adaptive_temperature")
LAYOUTS = ("contiguous", "transposed", "every second", "expanded", "packed")
MASKS = ("none", "padding", "rows", "heads", "one dimension", "queries", "nothing seen")
MODES = ("eval", "train", "compile")


@dataclass(frozen=True)
class Example:
    name: str
    engine: Engine
    dtype: torch.dtype
    batch: int
    groups: int
    key_heads: int
    queries: int
    keys: int
    width: int
    value_width: int
    layout: str
    mask: str
    causal: bool
    mode: str
    deviation: float
    seed: int


examples = st.builds(
    Example,
    name=st.sampled_from(list(NAMES)),
    engine=st.sampled_from(["auto", "fused", "blocked", "flex"]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]),
    batch=st.integers(0, 3),
    groups=st.integers(1, 3),
    key_heads=st.integers(1, 3),
    queries=st.sampled_from([0, 1, 2, 5, 7, 13, 33]),
    keys=st.sampled_from([1, 2, 5, 7, 13, 31, 67]),
    width=st.sampled_from([1, 3, 8, 16, 17]),
    value_width=st.sampled_from([1, 4, 16, 19]),
    layout=st.sampled_from(LAYOUTS),
    mask=st.sampled_from(MASKS),
    causal=st.booleans(),
    mode=st.sampled_from(MODES),
    deviation=st.sampled_from([0.1, 1.0, 3.0]),
    seed=st.integers(0, 2**20),
)


def laid_out(t: Tensor, layout: str) -> Tensor:
    """The same numbers with other strides; an expanded tensor has one batch entry's numbers in all."""
    if layout == "transposed":
        return t.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "every second":
        return torch.stack([t, torch.full_like(t, math.nan)], -1).flatten(-2)[..., ::2]
    if layout == "expanded" and t.shape[0] > 0:
        return t[:1].expand(t.shape)
    if layout == "packed":
        return torch.cat([torch.full_like(t, math.nan), t], -1)[..., t.shape[-1] :]
    return t


def mask_of(example: Example, generator: torch.Generator) -> Tensor | None:
    heads = example.groups * example.key_heads
    shapes: dict[str, tuple[int, ...]] = {
        "padding": (example.batch, 1, 1, example.keys),
        "rows": (example.queries, example.keys),
        "heads": (example.batch, heads, example.queries, example.keys),
        "one dimension": (example.keys,),
        "queries": (example.queries, 1),
        "nothing seen": (1, 1),
    }
    if example.mask == "none":
        return None
    share = 0.0 if example.mask == "nothing seen" else 0.7
    return torch.rand(shapes[example.mask], generator=generator) < share


def naive(normalizer: Normalizer, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """Whole matrices in float64. Hidden keys are taken out of the products first: nothing of them may count."""
    groups = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
    logits = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    seen = torch.ones_like(logits, dtype=torch.bool)
    if mask is not None:
        seen = seen & mask
    if causal:
        seen = seen.tril(k.shape[-2] - q.shape[-2])
    return attnorm.normalize(logits, normalizer, seen) @ v


def tolerance(example: Example, exact: Tensor, logits: float) -> float:
    """Of the output's rounding, and of logits that are rounded once as the sums of products they are."""
    working = torch.float64 if example.dtype == torch.float64 else torch.float32
    size = max(1.0, exact.abs().max().item()) if exact.numel() else 1.0
    inner = 64 * torch.finfo(working).eps * (1 + logits) * math.sqrt(example.width) * 8
    # Plain softmax in half precision is torch's own kernel, which rounds weights to the dtype.
    return size * (8 * torch.finfo(example.dtype).eps + inner)


def check(example: Example) -> None:
    generator = torch.Generator().manual_seed(example.seed)
    heads = example.groups * example.key_heads
    sizes = (
        (example.batch, heads, example.queries, example.width),
        (example.batch, example.key_heads, example.keys, example.width),
        (example.batch, example.key_heads, example.keys, example.value_width),
    )
    made = [torch.randn(size, generator=generator) for size in sizes]
    made = [example.deviation * made[0], example.deviation * made[1], made[2]]
    tensors = [laid_out(t.to(example.dtype), example.layout) for t in made]
    mask = mask_of(example, generator)
    normalizer = attnorm.get(example.name.split(" ")[0], **NAMES[example.name])
    assert isinstance(normalizer, Normalizer)
    trains = example.mode == "train"
    doubles = [t.detach().double().contiguous().requires_grad_(trains) for t in tensors]
    exact = naive(normalizer, *doubles, mask, example.causal)
    logits = max(t.abs().max().item() if t.numel() else 0.0 for t in made[:2]) ** 2

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attnorm.attention(q, k, v, normalizer, mask=mask, causal=example.causal, engine=example.engine)

    call = attend
    if example.mode == "compile":
        torch._dynamo.reset()
        call = torch.compile(attend, backend="eager")
    given = [t.detach().requires_grad_(trains) for t in tensors]
    try:
        with torch.set_grad_enabled(trains):
            found = call(*given)
            grads = torch.autograd.grad(found.sum(), given, allow_unused=True, materialize_grads=True) if trains else ()
    except (ValueError, NotImplementedError, torch._dynamo.exc.Unsupported):
        if example.engine not in ("fused", "flex"):
            raise
        hypothesis.event(f"{example.engine} does not take the call")
        return
    hypothesis.event(f"{example.engine} ran")
    assert found.dtype == example.dtype
    assert found.shape == exact.shape
    assert found.isfinite().all()
    if example.name in DISCONTINUOUS and example.dtype != torch.float64:
        return
    allowed = tolerance(example, exact, logits)
    assert found.numel() == 0 or (found.double() - exact).abs().max().item() <= allowed
    if example.dtype != torch.float64:
        assert all(g.isfinite().all() for g in grads)
        return
    if trains:
        wanted = torch.autograd.grad(exact.sum(), doubles, allow_unused=True, materialize_grads=True)
        for got, expected in zip(grads, wanted, strict=True):
            size = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
            torch.testing.assert_close(got, expected, atol=1e-9 * size, rtol=0)


@pytest.fixture
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked_engine, "BLOCK_ELEMENTS", 2**9)


@pytest.mark.usefixtures("_small_blocks")
@hypothesis.settings(max_examples=60, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(examples.filter(lambda example: example.mode != "compile"))
def test_every_engine_equals_the_naive_formula_or_says_why_not(example: Example) -> None:
    check(example)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("_small_blocks")
@hypothesis.settings(max_examples=EXAMPLES, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(examples)
def test_every_engine_equals_the_naive_formula_on_many_calls(example: Example) -> None:
    check(example)
