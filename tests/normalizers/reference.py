"""Naive normalizers, one visible row at a time, written from the papers' formulas and sharing no code with the package.

Each takes the visible logits of one row and returns its weights, in the dtype it is given: in float64 it is the
oracle, in a lower dtype the plain version whose error ours is compared with. `rowwise` puts them under a mask.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

PRINTED_POLYNOMIAL = (-0.037, 0.481, -2.3, 4.917, -1.791)


def rowwise(
    naive: Callable[..., Tensor],
    logits: Tensor,
    mask: Tensor | None = None,
    /,
    *,
    dtype: torch.dtype = torch.float64,
    **options: object,
) -> Tensor:
    """The naive function on the visible keys of every row, zeros elsewhere.

    An option that is callable and takes (query, keys) is called for every row with the index of the query and those of
    its visible keys.
    """
    rows = logits.detach().to(dtype).flatten(0, -2)
    seen = (torch.ones_like(logits, dtype=torch.bool) if mask is None else mask.expand(logits.shape)).flatten(0, -2)
    weights = torch.zeros_like(rows)
    for i, (row, visible) in enumerate(zip(rows, seen, strict=True)):
        keys = visible.nonzero()[:, 0]
        if len(keys):
            query = i % logits.shape[-2]
            chosen = {name: value(query, keys) if callable(value) else value for name, value in options.items()}
            weights[i, keys] = naive(row[keys], **chosen)
    return weights.reshape(logits.shape)


def softmax(z: Tensor, temperature: float = 1.0) -> Tensor:
    e = torch.exp((z - z.max()) / temperature)
    return e / e.sum()


def sparsemax(z: Tensor) -> Tensor:
    """By sorting: the support is the longest prefix with 1 + k z_(k) > sum of the k largest."""
    z = z - z.max()
    ordered = z.sort(descending=True).values
    sums = ordered.cumsum(0)
    k = int((1 + torch.arange(1, len(z) + 1) * ordered > sums).nonzero().max()) + 1
    return (z - (sums[k - 1] - 1) / k).clamp(min=0)


def entmax15(z: Tensor) -> Tensor:
    """By sorting: the threshold at which the squares of each prefix sum to 1; the right one lies below its last key."""
    z = (z - z.max()) / 2
    ordered = z.sort(descending=True).values
    counts = torch.arange(1, len(z) + 1)
    mean = ordered.cumsum(0) / counts
    spread = (ordered**2).cumsum(0) - counts * mean**2
    thresholds = mean - ((1 - spread).clamp(min=0) / counts).sqrt()
    k = int((thresholds <= ordered).sum())
    return (z - thresholds[k - 1]).clamp(min=0) ** 2


def entmax(z: Tensor, alpha: float) -> Tensor:
    """By bisection on mu, which lies in [0, (1 - n^(1-alpha)) / (alpha-1)] with the largest logit at 0; alpha > 1."""
    d, z = alpha - 1, z - z.max()

    def weights(mu: float) -> Tensor:
        return torch.exp(torch.log1p((d * (z - mu)).clamp(min=-1)) / d)

    low, high = 0.0, -math.expm1(-d * math.log(len(z))) / d
    for _ in range(70):
        middle = (low + high) / 2
        low, high = (middle, high) if weights(middle).sum() >= 1 else (low, middle)
    return weights(low)


def kneemax(z: Tensor, share: float = 1.0, knee: float | None = None) -> Tensor:
    """By bisection on tau: Huber's function of z/2 - tau, quadratic up to twice the knee share/n, linear beyond."""
    z, knee = (z - z.max()) / 2, share / len(z) if knee is None else knee

    def weights(tau: float) -> Tensor:
        t = (z - tau).clamp(min=0)
        return torch.where(t <= 2 * knee, t**2 / (4 * knee), t - knee)

    low, high = -1 - knee - 2 * math.sqrt(knee), 0.0
    for _ in range(70):
        middle = (low + high) / 2
        low, high = (middle, high) if weights(middle).sum() >= 1 else (low, middle)
    return weights(low)


def ssmax(z: Tensor, s: float, bias: float = 0.0) -> Tensor:
    """n^(s z) over its sum, as printed."""
    z = z - z.max()
    powers = float(len(z)) ** (s * z) * torch.exp(bias * z)
    return powers / powers.sum()


def asentmax(z: Tensor, delta: float, beta: float, gamma: float) -> Tensor:
    return entmax15((delta + beta * math.log(len(z) + 1) ** gamma) * z)


def entropy(p: Tensor) -> float:
    return -sum(x * math.log(x) for x in p.tolist() if x > 0)


def adaptive_temperature(z: Tensor, coefficients: tuple[float, ...] = PRINTED_POLYNOMIAL) -> Tensor:
    h = entropy(softmax(z))
    beta = sum(c * h**power for power, c in enumerate(reversed(coefficients)))
    return softmax((max(beta, 1.0) if h > 0.5 else 1.0) * z)


def sa_plain(z: Tensor) -> Tensor:
    return z * softmax(z)


def sa_normalised(z: Tensor) -> Tensor:
    low, high = z.min().clamp(max=0), z.max().clamp(min=0)
    return (z - low) / (high - low) * softmax(z)


def sigmoid(z: Tensor, bias: float | None = None) -> Tensor:
    return 1 / (1 + torch.exp(-(z + (-math.log(len(z)) if bias is None else bias))))


def sink(z: Tensor, logit: float = 0.0) -> Tensor:
    return softmax(torch.cat([z, torch.tensor([logit], dtype=z.dtype)]))[:-1]


def relu(z: Tensor, power: float = 1.0) -> Tensor:
    return z.clamp(min=0) ** power / len(z)


def softpick(z: Tensor, eps: float = 1e-8) -> Tensor:
    above = torch.expm1(z)
    return above.clamp(min=0) / (above.abs().sum() + eps)


def stick_breaking(z: Tensor, current: int | None = None) -> Tensor:
    """The last key breaks off its share first. The current key, if given, breaks off nothing and gets what is left."""
    left, weights = torch.ones((), dtype=z.dtype), torch.zeros_like(z)
    for j in reversed(range(len(z))):
        if j != current:
            weights[j] = left / (1 + torch.exp(-z[j]))
            left = left / (1 + torch.exp(z[j]))
    if current is not None:
        weights[current] = left
    return weights


def topk(z: Tensor, k: int) -> Tensor:
    """Softmax over the k largest; keys tied with the k-th are kept."""
    kept = z >= z.sort(descending=True).values[min(k, len(z)) - 1]
    weights = torch.zeros_like(z)
    weights[kept] = softmax(z[kept])
    return weights


def hard(z: Tensor) -> Tensor:
    best = (z == z.max()).to(z.dtype)
    return best / best.sum()


def scaled(z: Tensor, factor: float) -> Tensor:
    return softmax(factor * z)


def scale_invariant(z: Tensor, distance: Tensor, tau: float = 10.0) -> Tensor:
    far = torch.log(1 + distance.to(z.dtype).abs() / tau)
    return softmax(torch.sqrt(2 * far + 1) * z - 2 * far)


def kernel(z: Tensor, function: str) -> Tensor:
    values = {
        "exp": lambda: torch.exp(z),
        "softplus": lambda: torch.log(1 + torch.exp(z)),
        "elu+1": lambda: torch.where(z > 0, z + 1, torch.exp(z)),
        "square": lambda: z * z,
    }[function]()
    return values / values.sum()


def local(z: Tensor, distance: Tensor, window: int) -> Tensor:
    near = distance.abs() < window
    weights = torch.zeros_like(z)
    if near.any():
        weights[near] = softmax(z[near])
    return weights
