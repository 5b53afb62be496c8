"""Benchmark attention() on CUDA in bfloat16 against softmax on cuDNN and FlashAttention, torch's own kernels.

Calls are queued several at a time and waited for once, as in training: the time of a call on the host does not count.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attnorm.attention import attention, choose_engine
from attnorm.bench.results import Ratio
from attnorm.bench.timing import Call, Timed, time_alternating
from attnorm.engines.inputs import validate_inputs
from attnorm.normalizers.contract import Normalizer
from attnorm.normalizers.registry import get

SHAPES = ((4, 16, 4096, 64), (2, 16, 8192, 128), (1, 16, 32768, 64))  # batch, heads, length, width
QUICK_SHAPE = (1, 2, 512, 64)
QUEUED = 4  # calls per wait
RIVALS = {"flash softmax": SDPBackend.FLASH_ATTENTION, "cuDNN softmax": SDPBackend.CUDNN_ATTENTION}
# Name, and the least speed promised against the first rival, forward and with backward; None: no promise.
NORMALIZERS: dict[str, tuple[float | None, float | None]] = {
    "softmax": (None, None),
    "ssmax": (None, None),
    "log_scaled": (None, None),
    "sink": (0.7, 0.7),
    "softmax1": (0.7, 0.7),
    "sigmoid": (0.7, 0.7),
    "relu": (0.7, 0.7),
    "softpick": (0.7, 0.7),
    "scale_invariant": (0.7, 0.7),
    "kernel": (None, None),
    "adaptive_temperature": (0.45, 0.35),
    "entmax15": (None, None),
    "sparsemax": (None, None),
    "asentmax": (None, None),
}
# Without a kernel of their own yet: at one short shape, or a single call would take seconds.
SLOW = ("sa_softmax", "stick_breaking", "topk", "kneemax")


def compare_cuda(*, quick: bool = False, notes: list[str]) -> Iterator[Ratio]:
    if not torch.cuda.is_available():
        notes.append("nothing was measured on CUDA: this machine has no CUDA device")
        return
    for number, shape in enumerate((QUICK_SHAPE,) if quick else SHAPES):
        batch, heads, length, width = shape
        q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        topic = (
            f"Attention on {torch.cuda.get_device_name()}, bfloat16, causal, batch {batch}, {heads} heads, "
            f"width {width}, L = {length:,}"
        )
        names = {**NORMALIZERS, **(dict.fromkeys(SLOW, (None, None)) if number == 0 else {})}
        for name, promised in names.items():
            yield from _compare(name, promised, (q, k, v), topic, quick)


def _compare(
    name: str, promised: tuple[float | None, float | None], tensors: tuple[Tensor, ...], topic: str, quick: bool
) -> Iterator[Ratio]:
    normalizer = get(name).cuda()
    assert isinstance(normalizer, Normalizer)
    inputs = validate_inputs(*tensors, mask=None, causal=True, scale=None, positions=None)
    engine = choose_engine(inputs, normalizer)
    ours = partial(attention, normalizer=normalizer, causal=True)
    for rank, (against, backend) in enumerate(RIVALS.items()):
        theirs = partial(_softmax_on, backend)
        for way, run, target in zip(
            ("forward", "forward + backward"), (_forward, _forward_and_backward), promised, strict=True
        ):
            timed = time_alternating(run(ours, *tensors), run(theirs, *tensors), rounds=1 if quick else 3)
            timed = Timed(timed.ours_ms / QUEUED, timed.theirs_ms / QUEUED, timed.speedup)
            what = f"{name} ({engine}), {way}"
            yield Ratio(topic=topic, what=what, against=against, target=None if rank else target, **asdict(timed))


def _softmax_on(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, is_causal=True)


def _forward(attend: Callable[..., Tensor], *tensors: Tensor) -> Call:
    def call() -> None:
        with torch.no_grad():
            for _ in range(QUEUED):
                attend(*tensors)
        torch.cuda.synchronize()

    return call


def _forward_and_backward(attend: Callable[..., Tensor], *tensors: Tensor) -> Call:
    leaves = [t.detach().requires_grad_() for t in tensors]
    grad = torch.ones_like(tensors[0])

    def call() -> None:
        for _ in range(QUEUED):
            torch.autograd.grad(attend(*leaves), leaves, grad)
        torch.cuda.synchronize()

    return call
