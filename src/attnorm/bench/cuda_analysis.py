"""Benchmark measuring on CUDA: analyze() against the plain forward pass, attention_statistics() against attention.

The models have the shape of SmolLM2-135M and of a Llama with 7 billion parameters and random weights in bfloat16, with
queries and keys that give logits of standard deviation 2. Memory is the peak that torch has allocated.
"""

import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from attnorm.attention import attention
from attnorm.bench.model_passes import LOGIT_DEVIATION, TOP_N, VOCABULARY, tokens
from attnorm.bench.results import ModelRun, Ratio
from attnorm.bench.timing import time_alternating
from attnorm.metrics.attention_statistics import attention_statistics

GIBIBYTE = 2**30
MEGABYTE = 10**6
MOST_MEMORY = 1.5  # promised: times the plain pass, and 1 GiB more


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
WHAT_IFS = ("model", "ssmax", "log_scaled")


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


def measure_cuda_analysis(*, quick: bool = False, notes: list[str]) -> Iterator[Ratio | ModelRun]:
    if not torch.cuda.is_available():
        notes.append("measuring on CUDA was not timed: this machine has no CUDA device")
        return
    yield from _statistics((1, 2, 256, 32) if quick else (1, 16, 32_768, 128), quick)
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
    from transformers import LlamaConfig
    from transformers import LlamaForCausalLM as Model

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
            model: Any = Model(config)  # type: ignore[no-untyped-call]
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
    plain = _finished(partial(run, LoadedModel(model, None, "plain"), {"input_ids": ids[None].cuda()}))
    setting = f"{shape.name}, bfloat16, {torch.cuda.get_device_name()}"
    for way in ways:
        ours = _finished(
            partial(analyze, model, ids, lengths=length, windows=1, budget=length, top_n=TOP_N, **way.options)
        )
        timed = time_alternating(ours, plain, rounds=1 if quick or length > 32_768 else 3)
        peak, plain_peak = _peak(ours), _peak(plain)
        yield Ratio(
            topic=f"Measuring a model, {setting}", what=f"{way.what}, L = {length:,}", against="plain forward pass",
            target=None if quick else way.target(length, timed.theirs_ms), **asdict(timed),
        )  # fmt: skip
        most = (MOST_MEMORY * plain_peak + GIBIBYTE) / plain_peak
        yield ModelRun(
            what=f"{way.what}, L = {length:,}", setting=f"{setting}, memory on the GPU", seconds=timed.ours_ms / 1e3,
            peak_mb=peak / MEGABYTE, times_plain=peak / plain_peak,
            most_times_plain=None if quick or way is EVERYTHING else most,
        )  # fmt: skip


def _statistics(size: tuple[int, int, int, int], quick: bool) -> Iterator[Ratio]:
    q, k, v = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    _, heads, length, width = size
    topic = f"Statistics of every row on {torch.cuda.get_device_name()}, bfloat16, causal"
    shape = f"{heads} heads, width {width}, L = {length:,}"
    for what, ours, most in (
        ("attention_statistics", partial(attention_statistics, q, k, causal=True), 1.2),
        ("attention with return_statistics", partial(attention, q, k, v, causal=True, return_statistics=True), 2.0),
    ):
        timed = time_alternating(_finished(ours), _finished(partial(_cudnn, q, k, v)), rounds=1 if quick else 5)
        yield Ratio(
            topic=topic, what=f"{what}, {shape}", against="cuDNN attention", target=None if quick else 1 / most,
            **asdict(timed),
        )  # fmt: skip


def _cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), torch.no_grad():
        return scaled_dot_product_attention(q, k, v, is_causal=True)


def _finished(call: Callable[[], object]) -> Callable[[], None]:
    def finished() -> None:
        call()
        torch.cuda.synchronize()

    return finished


def _peak(call: Callable[[], None]) -> int:
    torch.cuda.reset_peak_memory_stats()
    call()
    return torch.cuda.max_memory_allocated()
