"""Benchmark attention that claims linear cost: how its time grows with the tokens, and the error of SOFT's low rank.

Time: softmax (torch SDPA; FlashAttention on CUDA), `soft` and `linear`, without a mask; on CUDA from a CUDA graph,
since Python launches the kernels of a short call more slowly than they run. The exponent is the slope of time against
length, both logarithmic, over the longer half of the lengths, where constants matter least. Error: SOFT against the
full Gaussian kernel that it approximates, in float64 with K = Q as in the paper, by the number of landmarks and by the
steps of Newton's inverse.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from statistics import linear_regression

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attnorm.attention import attention
from attnorm.mechanisms.soft import NEWTON_STEPS, RIDGE, gaussian_logits, newton_inverse, segment_means, square_means
from attnorm.normalizers.registry import get
from attnorm.text import count_words
from attnorm_lab.bench.attention import WAYS, WIDTH, attention_call
from attnorm_lab.bench.results import Result
from attnorm_lab.bench.timing import MEGABYTE, Bench, time_alone

LINEAR_HEADS = 4
LINEAR_LENGTHS = tuple(2**power for power in range(10, 17))
QUICK_LINEAR_LENGTHS = (128, 256, 512)
ONCE_SECONDS = 5.0  # a longer call is measured once: softmax at 65,536 tokens takes minutes on a CPU
LANDMARK_SQUARES = (4, 7, 10, 14, 20, 28)  # landmarks along each side of the image
SCALE = WIDTH**-0.5
NEWTON_STEPS_TRIED = (1, 2, 4, 6, 8, 10, 12, 16, 24)  # besides NEWTON_STEPS
SHORTEST_FITTED = 1024  # tokens
PIXELS = 32  # side of the image whose pixels are the tokens


def measure_linear(bench: Bench) -> Iterator[Result]:
    """Yield the cost of every method by the number of tokens, then the errors of the low rank."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    where = f"{torch.cuda.get_device_name()}, from a CUDA graph" if device.type == "cuda" else "CPU"
    setting = f"{where}, {str(dtype).removeprefix('torch.')}, batch 1, {LINEAR_HEADS} heads, width {WIDTH}, no mask"
    methods: dict[str, Callable[..., Tensor]] = {
        "softmax (SDPA)": scaled_dot_product_attention,
        "soft (49 landmarks)": partial(attention, normalizer=get("soft")),
        "linear": partial(attention, normalizer=get("linear")),
    }
    for way, backward in WAYS.items():
        softmax: dict[int, float] = {}
        for name, attend in methods.items():
            lengths = QUICK_LINEAR_LENGTHS if bench.quick else LINEAR_LENGTHS
            costs = {n: _cost(attend, n, device, dtype, backward=backward, quick=bench.quick) for n in lengths}
            ms = {length: cost[0] for length, cost in costs.items()}
            softmax = softmax or ms
            yield bench.result(f"Cost against tokens: ms, {way}, {setting}", name, cost_numbers(ms, softmax))
            if device.type == "cuda":
                extra = {f"{length:,}": cost[1] for length, cost in costs.items()}
                yield bench.result(f"Cost against tokens: MB, {way}, {setting}", name, extra)
    yield from measure_errors(bench)


def cost_numbers(ms: dict[int, float], softmax: dict[int, float]) -> dict[str, float | None]:
    """Return the columns of a method: ms by length, the power of the length, and where it gets faster than softmax.

    The power is the slope of log time against log length, by least squares over the longer half of the lengths. Short
    lengths have none: what a call costs at any length takes most of their time. A method is faster from a length if it
    is at all longer ones too; None: nowhere.
    """
    numbers: dict[str, float | None] = {f"{length:,}": value for length, value in ms.items()}
    upper = list(ms)[len(ms) // 2 - (len(ms) < 4) :]
    if len(upper) > 1 and upper[0] >= SHORTEST_FITTED:
        numbers["power"] = linear_regression([math.log(n) for n in upper], [math.log(ms[n]) for n in upper]).slope
    if ms is not softmax:
        slower = [length for length in ms if ms[length] >= softmax[length]]
        numbers["faster_from"] = next((length for length in ms if not slower or length > slower[-1]), None)
    return numbers


def _cost(
    attend: Callable[..., Tensor], length: int, device: torch.device, dtype: torch.dtype, *, backward: bool, quick: bool
) -> tuple[float, float | None]:
    """Return the milliseconds of a call, and on CUDA the MB that it takes above the memory before."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, LINEAR_HEADS, length, WIDTH)
    tensors = [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(3)]
    call = attention_call(attend, tensors, backward=backward)
    first_ms = time_alone(call, rounds=1)  # kernels are compiled and memory is reserved outside the measurement
    if device.type == "cpu" and first_ms > 1e3 * ONCE_SECONDS:
        return first_ms, None
    extra_mb = None
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        extra_mb = (torch.cuda.max_memory_allocated() - before) / MEGABYTE
        call = attention_call(attend, tensors, backward=backward, from_graph=True)
    return time_alone(call, rounds=1 if quick else 3), extra_mb


def measure_errors(bench: Bench) -> Iterator[Result]:
    """Yield the error of the output, relative in the Frobenius norm, for smooth and for independent tokens."""
    side = 8 if bench.quick else PIXELS
    sides = (2, 4) if bench.quick else LANDMARK_SQUARES
    tried = (1,) if bench.quick else NEWTON_STEPS_TRIED
    cases = [(pooling, square**2, NEWTON_STEPS) for pooling in POOLINGS for square in sides]
    cases += [("squares", sides[1] ** 2, steps) for steps in tried]
    for kind, tokens in (("smooth image", smooth_tokens(side)), ("independent tokens", independent_tokens(side))):
        table = f"SOFT against the full Gaussian kernel, {kind}, {side**2:,} tokens, width {WIDTH}, float64"
        v = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        exact = torch.exp(gaussian_logits(tokens, tokens, SCALE)) @ v
        for pooling, landmarks, steps in cases:
            what = f"{landmarks} landmarks, means of {pooling}, {count_words(steps, 'Newton step')}"
            centers = POOLINGS[pooling](tokens, landmarks)
            yield bench.result(table, what, _errors(tokens, centers, v, exact, steps))


def _errors(tokens: Tensor, centers: Tensor, v: Tensor, exact: Tensor, steps: int) -> dict[str, float]:
    to_centers = torch.exp(gaussian_logits(tokens, centers, SCALE))
    among = torch.exp(gaussian_logits(centers, centers, SCALE))
    inverse = newton_inverse(among, steps)
    exact_inverse = torch.linalg.inv(among + RIDGE * torch.eye(len(among[0, 0]), dtype=among.dtype))
    output = to_centers @ (inverse @ (to_centers.transpose(-1, -2) @ v))
    return {"error": _relative_error(output, exact), "inverse_error": _relative_error(inverse, exact_inverse)}


def means_of_segments(tokens: Tensor, count: int) -> Tensor:
    """Landmarks as `soft` has them by default: means of segments in reading order."""
    return segment_means(tokens, torch.ones_like(tokens[..., :1], dtype=torch.bool), count)


def means_of_squares(tokens: Tensor, count: int) -> Tensor:
    """Landmarks as means of the squares of a grid, which is close to the paper's convolution."""
    return square_means(tokens, round(count**0.5))


POOLINGS = {"segments": means_of_segments, "squares": means_of_squares}


def _relative_error(approximation: Tensor, exact: Tensor) -> float:
    return float((approximation - exact).norm() / exact.norm())


def independent_tokens(side: int) -> Tensor:
    """Standard normal tokens (1, 1, side^2, width): far from each other, so that the kernel is almost the identity."""
    return torch.randn(1, 1, side**2, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def smooth_tokens(side: int) -> Tensor:
    """Tokens of an image in reading order that change slowly over the grid: waves of at most one period."""
    generator = torch.Generator().manual_seed(0)
    waves, phase = torch.rand(3, WIDTH, generator=generator, dtype=torch.float64).split((2, 1))
    y, x = torch.meshgrid(*(2 * [torch.arange(side, dtype=torch.float64) / side]), indexing="ij")
    positions = torch.stack([y.flatten(), x.flatten()], dim=-1)
    return (2**0.5 * torch.sin(2 * torch.pi * (positions @ (2 * waves - 1) + phase)))[None, None]
