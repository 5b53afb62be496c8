"""Benchmark attention() and measuring on CUDA in bfloat16, against torch's own kernels and the plain forward pass.

Calls are queued several at a time and synchronized once, as in training. Decoding is also timed from a CUDA graph. The
first call is timed in a new process with an empty cache of kernels.

The models have the shape of SmolLM2-135M and of a Llama with 7 billion parameters and random weights in bfloat16, with
queries and keys that give logits of standard deviation 2. Memory is the peak that torch has allocated.
"""

import gc
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from importlib import import_module
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attnorm.attention import attention, choose_engine
from attnorm.engines.inputs import validate_inputs
from attnorm.metrics.attention_statistics import attention_statistics
from attnorm.normalizers.contract import Normalizer
from attnorm.normalizers.registry import get
from attnorm_lab.bench import analyze, promises
from attnorm_lab.bench.analyze import LOGIT_DEVIATION, TOP_N, VOCABULARY, tokens
from attnorm_lab.bench.attention import WAYS, attention_call
from attnorm_lab.bench.promises import ADASPLASH, CUDNN, ENTMAX15, FLASH, FLEX, LIMITS, SPEEDUPS, UNPROMISED, Speedups
from attnorm_lab.bench.results import Result
from attnorm_lab.bench.timing import MEGABYTE, Bench, Call, in_new_process, time_alternating

DEVICE = "cuda"
Shape = tuple[int, int, int, int]  # batch, heads, length, width
CUDA_SHAPES: tuple[Shape, ...] = ((4, 16, 4096, 64), (2, 16, 8192, 128), (1, 16, 32768, 64))
QUICK_CUDA_SHAPE: Shape = (1, 2, 512, 64)
QUEUED = 4  # calls per synchronization, of decoding and of the longest calls
QUEUED_KEYS = 65_536  # of shorter calls, so that the time of Python before the first kernel hardly counts
ROUNDS = 3

TFLOPS_SHAPE = CUDA_SHAPES[1]
EMPTY_TILES_SHAPE = CUDA_SHAPES[2]
TILE_KEYS = 128
VISIBLE_TILES = (0, 3, 6)  # of every ten; the first rows see tile 0 only
FAR_BELOW = 16.0  # a factor of q and one of k: with the width 64 their product lowers a logit by 32
DECODED = (
    "softmax", "ssmax", "sink", "sigmoid", "relu", "softpick", "scale_invariant", "adaptive_temperature",
    "norm_softmax", "sa_softmax", "stick_breaking", "topk", "entmax15", "sparsemax", "asentmax", "kneemax",
    "entmax:alpha=1.3",
)  # fmt: skip
DECODED_SHAPE = (32, 32768, 128)  # heads, keys, width
SLOW_ON_CUDA = ("blocked",)  # engines to time at the first shape only: at the others a call would take seconds
FIRST_CALL_SHAPE = CUDA_SHAPES[0]
FIRST_CALLS_AT_A_TIME = 8  # processes; each compiles on one core
WHAT_IFS = ("model", "ssmax", "log_scaled")
OTHER_MAPS = ("sigmoid", "relu", "sparsemax", "entmax15", "kneemax", "softpick")  # whose statistics have kernels
BOTH_MAPS = ("softmax", "sigmoid", "entmax15")  # whose output and statistics are timed together, against two calls


def compare_cuda_attention(bench: Bench) -> Iterator[Result]:
    """Compare attention on whole sequences with the rivals of promises.ATTENTION, then on logits with empty tiles."""
    if _no_device(bench, "attention on CUDA"):
        return
    rivals = cache(_rival)
    for number, shape in enumerate((QUICK_CUDA_SHAPE,) if bench.quick else CUDA_SHAPES):
        tensors = tuple(torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
        for name, promised in promises.ATTENTION.items():
            yield from _compare(bench, name, tensors, "", promised, rivals, slow_engines=number == 0)
    tensors = logits_with_empty_tiles((1, 1, 2560, 64) if bench.quick else EMPTY_TILES_SHAPE, DEVICE)
    for name, promised in promises.EMPTY_TILES.items():
        where = ", 70 % of the tiles empty"
        yield from _compare(bench, name, tensors, where, promised, rivals, slow_engines=bench.quick)


def logits_with_empty_tiles(shape: Shape, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v with normal logits, far lower ones in seven of every ten tiles of keys."""
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3))
    tile = torch.arange(shape[2], device=device) // TILE_KEYS % 10
    visible = torch.isin(tile, torch.tensor(VISIBLE_TILES, device=device))
    q[..., 0] = FAR_BELOW
    k[..., 0] = torch.where(visible, 0.0, -FAR_BELOW).to(k.dtype)
    return q, k, v


def _no_device(bench: Bench, what: str) -> bool:
    if not torch.cuda.is_available():
        bench.notes.append(f"{what} was not measured: this machine has no CUDA device")
    return not torch.cuda.is_available()


def compare_cuda_decoding(bench: Bench) -> Iterator[Result]:
    """Compare one query over a long cache with SDPA, on the engine that is chosen and on our kernels."""
    if _no_device(bench, "decoding on CUDA"):
        return
    heads, keys, width = DECODED_SHAPE
    q, k, v = (
        torch.randn((1, heads, length, width), device="cuda", dtype=torch.bfloat16) for length in (1, keys, keys)
    )
    table = (
        f"Decoding on {torch.cuda.get_device_name()}, bfloat16, 1 query, batch 1, {heads} heads, width {width}, "
        f"{keys:,} keys"
    )
    inputs = validate_inputs(q, k, v, mask=None, causal=True, scale=None, positions=None)
    for name in DECODED:
        normalizer = get(name).cuda().requires_grad_(False)
        assert isinstance(normalizer, Normalizer)
        for engine in dict.fromkeys((choose_engine(inputs, normalizer), "triton")):
            attend = partial(attention, normalizer=normalizer, causal=True, engine=engine)
            for way, from_graph in (("called", False), ("from a CUDA graph", True)):
                ours, theirs = (
                    attention_call(call, (q, k, v), backward=False, queued=QUEUED, from_graph=from_graph)
                    for call in (attend, _decode_with_sdpa)
                )
                rivals = {"torch SDPA": (theirs, SPEEDUPS["decoding"])}
                yield from bench.compare(table, f"{name} ({engine}), {way}", ours, rivals, rounds=5, calls=QUEUED)


def _decode_with_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v)


def _compare(
    bench: Bench, name: str, tensors: tuple[Tensor, ...], logits: str, promised: dict[str, Speedups],
    rivals: Callable[[str], Callable[..., Tensor]], *, slow_engines: bool,
) -> Iterator[Result]:  # fmt: skip
    normalizer = get(name).to(DEVICE)
    assert isinstance(normalizer, Normalizer)
    q, k, v = tensors
    inputs = validate_inputs(q, k, v, mask=None, causal=True, scale=None, positions=None)
    engine = choose_engine(inputs, normalizer)
    if engine in SLOW_ON_CUDA and not slow_engines:
        return
    batch, heads, length, width = shape = inputs.q_BHQD.shape
    table = (
        f"Attention on {torch.cuda.get_device_name()}, bfloat16, causal, batch {batch}, {heads} heads, "
        f"width {width}, L = {length:,}{logits}"
    )
    ours = partial(attention, normalizer=normalizer, causal=True)
    against = {FLASH: UNPROMISED, CUDNN: UNPROMISED} | promised
    for number, (way, backward) in enumerate(WAYS.items()):
        # A backward pass takes 2.5 times the time of the forward pass, so that half as many calls hide as much Python.
        queued = (QUEUED if bench.quick else max(QUEUED, QUEUED_KEYS // length)) // (2 if backward else 1)
        call = partial(attention_call, tensors=tensors, backward=backward, queued=queued)
        ready = _working(bench, against, rivals, call, f"{way}, L = {length:,}")
        theirs = {rival: (ready[rival], against[rival][number]) for rival in ready}
        what = f"{name} ({engine}), {way}"
        timed = list(bench.compare(table, what, call(ours), theirs, rounds=ROUNDS, calls=queued))
        yield from timed
        if timed and ADASPLASH in promised and shape == TFLOPS_SHAPE and not backward:
            seconds = (timed[0].numbers["ours_ms"] or math.nan) / 1e3
            tflops = 2 * batch * heads * length**2 * width / 1e12 / seconds
            numbers = {"seconds": seconds, "tflops": tflops}
            yield bench.result(f"Speed alone: {table}", what, numbers, {"tflops": promises.TFLOPS})


def _working(
    bench: Bench, names: Iterable[str], rivals: Callable[[str], Callable[..., Tensor]],
    call: Callable[[Callable[..., Tensor]], Call], setting: str,
) -> dict[str, Call]:  # fmt: skip
    """Return the calls of those rivals that work; one that is missing or fails is reported once."""
    working = {}
    for name in names:
        try:
            ready = call(rivals(name))
            ready()
        except Exception as error:  # foreign code: what fails there must not end the measurements
            reason = str(error).strip().partition("\n")[0]
            note = f"{name} was not timed, {setting}: {type(error).__name__}: {reason}"
            if note not in bench.notes:
                bench.notes.append(note)
        else:
            working[name] = ready
    return working


def _rival(name: str) -> Callable[..., Tensor]:
    if name == FLEX:
        return _flex_softmax()
    if name == ADASPLASH:
        adasplash: Callable[..., Tensor] = import_module("adasplash").adasplash2
        return adasplash
    if name == ENTMAX15:
        return partial(attention, normalizer=get(ENTMAX15).to(DEVICE), causal=True)
    return partial(_softmax_on, {FLASH: SDPBackend.FLASH_ATTENTION, CUDNN: SDPBackend.CUDNN_ATTENTION}[name])


def _softmax_on(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, is_causal=True)


def _flex_softmax() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

    compiled: Callable[..., Tensor] = torch.compile(flex_attention, dynamic=False)

    @cache
    def causal(length: int) -> BlockMask:
        return create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device=DEVICE)

    return lambda q, k, v: compiled(q, k, v, block_mask=causal(q.shape[-2]))


def measure_first_calls(bench: Bench) -> Iterator[Result]:
    """Yield the seconds of the first call of every normalizer, each in a new process with an empty cache of kernels."""
    if _no_device(bench, "the first call on CUDA"):
        return
    batch, heads, length, width = shape = QUICK_CUDA_SHAPE if bench.quick else FIRST_CALL_SHAPE
    table = (
        f"First call in a new process, nothing compiled before, {torch.cuda.get_device_name()}, bfloat16, causal, "
        f"batch {batch}, {heads} heads, width {width}, L = {length:,}"
    )
    names = list(promises.ATTENTION)[: 2 if bench.quick else None]
    with ThreadPoolExecutor(FIRST_CALLS_AT_A_TIME) as processes:
        calls = {name: processes.submit(in_new_process, first_call, name, shape, DEVICE) for name in names}
        for name, call in calls.items():
            if measured := bench.attempt(f"the first call of {name}", call.result):
                for way in WAYS:
                    what = f"{name} ({measured['engine']}), {way}"
                    yield bench.result(table, what, {"seconds": measured[way]}, LIMITS["first call"])


def first_call(name: str, shape: Shape, device: str) -> dict[str, Any]:
    """Time the first call of a new process with an empty cache of kernels."""
    with TemporaryDirectory() as folder:
        os.environ |= {"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        return time_first_call(name, shape, device)


def time_first_call(name: str, shape: Shape, device: str) -> dict[str, Any]:
    """Return the engine, the seconds of the first forward pass, and those with its backward pass.

    The device and its libraries start before, by softmax on torch's own kernels. Importing Triton counts.
    """
    normalizer = get(name).to(device)
    assert isinstance(normalizer, Normalizer)
    q, k, v = leaves = [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    attention_call(scaled_dot_product_attention, leaves, backward=True)()
    engine = choose_engine(validate_inputs(q, k, v, mask=None, causal=True, scale=None, positions=None), normalizer)
    start = time.perf_counter()
    output = attention(q, k, v, normalizer, causal=True)
    _wait(device)
    forward = time.perf_counter() - start
    torch.autograd.grad(output, leaves, torch.ones_like(output))
    _wait(device)
    return {"engine": engine} | dict(zip(WAYS, (forward, time.perf_counter() - start), strict=True))


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class LlamaShape(NamedTuple):
    name: str
    layers: int
    heads: int
    kv_heads: int
    width: int
    intermediate: int


SMOLLM2 = LlamaShape("SmolLM2's shape", 30, 9, 3, 64, 1536)
SEVEN_BILLION = LlamaShape("a 7B Llama's shape", 32, 32, 32, 128, 11008)
QUICK = LlamaShape("a small Llama's shape", 2, 2, 1, 16, 32)
THREE = "the same for three normalizers"
WORDS = {**analyze.WORDS, THREE: THREE}
OPTIONS = {**analyze.OPTIONS, THREE: {**analyze.OPTIONS["core"], "normalizers": WHAT_IFS}}


Plan = tuple[LlamaShape, dict[int, tuple[str, ...]]]  # tokens -> ways
PLANS: tuple[Plan, ...] = (
    (SMOLLM2, {2048: ("core", "full"), 8192: ("core", THREE, "full"), 32_768: ("core", "full"), 131_072: ("core",)}),
    (SEVEN_BILLION, {32_768: ("core",)}),
)


def measure_cuda_analysis(bench: Bench) -> Iterator[Result]:
    if _no_device(bench, "analyze on CUDA"):
        return
    yield from _compare_statistics(bench, (1, 2, 256, 32) if bench.quick else (1, 16, 32_768, 128))
    quick_plans: tuple[Plan, ...] = ((QUICK, {64: ("core", THREE, "full")}),)
    for shape, lengths in quick_plans if bench.quick else PLANS:
        model = random_llama(shape)
        for length, ways in lengths.items():
            yield from _against_plain(bench, model, shape, length, ways)
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


def _against_plain(bench: Bench, model: Any, shape: LlamaShape, length: int, ways: tuple[str, ...]) -> Iterator[Result]:
    from attnorm.analysis.analyze import analyze as measure
    from attnorm.models.forward_pass import run
    from attnorm.models.load import LoadedModel

    ids = tokens(length)
    plain = _synchronized(partial(run, LoadedModel(model, None, "plain"), {"input_ids": ids[None].cuda()}))
    table = f"Measuring a model, {shape.name}, bfloat16, {torch.cuda.get_device_name()}"
    one_ms = math.nan
    for way in ways:
        words = f"{WORDS[way]}, L = {length:,}"
        ours = _synchronized(
            partial(measure, model, ids, lengths=length, windows=1, budget=length, top_n=TOP_N, **OPTIONS[way])
        )
        (timed,) = time_alternating(ours, plain, rounds=1 if bench.quick or length > 32_768 else 3)
        peak, plain_peak = _peak(ours), _peak(plain)
        promised = f"{way} of 7B" if shape is SEVEN_BILLION else way
        least = promises.least_speedup(promised, length, timed["theirs_ms"])
        yield bench.result(table, words, timed, {"speedup": least}, "plain forward pass")
        if way == THREE:
            numbers = {"ours_ms": timed["ours_ms"], "theirs_ms": one_ms, "speedup": one_ms / timed["ours_ms"]}
            least_of_three = {"speedup": SPEEDUPS["analyze, three normalizers"]}
            yield bench.result(table, words, numbers, least_of_three, WORDS["core"])
        one_ms = timed["ours_ms"] if way == "core" else one_ms
        times, more = promises.GPU_MEMORY
        most = None if way == "full" else (times * plain_peak + more) / plain_peak
        numbers = {
            "seconds": timed["ours_ms"] / 1e3, "gpu_mb": peak / MEGABYTE, "plain_mb": plain_peak / MEGABYTE,
            "times_plain": peak / plain_peak,
        }  # fmt: skip
        yield bench.result(f"{table}, memory on the GPU", words, numbers, {"times_plain": most})


def _compare_statistics(bench: Bench, size: tuple[int, int, int, int]) -> Iterator[Result]:
    q, k, v = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    _, heads, length, width = size
    table = f"Statistics of every row on {torch.cuda.get_device_name()}, bfloat16, causal"
    shape = f"{heads} heads, width {width}, L = {length:,}"
    both = partial(attention, q, k, v, causal=True, return_statistics=True)
    calls: dict[str, tuple[Call, float | None]] = {
        "attention_statistics": (partial(attention_statistics, q, k, causal=True), SPEEDUPS["statistics"]),
        "attention with return_statistics": (both, SPEEDUPS["output and statistics"]),
    }
    for name in OTHER_MAPS:
        calls[f"attention_statistics of {name}"] = (partial(attention_statistics, q, k, name, causal=True), None)
    for what, (ours, least) in calls.items():
        theirs = {"cuDNN attention": (_synchronized(partial(_cudnn, q, k, v)), least)}
        yield from bench.compare(table, f"{what}, {shape}", _synchronized(ours), theirs, rounds=5)
    for name in BOTH_MAPS:
        for trains in (False, True):
            one, two = (
                _synchronized(partial(_output_and_statistics, q, k, v, name, trains, together=together))
                for together in (True, False)
            )
            what = f"{name} with return_statistics{', forward + backward' if trains else ''}, {shape}"
            rivals = {"attention and attention_statistics": (two, SPEEDUPS["one call"])}
            yield from bench.compare(table, what, one, rivals, rounds=5)


def _output_and_statistics(q: Tensor, k: Tensor, v: Tensor, name: str, trains: bool, *, together: bool) -> None:
    query, key, value = inputs = [t.detach().requires_grad_(trains) for t in (q, k, v)]
    if together:
        output, _ = attention(query, key, value, name, causal=True, return_statistics=True)
    else:
        output = attention(query, key, value, name, causal=True)
        attention_statistics(q, k, name, causal=True)
    if trains:
        torch.autograd.grad(output, inputs, v)


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
