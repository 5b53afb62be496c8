"""Random calls of attention on every engine, compared with a naive formula in float64: outputs and gradients."""

import importlib.metadata
import importlib.util
import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from torch import Tensor

import attnorm
from attnorm.attention import Engine
from attnorm.normalizers import Normalizer

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
# The derivative jumps where a key enters the support or a logit crosses 0: rounding decides there too.
DISCONTINUOUS_GRADIENT = (*DISCONTINUOUS, "sparsemax", "kneemax", "relu", "softpick")
# Which of them have kernels, so that few examples are spent on calls that an engine does not support.
ON_KERNELS: dict[str, tuple[str, ...]] = {
    "triton": (
        "softmax", "softmax at temperature 0.3", "ssmax", "log_scaled", "sink", "softmax1", "adaptive_temperature",
        "sigmoid", "relu", "softpick", "local", "scale_invariant",
    ),
    "sparse": ("entmax15", "sparsemax", "asentmax"),
}  # fmt: skip


def _interprets() -> bool:
    """Whether kernels run here: on a GPU, or in an interpreter that knows this numpy."""
    if importlib.util.find_spec("triton") is None:
        return False
    version = importlib.metadata.version("triton").split(".")
    return torch.cuda.is_available() or tuple(map(int, version[:2])) >= (3, 7)


ENGINES: tuple[Engine, ...] = ("auto", "fused", "blocked", *(("sparse", "triton") if _interprets() else ()))
Outcome = Literal["ran", "not supported"]
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


@st.composite
def examples(draw: st.DrawFn) -> Example:
    engine = draw(st.sampled_from(ENGINES))
    kernels = engine in ON_KERNELS
    float_types = [torch.float32, torch.float16, torch.bfloat16] + ([] if kernels else [torch.float64])
    return Example(
        name=draw(st.sampled_from(ON_KERNELS.get(engine, tuple(NAMES)))),
        engine=engine,
        dtype=draw(st.sampled_from(float_types)),
        batch=draw(st.integers(0, 2 if kernels else 3)),
        groups=draw(st.integers(1, 3)),
        key_heads=draw(st.integers(1, 2 if kernels else 3)),
        queries=draw(st.sampled_from([16, 17, 33] if kernels else [0, 1, 2, 5, 7, 13, 33])),
        keys=draw(st.sampled_from([1, 2, 5, 7, 13, 31, 67])),
        width=draw(st.sampled_from([1, 3, 8, 16, 17])),
        value_width=draw(st.sampled_from([1, 4, 16, 19])),
        layout=draw(st.sampled_from(LAYOUTS)),
        mask=draw(st.sampled_from(MASKS)),
        causal=draw(st.booleans()),
        mode=draw(st.sampled_from(MODES)),
        deviation=draw(st.sampled_from([0.1, 1.0, 3.0])),
        seed=draw(st.integers(0, 2**20)),
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


def check(example: Example) -> Outcome:
    """Compare one call with the naive formula; raise AssertionError where they differ."""
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
    direction = torch.randn(exact.shape, generator=generator).to(example.dtype)
    logits = max(t.abs().max().item() if t.numel() else 0.0 for t in made[:2]) ** 2

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attnorm.attention(q, k, v, normalizer, mask=mask, causal=example.causal, engine=example.engine)

    call = attend
    if example.mode == "compile":
        torch._dynamo.reset()
        call = torch.compile(attend, backend="eager")
    given = [t.detach().requires_grad_(trains) for t in tensors]
    grads: tuple[Tensor, ...] = ()
    try:
        with torch.set_grad_enabled(trains):
            found = call(*given)
            if trains:
                grads = torch.autograd.grad(found, given, direction, allow_unused=True, materialize_grads=True)
    except (ValueError, NotImplementedError, torch._dynamo.exc.Unsupported):
        if example.engine in ("auto", "blocked"):
            raise
        return "not supported"
    assert found.dtype == example.dtype
    assert found.shape == exact.shape
    assert found.isfinite().all()
    assert all(g.isfinite().all() for g in grads)
    half = example.dtype in (torch.float16, torch.bfloat16)
    if example.name in DISCONTINUOUS and example.dtype != torch.float64:
        return "ran"
    allowed = tolerance(example, exact, logits)
    assert found.numel() == 0 or (found.double() - exact).abs().max().item() <= allowed
    if trains and not half and not (example.dtype == torch.float32 and example.name in DISCONTINUOUS_GRADIENT):
        wanted = torch.autograd.grad(exact, doubles, direction.double(), allow_unused=True, materialize_grads=True)
        for name, got, expected in zip("qkv", grads, wanted, strict=True):
            size = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
            # A gradient adds up to `rows` products, each with the rounding of the logits in it.
            rows = math.sqrt(max(1, example.queries * example.groups, example.keys))
            atol = 1e-9 * size if example.dtype == torch.float64 else tolerance(example, expected, logits) * rows
            torch.testing.assert_close(
                got.double(), expected, atol=atol, rtol=0, msg=lambda words, of=name: f"gradient of {of}: {words}"
            )
    return "ran"
