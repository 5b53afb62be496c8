"""Benchmark attention(): time against torch SDPA and dense forms, and peak memory."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
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
from attnorm_lab.bench.results import Footprint, Ratio
from attnorm_lab.bench.timing import MEGABYTE, RESET, Call, peak_above, run_and_read_json, time_alternating

RESCALED = 1 / 1.15  # promised speedup over SDPA: at most 15 % slower
ADAPTIVE, ADAPTIVE_EAGER = 1 / 2.5, 4.0
WIDTH = 64
WAYS = {"forward": False, "forward + backward": True}  # whether with backward
PROMISED_MB = 400.0
MEMORY_HEADS = 4


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


def compare_attention(*, quick: bool = False, notes: list[str]) -> Iterator[Ratio]:
    """Compare fused normalizers with SDPA, adaptive temperature also with its eager form, the others with dense."""
    yield from _compare_with_sdpa(quick)
    yield from _compare_adaptive(quick)
    yield from _compare_blocked_with_dense(quick, notes)


def _compare_with_sdpa(quick: bool) -> Iterator[Ratio]:
    cases = [AttentionCase(256, True, heads=2, key_heads=1)] if quick else FUSED_CASES
    promises = {"softmax": RESCALED, "ssmax": RESCALED, "log_scaled": RESCALED, "softmax1": None, "sink": None}
    for name, target in promises.items():
        for case in cases:
            q, k, v = case.tensors()
            ours = partial(attention, q, k, v, get(name), causal=case.causal)
            yield _forward_ratio(
                f"Attention on fused kernels, forward, float32, batch 1, {case.heads} heads, width {WIDTH}",
                f"{name}, {case}", "torch SDPA", ours, partial(sdpa, q, k, v, case), None if quick else target,
                rounds=1 if quick else 15,
            )  # fmt: skip


def _compare_adaptive(quick: bool) -> Iterator[Ratio]:
    normalizer = get("adaptive_temperature")
    assert isinstance(normalizer, Normalizer)
    for case in (
        [AttentionCase(256, True, 2, 2)]
        if quick
        else [AttentionCase(4096, False, 4, 4), AttentionCase(4096, True, 4, 4)]
    ):
        q, k, v = case.tensors()
        ours = partial(attention, q, k, v, normalizer, causal=case.causal)
        for against, theirs, target in [
            ("torch SDPA", partial(sdpa, q, k, v, case), ADAPTIVE),
            ("its eager form", partial(adaptive_as_printed, q, k, v, causal=case.causal), ADAPTIVE_EAGER),
        ]:
            yield _forward_ratio(
                f"Adaptive temperature, two fused passes, forward, float32, batch 1, {case.heads} heads, width {WIDTH}",
                f"adaptive_temperature, {case}", against, ours, theirs, None if quick else target,
                rounds=1 if quick else 9,
            )  # fmt: skip


def _forward_ratio(
    topic: str, what: str, against: str, ours: Call, theirs: Call, target: float | None, *, rounds: int
) -> Ratio:
    with torch.no_grad():
        timed = time_alternating(ours, theirs, rounds=rounds)
    return Ratio(topic=topic, what=what, against=against, target=target, **asdict(timed))


def sdpa(q: Tensor, k: Tensor, v: Tensor, case: AttentionCase) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=case.key_heads != case.heads)


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


def blocked_normalizers() -> list[str]:
    """Return the names of the normalizers that attention() computes in blocks of queries."""
    q = torch.zeros(1, 1, 2, 4)
    inputs = validate_inputs(q, q, q, mask=None, causal=True, scale=None, positions=None)
    normalizers = {name: get(name) for name in available()}
    return [
        name for name, normalizer in normalizers.items()
        if isinstance(normalizer, Normalizer) and not fused.applies(inputs, normalizer)
    ]  # fmt: skip


def _compare_blocked_with_dense(quick: bool, notes: list[str]) -> Iterator[Ratio]:
    case = AttentionCase(192, True, 2, 2) if quick else AttentionCase(2048, True, 4, 4)
    q, k, v = case.tensors()
    for name in blocked_normalizers():
        normalizer = get(name)
        assert isinstance(normalizer, Normalizer)
        ours = partial(attention, normalizer=normalizer, causal=True)
        theirs = partial(dense, normalizer=normalizer, causal=True)
        for way, backward in WAYS.items():
            try:
                calls = [attention_call(attend, (q, k, v), backward=backward) for attend in (ours, theirs)]
                timed = time_alternating(*calls, rounds=1 if quick else 5)
            # A registered normalizer may need more arguments.
            except (TypeError, ValueError, NotImplementedError) as error:
                notes.append(f"{name} was not timed: {error}")
                break
            topic = f"Attention in blocks of queries, float32, batch 1, {case.heads} heads, width {WIDTH}, {case}"
            yield Ratio(topic=topic, what=f"{name}, {way}", against="its dense form", **asdict(timed))


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


@dataclass(frozen=True)
class MemoryUse:
    forward_mb: float
    backward_mb: float
    seconds: float


def measure_footprints(*, quick: bool = False, notes: list[str]) -> Iterator[Footprint]:
    """Yield the footprint of every normalizer that runs in blocks of queries, causal."""
    if not RESET.exists():
        notes.append("memory is not measured: it needs /proc/self/clear_refs, which only Linux has")
        return
    length = 1024 if quick else 16_384
    for name in ["entmax15"] if quick else blocked_normalizers():
        try:
            measured = memory_in_new_process(name, length)
        except RuntimeError as error:
            notes.append(f"the memory of {name} was not measured: {error}")
            continue
        yield Footprint(
            what=name,
            setting=f"L = {length:,}, causal, {MEMORY_HEADS} heads, width {WIDTH}, float32",
            dense_mb=MEMORY_HEADS * length * length * 4 / MEGABYTE,
            target_mb=None if quick else PROMISED_MB,
            **asdict(measured),
        )


def memory_in_new_process(name: str, length: int) -> MemoryUse:
    """Measure `name` at this length in a new process."""
    threads = torch.get_num_threads()
    code = f"from attnorm_lab.bench.attention import report_memory; report_memory({name!r}, {length}, {threads})"
    return MemoryUse(**run_and_read_json(code))


def report_memory(name: str, length: int, threads: int) -> None:
    """Run in the new process: measure, and print JSON."""
    torch.set_num_threads(threads)
    sys.stdout.write(json.dumps(asdict(measure_memory(name, length))))


def measure_memory(name: str, length: int) -> MemoryUse:
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
    forward = peak_above(lambda: run(length, False))
    with_backward = peak_above(lambda: run(length, True))
    return MemoryUse(forward / MEGABYTE, with_backward / MEGABYTE, time.perf_counter() - start)
