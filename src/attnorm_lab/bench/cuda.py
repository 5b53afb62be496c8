"""Benchmark attention() and measuring on CUDA in bfloat16, against torch's own kernels and the plain forward pass.

Calls are queued several at a time and synchronized once, as in training. Decoding is also timed from a CUDA graph. The
first call is timed in a new process with an empty cache of kernels.

The models have the shape of SmolLM2-135M and of a Llama with 7 billion parameters and random weights in bfloat16, with
queries and keys that give logits of standard deviation 2. Memory is the peak that torch has allocated.
"""

import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache, partial
from importlib import import_module
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attnorm.attention import attention, choose_engine
from attnorm.engines.inputs import validate_inputs
from attnorm.metrics.attention_statistics import attention_statistics
from attnorm.normalizers.contract import Normalizer
from attnorm.normalizers.registry import get
from attnorm_lab.bench.analyze import LOGIT_DEVIATION, TOP_N, VOCABULARY, tokens
from attnorm_lab.bench.attention import WAYS, attention_call
from attnorm_lab.bench.results import Duration, ModelRun, Ratio
from attnorm_lab.bench.timing import Call, Timed, run_and_read_json, time_against, time_alternating

DEVICE = "cuda"
Shape = tuple[int, int, int, int]  # batch, heads, length, width
CUDA_SHAPES: tuple[Shape, ...] = ((4, 16, 4096, 64), (2, 16, 8192, 128), (1, 16, 32768, 64))
QUICK_CUDA_SHAPE: Shape = (1, 2, 512, 64)
QUEUED = 4  # calls per synchronization, of decoding and of the longest calls
QUEUED_KEYS = 65_536  # of shorter calls, so that the time of Python before the first kernel hardly counts
ROUNDS = 3

FLASH, CUDNN, FLEX = "flash softmax", "cuDNN softmax", "flex softmax"
ADASPLASH = "adasplash2's entmax15"  # adasplash has version 2 for alpha = 1.5 only
ENTMAX15 = "entmax15"
Promises = tuple[float | None, float | None]  # the least speed against a rival, forward and with backward
UNPROMISED: Promises = (None, None)
# Everything is compared with softmax on flash and on cuDNN, and with the rivals of this table.
PROMISED: dict[str, dict[str, Promises]] = {
    "softmax": {CUDNN: (0.9, 0.9), FLEX: UNPROMISED},
    "ssmax": {CUDNN: (0.9, 0.9)},
    "log_scaled": {CUDNN: (0.9, 0.9)},
    "sink": {FLASH: (0.7, 0.7)},
    "softmax1": {FLASH: (0.7, 0.7)},
    "sigmoid": {FLASH: (0.7, 0.7)},
    "relu": {FLASH: (0.7, 0.7)},
    "softpick": {FLASH: (0.7, 0.7)},
    "scale_invariant": {FLASH: (0.7, 0.7)},
    "kernel:function=exp": {FLASH: (0.7, 0.7)},
    "kernel": {},
    "adaptive_temperature": {FLASH: (0.45, 0.35)},
    "sa_softmax": {FLASH: (0.4, 0.4)},
    "stick_breaking": {FLASH: (0.4, 0.4)},
    "entmax15": {ADASPLASH: (1.3, 1.2)},
    "sparsemax": {ADASPLASH: (1.3, 1.2)},
    "asentmax": {ADASPLASH: (1.3, 1.2)},
    "kneemax": {ENTMAX15: (0.7, 0.7)},
    "entmax:alpha=1.3": {ENTMAX15: (0.7, 0.7)},
    "topk": {ENTMAX15: (0.7, 0.7)},
}
TFLOPS_SHAPE, PROMISED_TFLOPS = CUDA_SHAPES[1], 170  # forward, of what is compared with adasplash2
EMPTY_TILES_SHAPE = CUDA_SHAPES[2]
PROMISED_WITH_EMPTY_TILES: dict[str, dict[str, Promises]] = {
    "entmax15": {FLASH: (1.0, None), CUDNN: (None, 1.0)},
    "sparsemax": {FLASH: (1.0, None), CUDNN: (None, 1.0)},
}
TILE_KEYS = 128
VISIBLE_TILES = (0, 3, 6)  # of every ten; the first rows see tile 0 only
FAR_BELOW = 16.0  # a factor of q and one of k: with the width 64 their product lowers a logit by 32
DECODED_WAYS = {"called": False, "from a CUDA graph": True}
DECODED = (
    "softmax", "ssmax", "sink", "sigmoid", "relu", "softpick", "scale_invariant", "adaptive_temperature",
    "norm_softmax", "sa_softmax", "stick_breaking", "topk", "entmax15", "sparsemax", "asentmax", "kneemax",
    "entmax:alpha=1.3",
)  # fmt: skip
DECODED_SHAPE = (32, 32768, 128)  # heads, keys, width
SLOW_ON_CUDA = ("blocked",)  # engines to time at the first shape only: at the others a call would take seconds
FIRST_CALL_SHAPE = CUDA_SHAPES[0]
MOST_FIRST_CALL_SECONDS = 10.0
FIRST_CALLS_AT_A_TIME = 8  # processes; each compiles on one core
GIBIBYTE = 2**30
MEGABYTE = 10**6
MAX_MEMORY = 1.5  # promised: times the plain pass, and 1 GiB more
WHAT_IFS = ("model", "ssmax", "log_scaled")
OTHER_MAPS = ("sigmoid", "relu", "sparsemax", "entmax15", "kneemax", "softpick")  # whose statistics have kernels
BOTH_MAPS = ("softmax", "sigmoid", "entmax15")  # whose output and statistics are timed together, against two calls


def compare_cuda_attention(*, quick: bool = False, notes: list[str]) -> Iterator[Ratio | Duration]:
    """Compare attention on whole sequences with the rivals of PROMISED, then on logits with empty tiles."""
    if _no_device(notes, "attention on CUDA"):
        return
    rivals = _Rivals(notes)
    for number, shape in enumerate((QUICK_CUDA_SHAPE,) if quick else CUDA_SHAPES):
        tensors = tuple(torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(3))
        for name, promised in PROMISED.items():
            yield from _compare(name, tensors, "", promised, rivals, quick=quick, slow_engines=number == 0)
    tensors = logits_with_empty_tiles((1, 1, 2560, 64) if quick else EMPTY_TILES_SHAPE, DEVICE)
    for name, promised in PROMISED_WITH_EMPTY_TILES.items():
        yield from _compare(
            name, tensors, ", 70 % of the tiles empty", promised, rivals, quick=quick, slow_engines=quick
        )


def logits_with_empty_tiles(shape: Shape, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v with normal logits, far lower ones in seven of every ten tiles of keys."""
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(3))
    tile = torch.arange(shape[2], device=device) // TILE_KEYS % 10
    visible = torch.isin(tile, torch.tensor(VISIBLE_TILES, device=device))
    q[..., 0] = FAR_BELOW
    k[..., 0] = torch.where(visible, 0.0, -FAR_BELOW).to(k.dtype)
    return q, k, v


def _no_device(notes: list[str], what: str) -> bool:
    if not torch.cuda.is_available():
        notes.append(f"{what} was not measured: this machine has no CUDA device")
    return not torch.cuda.is_available()


def compare_cuda_decoding(*, quick: bool = False, notes: list[str]) -> Iterator[Ratio]:
    """Compare one query over a long cache with SDPA, on the engine that is chosen and on our kernels."""
    if _no_device(notes, "decoding on CUDA"):
        return
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
                target = None if quick else 1 / 1.5
                yield Ratio(topic=topic, what=what, against="torch SDPA", target=target, **asdict(timed))


def _decode_with_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v)


def _compare(
    name: str, tensors: tuple[Tensor, ...], logits: str, promised: dict[str, Promises], rivals: "_Rivals",
    *, quick: bool, slow_engines: bool,
) -> Iterator[Ratio | Duration]:  # fmt: skip
    """Time a normalizer and all its rivals in the same rounds. logits: words about them for the title."""
    normalizer = get(name).to(DEVICE)
    assert isinstance(normalizer, Normalizer)
    inputs = validate_inputs(*tensors, mask=None, causal=True, scale=None, positions=None)
    engine = choose_engine(inputs, normalizer)
    if engine in SLOW_ON_CUDA and not slow_engines:
        return
    batch, heads, length, width = shape = inputs.q_BHQD.shape
    topic = (
        f"Attention on {torch.cuda.get_device_name()}, bfloat16, causal, batch {batch}, {heads} heads, "
        f"width {width}, L = {length:,}{logits}"
    )
    ours = partial(attention, normalizer=normalizer, causal=True)
    for number, (way, backward) in enumerate(WAYS.items()):
        # A backward pass takes 2.5 times the time of the forward pass, so that half as many calls hide as much Python.
        queued = (QUEUED if quick else max(QUEUED, QUEUED_KEYS // length)) // (2 if backward else 1)
        call = partial(attention_call, tensors=tensors, backward=backward, queued=queued)
        theirs = rivals.calls({FLASH: UNPROMISED, CUDNN: UNPROMISED} | promised, call, f"{way}, L = {length:,}")
        what = f"{name} ({engine}), {way}"
        timed = time_against(call(ours), list(theirs.values()), rounds=1 if quick else ROUNDS)
        for against, result in zip(theirs, timed, strict=True):
            target = None if quick else promised.get(against, UNPROMISED)[number]
            result = Timed(result.ours_ms / queued, result.theirs_ms / queued, result.speedup)
            yield Ratio(topic=topic, what=what, against=against, target=target, **asdict(result))
        if timed and ADASPLASH in promised and shape == TFLOPS_SHAPE and not backward:
            seconds = timed[0].ours_ms / queued / 1e3
            work = 2 * batch * heads * length**2 * width / 1e12
            yield Duration(
                what=f"{what}: {work / seconds:.0f} TFLOP/s", setting=topic, seconds=seconds,
                most_seconds=work / PROMISED_TFLOPS,
            )  # fmt: skip


class _Rivals:
    """What the normalizers are compared with. A rival that is missing or fails is reported once."""

    def __init__(self, notes: list[str]) -> None:
        self._notes = notes
        self._attend = cache(_rival)

    def calls(
        self, names: Iterable[str], call: Callable[[Callable[..., Tensor]], Call], setting: str
    ) -> dict[str, Call]:
        """Return the calls of those rivals that work."""
        working = {}
        for name in names:
            try:
                ready = call(self._attend(name))
                ready()
            except Exception as error:  # foreign code: what fails there must not end the measurements
                reason = str(error).strip().partition("\n")[0]
                note = f"{name} was not timed, {setting}: {type(error).__name__}: {reason}"
                if note not in self._notes:
                    self._notes.append(note)
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


def measure_first_calls(*, quick: bool = False, notes: list[str]) -> Iterator[Duration]:
    """Yield the seconds of the first call of every normalizer, each in a new process with an empty cache of kernels."""
    if _no_device(notes, "the first call on CUDA"):
        return
    shape = QUICK_CUDA_SHAPE if quick else FIRST_CALL_SHAPE
    batch, heads, length, width = shape
    setting = (
        f"First call in a new process, nothing compiled before, {torch.cuda.get_device_name()}, bfloat16, causal, "
        f"batch {batch}, {heads} heads, width {width}, L = {length:,}"
    )
    names = list(PROMISED)[: 2 if quick else None]
    code = "from attnorm_lab.bench.cuda import report_first_call; report_first_call({!r}, {!r}, {!r})"
    with ThreadPoolExecutor(FIRST_CALLS_AT_A_TIME) as processes:
        calls = {name: processes.submit(run_and_read_json, code.format(name, shape, DEVICE)) for name in names}
        for name, call in calls.items():
            try:
                measured = call.result()
            except RuntimeError as error:
                notes.append(f"the first call of {name} was not timed: {error}")
                continue
            for way in WAYS:
                yield Duration(
                    what=f"{name} ({measured['engine']}), {way}", setting=setting, seconds=measured[way],
                    most_seconds=None if quick else MOST_FIRST_CALL_SECONDS,
                )  # fmt: skip


def report_first_call(name: str, shape: Shape, device: str) -> None:
    """Run in the new process: time the first call, and print JSON."""
    with TemporaryDirectory() as folder:
        os.environ |= {"TRITON_CACHE_DIR": f"{folder}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        sys.stdout.write(json.dumps(time_first_call(name, shape, device)))


def time_first_call(name: str, shape: Shape, device: str) -> Mapping[str, str | float]:
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
    if _no_device(notes, "analyze on CUDA"):
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
    for name in BOTH_MAPS:
        for trains in (False, True):
            timed = time_alternating(
                *(
                    _synchronized(partial(_output_and_statistics, q, k, v, name, trains, together=together))
                    for together in (True, False)
                ),
                rounds=1 if quick else 5,
            )
            yield Ratio(
                topic=topic, what=f"{name} with return_statistics{', forward + backward' if trains else ''}, {shape}",
                against="attention and attention_statistics", target=None if quick else 1.0, **asdict(timed),
            )  # fmt: skip


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
