"""Four ways to run the same random model over the same tokens, and the cost of each in a new process.

plain: the forward pass with torch SDPA, nothing measured. core: analyze() of every row, all numbers of the weights and
the gradient. full: analyze() with distances and separability too, on 64 rows. eager: what one does without attnorm,
`output_attentions=True` and the core numbers computed from the weights.

Heavy imports are lazy: the process of the plain pass must not load what only the others use.
"""

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from attnorm.bench.timing import MEGABYTE, Call, peak_above, resident, run_and_read_json

Way = Literal["plain", "core", "full", "eager"]

HEAD_WIDTH = 64
VOCABULARY = 1024
LOGIT_DEVIATION = 2.0  # initial weights give logits near 0, unlike trained models
TOP_N = (1, 5, 10, 20, 100)
SECONDS = 5.0  # a pass is repeated until the total reaches this
WARM_UP = 32  # tokens: libraries and thread pools start before the measurement


@dataclass(frozen=True)
class Shape:
    length: int
    layers: int = 8
    heads: int = 8

    def __str__(self) -> str:
        return f"{self.layers} layers x {self.heads} heads, width {HEAD_WIDTH}, float32"


@dataclass(frozen=True)
class Cost:
    seconds: float
    peak_mb: float  # of the whole process during the pass
    extra_mb: float  # of it, beyond what the process held before


def random_model(shape: Shape) -> Any:
    """Return a GPT-2 in evaluation mode; its weights depend only on the shape."""
    from attnorm.training.lm.model import LMSettings, build_model

    width = shape.heads * HEAD_WIDTH
    settings = LMSettings(layers=shape.layers, heads=shape.heads, width=width, context=shape.length, vocab=VOCABULARY)
    model = build_model(settings, VOCABULARY, 0).eval()
    with torch.no_grad():
        for layer in model.transformer.h:
            queries_and_keys = layer.attn.c_attn.weight[:, : 2 * width]
            queries_and_keys *= math.sqrt(LOGIT_DEVIATION / width) / queries_and_keys.std()
    return model


def tokens(length: int) -> Tensor:
    return torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(0))


def pass_of(way: Way, model: Any, ids: Tensor) -> Call:
    if way == "plain":
        from attnorm.models.forward_pass import run
        from attnorm.models.load import LoadedModel

        return partial(run, LoadedModel(model, None, way), {"input_ids": ids[None]})
    if way == "eager":
        return partial(statistics_by_layer, model, ids)

    from attnorm.analysis.analyze import analyze

    if way == "core":
        return partial(analyze, model, ids, lengths=len(ids), top_n=TOP_N, rows="all", metrics="core")
    return partial(analyze, model, ids, lengths=len(ids), top_n=TOP_N, rows=64, metrics="all")


@torch.no_grad()
def statistics_by_layer(model: Any, ids: Tensor) -> list[dict[str, Tensor]]:
    """Compute the core numbers of each row from the returned weights; the model stays in eager mode."""
    model.set_attn_implementation("eager")
    outputs = model.base_model(input_ids=ids[None], use_cache=False, output_attentions=True)
    return [statistics_of(weights) for weights in outputs.attentions]


def statistics_of(weights: Tensor) -> dict[str, Tensor]:
    """Return the numbers (B, H, L) and top_mass (B, H, L, N) of causal weights (B, H, L, L)."""
    from attnorm.theory.rank_one_eigenvalues import rank_one_eigenvalue

    length = weights.shape[-1]
    ahead = torch.ones(length, length, dtype=torch.bool).triu(1)
    largest = weights.amax(-1)
    smallest = weights.masked_fill(ahead, torch.inf).amin(-1)
    heaviest = weights.topk(min(max(TOP_N), length), dim=-1).values.cumsum(-1)
    return {
        "entropy_nats": torch.special.entr(weights).sum(-1),
        "effective_keys": 1 / weights.square().sum(-1),
        "max_weight": largest,
        "logit_spread": torch.log(largest) - torch.log(smallest),
        "sink_mass": weights[..., 0],
        "jacobian_norm": rank_one_eigenvalue(weights),
        "top_mass": heaviest[..., [min(N, length) - 1 for N in TOP_N]],
    }


def cost(way: Way, shape: Shape, least_seconds: float = SECONDS) -> Cost:
    """Measure one pass in this process. Linux only."""
    model, ids = random_model(shape), tokens(shape.length)
    pass_of(way, model, ids[:WARM_UP])()
    call = pass_of(way, model, ids)
    seconds: list[float] = []
    extra = peak_above(partial(_time_call, call, seconds))
    peak = resident("VmHWM")
    while sum(seconds) < least_seconds and len(seconds) < 5:
        _time_call(call, seconds)
    return Cost(median(seconds), peak / MEGABYTE, extra / MEGABYTE)


def _time_call(call: Callable[[], object], seconds: list[float]) -> None:
    start = time.perf_counter()
    call()
    seconds.append(time.perf_counter() - start)


def cost_in_new_process(way: Way, shape: Shape, least_seconds: float = SECONDS) -> Cost:
    arguments = f"{way!r}, {shape!r}, {torch.get_num_threads()}, {least_seconds}"
    return Cost(**run_and_read_json(f"from attnorm.bench.model_passes import Shape, report; report({arguments})"))


def report(way: Way, shape: Shape, threads: int, least_seconds: float) -> None:
    """Run in the new process: measure, and print JSON."""
    torch.set_num_threads(threads)
    sys.stdout.write(json.dumps(asdict(cost(way, shape, least_seconds))))
