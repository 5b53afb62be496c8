"""Benchmark attention(): time against torch SDPA and dense forms, and peak memory."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attnorm.attention import attention
from attnorm.engines import fused
from attnorm.engines.dense import dense
from attnorm.engines.inputs import validate_inputs
from attnorm.normalizers.adaptive_temperature import MIN_ENTROPY, PRINTED
from attnorm.normalizers.contract import Normalizer
from attnorm.normalizers.registry import available, get
from attnorm_lab.bench.promises import LIMITS, SPEEDUPS
from attnorm_lab.bench.results import Result
from attnorm_lab.bench.timing import MEGABYTE, RESET, Bench, Call, in_new_process, peak_above

WIDTH = 64
WAYS = {"forward": False, "forward + backward": True}  # whether with backward
MEMORY_HEADS = 4
SDPA = "torch SDPA"


@dataclass(frozen=True)
class AttentionCase:
    """One shape of attention, batch 1 and width 64."""

    length: int
    causal: bool
    heads: int = 8
    key_heads: int = 8

    def __str__(self) -> str:
        groups = "" if self.key_heads == self.heads else f", {self.key_heads} key head{'s' * (self.key_heads > 1)}"
        return f"L = {self.length:,}{', causal' if self.causal else ''}{groups}"

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        heads = (self.heads, self.key_heads, self.key_heads)
        q, k, v = (torch.randn(1, count, self.length, WIDTH, generator=generator) for count in heads)
        return q, k, v


FUSED_CASES = [
    *(AttentionCase(length, causal) for length in (1024, 2048, 4096) for causal in (False, True)),
    AttentionCase(2048, True, key_heads=2),
]


def compare_attention(bench: Bench) -> Iterator[Result]:
    """Compare fused normalizers with SDPA, adaptive temperature also with its eager form, the others with dense."""
    cases = [AttentionCase(256, True, heads=2, key_heads=1)] if bench.quick else FUSED_CASES
    for name in ("softmax", "ssmax", "log_scaled", "softmax1", "sink"):
        for case in cases:
            yield from _compare(bench, "fused kernels", name, case, SDPA, sdpa, SPEEDUPS.get(name), rounds=15)
    name = "adaptive_temperature"
    for causal in (True,) if bench.quick else (False, True):
        case = AttentionCase(256 if bench.quick else 4096, causal, 4, 4)
        for against, theirs in ((SDPA, sdpa), ("its eager form", adaptive_as_printed)):
            least = SPEEDUPS[f"{name}, {against}"]
            yield from _compare(bench, "two fused passes", name, case, against, theirs, least, rounds=9)
    case = AttentionCase(192, True, 2, 2) if bench.quick else AttentionCase(2048, True, 4, 4)
    for name, normalizer in blocked_normalizers().items():
        theirs = partial(dense, normalizer=normalizer)
        try:
            for way in WAYS:
                yield from _compare(
                    bench, "blocks of queries", name, case, "its dense form", theirs, None, way=way, rounds=5
                )
        except (TypeError, ValueError, NotImplementedError) as error:  # a registered one may need more arguments
            bench.notes.append(f"{name} was not timed: {error}")


def _compare(
    bench: Bench, how: str, name: str, case: AttentionCase, against: str, theirs: Callable[..., Tensor],
    least: float | None, *, way: str = "forward", rounds: int,
) -> Iterator[Result]:  # fmt: skip
    ours, rival = (
        attention_call(partial(attend, causal=case.causal), case.tensors(), backward=WAYS[way])
        for attend in (partial(attention, normalizer=get(name)), theirs)
    )
    table = f"Attention, {how}, float32, batch 1, {case.heads} heads, width {WIDTH}"
    yield from bench.compare(table, f"{name}, {case}, {way}", ours, {against: (rival, least)}, rounds=rounds)


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=k.shape[1] != q.shape[1])


def adaptive_as_printed(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """Compute adaptive temperature as written in the paper."""
    logits = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if causal:
        ahead = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
        logits = logits.masked_fill(ahead, torch.finfo(logits.dtype).min)
    p = torch.softmax(logits, dim=-1)
    entropy = -(p * torch.log(p + 1e-9)).sum(-1, keepdim=True)
    beta = torch.zeros_like(entropy)
    for coefficient in PRINTED:
        beta = beta * entropy + coefficient
    beta = torch.where(entropy > MIN_ENTROPY, beta.clamp(min=1), 1.0)
    return torch.softmax(logits * beta, dim=-1) @ v


def blocked_normalizers() -> dict[str, Normalizer]:
    """Return the normalizers that attention() computes in blocks of queries, by name."""
    q = torch.zeros(1, 1, 2, 4)
    inputs = validate_inputs(q, q, q, mask=None, causal=True, scale=None, positions=None)
    known = {name: get(name) for name in available()}
    return {name: it for name, it in known.items() if isinstance(it, Normalizer) and not fused.applies(inputs, it)}


def attention_call(
    attend: Callable[..., Tensor],
    tensors: Sequence[Tensor],
    *,
    backward: bool,
    queued: int = 1,
    from_graph: bool = False,
) -> Call:
    """Return a call of `attend`, forward or with backward: `queued` times, then synchronized on CUDA.

    from_graph: replay it from a CUDA graph, without the launches by Python.
    """
    leaves = [t.detach().requires_grad_(backward) for t in tensors]
    upstream = torch.ones_like(tensors[0])

    def work() -> None:
        with torch.set_grad_enabled(backward):
            for _ in range(queued):
                output = attend(*leaves)
                if backward:
                    torch.autograd.grad(output, leaves, upstream)

    run = _record_graph(work) if from_graph else work

    def call() -> None:
        run()
        if upstream.is_cuda:
            torch.cuda.synchronize()

    return call


def _record_graph(work: Call) -> Call:
    work()  # compiles the kernels, which cannot be done while the graph is recorded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def measure_footprints(bench: Bench) -> Iterator[Result]:
    """Yield the peak resident memory of every normalizer that runs in blocks of queries, above that before the call."""
    if not RESET.exists():
        bench.notes.append("memory is not measured: it needs /proc/self/clear_refs, which only Linux has")
        return
    length = 1024 if bench.quick else 16_384
    table = (
        f"Peak extra memory, L = {length:,}, causal, {MEMORY_HEADS} heads, width {WIDTH}, float32 "
        f"(one dense map of weights: {MEMORY_HEADS * length * length * 4 / MEGABYTE:,.0f} MB)"
    )
    for name in ["entmax15"] if bench.quick else blocked_normalizers():
        if used := bench.attempt(f"the memory of {name}", in_new_process, measure_memory, name, length):
            yield bench.result(table, name, used, LIMITS["memory"])


def measure_memory(name: str, length: int) -> dict[str, float]:
    normalizer = get(name)

    def run(queries: int, backward: bool) -> None:
        q, k, v = (t[..., :queries, :].requires_grad_(backward) for t in inputs)
        with torch.set_grad_enabled(backward):
            output = attention(q, k, v, normalizer, causal=True)
        if backward:
            torch.autograd.grad(output, (q, k, v), torch.ones_like(output))

    inputs = [torch.randn(1, MEMORY_HEADS, length, WIDTH, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    for backward in (False, True):
        run(min(64, length), backward)  # libraries load and thread pools start outside the measurement
    start = time.perf_counter()
    forward, backward_too = (peak_above(partial(run, length, backward)) / MEGABYTE for backward in (False, True))
    return {"forward_mb": forward, "backward_mb": backward_too, "seconds": time.perf_counter() - start}
