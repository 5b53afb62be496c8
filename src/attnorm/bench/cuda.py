"""Benchmark attention() on CUDA in bfloat16 against torch SDPA and the dense form of the same normalizer."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attnorm.attention import attention
from attnorm.bench.attention import dense
from attnorm.bench.results import Ratio
from attnorm.bench.timing import Call, time_alternating
from attnorm.normalizers.contract import Normalizer
from attnorm.normalizers.registry import get

BATCH, HEADS, WIDTH = 2, 12, 64
FUSED = ("softmax", "ssmax", "log_scaled", "sink", "adaptive_temperature")
FLEX = ("sigmoid", "relu", "softpick", "sa_softmax", "kernel", "scale_invariant")
SPARSE = ("entmax15", "sparsemax", "asentmax")
BLOCKED = ("kneemax",)


def compare_cuda(*, quick: bool = False, notes: list[str]) -> Iterator[Ratio]:
    if not torch.cuda.is_available():
        notes.append("nothing was measured on CUDA: this machine has no CUDA device")
        return
    length = 512 if quick else 4096
    q, k, v = (torch.randn(BATCH, HEADS, length, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    topic = (
        f"Attention on {torch.cuda.get_device_name()}, bfloat16, causal, "
        f"batch {BATCH}, {HEADS} heads, width {WIDTH}, L = {length:,}"
    )
    for engine, names in (("SDPA", FUSED), ("FlexAttention", FLEX), ("our kernel", SPARSE), ("blocks", BLOCKED)):
        for name in names:
            normalizer = get(name)
            assert isinstance(normalizer, Normalizer)
            ours = partial(attention, normalizer=normalizer.cuda(), causal=True)
            others: dict[str, Callable[..., Tensor]] = {
                "torch SDPA": partial(scaled_dot_product_attention, is_causal=True),
                "its dense form": partial(dense, normalizer=normalizer, causal=True),
            }
            for against, theirs in others.items():
                for way, run in (("forward", _forward), ("forward + backward", _forward_and_backward)):
                    timed = time_alternating(run(ours, q, k, v), run(theirs, q, k, v), rounds=1 if quick else 7)
                    yield Ratio(topic=topic, what=f"{name} ({engine}), {way}", against=against, **asdict(timed))


def _forward(attend: Callable[..., Tensor], *tensors: Tensor) -> Call:
    def call() -> None:
        with torch.no_grad():
            attend(*tensors)
        torch.cuda.synchronize()

    return call


def _forward_and_backward(attend: Callable[..., Tensor], *tensors: Tensor) -> Call:
    leaves = [t.detach().requires_grad_() for t in tensors]
    grad = torch.ones_like(tensors[0])

    def call() -> None:
        torch.autograd.grad(attend(*leaves), leaves, grad)
        torch.cuda.synchronize()

    return call
