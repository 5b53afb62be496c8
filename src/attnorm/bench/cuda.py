"""Benchmark attention() and measuring on CUDA in bfloat16, against torch's own kernels and the plain forward pass.

Calls are queued several at a time and synchronized once, as in training. Decoding is also timed from a CUDA graph.

The models have the shape of SmolLM2-135M and of a Llama with 7 billion parameters and random weights in bfloat16, with
queries and keys that give logits of standard deviation 2. Memory is the peak that torch has allocated.
"""

import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attnorm.attention import attention, choose_engine
from attnorm.bench.analyze import LOGIT_DEVIATION, TOP_N, VOCABULARY, tokens
from attnorm.bench.attention import WAYS, attention_call
from attnorm.bench.results import ModelRun, Ratio
from attnorm.bench.timing import Call, Timed, time_alternating
from attnorm.engines.inputs import validate_inputs
from attnorm.metrics.attention_statistics import attention_statistics
from attnorm.normalizers.contract import Normalizer
from attnorm.normalizers.registry import get

CUDA_SHAPES = ((4, 16, 4096, 64), (2, 16, 8192, 128), (1, 16, 32768, 64))  # batch, heads, length, width
QUICK_CUDA_SHAPE = (1, 2, 512, 64)
QUEUED = 4  # calls per synchronization, of decoding and of the longest calls
QUEUED_KEYS = 65_536  # of shorter calls, so that the time of Python before the first kernel hardly counts
DECODED_WAYS = {"called": False, "from a CUDA graph": True}
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
    "kernel:function=exp": (0.7, 0.7),
    "kernel": (None, None),
    "adaptive_temperature": (0.45, 0.35),
    "sa_softmax": (0.4, 0.4),
    "stick_breaking": (0.4, 0.4),
    "entmax15": (None, None),
    "sparsemax": (None, None),
    "asentmax": (None, None),
    "kneemax": (None, None),
    "entmax:alpha=1.3": (None, None),
    "topk": (None, None),
}
DECODED = ("softmax", "ssmax", "sink", "sigmoid", "relu", "softpick", "scale_invariant", "adaptive_temperature")
DECODED_SHAPE = (32, 32768, 128)  # heads, keys, width
SLOW_ON_CUDA = ("flex", "blocked")  # engines to time at the first shape only: at the others a call would take seconds
GIBIBYTE = 2**30
MEGABYTE = 10**6
MAX_MEMORY = 1.5  # promised: times the plain pass, and 1 GiB more
WHAT_IFS = ("model", "ssmax", "log_scaled")
OTHER_MAPS = ("sigmoid", "relu", "sparsemax", "entmax15", "kneemax", "softpick")  # whose statistics have kernels


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
            for way, from_graph in DECODED_WAYS.items():
                calls = [
                    attention_call(attend, (q, k, v), backward=False, queued=QUEUED, from_graph=from_graph)
                    for attend in (ours, _decode_with_sdpa)
                ]
                timed = time_alternating(*calls, rounds=1 if quick else 5)
                timed = Timed(timed.ours_ms / QUEUED, timed.theirs_ms / QUEUED, timed.speedup)
                what = f"{name} ({engine}), {way}"
                yield Ratio(topic=topic, what=what, against="torch SDPA", target=1 / 1.5, **asdict(timed))


def _decode_with_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v)


def _compare_cuda(
    name: str, promised: Promises, tensors: tuple[Tensor, ...], topic: str,
    *, quick: bool, slow_engines: bool,
) -> Iterator[Ratio]:  # fmt: skip
    normalizer = get(name).cuda()
    assert isinstance(normalizer, Normalizer)
    inputs = validate_inputs(*tensors, mask=None, causal=True, scale=None, positions=None)
    engine = choose_engine(inputs, normalizer)
    if engine in SLOW_ON_CUDA and not slow_engines:
        return
    ours = partial(attention, normalizer=normalizer, causal=True)
    queued = max(QUEUED, QUEUED_KEYS // inputs.keys)
    for against, theirs, promises in _rivals(name, promised):
        for (way, backward), target in zip(WAYS.items(), promises, strict=True):
            calls = [attention_call(attend, tensors, backward=backward, queued=queued) for attend in (ours, theirs)]
            timed = time_alternating(*calls, rounds=1 if quick else 3)
            timed = Timed(timed.ours_ms / queued, timed.theirs_ms / queued, timed.speedup)
            what = f"{name} ({engine}), {way}"
            yield Ratio(topic=topic, what=what, against=against, target=target, **asdict(timed))


def _rivals(name: str, promised: Promises) -> Iterator[tuple[str, Callable[..., Tensor], Promises]]:
    yield "flash softmax", partial(_softmax_on, SDPBackend.FLASH_ATTENTION), promised
    yield "cuDNN softmax", partial(_softmax_on, SDPBackend.CUDNN_ATTENTION), ON_CUDNN.get(name, (None, None))
    if name == "entmax15" and find_spec("adasplash") is not None:
        yield "adasplash", import_module("adasplash").adasplash, (1.3, 1.2)


def _softmax_on(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, is_causal=True)


@dataclass(frozen=True)
class LlamaShape:
    name: str
    layers: int
    heads: int
    kv_heads: int
    width: int
    intermediate: int


SMOLLM2 = LlamaShape("SmolLM2's shape", 30, 9, 3, 64, 1536)
SEVEN_BILLION = LlamaShape("a 7B Llama's shape", 32, 32, 32, 128, 11008)
QUICK = LlamaShape("a small Llama's shape", 2, 2, 1, 16, 32)


@dataclass(frozen=True)
class Way:
    """How analyze() is called, and what is promised at a length: seconds above the plain pass, or times its time."""

    what: str
    options: dict[str, Any]
    promised: dict[int, tuple[float, float]]  # length -> seconds more, times the plain pass

    def target(self, length: int, plain_ms: float) -> float | None:
        if length not in self.promised:
            return None
        more, times = self.promised[length]
        return plain_ms / max(plain_ms + 1e3 * more, times * plain_ms)


CORE = Way(
    "analyze, core and gradient, all rows",
    {"rows": "all", "metrics": "core"},
    {2048: (0.3, 1), 8192: (0.3, 1), 32_768: (0, 6), 131_072: (0, 2.5)},
)
CORE_OF_7B = Way(CORE.what, CORE.options, {32_768: (0, 1.5)})
EVERYTHING = Way(
    "analyze, everything, rows=64",
    {"rows": 64, "metrics": "all"},
    {2048: (1, 1), 8192: (1, 1), 32_768: (2, 1)},
)
THREE = Way("the same for three normalizers", {**CORE.options, "normalizers": WHAT_IFS}, {})
MOST_OF_THREE = 3.0  # promised: times the time of one normalizer


def measure_cuda_analysis(*, quick: bool = False, notes: list[str]) -> Iterator[Ratio | ModelRun]:
    if not torch.cuda.is_available():
        notes.append("measuring on CUDA was not timed: this machine has no CUDA device")
        return
    yield from _compare_statistics((1, 2, 256, 32) if quick else (1, 16, 32_768, 128), quick)
    plans: list[tuple[LlamaShape, list[tuple[int, tuple[Way, ...]]]]] = [
        (
            SMOLLM2,
            [
                (2048, (CORE, EVERYTHING)),
                (8192, (CORE, THREE, EVERYTHING)),
                (32_768, (CORE, EVERYTHING)),
                (131_072, (CORE,)),
            ],
        ),
        (SEVEN_BILLION, [(32_768, (CORE_OF_7B,))]),
    ]
    for shape, lengths in [(QUICK, [(64, (CORE, THREE, EVERYTHING))])] if quick else plans:
        model = random_llama(shape)
        for length, ways in lengths:
            yield from _against_plain(model, shape, length, ways, quick)
        del model
        gc.collect()
        torch.cuda.empty_cache()


def random_llama(shape: LlamaShape) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    make: Any = LlamaForCausalLM  # typed in some releases of transformers and untyped in others
    hidden = shape.heads * shape.width
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=shape.intermediate, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, head_dim=shape.width,
        vocab_size=VOCABULARY, max_position_embeddings=131_072, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"), torch.no_grad():
            model = make(config)
            model.eval()
            for layer in model.model.layers:
                for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj):
                    projection.weight.normal_(0, math.sqrt(LOGIT_DEVIATION / hidden))
    finally:
        torch.set_default_dtype(before)
    return model


def _against_plain(
    model: Any, shape: LlamaShape, length: int, ways: tuple[Way, ...], quick: bool
) -> Iterator[Ratio | ModelRun]:
    from attnorm.analysis.analyze import analyze
    from attnorm.models.forward_pass import run
    from attnorm.models.load import LoadedModel

    ids = tokens(length)
    plain = _synchronized(partial(run, LoadedModel(model, None, "plain"), {"input_ids": ids[None].cuda()}))
    setting = f"{shape.name}, bfloat16, {torch.cuda.get_device_name()}"
    one_ms = math.nan
    for way in ways:
        ours = _synchronized(
            partial(analyze, model, ids, lengths=length, windows=1, budget=length, top_n=TOP_N, **way.options)
        )
        timed = time_alternating(ours, plain, rounds=1 if quick or length > 32_768 else 3)
        peak, plain_peak = _peak(ours), _peak(plain)
        yield Ratio(
            topic=f"Measuring a model, {setting}", what=f"{way.what}, L = {length:,}", against="plain forward pass",
            target=None if quick else way.target(length, timed.theirs_ms), **asdict(timed),
        )  # fmt: skip
        if way is THREE:
            yield Ratio(
                topic=f"Measuring a model, {setting}", what=f"{way.what}, L = {length:,}", against=CORE.what,
                ours_ms=timed.ours_ms, theirs_ms=one_ms, speedup=one_ms / timed.ours_ms,
                target=None if quick else 1 / MOST_OF_THREE,
            )  # fmt: skip
        one_ms = timed.ours_ms if way is CORE else one_ms
        most = (MAX_MEMORY * plain_peak + GIBIBYTE) / plain_peak
        yield ModelRun(
            what=f"{way.what}, L = {length:,}", setting=f"{setting}, memory on the GPU", seconds=timed.ours_ms / 1e3,
            peak_mb=peak / MEGABYTE, times_plain=peak / plain_peak,
            most_times_plain=None if quick or way is EVERYTHING else most,
        )  # fmt: skip


def _compare_statistics(size: tuple[int, int, int, int], quick: bool) -> Iterator[Ratio]:
    q, k, v = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    _, heads, length, width = size
    topic = f"Statistics of every row on {torch.cuda.get_device_name()}, bfloat16, causal"
    shape = f"{heads} heads, width {width}, L = {length:,}"
    calls: list[tuple[str, Call, float | None]] = [
        ("attention_statistics", partial(attention_statistics, q, k, causal=True), 1.2),
        ("attention with return_statistics", partial(attention, q, k, v, causal=True, return_statistics=True), 2.0),
    ]
    calls += [
        (f"attention_statistics of {name}", partial(attention_statistics, q, k, name, causal=True), None)
        for name in OTHER_MAPS
    ]
    for what, ours, most in calls:
        timed = time_alternating(_synchronized(ours), _synchronized(partial(_cudnn, q, k, v)), rounds=1 if quick else 5)
        yield Ratio(
            topic=topic, what=f"{what}, {shape}", against="cuDNN attention",
            target=None if quick or most is None else 1 / most,
            **asdict(timed),
        )  # fmt: skip


def _cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), torch.no_grad():
        return scaled_dot_product_attention(q, k, v, is_causal=True)


def _synchronized(call: Callable[[], object]) -> Callable[[], None]:
    def finished() -> None:
        call()
        torch.cuda.synchronize()

    return finished


def _peak(call: Callable[[], None]) -> int:
    torch.cuda.reset_peak_memory_stats()
    call()
    return torch.cuda.max_memory_allocated()
