"""Benchmark attention() on CUDA in bfloat16: against softmax on FlashAttention and on cuDNN, torch's own kernels.

Calls are queued several at a time and synchronized once, as in training. Decoding is also timed from a CUDA graph.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attnorm.attention import attention, choose_engine
from attnorm.bench.attention import WAYS, attention_call
from attnorm.bench.results import Ratio
from attnorm.bench.timing import Call, Timed, time_alternating
from attnorm.engines.inputs import validate_inputs
from attnorm.normalizers.contract import Normalizer
from attnorm.normalizers.registry import get

CUDA_SHAPES = ((4, 16, 4096, 64), (2, 16, 8192, 128), (1, 16, 32768, 64))  # batch, heads, length, width
QUICK_CUDA_SHAPE = (1, 2, 512, 64)
QUEUED = 4  # calls per synchronization
Promises = tuple[float | None, float | None]  # the least speed against a rival, forward and with backward
ON_CUDNN: dict[str, Promises] = dict.fromkeys(("softmax", "ssmax", "log_scaled"), (0.9, 0.9))
ON_FLASH: dict[str, Promises] = {
    "softmax": (None, None),
    "ssmax": (None, None),
    "log_scaled": (None, None),
    "sink": (0.7, 0.7),
    "softmax1": (0.7, 0.7),
    "sigmoid": (0.7, 0.7),
    "relu": (0.7, 0.7),
    "softpick": (0.7, 0.7),
    "scale_invariant": (0.7, 0.7),
    "kernel": (0.7, 0.7),
    "adaptive_temperature": (0.45, 0.35),
    "sa_softmax": (0.4, 0.4),
    "stick_breaking": (0.4, 0.4),
    "entmax15": (None, None),
    "sparsemax": (None, None),
    "asentmax": (None, None),
    "kneemax": (None, None),
    "entmax": (None, None),
    "topk": (None, None),
}
CUDA_OPTIONS = {"entmax": {"alpha": 1.3}}  # its default, 1.5, is entmax15
DECODED = ("softmax", "ssmax", "sink", "sigmoid", "relu", "softpick", "scale_invariant", "adaptive_temperature")
DECODED_SHAPE = (32, 32768, 128)  # heads, keys, width
SLOW_ON_CUDA = ("flex", "blocked")  # engines to time at the first shape only: at the others a call would take seconds


def compare_cuda(*, quick: bool = False, notes: list[str]) -> Iterator[Ratio]:
    if not torch.cuda.is_available():
        notes.append("nothing was measured on CUDA: this machine has no CUDA device")
        return
    for number, shape in enumerate((QUICK_CUDA_SHAPE,) if quick else CUDA_SHAPES):
        batch, heads, length, width = shape
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        topic = (
            f"Attention on {torch.cuda.get_device_name()}, bfloat16, causal, batch {batch}, {heads} heads, "
            f"width {width}, L = {length:,}"
        )
        for name, promised in ON_FLASH.items():
            yield from _compare_cuda(name, promised, (q, k, v), topic, quick=quick, slow_engines=number == 0)
    yield from _compare_decoding(quick)


def _compare_decoding(quick: bool) -> Iterator[Ratio]:
    """Compare one query over a long cache with SDPA, on the engine that is chosen and on our kernels."""
    heads, keys, width = DECODED_SHAPE
    q, k, v = (
        torch.randn((1, heads, length, width), device="cuda", dtype=torch.bfloat16) for length in (1, keys, keys)
    )
    topic = (
        f"Decoding on {torch.cuda.get_device_name()}, bfloat16, 1 query, batch 1, {heads} heads, width {width}, "
        f"{keys:,} keys"
    )
    inputs = validate_inputs(q, k, v, mask=None, causal=True, scale=None, positions=None)
    for name in DECODED:
        normalizer = get(name).cuda().requires_grad_(False)
        assert isinstance(normalizer, Normalizer)
        for engine in dict.fromkeys((choose_engine(inputs, normalizer), "triton")):
            ours = partial(attention, normalizer=normalizer, causal=True, engine=engine)
            for way, made in DECODED_WAYS.items():
                timed = time_alternating(
                    *(made(attend, (q, k, v)) for attend in (ours, _decoded)), rounds=1 if quick else 5
                )
                timed = Timed(timed.ours_ms / QUEUED, timed.theirs_ms / QUEUED, timed.speedup)
                what = f"{name} ({engine}), {way}"
                yield Ratio(topic=topic, what=what, against="torch SDPA", target=1 / 1.5, **asdict(timed))


def _called(attend: Callable[..., Tensor], tensors: Sequence[Tensor]) -> Call:
    return attention_call(attend, tensors, backward=False, queued=QUEUED)


def _replayed(attend: Callable[..., Tensor], tensors: Sequence[Tensor]) -> Call:
    """Return a call of `attend` from a CUDA graph, as servers decode: without the launches by Python."""
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        attend(*tensors)  # compiles the kernels, which cannot be done while the graph is recorded
        with torch.cuda.graph(graph):
            for _ in range(QUEUED):
                attend(*tensors)

    def call() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return call


DECODED_WAYS = {"called": _called, "from a CUDA graph": _replayed}


def _decoded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v)


def _compare_cuda(
    name: str, promised: Promises, tensors: tuple[Tensor, ...], topic: str,
    *, quick: bool, slow_engines: bool,
) -> Iterator[Ratio]:  # fmt: skip
    options = CUDA_OPTIONS.get(name, {})
    normalizer = get(name, **options).cuda()
    assert isinstance(normalizer, Normalizer)
    inputs = validate_inputs(*tensors, mask=None, causal=True, scale=None, positions=None)
    engine = choose_engine(inputs, normalizer)
    if engine in SLOW_ON_CUDA and not slow_engines:
        return
    ours = partial(attention, normalizer=normalizer, causal=True)
    for against, theirs, promises in _rivals(name, promised):
        for (way, backward), target in zip(WAYS.items(), promises, strict=True):
            calls = [attention_call(attend, tensors, backward=backward, queued=QUEUED) for attend in (ours, theirs)]
            timed = time_alternating(*calls, rounds=1 if quick else 3)
            timed = Timed(timed.ours_ms / QUEUED, timed.theirs_ms / QUEUED, timed.speedup)
            label = " ".join([name, *(f"{key}={value}" for key, value in options.items())])
            what = f"{label} ({engine}), {way}"
            yield Ratio(topic=topic, what=what, against=against, target=target, **asdict(timed))


def _rivals(name: str, promised: Promises) -> Iterator[tuple[str, Callable[..., Tensor], Promises]]:
    yield "flash softmax", partial(_softmax_on, SDPBackend.FLASH_ATTENTION), promised
    yield "cuDNN softmax", partial(_softmax_on, SDPBackend.CUDNN_ATTENTION), ON_CUDNN.get(name, (None, None))
    if name == "entmax15" and find_spec("adasplash") is not None:
        yield "adasplash", import_module("adasplash").adasplash, (1.3, 1.2)


def _softmax_on(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, is_causal=True)
